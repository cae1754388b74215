"""Steps that a CUDA device counts, so that the host does not wait for the norm of the gradients.

Tests: ``tests/kernels/test_cuda_driver.py``.
"""

from collections import deque
from collections.abc import Callable
from contextlib import nullcontext
from math import inf, isfinite
from typing import Any, final
from weakref import WeakSet, proxy, ref

import numpy as np

from fastopt._engine.device_hyper import HyperRows
from fastopt._engine.parameters import compiling
from fastopt._kernels.advance import CARRIED, COUNT
from fastopt._kernels.cpu_calls import LENGTH

Finish = Callable[[float, Callable[[], Any] | None], None]
"""Called with the norm of a step, and a function that returns the sums of squares if it was the
last one."""

Norm = tuple[float, float, float, float]
NOT_MEASURED = 1.0, 1.0, inf, 1.0

AHEAD = 32
"""Maximum number of steps whose outcomes the host does not know, before it waits for the oldest."""


class Rows:
    """Device memory with the counts and hyper-parameters of the tensors of a table."""

    def __init__(self, own: HyperRows, driver: Any) -> None:
        from fastopt._kernels import cuda_steps

        table, count = own.table, len(own.places)
        layout = table.layout
        self.own, self.table = own, table
        self.hyper = driver.Memory((max(count, 1),), layout.record)
        self.fields = self.hyper.part((count, len(layout.rule.hyper)), layout.real)
        self.slots = driver.Memory(own.tensors.shape, np.int64)
        self.counts = driver.Memory((count,), np.int64)
        self.carried = driver.Memory((count,), np.float64)
        self.groups = driver.Memory((2, count, len(own.names) + 1), np.float64)
        driver.upload(self.hyper, table.hyper, table.stream)  # read in a skipped first step
        self.sent: dict[str, bytes] = {}
        correct, dtype, _ = own.corrected
        self.begin = cuda_steps.begin(layout.keyed, layout.rule.rescale, correct, dtype)

    def send(self, name: str, array: Any, driver: Any, again: bool = False) -> None:
        """Upload an array if it has changed, or `again`."""
        content = array.tobytes()
        if again or self.sent.get(name) != content:
            self.sent.pop(name, None)
            driver.upload(getattr(self, name), array, self.table.stream)
            self.sent[name] = content


@final
class DeviceSteps:
    """Update counts and hyper-parameters of a call's steps, on the device.

    A kernel counts each step, unless the norm of its gradients is not finite. The host learns this
    when :meth:`settle` is called: :class:`~fastopt._engine.per_index.Counts` does so before its
    counts are read. They keep the steps until then, so that these refer to the call and to the
    counts weakly: a cycle would keep the memory of an updater that is gone.

    Parameters
    ----------
    call : DeviceCall
        The call; :meth:`supports` it.
    """

    def __init__(self, call: Any) -> None:
        from fastopt._kernels import cuda_driver, cuda_steps

        self._call, self.driver = ref(call), cuda_driver
        (part,) = call.parts
        self.all_counts, self.listed = proxy(call.counted), part.indices
        self.indices = frozenset(part.indices)
        self.apart: WeakSet[Any] = WeakSet()
        self.lead = call.tables[0]
        self.pending: deque[tuple[Any, Any]] = deque()
        self.counts = self.slots = self.base = np.empty(0, np.int64)
        self.entered: Any = None
        self.filled: Any = None
        self.given: Norm | None = None
        self.sent = False
        self.kept: list[Any] = []
        with self._entered(), self._beside():
            self.norm = self.driver.Memory((cuda_steps.NORM_NUMBERS,), np.float64)
            self.sums = self.driver.Memory((len(part.indices), 1), np.float64)
            self.order = self.driver.Memory((len(part.indices),), np.int64)
            self.rows = [Rows(own, cuda_driver) for own in part.rows]
            places = [place for own in part.rows for place in own.places]
            order = np.argsort(np.array(places, np.int64))
            self.driver.upload(self.order, order, self.lead.stream)
        self.parts, first = [], 0
        for own in part.rows:
            self.parts.append(self.sums.part((len(own.places), 1), first=first))
            first += len(own.places)

    @property
    def part(self) -> Any:
        """Counts and hyper-parameters of the call, while it lives."""
        call: Any = self._call()
        return call.parts[0]

    @staticmethod
    def supports(call: Any) -> bool:
        """Whether everything in a step that depends on its count can be computed on the device."""
        part, tables = call.parts[0], call.tables
        return (
            len(call.parts) == 1
            and all(table.device == tables[0].device for table in tables)
            and not part.optimizer.per_index
            and part.hyper.constant
            and not part.hyper.carries
            and part.averaging is None
            and part.optimizer.step_sums is None
            and not any(table.layout.catch_up for table in tables)
        )

    def _beside(self) -> Any:
        """Return a context in which uploads and allocations are not captured."""
        return self.driver.beside_capture() if self.lead.captured else nullcontext()

    def _entered(self) -> Any:
        return self.driver.entered(self.lead.device.device_id)

    def step(self, norm: Norm | None = None, finish: Finish | None = None) -> bool:
        """Launch a step whose gradients have been entered into the tables.

        If the stream is captured, the launches are part of a graph; each replay is one step.

        Parameters
        ----------
        norm : tuple of float, optional
            ``rescale_grad``, the inverse of the loss scale, the maximum norm, and a further factor.
            Default: gradients are not measured.
        finish : callable, optional
            Called when the outcome is known.

        Returns
        -------
        bool
            False, with nothing changed, if the hyper-parameters depend on unequal counts, or if
            the step is only counted.
        """
        captured = self.lead.captured
        try:
            with self._entered(), self._beside():
                if not self._renew():
                    return False
                self._send(norm, captured)
                if captured:
                    self._capture(norm is not None)
                else:
                    self._launch(norm is not None)
        except BaseException:
            self.part.forget_new()
            raise
        self.part.new = []
        if captured or norm is None:
            return True
        with self._entered():
            report = self.driver.Report(self.norm, self.lead.stream)
        self.pending.append((report, finish))
        while len(self.pending) > AHEAD or (len(self.pending) > 1 and self.pending[0][0].ready()):
            self._follow(None)
        if self not in self.all_counts.ahead:
            self.all_counts.ahead.append(self)
        return True

    def _renew(self) -> bool:
        """Bring counts of the host and hyper-parameters up to date, as far as these need it."""
        part, counts = self.part, self.all_counts
        optimizer = part.optimizer
        for other in counts.ahead:
            if other is not self and other not in self.apart:
                if not self.indices.isdisjoint(other.indices):
                    counts.settle()
                    break
                self.apart.add(other)
        if optimizer.skips():
            return False  # the host counts without an update
        if optimizer.lr_scheduler is not None:
            counts.settle()
        elif part.filled[:1] == (optimizer.version,) and not optimizer.param_dict:
            return True
        if part.version != optimizer.version:
            counts.settle()
            part.find_slots()
        own = part.counts[part.slots]
        if optimizer.lr_scheduler is not None and (own != own[0]).any():
            return False
        largest = part.counts.item(0)
        try:
            part.advance()
        finally:
            part.counts[0] = largest  # a schedule is evaluated ahead of the count
        return True

    def _launch(self, measured: bool) -> None:
        if measured:
            self._measure()
        for number, row in enumerate(self.rows):
            self._run(row, measured and number == 0)
        if not measured and self not in self.all_counts.graphs:
            self._count()

    def _capture(self, measured: bool) -> None:
        """Launch a step that becomes part of a graph, whose memory is kept."""
        for row in self.rows:
            row.table.renew_entry()
        for number, row in enumerate(self.rows):
            if measured and number == 0:
                self._measure()
            self._run(row, measured and number == 0)
        for row in self.rows:
            self.kept.append(row.table.memory.content)
            row.table.renew_entry()
        if self not in self.all_counts.graphs:
            self.all_counts.graphs.append(self)

    def refresh(self) -> None:
        """Upload hyper-parameters that have changed, for the next replays of graphs."""
        with self._entered():
            self._renew()
            self._send(self.given, False)

    def _send(self, norm: Norm | None, captured: bool) -> None:
        """Upload what has changed."""
        part, counts = self.part, self.all_counts
        stale = self.counts is not counts.counted or self.entered is not part.slots
        if stale or counts.counted[self.slots].tobytes() != self.base.tobytes():
            counts.settle()
            self.counts, self.slots, self.entered = counts.counted, part.slots, part.slots
            self.base = self.counts[self.slots]
            for row in self.rows:
                places = row.own.places
                row.send("counts", self.base[places], self.driver, again=True)
            self.filled = None
        if self.filled is not part.filled:
            for row in self.rows:
                tensors, filled = row.own.tensors.copy(), row.own.values[0]
                tensors[:, [COUNT, CARRIED]] = 0  # positions on the host
                row.send("slots", tensors, self.driver)
                values = np.zeros(row.groups.shape)
                values[0, : len(filled)] = filled
                row.send("groups", values, self.driver)
            self.filled = part.filled
        if norm != self.given or not self.sent:
            rescale, scale, limit, share = norm or NOT_MEASURED
            numbers = np.array([rescale, scale, limit, scale, 0.0, share])
            self.driver.upload(self.norm, numbers, self.lead.stream)
            self.given, self.sent = norm, True

    def _measure(self) -> None:
        """Launch the sums of squares of all gradients; the first table's stream waits for all."""
        lead = self.lead.stream
        for row, part in zip(self.rows, self.parts, strict=True):
            row.table.add_squares(part)
            if row.table.stream != lead:
                self.driver.order(row.table.stream, lead)

    def _run(self, row: Rows, first: bool) -> None:
        """Launch the step of a table; the first one computes the norm."""
        table, lead = row.table, self.lead.stream
        if table.stream != lead:
            self.driver.order(lead, table.stream)
        of_row = row.fields, row.slots, row.counts, row.groups, row.carried
        arguments = self.sums, self.order, self.norm, *of_row, int(first)
        try:
            table.run_counted(row.begin, row.hyper, arguments)
        except Exception:
            with compiling(self.part.optimizer, self.part.indices[0]):
                raise
        if table.stream != lead:
            self.driver.order(table.stream, lead)
        table.release()

    def settle(self) -> None:
        """Wait for the outcomes of the steps so far, and count on the host those that updated."""
        while self.pending:
            self._follow(self._sums if len(self.pending) == 1 else None)

    def _follow(self, sums: Callable[[], Any] | None) -> None:
        """Count the oldest step on the host, too, unless it was skipped."""
        report, finish = self.pending[0]
        norm = report.read()
        self.pending.popleft()
        length = norm[LENGTH]
        if isfinite(length):
            self._count()
        finish(length, sums)

    def _count(self) -> None:
        """Count a step on the host."""
        self._add(1)

    def _add(self, steps: Any) -> None:
        """Add to the counts of the tensors on the host."""
        if self.counts is not self.all_counts.counted:  # other indices came, or went
            self.counts = self.all_counts.counted
            self.slots = self.all_counts.positions(self.listed)
        self.base += steps
        counted = self.counts[self.slots] + steps
        self.counts[self.slots] = counted
        self.counts[0] = max(self.counts.item(0), *counted.tolist())

    def follow_graphs(self) -> None:
        """Wait for the device, and count the steps that graphs have repeated."""
        found = np.empty_like(self.base)
        with self._entered():
            for row in self.rows:
                counts = self.driver.download(row.counts, row.table.stream)
                found[row.own.places] = counts
        self._add(found - self.base)

    def _sums(self) -> Any:
        """Return the sums of squares of the gradients of the last step."""
        with self._entered():
            sums = self.driver.download(self.sums, self.lead.stream)[:, 0]
            return sums[self.driver.download(self.order, self.lead.stream)]
