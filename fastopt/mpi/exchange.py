"""The exchange of one call: gradients are summed bucket by bucket, weights are gathered."""

from collections import deque
from collections.abc import Iterator, Sequence
from time import perf_counter
from typing import Any

import numpy as np
from mpi4py import MPI

from fastopt.kernels.table import Pieces, Table, chunks, launch
from fastopt.mpi.plan import DEPTH, Bucket, Plan
from fastopt.mpi.sums import Sums

__all__ = ["Exchange"]

Array = np.ndarray[Any, Any]

KINDS = {2: MPI.UINT16_T, 4: MPI.FLOAT, 8: MPI.DOUBLE}
"""MPI's datatypes for gradients and weights, by their bytes."""


class Exchange:
    """Sums of gradients over the ranks, updates of slices as they come in, and new weights.

    All ranks begin and end the same operations in the same order.

    Parameters
    ----------
    sums : Sums
        The ranks.
    plan : Plan
        The tensors.
    grads : list
        Gradient of each tensor on this rank, flat.
    """

    def __init__(self, sums: Sums, plan: Plan, grads: Sequence[Any]) -> None:
        self.sums, self.ranks, self.plan = sums, sums.ranks, plan
        self.comm, self.rank = self.ranks.comm, self.ranks.rank
        self.grads = grads
        self._reduced = self._gathered = 0
        self._reducing: deque[tuple[Bucket, Any, Array, Array]] = deque()
        self._gathering: deque[tuple[Bucket, Any, Array]] = deque()
        self.seconds = dict.fromkeys(("packing", "communication", "update"), 0.0)
        self._since = perf_counter()

    def _lap(self, name: str) -> None:
        """The time since the last call was spent on this."""
        now = perf_counter()
        self.seconds[name] += now - self._since
        self._since = now

    # Gradients

    def _reduce(self, bucket: Bucket) -> None:
        """Pack a bucket and begin to send each rank its part."""
        wire, counts = bucket.group.wire, bucket.counts
        packed = self.plan.borrow(bucket.starts[-1], wire)
        parts = [self.grads[k][first:last] for k, first, last, _ in bucket.sent]
        with np.errstate(over="ignore"):  # to infinity, which sums are checked for
            np.concatenate(parts, out=packed, casting="unsafe")
        kind, own = KINDS[wire.itemsize], counts[self.rank]
        received = self.plan.borrow(own * self.ranks.size, wire)
        self._lap("packing")
        sent, taken = list(counts), [own] * self.ranks.size
        sent[self.rank] = taken[self.rank] = 0  # that part is where it is
        places = [own * rank for rank in range(self.ranks.size)]
        request = self.comm.Ialltoallv(
            [packed.view(np.uint8), (sent, bucket.starts[:-1]), kind],
            [received.view(np.uint8), (taken, places), kind],
        )
        self._reducing.append((bucket, request, packed, received))
        self._lap("communication")

    def arrivals(self) -> Iterator[Bucket]:
        """Yield each bucket once the sums of this rank's part are there.

        They are added up in the order of the ranks: their bits do not depend on the MPI library.
        """
        buckets = self.plan.buckets
        while self._reduced < len(buckets) or self._reducing:
            while self._reduced < len(buckets) and len(self._reducing) < DEPTH:
                self._reduced += 1
                self._reduce(buckets[self._reduced - 1])
            bucket, request, packed, received = self._reducing[0]
            self.ranks.wait(request)
            self._reducing.popleft()
            self._lap("communication")
            self._add(bucket, packed, received)
            self.plan.give_back(packed)
            self.plan.give_back(received)
            self._lap("packing")
            yield bucket

    def _add(self, bucket: Bucket, packed: Array, received: Array) -> None:
        """Add up what the ranks have sent."""
        first, last = bucket.own(self.rank)
        total, begin = bucket.group.grads[first:last], bucket.starts[self.rank]
        parts = list(received.reshape(self.ranks.size, -1))
        parts[self.rank] = packed[begin : begin + len(total)]
        np.add(parts[0], parts[1], out=total, dtype=total.dtype)
        for part in parts[2:]:
            np.add(total, part, out=total)

    def receive(self) -> None:
        """Wait for all sums."""
        for _ in self.arrivals():
            pass

    # Updates

    def launch(self, tables: Sequence[Table]) -> None:
        """Update slices: bucket by bucket where elements do not depend on each other."""
        self._since = perf_counter()  # ranks have agreed until now, which belongs to the call
        waiting = self._reduced == 0 and self.plan.buckets
        if not (waiting and all(map(_separable, tables))):
            self.receive()
            launch(tables, self.sums.combined)
            self._lap("update")
            return
        work = self._work(tables)
        for bucket, pieces in zip(self.arrivals(), work, strict=True):
            for table, (own, total) in zip(tables, pieces, strict=True):
                table.update(own, total)
            self._lap("update")
            self._gather(bucket)

    def _work(self, tables: Sequence[Table]) -> list[list[tuple[Pieces, int]]]:
        """Pieces of work of each bucket in each table; those of the last call if it was alike."""
        before = self.plan.work
        if before and len(before[0]) == len(tables):  # noqa: SIM102
            if all(a is b for a, b in zip(before[0], tables, strict=True)):
                work: list[list[tuple[Pieces, int]]] = before[1]
                return work
        work = [[self._pieces(bucket, table) for table in tables] for bucket in self.plan.buckets]
        self.plan.work = list(tables), work
        return work

    def _pieces(self, bucket: Bucket, table: Table) -> tuple[Pieces, int]:
        """Pieces of work of a table on the elements whose gradients are in a bucket."""
        grads = bucket.group.grads
        begin, end = (grads.ctypes.data + grads.itemsize * at for at in bucket.own(self.rank))
        at, sizes = table.entry[:, -1].astype(np.int64), np.array(table.sizes)
        if table.layout.real != grads.dtype:
            return np.empty((0, 3), np.int64), 0
        start = np.clip((begin - at) // grads.itemsize, 0, sizes)
        stop = np.clip((end - at) // grads.itemsize, 0, sizes)
        rows = np.flatnonzero(start < stop)
        pieces, total = chunks(*((size, 1) for size in (stop - start)[rows].tolist()))
        pieces = pieces.copy()
        pieces[:, 1] += start[rows][pieces[:, 0]]
        pieces[:, 0] = rows[pieces[:, 0]]
        return pieces, total

    # Weights

    def _gather(self, bucket: Bucket) -> None:
        """Begin to send this rank's new weights of a bucket to all, and to receive theirs."""
        if len(self._gathering) == DEPTH:
            self._unpack()
        packed = self.plan.borrow(bucket.starts[-1], bucket.group.dtype)
        if bucket.slices:
            first, last = bucket.starts[self.rank : self.rank + 2]
            np.concatenate(bucket.slices, out=packed[first:last])
        self._lap("packing")
        kind = KINDS[packed.itemsize]
        target = [packed.view(np.uint8), (bucket.counts, bucket.starts[:-1]), kind]
        request = self.comm.Iallgatherv(MPI.IN_PLACE, target)
        self._gathering.append((bucket, request, packed))
        self._gathered += 1
        self._lap("communication")

    def _unpack(self) -> None:
        """Wait for the oldest bucket of weights and put them where they belong."""
        bucket, request, packed = self._gathering[0]
        self.ranks.wait(request)
        self._gathering.popleft()
        self._lap("communication")
        flats = self.plan.flats
        for place, first, last, at in bucket.received:
            flats[place][first:last] = packed[at : at + last - first]
        self.plan.give_back(packed)
        self._lap("packing")

    def finish(self) -> None:
        """Gather the weights that have not been gathered yet."""
        self._lap("update")
        if self.plan.alone:
            self.plan.write_back()
        for bucket in self.plan.buckets[self._gathered :]:
            self._gather(bucket)
        while self._gathering:
            self._unpack()


def _separable(table: Table) -> bool:
    """Whether elements may be updated in any portions."""
    rule = table.layout.rule
    return not (rule.passes or rule.row or table.layout.sparse or table.copied)
