"""NumPy views of the parameters and gradients of a group, which are kept between steps.

Tests: ``tests/pytorch/test_torch.py``.
"""

import ctypes
import math
from collections import deque
from collections.abc import Sequence
from functools import partial, reduce
from operator import attrgetter, is_, or_
from typing import Any

import numpy as np
import torch

from fastopt._foreign import Array, as_gradient, as_real, of_tensor, resolved
from fastopt._kernels.numpy_abi import DATA, readable
from fastopt.sparse import RowSparse

GRAD = attrgetter("grad")
ADDRESS, IS_CONTIGUOUS, SIZE = torch.Tensor.data_ptr, torch.Tensor.is_contiguous, torch.Tensor.size
DTYPE = torch.Tensor.dtype.__get__
IS_NEGATED, IS_CONJUGATED = torch.Tensor.is_neg, torch.Tensor.is_conj
POINT = vars(ctypes.c_int64.mro()[1])["value"].__set__
consume = deque[None](maxlen=0).extend

REALS = {
    torch.complex64: torch.float32,
    torch.complex128: torch.float64,
    **{kind: kind for kind in (torch.float32, torch.float64, torch.float16, torch.bfloat16)},
}
"""Dtypes of parameters, with those of their numbers."""


def check_parameter(name: str, tensor: object) -> None:
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
            f"{name} has layout {tensor.layout}, and the optimizer requires dense parameter tensors"
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
    """

    def __init__(
        self,
        params: Sequence[torch.Tensor],
        names: Sequence[str],
        numbers: Sequence[int],
        leading: dict[int, int],
    ) -> None:
        self.params, self.indices, self.names = list(params), list(numbers), list(names)
        self.leading = leading
        for name, param in zip(names, params, strict=True):
            check_parameter(name, param)
        self.addresses = list(map(ADDRESS, params))
        self.contiguous = list(map(IS_CONTIGUOUS, params))
        self.arrays = list(map(self._view, range(len(self.params))))
        self.sizes, self.dtypes = list(map(SIZE, params)), list(map(DTYPE, params))
        self.strides = [p.stride() for p in params] if not all(self.contiguous) else None
        self.is_complex = any(map(torch.is_complex, params))
        self.memory = [ctypes.c_char * each.nbytes for each in self.arrays]
        self.grads = list(map(self.grad_at, range(len(self.params)), self.addresses))
        self.cells = [ctypes.c_int64.from_address(id(each) + DATA) for each in self.grads]
        self.present = Gradients(self, [*range(len(self.params))])

    def _view(self, k: int) -> Array:
        """Return a view of a parameter."""
        index, array = self.indices[k], as_real(of_tensor(self.names[k], self.params[k].detach()))
        return self._merged(k, array) if index in self.leading else array

    def follow(self, k: int, grad: torch.Tensor) -> bool:
        """Return False if the parameter needs another view, for the dimensions of a gradient."""
        param, index = self.params[k], self.indices[k]
        if grad.layout is torch.sparse_coo and grad.sparse_dim() != self.leading.get(index, 1):
            self.leading[index] = grad.sparse_dim()
            return False
        return param.shape == self.sizes[k] and param.dtype is self.dtypes[k]

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

    def fit(self, params: Sequence[torch.Tensor]) -> bool:
        """Whether these are the parameters, with the memory that the views have.

        They may have another shape or dtype there, which are those of their gradients too.
        """
        return (
            len(params) == len(self.params)
            and all(map(is_, params, self.params))
            and list(map(ADDRESS, params)) == self.addresses
            and list(map(IS_CONTIGUOUS, params)) == self.contiguous
            and not any(map(IS_NEGATED, params))
            and (self.strides is None or self.strides == [p.stride() for p in params])
        )

    def grad_at(self, k: int, address: int) -> Array:
        """Return a contiguous gradient of a parameter, which does not keep its memory alive."""
        memory: Any = self.memory[k].from_address(address)
        return np.ndarray(self.arrays[k].shape, self.arrays[k].dtype, memory)

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

    The arrays are made once. :meth:`at` writes the addresses of gradients to their headers, which
    takes a tenth of the time of new arrays. They are used only in the step whose gradients lie
    there.

    Parameters
    ----------
    views : Views
        The parameters.
    positions : sequence of int
        Positions of those that have gradients.
    """

    def __init__(self, views: Views, positions: Sequence[int]) -> None:
        def own(known: Sequence[Any]) -> list[Any]:
            return [known[k] for k in positions]

        self.views, self.positions = views, positions
        self.params, self.indices, self.arrays = (
            own(views.params),
            own(views.indices),
            own(views.arrays),
        )
        self.sizes, self.dtypes = own(views.sizes), own(views.dtypes)
        self.grads, self.cells = own(views.grads), own(views.cells)
        self.is_readable = readable()
        self.addresses: list[int] = []
        self.unaligned = max((each.itemsize for each in self.arrays), default=1) - 1

    def at(self, grads: Sequence[torch.Tensor]) -> list[Array] | None:
        """Return the arrays of gradients, or None if one has another form than its parameter.

        Raises
        ------
        TypeError, RuntimeError
            A gradient is None or sparse.
        """
        addresses = list(map(ADDRESS, grads))
        if not (
            list(map(DTYPE, grads)) == self.dtypes
            and list(map(SIZE, grads)) == self.sizes
            and all(map(IS_CONTIGUOUS, grads))
            and not any(map(IS_NEGATED, grads))
            and not (self.views.is_complex and any(map(IS_CONJUGATED, grads)))
        ):
            return None
        if self.is_readable and addresses == self.addresses:
            return self.grads
        if not all(addresses) or reduce(or_, addresses, 0) & self.unaligned:
            return None
        if self.is_readable:
            consume(map(POINT, self.cells, addresses))
            self.addresses = addresses
            return self.grads
        return list(map(self.views.grad_at, self.positions, addresses))
