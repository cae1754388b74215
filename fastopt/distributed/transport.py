"""How buckets of gradients become sums on the ranks that own them, and how new weights return.

Reason: the order of sums, which reductions of libraries choose by themselves; 16 bits are sent and
summed in float32; each gradient leaves a node once, with every library.
"""

from collections import deque
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any, Protocol

import numpy as np

from fastopt._engine.overlap import Addresses
from fastopt.checkpoint.restore.shards import line_bytes
from fastopt.distributed.communicator import Communicator, Parts, Request, rest
from fastopt.distributed.job import Layers, shared_zeros
from fastopt.distributed.plan import DEPTH, Bucket, Plan, add_up, pack
from fastopt.distributed.ranks import Ranks
from fastopt.optimizer.optimizer import Array

ROOM = 63_000_000
"""Bytes that the buckets of a rank take at most, unless the user chooses their size: with the sizes
of parts rounded up, less than 64 MB."""

ALIGNED = 4096
"""Divisor of the bytes of a slot."""


def default_buckets(nodes: int, least: int | None = None) -> tuple[int, int]:
    """Bytes of gradients in a bucket, and number of buckets in flight, for at most :data:`ROOM`.

    A bucket in flight has three buffers: packed, received, and for weights. Within a node it has
    two slots of gradients of each rank and two of weights, and the buffers have the share of a
    rank. A single bucket is in flight if two would have less than half of :func:`line_bytes` each,
    as messages between nodes take the longer the smaller buckets are.

    Parameters
    ----------
    nodes : int
        Number of nodes, or of ranks if sums are in rank order.
    least : int, optional
        Ranks of the smallest node. Default: sums are in rank order.

    Examples
    --------
    >>> from fastopt.distributed.transport import default_buckets
    >>> default_buckets(2), default_buckets(1024), default_buckets(128, 8)
    ((4194304, 2), (21000000, 1), (24000000, 1))
    """
    best, buffers = line_bytes(nodes), 3.0
    if least is not None:
        slots = 2 * (1 + 1 / least)
        buffers = slots + (3 if nodes == 1 else 3 / least)  # one node may send its buckets instead
    depth = DEPTH if DEPTH * buffers * best <= 2 * ROOM else 1
    return min(best, int(ROOM / buffers / depth)), depth


class BufferPool:
    """Memory of buckets, which the plans of an updater share."""

    def __init__(self) -> None:
        self._memory: list[Array] = []
        """Memory that no bucket in flight uses, each for a bucket of any plan."""
        self._room = self._number = 0

    def reserve(self, room: int, number: int) -> None:
        """Provide memory for `number` buckets of `room` bytes, between calls."""
        if room > self._room or number > self._number:
            self._room, self._number = max(room, self._room), max(number, self._number)
            self._memory = [np.empty(self._room, np.uint8) for _ in range(self._number)]

    def borrow(self, size: int, dtype: np.dtype[Any]) -> Array:
        """Memory for `size` elements, until it is released."""
        return self._memory.pop()[: size * dtype.itemsize].view(dtype)

    def release(self, memory: Array) -> None:
        """Take back memory, unless larger memory has replaced it."""
        base: Any = memory.base
        if base.nbytes == self._room and len(self._memory) < self._number:
            self._memory.append(base)


class Summing(Protocol):
    """A bucket of gradients in flight."""

    def Test(self) -> bool:
        """Whether it can be added up."""

    def add(self, total: Array) -> None:
        """Enter the sums of this rank's part in `total`."""


class Chain:
    """Operations of which each one starts when the one before is complete.

    Parameters
    ----------
    request : Request
        The first one.
    *then : callable
        Functions that start the others.
    """

    def __init__(self, request: Request, *then: Callable[[], Request]) -> None:
        self.request, self.then = request, [*then]

    def starts_last(self) -> bool:
        """Start the next operation if it is time; return whether the last one has been started."""
        if self.then and self.request.Test():
            self.request = self.then.pop(0)()
        return not self.then

    def Test(self) -> bool:
        """See :class:`~fastopt.distributed.communicator.Request`."""
        return self.starts_last() and self.request.Test()

    def rest(self, seconds: float) -> None:
        """See :func:`fastopt.distributed.communicator.rest`."""
        rest(self.request, seconds)


class Collecting(Chain):
    """A bucket that is summed in equal shares, whose sums are then sent to their owners.

    Parameters
    ----------
    summing : Summing
        The sums of this rank's equal share.
    bucket, even : Bucket
        The bucket, and the same one in equal shares.
    rank : int
        This rank.
    comm : Communicator
        Communicator on which the sums are sent.
    total : numpy.ndarray
        Memory for the sums of this rank's part.
    """

    def __init__(
        self,
        summing: Summing,
        bucket: Bucket,
        even: Bucket,
        rank: int,
        comm: Communicator,
        total: Array,
    ) -> None:
        owned, shared = np.array(bucket.starts), np.array(even.starts)
        sums = np.empty(even.counts[rank], bucket.group.real)
        self.total = total  # kept until the request is complete

        def send() -> Request:
            summing.add(sums)
            there = _overlaps(owned, shared[rank : rank + 2])
            here = _overlaps(shared, owned[rank : rank + 2])
            return _all_to_all(comm, sums, there, total, here)

        super().__init__(summing, send)

    def add(self, total: Array) -> None:
        """See :class:`Summing`; they were received there."""


class Transport:
    """What moves buckets between ranks, with memory for them.

    Each rank sends its gradients to the ranks that own them, which sum them in rank order.

    Parameters
    ----------
    ranks : Ranks
        The ranks.
    comm : Communicator, optional
        Communicator on which gradients are sent. Default: the communicator of the ranks.
    """

    copies = False
    """Whether arrays are packed even if they are contiguous in memory."""
    used = 0
    """Bytes that are used from the packing of a bucket until it is read."""

    def __init__(self, ranks: Ranks, comm: Communicator | None = None) -> None:
        self.ranks, self.rank, self.comm = ranks, ranks.rank, ranks.comm
        self.gradient_comm = self.comm if comm is None else comm
        self.spare = BufferPool()

    def fits(self, plan: Plan) -> bool:
        """Whether :meth:`reserve` has nothing to do together with other ranks."""
        return True

    def reserve(self, plan: Plan) -> None:
        """Provide memory for the buckets of a plan, between calls; all ranks must call it."""
        room = max((self._room(bucket.summed) for bucket in plan.buckets), default=0)
        self.spare.reserve(room, 3 * min(plan.depth, len(plan.buckets)))

    def _room(self, bucket: Bucket) -> int:
        """Most bytes that are borrowed at a time for a bucket."""
        most: int = max(bucket.starts[-1], bucket.counts[self.rank] * self.ranks.size)
        return most * int(bucket.group.real.itemsize)

    def for_gradients(self, bucket: Bucket) -> Array:
        """Memory into which this rank packs its gradients, until :meth:`release`."""
        return self.spare.borrow(bucket.starts[-1], bucket.group.wire)

    def for_weights(self, bucket: Bucket) -> Array:
        """Memory of all weights, into which this rank packs its own, until :meth:`release`."""
        return self.spare.borrow(bucket.starts[-1], bucket.group.dtype)

    def release(self, memory: Array) -> None:
        """Take back the memory of a bucket that has been received."""
        self.spare.release(memory)

    def sum(self, bucket: Bucket, source: Array, at: Sequence[int]) -> Summing:
        """Start to sum gradients; `at` has the offset of each rank's part in `source`."""
        every = range(self.ranks.size)
        return _Sent(self, bucket, source, at, every, every)

    def gather(self, bucket: Bucket, weights: Array, at: Sequence[int]) -> Request:
        """Start to complete `weights`, in which `at` has the offset of each rank's part."""
        parts = _in_bytes(bucket.counts, at, weights.itemsize)
        return self.comm.all_gather(weights.view(np.uint8), parts)


class _Sent(Chain):
    """An array in flight, each part to the rank that owns it, which sums what it receives in order.

    Parameters
    ----------
    transport : Transport
        The transport.
    bucket : Bucket
        The bucket.
    source : numpy.ndarray
        The array.
    at : sequence of int
        Offset of the part of each owner.
    owners, sources : sequence of int
        The ranks that own parts, and those that send parts to this one, which is among both.
    """

    def __init__(
        self,
        transport: Transport,
        bucket: Bucket,
        source: Array,
        at: Sequence[int],
        owners: Sequence[int],
        sources: Sequence[int],
    ) -> None:
        counts, rank = bucket.counts, transport.rank
        self.spare, self.bucket, self.place = transport.spare, bucket, sources.index(rank)
        count, size = counts[rank], len(counts)
        self.mine = source[at[owners.index(rank)] :][:count]
        self.received = self.spare.borrow(count * len(sources), source.dtype)
        sent, starts, taken, places = ([0] * size for _ in range(4))
        for peer, start in zip(owners, at, strict=True):
            sent[peer], starts[peer] = counts[peer], start
        for k, peer in enumerate(sources):
            taken[peer], places[peer] = count, count * k
        sent[rank] = taken[rank] = 0  # own part stays in place
        super().__init__(
            _all_to_all(
                transport.gradient_comm, source, (sent, starts), self.received, (taken, places)
            )
        )

    def add(self, total: Array) -> None:
        if len(total):
            count = len(self.received) // len(total)
            parts = self.received.ctypes.data + np.arange(count) * self.mine.nbytes
            parts[self.place] = self.mine.ctypes.data
            add_up(parts[None], [len(total)], self.received.dtype, total, self.bucket.large)
        self.spare.release(self.received)


class Layered(Transport):
    """Gradients are summed within each node in its memory, and the sums of nodes are sent.

    Each rank packs its gradients into its part of memory that the ranks of a node share. It sums
    there, in rank order, what the ranks own for which it stands, see :class:`Layers`, and sends
    these sums to them. They add those of all nodes, in order. New weights return the same way.

    Parameters
    ----------
    ranks : Ranks
        The ranks.
    layers : Layers
        The nodes.
    comm, node_comm : Communicator, optional
        Communicators for gradients, with all ranks and with those of the node, which nothing else
        uses. Default: those of `ranks` and `layers`, on one node only.
    wire : dtype, optional
        Dtype in which the sums of nodes are sent. Default: the dtype of the arithmetic.
    begins : bool
        Whether buckets can be packed before the ranks have agreed on a call.

    Attributes
    ----------
    flying : collections.deque
        Gradients in flight, in the order in which they were packed.
    """

    copies = True

    def __init__(
        self,
        ranks: Ranks,
        layers: Layers,
        comm: Communicator | None = None,
        node_comm: Communicator | None = None,
        wire: np.dtype[Any] | None = None,
        begins: bool = False,
    ) -> None:
        super().__init__(ranks, comm)
        self.wire, self.begins = wire, begins
        self.layers, self.node_comm = layers, layers.node.comm
        self.node_gradient_comm = self.node_comm if node_comm is None else node_comm
        self.flying = deque[_Shared]()
        self._rooms, self._slots = (0, 0), 0
        self._gradients = np.empty((0, 0, 0), np.uint8)
        self._weights = np.empty((0, 0), np.uint8)
        self._packed = self._gathered = 0
        """Numbers of buckets so far, which have slots in turn."""

    @property
    def always(self) -> bool:
        """Whether arrays that are contiguous in memory are not sent from where they are instead."""
        return self.layers.count > 1 or not self.node_comm.sends_in_memory

    def _needed(self, plan: Plan) -> tuple[tuple[int, int], int]:
        """Bytes of a slot for gradients and of one for weights, and number of slots."""
        kinds = [(bucket.starts[-1], bucket.group) for bucket in plan.buckets]
        gradients = max((size * group.real.itemsize for size, group in kinds), default=0)
        weights = max((size * group.dtype.itemsize for size, group in kinds), default=0)
        one, other = (-(-room // ALIGNED) * ALIGNED for room in (gradients, weights))
        # A rank fills a slot when all ranks have entered the barrier of the bucket `depth` before,
        # and so have read the bucket `depth` before that one.
        slots = 2 * plan.depth if self.begins and kinds else min(2 * plan.depth, len(kinds))
        rooms = max(one, self._rooms[0]), max(other, self._rooms[1])
        return rooms, max(slots, self._slots)

    def fits(self, plan: Plan) -> bool:
        """See :class:`Transport`."""
        return self._needed(plan) == (self._rooms, self._slots)

    def reserve(self, plan: Plan) -> None:
        """See :class:`Transport`."""
        if self.layers.count > 1:
            super().reserve(plan)
        if self.fits(plan):
            return
        rooms, slots = self._needed(plan)
        size = self.layers.node.size
        first = slots * size * rooms[0]
        memory = shared_zeros(self.layers.node, first + slots * rooms[1])
        self._rooms, self._slots = rooms, slots
        self._gradients = memory[:first].reshape(slots, size, rooms[0])
        self._weights = memory[first:].reshape(slots, rooms[1])
        self.used = memory.nbytes

    def _room(self, bucket: Bucket) -> int:
        counts, layers = bucket.counts, self.layers
        most = max(sum(counts[k] for k in layers.owners), counts[self.rank] * layers.count)
        return most * int(bucket.group.real.itemsize)

    def for_gradients(self, bucket: Bucket) -> Array:
        """See :class:`Transport`."""
        slot = self._gradients[self._packed % self._slots, self.layers.node.rank]
        return _elements(slot, bucket, bucket.group.real)

    def for_weights(self, bucket: Bucket) -> Array:
        """See :class:`Transport`."""
        return _elements(self._weights[self._gathered % self._slots], bucket, bucket.group.dtype)

    def release(self, memory: Array) -> None:
        """See :class:`Transport`; slots are used in turn."""

    def sum(self, bucket: Bucket, source: Array, at: Sequence[int]) -> Summing:
        """See :class:`Transport`."""
        self.flying.append(_Shared(self, bucket, self._gradients[self._packed % self._slots]))
        self._packed += 1
        return self.flying[-1]

    def gather(self, bucket: Bucket, weights: Array, at: Sequence[int]) -> Request:
        """See :class:`Transport`."""
        self._gathered += 1
        layers, rank, counts = self.layers, self.rank, bucket.counts
        if layers.count == 1:
            return self.node_comm.barrier()
        there, here = [0] * len(counts), [0] * len(counts)
        for k in layers.sources:
            there[k] = counts[rank]
        for k in layers.owners:
            here[k] = counts[k]
        there[rank] = here[rank] = 0
        sent = there, [bucket.starts[rank]] * len(counts)
        between = _all_to_all(self.comm, weights, sent, weights, (here, bucket.starts[:-1]))
        return Chain(between, self.node_comm.barrier)


class _Shared(Chain):
    """A bucket in the memory of the node, whose sums are sent to the owners."""

    def __init__(self, transport: Layered, bucket: Bucket, slots: Array) -> None:
        self.transport, self.bucket, self.slots = transport, bucket, slots
        several = transport.layers.count > 1
        super().__init__(transport.node_gradient_comm.barrier(), *([self._sum_and_send] * several))

    def Test(self) -> bool:
        for bucket in self.transport.flying:  # in order, as on all ranks
            if not bucket.starts_last():
                break
        return not self.then and self.request.Test()

    def _add(self, owners: Sequence[int], counts: Sequence[int], total: Array) -> None:
        """Sum what the ranks of the node have packed for some owners."""
        size, starts = self.bucket.group.real.itemsize, self.bucket.starts
        at = self.slots.ctypes.data + self.slots.strides[0] * np.arange(len(self.slots))
        parts: Addresses = at + np.array([[size * starts[k]] for k in owners])
        add_up(parts, counts, self.bucket.group.real, total, self.bucket.large)

    def _sum_and_send(self) -> "_Sent":
        transport, real = self.transport, self.bucket.group.real
        layers, wire = transport.layers, transport.wire
        sizes = [self.bucket.counts[k] for k in layers.owners]
        self.sums = sums = transport.spare.borrow(sum(sizes), real)
        self._add(layers.owners, sizes, sums)
        if wire is not None and wire != real:
            self.sums = transport.spare.borrow(len(sums), wire)
            pack([sums], np.array([[0, 0, len(sums), 0]]), self.sums)
            transport.spare.release(sums)
        starts = [0, *accumulate(sizes)][:-1]
        return _Sent(transport, self.bucket, self.sums, starts, layers.owners, layers.sources)

    def add(self, total: Array) -> None:
        self.transport.flying.popleft()
        if isinstance(self.request, _Sent):
            self.request.add(total)
            self.transport.spare.release(self.sums)
        else:
            self._add([self.transport.rank], [len(total)], total)


def _elements(slot: Array, bucket: Bucket, dtype: np.dtype[Any]) -> Array:
    """Elements of a bucket in shared memory."""
    return slot[: bucket.starts[-1] * dtype.itemsize].view(dtype)


def _overlaps(ends: Array, window: Array) -> Parts:
    """Counts and offsets, in a window of elements, of the parts between some ends."""
    places = np.clip(ends, *window)
    return np.diff(places).tolist(), (places[:-1] - window[0]).tolist()


def _all_to_all(
    comm: Communicator, source: Array, sent: Parts, target: Array, received: Parts
) -> Request:
    """Send elements, see :meth:`Communicator.all_to_all`; the parts are in elements too."""
    there, here = (_in_bytes(*parts, source.itemsize) for parts in (sent, received))
    return comm.all_to_all(source.view(np.uint8), there, target.view(np.uint8), here)


def _in_bytes(counts: Sequence[int], starts: Sequence[int], size: int) -> Parts:
    """Counts and offsets of elements of some bytes as numbers of bytes."""
    return [size * count for count in counts], [size * start for start in starts]
