"""Allocation of arrays on CUDA devices, and copies to, from and between them.

Tests: ``tests/gpu/test_cuda_streams.py``.
"""

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from math import prod
from operator import is_
from threading import local
from typing import Any, Literal, cast

import numpy as np

from fastopt._kernels.devices import Header, cuda_target, header, is_cuda, is_tensor
from fastopt.device import Device

Array = np.ndarray[Any, Any]

ON_HOST = frozenset({type(None), bool, int, float, str, np.ndarray})


def like(of: Any, shape: tuple[int, ...], dtype: Any, order: Literal["C", "F", "K"] = "C") -> Any:
    """Return zeros on the device of `of`: a NumPy array, or a numba device array.

    With order "K", for which `of` must be a dense array on a device, its elements lie in memory in
    the order of those of `of`, if that has this shape. It is for use on the stream of `of`, which
    fills it with zeros. Within :func:`allocated_together`, it has no memory until the end of that.
    """
    if not isinstance(of, Header):
        return np.zeros(shape, dtype, cast("Any", order))
    dtype = np.dtype(dtype)
    if _arena.requests is not None and 0 not in shape:
        return _arena.add(of, shape, dtype, _strides(of, shape, dtype, order))
    array = empty(of, shape, dtype, order)
    zero(array, of.stream)
    return array


class _Arena(local):
    """Arrays that are allocated together, by device, stream, and whether torch allocates them."""

    requests: dict[Any, list[tuple[Any, Header]]] | None = None

    def add(self, of: Header, shape: tuple[int, ...], dtype: Any, strides: Any) -> Any:
        """Return a numba device array without memory."""
        devicearray = import_module("numba.cuda.cudadrv.devicearray")
        array = devicearray.DeviceNDArray(shape, strides, dtype, gpu_data=_NOWHERE)
        assert self.requests is not None
        key = of.place.device_id, of.stream, _is_of_torch(of.array())
        self.requests.setdefault(key, []).append((array, of))
        return array

    def allocate(self) -> None:
        """Give memory to all arrays, filled with zeros."""
        requests, self.requests = self.requests, None
        for several in (requests or {}).values():
            sizes = [-(-array.nbytes // APART) * APART for array, _ in several]
            of = several[0][1]
            whole, first = empty(of, (sum(sizes),), np.dtype(np.uint8), "C"), 0
            zero(whole, of.stream)
            for (array, _), size in zip(several, sizes, strict=True):
                array.gpu_data = whole.gpu_data.view(first, first + array.nbytes)
                first += size


_arena, _NOWHERE = _Arena(), object()

APART = 256
"""Bytes between the beginnings of arrays that are allocated together are multiples of this."""


@contextmanager
def allocated_together() -> Iterator[None]:
    """Context in which :func:`like` allocates all arrays of a device at the end, at once.

    Until then they have no memory: nothing may be done with them. If an error is raised, they have
    none for good.
    """
    if _arena.requests is not None:
        yield
        return
    _arena.requests = {}
    try:
        yield
        _arena.allocate()
    finally:
        _arena.requests = None


def _strides(
    of: Header, shape: tuple[int, ...], dtype: Any, order: Literal["C", "F", "K"]
) -> tuple[int, ...]:
    """Return the strides of an array like :func:`like`."""
    if order == "K" and shape == of.shape:
        return tuple(stride // of.itemsize * dtype.itemsize for stride in of.strides)
    if order == "F":
        return tuple(np.cumprod([dtype.itemsize, *shape]).tolist()[: len(shape)])
    return tuple(prod(shape[k + 1 :]) * dtype.itemsize for k in range(len(shape)))


def empty(
    of: Header, shape: tuple[int, ...], dtype: Any, order: Literal["C", "F", "K"] = "C"
) -> Any:
    """Return an array like :func:`like`, whose elements are undefined."""
    strides = _strides(of, shape, dtype, order)
    cuda = cuda_target()
    with cuda.gpus[of.place.device_id]:
        array = _of_torch(of.array(), shape, dtype, strides)
        if array is None:
            array = cuda.device_array(shape, dtype, strides=strides)
    return array


def _of_torch(
    of: Any, shape: tuple[int, ...], dtype: Any, strides: tuple[int, ...] | None
) -> Any | None:
    """Return a numba device array that torch allocates, if it has allocated `of`.

    The array is then included in ``torch.cuda.memory_allocated()``, and torch releases cached
    memory if there is too little.
    """
    size = prod(shape) * dtype.itemsize
    if not size or not _is_of_torch(of):
        return None
    torch = sys.modules["torch"]
    memory = torch.empty(size, dtype=torch.uint8, device=_owner(of).device)
    described = {
        "shape": shape,
        "strides": strides,
        "typestr": dtype,
        "data": (memory.data_ptr(), False),
        "version": 3,
    }
    return cuda_target().from_cuda_array_interface(described, owner=memory, sync=False)


def _owner(array: Any) -> Any:
    """Return the object that owns the memory of an array: of a state, the tensor below."""
    return getattr(getattr(array, "gpu_data", None), "owner", array)


def _is_of_torch(array: Any) -> bool:
    """Whether torch has allocated an array."""
    return is_tensor(_owner(array))


def zero(array: Any, stream: int) -> None:
    """Fill a new numba device array with zeros, on a stream."""
    if array.nbytes:
        from fastopt._kernels.cuda_driver import clear, entered

        described = header(array)
        with entered(described.place.device_id):
            clear(described.ctypes.data, array.nbytes, stream)


def owned(array: Array, device: Device, of: Any = None) -> Any:
    """Copy a NumPy array to a device, as a numba device array.

    torch allocates the copy if it has allocated `of`.
    """
    dtype = array.dtype
    bits = array.view(np.uint16) if dtype.name == "bfloat16" else array  # no buffer protocol
    with cuda_target().gpus[device.device_id]:
        to = _of_torch(of, bits.shape, bits.dtype, bits.strides)
        copy = cuda_target().to_device(bits, stream=0, to=to)
        copy = copy if bits is array else copy.view(dtype)
        copy.stream = 0  # else numba would prefer this stream to those of later use
        # It may be used on a stream that does not wait for the default one.
        cuda_target().default_stream().synchronize()
    return copy


def placed(state: Any, of: Any) -> Any:
    """Copy the NumPy arrays of a state to the device of `of`, if that is on a device."""
    if not isinstance(of, Header):
        return state
    if isinstance(state, (tuple, list)):
        return _rebuilt(state, [placed(part, of) for part in state])
    return owned(state, of.place, of.array()) if type(state) is np.ndarray else state


def contiguous(array: Header, stream: int) -> Header:
    """Return the array, or the header of a C-contiguous and aligned copy.

    Elements are copied on `stream`, also when they are copied back.
    """
    if array.flags.c_contiguous and array.flags.aligned:
        return array
    return _copied(array, stream, array, "C")


def arranged(array: Header, of: Header, stream: int) -> Header:
    """Return the array, or the header of an aligned copy whose elements lie like those of `of`."""
    if lie_alike((of, array)):
        return array
    return _copied(array, stream, of, "K")


def lie_alike(arrays: Sequence[Any]) -> bool:
    """Whether arrays are aligned and dense, and have their elements in the same order."""
    lead = arrays[0]
    axes = sorted(range(lead.ndim), key=lambda axis: -lead.strides[axis])
    return lead.size > 0 and all(
        array.flags.aligned
        and array.shape == lead.shape
        and bool(array.transpose(axes).flags.c_contiguous)
        for array in arrays
    )


def _copied(array: Header, stream: int, of: Header, order: Literal["C", "K"]) -> Header:
    kept = duplicate(array, stream, of, order)
    view: Header = header(kept).view()
    view.kept, view.stream = kept, stream
    return view


def duplicate(
    array: Header,
    stream: int | None = None,
    of: Header | None = None,
    order: Literal["C", "K"] = "C",
) -> Any:
    """Return a copy as a numba device array, C-contiguous or in the order of `of`."""
    copy = empty(array if of is None else of, array.shape, array.dtype, order)
    target = header(copy).view()
    target.stream = array.stream if stream is None else stream
    move(target, array)
    return copy


def snapshot(array: Header) -> Any:
    """Return a copy for use on any stream that waits for the default one, as a numba device array.

    The array's stream then waits for the copy; the host does not wait.
    """
    from fastopt._kernels import cuda_driver as driver

    with driver.entered(array.place.device_id):
        if array.stream:
            driver.order(array.stream, 0)
        copy = duplicate(array, 0)
        if array.stream:
            driver.order(0, array.stream)
        return copy


def move(target: Header, source: Header) -> None:
    """Copy the elements of an array to another of the same shape and dtype.

    The copy runs on the stream of the target, or of the source if :func:`contiguous` made that.
    """
    from fastopt._kernels import cuda_driver as driver

    if not target.size:
        return
    with cuda_target().gpus[target.place.device_id]:
        handle = (target if source.kept is None else source).stream
        copy = Copy(target, source)
        copy.run(source.ctypes.data, handle)
        driver.hold(copy, handle)


class Copy:
    """Copies of arrays with one shape and strides to an array on the current device.

    Parameters
    ----------
    target, source : Header
        Arrays of the same shape and dtype, with elements.

    Attributes
    ----------
    unit : int
        Bytes that a thread copies at once; addresses must be multiples of it.
    """

    def __init__(self, target: Header, source: Header) -> None:
        from fastopt._kernels import cuda as kernels
        from fastopt._kernels import cuda_driver as driver

        self.kernels, self.driver, self.target = kernels, driver, target.ctypes.data
        self.unit, axes = _merged_axes(target, source)
        self.axes = np.array(axes, np.int64).reshape(-1, 3).T.copy()
        self.size = prod(self.axes[0].tolist())
        self.addresses = np.zeros((1, 2), np.uint64)
        self.memories = [
            driver.Memory(array.shape, array.dtype) for array in (self.addresses, self.axes)
        ]
        index: Any = np.uint32 if self.size < 1 << 32 else np.uint64
        kind: Any = np.dtype(f"u{self.unit}").type
        self.kernel = kernels.copy(kind, index)

    def run(self, source: int, stream: int) -> None:
        """Copy from the address of a source, on a stream."""
        addresses, axes = self.memories
        if self.addresses[0, 1] != source:
            if not self.addresses[0, 0]:
                self.driver.upload(axes, self.axes, stream)
            self.addresses[:] = 0, 0
            self.driver.upload(addresses, np.array([[self.target, source]], np.uint64), stream)
            self.addresses[:] = self.target, source
        threads = self.kernels.THREADS
        blocks = min(-(-self.size // threads), 1 << 16)
        self.driver.launch(self.kernel, blocks, threads, stream, addresses, axes, self.size)


def _merged_axes(target: Header, source: Header) -> tuple[int, list[tuple[int, int, int]]]:
    """Return bytes that are copied at once, and the length and strides of each axis in these.

    Axes that lie like one in both arrays are one.
    """
    axes = list(zip(target.shape, target.strides, source.strides, strict=True))
    unit = target.itemsize
    places = [target.ctypes.data, source.ctypes.data, *target.strides, *source.strides]
    if any(place % unit for place in places):
        axes.append((unit, 1, 1))
        unit = 1
    merged: list[tuple[int, int, int]] = []
    for length, *strides in axes:
        to, of = (stride // unit for stride in strides)
        if merged and merged[-1][1:] == (length * to, length * of):
            length *= merged.pop()[0]
        if length > 1 or not merged:
            merged.append((length, to, of))
    return unit, merged


def assign(target: Array, values: Array) -> None:
    """Write `values`, which are on the host, to an array of the same shape and dtype."""
    if isinstance(target, Header):
        copied = owned(values, target.place)  # kept alive until the copy has finished
        cuda = cuda_target()
        with cuda.gpus[target.place.device_id]:
            cuda.synchronize()  # updates of a state run on its weight's stream
            move(target, header(copied))
            cuda.synchronize()
    else:
        target[...] = values


def host(array: Any) -> Any:
    """Copy a CUDA array to the host; return anything else unchanged.

    The items of tuples, lists and dictionaries are copied.
    """
    if type(array) in ON_HOST:
        return array
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
        cuda.synchronize()  # updates of a state run on its weight's stream
        if not (hasattr(array, "copy_to_host") and described.flags.forc):
            array = duplicate(described)
            cuda.synchronize()
        return array.copy_to_host()


def _rebuilt(of: Any, parts: list[Any]) -> Any:
    """Return a tuple, named tuple or list of the type of `of`."""
    return of._make(parts) if hasattr(of, "_make") else type(of)(parts)
