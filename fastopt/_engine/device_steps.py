"""Steps that a CUDA device counts, so that the host does not wait for the norm of the gradients.

Tests: ``tests/kernels/test_cuda_driver.py``.
"""

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from math import inf, isfinite
from typing import Any, final
from weakref import WeakSet, proxy, ref

import numpy as np

from fastopt._engine.clip import STEPPED, overflow
from fastopt._engine.hyper import hyper_of
from fastopt._engine.owner import Owner
from fastopt._engine.parameters import compiling
from fastopt._kernels import device_front
from fastopt._kernels import record_words as w
from fastopt._kernels.advance import GROUP, NUMBER, SEED, SLOTS
from fastopt._kernels.cpu_calls import LENGTH
from fastopt._kernels.cuda_memory import TableMemory
from fastopt._kernels.cuda_table import CudaTable
from fastopt._kernels.numpy_abi import address_of
from fastopt.amp import LossScaler, StepInfo

Norm = tuple[float, float, float, float]
NOT_MEASURED = 1.0, 1.0, inf, 1.0
UNSENT = 0.0, 0.0, 0.0, 0.0
"""Numbers that no step has."""


class Rows:
    """Device memory with the counts and hyper-parameters of the tensors of a table.

    Parameters
    ----------
    call : DeviceCall
        The call.
    table : CudaTable
        The table.
    places : list of int
        Positions of its tensors in the call.
    """

    def __init__(self, call: Any, table: CudaTable, places: list[int]) -> None:
        from fastopt._kernels import cuda_steps

        layout, count, shared = table.layout, len(places), call.record(places[0]).shared
        self.table, self.places, self.names = table, places, shared.names
        self.values = list[Any]()  # no Shared: it keeps the optimizer
        self.groups = np.zeros((2, count, len(self.names) + 1))
        self.memory = TableMemory(table.inputs)
        self.hyper = self.memory.send("hyper", table.hyper)  # read in a skipped first step
        self.fields = self.hyper.part((count, len(layout.rule.hyper)), layout.real)
        self.carried = self.memory.space("carried", (count,))
        self.slots = self.counts = self.carried  # until they are sent
        correct = shared.hyper.correct
        dtype = np.dtype((np.record, [(name, np.float64) for name in self.names]))
        correction = (None, None) if correct is None else (correct, dtype)
        self.begin = cuda_steps.begin(layout.keyed, layout.rule.rescale, *correction)

    def follow(self, call: Any) -> None:
        """Enter which hyper-parameters the tensors have; equal ones form a group."""
        addresses, last = call.where.hypers[self.places].tolist(), 1 + len(self.names)
        members = dict(zip(addresses, self.places, strict=True))
        groups = {address: k for k, address in enumerate(members)}
        self.values = [call.record(place).shared.values[1:last] for place in members.values()]
        slots = np.zeros((len(self.places), SLOTS), np.int64)
        slots[:, GROUP] = [groups[address] for address in addresses]
        for column, word in ((NUMBER, w.NUMBER), (SEED, w.SEED)):
            slots[:, column] = [call.record(place).words[word] for place in self.places]
        self.slots = self.memory.send("slots", slots)

    def send_groups(self) -> None:
        """Upload the hyper-parameters before their correction, if they have changed."""
        for row, values in zip(self.groups[0], self.values, strict=False):
            row[:-1], row[-1] = values, 1
        groups = self.memory.send("groups", self.groups)
        self.arguments = self.fields, self.slots, self.counts, groups, self.carried


@final
class DeviceSteps:
    """Update counts and hyper-parameters of a call's steps, on the device.

    A kernel counts each step, unless the norm of its gradients is not finite. The host learns this
    when :meth:`settle` is called: :class:`~fastopt._engine.per_index.Counts` does so before its
    counts are read. They keep the steps until then, so that these refer to the call and to the
    counts weakly: a cycle would keep the memory of an updater that is gone. Outcomes are reported
    to the updater and to its loss scaler, which are not kept either.

    Parameters
    ----------
    call : DeviceCall
        The call; :meth:`supports` it.
    updater : callable
        Weak reference to the updater, all of whose calls are made again for another loss scaler.

    Attributes
    ----------
    awaited : StepInfo
        Stands for the outcome of the last step until it is known.
    scaler : callable
        Weak reference to the loss scaler.
    """

    def __init__(self, call: Any, updater: Callable[[], Owner | None]) -> None:
        from fastopt._kernels import cuda_driver, cuda_steps

        optimizer, owner = call.optimizers[0], updater()
        self._call, self.driver, self.updater = ref(call), cuda_driver, updater
        self.all_counts, self.listed = proxy(optimizer._index_update_count), call.indices
        self.awaited = StepInfo(stepped=False, skipped=False)
        scaler = None if owner is None else owner.settings.loss_scaler
        self.scaler: Callable[[], LossScaler | None] = (
            (lambda: None) if scaler is None else ref(scaler)
        )
        self.indices = frozenset(call.indices)
        self.apart: WeakSet[Any] = WeakSet()
        self.lead = call.tables[0]
        made = device_front.functions()
        self._report, self._follow = made["report_call"], made["follow_call"]
        self.counts = self.slots = np.empty(0, np.int64)
        self.numbers: Norm | None = UNSENT
        self.done = 0  # steps that are not counted on the host, although their outcome is known
        self.hypers = np.zeros(call.length, np.int64)
        self.base = np.full(call.length, -1, np.int64)  # nothing has been uploaded
        self.kept: list[Any] = []
        with self._entered(), self._beside():
            self.norm = self.driver.Memory((cuda_steps.NORM_NUMBERS,), np.float64)
            self.reports = self.driver.Ring(self.norm)
            self.sums = self.driver.Memory((call.length, 1), np.float64)
            places = [place for positions in call.places for place in positions]
            order = np.argsort(np.array(places, np.int64))
            self.rows = list(map(partial(Rows, call), call.tables, call.places))
            self.order = self.rows[0].memory.send("order", order)
        firsts = np.cumsum([0, *map(len, call.places)]).tolist()
        shapes = [(len(positions), 1) for positions in call.places]
        self.parts = [self.sums.part(of, first=k) for of, k in zip(shapes, firsts, strict=False)]

    @property
    def call(self) -> Any:
        """The call, while it lives."""
        return self._call()

    @staticmethod
    def supports(call: Any) -> bool:
        """Whether everything in a step that depends on its count can be computed on the device."""
        optimizer, tables = call.optimizers[0], call.tables
        shared = call.record(0).shared
        return (
            len(call.optimizers) == 1
            and all(table.device == tables[0].device for table in tables)
            and not optimizer.per_index
            and shared.hyper.compute is hyper_of(optimizer).compute  # there is no average
            and shared.hyper.constant
            and not shared.hyper.carries
            and optimizer.step_sums is None
            and not any(table.layout.catch_up for table in tables)
        )

    def _beside(self) -> Any:
        """Return a context in which uploads and allocations are not captured."""
        return self.driver.beside_capture() if self.lead.inputs.captured else nullcontext()

    def _entered(self) -> Any:
        return self.driver.entered(self.lead.device.device_id)

    @property
    def pending(self) -> int:
        """Number of steps whose outcomes the host does not know."""
        view = self.reports.view
        return int(view[w.RING_LAST] - view[w.RING_FIRST])

    def step(self, norm: Norm | None = None) -> bool:
        """Launch a step whose gradients have been entered into the tables.

        If the stream is captured, the launches are part of a graph; each replay is one step.

        Parameters
        ----------
        norm : tuple of float, optional
            ``rescale_grad``, the inverse of the loss scale, the maximum norm, and a further factor.
            Default: gradients are not measured.

        Returns
        -------
        bool
            False, with nothing changed, if the step is only counted.
        """
        captured, graphs = self.lead.inputs.captured, self.all_counts.graphs
        if self.call.optimizers[0].skips():
            return False
        with self._entered(), self._beside():
            self.prepare()
            self.send(norm)
            renewed = self.rows if captured else ()
            for row in renewed:
                row.table.renew_entry()
            self._launch(norm is not None)
            for row in renewed:  # the graph keeps its memory
                self.kept.append(row.table.memory.content)
                row.table.renew_entry()
            if captured and self not in graphs:
                graphs.append(self)
            elif norm is not None and not captured:
                functions = address_of(self.driver.addresses())
                if error := self._report(functions, self.reports.address, self.lead.stream):
                    self.driver.check(error, "cuMemcpyDtoHAsync")
            elif self not in graphs:
                self._add(1)
        return True

    def prepare(self) -> None:
        """Prepare a step: settle what other calls have counted, and make room for its report."""
        self._follow_others()
        while self.pending >= self.driver.BUFFERS:
            self._follow_oldest(waits=True)

    def follow(self) -> None:
        """Follow a step with a norm, and those before whose norms have arrived."""
        if self.pending and self not in self.all_counts.ahead:
            self.all_counts.ahead.append(self)
        while self.pending > 1 and self._follow_oldest(waits=False):
            pass

    def _follow_others(self) -> None:
        """Settle the steps of other calls that have counted some of the parameters."""
        counts = self.all_counts
        for other in counts.ahead:
            if other is not self and other not in self.apart:
                if not self.indices.isdisjoint(other.indices):
                    counts.settle()
                    break
                self.apart.add(other)

    def _launch(self, measured: bool) -> None:
        """Launch the sums of squares of all gradients, if they are measured, and the update.

        The stream of the first table, which computes the norm, waits for those of the others.
        """
        for row, part in zip(self.rows, self.parts, strict=True) if measured else ():
            row.table.add_squares(part)
            self._wait(row.table.stream, self.lead.stream)
        numbers = self.sums, self.order, self.norm
        with compiling(self.call.optimizers[0], self.listed[0]):
            for k, row in enumerate(self.rows):
                self._wait(self.lead.stream, row.table.stream)
                arguments = *numbers, *row.arguments, int(measured and k == 0)
                row.table.run(row.begin, row.hyper, arguments)
                self._wait(row.table.stream, self.lead.stream)

    def _wait(self, first: int, then: int) -> None:
        """Make a stream wait for the work of another one."""
        if first != then:
            self.driver.order(first, then)

    def send(self, norm: Norm | None) -> None:
        """Upload what has changed, for the next steps, or for those that graphs repeat."""
        with self._entered():
            self._find_slots()
            if (self.counts[self.slots] != self.base).any():
                self.all_counts.settle()
                self._find_slots()
                self.base[:] = self.counts[self.slots]
                for row in self.rows:
                    counts = self.base[row.places]
                    row.counts = row.memory.send("counts", counts, again=True)
            call = self.call
            if (call.where.hypers != self.hypers).any():
                for row in self.rows:
                    row.follow(call)
                self.hypers[:] = call.where.hypers
            for row in self.rows:
                row.send_groups()
            if norm != self.numbers:
                rescale, scale, limit, share = norm or NOT_MEASURED
                numbers = np.array([rescale, scale, limit, scale, 0.0, share])
                self.driver.upload(self.norm, numbers, self.lead.stream)
                self.numbers = norm

    def settle(self) -> None:
        """Wait for the outcomes of the steps so far, and count on the host those that updated."""
        try:
            while self.pending:
                self._follow_oldest(waits=True)
        finally:
            if self.done:
                self._add(self.done)
                self.done = 0

    def _follow_oldest(self, waits: bool) -> bool:
        """Report the outcome of the oldest step; :meth:`settle` counts it unless it was skipped.

        Returns False if it has not arrived, unless this `waits`.
        """
        ring, scaler = self.reports, self.scaler()
        place = ring.view[w.RING_FIRST] % self.driver.BUFFERS
        status = self._follow(address_of(self.driver.addresses()), ring.address, waits)
        if status < 0:
            self.driver.check(-status, "cuEventSynchronize")
        if status:
            norm, last = ring.numbers.item(place, LENGTH), not self.pending
            self.done += isfinite(norm)
            if last or scaler is not None:
                info, updater = STEPPED._replace(global_norm=norm), self.updater()
                if not isfinite(norm):
                    sums = self._sums() if last else np.empty(0)
                    names = {} if updater is None else updater.optimizer.idx2name
                    info = overflow(sums, self.listed, names, norm)
                if last and updater is not None and vars(updater)["_info"] is self.awaited:
                    vars(updater)["_info"] = info
                if scaler is not None:
                    scaler.update(overflow=info.skipped)
        return bool(status)

    def _find_slots(self) -> None:
        """Find the counts of the tensors on the host; other indices may have come, or gone."""
        if self.counts is not self.all_counts.counted:
            self.counts = self.all_counts.counted
            self.slots = self.all_counts.positions(self.listed)

    def _add(self, steps: Any) -> None:
        """Add to the counts of the tensors on the host."""
        self._find_slots()
        self.base += steps
        counted = self.counts[self.slots] + steps
        self.counts[self.slots] = counted
        self.counts[0] = max(self.counts.item(0), *counted.tolist())

    def follow_graphs(self) -> None:
        """Wait for the device, and count the steps that graphs have repeated."""
        device_counts = np.empty_like(self.base)
        with self._entered():
            for row in self.rows:
                counts = self.driver.download(row.counts, row.table.stream)
                device_counts[row.places] = counts
        self._add(device_counts - self.base)

    def _sums(self) -> Any:
        """Return the sums of squares of the gradients of the last step."""
        with self._entered():
            sums = self.driver.download(self.sums, self.lead.stream)[:, 0]
            return sums[self.driver.download(self.order, self.lead.stream)]
