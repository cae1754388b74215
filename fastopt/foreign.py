"""NumPy views of arrays of other libraries: torch tensors on the CPU, DLPack, buffers.

Nothing is copied, and no library is imported. A view serves again as long as its array is the same
object and its memory, shape and dtype are what they were, which is compared in every call.
"""

import ctypes
import sys
from functools import cache
from typing import Any, NamedTuple
from weakref import ref

import numpy as np

from fastopt.kernels.devices import is_cuda
from fastopt.kernels.layout import bfloat16
from fastopt.sparse import RowSparse

__all__ = ["as_gradient", "as_weight", "is_foreign", "latest"]

Array = np.ndarray[Any, Any]

OURS = (np.ndarray, np.generic, RowSparse, tuple, list, dict, str, type(None))
ADVICE = "update a NumPy copy, np.array(x), and assign it back"


class _Known(NamedTuple):
    """The view of an array that outlives it no longer than the view is used."""

    view: "ref[Array]"
    owner: Any
    signature: tuple[Any, ...]


_known: dict[int, _Known] = {}
"""Views by the id of their array."""


def is_foreign(array: Any) -> bool:
    """Whether `array` has memory on the host that NumPy can view, and is not a NumPy array."""
    if isinstance(array, OURS):
        return False
    if _is_tensor(array):
        return not array.is_cuda
    if is_cuda(array):
        return False
    return hasattr(type(array), "__dlpack__") or _is_buffer(array)


def as_weight(array: Any) -> Any:
    """Return a NumPy view of a foreign array that may be written to; others as they are.

    Raises
    ------
    TypeError
        There is no NumPy view of such an array.
    ValueError
        The array is immutable.
    """
    known = _known.get(id(array))
    if known is not None and _is_tensor(array):
        view = known.view()
        if view is not None and known.signature == _signature(array):
            return view
    if not is_foreign(array):
        return array
    if _is_tensor(array):
        made = _of_tensor("weight", array)
        return _keep(array, made, _signature(array))
    made = _imported("weight", array)
    if not made.flags.writeable:
        raise ValueError(f"weight is a {type(array).__name__}, which is read-only: {ADVICE}")
    interface = made.__array_interface__
    signature = tuple(interface[name] for name in ("data", "shape", "strides", "typestr"))
    if known is not None and known.signature == signature:
        view = known.view()
        if view is not None:
            return view
    return _keep(array, made, signature)


def as_gradient(grad: Any) -> Any:
    """Return a NumPy view, or a RowSparse, of a foreign gradient; others as they are.

    Raises
    ------
    TypeError
        There is no NumPy view of such an array.
    """
    if isinstance(grad, OURS):
        if isinstance(grad, (tuple, list)) and len(grad) == 2 and any(map(is_foreign, grad)):
            return tuple(map(as_gradient, grad))
        return grad
    if _is_tensor(grad):
        if grad.is_cuda:
            return grad
        torch = sys.modules["torch"]
        if grad.layout is torch.sparse_coo:
            return _row_sparse(grad)
        return _of_tensor("gradient", grad.resolve_neg() if grad.is_neg() else grad)
    return _imported("gradient", grad) if is_foreign(grad) else grad


def latest(view: Any) -> Any:
    """Return the present view of the array that `view` was made for; others as they are."""
    for known in list(_known.values()):
        if known.view() is view:
            return as_weight(known.owner)
    return view


def _is_tensor(array: Any) -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(array, torch.Tensor)


def _is_buffer(array: Any) -> bool:
    try:
        memoryview(array)
    except (TypeError, ValueError, BufferError):
        return False
    return True


def _keep(array: Any, view: Array, signature: tuple[Any, ...]) -> Array:
    """Know the view of an array, which lives as long as that."""
    key = id(array)

    def forget(of: Any) -> None:
        found = _known.get(key)
        if found is not None and found.view is of:
            del _known[key]

    _known[key] = _Known(ref(view, forget), array, signature)
    return view


def _imported(role: str, array: Any) -> Array:
    """New NumPy view of an array by DLPack or the buffer protocol, which keeps it alive."""
    try:
        if not hasattr(type(array), "__dlpack__"):
            return np.asarray(memoryview(array))
        try:
            return np.from_dlpack(array)
        except (BufferError, RuntimeError, TypeError):
            if hasattr(type(array), "__array__"):  # of a dtype that DLPack or NumPy lacks
                made = np.asarray(array)
                made.flags.writeable = False
                return made
            raise
    except Exception as error:
        words = f"{role} is a {type(array).__name__} that NumPy cannot view"
        raise TypeError(f"{words}: {error}") from error


# Tensors of torch


def _signature(tensor: Any) -> tuple[Any, ...]:
    """What changes when a tensor is moved, reshaped or converted in place."""
    return tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype, tensor.is_neg()


def _of_tensor(role: str, tensor: Any) -> Array:
    """New view of a tensor on the CPU, with or without ``requires_grad``; it keeps it alive.

    Tensor.numpy() would forbid torch to resize the tensor for good.
    """
    torch = sys.modules["torch"]
    if tensor.layout is not torch.strided:
        raise TypeError(f"{role} must be a dense tensor, got layout {tensor.layout}")
    if not tensor.is_cpu:
        raise TypeError(f"{role} must be a tensor on the CPU or CUDA, got one on {tensor.device}")
    if tensor.is_neg():
        raise TypeError(f"{role} is a lazily negated view: pass x.resolve_neg()")
    if tensor.is_conj():
        raise TypeError(f"{role} must be a real tensor, got a conjugate view of {tensor.dtype}")
    try:
        address = tensor.data_ptr()
    except (RuntimeError, ValueError) as error:
        raise TypeError(f"{role} has no memory of its own: {error}") from error
    shape, strides, dtype = tensor.shape, tensor.stride(), _dtype(role, tensor.dtype)
    size = dtype.itemsize
    if not address and tensor.numel():
        raise TypeError(f"{role} has no memory of its own")
    last = sum((n - 1) * step for n, step in zip(shape, strides, strict=True))
    memory: Any = (ctypes.c_char * ((last + 1) * size if tensor.numel() else 0)).from_address(
        address
    )
    memory.owner = tensor
    return np.ndarray(shape, dtype, memory, 0, [step * size for step in strides])


@cache
def _dtype(role: str, kind: Any) -> np.dtype[Any]:
    """NumPy's dtype for one of torch's."""
    name = str(kind).removeprefix("torch.")
    try:
        found: np.dtype[Any] = bfloat16() if name == "bfloat16" else np.dtype(name)
    except TypeError:
        raise TypeError(f"{role} has dtype {kind}, which NumPy lacks") from None
    return found


def _row_sparse(grad: Any) -> RowSparse:
    """Gradient of a sparse COO tensor, such as ``torch.nn.Embedding(sparse=True)`` has."""
    if grad.sparse_dim() != 1:
        raise TypeError(
            f"gradient must be sparse by rows, with sparse_dim 1, got {grad.sparse_dim()}; "
            "x.to_dense() is a dense gradient"
        )
    values, indices = (_of_tensor("gradient", part) for part in (grad._values(), grad._indices()))
    return RowSparse(values, indices[0], tuple(grad.shape))
