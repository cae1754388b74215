"""A call whose arrays are on CUDA devices: tables that its arrays are entered into, and launched.

Tests: ``tests/kernels/test_cuda_driver.py``, ``tests/gpu/test_cuda_updater.py``.
"""

from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple
from weakref import ref

import numpy as np
from numpy.typing import NDArray

from fastopt._engine.device_steps import DeviceSteps, Norm
from fastopt._engine.overlap import Ranges
from fastopt._engine.owner import Owner
from fastopt._engine.parameters import DeviceRecord, Parameter, compiling
from fastopt._engine.validate import check
from fastopt._kernels import record_words as w
from fastopt._kernels.cuda_arrays import Reader
from fastopt._kernels.cuda_table import CudaTable
from fastopt._kernels.device_front import TARGET
from fastopt._kernels.devices import header, stays
from fastopt._kernels.layout import DONE, kind_of
from fastopt._kernels.numpy_abi import address_of
from fastopt.sparse import RowSparse

Words = NDArray[np.int64]
Place = tuple[CudaTable, list[int]]
"""A table, and the positions of its tensors in the list."""

SETS = 64
"""Maximum number of sets of gradients that a call repeats in turns."""

MEMBERS = 1 << 13
"""Number of arrays in all these sets, if that is more than one set."""


class Places(NamedTuple):
    """Addresses of the records of a call, and memory for what compiled code reports of them."""

    indices: tuple[int | str, ...]
    places: NDArray[np.int64]
    hypers: NDArray[np.int64]
    """Addresses of the hyper-parameters of each tensor."""
    rests: NDArray[np.int64]
    """Whether the present step does not average each weight."""
    address: int
    output: int
    """Address of the memory."""
    calls: "dict[bytes, DeviceCall]"
    """Calls, by `rests`."""


class DeviceCall:
    """The tensors of a call, in tables whose addresses each call enters.

    Parameters
    ----------
    where : Places
        Where the records of the call are.
    rests : sequence of int
        Whether a step does not average each weight.
    parameters : sequence of Parameter
        The parameters, which have records.
    tables : sequence of CudaTable
        The table of each.
    ordered : bool
        Whether tensors are updated one after the other, as their arrays overlap or occur twice.

    Attributes
    ----------
    indices : tuple
        Their indices; `where` has what stands for these in compiled code.
    tables : list of CudaTable
        The tables, those of equal layouts joined, in the order of the launches.
    places : list
        Positions in the list of the tensors of each table.
    targets : numpy.ndarray
        What compiled code writes to; see :meth:`targets_in`.
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
        self,
        where: Places,
        rests: Sequence[int],
        parameters: Sequence[Parameter],
        tables: Sequence[CudaTable],
        ordered: bool,
    ) -> None:
        self.where, self.rests, self.parameters = where, rests, parameters
        self.indices, self.length = tuple([of.index for of in parameters]), len(parameters)
        self.optimizers = list(dict.fromkeys(of.optimizer for of in parameters))
        kinds: dict[Any, list[int]] = {}
        for k, table in enumerate(tables):
            kind: Any = table.device, table.stream, table.layout
            kinds.setdefault(k if ordered or table.alone else kind, []).append(k)
        self.places = list(kinds.values())
        self.tables = [
            CudaTable([tables[k].parts[0] for k in group]) if len(group) > 1 else tables[group[0]]
            for group in self.places
        ]
        self.targets = self.targets_in([table.table for table in self.tables])
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
        for table, positions, row in zip(self.tables, self.places, rows, strict=True):
            count, size = table.fields.shape[1], table.fields.itemsize
            made[positions, 0] = address_of(table.fields) + np.arange(len(positions)) * count * size
            made[positions, 1] = count
            made[positions, 2] = address_of(row) + np.arange(len(positions)) * row.strides[0]
            made[positions, 3], made[positions, 4] = table.layout.keyed, size
        return made

    def may_repeat(self, grads: Sequence[Any], weights: Sequence[Any]) -> bool:
        """Whether the next launches may be repeated, if these arrays do not move."""
        inputs = [table.inputs for table in self.tables]
        on_stream = all(of.streams == {of.stream} and not of.captured for of in inputs)
        return self.fixed and on_stream and stays(grads[0]) and stays(weights[0])

    def passes(self, grads: Sequence[Any], weights: Sequence[Any]) -> bool | None:
        """Whether each call has gradients that were not seen before; None if that is open."""
        ids, weight_ids = tuple(map(id, grads)), tuple(map(id, weights))
        if weight_ids != self.own_ids:
            self.own_ids, self.seen = weight_ids, {}
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

    def record(self, place: int) -> DeviceRecord:
        """Return the record of a tensor."""
        record = self.parameters[place].record
        assert isinstance(record, DeviceRecord)
        return record

    # The arrays of a call

    def follow(self) -> bool:
        """Note the memory that is written to; return whether no two arrays share some."""
        versions = [table.inputs.version for table in self.tables]
        written = zip(*[table.written() for table in self.tables], strict=True)
        self.ranges = Ranges(*map(np.concatenate, written))
        self.written = self.ranges.first, self.ranges.last
        apart = not self.ranges.overlapping()
        self.versions = versions if apart else []  # last, as Ctrl-C may come before
        return apart

    def apart(self) -> bool:
        """Whether no tensor writes to memory that it or another one reads, or another one writes.

        The gradients are those that the tables have had entered.
        """
        reads = zip(*[table.read() for table in self.tables], strict=True)
        return bool(self.versions) and not self.ranges.meeting(*map(np.concatenate, reads))

    def enter(
        self, grads: Sequence[Any], weights: Sequence[Any], fresh: Collection[CudaTable] = ()
    ) -> bool:
        """Enter the arrays of a call into the tables; return whether they fit.

        If not, only caches have changed. Tables that are `fresh` were made with these arrays.
        """
        tables = zip(self.tables, self.places, strict=True)
        places = [(table, positions) for table, positions in tables if table not in fresh]
        if self._take_weights(places, weights) and self._take_grads(places, grads, weights):
            return True
        self.release()
        return False

    def _take_weights(self, places: Sequence[Place], weights: Sequence[Any]) -> bool:
        for table, positions in places:
            if not table.inputs.take_weights(self._taken(weights, positions), table.table):
                return False
        return [table.inputs.version for table in self.tables] == self.versions or self.follow()

    def _take_grads(
        self, places: Sequence[Place], grads: Sequence[Any], weights: Sequence[Any]
    ) -> bool:
        for table, positions in places:
            taken, k = self._taken(grads, positions), positions[0]
            if not table.inputs.take_grads(taken, table.table, self.written, self.capturable):
                return False
            if table.rows is not None and not self._list_rows(table, k, grads[k], weights[k]):
                return False
        return True

    def _taken(self, arrays: Sequence[Any], positions: Sequence[int]) -> Sequence[Any]:
        """Return the items of a list at these places, which may be all."""
        return arrays if len(positions) == self.length else [arrays[k] for k in positions]

    def _list_rows(self, table: CudaTable, place: int, grad: Any, weight: Any) -> bool:
        """Enter the row-sparse gradient of a tensor; return False if it needs another kernel."""
        of = self.parameters[place]
        if type(grad) is not RowSparse or grad.shape != header(weight).shape:
            try:
                grad = check(of.context, weight, grad, of.copy)
            except TypeError:  # another array library, or an error that the full checks report
                return False
            grad = of.indexed(grad)
        if not isinstance(grad, RowSparse):
            return False
        if table.layout.grad != kind_of(header(grad.values).dtype):
            return False
        table.list_rows(of.context, grad.values, grad.indices)
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

    def defer(self, updater: Callable[[], Owner | None], norm: Norm | None = None) -> bool:
        """Launch a step that the device counts; see :meth:`DeviceSteps.step`.

        Returns False, with nothing changed, if the host must count it.
        """
        if not self.defers:
            return False
        if self.steps is None:
            self.steps = DeviceSteps(self, updater)
        return self.steps.step(norm)

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
        for table, positions in zip(self.tables, self.places, strict=True):
            if skipped and table.table[:, DONE].all():
                table.release()
                continue
            record = self.record(positions[0])
            if table.layout.catch_up and record.deferred is not None:
                table.apply_decay(*record.deferred.now)
            tables.append(table)
            if table.after is not None and not self.rests[positions[0]]:
                table.after.fields[0] = self._average_rate(positions[0], table.after)
                tables.append(table.after)
        if between is not None:
            with compiling(self.optimizers[0], self.indices[0]):
                for table in tables:
                    table.compile()
            between()
        with compiling(self.optimizers[0], self.indices[0]):
            for k, table in enumerate(tables):
                if k:
                    table.renew()
                table.run()

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
        targets = call.targets_in(tables) if reads else call.targets.copy()
        uploads, memories = list[Any](), dict[int, tuple[Any, Any]]()
        with driver.entered(lead.device.device_id):
            for table, copy in zip(call.tables, tables, strict=True):
                memory = driver.Memory(copy.shape, copy.dtype)
                memories[id(table.entry)] = memory, table
                if reads:
                    uploads.append(driver.Ring(memory, copy))
                else:
                    driver.upload(memory, copy, table.stream)
        self.rows = rows = np.zeros((len(launches), w.LAUNCH), np.int64)
        self.state = np.zeros(2, np.int64)
        self.alive: list[Any] = [objects, firsts, rests, tables, targets, memories, call.where]
        by_value = set()
        for row, (*grid, arguments) in zip(rows, launches, strict=True):
            words = driver.words_of([memories.get(id(of), (of,))[0] for of in arguments])
            pointers = address_of(words) + 8 * np.arange(len(words))
            self.alive += [words, pointers]
            row[:] = *grid, address_of(pointers)
            if isinstance(arguments[-1], driver.Values):  # each number in a word
                (table,) = (memories[id(of)][1] for of in arguments if id(of) in memories)
                positions = call.places[call.tables.index(table)]
                numbers = address_of(words) + 8 * (len(words) - table.fields.shape[1])
                targets[positions, 0], targets[positions, 4] = numbers, 8
                targets[positions[1:], 1] = 0  # theirs are those of the first
                firsts[positions] = positions[0]
                by_value.add(table)
        if not measured:
            uploads += [table.hyper_ring for table in call.tables if table not in by_value]
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
            *(n, call.where.address, call.where.output, address_of(rests), address_of(targets)),
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
