"""NumPy views of the parameters and gradients of a group, which are kept between steps.

Tests: ``tests/pytorch/test_torch.py``.
"""

import ctypes
import math
from collections.abc import Sequence
from functools import partial
from operator import attrgetter
from typing import Any

import numpy as np
import torch

from fastopt._foreign import Array, as_gradient, as_real, of_tensor, resolved
from fastopt._kernels.numpy_abi import DATA
from fastopt.sparse import RowSparse
from fastopt.torch.tensors import Places, Same, Snapshot

GRAD = attrgetter("grad")

REALS = {
    torch.complex64: torch.float32,
    torch.complex128: torch.float64,
    **{kind: kind for kind in (torch.float32, torch.float64, torch.float16, torch.bfloat16)},
}
"""Dtypes of parameters, with those of their numbers."""


def check_parameter(name: str, tensor: object, kind: str = "the optimizer") -> None:
    """Raise an error for a parameter that cannot be updated in place by NumPy."""
    if not isinstance(tensor, torch.Tensor):
        return  # torch's own error
    if not tensor.is_cpu:
        raise TypeError(
            f"{name} is on {tensor.device}, and fastopt.torch updates tensors on the CPU: move the "
            f"model with model.cpu(), or use torch.optim for the parameters on {tensor.device}"
        )
    if tensor.dtype not in REALS:
        raise TypeError(
            f"{name} has dtype {tensor.dtype}; fastopt updates float32, float64, float16, "
            "bfloat16, complex64 and complex128"
        )
    if tensor.layout is not torch.strided:
        raise ValueError(
            f"{name} has layout {tensor.layout}, and {kind} requires dense parameter tensors"
        )
    if tensor.is_neg() or tensor.is_conj():
        kind, cure = ("negated", "neg") if tensor.is_neg() else ("conjugated", "conj")
        raise TypeError(f"{name} is a lazily {kind} view of its memory: pass x.resolve_{cure}()")
    if tensor.is_inference():
        raise RuntimeError(f"{name} was created in torch.inference_mode(): pass x.clone()")


class Views:
    """Views of parameters, and of the gradients of a step.

    Parameters
    ----------
    params : list of torch.Tensor
        The parameters.
    names : list of str
        Their names in errors.
    numbers : list of int
        Their indices in the updater.
    leading : mapping of int to int
        Numbers of leading dimensions that are one in the view of a parameter, by its index, if
        they are not 1: those that its sparse gradients have indices of.
    by_row : bool
        Whether sparse gradients must have whole rows.
    """

    def __init__(
        self,
        params: Sequence[torch.Tensor],
        names: Sequence[str],
        numbers: Sequence[int],
        leading: dict[int, int],
        by_row: bool,
    ) -> None:
        self.params, self.indices, self.names = list(params), list(numbers), list(names)
        self.leading, self.by_row = leading, by_row
        for name, param in zip(names, params, strict=True):
            check_parameter(name, param)
        self.arrays = list(map(self._view, range(len(self.params))))
        self.same, self.snapshot = Same(self.params), Snapshot(self.params)
        self.present = Gradients(self, [*range(len(self.params))])

    def _view(self, k: int) -> Array:
        """Return a view of a parameter."""
        index, array = self.indices[k], as_real(of_tensor(self.names[k], self.params[k].detach()))
        return self._merged(k, array) if index in self.leading else array

    def follow(self, k: int, grad: torch.Tensor) -> bool:
        """Return False if the parameter needs another view, for the dimensions of a gradient."""
        index = self.indices[k]
        if grad.layout is not torch.sparse_coo or grad.sparse_dim() == self.leading.get(index, 1):
            return True
        if self.by_row or not grad.sparse_dim():
            raise ValueError(
                f"{self.names[k]}: a gradient with sparse_dim {grad.sparse_dim()} has no rows, by "
                "which this optimizer, or clip_adaptive, works; x.to_dense() is a dense gradient"
            )
        self.leading[index] = grad.sparse_dim()
        return False

    def _merged(self, k: int, array: Array) -> Array:
        """Return an array in which the leading dimensions are one."""
        count = self.leading[self.indices[k]]
        try:
            return np.reshape(array, (-1, *array.shape[count:]), copy=False)
        except ValueError:
            raise ValueError(
                f"{self.names[k]}: a gradient with sparse_dim {count} needs a parameter and state "
                "that are contiguous; x.to_dense() is a dense gradient"
            ) from None

    def of(self, k: int, grad: torch.Tensor) -> Any:
        """Return the gradient of one parameter, as an array or row-sparse."""
        try:
            if grad.layout is not torch.sparse_coo:
                array = as_real(as_gradient(grad))
                return self._merged(k, array) if self.indices[k] in self.leading else array
            if grad.sparse_dim() > 1:
                grad = self._flat(k, grad)
            values = as_real(of_tensor("gradient", resolved(grad._values())))
            rows = of_tensor("gradient", resolved(grad._indices()))[0]
            return RowSparse(values, rows, self.arrays[k].shape)
        except (TypeError, ValueError) as error:
            raise ValueError(f"{self.names[k]}: {error}") from error

    def _flat(self, k: int, grad: torch.Tensor) -> torch.Tensor:
        """Return a sparse gradient whose rows are elements, or more, of the parameter."""
        count, shape = grad.sparse_dim(), grad.shape
        weights = [math.prod(shape[axis + 1 : count]) for axis in range(count)]
        rows = torch.tensor(weights) @ grad._indices()
        lengths = (math.prod(shape[:count]), *shape[count:])
        make = partial(torch.sparse_coo_tensor, check_invariants=False)
        return make(rows[None], grad._values(), lengths)


class Gradients:
    """Arrays of the gradients of some parameters, whose memory lies elsewhere in each step.

    The arrays are made once. They are used only in the step in which they point to gradients.

    Parameters
    ----------
    views : Views
        The parameters.
    positions : sequence of int
        Positions of those that have gradients.

    Attributes
    ----------
    point : callable
        Points the arrays to gradients, or returns False: one has another form than its parameter.
    """

    def __init__(self, views: Views, positions: Sequence[int]) -> None:
        def own(known: Sequence[Any]) -> list[Any]:
            return [known[k] for k in positions]

        self.positions, self.params, self.indices = positions, own(views.params), own(views.indices)
        self.arrays = own(views.arrays)
        self.grads = list(map(_unowned, self.arrays))
        like = [torch.empty(p.shape, dtype=p.dtype, device="meta") for p in self.params]
        self._places = Places(like, [id(array) + DATA for array in self.grads])
        self.point = self._places.read


def _unowned(array: Array) -> Array:
    """Return a contiguous array of the form of another one, which does not own its memory."""
    memory: Any = (ctypes.c_char * array.nbytes).from_address(array.ctypes.data)
    return np.ndarray(array.shape, array.dtype, memory)
