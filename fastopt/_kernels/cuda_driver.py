"""Direct calls of the CUDA driver: launches, uploads and downloads in a few microseconds each.

numba's launches inspect the types of all arguments, and its copies wait for the device. Here a
kernel is compiled once for its argument types, and its handle is launched. Uploads go through
pinned memory, which is reused once the device has read it. Numbers may be passed by value, so that
a step needs no upload.
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from ctypes import memmove
from functools import cache, partial
from math import prod
from os import environ
from struct import Struct
from threading import Lock, local
from typing import Any

import numpy as np
from numba import from_dtype, types
from numba.core.errors import NumbaError
from numpy.typing import NDArray

from fastopt._kernels.devices import cuda_target
from fastopt._kernels.record_words import RING_LAST
from fastopt._kernels.signals import undisturbed

WORDS = 128
"""Maximum 8-byte words of a kernel's arguments; the driver's limit is 4096 bytes."""

SMALLEST = 256
"""Bytes of the smallest pinned buffer."""

BUFFERS = 32
"""Maximum pinned buffers of one size: the number of pending steps before the host waits."""

CAPTURES = range(900, 908)
"""Driver errors about a stream that is being captured."""

CAPTURED = (
    "the stream is being captured for a CUDA graph: call the updater with these arrays twice "
    "outside of the capture first, with dense gradients that need no copy, and all arrays on one "
    "stream; the page CUDA of the documentation says what a graph can repeat"
)
"""Error of a call that cannot be part of a graph."""

VERSION = 12000
"""Version of CUDA whose functions compiled code calls."""

FUNCTIONS = (
    *(b"cuCtxGetCurrent", b"cuStreamIsCapturing", b"cuLaunchKernel", b"cuMemcpyHtoDAsync"),
    *(b"cuMemcpyDtoHAsync", b"cuEventRecord", b"cuEventQuery", b"cuEventSynchronize"),
)

_MASK = (1 << 64) - 1


@cache
def _driver() -> Any:
    from cuda.bindings import driver

    return driver


def _checked(result: tuple[Any, ...], call: str) -> Any:
    """Return the value from the result of a driver call.

    Raises
    ------
    RuntimeError
        The call failed.
    """
    if result[0]:
        raise RuntimeError(f"CUDA driver: {call} failed with {result[0].name}")
    return result[1] if len(result) > 1 else None


class Memory:
    """Array on the current device that kernels take as an argument.

    Parameters
    ----------
    shape : tuple of int
        Shape.
    dtype : numpy.dtype
        Dtype, which may be a record.

    Attributes
    ----------
    array : numba.cuda.DeviceNDArray
        The array.
    words : list of int
        Kernel arguments that describe the array.
    """

    def __init__(self, shape: tuple[int, ...], dtype: Any) -> None:
        self._describe(cuda_target().device_array(shape, np.dtype(dtype)), shape, dtype, 0)

    def _describe(self, array: Any, shape: tuple[int, ...], dtype: Any, offset: int) -> None:
        """Describe what begins at an offset in bytes of an array."""
        self.array, self.shape, self.dtype = array, shape, np.dtype(dtype)
        size, itemsize = prod(shape), self.dtype.itemsize
        self.nbytes = size * itemsize
        self.type = _array_type(self.dtype, len(shape))
        self.key = id(self.type)
        self.address = (array.device_ctypes_pointer.value or 0) + offset
        strides = [prod(shape[k + 1 :]) * itemsize for k in range(len(shape))]
        self.words = [0, 0, size, itemsize, self.address, *shape, *strides]

    def part(self, shape: tuple[int, ...], dtype: Any = None, first: int = 0) -> "Memory":
        """Return an array of this shape and dtype in the same memory, from row `first` on."""
        made = Memory.__new__(Memory)
        made._describe(self.array, shape, dtype or self.dtype, first * self.array.strides[0])
        return made


@cache
def _array_type(dtype: Any, ndim: int) -> Any:
    return types.Array(from_dtype(dtype), ndim, "C")


class Values:
    """Tuple of numbers that kernels take by value; see :func:`values`."""

    __slots__ = ("key", "type", "words")

    def __init__(self, kind: Any, words: list[int]) -> None:
        self.type, self.key, self.words = kind, id(kind), words


@cache
def values(dtype: Any, count: int) -> Callable[[list[int]], Values]:
    """Return a function that makes :class:`Values` from the bits of `count` numbers."""
    return partial(Values, types.UniTuple(from_dtype(dtype), count))


class _Thread(local):
    """Memory of a thread for kernel arguments, which a launch reads before it returns.

    Attributes
    ----------
    stream : int or None
        The stream of uploads beside a capture.
    compiles : bool
        Whether launches only compile.
    launches : list of Launch or None
        Where launches are noted.
    """

    stream: int | None = None
    compiles: bool | None = None
    launches: "list[Launch] | None" = None

    def __init__(self) -> None:
        self.values = np.zeros(WORDS, np.uint64)
        pointers = self.values.ctypes.data + 8 * np.arange(WORDS, dtype=np.uint64)
        self.pointers = pointers.astype(np.uint64)
        self.address = self.pointers.ctypes.data
        self.pack = [Struct(f"{count}Q").pack_into for count in range(WORDS + 1)]
        self.buffer: Any = self.values.view(np.uint8)


_thread = _Thread()
_handles: dict[tuple[Any, ...], int] = {}
"""Handles of compiled kernels, by kernel, context and argument types."""


Launch = tuple[int, int, int, int, tuple[Any, ...]]
"""A launch that can be repeated: the handle of the kernel, the number of blocks, that of threads in
x and in y, and the arguments."""


def launch(kernel: Any, blocks: int, threads: Any, stream: int, *arguments: Any) -> None:
    """Launch a kernel on the current device.

    Parameters
    ----------
    kernel : callable
        Kernel from :func:`fastopt._kernels.cuda.compiled`.
    blocks : int
        Number of blocks.
    threads : int or tuple of int
        Threads of a block, in x and y.
    stream : int
        Handle of the stream.
    *arguments : Memory, Values or int
        Arguments of the kernel; integers are int64.
    """
    words: list[int] = []
    key: tuple[Any, ...] = (kernel, _context())
    for argument in arguments:
        if type(argument) is int:
            words.append(argument & _MASK)
            key += (int,)
        else:
            words += argument.words
            key += (argument.key,)
    handle = _handles.get(key)
    if handle is None:
        handle = _handles[key] = _compile(kernel, arguments)
    thread = _thread
    if thread.compiles:
        return
    x, y = threads if isinstance(threads, tuple) else (threads, 1)
    thread.pack[len(words)](thread.buffer, 0, *words)
    result = _driver().cuLaunchKernel(handle, blocks, 1, 1, x, y, 1, 0, stream, thread.address, 0)
    if result[0]:
        _checked(result, "cuLaunchKernel")
    if thread.launches is not None:
        thread.launches.append((handle, blocks, x, y, arguments))


def words_of(arguments: Sequence[Any]) -> NDArray[np.uint64]:
    """Return the words of arguments of a kernel."""
    words = [[item & _MASK] if isinstance(item, int) else item.words for item in arguments]
    return np.array([word for item in words for word in item], np.uint64)


@contextmanager
def _noting(name: str, value: Any) -> Iterator[Any]:
    """Context in which an attribute of this thread has a value, else None."""
    setattr(_thread, name, value)
    try:
        yield value
    finally:
        setattr(_thread, name, None)


def recorded() -> Any:
    """Return a context in which launches are noted in the list that it returns."""
    return _noting("launches", [])


def compiling() -> Any:
    """Return a context in which kernels are compiled for their arguments, and not launched."""
    return _noting("compiles", True)


def check(error: int, call: str) -> None:
    """Raise RuntimeError for the error of a function that compiled code has called."""
    _checked((_driver().CUresult(error),), call)


@cache
def addresses() -> NDArray[np.int64]:
    """Return the functions for :data:`~fastopt._kernels.record_words.driver_at`."""
    names = "CUDA_PYTHON_CUDA_PER_THREAD_DEFAULT_STREAM", "NUMBA_CUDA_PER_THREAD_DEFAULT_STREAM"
    of_threads = any(environ.get(name, "0") not in ("", "0") for name in names)
    flags = _driver().CUdriverProcAddress_flags(2 if of_threads else 0)
    results = [_driver().cuGetProcAddress(name, VERSION, flags) for name in FUNCTIONS]
    return np.array([int(_checked(result, "cuGetProcAddress")) for result in results], np.int64)


def _compile(kernel: Any, arguments: Sequence[Any]) -> int:
    """Compile a kernel for these argument types, load it and return its handle."""
    from numba.cuda.core.errors import NumbaError as CudaError

    signature = tuple(types.int64 if isinstance(a, int) else a.type for a in arguments)
    with undisturbed():
        try:
            made = kernel.compile(signature)
        except CudaError as error:  # numba-cuda has its own error classes
            raise NumbaError(str(error)) from error
        made.bind()
        return int(made._codelibrary.get_cufunc().handle)


def _context() -> int:
    """Return the handle of the current context."""
    return int(_driver().cuCtxGetCurrent()[1])


@cache
def context_of(device: int) -> int:
    """Return the handle of the primary context of a device."""
    cuda = cuda_target()
    with cuda.gpus[device]:
        return int(cuda.current_context().handle)


def entered(device: int) -> Any:
    """Return a context manager that makes a device the current one."""
    if _context() == context_of(device):
        return _PRESENT
    return cuda_target().gpus[device]


_PRESENT = nullcontext()


def is_captured(stream: int) -> bool:
    """Whether a stream is being captured for a CUDA graph.

    Raises
    ------
    RuntimeError
        Another stream is being captured, which forbids the use of this one.
    """
    cuda_target()
    error, status = _driver().cuStreamIsCapturing(stream)
    if error in CAPTURES:
        raise RuntimeError(CAPTURED)
    return bool(not error and status)


def refuse_capture(*streams: int) -> None:
    """Raise if one of the streams is being captured for a CUDA graph.

    Raises
    ------
    RuntimeError
        A stream is being captured: a graph would repeat the step with the current update counts
        and learning rates.
    """
    if any(map(is_captured, streams)):
        raise RuntimeError(CAPTURED)


@contextmanager
def beside_capture() -> Iterator[None]:
    """Context in which a stream is captured, but allocations and uploads are not.

    Uploads are finished at its end.
    """
    driver = _driver()
    relaxed = driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
    mode = _checked(driver.cuThreadExchangeStreamCaptureMode(relaxed), "the capture's mode")
    try:
        _thread.stream = _upload_stream(_context())
        yield
        _checked(driver.cuStreamSynchronize(_thread.stream), "cuStreamSynchronize")
    finally:
        _thread.stream = None
        driver.cuThreadExchangeStreamCaptureMode(mode)


@cache
def _upload_stream(context: int) -> int:
    """Return a stream of its own, which waits for no other."""
    driver = _driver()
    flags = int(driver.CUstream_flags.CU_STREAM_NON_BLOCKING)
    return int(_checked(driver.cuStreamCreate(flags), "cuStreamCreate"))


def order(first: int, then: int) -> None:
    """Make a stream wait for the work that another one has been given so far.

    The host does not wait.

    Parameters
    ----------
    first, then : int
        Handles of the stream that is waited for, and of the one that waits.
    """
    driver, event = _driver(), cuda_target().event(timing=False)
    _checked(driver.cuEventRecord(int(event.handle), first), "cuEventRecord")
    _checked(driver.cuStreamWaitEvent(then, int(event.handle), 0), "cuStreamWaitEvent")


# Copies


class _Buffer:
    """Pinned memory, and an event that is recorded when the device has read it."""

    __slots__ = ("address", "array", "event", "handle")

    def __init__(self, size: int) -> None:
        cuda = cuda_target()
        self.array = cuda.pinned_array(size, np.uint8)
        self.address = self.array.ctypes.data
        self.event = cuda.event(timing=False)
        self.handle = int(self.event.handle)


class _Device:
    """Pinned buffers of a device, and the objects in use by pending launches.

    Buffers are never freed; a later upload reuses one after the device has read it.
    """

    def __init__(self) -> None:
        self.lock = Lock()
        self.buffers: dict[int, deque[_Buffer]] = {}
        self.held: deque[tuple[Any, Any]] = deque()

    def buffer(self, size: int) -> _Buffer:
        """Return a free buffer of at least `size` bytes; the caller holds the lock."""
        rounded = max(1 << (size - 1).bit_length(), SMALLEST)
        ring = self.buffers.setdefault(rounded, deque())
        driver = _driver()
        if ring and not driver.cuEventQuery(ring[0].handle)[0]:
            ring.rotate(-1)
        elif len(ring) < BUFFERS:
            ring.append(_Buffer(rounded))
        else:
            _checked(driver.cuEventSynchronize(ring[0].handle), "cuEventSynchronize")
            ring.rotate(-1)
        return ring[-1]


@cache
def _device(context: int) -> _Device:
    return _Device()


def upload(memory: Memory, array: NDArray[Any], stream: int) -> None:
    """Copy a contiguous NumPy array to `memory`, which may be larger, on a stream.

    The array may then be changed.
    """
    size = array.nbytes
    if not size:
        return
    stream = stream if _thread.stream is None else _thread.stream
    device, driver = _device(_context()), _driver()
    with device.lock:
        buffer = device.buffer(size)
        memmove(buffer.address, array.ctypes.data, size)
        result = driver.cuMemcpyHtoDAsync(memory.address, buffer.address, size, stream)
        _checked(result, "cuMemcpyHtoDAsync")
        _checked(driver.cuEventRecord(buffer.handle, stream), "cuEventRecord")


def download(memory: Memory, stream: int) -> NDArray[Any]:
    """Copy `memory` to the host, after the earlier work on the stream has finished."""
    array = np.empty(memory.shape, memory.dtype)
    driver = _driver()
    if memory.nbytes:
        result = driver.cuMemcpyDtoHAsync(array.ctypes.data, memory.address, memory.nbytes, stream)
        _checked(result, "cuMemcpyDtoHAsync")
    _checked(driver.cuStreamSynchronize(stream), "cuStreamSynchronize")
    return array


class Ring:
    """Pinned memory in slots that are used in turns, for uploads or downloads by compiled code.

    See :data:`~fastopt._kernels.record_words.ring_at`.

    Parameters
    ----------
    memory : Memory
        What is copied.
    source : numpy.ndarray, optional
        What is uploaded.

    Attributes
    ----------
    numbers : numpy.ndarray
        The slots, as rows of float64.
    """

    def __init__(self, memory: Memory, source: NDArray[Any] | None = None) -> None:
        cuda, pitch = cuda_target(), -(-memory.nbytes // SMALLEST) * SMALLEST
        self.device, self.kept = _device(_context()), (memory, source)
        self.pinned = cuda.pinned_array(BUFFERS * pitch, np.uint8)
        self.numbers = self.pinned.view(np.float64).reshape(BUFFERS, -1)
        self.events = [cuda.event(timing=False) for _ in range(BUFFERS)]
        self.handles = np.array([int(event.handle) for event in self.events], np.int64)
        slots, handles = self.pinned.ctypes.data, self.handles.ctypes.data
        of = 0 if source is None else source.ctypes.data
        numbers = [slots, pitch, handles, BUFFERS, 0, 0, memory.address, memory.nbytes, of]
        self.words = np.array(numbers, np.int64)
        self.view: Any = self.words.data
        self.address: int = self.words.ctypes.data

    def __del__(self) -> None:
        if "view" in vars(self) and self.view[RING_LAST]:  # the device may still use it
            event = self.events[(self.view[RING_LAST] - 1) % BUFFERS]
            self.device.held.append((event, self.pinned))


def copy_word(target: Memory, to: int, source: Memory, of: int, stream: int) -> None:
    """Copy word `of` of `source` to word `to` of `target`, both of 8-byte words, on a stream."""
    addresses = target.address + 8 * to, source.address + 8 * of
    _checked(_driver().cuMemcpyDtoDAsync(*addresses, 8, stream), "cuMemcpyDtoDAsync")


def clear(address: int, size: int, stream: int) -> None:
    """Fill memory with zeros, on a stream."""
    _checked(_driver().cuMemsetD8Async(address, 0, size, stream), "cuMemsetD8Async")


def hold(objects: Any, stream: int) -> None:
    """Keep objects alive until the work launched on a stream has finished."""
    device, driver, event = _device(_context()), _driver(), cuda_target().event(timing=False)
    _checked(driver.cuEventRecord(int(event.handle), stream), "cuEventRecord")
    with device.lock:
        device.held.append((event, objects))
        while device.held and not driver.cuEventQuery(int(device.held[0][0].handle))[0]:
            device.held.popleft()
