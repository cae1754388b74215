"""Arguments of parameters: shapes with unknown dimensions, dtypes, devices, deprecated names."""

import warnings
from collections.abc import Callable, Sequence
from functools import wraps
from numbers import Integral
from typing import Any, ParamSpec, TypeVar

import numpy as np
from numpy.typing import DTypeLike

from fastopt._kernels.device_memory import host
from fastopt._kernels.devices import cuda_target, is_cuda
from fastopt._kernels.layout import bfloat16
from fastopt.arguments import brief, choice, count, is_masked
from fastopt.device import Device, current_device
from fastopt.initializer import Initializer, create

Array = np.ndarray[Any, Any]
Shape = tuple[int, ...]
UNKNOWN = -1


def as_shape(shape: object) -> Shape | None:
    """Return a shape as a tuple, with -1 for lengths of 0, -1 and None; None stays None.

    Raises
    ------
    TypeError
        A length is not an integer.
    ValueError
        A length is below -1.
    """
    if shape is None:
        return None
    if isinstance(shape, str) or not isinstance(shape, (Sequence, Integral)):
        raise TypeError(f"shape must be an integer or a tuple of integers, got {brief(shape)}")
    lengths = (shape,) if isinstance(shape, Integral) else shape
    exact = (count("shape", UNKNOWN if n is None else n, least=UNKNOWN) for n in lengths)
    return tuple(length or UNKNOWN for length in exact)


def is_known(shape: Shape | None) -> bool:
    """Whether every dimension is known."""
    return shape is not None and UNKNOWN not in shape


def merged(one: Shape | None, other: Shape | None) -> Shape | None:
    """Combine the known dimensions of two shapes; ValueError if they contradict each other."""
    if one is None or other is None:
        return other if one is None else one
    if len(one) != len(other) or any(
        UNKNOWN not in pair and pair[0] != pair[1] for pair in zip(one, other, strict=True)
    ):
        raise ValueError(f"shape {other} does not agree with {one}")
    return tuple(max(pair) for pair in zip(one, other, strict=True))


def as_dtype(dtype: DTypeLike | None) -> np.dtype[Any]:
    """Return `dtype` as a NumPy dtype of real numbers.

    Raises
    ------
    TypeError
        `dtype` is not a native real dtype, or it is bfloat16 and ml_dtypes is not installed.
    """
    if isinstance(dtype, str) and dtype == "bfloat16":
        try:
            dtype = bfloat16()
        except ImportError:
            raise TypeError("dtype bfloat16 needs the package ml_dtypes") from None
    try:
        dtype_: np.dtype[Any] | None = None if dtype is None else np.dtype(dtype)
    except TypeError:
        dtype_ = None
    if dtype_ is None or not (dtype_.kind in "iuf" or dtype_.name == "bfloat16"):
        raise TypeError(f"dtype must be a type of real numbers, got {dtype!r}")
    if not dtype_.isnative:
        raise TypeError(f"dtype must have the byte order of this machine, got {dtype!r}")
    return dtype_


def as_array(values: object) -> Array:
    """Return `values` as an array on the host; TypeError if not numeric, or masked."""
    values = host(values) if is_cuda(values) else values
    if is_masked(values):
        raise TypeError("expected an array without a mask, got a MaskedArray")
    try:
        array = np.asarray(values)
    except ValueError:
        raise TypeError(f"expected an array of numbers, got {brief(values)}") from None
    if array.dtype.kind in "OSUMm":
        raise TypeError(f"expected an array of numbers, got {brief(values)}")
    return array


def as_devices(device: object) -> tuple[Device, ...]:
    """Return one or several devices as a tuple; None is the current device.

    Raises
    ------
    TypeError
        `device` is not a device or a list of devices.
    ValueError
        The list is empty, repeats a device, or has a CUDA device among several.
    ImportError
        CUDA is not available.
    """
    if device is None:
        device = current_device()
    devices = (device,) if isinstance(device, Device) else device
    if not isinstance(devices, (list, tuple)) or not all(isinstance(d, Device) for d in devices):
        raise TypeError(f"device must be a Device or a list of them, got {device!r}")
    if not devices or len(set(devices)) < len(devices):
        raise ValueError(f"device must list one device or more, each once, got {device!r}")
    if any(one.device_type == "cuda" for one in devices):
        if len(devices) > 1:
            raise ValueError(f"device must be one CUDA device or several of the CPU, got {device}")
        cuda_target()
    return tuple(devices)


ASSIGNED = {
    "data": "call set_data(values)",
    "grad": "call set_grad(values), or add_grad(values) for one of several uses",
    "requires_grad": "set grad_req, to 'null' for a parameter that is not trained",
}
"""Advice for assignments that work in other libraries but would have no effect here."""


def storage_type(role: str, stype: str) -> str:
    """Return a storage type; ValueError unless it is "default" or "row_sparse"."""
    if stype == "csr":
        raise ValueError(f"{role} cannot be 'csr', only rows can be sparse: 'row_sparse'")
    return choice(role, stype, "default", "row_sparse")


def _itself(value: object) -> Any:
    return value


def _text(init: object) -> Any:
    """Return a comparable form of an initializer; a function is equal only to itself."""
    return create(init).dumps() if isinstance(init, (str, Initializer)) else init


COMPARED: dict[str, Callable[[Any], Any]] = dict.fromkeys(
    ("grad_req", "lr_mult", "wd_mult", "allow_deferred_init", "differentiable", "stype"), _itself
) | {"grad_stype": _itself, "dtype": as_dtype, "init": _text}
"""Attributes that must agree when a parameter is requested again, with comparison keys."""


P = ParamSpec("P")
R = TypeVar("R")


def renamed(old: str, new: str) -> None:
    """Warn that a name is deprecated; the warning points at the caller's caller."""
    warnings.warn(f"{old} is deprecated, use {new}", DeprecationWarning, stacklevel=3)


def ctx_is_device(function: Callable[P, R]) -> Callable[P, R]:
    """Accept ``ctx=`` as a deprecated alias of the argument `device`.

    Raises
    ------
    TypeError
        Both are given.
    """

    @wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        if "ctx" in kwargs:
            renamed("ctx", "device")
            if "device" in kwargs:
                raise TypeError("device is given twice, as device and as ctx")
            kwargs["device"] = kwargs.pop("ctx")
        return function(*args, **kwargs)

    return call
