"""Descriptions of arrays on CUDA devices that have only ``__dlpack__``, as CUDA array interfaces.

The structures are those of ``dlpack.h``: https://dmlc.github.io/dlpack/latest/c_api.html

Tests: ``tests/gpu/test_cuda_dlpack.py``.
"""

import ctypes
from typing import Any

HOST = 1
"""Device type of main memory."""

DEVICES = 2, 13
"""Device types of CUDA memory: of a device, and managed."""

LEGACY_STREAM = 1
"""The default stream, as DLPack numbers it."""

READ_ONLY = 1
"""Flag of a tensor that must not be written to."""

LETTERS = {0: "i", 1: "u", 2: "f", 4: "V"}
"""Letters of NumPy for DLPack's types: signed, unsigned, floating point, bfloat16."""


class _Tensor(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )


class _Versioned(ctypes.Structure):
    _fields_ = (
        ("major", ctypes.c_uint32),
        ("minor", ctypes.c_uint32),
        ("context", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
        ("flags", ctypes.c_uint64),
        ("tensor", _Tensor),
    )


_pointer_in = ctypes.pythonapi.PyCapsule_GetPointer
_pointer_in.restype, _pointer_in.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
_is_valid = ctypes.pythonapi.PyCapsule_IsValid
_is_valid.restype, _is_valid.argtypes = ctypes.c_int, [ctypes.py_object, ctypes.c_char_p]


def device_number(array: Any) -> int | None:
    """Return the number of the CUDA device of an array with ``__dlpack__``; None for others."""
    if not hasattr(type(array), "__dlpack_device__"):
        return None
    kind, number = array.__dlpack_device__()
    return int(number) if int(kind) in DEVICES else None


def on_host(array: Any) -> bool:
    """Whether DLPack says that an array is in main memory.

    It is asked before other protocols, since JAX takes 10 us to raise an AttributeError.
    """
    return hasattr(type(array), "__dlpack_device__") and int(array.__dlpack_device__()[0]) == HOST


def interface_of(array: Any) -> dict[str, Any]:
    """Return the CUDA array interface of an array on a device with ``__dlpack__``.

    The array is ready on the default stream. Before version 1.0 of DLPack nothing says whether an
    array may be written to; such arrays are read-only.

    Raises
    ------
    TypeError
        The dtype is not a number of NumPy or bfloat16.
    """
    try:
        capsule = array.__dlpack__(stream=LEGACY_STREAM, max_version=(1, 0))
    except TypeError:  # before version 1.0
        capsule = array.__dlpack__(stream=LEGACY_STREAM)
    read_only = True
    if _is_valid(capsule, b"dltensor_versioned"):
        whole = _Versioned.from_address(_pointer_in(capsule, b"dltensor_versioned"))
        tensor, read_only = whole.tensor, bool(whole.flags & READ_ONLY)
    else:
        tensor = _Tensor.from_address(_pointer_in(capsule, b"dltensor"))
    if tensor.code not in LETTERS or tensor.lanes != 1:
        raise TypeError(f"DLPack's type {tensor.code} of {tensor.bits} bits is not supported")
    itemsize = tensor.bits // 8
    strides = None
    if tensor.strides:
        strides = tuple(step * itemsize for step in tensor.strides[: tensor.ndim])
    return {
        "version": 3,
        "data": ((tensor.data or 0) + tensor.byte_offset, read_only),
        "shape": tuple(tensor.shape[: tensor.ndim]),
        "strides": strides,
        "typestr": f"<{LETTERS[tensor.code]}{itemsize}",
    }
