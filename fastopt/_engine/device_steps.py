"""Steps that a CUDA device counts, so that the host does not wait for the norm of the gradients.

Tests: ``tests/kernels/test_cuda_driver.py``.
"""

from collections import deque
from collections.abc import Callable
from math import isfinite
from typing import Any, final
from weakref import WeakSet, proxy

import numpy as np

from fastopt._kernels.advance import CARRIED, COUNT
from fastopt._kernels.cpu_calls import LENGTH
from fastopt._kernels.table import launch

__all__ = ["DeviceSteps"]

Finish = Callable[[float, Callable[[], Any] | None], None]
"""Called with the norm of a step, and a function that returns the sums of squares if it was the
last one."""

AHEAD = 32
"""Maximum number of steps whose outcomes the host does not know, before it waits for the oldest."""


class Rows:
    """Device memory with the counts and hyper-parameters of the tensors of a group."""

    def __init__(self, group: Any, driver: Any) -> None:
        table, count = group.table, len(group.places)
        layout = table.layout
        self.group, self.table = group, table
        self.hyper = driver.Memory((max(count, 1),), layout.record)
        self.fields = self.hyper.part((count, len(layout.rule.hyper)), layout.real)
        self.slots = driver.Memory(group.tensors.shape, np.int64)
        self.counts = driver.Memory((count,), np.int64)
        self.carried = driver.Memory((count,), np.float64)
        self.groups = driver.Memory((2, count, len(group.names) + 1), np.float64)
        driver.upload(self.hyper, table.hyper, table.stream_handle)  # read in a skipped first step
        self.sent: dict[str, bytes] = {}

    def send(self, name: str, array: Any, driver: Any, again: bool = False) -> None:
        """Upload an array if it has changed, or `again`."""
        content = array.tobytes()
        if again or self.sent.get(name) != content:
            self.sent.pop(name, None)
            driver.upload(getattr(self, name), array, self.table.stream_handle)
            self.sent[name] = content


@final
class DeviceSteps:
    """Update counts and hyper-parameters of a plan's steps, on the device.

    A kernel counts each step, unless the norm of its gradients is not finite. The host learns this
    when :meth:`settle` is called: :class:`~fastopt._engine.per_index.Counts` does so before its
    counts are read.

    Parameters
    ----------
    plan : Plan
        The plan; :meth:`supports` it.
    """

    def __init__(self, plan: Any) -> None:
        from fastopt._kernels import cuda_driver, cuda_steps

        self.plan, self.driver, self.steps = proxy(plan), cuda_driver, cuda_steps
        self.all_counts = plan.optimizer._index_update_count
        self.indices = frozenset(plan.indices)
        self.apart: WeakSet[Any] = WeakSet()
        self.lead = plan.tables[0]
        self.pending: deque[tuple[Any, Finish]] = deque()
        self.counts = self.slots = np.empty(0, np.int64)
        self.base = np.empty(0, np.int64)
        self.filled: Any = None
        self.given: Any = None
        with self._entered():
            self.norm = self.driver.Memory((cuda_steps.NORM_NUMBERS,), np.float64)
            self.sums = self.driver.Memory((len(plan.indices), 1), np.float64)
            self.order = self.driver.Memory((len(plan.indices),), np.int64)
            self.rows = [Rows(group, cuda_driver) for group in plan.groups]
            places = [place for group in plan.groups for place in group.places]
            order = np.argsort(np.array(places, np.int64))
            self.driver.upload(self.order, order, self.lead.stream_handle)
        self.parts, first = [], 0
        for group in plan.groups:
            self.parts.append(self.sums.part((len(group.places), 1), first=first))
            first += len(group.places)

    @staticmethod
    def supports(plan: Any) -> bool:
        """Whether everything in a step that depends on its count can be computed on the device."""
        optimizer = plan.optimizer
        return (
            all(table.device == plan.tables[0].device for table in plan.tables)
            and plan.tables[0].device is not None
            and not (plan.in_order or optimizer.per_index or optimizer.may_skip)
            and plan.hyper.constant
            and not plan.hyper.carries
            and plan.averaging is None
            and optimizer.step_sums is None
            and plan.planner.launcher is launch
            and not any(table.layout.catch_up for table in plan.tables)
        )

    def _entered(self) -> Any:
        return self.driver.entered(self.lead.device.device_id)

    def step(self, norm: tuple[float, float, float, float], finish: Finish) -> bool:
        """Launch a step whose gradients have been entered into the tables.

        Parameters
        ----------
        norm : tuple of float
            ``rescale_grad``, the inverse of the loss scale, the maximum norm, and a further factor.
        finish : callable
            Called when the outcome is known.

        Returns
        -------
        bool
            False, with nothing changed, if the hyper-parameters depend on unequal update counts.
        """
        if not self._renew():
            return False
        with self._entered():
            self._send(norm)
            self._measure()
            for number, row in enumerate(self.rows):
                self._run(row, number == 0)
            report = self.driver.Report(self.norm, self.lead.stream_handle)
        self.pending.append((report, finish))
        while len(self.pending) > AHEAD or (len(self.pending) > 1 and self.pending[0][0].ready()):
            self._follow(None)
        if self not in self.all_counts.ahead:
            self.all_counts.ahead.append(self)
        return True

    def _renew(self) -> bool:
        """Bring counts of the host and hyper-parameters up to date, as far as these need it."""
        plan, counts = self.plan, self.all_counts
        optimizer = plan.optimizer
        for other in counts.ahead:
            if other is not self and other not in self.apart:
                if not self.indices.isdisjoint(other.indices):
                    counts.settle()
                    break
                self.apart.add(other)
        if optimizer.lr_scheduler is not None:
            counts.settle()
        elif plan.filled[:1] == (optimizer.version,) and not optimizer.param_dict:
            return True
        if plan.counts_version != optimizer.version:
            counts.settle()
            plan._find_slots()
        own = plan.counts[plan.slots]
        if optimizer.lr_scheduler is not None and (own != own[0]).any():
            return False
        largest = plan.counts.item(0)
        try:
            plan._advance(plan.groups, starts=False)
        finally:
            plan.counts[0] = largest  # a schedule is evaluated ahead of the count
        return True

    def _send(self, norm: tuple[float, float, float, float]) -> None:
        """Upload what has changed."""
        plan, counts = self.plan, self.all_counts
        stale = self.counts is not counts.counted or self.slots is not plan.slots
        if stale or (counts.counted[self.slots] != self.base).any():
            counts.settle()
            self.counts, self.slots = counts.counted, plan.slots
            self.base = self.counts[self.slots]
            for row in self.rows:
                places = row.group.places
                row.send("counts", self.base[places], self.driver, again=True)
            self.filled = None
        if self.filled is not plan.filled:
            for row in self.rows:
                group = row.group
                tensors = group.tensors.copy()
                tensors[:, [COUNT, CARRIED]] = 0  # positions on the host
                row.send("slots", tensors, self.driver)
                values = np.zeros(row.groups.shape)
                values[0, : group.values.shape[1]] = group.values[0]
                row.send("groups", values, self.driver)
            self.filled = plan.filled
        if norm != self.given:
            rescale, scale, limit, share = norm
            numbers = np.array([rescale, scale, limit, scale, 0.0, share])
            self.driver.upload(self.norm, numbers, self.lead.stream_handle)
            self.given = norm

    def _measure(self) -> None:
        """Launch the sums of squares of all gradients; the first table's stream waits for all."""
        lead = self.lead.stream_handle
        for row, part in zip(self.rows, self.parts, strict=True):
            row.table.add_squares(part)
            if row.table.stream_handle != lead:
                self.driver.order(row.table.stream_handle, lead)

    def _run(self, row: Rows, first: bool) -> None:
        """Launch the step of a group; the first one computes the norm."""
        table, group, lead = row.table, row.group, self.lead.stream_handle
        correct, dtype, _ = group.compiled
        layout = table.layout
        begin = self.steps.begin(layout.keyed, layout.rule.rescale, correct, dtype)
        if table.stream_handle != lead:
            self.driver.order(lead, table.stream_handle)
        of_row = row.fields, row.slots, row.counts, row.groups, row.carried
        arguments = self.sums, self.order, self.norm, *of_row, int(first)
        with self.plan.planner.compiling(self.plan.indices[0]):
            table.run_counted(begin, row.hyper, arguments)
        if table.stream_handle != lead:
            self.driver.order(table.stream_handle, lead)
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
        length = norm.item(LENGTH)
        if isfinite(length):
            self.counts[self.slots] += 1
            self.base += 1
            self.counts[0] = max(self.counts.item(0), self.base.max())
        finish(length, sums)

    def _sums(self) -> Any:
        """Return the sums of squares of the gradients of the last step."""
        with self._entered():
            sums = self.driver.download(self.sums, self.lead.stream_handle)[:, 0]
            return sums[self.driver.download(self.order, self.lead.stream_handle)]
