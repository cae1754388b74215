"""Plan of a call: how its tensors are sliced, packed into buckets and reassembled.

Reason: the order of sums, which keeps bits equal over libraries and bucket sizes; speed, as a warm
call reads headers and copies runs in compiled code.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import nullcontext
from copy import copy
from functools import cache
from itertools import accumulate
from operator import is_, lt
from typing import Any

import numpy as np
from numba import types
from numpy.lib.stride_tricks import as_strided
from numpy.typing import ArrayLike, DTypeLike, NDArray

from fastopt._engine.overlap import Addresses, Ranges, addresses, bounds
from fastopt._kernels import copying, cpu_calls
from fastopt._kernels.chunks import PARALLEL_FROM
from fastopt._kernels.compiling import bind
from fastopt._kernels.layout import kind_of, real_of
from fastopt._kernels.numpy_abi import guard, readable
from fastopt._kernels.threads import may_run_parallel, turn
from fastopt.checkpoint.restore.shards import Placement
from fastopt.distributed.agreement import MOST, Facts, checksum, checksums, copier
from fastopt.optimizer.optimizer import Array, Index

Runs = NDArray[np.int64]
"""Runs of elements, a row for each: position of the tensor in the call, start and stop of its
elements, and offset in the bucket."""

COMPILED_FROM = 1 << 20, 32
"""Bytes, and number of runs, from which one kernel with threads is faster than NumPy."""


@cache
def adder(wire: np.dtype[Any], real: Any, parallel: bool) -> Any:
    """Compiled :func:`fastopt.kernels.copying.add`."""
    kernel = copying.add(kind_of(wire), real.type, parallel)
    return bind(kernel, np.empty((0, 1), np.uint64), np.empty(0, np.int64), np.empty(0, real))


@cache
def rounder(wire: np.dtype[Any]) -> Any:
    """Compiled :func:`fastopt._kernels.copying.convert` from float32."""
    kernel = copying.convert(types.float32, kind_of(wire))
    return bind(kernel, np.empty((0, 2), np.uint64), np.empty(0, np.int64))


def add_up(parts: Addresses, counts: Sequence[int], wire: Any, total: Array, large: bool) -> None:
    """Sum arrays of the dtype `wire`, in order, in the dtype of `total`.

    `parts` has a row for each segment of `total`, with the addresses of the arrays that are summed
    there; `counts` has the elements of each segment. `large` sums are shared by threads.
    """
    parallel = large and may_run_parallel()
    with turn() if parallel else nullcontext():
        adder(wire, total.dtype, parallel)(parts.astype(np.uint64), np.cumsum(counts), total)


def pack(
    arrays: Sequence[Any], runs: Runs, packed: Array, at: Addresses | None = None, used: int = 0
) -> None:
    """Copy consecutive runs of arrays to a bucket; convert to its dtype.

    `at` has the addresses of all arrays, if all are in place and have the bucket's dtype; `used` is
    how many bytes are used until the bucket is read.
    """
    if _copied(arrays, runs, packed, False, at, used) or _rounded(arrays, runs, packed):
        return
    parts = [_elements(arrays[k])[first:last] for k, first, last, _ in runs.tolist()]
    if parts:
        begin, end = runs[0, 3], runs[-1, 3] + runs[-1, 2] - runs[-1, 1]
        with np.errstate(over="ignore"):  # infinities are detected in the sums
            np.concatenate(parts, out=packed[begin:end], casting="unsafe")


def unpack(packed: Array, runs: Runs, arrays: Sequence[Any], at: Addresses | None = None) -> None:
    """Copy runs from a bucket to flat arrays of its dtype; for `at` see :func:`pack`."""
    if not _copied(arrays, runs, packed, True, at):
        for k, first, last, start in runs.tolist():
            arrays[k][first:last] = packed[start : start + last - first]


def _elements(array: Any) -> Any:
    """Flat elements of an array in C order; iterators of other arrays are flat already."""
    return array.reshape(-1) if isinstance(array, np.ndarray) else array


def _rounded(arrays: Sequence[Any], runs: Runs, packed: Array) -> bool:
    """Round runs of float32 arrays to a bucket of half precision, unless one is not in place."""
    at = _in_place(arrays, runs, np.dtype(np.float32)) if packed.itemsize == 2 else None
    if at is None or not may_run_parallel():
        return False
    places, first, last, start = runs.T
    ends = at[places] + 4 * first, packed.ctypes.data + 2 * start
    with turn():
        rounder(packed.dtype)(np.stack(ends, axis=1).astype(np.uint64), last - first)
    return True


def _in_place(arrays: Sequence[Any], runs: Runs, dtype: np.dtype[Any]) -> Addresses | None:
    """Addresses of the arrays that runs belong to, or None if one is of another kind or dtype."""
    named = {k: arrays[k] for k in np.unique(runs[:, 0]).tolist()}
    if not named or any(type(a) is not np.ndarray or a.dtype != dtype for a in named.values()):
        return None
    at = np.zeros(max(named) + 1, np.int64)
    at[[*named]] = addresses([*named.values()])
    return at


def _copied(
    arrays: Sequence[Any],
    runs: Runs,
    packed: Array,
    back: bool,
    at: Addresses | None = None,
    used: int = 0,
) -> bool:
    """Copy large or many runs, unless an array is not in place or is to be converted."""
    size = packed.itemsize
    places, first, last, start = runs.T
    work = size * (last - first).sum(), len(runs)
    if all(map(lt, work, COMPILED_FROM)) or not may_run_parallel():
        return False
    if at is None:
        at = _in_place(arrays, runs, packed.dtype)
        if at is None:
            return False
    ends = at[places] + size * first, packed.ctypes.data + size * start
    source, target = reversed(ends) if back else ends
    with turn():
        copier()(np.stack([source, target, size * (last - first)], axis=1), used)
    return True


def flat_like(arrays: Sequence[Array], dtype: DTypeLike | None = None) -> list[Array]:
    """Return zeros in the shapes of some arrays, consecutive in memory for each dtype.

    :class:`ShardedUpdater` sends gradients from such arrays, and receives weights into them,
    without intermediate copies. Allocate the arrays of a list call with one call of this function,
    in the order of the list.

    Parameters
    ----------
    arrays : sequence of numpy.ndarray
        The arrays, such as the weights of a list call.
    dtype : dtype, optional
        Dtype of all results. Default: the dtype of each array.

    Returns
    -------
    list of numpy.ndarray
        Views in C order. Each of them keeps the memory of all alive.

    Examples
    --------
    >>> import numpy as np
    >>> from fastopt.mpi import flat_like
    >>> first, second = flat_like([np.ones((2, 2)), np.ones(3)])
    >>> first.shape, second
    ((2, 2), array([0., 0., 0.]))
    >>> first.base is second.base
    True
    """
    kinds = [np.dtype(array.dtype if dtype is None else dtype) for array in arrays]
    sizes: dict[np.dtype[Any], int] = {}
    starts = []
    for array, kind in zip(arrays, kinds, strict=True):
        starts.append(sizes.get(kind, 0))
        sizes[kind] = starts[-1] + array.size
    memory = {kind: np.zeros(size, kind) for kind, size in sizes.items()}
    return [
        memory[kind][start : start + array.size].reshape(array.shape)
        for array, kind, start in zip(arrays, kinds, starts, strict=True)
    ]


@cache
def comparer() -> Any:
    """Compiled :func:`fastopt._kernels.cpu_calls.fit`."""
    return bind(cpu_calls.fit(), 0, 0, np.empty((2, 0, 0), np.uint64), np.empty((2, 0), np.int64))


class Guards:
    """Expected properties of the arrays of a list call, which one compiled function compares.

    Weights are C-contiguous. Gradients fit if they are NumPy arrays with the shapes and dtypes of
    their weights, aligned and C-contiguous, and share no memory with any weight.

    Parameters
    ----------
    weights : sequence of numpy.ndarray
        Weights of the call.
    written : Ranges
        Memory of the weights.
    """

    def __init__(self, weights: Sequence[Any], written: Ranges) -> None:
        self._count, self._written = len(weights), written
        self._at = np.array([weight.ctypes.data for weight in weights], np.int64).tobytes()
        self._bytes = np.array([weight.nbytes for weight in weights], np.int64)
        forms = [[guard((weight,), 1)[0] for weight in weights]]
        forms += [[guard((np.asarray(weight),), 0)[0] for weight in weights]]
        self._guards = np.zeros((2, len(weights), max(map(len, forms[0]))), np.uint64)
        for guards, rows in zip(self._guards, forms, strict=True):
            for place, row in zip(guards, rows, strict=True):
                place[: len(row)] = row
        self._clear = b""

    def fit(self, grads: list[Any], weights: list[Any]) -> Addresses | None:
        """Addresses of the gradients if they match the weights, which are those of the plan.

        Otherwise None. Weights must also be in the same memory.
        """
        if not (type(grads) is type(weights) is list):
            grads, weights = [*grads], [*weights]
        if not len(grads) == len(weights) == self._count:
            return None
        starts = np.empty((2, self._count), np.int64)
        if not comparer()(id(weights), id(grads), self._guards, starts):
            return None
        first, at = starts[0].tobytes(), starts[1].tobytes()
        if first != self._at:
            return None
        grads_at: Addresses = starts[1]
        if at != self._clear and self._written.meeting(grads_at, grads_at + self._bytes):
            return None
        self._clear = at
        return grads_at


DEPTH = 2
"""Number of buckets in flight by default: one is packed while another is being sent."""

EVEN_FROM = 1 << 14
"""Elements of a bucket from which ranks that own little of it share the work of its sums."""

LEAST = 10_000
"""Elements that a call compares between ranks at least: their checksum takes a few microseconds."""

Parts = NDArray[np.int64]

Spans = NDArray[np.int64]
"""Rows of the position of a tensor in the call, start and stop of its elements."""


def flat(array: ArrayLike) -> Any:
    """Flat elements in C order, to be sliced and assigned to: a view if possible, else `flat`."""
    array = np.asarray(array)
    in_place = array.flags.c_contiguous and array.flags.aligned
    return array.reshape(-1) if in_place else array.flat


class Bucket:
    """Parts of the shares of all ranks that are sent together.

    Parameters
    ----------
    group : Group
        Group of the tensors.
    parts : numpy.ndarray
        Parts of all ranks, in order, see :meth:`Group.cut`.
    counts : numpy.ndarray
        Number of elements of each rank.
    first : int
        Position of its first element in each rank's share.
    rank : int
        This rank.
    keep : collection of int
        Tensors whose weights are copied back from the bucket on their own rank too.
    """

    def __init__(
        self,
        group: "Group",
        parts: Parts,
        counts: Parts,
        first: int,
        rank: int,
        keep: Collection[int],
    ) -> None:
        self.group, self.first = group, first
        self._divide(counts)
        self.even: Bucket | None = None
        """The bucket in equal shares, in which it is summed if few ranks own most of it."""
        total = self.starts[-1]
        if total >= EVEN_FROM and max(self.counts) * len(self.counts) > 2 * total:
            self.even = copy(self)
            self.even._divide(np.diff(np.arange(len(counts) + 1) * total // len(counts)))
        mine = parts[:, 0] == rank
        sizes = parts[:, 3] - parts[:, 2]
        runs = np.column_stack([parts[:, 1:4], np.cumsum(sizes) - sizes])
        self.sent = _merged(runs)
        """Parts of all ranks, in order."""
        self.mine = _merged(runs[mine])
        """Parts of this rank, in its slices once :meth:`enter` has been called."""
        self.received = _merged(runs[~mine | np.isin(runs[:, 0], [*keep])])
        """Parts to copy to the weights: those of other ranks, and of the tensors `keep`."""
        self.at = self._in_memory(parts)
        """Offset of each rank's part if the tensors of the group are contiguous in memory; None if
        a part is not contiguous even then."""

    def _divide(self, counts: Parts) -> None:
        self.counts: list[int] = counts.tolist()
        self.starts = [0, *accumulate(self.counts)]
        self.large = max(self.counts) * len(self.counts) >= PARALLEL_FROM
        """Whether threads share the sums of gradients on some rank."""

    @property
    def summed(self) -> "Bucket":
        """The bucket in the shares in which it is summed."""
        return self.even or self

    def _in_memory(self, parts: Parts) -> list[int] | None:
        ranks, _, first, last, base = parts.T
        begins = np.diff(ranks, prepend=-1) != 0
        if (base[1:] != (base + last - first)[:-1])[~begins[1:]].any():
            return None
        starts = np.zeros(len(self.counts), np.int64)
        starts[ranks[begins]] = base[begins]
        offsets: list[int] = starts.tolist()
        return offsets if max(offsets) + max(self.counts) <= MOST else None

    def enter(self, begins: Parts) -> None:
        """Describe the parts of this rank in its slices, which start at these elements."""
        self.mine[:, 1:3] -= begins[self.mine[:, 0], np.newaxis]
        place, first, last, _ = self.mine.T
        self.updated = np.stack([place, first, last - first], axis=1)
        """A row for each of them: position in the call, first element, number of elements."""

    def share(self, rank: int) -> tuple[int, int]:
        """Start and stop of the bucket in a rank's share."""
        return self.first, self.first + self.counts[rank]


def _merged(runs: Runs) -> Runs:
    """Merge runs that are consecutive in a tensor and in the bucket."""
    place, first, last, at = runs.T
    same = (place[1:] == place[:-1]) & (first[1:] == last[:-1])
    same &= at[1:] == (at + last - first)[:-1]
    merged: Runs = runs[~np.insert(same, 0, False)[: len(runs)]]
    merged[:, 2] = last[~np.append(same, False)[: len(runs)]]
    return merged


class Group:
    """Tensors of one dtype in one or several lines, with their buckets and this rank's gradients.

    Parameters
    ----------
    dtype : numpy.dtype
        Dtype of the weights; gradients are summed in the dtype of the arithmetic.
    wire : dtype or None
        Dtype in which gradients are sent; None for the dtype of the arithmetic.
    """

    def __init__(self, dtype: DTypeLike, wire: DTypeLike | None) -> None:
        self.dtype = np.dtype(dtype)
        self.real = np.dtype(real_of(self.dtype))
        self.wire = self.real if wire is None else np.dtype(wire)
        self.places: list[int] = []
        self.starts: list[int] = []
        """Offset of each tensor if they are contiguous in memory."""
        self._filled = np.empty((2, 0), np.int64)
        self.size = self.room = 0
        self.grads = np.empty(0, self.real)
        self.weights: Array | None = None

    def add(self, place: int, size: int) -> None:
        """Add a tensor."""
        self.places.append(place)
        self.starts.append(self.size)
        self.size += size

    def cut(
        self,
        placements: Sequence[Placement],
        rank: int,
        ranks: int,
        limit: int,
        keep: Collection[int],
    ) -> None:
        """Create buckets of about `limit` bytes of gradients, and this rank's gradients.

        Buckets are windows of all shares. A part has a rank, the position of the tensor, start and
        stop of its elements, and the offset of the first if tensors are contiguous in memory.
        """
        rows = [
            (owner, place, first, last, start + first)
            for place, start in zip(self.places, self.starts, strict=True)
            for owner, first, last in placements[place].owners(ranks)
        ]
        parts = np.array(rows, np.int64).reshape(-1, 5)
        parts = parts[np.argsort(parts[:, 0], kind="stable")]
        sizes = parts[:, 3] - parts[:, 2]
        totals = np.bincount(parts[:, 0], sizes, ranks).astype(np.int64)
        self.grads = np.empty(int(totals[rank]), self.real)
        filled = np.diff(self.starts, append=self.size) > 0
        self._filled = np.array([self.places, self.starts])[:, filled]
        most = int(totals.max(initial=0))
        step = _window(totals, -(-limit // self.real.itemsize))
        ends = np.cumsum(sizes) - (np.cumsum(totals) - totals)[parts[:, 0]]  # in each share
        windows, parts = _split(parts, ends - sizes, ends, step)
        self.buckets = []
        for k in range(-(-most // step)):
            counts = np.clip(totals - k * step, 0, step)
            self.buckets.append(Bucket(self, parts[windows == k], counts, k * step, rank, keep))

    def joined(
        self, arrays: Sequence[Any], dtype: np.dtype[Any], at: Addresses | None = None
    ) -> Array | None:
        """One array over the arrays of the group's tensors, if they are contiguous in memory.

        None if they are not contiguous or have another dtype. `at` has the addresses of all
        arrays, if they have the dtype of the weights.
        """
        places, starts = self._filled
        if not len(places) or (at is not None and dtype != self.dtype):
            return None
        first = arrays[places[0]]
        if at is None:
            chosen = [arrays[place] for place in places.tolist()]
            if any(not isinstance(a, np.ndarray) or a.dtype != dtype for a in chosen):
                return None
            at = addresses(chosen)
        else:
            at = at[places]
        if not np.array_equal(at - at[0], starts * dtype.itemsize):
            return None
        return as_strided(first, (self.size,), (dtype.itemsize,))


def _window(totals: Parts, limit: int) -> int:
    """Elements of each share in a bucket, so that all shares have about `limit` elements in it."""
    sizes = np.sort(totals)
    smaller, others = np.cumsum(sizes) - sizes, len(sizes) - np.arange(len(sizes))
    k = int(np.searchsorted(smaller + sizes * others, limit))
    if k == len(sizes):
        return max(int(sizes.max(initial=0)), 1)
    return max(-(-(limit - int(smaller[k])) // int(others[k])), 1)


def _split(parts: Parts, starts: Parts, ends: Parts, step: int) -> tuple[Parts, Parts]:
    """Split parts at multiples of `step` in the shares; return the window and the rows of each."""
    first = starts // step
    repeats = (ends - 1) // step - first + 1
    rows = np.repeat(np.arange(len(parts)), repeats)
    windows = first[rows] + np.arange(len(rows)) - (np.cumsum(repeats) - repeats)[rows]
    cut = parts[rows]
    begin = np.maximum(windows * step - starts[rows], 0)
    cut[:, 3] -= np.maximum(ends[rows] - (windows + 1) * step, 0)
    cut[:, 2] += begin
    cut[:, 4] += begin
    return windows, cut


class Plan:
    """Plan of a list call on all ranks: slices of weights, their gradients, and buckets.

    Parameters
    ----------
    indices : list of int or str
        Indices of the parameters, all different.
    weights : list of numpy.ndarray
        Weights of the parameters.
    placements : mapping
        Placement of each index.
    rank, ranks : int
        This rank, and the number of ranks.
    limit : int
        Bytes of gradients in a bucket.
    listed : dict of int to str
        Dtypes of row-sparse gradients, which are not sent in buckets, by the tensor's position.
    wire : dtype, optional
        Dtype in which gradients are sent. Default: the dtype of the arithmetic.
    backward : bool
        Whether buckets of the last tensors are sent first, in the order of a backward pass.
    depth : int
        Number of buckets in flight.
    """

    def __init__(
        self,
        indices: list[Index],
        weights: list[Array],
        placements: Mapping[Index, Placement],
        rank: int,
        ranks: int,
        limit: int,
        listed: dict[int, str],
        wire: DTypeLike | None = None,
        backward: bool = False,
        depth: int = DEPTH,
    ) -> None:
        self.key, self.depth = tuple(indices), depth
        self.indices, self.weights, self.listed = indices, weights, listed
        self.placements = [placements[index] for index in indices]
        self._addresses = addresses(weights)
        self._written = Ranges(*bounds(weights))
        self._headers = [_header(weight) for weight in weights]
        self._types = [*map(type, indices)]
        self._guards: Guards | None = None
        self.facts: Facts | None = None
        self.flats = [flat(weight) for weight in weights]
        self.sizes = [weight.size for weight in weights]
        self._windows: tuple[int, list[Spans]] = (0, [])
        self._itemsizes = np.array([weight.itemsize for weight in weights], np.int64)
        self.copied = {k for k, array in enumerate(self.flats) if not isinstance(array, np.ndarray)}
        self.at = None if self.copied else self._addresses
        """Addresses of the weights, if all are in place."""
        self.slices = [self._slice(place, rank) for place in range(len(weights))]
        self.own = [part.reshape(-1) for part in self.slices]
        self.own_at = addresses(self.own)
        """Flat slices of this rank, and their addresses."""
        self.alone = ranks == 1
        """Whether this is the only rank: gradients are not sent but used in place."""
        self._flat = all(part.ndim == 1 for part in self.slices)
        self.groups = [] if self.alone else [*self._grouped(ranks, limit, wire)]
        self.grads: list[Any] = [None] * len(weights)
        begins = np.array([placement.cut(rank) for placement in self.placements], np.int64)
        for group in self.groups:
            group.cut(self.placements, rank, ranks, limit, self.copied)
            group.weights = group.joined(self.flats, group.dtype)
            ends = np.cumsum([self.slices[place].size for place in group.places])[:-1]
            for place, grad in zip(group.places, np.split(group.grads, ends), strict=True):
                self.grads[place] = grad.reshape(self.slices[place].shape)
            for bucket in group.buckets:
                bucket.enter(begins)
        self._scattered = any(
            group.weights is None or any(b.at is None or b.even for b in group.buckets)
            for group in self.groups
        )
        """Whether weights or parts of a rank are apart in memory."""
        order = self.groups[::-1] if backward else self.groups
        self.buckets = [bucket for group in order for bucket in group.buckets]
        self.places = {index: place for place, index in enumerate(indices)}
        self.group_of = {place: group for group in self.groups for place in group.places}

    def _grouped(self, ranks: int, limit: int, wire: DTypeLike | None) -> Iterator[Group]:
        """Group whole lines, with up to `limit` bytes of gradients in a group."""
        groups: list[Group] = []
        last: dict[Any, Group] = {}
        for place, (weight, placement) in enumerate(
            zip(self.weights, self.placements, strict=True)
        ):
            if place in self.listed:
                continue
            group, line = last.get(weight.dtype), 0
            if placement.position == 0:
                line = placement.share * ranks * np.dtype(real_of(weight.dtype)).itemsize
            if group is None or (group.size and line and group.room + line > limit):
                group = last[weight.dtype] = Group(weight.dtype, wire)
                groups.append(group)
            group.room += line
            group.add(place, weight.size)
        yield from groups

    def _slice(self, place: int, rank: int) -> Array:
        """Return this rank's slice of a tensor."""
        return self.placements[place].slice_of(self.flats[place], rank)

    def compile(self, wire: DTypeLike | None = None) -> None:
        """Compile the kernels that sum gradients, also those of nodes in the dtype `wire`."""
        for bucket in (bucket.summed for bucket in self.buckets):
            real = bucket.group.real
            for kind in {bucket.group.wire, np.dtype(wire or real)}:
                if kind.itemsize == 2 and bucket.group.dtype.itemsize == 4:
                    rounder(kind)
                adder(kind, real, bucket.large)

    def fit(self, indices: list[Any], grads: list[Any], weights: list[Any]) -> Addresses | None:
        """See :meth:`Guards.fit`; also None if the arrays of calls must be checked in Python."""
        if self._guards is None:
            in_python = self.listed or self.copied or not self.weights or not readable()
            if in_python or not self.is_for(indices, weights):
                return None
            self._guards = Guards(self.weights, self._written)
        return self._guards.fit(grads, weights)

    def gradients(self, grads: Sequence[Any], fit: bool) -> list[Any]:
        """Gradients for the slices of this rank, from those of the call.

        They `fit` the weights, see :meth:`fit`, or are flat.
        """
        if not self.alone:
            return [*self.grads]
        if fit and self._flat:
            return [grad.ravel() for grad in grads]
        pairs = enumerate(zip(grads, self.slices, strict=True))
        return [
            grad
            if type(grad) is np.ndarray and grad.shape == part.shape and grad.dtype == part.dtype
            else None
            if k in self.listed
            else _like(grad, part)
            for k, (grad, part) in pairs
        ]

    def is_apart(self, grads: Sequence[Any], at: Addresses | None) -> bool:
        """Whether gradients or weights of a group are apart in memory; for `at` see :meth:`fit`."""
        return self._scattered or any(
            group.joined(grads, group.wire, at) is None for group in self.groups
        )

    def has(self, indices: Sequence[Any]) -> bool:
        """Whether the plan has exactly these indices, with the same types."""
        return [*indices] == self.indices and [*map(type, indices)] == self._types

    def is_for(self, indices: list[Index], weights: list[Any]) -> bool:
        """Whether the plan is for these indices and weights, with the same headers and memory."""
        return (
            indices == self.indices
            and all(map(is_, weights, self.weights))
            and [_header(weight) for weight in weights] == self._headers
            and np.array_equal(addresses(weights), self._addresses)
        )

    def shared(self, grads: Sequence[Array]) -> tuple[int, int] | None:
        """Positions of a gradient and a weight that share memory, or None.

        Such a gradient could change before it is packed.
        """
        for place, other in self._written.meeting(*bounds(grads)):
            if np.shares_memory(grads[place], self.weights[other]):
                return place, other
        return None

    def windows(self, count: int) -> list[Spans]:
        """Spans of all weights, in at most `count` windows of equal size, LEAST or more."""
        if self._windows[0] != count:
            step, spans = (
                max(-(-sum(self.sizes) // count), LEAST),
                self.whole(range(len(self.sizes))),
            )
            parts = np.pad(spans, ((0, 0), (1, 1)))[spans[:, 2] > 0]
            ends = np.cumsum(parts[:, 3])
            window, parts = _split(parts, ends - parts[:, 3], ends, step)
            cuts = np.flatnonzero(np.diff(window)) + 1
            self._windows = count, np.split(parts[:, 1:4], cuts) if len(parts) else []
        return self._windows[1]

    def whole(self, places: Sequence[int]) -> Spans:
        """Spans of all elements of some weights."""
        sizes = [self.sizes[place] for place in places]
        return np.array([places, [0] * len(sizes), sizes], np.int64).T

    def checksums(self, spans: Spans) -> NDArray[np.uint64]:
        """Checksum of the elements of each span."""
        places, first, last = spans.T
        if self.at is None:
            sums = [checksum(self.flats[k][begin:end]) for k, begin, end in spans.tolist()]
            return np.array(sums, np.uint64)
        sizes = self._itemsizes[places]
        at = self.at[places] + first * sizes
        return checksums(np.stack([at, (last - first) * sizes], axis=1))

    def write_back(self) -> None:
        """Copy slices back to weights that are not contiguous."""
        for place in self.copied:
            self.flats[place][:] = self.slices[place].reshape(-1)

    def refresh(self, rank: int) -> None:
        """Update the slices of weights that are not contiguous, which are copies."""
        for place in self.copied:
            self.slices[place][...] = self._slice(place, rank)


def _header(weight: Array) -> tuple[Any, ...]:
    return weight.shape, weight.strides, weight.dtype, weight.flags.writeable


def _like(grad: ArrayLike, weight: Array) -> Array:
    """Flat gradient in the shape of a weight; other dtypes are converted to the arithmetic's."""
    real = np.dtype(real_of(weight.dtype))
    array = np.asarray(grad).reshape(weight.shape)
    return array if array.dtype in (weight.dtype, real) else array.astype(real)
