"""Allocation of arrays on CUDA devices, and copies to, from and between them.

Tests: ``tests/gpu/test_cuda_streams.py``.
"""

import sys
from collections.abc import Sequence
from importlib import import_module
from math import prod
from operator import is_
from typing import Any, Literal, cast

import numpy as np
from numba.core import config

from fastopt._kernels.devices import Header, cuda_target, header, is_cuda
from fastopt.device import Device

__all__ = [
    "arranged",
    "assign",
    "contiguous",
    "duplicate",
    "host",
    "lie_alike",
    "like",
    "move",
    "owned",
    "placed",
    "sent",
    "snapshot",
    "stream_of",
    "wait_for",
    "zero",
]

Array = np.ndarray[Any, Any]


def like(of: Any, shape: tuple[int, ...], dtype: Any, order: Literal["C", "F", "K"] = "C") -> Any:
    """Return zeros on the device of `of`: a NumPy array, or a numba device array.

    With order "K", for which `of` must be a dense array on a device, its elements lie in memory in
    the order of those of `of`, if that has this shape.
    """
    if not isinstance(of, Header):
        return np.zeros(shape, dtype, cast("Any", order))
    array = _empty(of, shape, np.dtype(dtype), order)
    zero(array)
    return array


def _empty(of: Header, shape: tuple[int, ...], dtype: Any, order: Literal["C", "F", "K"]) -> Any:
    """Return an array like :func:`like`, whose elements are undefined."""
    strides = None
    if order == "K" and shape == of.shape:
        strides = tuple(stride // of.itemsize * dtype.itemsize for stride in of.strides)
    elif order == "F":
        strides = tuple(np.cumprod([dtype.itemsize, *shape]).tolist()[: len(shape)])
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
    torch = sys.modules.get("torch")
    size = prod(shape) * dtype.itemsize
    owner = getattr(getattr(of, "gpu_data", None), "owner", of)  # of a state, the tensor below
    if torch is None or not isinstance(owner, torch.Tensor) or not size or config.ENABLE_CUDASIM:
        return None
    memory = torch.empty(size, dtype=torch.uint8, device=owner.device)
    described = {
        "shape": shape,
        "strides": strides,
        "typestr": dtype,
        "data": (memory.data_ptr(), False),
        "version": 3,
    }
    return cuda_target().from_cuda_array_interface(described, owner=memory, sync=False)


def zero(array: Any) -> None:
    """Fill a numba device array with zeros, after all earlier work on the device."""
    cuda = cuda_target()
    if config.ENABLE_CUDASIM:
        array[...] = 0
    elif array.nbytes:
        driver = import_module("numba.cuda.cudadrv.driver")
        with cuda.gpus[header(array).place.device_id]:
            cuda.synchronize()
            driver.device_memset(array, 0, array.nbytes)
            wait_for(0)  # it may be used on a stream that does not wait for stream 0


def sent(array: Array, stream: Any, of: Any = None) -> Any:
    """Copy a NumPy array to the current device, for use on this stream only.

    torch allocates the copy if it has allocated `of`.
    """
    dtype = array.dtype
    bits = array.view(np.uint16) if dtype.name == "bfloat16" else array  # no buffer protocol
    to = _of_torch(of, bits.shape, bits.dtype, bits.strides)
    copy = cuda_target().to_device(bits, stream=stream, to=to)
    copy = copy if bits is array else copy.view(dtype)
    copy.stream = 0  # else numba would prefer this stream to those of later use
    return copy


def owned(array: Array, device: Device, of: Any = None) -> Any:
    """Copy a NumPy array to a device, as a numba device array; see :func:`sent` for `of`."""
    with cuda_target().gpus[device.device_id]:
        copy = sent(array, 0, of)
        wait_for(0)  # it may be used on a stream that does not wait for stream 0
        return copy


def placed(state: Any, of: Any) -> Any:
    """Copy the NumPy arrays of a state to the device of `of`, if that is on a device."""
    if not isinstance(of, Header):
        return state
    if isinstance(state, (tuple, list)):
        return _rebuilt(state, [placed(part, of) for part in state])
    return owned(state, of.place, of.array()) if type(state) is np.ndarray else state


def stream_of(handle: int) -> Any:
    """Return numba's object for an external stream."""
    cuda = cuda_target()
    if config.ENABLE_CUDASIM or handle == 0:
        return 0
    if handle == 2:
        return cuda.per_thread_default_stream()
    return cuda.external_stream(handle)


def wait_for(handle: int) -> None:
    """Wait for all work that has been started on a stream of the current device."""
    stream = stream_of(handle)
    if stream:
        stream.synchronize()
    elif not config.ENABLE_CUDASIM:
        cuda_target().default_stream().synchronize()


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
    copy = _empty(array if of is None else of, array.shape, array.dtype, order)
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
    from fastopt._kernels import cuda as kernels
    from fastopt._kernels import cuda_driver as driver

    if not target.size:
        return
    addresses = np.array([[array.ctypes.data for array in (target, source)]], np.uint64)
    axes = np.array([target.shape, target.strides, source.strides], np.int64)
    with cuda_target().gpus[target.place.device_id]:
        handle = (target if source.kept is None else source).stream
        table, layout = (driver.Memory(array.shape, array.dtype) for array in (addresses, axes))
        driver.upload(table, addresses, handle)
        driver.upload(layout, axes, handle)
        blocks = min(-(-target.size // kernels.THREADS), 1 << 16)
        arguments = table, layout, target.size, target.itemsize
        kernels.launch(kernels.copy(), blocks, kernels.THREADS, handle, *arguments)
        driver.hold((table, layout), handle)


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
