"""A call whose arrays are on CUDA devices: tables that its arrays are entered into, and launched.

Tests: ``tests/kernels/test_cuda_driver.py``, ``tests/gpu/test_cuda_updater.py``.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple
from weakref import ref

import numpy as np
from numpy.typing import NDArray

from fastopt._engine.device_steps import DeviceSteps, Norm, Outcome
from fastopt._engine.hyper_rows import Shared
from fastopt._engine.overlap import Ranges
from fastopt._engine.parameters import DeviceRecord, Parameter, compiling
from fastopt._engine.validate import check
from fastopt._kernels import record_words as w
from fastopt._kernels.cuda_arrays import Reader
from fastopt._kernels.cuda_table import CudaTable
from fastopt._kernels.device_front import TARGET
from fastopt._kernels.devices import header, stays
from fastopt._kernels.layout import DONE
from fastopt._kernels.numpy_abi import address_of
from fastopt.sparse import RowSparse

Words = NDArray[np.int64]

SETS = 64
"""Maximum number of sets of gradients that a call repeats in turns."""

MEMBERS = 1 << 13
"""Number of arrays in all these sets, if that is more than one set."""


class Places(NamedTuple):
    """Addresses of the records of a call, and memory for what compiled code reports of them."""

    places: NDArray[np.int64]
    hypers: NDArray[np.int64]
    """Addresses of the hyper-parameters of each tensor."""
    rests: NDArray[np.int64]
    """Whether the present step does not average each weight."""
    address: int
    found: int
    """Address of the memory."""
    calls: "dict[tuple[int, ...], DeviceCall]"
    """Calls, by whether each weight is not averaged."""


class DeviceCall:
    """The tensors of a call, in tables whose addresses each call enters.

    Parameters
    ----------
    parameters : sequence of Parameter
        The parameters, which have records.
    tables : sequence of CudaTable
        The table of each.
    ordered : bool
        Whether tensors are updated one after the other, as their arrays overlap or occur twice.

    Attributes
    ----------
    indices, keys : tuple
        Their indices, and what stands for these in compiled code.
    tables : list of CudaTable
        The tables, those of equal layouts joined, in the order of the launches.
    places : list
        Positions in the list of the tensors of each table.
    targets : numpy.ndarray
        What compiled code writes to; see :meth:`targets_in`.
    hypers : numpy.ndarray
        Addresses of the hyper-parameters of each tensor.
    rests : tuple of int
        Whether a step does not average each weight.
    steps : DeviceSteps or None
        What counts on the device.
    fixed : bool
        Whether nothing but addresses of weights and gradients, and numbers, changes from step to
        step, all on one stream.
    seen : dict
        The first gradient of each set that calls had, by the ids of all.
    own_ids : tuple of int
        Ids of the weights of these calls.
    """

    def __init__(
        self, parameters: Sequence[Parameter], tables: Sequence[CudaTable], ordered: bool = False
    ) -> None:
        self.parameters = parameters
        self.indices, self.length = tuple([of.index for of in parameters]), len(parameters)
        self.keys: tuple[int | str, ...] = self.indices
        self.optimizers = list(dict.fromkeys(of.optimizer for of in parameters))
        kinds: dict[Any, list[int]] = {}
        for k, table in enumerate(tables):
            kind: Any = table.device, table.stream, table.layout
            kinds.setdefault(k if ordered or table.alone else kind, []).append(k)
        self.places = list(kinds.values())
        self.tables = [
            CudaTable.joined([tables[k] for k in own]) if len(own) > 1 else tables[own[0]]
            for own in self.places
        ]
        self.targets = self.targets_in([table.table for table in self.tables])
        self.rests, self.hypers = (0,) * self.length, np.empty(0, np.int64)
        self.follow()
        moves = any(
            table.copied or table.inputs.strided or table.inputs.watched or table.layout.sparse
            for table in self.tables
        )
        self.fixed = not moves and len({(table.device, table.stream) for table in self.tables}) == 1
        self.seen: dict[tuple[int, ...], Any] = {}
        self.own_ids: tuple[int, ...] = ()
        self.keyed = any(table.layout.keyed for table in self.tables)  # uploaded in each call
        self.passing = self.keyed
        self.steps: DeviceSteps | None = None
        self.defers = DeviceSteps.supports(self)
        self.capturable = self.defers and not any(table.alone for table in self.tables)

    @property
    def captured(self) -> bool:
        """Whether the present step becomes part of a graph."""
        return self.defers and self.tables[0].inputs.captured

    def targets_in(self, rows: Sequence[NDArray[Any]]) -> Words:
        """Return where hyper-parameters are written, and keys and marks in `rows` of tables.

        See :data:`fastopt._kernels.device_front.TARGET`.
        """
        made = np.empty((self.length, TARGET), np.int64)
        for table, own, row in zip(self.tables, self.places, rows, strict=True):
            count, size = table.fields.shape[1], table.fields.itemsize
            made[own, 0] = address_of(table.fields) + np.arange(len(own)) * count * size
            made[own, 1] = count
            made[own, 2] = address_of(row) + np.arange(len(own)) * row.strides[0]
            made[own, 3] = table.layout.keyed
        return made

    def may_repeat(self, grads: Sequence[Any], weights: Sequence[Any]) -> bool:
        """Whether the next launches may be repeated, if these arrays do not move."""
        if not (self.fixed and stays(grads[0]) and stays(weights[0])):
            return False
        lead = self.tables[0]
        on_stream = all(table.inputs.streams == {lead.stream} for table in self.tables)
        return on_stream and not lead.inputs.captured

    def passes(self, grads: Sequence[Any], weights: Sequence[Any]) -> bool | None:
        """Whether each call has gradients that were not seen before; None if that is open."""
        ids, own = tuple(map(id, grads)), tuple(map(id, weights))
        if own != self.own_ids:
            self.own_ids, self.seen = own, {}
        known = self.seen.get(ids)
        if known is not None and known() is grads[0]:
            return self.keyed
        newest = next(reversed(self.seen.values()), None)
        if known is None and len(self.seen) >= sets_of(self.length):
            del self.seen[next(iter(self.seen))]
            self.passing = True
        self.passing |= newest is not None and newest() is None
        self.seen[ids] = ref(grads[0])
        return self.passing or None

    def shared(self) -> dict[int, Shared]:
        """Return the hyper-parameters of the tensors by address."""
        found = (self.record(place).shared for place in range(self.length))
        return {shared.address: shared for shared in found}

    def record(self, place: int) -> DeviceRecord:
        """Return the record of a tensor."""
        found = self.parameters[place].record
        assert isinstance(found, DeviceRecord)
        return found

    # The arrays of a call

    def follow(self) -> bool:
        """Note the memory that is written to; return whether no two arrays share some."""
        versions = [table.inputs.version for table in self.tables]
        self.ranges = Ranges(*_joined([table.written() for table in self.tables]))
        self.written = self.ranges.first, self.ranges.last
        apart = not self.ranges.overlapping()
        self.versions = versions if apart else []  # last, as Ctrl-C may come before
        return apart

    def apart(self) -> bool:
        """Whether no tensor writes to memory that it or another one reads, or another one writes.

        The gradients are those that the tables have had entered.
        """
        reads = _joined([table.read() for table in self.tables])
        return bool(self.versions) and not self.ranges.meeting(*reads)

    def enter(self, grads: Sequence[Any], weights: Sequence[Any]) -> bool:
        """Enter the arrays of a call into the tables; return whether they fit.

        If not, only caches have changed.
        """
        if self._take_weights(weights) and self._take_grads(grads, weights):
            return True
        self.release()
        return False

    def _take_weights(self, weights: Sequence[Any]) -> bool:
        for table, own in zip(self.tables, self.places, strict=True):
            if not table.inputs.take_weights(self._taken(weights, own), table.table):
                return False
        return [table.inputs.version for table in self.tables] == self.versions or self.follow()

    def _take_grads(self, grads: Sequence[Any], weights: Sequence[Any]) -> bool:
        for table, own in zip(self.tables, self.places, strict=True):
            taken, k = self._taken(grads, own), own[0]
            if not table.inputs.take_grads(taken, table.table, self.written, self.capturable):
                return False
            if table.rows is not None and not self._list_rows(table, k, grads[k], weights[k]):
                return False
        return True

    def _taken(self, arrays: Sequence[Any], own: Sequence[int]) -> Sequence[Any]:
        """Return the items of a list at these places, which may be all."""
        return arrays if len(own) == self.length else [arrays[k] for k in own]

    def _list_rows(self, table: CudaTable, place: int, grad: Any, weight: Any) -> bool:
        """Enter the row-sparse gradient of a tensor; return False if it needs another kernel."""
        of = self.parameters[place]
        if type(grad) is not RowSparse or grad.shape != header(weight).shape:
            try:
                grad = check(of.context, weight, grad, of.copy)
            except TypeError:  # another array library, or an error that the full checks report
                return False
            grad = of.by_row(grad)
        if not (isinstance(grad, RowSparse) and table.serves(grad)):
            return False
        table.list_rows(of.context, grad)
        return not self.ranges.meeting(*table.read())

    def release(self) -> None:
        """Release the gradients, for a call that ends without a launch."""
        for table in self.tables:
            table.release()

    def squares(self) -> NDArray[np.float64]:
        """Return the sum of squares of each gradient; non-finite elements propagate."""
        totals = np.zeros(self.length)
        for table, places in zip(self.tables, self.places, strict=True):
            totals[places] = table.squares()
        return totals

    # One step

    def defer(self, norm: Norm | None = None, outcome: Outcome | None = None) -> bool:
        """Launch a step that the device counts; see :meth:`DeviceSteps.step`.

        Returns False, with nothing changed, if the host must count it.
        """
        if not self.defers:
            return False
        if self.steps is None:
            self.steps = DeviceSteps(self)
        return self.steps.step(norm, outcome)

    def launch(
        self,
        skipped: bool,
        adding: Sequence[CudaTable] = (),
        between: Callable[[], None] | None = None,
    ) -> None:
        """Launch the tables, but for those whose tensors are only counted, if some are `skipped`.

        The tables `adding` come before. `between` is called when everything has been compiled; if
        it raises an error, nothing has been launched.
        """
        tables = [*adding]
        for table, own in zip(self.tables, self.places, strict=True):
            if skipped and table.table[:, DONE].all():
                table.release()
                continue
            record = self.record(own[0])
            if table.layout.catch_up and record.deferred is not None:
                table.apply_decay(*record.deferred.now)
            tables.append(table)
            if table.after is not None and not self.rests[own[0]]:
                table.after.fields[0] = self._average_rate(own[0], table.after)
                tables.append(table.after)
        if between is not None:
            with compiling(self.optimizers[0], self.indices[0]):
                for table in tables:
                    table.compile()
            between()
        try:
            for k, table in enumerate(tables):
                if k:
                    table.renew()
                table.run()
        except Exception:
            with compiling(self.optimizers[0], self.indices[0]):
                raise

    def _average_rate(self, place: int, table: CudaTable) -> float:
        """Return the rate of the average of a tensor, whose record has that of the last call."""
        of = self.parameters[place]
        later, optimizer = self.indices[place + 1 :].count(of.index), of.optimizer
        if not later:
            return float(self.record(place).fields[-1])
        count = optimizer._index_update_count[of.index] - later
        return table.average_rate(count - optimizer.begin_num_update)


def sets_of(count: int) -> int:
    """Return how many sets of `count` gradients are known."""
    return min(SETS, max(1, MEMBERS // count))


class Repeat:
    """A call whose arrays are numba's, which do not move, as compiled code makes it again.

    Its launches have a table of their own in the memory of the device.

    Parameters
    ----------
    call : DeviceCall
        The call.
    launches : list of Launch
        Its launches.
    places : Places
        Where its records are.
    listed : bool
        Whether the arguments are lists.
    measured : bool
        Whether the norm of the gradients is measured.
    grads, weights : sequence
        The arrays.
    reads : bool
        Whether later calls have other gradients, which are read.

    Attributes
    ----------
    version : int
        That of the records whose hyper-parameters the device has, with `measured`.
    dead : list
        References to arrays that have died.
    own_ids : tuple of int
        Ids of the weights.
    others : list of Repeat
        The same call with other gradients.
    refused : DeviceCall or None
        The last call that averages other weights, and is kept when it comes again.
    """

    refused: DeviceCall | None = None

    def __init__(
        self,
        call: DeviceCall,
        launches: Sequence[Any],
        places: Places,
        listed: bool,
        measured: bool,
        grads: Sequence[Any],
        weights: Sequence[Any],
        reads: bool,
    ) -> None:
        lead, self.version = call.tables[0], -1
        self.call, self.launches, self.measured, self.reads = call, launches, measured, reads
        self.others: list[Repeat] = []
        self.dead: list[Any] = []
        self.own_ids, died = call.own_ids, self.dead.append
        self.ids = () if reads else tuple(map(id, grads))
        self.refs = [ref(array, died) for array in (*weights, *(() if reads else grads))]
        n, driver = call.length, lead.driver
        objects = np.array([*map(id, grads), *self.own_ids], np.int64)
        firsts, rests = np.arange(n), np.array(call.rests, np.int64)
        tables = [table.table.copy() for table in call.tables]
        targets = call.targets_in(tables) if reads else call.targets
        uploads, own = list[Any](), dict[int, tuple[Any, Any]]()
        with driver.entered(lead.device.device_id):
            for table, copy in zip(call.tables, tables, strict=True):
                memory = driver.Memory(copy.shape, copy.dtype)
                own[id(table.entry)] = memory, table
                if reads:
                    uploads.append(driver.Ring(memory, copy))
                else:
                    driver.upload(memory, copy, table.stream)
        self.rows = rows = np.zeros((len(launches), w.LAUNCH), np.int64)
        self.state = np.zeros(2, np.int64)
        self.alive: list[Any] = [objects, firsts, rests, tables, targets, own, places]
        by_value = set()
        for row, launch in zip(rows, launches, strict=True):
            used = [own[id(of)] for of in launch.arguments if id(of) in own]
            words = driver.words_of([own.get(id(of), (of,))[0] for of in launch.arguments])
            pointers = address_of(words) + 8 * np.arange(len(words))
            self.alive += [words, pointers]
            grid = launch.handle, launch.blocks, launch.across, launch.down, address_of(pointers)
            row[: w.L_FIELDS] = grid
            if isinstance(launch.arguments[-1], driver.Values):
                table = used[0][1]
                count, size = table.fields.shape[1], table.fields.itemsize
                numbers = address_of(words) + 8 * (len(words) - count)
                row[w.L_FIELDS :] = address_of(table.fields), numbers, count, size == 8
                by_value.add(table)
        for table, positions in zip(call.tables, call.places, strict=True):
            if table in by_value:
                firsts[positions] = positions[0]
            elif not measured:
                uploads.append(table.hyper_ring)
        of_steps, reader = [0, 0, 0], 0
        if measured and (steps := call.steps) is not None:
            self.alive += [steps.reports, steps.base, steps.hypers]
            of_steps = [steps.reports.address, *map(address_of, (steps.base, steps.hypers))]
        if reads:
            of_grads = np.empty((n, 3), np.int64)
            for table, copy, positions in zip(call.tables, tables, call.places, strict=True):
                of_grads[positions, 0] = table.inputs.itemsize
                of_grads[positions, 1] = table.inputs.grad_bytes
                of_grads[positions, 2] = targets[positions, 2] + copy.strides[0] - copy.itemsize
            made = Reader(grads, of_grads, call.written)
            self.alive.append(made)
            reader = made.address
        rings = np.array([ring.address for ring in uploads], np.int64)
        self.alive += [uploads, rings]
        self.memory = np.zeros(w.REPEAT, np.int64)
        self.memory[:] = (
            *(n, places.address, places.found, address_of(rests), address_of(targets)),
            *(address_of(firsts), address_of(objects), listed, id(self.dead)),
            *(all(of.folds for of in call.optimizers), lead.stream),
            *(driver.context_of(lead.device.device_id), address_of(rows), len(rows)),
            *(address_of(driver.addresses()), address_of(self.state), measured, 0, *of_steps),
            *(reader, rings.ctypes.data, len(rings)),
        )
        self.address = address_of(self.memory)

    def raise_error(self) -> None:
        """Raise the error of the driver in the last launch."""
        self.call.tables[0].driver.check(self.state.item(0), "cuLaunchKernel")

    def follow(self, others: "list[Repeat]") -> None:
        """Let compiled code try the others, too."""
        self.others, following = others, [repeat.address for repeat in others]
        for repeat, address in zip((self, *others), (*following, 0), strict=True):
            repeat.memory[w.R_FOLLOWING] = address
        for repeat in others:
            repeat.others = []


def _joined(ranges: Sequence[tuple[Any, Any]]) -> tuple[Any, Any]:
    """Return the start and end addresses of the ranges of several tables."""
    if len(ranges) == 1:
        return ranges[0]
    first, last = zip(*ranges, strict=True)
    return np.concatenate(first), np.concatenate(last)
