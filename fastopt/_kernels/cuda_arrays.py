"""Arrays of a call on a CUDA device: weights and gradients are verified and entered into a table.

Tests: ``tests/kernels/test_cuda_driver.py``, ``tests/gpu/test_cuda_updater.py``.
"""

from collections.abc import Iterable, Sequence
from importlib import import_module
from typing import Any, Self
from weakref import ref

import numpy as np
from numpy.lib.array_utils import byte_bounds
from numpy.typing import NDArray

from fastopt._kernels.device_memory import Copy
from fastopt._kernels.devices import Header, Reading, readings, several_devices, stays
from fastopt._kernels.layout import Layout
from fastopt._kernels.numpy_abi import address_of

Array = np.ndarray[Any, Any]
Addresses = NDArray[np.uint64]
Written = tuple[NDArray[Any], NDArray[Any]]

UNREADABLE = AttributeError, KeyError, TypeError, ValueError
"""Errors from reading an object that is not a device array; the full checks report it."""


SETS = 64
"""Maximum number of sets of arrays that calls use in turns, and are known."""

MEMBERS = 1 << 13
"""Number of arrays in all known sets, if that is more than one set."""

Ids = tuple[int, ...]


class ArraySet:
    """The arrays of a call, which are known once `alive` has references to all of them.

    Parameters
    ----------
    arrays : sequence
        The arrays, which are numba's.
    ids : tuple of int
        Their ids.
    reading : Reading
        What has been read of them.

    Attributes
    ----------
    dead : list
        References to arrays that have died.
    """

    __slots__ = ("alive", "dead", "ends", "ids", "reading")

    def __init__(self, arrays: Sequence[Any], ids: Ids, reading: Reading) -> None:
        self.ids, self.reading = ids, reading
        self.ends = ref(arrays[0]), ref(arrays[-1])  # other arrays may get the ids of dead ones
        self.alive: list[Any] = []
        self.dead: list[Any] = []

    @property
    def known(self) -> bool:
        """Whether arrays with these ids are the same ones."""
        return bool(self.alive) and not self.dead

    def follow(self, arrays: Sequence[Any]) -> bool:
        """Know the arrays, whose ids are those; return whether this is another set."""
        if self.dead or self.ends[0]() is not arrays[0] or self.ends[1]() is not arrays[-1]:
            return True
        if not self.alive and all(map(stays, arrays)):
            died = self.dead.append
            self.alive = [ref(array, died) for array in arrays]
        return False


def sets_of(count: int) -> int:
    """Return how many sets of `count` arrays are known."""
    return min(SETS, max(1, MEMBERS // count))


class Known:
    """Sets of arrays of earlier calls, if they are numba's: these never move.

    Parameters
    ----------
    sets : int
        Maximum number of sets.

    Attributes
    ----------
    last : ArraySet or None
        The arrays of the last call; None if they may move.
    passing : bool
        Whether calls bring objects that have not been seen before.
    """

    def __init__(self, sets: int) -> None:
        self.most, self.passing = sets, False
        self.sets: dict[Ids, ArraySet] = {}
        self.last: ArraySet | None = None

    @property
    def stay(self) -> bool:
        """Whether the arrays of the last call are known."""
        return self.last is not None and self.last.known

    def is_last(self, ids: Ids) -> bool:
        """Whether these are the ids of the arrays of the last call, which are known."""
        last = self.last
        return last is not None and last.known and last.ids == ids

    def read(self, arrays: Sequence[Any], ids: Ids) -> Reading:
        """Return what is known of arrays, or read them; :meth:`keep` follows."""
        self.last = None  # as Ctrl-C may come after their addresses are entered
        found = self.sets.get(ids)
        return found.reading if found is not None and found.known else readings(arrays)

    def keep(self, arrays: Sequence[Any], ids: Ids, reading: Reading) -> None:
        """Note the arrays of a call; they are known from the second call on."""
        if not (stays(arrays[0]) and stays(arrays[-1])):
            return
        found = self.sets.get(ids)
        if found is None or found.follow(arrays):
            full = found is None and len(self.sets) >= min(self.most, sets_of(len(ids)))
            newest = next(reversed(self.sets.values()), None)
            self.passing |= full or (newest is not None and newest.ends[0]() is None)
            if full:
                del self.sets[next(iter(self.sets))]
            found = self.sets[ids] = ArraySet(arrays, ids, reading)
        self.last = found

    def forget(self) -> None:
        """Know no arrays."""
        self.last = None
        self.sets.clear()


ATTRIBUTES = (
    *("shape", "strides", "dtype", "stream", "gpu_data", "device_ctypes_pointer", "value"),
    *("_view", "context"),
)
"""Names that compiled code reads of an array of numba, of its memory and of that's address."""


def compiled_can_read(arrays: Sequence[Any]) -> bool:
    """Whether the attributes of arrays are no properties, so that reading them runs no Python."""
    kind = import_module("numba.cuda.cudadrv.devicearray").DeviceNDArray
    memory = import_module("numba.cuda.cudadrv.driver").OwnedPointer
    return all(type(each) is kind and type(each.gpu_data) is memory for each in arrays)


class Reader:
    """How compiled code reads gradients; see :data:`~fastopt._kernels.record_words.reader_at`.

    Parameters
    ----------
    grads : sequence
        Gradients, which :func:`compiled_can_read`; later ones have the same forms.
    slots, units, sizes : numpy.ndarray
        Where the address of each is written, its divisor, and the bytes of each.
    written : pair of numpy.ndarray
        Start and end addresses of the sorted memory ranges that gradients must not overlap.
    """

    def __init__(
        self,
        grads: Sequence[Any],
        slots: NDArray[np.int64],
        units: NDArray[np.int64],
        sizes: NDArray[np.int64],
        written: Written,
    ) -> None:
        lead = grads[0]
        context = lead.gpu_data.context if several_devices() else None
        forms = [(each.shape, each.strides, each.dtype, each.stream) for each in grads]
        objects = np.array([[*map(id, form)] for form in forms])
        table = np.column_stack([objects, units, sizes, slots])
        kinds, device = (type(lead), type(lead.gpu_data)), id(context) if context else 0
        ranges = [address_of(each) for each in written]
        names = [*map(id, ATTRIBUTES), *ranges, len(written[0])]
        self.words = np.array([address_of(table), *map(id, kinds), device, *names], np.int64)
        self.kept = forms, table, kinds, context, written
        self.address = address_of(self.words)


class CallArrays:
    """The forms of the weights and gradients of a table, with which those of a call are compared.

    Parameters
    ----------
    layout : Layout
        The layout of the table.
    lead : Header
        The array of the weight that the caller passes, whose stream is used.
    column : int
        The column of its address.
    others : sequence of Header
        The caller's other arrays that are written to.
    grad, values : Header
        The caller's gradient, and the one that kernels read: `grad`, or a copy of it.

    Attributes
    ----------
    stream : int
        Handle of the stream of the weights.
    streams : set of int
        Handles of the streams of the gradients.
    captured : bool
        Whether the stream is being captured for a CUDA graph.
    same : bool
        Whether the weights are known to be those of the call before.
    strided : Strided or None
        The copies of a gradient whose elements do not lie like the weight's.
    tensors : sequence
        Written arrays of the call whose versions torch may count.
    version : int
        Number of calls that have changed the address of a weight.
    """

    def __init__(
        self,
        layout: Layout,
        lead: Header,
        column: int,
        others: Sequence[Header],
        grad: Header,
        values: Header,
    ) -> None:
        self._begin(layout)
        weight = lead.array()
        self.stream = int(lead.stream)
        self.weight_kinds = [(type(weight), *readings([weight]).kinds)]
        self.columns, self.items = np.array([column]), np.array([lead.itemsize], np.uint64)
        moving = [each for each in others if each.kept is None and not stays(each.array())]
        self.watched = [each.array for each in moving]
        self.watched_at = [each.ctypes.data for each in moving]
        self.watched_kinds = readings([each() for each in self.watched]).kinds
        self.grad_bytes = np.array([values.nbytes], np.uint64)
        self.streams = set() if layout.sparse else {int(values.stream)}
        self.grad_kinds = [None] if grad.kept is not None else readings([grad.array()]).kinds
        self.tensors: Sequence[Any] = [weight, *(each() for each in self.watched)]
        copied = values is not grad and not layout.sparse
        self.strided: Strided | None = Strided(values, grad) if copied else None

    def _begin(self, layout: Layout) -> None:
        from fastopt._kernels import cuda_driver

        self.driver, self.layout = cuda_driver, layout
        self.itemsize = np.dtype(layout.grad).itemsize
        self.weights, self.grads = Known(1), Known(SETS)
        self.captured, self.same, self.version = False, False, 0
        self.written: Written | None = None

    @classmethod
    def joined(cls, parts: Sequence["CallArrays"]) -> Self:
        """Return the arrays of several tables with one layout, device and stream."""
        made, lead = cls.__new__(cls), parts[0]
        made._begin(lead.layout)
        made.stream, made.strided = lead.stream, None
        made.streams = {stream for part in parts for stream in part.streams}
        for name in ("weight_kinds", "watched", "watched_at", "watched_kinds", "grad_kinds"):
            setattr(made, name, [each for part in parts for each in getattr(part, name)])
        for name in ("columns", "items", "grad_bytes"):
            setattr(made, name, np.concatenate([getattr(part, name) for part in parts]))
        made.tensors = [each for part in parts for each in part.tensors]
        return made

    # Weights

    def take_weights(self, weights: Sequence[Any], table: Array) -> bool:
        """Enter the weights of a call.

        Returns
        -------
        bool
            False, with nothing changed, if an array differs in form from that of the table, or if
            their streams differ.
        """
        ids = tuple(map(id, weights))
        self.same = self.weights.is_last(ids)
        if self.same and not self.watched:
            self.tensors = ()
            return True
        try:
            found = self.weights.read(weights, ids)
            others = [each() for each in self.watched]
            watched = readings(others) if others else Reading([], [], [])
        except UNREADABLE:
            return False
        if list(zip(map(type, weights), found.kinds, strict=True)) != self.weight_kinds:
            return False
        if (watched.addresses, watched.kinds) != (self.watched_at, self.watched_kinds):
            return False
        if len({*found.streams}) > 1:
            return False
        rows, addresses = np.arange(len(table)), np.array(found.addresses, np.uint64)
        if (table[rows, self.columns] != addresses).any():
            if (addresses % self.items).any():
                return False
            self.version += 1  # first, as Ctrl-C may come in between
            table[rows, self.columns] = addresses
        self.stream = found.streams[0]
        self.weights.keep(weights, ids, found)
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
        self.check_capture(capturable)
        if self.layout.sparse:
            return True
        if self.written is not written:
            self._forget(table)
            self.written = written
        ids = tuple(map(id, grads))
        if self.grads.is_last(ids):
            if len(self.streams) > 1 or self.stream not in self.streams:
                self.use(self.streams)
            return True
        try:
            found = self.grads.read(grads, ids)
        except UNREADABLE:
            return False
        if found.kinds != self.grad_kinds:
            return False
        self.use(found.streams)
        if not self._enter(found, table, written):
            return False
        self.grads.keep(grads, ids, found)
        return True

    def check_capture(self, capturable: bool) -> None:
        """Note whether the stream is being captured; raise if the call is not capturable."""
        self.captured = self.driver.is_captured(self.stream)
        if self.captured and not capturable:
            self.driver.refuse_capture(self.stream)

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

    def _enter(self, found: Reading, table: Array, written: Written) -> bool:
        """Enter addresses of gradients if they are aligned and overlap no written memory."""
        first, target, sizes = np.array(found.addresses, np.uint64), table, self.grad_bytes
        unit, strided = self.itemsize, self.strided
        if strided is not None:
            target, sizes, unit = strided.table, strided.size, strided.copies.unit
            first = first - strided.before
        if (target[:, -1] != first).any():
            after = np.searchsorted(written[1], first, side="right")
            starts = np.append(written[0], np.uint64(2**64 - 1))[after]
            if (first % np.uint64(unit)).any() or (starts < first + sizes).any():
                return False
            target[:, -1] = first
        if strided is not None:
            strided.source = found.addresses[0]
        return True

    def _forget(self, table: Array) -> None:
        """Compare all gradients with the memory that is written to, which has changed."""
        self.grads.forget()
        target = table if self.strided is None else self.strided.table
        target[:, -1] = 0


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
        self.table = np.zeros((1, 1), np.uint64)
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
