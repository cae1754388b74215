"""NumPy views of arrays of other libraries: torch tensors on the CPU, DLPack, buffers, subclasses.

Nothing is copied, and no library is imported. Views are cached; every call checks that the array
is still the same object with the same memory, shape and dtype.
"""

import ctypes
import sys
from functools import cache
from typing import Any, NamedTuple, TypeGuard
from weakref import ref

import numpy as np

from fastopt._kernels.devices import is_cuda, is_simulated, is_tensor
from fastopt._kernels.layout import bfloat16
from fastopt.sparse import RowSparse, as_row_sparse, is_row_sparse

Array = np.ndarray[Any, Any]

OURS = (np.ndarray, np.generic, RowSparse, tuple, list, dict, str, type(None))
ADVICE = "update a NumPy copy, np.array(x), and assign it back"


class _Known(NamedTuple):
    """Cached view of an array; the entry keeps the array alive while the view is in use."""

    view: "ref[Array]"
    owner: Any
    signature: tuple[Any, ...]


_known: dict[int, _Known] = {}
"""Cached views, by the id of their array."""


def is_foreign(array: Any) -> bool:
    """Whether `array` is not a NumPy array but has host memory that NumPy can view."""
    if isinstance(array, OURS):
        return False
    if is_tensor(array):
        return not array.is_cuda
    if is_cuda(array):
        return False
    return (
        hasattr(type(array), "__dlpack__")
        or _is_labelled(array)
        or is_buffer(array)
        or is_simulated(array)
    )


def is_subclass(array: object) -> TypeGuard[Array]:
    """Whether `array` is of a subclass of ndarray whose memory is its values, such as memmap."""
    return (
        isinstance(array, np.ndarray)
        and type(array) is not np.ndarray
        and not isinstance(array, np.ma.MaskedArray)
    )


def as_weight(array: object) -> Any:
    """Return a writable NumPy view of a foreign array, or of a subclass; return others unchanged.

    Raises
    ------
    TypeError
        NumPy cannot view the array.
    ValueError
        The array is read-only.
    """
    if is_subclass(array):
        return array.view(np.ndarray)
    known = _known.get(id(array))
    if known is not None and is_tensor(array):
        view = known.view()
        if view is not None and known.signature == _signature(array):
            return view
    if not is_foreign(array):
        return array
    if is_tensor(array):
        return _keep(array, of_tensor("weight", array), _signature(array))
    imported = _imported("weight", array)
    if not imported.flags.writeable:
        raise ValueError(f"weight is a {type(array).__name__}, which is read-only: {ADVICE}")
    interface = imported.__array_interface__
    signature = tuple(interface[name] for name in ("data", "shape", "strides", "typestr"))
    if known is not None and known.signature == signature:
        view = known.view()
        if view is not None:
            return view
    return _keep(array, imported, signature)


def as_gradient(grad: Any) -> Any:
    """Return a NumPy view, or a RowSparse, of a foreign gradient or one of a subclass.

    Others are returned unchanged.

    Raises
    ------
    TypeError
        NumPy cannot view the array.
    """
    if is_subclass(grad):
        return grad.view(np.ndarray)
    if isinstance(grad, OURS):
        parts = grad if isinstance(grad, (tuple, list)) and len(grad) == 2 else ()
        if any(is_foreign(part) or is_subclass(part) for part in parts):
            return tuple(map(as_gradient, parts))
        return grad
    if is_tensor(grad):
        if grad.is_cuda:
            return grad
        torch = sys.modules["torch"]
        if grad.layout is torch.sparse_coo:
            return _row_sparse(grad)
        return of_tensor("gradient", resolved(grad))
    if is_row_sparse(grad):
        return as_row_sparse(grad, grad.shape)
    if not is_foreign(grad):
        return grad
    if hasattr(type(grad), "__array__"):  # JAX caches what it returns: 1 us instead of 25
        return np.asarray(grad)
    return _imported("gradient", grad)


def as_real(array: Any) -> Any:
    """Return the real view of complex numbers, whose last axis has their two parts.

    The array may be row-sparse; real ones, and those of other libraries, are returned unchanged.
    """
    if isinstance(array, RowSparse):
        values, shape = as_real(array.values), (*array.shape, 2)
        return array if values is array.values else RowSparse(values, array.indices, shape)
    if isinstance(array, (tuple, list)) and len(array) == 2:
        values = as_real(array[0])
        return array if values is array[0] else (values, array[1])
    if isinstance(array, (np.ndarray, np.generic)) and array.dtype.kind == "c":
        return np.asarray(array)[..., np.newaxis].view(array.real.dtype)
    return array


def owner_of(view: object) -> Any:
    """Return the foreign array that `view` belongs to; return others unchanged."""
    for known in list(_known.values()):
        array = known.view()
        if array is not None and (array is view or array is getattr(view, "base", None)):
            return known.owner
    return view


def _is_labelled(array: object) -> bool:
    """Whether `array` is an array with labels, such as those of pandas and xarray."""
    return hasattr(type(array), "to_numpy") and hasattr(type(array), "__array__")


def is_buffer(array: Any) -> bool:
    """Whether an object has memory that NumPy can view."""
    try:
        memoryview(array)
    except (TypeError, ValueError, BufferError):
        return False
    return True


def _keep(array: object, view: Array, signature: tuple[Any, ...]) -> Array:
    """Cache the view of an array for as long as the view lives."""
    key = id(array)

    def forget(of: "ref[Array]", known: dict[int, _Known] = _known) -> None:
        entry = known.get(key)  # at exit, the module has no names any more
        if entry is not None and entry.view is of:
            del known[key]

    _known[key] = _Known(ref(view, forget), array, signature)
    return view


def _imported(role: str, array: Any) -> Array:
    """Return a new NumPy view by DLPack or the buffer protocol; it keeps the array alive."""
    try:
        if is_simulated(array):
            return np.asarray(array)
        if _is_labelled(array):
            return _labelled(array)
        if not hasattr(type(array), "__dlpack__"):
            return np.asarray(memoryview(array))
        try:
            return np.from_dlpack(array)
        except (BufferError, RuntimeError, TypeError):
            if hasattr(type(array), "__array__"):  # DLPack or NumPy lacks the dtype
                view = np.asarray(array)
                view.flags.writeable = False
                return view
            raise
    except Exception as error:
        message = f"{role} is a {type(array).__name__} that NumPy cannot view"
        raise TypeError(f"{message}: {error}") from error


def _labelled(array: Any) -> Array:
    """Return the values of an array with labels, read-only if they are not its memory."""
    values: Array = np.asarray(array)
    if values.ctypes.data != np.asarray(array).ctypes.data:  # of columns, or computed
        values.flags.writeable = False
    return values


# Torch tensors


def _signature(tensor: Any) -> tuple[Any, ...]:
    """Return the properties that change if a tensor is moved, reshaped or converted in place."""
    return tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype, tensor.is_neg()


def resolved(tensor: Any) -> Any:
    """Return a tensor whose memory holds its values, unlike those that are lazily negated, or 0."""
    if tensor.is_neg() or tensor.is_conj():
        return tensor.resolve_neg().resolve_conj()
    return tensor.clone() if tensor._is_zerotensor() else tensor


def of_tensor(role: str, tensor: Any) -> Array:
    """Return a new view of a CPU tensor, which it keeps alive, with or without requires_grad.

    ``Tensor.numpy()`` is not used because it makes the tensor permanently non-resizable.
    """
    torch = sys.modules["torch"]
    if tensor.layout is not torch.strided:
        raise TypeError(f"{role} must be a dense tensor, got layout {tensor.layout}")
    if not tensor.is_cpu:
        raise TypeError(f"{role} must be a tensor on the CPU or CUDA, got one on {tensor.device}")
    if tensor.is_neg():
        raise TypeError(f"{role} is a lazily negated view: pass x.resolve_neg()")
    if tensor.is_conj():
        raise TypeError(f"{role} is a lazily conjugated view: pass x.resolve_conj()")
    try:
        address = tensor.data_ptr()
    except (RuntimeError, ValueError) as error:
        raise TypeError(f"{role} has no memory: {error}") from error
    shape, strides, dtype = tensor.shape, tensor.stride(), _dtype(role, tensor.dtype)
    size = dtype.itemsize
    if not address and tensor.numel():
        raise TypeError(f"{role} has no memory")
    last = sum((n - 1) * step for n, step in zip(shape, strides, strict=True))
    memory: Any = (ctypes.c_char * ((last + 1) * size if tensor.numel() else 0)).from_address(
        address
    )
    memory.owner = tensor
    return np.ndarray(shape, dtype, memory, 0, [step * size for step in strides])


@cache
def _dtype(role: str, kind: object) -> np.dtype[Any]:
    """Return the NumPy dtype of a torch dtype."""
    name = str(kind).removeprefix("torch.")
    try:
        dtype: np.dtype[Any] = bfloat16() if name == "bfloat16" else np.dtype(name)
    except TypeError:
        raise TypeError(f"{role} has dtype {kind}, which NumPy lacks") from None
    return dtype


def _row_sparse(grad: Any) -> RowSparse:
    """Return the gradient in a sparse COO tensor, as of ``torch.nn.Embedding(sparse=True)``."""
    if grad.sparse_dim() != 1:
        raise TypeError(
            f"gradient must be sparse by rows, with sparse_dim 1, got {grad.sparse_dim()}; "
            "x.to_dense() is a dense gradient"
        )
    parts = grad._values(), grad._indices()
    values, indices = (of_tensor("gradient", resolved(part)) for part in parts)
    return RowSparse(values, indices[0], tuple(grad.shape))
