"""Steps that a CUDA device counts, so that the host does not wait for the norm of the gradients.

Tests: ``tests/kernels/test_cuda_driver.py``.
"""

from collections.abc import Callable
from contextlib import nullcontext
from math import inf, isfinite
from typing import Any, final
from weakref import WeakSet, proxy, ref

import numpy as np

from fastopt._engine.clip import overflow
from fastopt._engine.hyper import hyper_of
from fastopt._engine.hyper_rows import Shared
from fastopt._engine.owner import Owner
from fastopt._engine.parameters import compiling
from fastopt._kernels import device_front
from fastopt._kernels import record_words as w
from fastopt._kernels.advance import GROUP, NUMBER, SEED, SLOTS
from fastopt._kernels.cpu_calls import LENGTH
from fastopt._kernels.cuda_table import CudaTable
from fastopt._kernels.numpy_abi import address_of
from fastopt.amp import LossScaler, StepInfo

Norm = tuple[float, float, float, float]
NOT_MEASURED = 1.0, 1.0, inf, 1.0


class Outcome:
    """Where the outcomes of steps are reported: the updater and its loss scaler, kept by neither.

    Attributes
    ----------
    awaited : StepInfo
        Stands for the outcome of the last step until it is known.
    """

    def __init__(
        self,
        updater: Callable[[], Owner | None],
        scaler: LossScaler | None,
        names: dict[Any, str],
    ) -> None:
        self.updater, self.names = updater, names
        self.awaited = StepInfo(stepped=False, skipped=False)
        self._scaler = None if scaler is None else ref(scaler)

    @property
    def scaler(self) -> LossScaler | None:
        """The loss scaler, if it lives."""
        return None if self._scaler is None else self._scaler()

    def report(self, info: StepInfo, last: bool) -> None:
        """Report a step, to the updater if it is the last one."""
        updater, scaler = self.updater(), self.scaler
        if last and updater is not None and vars(updater)["_info"] is self.awaited:
            vars(updater)["_info"] = info
        if scaler is not None:
            scaler.update(overflow=info.skipped)


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
    driver : module
        The driver.
    """

    def __init__(self, call: Any, table: CudaTable, places: list[int], driver: Any) -> None:
        from fastopt._kernels import cuda_steps

        layout, count, shared = table.layout, len(places), call.record(places[0]).shared
        self.table, self.places, self.names = table, places, shared.names
        self.driver, self.values = driver, list[Any]()  # no Shared: it keeps the optimizer
        self.hyper = driver.Memory((max(count, 1),), layout.record)
        self.fields = self.hyper.part((count, len(layout.rule.hyper)), layout.real)
        self.slots = driver.Memory((count, SLOTS), np.int64)
        self.counts = driver.Memory((count,), np.int64)
        self.carried = driver.Memory((count,), np.float64)
        self.groups = driver.Memory((2, count, len(self.names) + 1), np.float64)
        driver.upload(self.hyper, table.hyper, table.stream)  # read in a skipped first step
        self.sent: dict[str, bytes] = {}
        correct = shared.hyper.correct
        dtype = np.dtype((np.record, [(name, np.float64) for name in self.names]))
        given = (None, None) if correct is None else (correct, dtype)
        self.begin = cuda_steps.begin(layout.keyed, layout.rule.rescale, *given)

    def follow(self, call: Any, shared: dict[int, Shared]) -> None:
        """Enter which hyper-parameters the tensors have; equal ones form a group."""
        addresses = call.hypers[self.places].tolist()
        groups = {address: k for k, address in enumerate(dict.fromkeys(addresses))}
        self.values = [shared[address].values[1 : 1 + len(self.names)] for address in groups]
        slots = np.zeros(self.slots.shape, np.int64)
        slots[:, GROUP] = [groups[address] for address in addresses]
        for column, word in ((NUMBER, w.NUMBER), (SEED, w.SEED)):
            slots[:, column] = [call.record(place).words[word] for place in self.places]
        self.send("slots", slots)

    def send_hyper(self) -> None:
        """Upload the hyper-parameters before their correction, if they have changed."""
        values = np.zeros(self.groups.shape)
        for row, own in zip(values[0], self.values, strict=False):
            row[:-1], row[-1] = own, 1
        self.send("groups", values)

    def send(self, name: str, array: Any, again: bool = False) -> None:
        """Upload an array if it has changed, or `again`."""
        content = array.tobytes()
        if again or self.sent.get(name) != content:
            self.sent.pop(name, None)
            self.driver.upload(getattr(self, name), array, self.table.stream)
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
        self.all_counts, self.listed = proxy(call.optimizers[0]._index_update_count), call.indices
        self.indices = frozenset(call.indices)
        self.apart: WeakSet[Any] = WeakSet()
        self.lead = call.tables[0]
        self.outcome: Outcome | None = None
        made = device_front.functions()
        self._report, self._follow = made["report_call"], made["follow_call"]
        self.counts = self.slots = np.empty(0, np.int64)
        self.numbers: Norm | None = None
        self.done = 0  # steps that are not counted on the host, although their outcome is known
        self.sent, self.hypers = False, np.zeros(call.length, np.int64)
        self.base = np.full(call.length, -1, np.int64)  # nothing has been uploaded
        self.kept: list[Any] = []
        with self._entered(), self._beside():
            self.norm = self.driver.Memory((cuda_steps.NORM_NUMBERS,), np.float64)
            self.reports = self.driver.Ring(self.norm)
            self.sums = self.driver.Memory((call.length, 1), np.float64)
            self.order = self.driver.Memory((call.length,), np.int64)
            tables = zip(call.tables, call.places, strict=True)
            self.rows = [Rows(call, table, own, cuda_driver) for table, own in tables]
            places = [place for row in self.rows for place in row.places]
            order = np.argsort(np.array(places, np.int64))
            self.driver.upload(self.order, order, self.lead.stream)
        self.parts, first = [], 0
        for row in self.rows:
            self.parts.append(self.sums.part((len(row.places), 1), first=first))
            first += len(row.places)

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
            and shared.hyper.given is hyper_of(optimizer).given  # there is no average
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

    def step(self, norm: Norm | None = None, outcome: Outcome | None = None) -> bool:
        """Launch a step whose gradients have been entered into the tables.

        If the stream is captured, the launches are part of a graph; each replay is one step.

        Parameters
        ----------
        norm : tuple of float, optional
            ``rescale_grad``, the inverse of the loss scale, the maximum norm, and a further factor.
            Default: gradients are not measured.
        outcome : Outcome, optional
            Where the outcome is reported.

        Returns
        -------
        bool
            False, with nothing changed, if the step is only counted.
        """
        captured, call = self.lead.inputs.captured, self.call
        if call.optimizers[0].skips():
            return False
        with self._entered(), self._beside():
            self.prepare(outcome)
            self._send(norm)
            if captured:
                self._capture(norm is not None)
                return True
            self._launch(norm is not None)
            if norm is not None:
                functions = address_of(self.driver.addresses())
                if error := self._report(functions, self.reports.address, self.lead.stream):
                    self.driver.check(error, "cuMemcpyDtoHAsync")
            elif self not in self.all_counts.graphs:
                self._add(1)
        return True

    def prepare(self, outcome: Outcome | None) -> None:
        """Prepare a step: settle what other calls have counted, and make room for its report."""
        self._follow_others()
        if outcome is not None:
            self.outcome = outcome
        while self.pending >= self.driver.BUFFERS:
            self._follow_oldest(waits=True)

    def send(self, norm: Norm) -> None:
        """Upload what has changed, for a step that compiled code repeats."""
        with self._entered():
            self._send(norm)

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
        if measured:
            self._measure()
        for number, row in enumerate(self.rows):
            self._run(row, measured and number == 0)

    def _capture(self, measured: bool) -> None:
        """Launch a step that becomes part of a graph, whose memory is kept."""
        for row in self.rows:
            row.table.renew_entry()
        self._launch(measured)
        for row in self.rows:
            self.kept.append(row.table.memory.content)
            row.table.renew_entry()
        if self not in self.all_counts.graphs:
            self.all_counts.graphs.append(self)

    def refresh(self) -> None:
        """Upload hyper-parameters that have changed, for the next replays of graphs."""
        with self._entered():
            self._follow_others()
            self._send(self.numbers)

    def _send(self, norm: Norm | None) -> None:
        """Upload what has changed."""
        counts = self.all_counts
        self._find_slots()
        if (self.counts[self.slots] != self.base).any():
            counts.settle()
            self._find_slots()
            self.base[:] = self.counts[self.slots]
            for row in self.rows:
                row.send("counts", self.base[row.places], again=True)
        call = self.call
        if (call.hypers != self.hypers).any():
            shared = call.shared()
            for row in self.rows:
                row.follow(call, shared)
            self.hypers[:] = call.hypers
        for row in self.rows:
            row.send_hyper()
        if norm != self.numbers or not self.sent:
            rescale, scale, limit, share = norm or NOT_MEASURED
            numbers = np.array([rescale, scale, limit, scale, 0.0, share])
            self.driver.upload(self.norm, numbers, self.lead.stream)
            self.numbers, self.sent = norm, True

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
            with compiling(self.call.optimizers[0], self.listed[0]):
                raise
        if table.stream != lead:
            self.driver.order(table.stream, lead)
        table.release()

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
        ring, outcome = self.reports, self.outcome
        place = ring.view[w.RING_FIRST] % self.driver.BUFFERS
        found = self._follow(address_of(self.driver.addresses()), ring.address, waits)
        if found < 0:
            self.driver.check(-found, "cuEventSynchronize")
        if found:
            norm, last = ring.numbers.item(place, LENGTH), not self.pending
            self.done += isfinite(norm)
            if outcome is not None and (last or outcome.scaler is not None):
                info = StepInfo(stepped=True, skipped=False, global_norm=norm)
                if not isfinite(norm):
                    sums = self._sums() if last else np.empty(0)
                    info = overflow(sums, self.listed, outcome.names, norm)
                outcome.report(info, last)
        return bool(found)

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
        found = np.empty_like(self.base)
        with self._entered():
            for row in self.rows:
                counts = self.driver.download(row.counts, row.table.stream)
                found[row.places] = counts
        self._add(found - self.base)

    def _sums(self) -> Any:
        """Return the sums of squares of the gradients of the last step."""
        with self._entered():
            sums = self.driver.download(self.sums, self.lead.stream)[:, 0]
            return sums[self.driver.download(self.order, self.lead.stream)]
