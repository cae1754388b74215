"""Arrays in the memory of CUDA devices: what they are, without touching what is in them.

Whatever offers ``__cuda_array_interface__`` (CuPy, numba, torch) is taken, and the simulator's
arrays, which have ``__cuda_ndarray__`` alone. A :class:`Header` describes such an array as a NumPy
array whose address is one of the device, so that the checks of shape, dtype, layout and overlap
that serve arrays in main memory serve these too.
"""

import sys
from collections.abc import Callable, Sequence
from functools import cache
from importlib import import_module
from operator import is_
from typing import Any, Literal, NoReturn
from weakref import ref

import numpy as np
from numba.core import config

from fastopt.device import Device
from fastopt.kernels.layout import bfloat16

__all__ = [
    "Header",
    "assign",
    "contiguous",
    "cuda_target",
    "device_of",
    "duplicate",
    "header",
    "headers",
    "host",
    "is_cuda",
    "like",
    "move",
    "moved",
    "owned",
    "placed",
    "sent",
    "stream_of",
    "wait_for",
    "zero",
]

Array = np.ndarray[Any, Any]
Signature = tuple[Any, ...]

ALLOWED = {np.may_share_memory, np.shares_memory, np.shape, np.ndim, np.size}
"""Functions that ask a header for nothing but its bounds."""


class Header(np.ndarray[Any, Any]):
    """What a NumPy array tells of itself, for an array in the memory of a CUDA device.

    Nothing may read or write its elements: NumPy would look for them in main memory.

    Attributes
    ----------
    place : Device
        Where the array is.
    stream : int
        Handle of the stream that its owner works on.
    array : weakref.ref
        The array that is described; whoever uses the header keeps it alive.
    kept : object
        The same array, if it was made for this use alone.
    """

    place: Device
    stream: int
    array: Callable[[], Any]
    kept: Any

    __array_ufunc__: Any = None

    def __array_finalize__(self, of: Any) -> None:
        for name in ("place", "stream", "array", "kept"):
            setattr(self, name, getattr(of, name, None))

    def __array_function__(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        if func not in ALLOWED:
            self._refuse()
        return super().__array_function__(func, types, args, kwargs)

    def __repr__(self) -> str:
        return f"<array of shape {self.shape}, {self.dtype}, on {self.place}>"

    def _refuse(self, *_: Any, **__: Any) -> NoReturn:
        raise TypeError(f"this needs an array in main memory, got one on {self.place}")

    __getitem__ = __setitem__ = __iter__ = __array__ = _refuse
    __copy__ = __deepcopy__ = __reduce__ = __reduce_ex__ = __bool__ = __float__ = __int__ = _refuse
    copy = astype = item = tolist = tobytes = fill = flatten = ravel = take = sort = _refuse


_known: dict[int, tuple[Signature, Header]] = {}
"""Headers by the id of the array that they describe, as long as it lives."""


def is_cuda(array: Any) -> bool:
    """Whether `array` is in the memory of a CUDA device."""
    if type(array) is np.ndarray or isinstance(array, (tuple, list, np.generic)):
        return False
    told = getattr(array, "is_cuda", None)  # torch's tensors may refuse to show an interface
    if isinstance(told, bool):
        return told
    return hasattr(array, "__cuda_array_interface__") or hasattr(array, "__cuda_ndarray__")


def header(array: Any) -> Any:
    """Header of a CUDA array; anything else as it is.

    As long as an array lies where it lay, its header is the same object.
    """
    if type(array) is np.ndarray or isinstance(array, Header) or not is_cuda(array):
        return array
    try:
        signature, stream = _read(array)
    except AttributeError as error:
        words = f"{type(array).__name__} does not describe an array on a device"
        raise TypeError(f"{words}: {error}") from error
    known = _known.get(id(array))
    if known is not None and known[0] == signature:
        made = known[1]
    else:
        key = id(array)
        try:
            made = _described(array)
        except (KeyError, TypeError, ValueError) as error:
            words = f"{type(array).__name__} does not describe an array on a device"
            raise TypeError(f"{words}: {error}") from error
        made.array = ref(array, lambda _: _known.pop(key, None))
        _known[key] = signature, made
    made.stream = stream
    return made


def headers(arrays: Sequence[Any]) -> list[Any]:
    """Headers of several arrays."""
    return [header(array) for array in arrays]


def moved(of: Header) -> bool:
    """Whether the array that a header describes is gone, or not where it was."""
    array = of.array()
    return of.kept is None and (array is None or header(array) is not of)


def device_of(array: Any) -> Device | None:
    """Device of a header; None for main memory."""
    return array.place if isinstance(array, Header) else None


def _read(array: Any) -> tuple[Signature, int]:
    """What changes when an array is moved or given another shape, and the stream it is used on."""
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(array, torch.Tensor):
        if array.layout is not torch.strided:
            raise TypeError("sparse tensors are given as a pair (values, indices)")
        stream = torch.cuda.current_stream(array.device).cuda_stream
        return (array.data_ptr(), array.shape, array.stride(), array.dtype), stream
    told = _interface(array)
    if told is None:  # the simulator's
        data = array._ary.__array_interface__["data"][0]
        return (data, array.shape, array.strides, array.dtype), 0
    stream = told.get("stream") or 0
    names = ("data", "shape", "strides", "typestr")
    return tuple([told.get(name) for name in names]), 0 if stream == 1 else stream


def _interface(array: Any) -> dict[str, Any] | None:
    of = array.detach() if hasattr(array, "detach") else array  # torch refuses gradients' leaves
    interface: dict[str, Any] | None = getattr(of, "__cuda_array_interface__", None)
    return interface


class _Described:
    """Holder of an interface that NumPy reads."""

    def __init__(self, interface: dict[str, Any]) -> None:
        self.__array_interface__ = interface


def _described(array: Any) -> Header:
    """A new header of `array`."""
    interface = _interface(array)
    if interface is None:  # the simulator's
        made = array._ary.view(Header)
        made.place = Device("cuda", 0)
        return made
    if interface.get("mask") is not None:
        raise TypeError("masked CUDA arrays are not supported")
    data = interface["data"]
    if data[0] == 0:  # empty; NumPy would allocate
        data = (8, data[1])
    names = ("shape", "typestr", "strides")
    plain = {"version": 3, "data": data, **{name: interface.get(name) for name in names}}
    made = np.asarray(_Described(plain)).view(Header)
    if made.dtype.kind == "V" and made.dtype.itemsize == 2:
        made = made.view(bfloat16())
    made.place = Device("cuda", _ordinal(array))
    return made


def _ordinal(array: Any) -> int:
    """Number of the device of an array, as its library tells it."""
    device = getattr(array, "device", None)
    for number in (getattr(device, "index", None), getattr(device, "id", None)):
        if isinstance(number, int):
            return number
    context = getattr(getattr(array, "gpu_data", None), "context", None)
    number = getattr(getattr(context, "device", None), "id", None)
    return number if isinstance(number, int) else 0


@cache
def cuda_target() -> Any:
    """Module ``numba.cuda``, once it is known that kernels can be compiled and launched with it.

    Raises
    ------
    ImportError
        The extra that brings numba-cuda is not installed, or there is no driver or device.
    """
    if not config.ENABLE_CUDASIM:
        try:
            import numba_cuda  # noqa: F401
        except ImportError:
            raise ImportError(
                "CUDA arrays need numba-cuda: pip install fastopt[cuda13], or fastopt[cuda12] "
                "for drivers of CUDA 12"
            ) from None
    from numba import cuda

    if not cuda.is_available():
        raise ImportError("CUDA arrays need a CUDA driver and device, and numba finds none")
    return cuda


def like(of: Any, shape: tuple[int, ...], dtype: Any, order: Literal["C", "F"] = "C") -> Any:
    """Array of zeros where `of` is: a NumPy array, or a device array of numba's."""
    if not isinstance(of, Header):
        return np.zeros(shape, dtype, order)
    cuda = cuda_target()
    with cuda.gpus[of.place.device_id]:
        made = cuda.device_array(shape, dtype, order=order)
    zero(made)
    return made


def zero(array: Any) -> None:
    """Fill a device array of numba's with zeros, after what has been started on the device."""
    cuda = cuda_target()
    if config.ENABLE_CUDASIM:
        array[...] = 0
    elif array.nbytes:
        driver = import_module("numba.cuda.cudadrv.driver")
        with cuda.gpus[header(array).place.device_id]:
            cuda.synchronize()
            driver.device_memset(array, 0, array.nbytes)
            wait_for(0)  # others may use it on a stream that does not


def sent(array: Array, stream: Any) -> Any:
    """Copy of a NumPy array on the present device, of use on this stream alone."""
    dtype = array.dtype
    bits = array.view(np.uint16) if dtype.name == "bfloat16" else array  # which has no buffer
    made = cuda_target().to_device(bits, stream=stream)
    made = made if bits is array else made.view(dtype)
    made.stream = 0  # or it would prefer this stream to those that it is used on later
    return made


def owned(array: Array, device: Device) -> Any:
    """Copy of a NumPy array on a device, as a device array of numba's."""
    with cuda_target().gpus[device.device_id]:
        made = sent(array, 0)
        wait_for(0)  # others may use it on a stream that does not
        return made


def placed(state: Any, of: Any) -> Any:
    """State with its NumPy arrays copied to the device where `of` is, if it is on one."""
    if not isinstance(of, Header):
        return state
    if isinstance(state, (tuple, list)):
        return _rebuilt(state, [placed(part, of) for part in state])
    return owned(state, of.place) if type(state) is np.ndarray else state


def stream_of(handle: int) -> Any:
    """Numba's object for a stream that others made."""
    cuda = cuda_target()
    if config.ENABLE_CUDASIM or handle == 0:
        return 0
    if handle == 2:
        return cuda.per_thread_default_stream()
    return cuda.external_stream(handle)


def wait_for(handle: int) -> None:
    """Wait until all that has been started on a stream of the present device is done."""
    stream = stream_of(handle)
    if stream:
        stream.synchronize()
    elif not config.ENABLE_CUDASIM:
        cuda_target().default_stream().synchronize()


def contiguous(array: Header, stream: int) -> Header:
    """The array, or the header of a new one with its elements, in C order and aligned.

    They are copied on a stream, and back.
    """
    if array.flags.c_contiguous and array.flags.aligned:
        return array
    kept = duplicate(array, stream)
    made: Header = header(kept).view()
    made.kept, made.stream = kept, stream
    return made


def duplicate(array: Header, stream: int | None = None) -> Any:
    """Device array of numba's with the same elements, contiguous in C order."""
    made = like(array, array.shape, array.dtype)
    target = header(made).view()
    target.stream = array.stream if stream is None else stream
    move(target, array)
    return made


def move(target: Header, source: Header) -> None:
    """Copy the elements of an array to another of the same shape and dtype.

    On the stream of the target, or of the source if that was made by :func:`contiguous`.
    """
    from fastopt.kernels import cuda as kernels

    if not target.size:
        return
    addresses = np.array([[array.ctypes.data for array in (target, source)]], np.uint64)
    axes = np.array([target.shape, target.strides, source.strides], np.int64)
    with cuda_target().gpus[target.place.device_id]:
        handle = (target if source.kept is None else source).stream
        stream = stream_of(handle)
        table, layout = sent(addresses, stream), sent(axes, stream)
        blocks = min(-(-target.size // kernels.THREADS), 1 << 16)
        arguments = table, layout, target.size, target.itemsize
        kernels.launch(kernels.copy(), blocks, kernels.THREADS, handle, *arguments)


def assign(target: Array, values: Array) -> None:
    """Write `values`, which are in main memory, to an array of the same shape and dtype."""
    if isinstance(target, Header):
        copied = owned(values, target.place)  # alive until the launch
        cuda = cuda_target()
        with cuda.gpus[target.place.device_id]:
            cuda.synchronize()  # a state's updates are on its weight's stream
            move(target, header(copied))
            cuda.synchronize()
    else:
        target[...] = values


def host(array: Any) -> Any:
    """Copy of a CUDA array in main memory; anything else as it is.

    Of tuples, lists and dictionaries, what is in them.
    """
    if isinstance(array, (tuple, list)):
        parts = [host(part) for part in array]
        return array if all(map(is_, parts, array)) else _rebuilt(array, parts)
    if isinstance(array, dict):
        items = {key: host(part) for key, part in array.items()}
        return array if all(map(is_, items.values(), array.values())) else items
    if isinstance(array, Header):
        array = array.array()
    if not is_cuda(array):
        return array
    described: Header = header(array)
    cuda = cuda_target()
    with cuda.gpus[described.place.device_id]:
        if not (hasattr(array, "copy_to_host") and described.flags.forc):
            array = duplicate(described)
        cuda.synchronize()  # a state's updates are on its weight's stream
        return array.copy_to_host()


def _rebuilt(of: Any, parts: list[Any]) -> Any:
    """Tuple, named tuple or list like `of`."""
    return of._make(parts) if hasattr(of, "_make") else type(of)(parts)
