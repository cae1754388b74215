"""Descriptions of arrays on CUDA devices, without access to their elements.

Any object with ``__cuda_array_interface__`` (CuPy, numba, torch) or ``__dlpack__`` is accepted. A
:class:`Header` describes such an array as a NumPy array with a device address, so that the checks
of shape, dtype, memory layout and overlap for host arrays work for device arrays too. Arrays of
numba's simulator lie in host memory, and are host arrays.

Tests: ``tests/kernels/test_devices.py``, ``tests/gpu/test_cuda_torch.py``.
"""

import sys
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from importlib import import_module
from importlib.metadata import version
from operator import attrgetter
from types import SimpleNamespace
from typing import Any, NamedTuple, NoReturn
from weakref import ref

import numpy as np
from numba.core import config

from fastopt._kernels.dlpack import device_number, interface_of, on_host
from fastopt._kernels.layout import bfloat16
from fastopt.device import Device

EMPTY = 8
"""Address used for an array without elements, which may have no address."""

Signature = tuple[Any, ...]
ALLOWED = {np.may_share_memory, np.shares_memory, np.shape, np.ndim, np.size}
"""Functions that read only the metadata of a header."""


NUMPY = "'numpy<2.5'"
"""What pip is given for a NumPy that numba-cuda can compile with."""

INSTALLATION = (
    f"pip install 'numba-cuda[cu13]~=0.30.4' {NUMPY}, "
    "or 'numba-cuda[cu12]~=0.30.4' for drivers of CUDA 12"
)
"""Command that installs a tested version of numba-cuda."""


def unsuited() -> str | None:
    """Return which NumPy numba-cuda needs instead of this one, None if it works with this one."""
    try:
        import_module("numba.cuda.np.arrayobj")  # which compilation imports
    except AttributeError as error:  # of a function that NumPy has removed
        need = f"a NumPy that numba-cuda {version('numba-cuda')} supports"
        return f"{need}, not {np.__version__} ({error}): pip install {NUMPY}"
    return None


@cache
def cuda_target() -> Any:
    """Return the module ``numba.cuda``, after checking that it can compile and launch kernels.

    Raises
    ------
    ImportError
        numba-cuda is not installed or does not work with this NumPy, there is no driver or device,
        or numba simulates one.
    """
    if config.ENABLE_CUDASIM:
        raise ImportError("CUDA arrays need a device, and NUMBA_ENABLE_CUDASIM=1 simulates one")
    try:
        import numba_cuda  # noqa: F401
    except ImportError:
        raise ImportError(f"CUDA arrays need numba-cuda: {INSTALLATION}") from None
    if reason := unsuited():
        raise ImportError(f"CUDA arrays need {reason}")
    from numba import cuda

    if not cuda.is_available():
        raise ImportError("CUDA arrays need a CUDA driver and device, and numba finds none")
    return cuda


class Header(np.ndarray[Any, Any]):
    """Metadata of an array on a CUDA device, in the form of a NumPy array.

    Its elements must not be read or written: NumPy would look for them in host memory.

    Attributes
    ----------
    place : Device
        Device of the array.
    stream : int
        Handle of the stream that its owner uses.
    array : weakref.ref
        The described array; the user of the header keeps it alive.
    kept : object
        The described array, if it is a copy that the header owns.
    """

    place: Device
    stream: int
    array: Callable[[], Any]
    kept: Any = None

    __array_ufunc__: Any = None

    def __array_finalize__(self, of: Any) -> None:
        vars(self).update(getattr(of, "__dict__", {}))

    def __array_function__(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        if func not in ALLOWED:
            self._refuse()
        return super().__array_function__(func, types, args, kwargs)

    def __repr__(self) -> str:
        return f"<array of shape {self.shape}, {self.dtype}, on {self.place}>"

    def _refuse(self, *_: Any, **__: Any) -> NoReturn:
        raise TypeError(f"expected an array on the host, got one on {self.place}")

    __getitem__ = __setitem__ = __iter__ = __array__ = _refuse
    __copy__ = __deepcopy__ = __reduce__ = __reduce_ex__ = __bool__ = __float__ = __int__ = _refuse
    copy = astype = item = tolist = tobytes = fill = flatten = ravel = take = sort = _refuse


_known: dict[int, tuple[Signature, Header]] = {}
"""Headers by the id of the described array, for as long as it lives."""


def is_cuda(array: Any) -> bool:
    """Whether `array` is on a CUDA device."""
    if type(array) is np.ndarray or isinstance(array, (tuple, list, np.generic)):
        return False
    if stays(array):  # numba takes microseconds to create the interface
        return hasattr(type(array), "__cuda_ndarray__") and not is_simulated(array)
    if not hasattr(type(array), "is_cuda") and on_host(array):
        return False
    flag = getattr(array, "is_cuda", None)  # torch tensors may refuse to return an interface
    if isinstance(flag, bool):
        return flag
    return hasattr(array, "__cuda_array_interface__") or device_number(array) is not None


def is_simulated(array: Any) -> bool:
    """Whether an array is of numba's simulator of CUDA, and so lies in host memory."""
    kind = type(array)
    return hasattr(kind, "__cuda_ndarray__") and not hasattr(kind, "__cuda_array_interface__")


def header(array: Any) -> Any:
    """Return the header of a CUDA array; return anything else unchanged.

    Repeated calls return the same header object until the array moves.
    """
    if type(array) is np.ndarray or isinstance(array, Header):
        return array
    known = _known.get(id(array))
    if known is not None and stays(array):
        array_header = known[1]
        array_header.stream = _handle(array.stream)
        return array_header
    if not is_cuda(array):  # or no longer: a torch parameter may be moved
        return array
    try:
        _check_tensor(array)
        reading = readings([array])
        signature = reading.addresses[0], reading.kinds[0]
        if known is not None and known[0] == signature:
            array_header = known[1]
        else:
            array_header, key = _described(array, _interface(array)), id(array)
            array_header.array = ref(array, lambda _: _known.pop(key, None))
            _known[key] = signature, array_header
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        message = f"{type(array).__name__} does not describe an array on a device"
        raise TypeError(f"{message}: {error}") from error
    array_header.stream = reading.streams[0]
    return array_header


def stays(array: Any) -> bool:
    """Whether an array never moves or changes its shape: true for numba's arrays."""
    return type(array).__module__.startswith("numba")


class Reading(NamedTuple):
    """Snapshot of the metadata of several device arrays, in their order.

    Attributes
    ----------
    addresses : list of int
        Addresses.
    kinds : list
        Shape, strides, dtype, device, and whether it is read-only if that may differ among arrays
        of its type; equal for arrays of one type that may replace each other.
    streams : list of int
        Handles of the streams that they are used on.
    """

    addresses: list[int]
    kinds: list[Any]
    streams: list[int]


def readings(arrays: Iterable[Any]) -> Reading:
    """Read the metadata of device arrays in one pass, without a header for each.

    Raises
    ------
    AttributeError, KeyError, TypeError, ValueError
        One of them is not a device array.
    """
    arrays = list(arrays)
    kinds: list[Any] = list(map(type, arrays))
    if len(set(kinds)) == 1:
        return _reader(kinds[0])(arrays)
    reading = Reading([], [], [])
    for array, kind in zip(arrays, kinds, strict=True):
        for whole, part in zip(reading, _reader(kind)([array]), strict=True):
            whole.extend(part)
    return reading


@cache
def _reader(kind: Any) -> Callable[[list[Any]], Reading]:
    """Return the function that reads arrays of a type."""
    torch = sys.modules.get("torch")
    if torch is not None and issubclass(kind, torch.Tensor):
        return _read_tensors
    return _read_numba if hasattr(kind, "__cuda_ndarray__") else _read_interfaces


def _read_tensors(tensors: list[Any]) -> Reading:
    kinds = [
        (t.shape, t.stride(), t.dtype, t.device, t.is_cuda, t.is_neg(), t.layout) for t in tensors
    ]
    current = sys.modules["torch"].cuda.current_stream
    devices = {kind[3] for kind in kinds}
    handles = {device: _handle(current(device).cuda_stream) for device in devices}
    addresses = [tensor.data_ptr() or EMPTY for tensor in tensors]
    return Reading(addresses, kinds, [handles[kind[3]] for kind in kinds])


def _read_numba(arrays: list[Any]) -> Reading:
    addresses = [address or EMPTY for address in map(_address, arrays)]
    if several_devices():
        memories = [array.gpu_data for array in arrays]
        views = [getattr(memory, "_view", memory) for memory in memories]  # else found in Python
        numbers = [view.context.device.id for view in views]
        kinds = [(*_form(a), number) for a, number in zip(arrays, numbers, strict=True)]
    else:
        kinds = list(map(_form, arrays))
    streams = list(map(_stream, arrays))
    handles = {stream: _handle(stream) for stream in set(streams)}
    return Reading(addresses, kinds, [handles[stream] for stream in streams])


_form: Any = attrgetter("shape", "strides", "dtype")
_stream, _address = attrgetter("stream"), attrgetter("gpu_data.device_ctypes_pointer.value")


@cache
def several_devices() -> bool:
    """Whether this machine has several devices."""
    return len(sys.modules["numba.cuda"].gpus) > 1


def _read_interfaces(arrays: list[Any]) -> Reading:
    interfaces: list[Any] = [_interface(array) for array in arrays]
    if any(interface.get("mask") is not None for interface in interfaces):
        raise TypeError("masked CUDA arrays are not supported")
    kinds = [
        (
            interface["shape"],
            interface.get("strides"),
            interface["typestr"],
            bool(interface["data"][1]),
            _ordinal(array),
        )
        for interface, array in zip(interfaces, arrays, strict=True)
    ]
    addresses = [interface["data"][0] or EMPTY for interface in interfaces]
    return Reading(addresses, kinds, [_handle(interface.get("stream")) for interface in interfaces])


def mark_written(arrays: Sequence[Any]) -> None:
    """Notify torch that tensors were changed in place, so that it refuses stale graphs."""
    torch = sys.modules.get("torch")
    if torch is None:
        return
    tensors = [
        array for array in arrays if isinstance(array, torch.Tensor) and not array.is_inference()
    ]
    increment = torch.autograd.graph.increment_version
    try:
        increment(tensors)
    except TypeError:  # older versions take one at a time
        for tensor in tensors:
            increment(tensor)


def device_of(array: Any) -> Device | None:
    """Return the device of a header; None for an array on the host."""
    return array.place if isinstance(array, Header) else None


def is_tensor(array: object) -> bool:
    """Whether an array is a tensor of torch."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(array, torch.Tensor)


def _check_tensor(array: Any) -> None:
    """Raise TypeError for a tensor of torch whose memory is not its elements."""
    if is_tensor(array):
        if array.layout is not sys.modules["torch"].strided:
            raise TypeError("sparse tensors are given as a pair (values, indices)")
        if array.is_neg():
            raise TypeError("a lazily negated view: pass x.resolve_neg()")


def _handle(stream: Any) -> int:
    """Return the handle of a stream; 0 is the default stream, which others may number 1."""
    handle = int(stream) if stream else 0
    return 0 if handle == 1 else handle


def _interface(array: Any) -> dict[str, Any]:
    of = array.detach() if hasattr(array, "detach") else array  # torch refuses if it requires grad
    interface: dict[str, Any] | None = getattr(of, "__cuda_array_interface__", None)
    if interface is None and device_number(of) is None:
        raise TypeError("it has no __cuda_array_interface__")
    return interface_of(of) if interface is None else interface


def _described(array: Any, interface: dict[str, Any]) -> Header:
    """Create a header of `array`."""
    data = interface["data"]
    if data[0] == 0:  # an empty array, for which NumPy would allocate memory
        data = (EMPTY, data[1])
    names = ("shape", "typestr", "strides")
    plain = {"version": 3, "data": data, **{name: interface.get(name) for name in names}}
    described: Any = SimpleNamespace(__array_interface__=plain)
    view = np.asarray(described).view(Header)
    if view.dtype.kind == "V" and view.dtype.itemsize == 2:
        view = view.view(bfloat16())
    if type(array).__module__.startswith("jax"):  # immutable arrays, but not marked read-only
        view.flags.writeable = False
    view.place = _device(_ordinal(array))
    return view


@cache
def _device(number: int) -> Device:
    return Device("cuda", number)


def _ordinal(array: Any) -> int:
    """Return the device number of an array, as reported by its library."""
    device = getattr(array, "device", None)
    for number in (getattr(device, "index", None), getattr(device, "id", None)):
        if isinstance(number, int):
            return number
    context = getattr(getattr(array, "gpu_data", None), "context", None)
    number = getattr(getattr(context, "device", None), "id", None)
    if isinstance(number, int):
        return number
    return (None if hasattr(array, "__cuda_ndarray__") else device_number(array)) or 0
