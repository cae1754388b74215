"""Arrays of a call on a CUDA device: weights and gradients are verified and entered into a table.

Tests: ``tests/kernels/test_cuda_driver.py``, ``tests/gpu/test_cuda_updater.py``.
"""

from collections.abc import Iterable, Sequence
from importlib import import_module
from operator import is_
from typing import Any
from weakref import ref

import numpy as np
from numpy.lib.array_utils import byte_bounds
from numpy.typing import NDArray

from fastopt._kernels.codes import items_of
from fastopt._kernels.device_memory import Copy
from fastopt._kernels.devices import Header, Reading, readings, several_devices, stays
from fastopt._kernels.layout import ADDRESS, WIDTH, Layout
from fastopt._kernels.numpy_abi import address_of

Array = np.ndarray[Any, Any]
Addresses = NDArray[np.uint64]
Written = tuple[NDArray[Any], NDArray[Any]]

UNREADABLE = AttributeError, KeyError, TypeError, ValueError
"""Errors from reading an object that is not a device array; the full checks report it."""


ATTRIBUTES = (
    *("shape", "strides", "dtype", "stream", "gpu_data", "device_ctypes_pointer", "value"),
    *("_view", "context"),
)
"""Names that compiled code reads of an array of numba, of its memory and of that's address."""


def compiled_can_read(arrays: Sequence[Any]) -> bool:
    """Whether the attributes of arrays are no properties, so that reading them runs no Python."""
    kind = import_module("numba.cuda.cudadrv.devicearray").DeviceNDArray
    memory = import_module("numba.cuda.cudadrv.driver").OwnedPointer
    return all(type(array) is kind and type(array.gpu_data) is memory for array in arrays)


class Reader:
    """How compiled code reads gradients; see :data:`~fastopt._kernels.record_words.reader_at`.

    Parameters
    ----------
    grads : sequence
        Gradients, which :func:`compiled_can_read`; later ones have the same forms.
    places : numpy.ndarray
        The divisor of the address of each, its bytes, and where the address is written.
    written : pair of numpy.ndarray
        Start and end addresses of the sorted memory ranges that gradients must not overlap.
    """

    def __init__(
        self,
        grads: Sequence[Any],
        places: NDArray[np.int64],
        written: Written,
    ) -> None:
        lead = grads[0]
        context = lead.gpu_data.context if several_devices() else None
        forms = [(grad.shape, grad.strides, grad.dtype, grad.stream) for grad in grads]
        objects = np.array([[*map(id, form)] for form in forms])
        table = np.column_stack([objects, places])
        kinds, device = (type(lead), type(lead.gpu_data)), id(context) if context else 0
        ranges = [address_of(side) for side in written]
        names = [*map(id, ATTRIBUTES), *ranges, len(written[0])]
        self.words = np.array([address_of(table), *map(id, kinds), device, *names], np.int64)
        self.kept = forms, table, kinds, context, written
        self.address = address_of(self.words)


class TensorArrays:
    """The arrays of one tensor of a table, and their forms.

    Parameters
    ----------
    layout : Layout
        The layout of the table.
    weight : tuple of Header
        The exact weight, and its rounded copy or low 16 bits if it has one.
    state : tuple of Header
        One array for each slot of the rule, and for each number that the rule keeps for a tensor.
    originals : sequence of Header
        The caller's arrays in place of `weight` and `state`; where one differs, kernels work on a
        copy of it.
    lead : Header
        The array of the weight that the caller passes, whose stream is used.
    grad, values : Header
        The caller's gradient, or the values of its rows; and the array that kernels read.

    Attributes
    ----------
    arrays : tuple of Header
        Weight and state, which are kept alive.
    row : numpy.ndarray
        The row of the table; see :mod:`fastopt._kernels.layout`.
    copied : list
        The caller's arrays that kernels work on copies of, with these.
    """

    def __init__(
        self,
        layout: Layout,
        weight: tuple[Header, ...],
        state: tuple[Header, ...],
        originals: Sequence[Header],
        lead: Header,
        grad: Header,
        values: Header,
    ) -> None:
        self.layout, self.arrays, owner = layout, (*weight, *state), lead.array()
        self.width, self.item = items_of(layout, weight[0])
        self.row = np.zeros((1, ADDRESS + len(self.arrays) + 1), np.uint64)
        self.row[0, WIDTH] = self.width
        addresses = [array.ctypes.data for array in self.arrays]
        self.row[0, ADDRESS:] = [*addresses, 0 if layout.sparse else values.ctypes.data]
        pairs = zip(originals, self.arrays, strict=True)
        self.copied = [pair for pair in pairs if pair[0] is not pair[1]]
        of_lead = [k for k, original in enumerate(originals[: len(weight)]) if original is lead]
        self.column, self.itemsize = ADDRESS + (of_lead or [0])[0], lead.itemsize
        self.stream = int(lead.stream)
        self.weight_kinds = [(type(owner), *readings([owner]).kinds)]
        others = [array for array in originals if array is not lead]
        moving = [array for array in others if array.kept is None and not stays(array.array())]
        self.watched = [array.array for array in moving]
        self.watched_at = [array.ctypes.data for array in moving]
        self.watched_kinds = readings([reference() for reference in self.watched]).kinds
        self.grad_bytes = values.nbytes
        self.streams = set() if layout.sparse else {int(values.stream)}
        self.grad_kinds = [None] if grad.kept is not None else readings([grad.array()]).kinds
        self.tensors = [lead.array, *self.watched]
        copied = values is not grad and not layout.sparse
        self.strided = Strided(values, grad) if copied else None


class CallArrays:
    """The forms of the weights and gradients of a table, with which those of a call are compared.

    Parameters
    ----------
    parts : sequence of TensorArrays
        The tensors, with one layout, device and stream.

    Attributes
    ----------
    stream : int
        Handle of the stream of the weights.
    streams : set of int
        Handles of the streams of the gradients.
    captured : bool
        Whether the stream is being captured for a CUDA graph.
    strided : Strided or None
        The copies of a gradient whose elements do not lie like the weight's.
    tensors : sequence
        Written arrays of the call whose versions torch may count.
    version : int
        Number of calls that have changed the address of a weight.
    """

    def __init__(self, parts: Sequence[TensorArrays]) -> None:
        from fastopt._kernels import cuda_driver

        lead, self.driver = parts[0], cuda_driver
        self.layout, self.stream, self.strided = lead.layout, lead.stream, lead.strided
        self.itemsize = np.dtype(self.layout.grad).itemsize
        self.captured, self.version = False, 0
        self.weights, self.grads = Unmoved(), Unmoved()
        self.written: Written | None = None
        self.streams = {stream for part in parts for stream in part.streams}
        self.columns = np.array([part.column for part in parts])
        self.items = np.array([part.itemsize for part in parts], np.uint64)
        self.grad_bytes = np.array([part.grad_bytes for part in parts], np.uint64)
        self.weight_kinds = [kind for part in parts for kind in part.weight_kinds]
        self.grad_kinds = [kind for part in parts for kind in part.grad_kinds]
        self.watched = [reference for part in parts for reference in part.watched]
        self.watched_at = [place for part in parts for place in part.watched_at]
        self.watched_kinds = [kind for part in parts for kind in part.watched_kinds]
        self.tensors: Sequence[Any] = [reference() for part in parts for reference in part.tensors]

    # Weights

    def take_weights(self, weights: Sequence[Any], table: Array) -> bool:
        """Enter the weights of a call.

        Returns
        -------
        bool
            False, with nothing changed, if an array differs in form from that of the table, or if
            their streams differ.
        """
        if not self.watched and self.weights.has(weights):
            self.tensors = ()
            return True
        self.weights.arrays = ()  # as Ctrl-C may come after their addresses are entered
        others = [reference() for reference in self.watched]
        try:
            reading = readings(weights)
            if others and readings(others)[:2] != (self.watched_at, self.watched_kinds):
                return False
        except UNREADABLE:
            return False
        if list(zip(map(type, weights), reading.kinds, strict=True)) != self.weight_kinds:
            return False
        if len({*reading.streams}) > 1:
            return False
        rows, addresses = np.arange(len(table)), np.array(reading.addresses, np.uint64)
        if (table[rows, self.columns] != addresses).any():
            if (addresses % self.items).any():
                return False
            self.version += 1  # first, as Ctrl-C may come in between
            table[rows, self.columns] = addresses
        self.stream = reading.streams[0]
        self.weights.keep(weights)
        self.tensors = (*weights, *others)
        return True

    # Gradients

    def take_grads(
        self, grads: Sequence[Any], table: Array, written: Written, capturable: bool
    ) -> bool:
        """Enter the gradients of a call, unless they are row-sparse.

        Parameters
        ----------
        grads : sequence
            The gradient of each tensor.
        table : numpy.ndarray
            The table.
        written : pair of numpy.ndarray
            Start and end addresses of the sorted memory ranges that are written to, which gradients
            must not overlap.
        capturable : bool
            Whether the call can be part of a CUDA graph.

        Returns
        -------
        bool
            False, with nothing changed, if a gradient differs in kind from the one that the table
            was made for.

        Raises
        ------
        RuntimeError
            The stream is being captured for a CUDA graph.
        """
        self.captured = self.driver.is_captured(self.stream)
        if self.captured and not capturable:
            self.driver.refuse_capture(self.stream)
        if self.layout.sparse:
            return True
        apart = self.written is written  # as far as addresses are those of the call before
        if apart and self.grads.has(grads):
            self.use(self.streams)
            return True
        self.written, self.grads.arrays = None, ()
        try:
            reading = readings(grads)
        except UNREADABLE:
            return False
        if reading.kinds != self.grad_kinds:
            return False
        self.use(reading.streams)
        if not self._enter(reading, table, written, apart):
            return False
        self.grads.keep(grads)
        self.written = written
        return True

    def use(self, streams: Iterable[int]) -> None:
        """Note the streams of gradients, none of which is captured, besides that of weights."""
        self.streams = set(streams)
        if self.streams != {self.stream}:
            others = self.streams - {self.stream}
            if self.captured:  # the others' work would not be part of the graph
                self.driver.refuse_capture(self.stream)
            self.driver.refuse_capture(*others)

    def refuse_capture(self) -> None:
        """Raise if one of the streams is being captured for a CUDA graph."""
        self.driver.refuse_capture(self.stream, *self.streams - {self.stream})

    def _enter(self, reading: Reading, table: Array, written: Written, apart: bool) -> bool:
        """Enter addresses of gradients if they are aligned and overlap no written memory.

        Those in the table are, if it is known that they are `apart`.
        """
        first, strided = np.array(reading.addresses, np.uint64), self.strided
        sizes, unit = self.grad_bytes, self.itemsize
        if strided is not None:
            first, sizes, unit = first - strided.before, strided.size, strided.copies.unit
        if apart and (table[:, -1] == first).all():
            return True
        after = np.searchsorted(written[1], first, side="right")
        starts = np.append(written[0], np.uint64(2**64 - 1))[after]
        if (first % np.uint64(unit)).any() or (starts < first + sizes).any():
            return False
        if strided is None:
            table[:, -1] = first
        else:
            strided.source = reading.addresses[0]
        return True


class Unmoved:
    """The arrays of the last call, if they are numba's: these never move, and need not be read."""

    def __init__(self) -> None:
        self.arrays: Sequence[Any] = ()

    def has(self, arrays: Sequence[Any]) -> bool:
        """Whether these are the arrays."""
        known = self.arrays
        return len(known) == len(arrays) and all(map(is_, [weak() for weak in known], arrays))

    def keep(self, arrays: Sequence[Any]) -> None:
        """Follow the arrays of a call."""
        kinds = dict(zip(map(type, arrays), arrays, strict=True)).values()
        self.arrays = [ref(array) for array in arrays] if all(map(stays, kinds)) else ()


class Strided:
    """A dense gradient that is copied in each step, as its elements do not lie like the weight's.

    Parameters
    ----------
    values : Header
        The copy, which kernels read.
    grad : Header
        The gradient.
    """

    def __init__(self, values: Header, grad: Header) -> None:
        self.values, self.source = values, grad.ctypes.data
        first, last = byte_bounds(grad)
        self.before = np.array([self.source - first], np.uint64)
        self.size = np.array([last - first], np.uint64)
        self.copies = Copy(values, grad)
        self.fresh = False

    def bounds(self) -> tuple[Addresses, Addresses]:
        """Return the start and end addresses of the gradient."""
        first = np.array([self.source], np.uint64) - self.before
        return first, first + self.size

    def copy(self, stream: int, again: bool) -> None:
        """Copy the gradient unless it is fresh; `again` if more kernels of the step follow."""
        if again or not self.fresh:
            self.copies.run(self.source, stream)
        self.fresh = again
