"""A call whose arrays are on CUDA devices: tables that its arrays are entered into, and launched.

Tests: ``tests/kernels/test_cuda_driver.py``, ``tests/gpu/test_cuda_updater.py``.
"""

from collections.abc import Callable, Sequence
from operator import itemgetter
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fastopt._engine.device_steps import DeviceSteps, Norm, Outcome
from fastopt._engine.hyper_rows import Shared
from fastopt._engine.overlap import Ranges
from fastopt._engine.parameters import DeviceRecord, Parameter, compiling
from fastopt._engine.validate import check
from fastopt._kernels import record_words as w
from fastopt._kernels.cuda_arrays import Known, Reader
from fastopt._kernels.cuda_table import CudaTable, launch
from fastopt._kernels.device_front import TARGET
from fastopt._kernels.devices import header
from fastopt._kernels.layout import DONE
from fastopt._kernels.numpy_abi import address_of
from fastopt.sparse import RowSparse

Words = NDArray[np.int64]


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
        What compiled code writes to; see :func:`fastopt._kernels.device_front.advance_call`.
    hypers : numpy.ndarray
        Addresses of the hyper-parameters of each tensor.
    rests : tuple of int
        Whether a step does not average each weight.
    steps : DeviceSteps or None
        What counts on the device.
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
        everything = list(range(self.length))
        self.takes = [
            (table, None if own == everything else _taking(own), own[0])
            for table, own in zip(self.tables, self.places, strict=True)
        ]
        self.targets = np.empty((self.length, TARGET), np.int64)
        for table, own in zip(self.tables, self.places, strict=True):
            table.given.refuse_capture()
            count, size = table.fields.shape[1], table.fields.itemsize
            self.targets[own, 0] = table.fields.ctypes.data + np.arange(len(own)) * count * size
            self.targets[own, 1] = count
            steps = np.arange(len(own)) * table.table.strides[0]
            self.targets[own, 2] = table.table.ctypes.data + steps
            self.targets[own, 3] = table.layout.keyed
        self.target = address_of(self.targets)
        self.rests, self.hypers = (0,) * self.length, np.empty(0, np.int64)
        self.noted = -1
        """When the weights of the last call were noted."""
        self.follow()
        self.steps: DeviceSteps | None = None
        self.defers = DeviceSteps.supports(self)
        self.capturable = self.defers and not any(table.alone for table in self.tables)

    @property
    def captured(self) -> bool:
        """Whether the present step becomes part of a graph."""
        return self.defers and self.tables[0].given.captured

    def can_repeat(self, launches: Sequence[Any], measured: bool) -> bool:
        """Whether these launches of a step need nothing but other hyper-parameters to be repeated.

        If gradients were `measured`, these are on the device.
        """
        tables = self.tables
        stay = all(table.stays for table in tables)
        if not stay or len({(table.device, table.stream) for table in tables}) > 1:
            return False
        if measured:
            return True
        by_value = all(isinstance(each.arguments[-1], tables[0].driver.Values) for each in launches)
        other = any(table.layout.keyed or table.table[:, DONE].any() for table in tables)
        return len(launches) == len(tables) and by_value and not other

    def shared(self) -> dict[int, Shared]:
        """Return the hyper-parameters of the tensors by address."""
        found = (self.record(place).shared for place in range(self.length))
        return {each.address: each for each in found}

    def record(self, place: int) -> DeviceRecord:
        """Return the record of a tensor."""
        found = self.parameters[place].record
        assert isinstance(found, DeviceRecord)
        return found

    # The arrays of a call

    def follow(self) -> bool:
        """Note the memory that is written to; return whether no two arrays share some."""
        versions = [table.given.version for table in self.tables]
        self.ranges = Ranges(*_joined([table.written() for table in self.tables]))
        self.written = self.ranges.first, self.ranges.last
        apart = not self.ranges.overlapping()
        self.versions = versions if apart else []  # last, as Ctrl-C may come before
        return apart

    def enter(self, grads: Sequence[Any], weights: Sequence[Any]) -> bool:
        """Enter the arrays of a call into the tables; return whether they fit.

        If not, only caches have changed.
        """
        if self._take_weights(weights) and self._take_grads(grads, weights):
            return True
        self.release()
        return False

    def _take_weights(self, weights: Sequence[Any]) -> bool:
        for table, take, _ in self.takes:
            own = weights if take is None else take(weights)
            if not table.given.take_weights(own, table.table):
                return False
        return [table.given.version for table in self.tables] == self.versions or self.follow()

    def _take_grads(self, grads: Sequence[Any], weights: Sequence[Any]) -> bool:
        for table, take, place in self.takes:
            own = grads if take is None else take(grads)
            if not table.given.take_grads(own, table.table, self.written, self.capturable):
                return False
            if table.rows is not None and not self._list_rows(table, place, own[0], weights[place]):
                return False
        return True

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

    def spread(self, name: str) -> Words:
        """Return what the tables know of the gradient of each tensor."""
        found: Words = np.empty(self.length, np.int64)
        for table, places in zip(self.tables, self.places, strict=True):
            found[places] = getattr(table.given, name)
        return found

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
            launch(tables)
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


class Repeat:
    """A call whose arrays are known not to move, as compiled code makes it again.

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
    grads : sequence or None
        The gradients, if those of later calls are read.

    Attributes
    ----------
    version : int
        That of the records whose hyper-parameters the device has, with `measured`.
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
        grads: Sequence[Any] | None,
    ) -> None:
        table, self.version = call.tables[0], -1
        given = [table.given for table in call.tables]
        for lent in call.tables:
            lent.lent = True
        self.others: list[Repeat] = []
        kinds = ("weights",) if grads is not None else ("weights", "grads")
        self.known: list[Known] = [getattr(of, kind) for kind in kinds for of in given]
        self.sets = [known.last for known in self.known if known.last is not None]
        self.call, self.launches, self.measured = call, launches, measured
        n, driver = call.length, table.driver
        objects, firsts = np.zeros((2, n), np.int64), np.empty(n, np.int64)
        for k, each in enumerate(self.sets):
            own = call.places[k % len(call.places)]
            objects[int(k < len(call.places)), own], firsts[own] = each.ids, own[0]
        watched = np.array([id(each.dead) for each in self.sets], np.int64)
        state, rests = np.zeros(2, np.int64), np.array(call.rests, np.int64)
        rows = np.zeros((len(launches), w.LAUNCH), np.int64)
        self.rows, self.state = rows, state
        self.alive: list[Any] = [objects, firsts, watched, rests]
        for row, each in zip(rows, launches, strict=True):
            words = np.array(each.words, np.uint64)
            pointers = address_of(words) + 8 * np.arange(len(words))
            row[: w.L_FIELDS] = (
                each.handle,
                each.blocks,
                each.across,
                each.down,
                address_of(pointers),
            )
            self.alive += [words, pointers]
            if not measured:
                fields = call.tables[launches.index(each)].fields
                count = fields.shape[1]
                numbers = address_of(words) + 8 * (len(words) - count)
                row[w.L_FIELDS :] = address_of(fields), numbers, count, fields.itemsize == 8
        steps, of_steps = call.steps, [0, 0, 0]
        if measured and steps is not None:
            self.alive += [steps.reports, steps.base, steps.hypers]
            of_steps = [steps.reports.address, *map(address_of, (steps.base, steps.hypers))]
        reader, uploads = self._read(call, grads) if grads is not None else (0, np.empty(0))
        self.memory = np.zeros(w.REPEAT, np.int64)
        folds = all(of.folds for of in call.optimizers)
        self.memory[:] = (
            *(n, places.address, places.found, address_of(rests), call.target, address_of(firsts)),
            *(address_of(objects), listed, address_of(watched), len(watched)),
            *(folds, table.stream),
            *(driver.context_of(table.device.device_id), address_of(rows), len(rows)),
            *(address_of(driver.addresses()), address_of(state), measured, 0, *of_steps),
            *(reader, uploads.ctypes.data, len(uploads)),
        )
        self.alive += [places, uploads]
        self.address = address_of(self.memory)

    def _read(self, call: DeviceCall, grads: Sequence[Any]) -> tuple[int, NDArray[Any]]:
        """Return the address of what reads gradients, and those of the rings of their tables.

        The launches get the present memory of the tables for themselves.
        """
        tables, slots = [each.table.copy() for each in call.tables], np.empty(call.length, np.int64)
        for table, own in zip(tables, call.places, strict=True):
            slots[own] = address_of(table[:, -1:]) + table.strides[0] * np.arange(len(table))
        of_grads = call.spread("itemsize"), call.spread("grad_bytes")
        reader, driver = Reader(grads, slots, *of_grads, call.written), call.tables[0].driver
        with driver.entered(call.tables[0].device.device_id):
            pairs = zip(call.tables, tables, strict=True)
            rings = [driver.Ring(each.entry, table) for each, table in pairs]
        for each in call.tables:
            each.renew_entry()
        self.alive += [tables, rings, reader]
        return reader.address, np.array([each.address for each in rings])

    @property
    def reads(self) -> bool:
        """Whether it reads gradients that were not seen before."""
        return bool(self.memory[w.R_READER])

    def raise_error(self) -> None:
        """Raise the error of the driver in the last launch."""
        self.call.tables[0].driver.check(self.state.item(0), "cuLaunchKernel")

    def holds(self) -> bool:
        """Whether the arrays are those of the call now."""
        return all(known.last is each for known, each in zip(self.known, self.sets, strict=True))

    def lasting(self) -> "list[Repeat]":
        """Return those of the call whose arrays are alive."""
        several = self, *self.others
        return [each for each in several if all(known.known for known in each.sets)]

    def follow(self, others: "list[Repeat]") -> None:
        """Let compiled code try the others, too."""
        self.others, following = others, [each.address for each in others]
        for each, address in zip((self, *others), (*following, 0), strict=True):
            each.memory[w.R_FOLLOWING] = address
        for each in others:
            each.others = []


def _taking(places: Sequence[int]) -> Any:
    """Return a function that selects the items of a list at `places`, as a tuple or list."""
    if len(places) > 1:
        return itemgetter(*places)
    return itemgetter(slice(places[0], places[0] + 1))


def _joined(ranges: Sequence[tuple[Any, Any]]) -> tuple[Any, Any]:
    """Return the start and end addresses of the ranges of several tables."""
    if len(ranges) == 1:
        return ranges[0]
    first, last = zip(*ranges, strict=True)
    return np.concatenate(first), np.concatenate(last)


def disjoint(tables: Sequence[CudaTable]) -> bool:
    """Whether no tensor writes to memory that it or another one reads, or another one writes."""
    written = Ranges(*_joined([table.written() for table in tables]))
    if written.overlapping():
        return False
    return not written.meeting(*_joined([table.read() for table in tables]))
