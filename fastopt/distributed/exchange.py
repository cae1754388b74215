"""Communication of one call: gradients are summed bucket by bucket, weights are gathered.

Reason: speed, as packing, sending and updating take place at once (``docs/scaling.md``).
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from time import perf_counter
from typing import Any, cast

import numpy as np

from fastopt._arrays import Gradient
from fastopt._engine.overlap import Addresses
from fastopt._engine.validate import check_index, label
from fastopt.distributed.plan import Bucket, Group, Parts, Plan, pack, unpack
from fastopt.distributed.ranks import Ranks
from fastopt.distributed.transport import Collecting, Summing, Transport
from fastopt.optimizer.optimizer import Array, Index


class Exchange:
    """Sums gradients over the ranks, updates slices as sums arrive, and gathers the new weights.

    All ranks start and complete the same operations in the same order.

    Parameters
    ----------
    ranks : Ranks
        The ranks.
    plan : Plan
        The tensors.
    choose : callable
        Function of the plan that returns its transport, once the ranks are in the call.

    Attributes
    ----------
    grads : list
        Gradient of each tensor on this rank, flat unless `at` has addresses; None for gradients
        that are not ready.
    at : numpy.ndarray or None
        Addresses of the gradients, if all have the dtypes of their weights and are C-contiguous.
    begun : int
        Number of gradient buckets that this rank has started to send.
    """

    def __init__(self, ranks: Ranks, plan: Plan, choose: Callable[[Plan], Transport]) -> None:
        self.ranks, self.plan, self._choose = ranks, plan, choose
        self.rank, self._chosen = ranks.rank, cast(Transport | None, None)
        self.grads: list[Any] = [None] * len(plan.indices)
        self._put: dict[int, bool] = {}
        """Places of the gradients that were entered early, and whether they are released."""
        self.at: Addresses | None = None
        self._missing = {group: len(group.places) for group in plan.groups}
        self.begun = self._added = self._arrived = self._gathered = 0
        self._reducing: deque[tuple[Bucket, Summing, Array | None]] = deque()
        self._gathering: deque[tuple[Bucket, Any, Array | None]] = deque()
        self._sources: dict[Group, Array | None] = {}
        self.seconds = dict.fromkeys(("packing", "communication", "update"), 0.0)
        self._since = perf_counter()

    @property
    def transport(self) -> Transport:
        """What moves the buckets between the ranks."""
        if self._chosen is None:  # a cached_property has one lock for all ranks that are threads
            self._chosen = self._choose(self.plan)
        return self._chosen

    def _lap(self, name: str) -> None:
        """Add the time since the last call to `seconds[name]`."""
        now = perf_counter()
        self.seconds[name] += now - self._since
        self._since = now

    # Gradients

    def _begin(self) -> None:
        """Start to sum a bucket, packed unless it is contiguous in memory and may be sent so."""
        self.begun += 1
        bucket, transport = self.plan.buckets[self.begun - 1], self.transport
        group = bucket.group
        packed, at = None, bucket.at
        whole = bucket.even is None and not transport.copies
        source = self._in_memory(group) if whole and at is not None else None
        if source is None or at is None:
            source = packed = transport.for_gradients(bucket)
            at = bucket.summed.starts[:-1]
            places = self.at if group.dtype == group.wire else None
            pack(self.grads, bucket.sent, packed, places, transport.used)
            self._release(bucket)
        self._lap("packing")
        summing = transport.sum(bucket.summed, source, at)
        if bucket.even is not None:
            share = group.grads[slice(*bucket.share(self.rank))]
            comm = transport.gradient_comm
            summing = Collecting(summing, bucket, bucket.even, self.rank, comm, share)
        self._reducing.append((bucket, summing, packed))
        self._lap("communication")

    def _release(self, bucket: Bucket) -> None:
        """Free gradients that were entered early, after the last bucket with parts of them."""
        group = bucket.group
        if bucket is group.buckets[-1]:
            self._sources.pop(group, None)
            for place in group.places:
                if self._put.get(place):
                    self.grads[place] = None

    def _in_memory(self, group: Group) -> Array | None:
        """The gradients of a group as one array, if they are contiguous in memory."""
        if group not in self._sources:
            self._sources[group] = group.joined(self.grads, group.wire, self.at)
        return self._sources[group]

    def enter(self, grads: list[Any], at: Addresses | None) -> None:
        """Enter the gradients of a call, besides those that :meth:`put` has; see `grads`, `at`."""
        pairs = enumerate(zip(self.grads, grads, strict=True))
        self.grads = [early if k in self._put else grad for k, (early, grad) in pairs]
        self.at = at

    def put(self, place: int, grad: Array, release: bool = False) -> None:
        """Enter a gradient, and send the buckets that it completes, without waiting.

        With `release`, it is kept only until it has been packed.
        """
        self._since = perf_counter()
        self.grads[place], self._put[place] = grad, release
        self._missing[self.plan.group_of[place]] -= 1
        buckets = self.plan.buckets
        while True:
            if self._reducing and self._reducing[0][1].Test():
                self._add()
            elif self._may_begin(buckets) and not self._missing[buckets[self.begun].group]:
                self._begin()
            else:
                break
        self._lap("communication")

    def _may_begin(self, buckets: Sequence[Bucket]) -> bool:
        """Whether the next of these buckets can be sent, in the same order on all ranks."""
        waits = any(bucket.even is not None for bucket, *_ in self._reducing)
        return self.begun < len(buckets) and len(self._reducing) < self.plan.depth and not waits

    def arrivals(self, count: int | None = None) -> Iterator[Bucket]:
        """Yield each bucket, or the first `count`, once the sums of this rank are complete."""
        buckets = self.plan.buckets[:count]
        while self._arrived < len(buckets):
            while self._may_begin(buckets):
                self._begin()
            if self._arrived < self._added:  # added in put(), count the wait here
                self.ranks.waits += 1
            else:
                self.ranks.wait(self._reducing[0][1])
                self._lap("communication")
                self._add()
            self._arrived += 1
            yield buckets[self._arrived - 1]

    def discard(self, begun: int) -> None:
        """Complete the first `begun` buckets of a failed call, which some rank has started."""
        weights = self.plan.weights
        pairs = zip(self.grads, weights, strict=True)
        self.grads = [np.zeros(w.size, w.dtype) if g is None else g for g, w in pairs]
        for _ in self.arrivals(begun):
            pass

    def _add(self) -> None:
        """Sum the received parts of the oldest bucket in flight, which has arrived."""
        bucket, summing, packed = self._reducing.popleft()
        first, last = bucket.share(self.rank)
        summing.add(bucket.group.grads[first:last])
        if packed is not None:
            self.transport.release(packed)
        self._release(bucket)
        self._added += 1
        self._lap("packing")

    def receive(self) -> None:
        """Wait for the sums of all buckets."""
        for _ in self.arrivals():
            pass

    # Updates

    def resume(self) -> None:
        """Exclude the time since the last operation, that of an agreement, from `seconds`."""
        self._since = perf_counter()

    @property
    def is_waiting(self) -> bool:
        """Whether all gradients are in buckets, none of which has been waited for."""
        return self._arrived == 0 and bool(self.plan.buckets) and not self.plan.listed

    def parts(self) -> Iterator[Parts]:
        """Yield the parts of this rank's slices that each bucket completes, to be updated.

        The new weights are sent before the next ones.
        """
        for bucket in self.arrivals():
            yield bucket.updated
            self._lap("update")
            self._gather(bucket)

    # Weights

    def _gather(self, bucket: Bucket) -> None:
        """Start sending this rank's new weights of a bucket, and receiving those of others."""
        if len(self._gathering) == self.plan.depth:
            self._unpack()
        group, transport = bucket.group, self.transport
        weights, at, packed = group.weights, bucket.at, None
        if weights is None or at is None or transport.copies:
            weights = packed = transport.for_weights(bucket)
            at = bucket.starts[:-1]
            pack(self.plan.own, bucket.mine, packed, self.plan.own_at, transport.used)
        self._lap("packing")
        request = transport.gather(bucket, weights, at)
        self._gathering.append((bucket, request, packed))
        self._gathered += 1
        self._lap("communication")

    def _unpack(self) -> None:
        """Wait for the oldest bucket of weights in flight, and copy it to the weights."""
        bucket, request, packed = self._gathering[0]
        self.ranks.wait(request)
        self._gathering.popleft()
        self._lap("communication")
        if packed is None:
            return
        unpack(packed, bucket.received, self.plan.flats, self.plan.at)
        self.transport.release(packed)
        self._lap("packing")

    def finish(self) -> None:
        """Gather the remaining weights."""
        self._lap("update")
        if self.plan.alone:
            self.plan.write_back()
        for bucket in self.plan.buckets[self._gathered :]:
            self._gather(bucket)
        while self._gathering:
            self._unpack()


class EarlyGradients:
    """Gradients passed to :meth:`ShardedUpdater.begin` since the last call.

    Parameters
    ----------
    names : dict
        Names of the parameters, for messages.

    Attributes
    ----------
    exchange : Exchange or None
        The exchange to which gradients were passed on.
    """

    def __init__(self, names: dict[Any, str]) -> None:
        self.names = names
        self.exchange: Exchange | None = None
        self._grads: dict[Index, tuple[Any, bool]] = {}
        """Gradients, None for those that were released, and whether they were sent."""

    @property
    def any(self) -> bool:
        """Whether there are gradients."""
        return bool(self._grads)

    def add(self, index: Index, grad: Gradient | None, sent: bool = False) -> None:
        """Enter a gradient."""
        if index in self._grads:
            raise ValueError(f"{label(index, self.names)}: begin() was called twice in a step")
        self._grads[index] = grad, sent

    def complete(self, indices: list[Any], grads: list[Any], weights: list[Any]) -> list[Any]:
        """Return the gradients of a call, also of parameters for which it has None.

        Those that were released are zeros without memory of their own.
        """
        return [*map(self._completed, indices, grads, weights)] if self._grads else grads

    def _completed(self, index: object, grad: Gradient | None, weight: Array) -> Any:
        if grad is not None or (index := check_index(index)) not in self._grads:
            return grad
        early, _ = self._grads[index]
        return np.broadcast_to(np.float32(0), np.shape(weight)) if early is None else early

    def check(self, plan: Plan, grads: list[Any]) -> None:
        """Raise ValueError unless a call has the gradients that were sent, or None."""
        if self.exchange is None:
            return
        if self.exchange.plan is not plan:
            raise ValueError(
                "begin() was called for the parameters of the previous call, not for these"
            )
        for index, (early, sent) in self._grads.items():
            grad = grads[plan.places[index]]
            if sent and grad is not None and (early is None or not _is_same(early, grad)):
                problem = "the gradient is not the one passed to begin()"
                cure = ", which was released: pass None" if early is None else ""
                raise ValueError(f"{label(index, self.names)}: {problem}{cure}")


def _is_same(one: object, other: object) -> bool:
    """Whether two gradients are the same array or views of the same elements."""
    if one is other:
        return True
    one, other = np.asarray(one), np.asarray(other)
    places = [array.__array_interface__["data"] for array in (one, other)]
    header = (one.shape, one.dtype, one.strides) == (other.shape, other.dtype, other.strides)
    return header and places[0] == places[1]
