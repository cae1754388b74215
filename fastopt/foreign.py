"""NumPy views of arrays of other libraries: torch tensors on the CPU, DLPack, buffers.

Nothing is copied, and no library is imported. A view serves again as long as its array is the same
object and its memory, shape and dtype are what they were, which is compared in every call.
"""

import sys
from collections.abc import Sequence
from typing import Any, NamedTuple
from weakref import ref

import numpy as np

from fastopt.kernels.devices import Described, is_cuda
from fastopt.kernels.layout import bfloat16
from fastopt.sparse import RowSparse

__all__ = ["as_gradient", "as_weight", "is_foreign", "latest", "written"]

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


def as_weight(label: str, array: Any) -> Any:
    """Return a NumPy view of a foreign array that may be written to; others as they are.

    Raises
    ------
    TypeError
        There is no NumPy view of such an array.
    ValueError
        The array is immutable.
    """
    if not is_foreign(array):
        return array
    view = _view(f"{label}: weight", array)
    if not view.flags.writeable:
        kind = type(array).__name__
        raise ValueError(f"{label}: weight is a {kind}, which is read-only: {ADVICE}")
    return view


def as_gradient(label: str, grad: Any) -> Any:
    """Return a NumPy view, or a RowSparse, of a foreign gradient; others as they are.

    Raises
    ------
    TypeError
        There is no NumPy view of such an array.
    """
    label = f"{label}: gradient"
    if isinstance(grad, (tuple, list)) and len(grad) == 2 and any(map(is_foreign, grad)):
        return tuple(_view(label, part) if is_foreign(part) else part for part in grad)
    if not is_foreign(grad):
        return grad
    if _is_tensor(grad):
        torch = sys.modules["torch"]
        if grad.layout is torch.sparse_coo:
            return _row_sparse(label, grad)
        grad = grad.resolve_neg()
    return _view(label, grad)


def written(weights: Sequence[Any]) -> None:
    """Tell torch that tensors have been changed in place, so that it refuses stale graphs."""
    torch = sys.modules.get("torch")
    if torch is not None:
        increment = torch.autograd.graph.increment_version
        for weight in weights:
            if isinstance(weight, torch.Tensor):
                increment(weight)


def latest(view: Any) -> Any:
    """Return the present view of the array that `view` was made for; others as they are."""
    for known in list(_known.values()):
        if known.view() is view:
            return as_weight("the weight", known.owner)
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


def _view(label: str, array: Any) -> Array:
    """NumPy view of a foreign array; the same one as long as it holds."""
    key, known = id(array), _known.get(id(array))
    view = None if known is None else known.view()
    if _is_tensor(array):
        if view is not None and known is not None and known.signature == _signature(array):
            return view
        signature, made = _of_tensor(label, array)
    else:
        made = _imported(label, array)
        interface = made.__array_interface__
        signature = tuple(interface[name] for name in ("data", "shape", "strides", "typestr"))
        if view is not None and known is not None and known.signature == signature:
            return view

    def forget(of: Any) -> None:
        found = _known.get(key)
        if found is not None and found.view is of:
            del _known[key]

    _known[key] = _Known(ref(made, forget), array, signature)
    return made


def _imported(label: str, array: Any) -> Array:
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
        words = f"{label} is a {type(array).__name__} that NumPy cannot view"
        raise TypeError(f"{words}: {error}") from error


# Tensors of torch


def _signature(tensor: Any) -> tuple[Any, ...]:
    """What changes when a tensor is moved, reshaped or converted in place."""
    return tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype, tensor.is_neg()


def _of_tensor(label: str, tensor: Any) -> tuple[tuple[Any, ...], Array]:
    """Signature and new view of a tensor on the CPU, with or without ``requires_grad``.

    Tensor.numpy() would forbid torch to resize the tensor for good.
    """
    torch = sys.modules["torch"]
    if tensor.layout is not torch.strided:
        raise TypeError(f"{label} must be a dense tensor, got layout {tensor.layout}")
    if tensor.device.type != "cpu":
        raise TypeError(f"{label} must be a tensor on the CPU or CUDA, got one on {tensor.device}")
    if tensor.is_neg():
        raise TypeError(f"{label} is a lazily negated view: pass x.resolve_neg()")
    if tensor.is_conj():
        raise TypeError(f"{label} must be a real tensor, got a conjugate view of {tensor.dtype}")
    try:
        signature = _signature(tensor)
    except (RuntimeError, ValueError) as error:
        raise TypeError(f"{label} has no memory of its own: {error}") from error
    address, shape, strides, kind, _ = signature
    if not address and tensor.numel():
        raise TypeError(f"{label} has no memory of its own")
    half = kind is torch.bfloat16
    try:
        dtype = np.dtype("V2" if half else str(kind).removeprefix("torch."))
    except TypeError:
        raise TypeError(f"{label} has dtype {kind}, which NumPy lacks") from None
    view = np.asarray(
        Described(
            {
                "version": 3,
                "data": (address or 8, False),  # NumPy would allocate memory at 0
                "shape": tuple(shape),
                "typestr": dtype.str,
                "strides": tuple(stride * dtype.itemsize for stride in strides),
            }
        )
    )
    return signature, view.view(bfloat16()) if half else view


def _row_sparse(label: str, grad: Any) -> RowSparse:
    """Gradient of a sparse COO tensor, such as ``torch.nn.Embedding(sparse=True)`` has."""
    if grad.sparse_dim() != 1:
        raise TypeError(
            f"{label} must be sparse by rows, with sparse_dim 1, got {grad.sparse_dim()}; "
            "x.to_dense() is a dense gradient"
        )
    values, indices = (_of_tensor(label, x.detach())[1] for x in (grad._values(), grad._indices()))
    return RowSparse(values, indices[0], tuple(grad.shape))
