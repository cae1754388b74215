"""NumPy views of the parameters and gradients of a group, which are kept between steps."""

import ctypes
from collections.abc import Sequence
from itertools import count
from operator import attrgetter
from typing import Any, NamedTuple

import numpy as np
import torch

from fastopt._foreign import Array, as_gradient, of_tensor

GRAD = attrgetter("grad")
ADDRESS, IS_CONTIGUOUS, SIZE = torch.Tensor.data_ptr, torch.Tensor.is_contiguous, torch.Tensor.size
DTYPE = torch.Tensor.dtype.__get__
IS_NEGATED = torch.Tensor.is_neg

DTYPES = {torch.float32, torch.float64, torch.float16, torch.bfloat16}


def check_parameter(name: str, tensor: object) -> None:
    """Raise an error for a parameter that cannot be updated in place by NumPy."""
    if not isinstance(tensor, torch.Tensor):
        return  # torch's own error
    if not tensor.is_cpu:
        raise TypeError(
            f"{name} is on {tensor.device}, and fastopt.torch updates tensors on the CPU: move the "
            f"model with model.cpu(), or use torch.optim for the parameters on {tensor.device}"
        )
    if tensor.dtype.is_complex:
        raise TypeError(
            f"{name} is complex ({tensor.dtype}): make torch.view_as_real(x) the parameter, and "
            "torch.view_as_complex of it in the model"
        )
    if tensor.dtype not in DTYPES:
        raise TypeError(
            f"{name} has dtype {tensor.dtype}; fastopt updates float32, float64, float16 and "
            "bfloat16"
        )
    if tensor.layout is not torch.strided:
        raise TypeError(f"{name} has layout {tensor.layout}, and must be dense")
    if tensor.is_neg():
        raise TypeError(f"{name} is a lazily negated view of its memory: pass x.resolve_neg()")
    if tensor.is_inference():
        raise RuntimeError(f"{name} was created in torch.inference_mode(): pass x.clone()")


class Form(NamedTuple):
    """What a contiguous gradient of a parameter has."""

    shape: tuple[int, ...]
    dtype: Any
    numpy: np.dtype[Any]
    memory: Any
    """Type of its memory."""


class Views:
    """Views of parameters, and of their gradients at the addresses of the last step.

    A gradient's view does not keep its memory alive. It is used only if the gradient of a step has
    the same address, dtype and shape, and its values are not lazily negated.

    Parameters
    ----------
    params : list of torch.Tensor
        The parameters.
    names : list of str
        Their names in errors.
    numbers : list of int
        Their indices in the updater.
    """

    def __init__(
        self, params: Sequence[torch.Tensor], names: Sequence[str], numbers: Sequence[int]
    ) -> None:
        self.params, self.indices, self.names = list(params), list(numbers), list(names)
        self.addresses = list(map(ADDRESS, params))
        self.contiguous = list(map(IS_CONTIGUOUS, params))
        self.forms: list[Form] = []
        self.arrays: list[Array] = []
        for k in range(len(params)):
            array, form = self._view(k)
            self.arrays.append(array)
            self.forms.append(form)
        self.grad_addresses: list[int] = [-1] * len(self.arrays)
        self.grads: list[Any] = [None] * len(self.arrays)
        self.whole = True
        """Whether all parameters had dense gradients in the last step."""
        self.sizes, self.dtypes = list(map(SIZE, params)), list(map(DTYPE, params))
        self.strides = [p.stride() for p in params] if not all(self.contiguous) else None

    def _view(self, k: int) -> tuple[Array, Form]:
        """Return a view of a parameter, and what its gradients have."""
        name, param = self.names[k], self.params[k]
        check_parameter(name, param)
        array = of_tensor(name, param.detach())
        kind = ctypes.c_char * array.nbytes
        return array, Form(param.shape, param.dtype, array.dtype, kind)

    def fit(self, params: Sequence[torch.Tensor]) -> bool:
        """Whether the parameters have the memory that the views have.

        They may have another shape or dtype there, which are those of their gradients too.
        """
        return (
            list(map(ADDRESS, params)) == self.addresses
            and list(map(IS_CONTIGUOUS, params)) == self.contiguous
            and not any(map(IS_NEGATED, params))
            and (self.strides is None or self.strides == [p.stride() for p in params])
        )

    def of(self, grads: Sequence[torch.Tensor]) -> list[Any]:
        """Return the gradients of all parameters, as arrays or row-sparse.

        Raises
        ------
        TypeError, RuntimeError
            A gradient is None or sparse.
        ValueError
            NumPy cannot view a gradient.
        """
        addresses = list(map(ADDRESS, grads))
        if (
            addresses == self.grad_addresses
            and list(map(DTYPE, grads)) == self.dtypes
            and list(map(SIZE, grads)) == self.sizes
            and all(map(IS_CONTIGUOUS, grads))
            and not any(map(IS_NEGATED, grads))
        ):
            return self.grads
        return [self._of(*each) for each in zip(count(), addresses, grads)]

    def _of(self, k: int, address: int, grad: torch.Tensor) -> Any:
        """Return the gradient of one parameter."""
        form = self.forms[k]
        if not (
            address
            and grad.dtype is form.dtype
            and grad.shape == form.shape
            and grad.is_contiguous()
            and not grad.is_neg()
        ):
            self.grad_addresses[k] = -1
            param = self.params[k]
            if param.shape == form.shape and param.dtype is form.dtype:
                return self._converted(k, grad)
            self.arrays[k], self.forms[k] = self._view(k)
            self.sizes[k], self.dtypes[k] = param.shape, param.dtype
            return self._of(k, address, grad)
        if address != self.grad_addresses[k]:
            memory = form.memory.from_address(address)
            self.grads[k] = np.ndarray(form.shape, form.numpy, memory)
            self.grad_addresses[k] = address
        return self.grads[k]

    def _converted(self, k: int, grad: torch.Tensor) -> Any:
        """Return a gradient that is not laid out like its parameter, or row-sparse."""
        try:
            return as_gradient(grad)
        except (TypeError, ValueError) as error:
            raise ValueError(f"{self.names[k]}: {error}") from error

    def some(self, grads: Sequence[Any]) -> tuple[list[int], list[Any], list[Array]]:
        """Return indices, gradients and parameters of those that have a gradient."""
        present = [k for k, grad in enumerate(grads) if grad is not None]
        self.whole = len(present) == len(grads)
        arrays = []
        for k in present:
            dense = grads[k].layout is torch.strided
            self.whole &= dense
            arrays.append(self._of(k, grads[k].data_ptr() if dense else 0, grads[k]))
        indices = [self.indices[k] for k in present]
        return indices, arrays, [self.arrays[k] for k in present]
