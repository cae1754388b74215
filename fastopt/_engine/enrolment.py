"""Creation of records: what a call does with parameters that it brings for the first time.

Tests: ``tests/engine/test_records.py``.
"""

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from itertools import combinations, starmap
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fastopt._engine.contract import OptimizerLike
from fastopt._engine.hyper_rows import Shared
from fastopt._engine.mixed_precision import arrays_of, layout_of
from fastopt._engine.owner import Owner, RecordsLike
from fastopt._engine.parameters import DeviceRecord, Parameter, Record
from fastopt._engine.per_index import Index
from fastopt._engine.record_rows import Deferred, row_layout, updates_rows
from fastopt._engine.templates import (
    ALONE_FROM,
    TEMPLATES,
    Loops,
    Template,
    blank_of,
    is_pitched,
    nesting,
    remember,
    template_of,
    zeros,
)
from fastopt._engine.validate import (
    check_apart,
    is_fixed,
    is_fortran,
    is_half,
    leaves,
    listed,
    roles_of,
)
from fastopt._kernels import record_words as w
from fastopt._kernels import row_admission
from fastopt._kernels.compiling import entry_of
from fastopt._kernels.device_memory import allocated_together
from fastopt._kernels.devices import is_cuda
from fastopt._kernels.layout import ADDRESS, OFFSET, PAIRS, Layout, kind_of, real_of
from fastopt._kernels.noise import index_number
from fastopt._kernels.numpy_abi import C_ORDER, F_ORDER, address_of, identities, kind_word
from fastopt._notices import warn_user
from fastopt.arguments import brief
from fastopt.kernels.rule import Rule
from fastopt.sparse import RowSparse, as_row_sparse, is_row_sparse

Array = np.ndarray[Any, Any]
Words = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class FirstCall:
    """A parameter whose record is created, with the arrays of its first call."""

    parameter: Parameter
    grad: Any
    weight: Array
    state: Any
    copies: dict[int, tuple[Array, Array]] = field(default_factory=dict)
    """By id, arrays that kernels cannot read where they lie, and what the record has instead."""

    @property
    def same(self) -> bool:
        """Whether the gradient has the dtype of the weight."""
        return bool(getattr(self.grad, "dtype", None) == self.weight.dtype)

    @property
    def has_template(self) -> bool:
        """Whether the record may be that of another parameter of the same form, with addresses."""
        flags = self.weight.flags
        if self.parameter.copy is not None or (self.indexed and not flags.forc):
            return False
        arrays = leaves(self.state)
        return all(type(array) is np.ndarray and array.flags.forc for array in arrays)

    @property
    def indexed(self) -> bool:
        """Whether the gradient indexes rows, or all of them."""
        return self.parameter.is_indexed(self.grad, self.weight)

    def readable(self, array: Array, order: int) -> Array:
        """Return an array that kernels can read: itself, a view of it, or a copy."""
        made = self.copies.get(id(array), (array, array))[1]
        made = np.asarray(made, order="F" if order == F_ORDER else "C")
        made = made if made.flags.aligned else made.copy(order="K")
        if made is not array:
            self.copies[id(array)] = array, made
        return made

    def others(self, template: Template, arrays: Sequence[Array]) -> tuple[Array, ...]:
        """Return the arrays besides the weight that a record points to.

        They are those of the state and of the average, `arrays`, and the half-precision copy.
        """
        others = [arrays[k] for k in template.leaves]
        copy = self.parameter.copy
        others = others if copy is None else [copy, *others]
        return tuple(self.copies.get(id(array), (array, array))[1] for array in others)

    def check(
        self, rule: Rule | None = None, average: tuple[Array, ...] = ()
    ) -> tuple[tuple[Array, ...], tuple[Array, ...]]:
        """Return the exact weight with its copy or low bits, and the checked arrays of the state.

        `average` is that of a rule derived from the optimizer's.

        Raises
        ------
        TypeError, ValueError
            An array does not match the rule, or two arrays share memory.
        """
        of, base = self.parameter, self.parameter.rule
        arguments = self.weight, self.state, of.copy, of.masters
        exact, arrays = arrays_of(of.optimizer, of.context, base, *arguments)
        arrays = (*arrays[: len(base.state)], *average, *arrays[len(base.state) :])
        named = dict(roles_of(rule or base, exact, arrays))
        if isinstance(self.grad, np.ndarray):  # values of rows are read before a state is written
            named = {"weight": named.pop("weight"), "gradient": self.grad, **named}
        check_apart(of.context, named)
        return exact, arrays

    def key(self, rule: Rule, passes: Any) -> Any:
        """Return what the form of the record depends on."""
        of, optimizer, weight = self.parameter, self.parameter.optimizer, self.weight
        order = F_ORDER if is_fortran(weight) else C_ORDER
        kind = type(optimizer), optimizer.multi_precision, of.masters, optimizer.rounding
        arrays = weight.dtype, weight.shape, order, self.same, nesting(self.state), self.indexed
        return rule, passes, *kind, *arrays


def plain(context: str, grad: Any) -> Any:
    """Return a checked gradient as arrays whose headers compiled code can read."""
    if not isinstance(grad, RowSparse):
        return np.asarray(grad)
    indices = np.asarray(grad.indices)
    indices = indices if indices.flags.aligned else indices.copy()
    return listed(context, (np.asarray(grad.values), indices), grad.shape)  # they may have changed


class Enrolment:
    """Creates the records of a call's parameters that have none, and their missing states.

    Parameters
    ----------
    records : Records
        The records.
    updater : object
        What owns them: an updater, or what updates or adds without one.
    indices, weights : list
        The parameters of the call, and their weights.
    """

    def __init__(
        self, records: RecordsLike, updater: Owner, indices: list[Index], weights: list[Any]
    ) -> None:
        self.records, self.updater, self.parameters = records, updater, records.parameters
        self.indices, self.weights = indices, weights
        self._common: dict[Any, Any] = {}
        self._alike: dict[Any, Shared] = {}
        self._complete: Mapping[Index, Any] = {}
        self.new = self._unknown()
        self._copied: list[tuple[Array, Array]] = []
        self._single: list[Index] = []
        tables = [updater.states, updater.states_synced]
        if self.parameters.averages is not None:
            tables.append(self.parameters.averages.arrays)
        self._tables = [(table, {i: table[i] for i in indices if i in table}) for table in tables]
        kept = [(opt._index_update_count, opt.carried) for opt in self.parameters.optimizers()]
        self._numbers = [(each, len(each)) for pair in kept for each in pair if each is not None]

    def _unknown(self) -> list[int]:
        """Return the positions of parameters without a record."""
        keys = map(self.records.key_of, self.indices)
        return [k for k, key in enumerate(keys) if key not in self.records.slots]

    def as_they_come(self, grads: list[Any]) -> list[Any]:
        """Return the gradients, row-sparse ones in one form; [] if one cannot be converted."""
        if not any(map(is_row_sparse, grads)):
            return list(grads)
        try:
            return [
                as_row_sparse(grad, weight.shape) if is_row_sparse(grad) else grad
                for grad, weight in zip(grads, self.weights, strict=True)
            ]
        except (TypeError, ValueError, AttributeError, MemoryError):  # the checks report it
            return []

    def checked(self, grads: list[Any]) -> list[Any]:
        """Return the gradients, checked, as plain arrays."""
        check, states, plain_grads = self.parameters.check, self.updater.states, []
        for k, (index, grad, weight) in enumerate(
            zip(self.indices, grads, self.weights, strict=True)
        ):
            param = self.parameters.of(index)
            grad = check(param.context, weight, grad, param.copy)
            if is_cuda(weight):  # its tables are created with the other checks
                plain_grads.append(grad)
                continue
            plain_grads.append(plain(param.context, grad))
            self.weights[k] = np.asarray(weight)
            if index in states:
                FirstCall(param, plain_grads[k], self.weights[k], states[index]).check()
        return plain_grads

    def compile_missing(self, grads: Sequence[Any], dense: bool) -> bool:
        """Compile the missing loops for row-sparse gradients, and with `dense` for others.

        Returns whether the records, which may be older, support all of them.
        """
        lists = zip(self.indices, grads, self.weights, strict=True)
        ready = self._complete
        left = (item for item in lists if item[0] not in ready or type(item[1]) is not np.ndarray)
        return all(self._compile_missing(*item, dense) for item in left)

    def _compile_missing(self, index: Index, grad: Any, weight: Any, dense: bool) -> bool:
        """Compile the missing loops of a parameter; return whether records support them."""
        records = self.records
        param = self.parameters.of(index)
        kept = param.record
        if isinstance(kept, DeviceRecord):
            return True
        sparse = param.is_indexed(grad, weight)
        place = w.ROW_KERNELS if sparse else w.KERNELS
        if kept is None or not (sparse or dense) or kept.words[place]:
            return True
        resting: list[tuple[Any, Layout]] = [kept.resting] if kept.resting else []
        if kept.layout.pitched and not sparse:
            return False
        for record, layout in (*resting, (kept.block, kept.layout)):
            rows = row_layout(param.context, param.optimizer, layout, record) if sparse else layout
            if rows is None:
                return False
            alone = None  # the rule that averages all rows, after the update of some
            rests, averages = kept.resting, records.averages
            if sparse and rests and averages and updates_rows(param.optimizer, layout):
                alone = None if layout is rests[1] else averages.average.alone
            with param.compiling():
                numbers = sparse and kept.words[w.NDIMS] == 1
                flushed = rows.catch_up and param.optimizer.sparse_decay == "dense"
                passes = records.mode.norms, records.mode.clips, numbers, flushed, alone
                kernels = Loops(rows, kind_of(weight.dtype), *passes).addresses
                if sparse and not records.words[w.ADMIT_ROWS]:
                    entries = list(map(entry_of, row_admission.ENTRIES))
                    records.words[w.ADMIT_ROWS : w.ORDER_ROWS + 1] = entries
            if rows.catch_up and kept.deferred is None:
                kept = param.record = kept._replace(deferred=Deferred(record))
            record[place] = kernels.ctypes.data
        return True

    def enroll(self, grads: Sequence[Any], known: bool) -> bool:
        """Create the missing records and states.

        Returns whether records support all of them. See :meth:`_create` for `known`.
        """
        indices, slots, groups = self.indices, self.records.slots, self.parameters.groups
        if groups is not None:
            for k in self.new:
                groups.of(indices[k])
            groups.sync()  # new indices may have changed multipliers
        self._number()
        made = self._enroll_on_devices(grads)
        ready: dict[Index, tuple[Parameter, Template]] = {}
        for k in self.new:
            index, weight = indices[k], self.weights[k]
            if index in ready or self.records.key_of(index) in slots:
                continue
            if type(weight) is not np.ndarray:
                return False
            param = self.parameters.of(index)
            key = self._key(param, grads[k], weight)
            template = TEMPLATES.get(key) if known else None
            if template is not None:
                ready[index] = param, template
                continue
            state = self.updater._state(index, weight, isinstance(grads[k], RowSparse))
            template = self._create(FirstCall(param, grads[k], weight, state), known)
            if template is None:
                return False
            made[index] = state
            blank = key and blank_of(param.optimizer, weight, made[index])
            if blank:
                remember(key, template._replace(blank=blank))
        if ready:
            made |= self._begin(ready)
            self._complete = ready
            if len(made) > len(ready):  # in the order of the call
                made = {indices[k]: made[indices[k]] for k in self.new if indices[k] in made}
        if not made.keys() <= self.updater.states.keys():
            self._warn_of_renamed()
            self._warn_of_numbers([index for index in made if index not in self.updater.states])
        dict.update(self.updater.states, made)
        dict.update(self.updater.states_synced, dict.fromkeys(made, True))
        return True

    def _warn_of_renamed(self) -> None:
        """Warn if a call has new parameters, but not all whose states were loaded.

        A single call may be one of several, unless the only state has the shape of its weight.
        """
        states, shape = [*self.updater.states.values()], np.shape(self.weights[0])
        alike = len(states) == 1 and shape in [array.shape for array in leaves(states)]
        if len(self.indices) == 1 and not alike:
            return
        known, slots, key_of = self.updater.states_synced, self.records.slots, self.records.key_of
        loaded = [i for i, synced in known.items() if not synced and key_of(i) not in slots]
        if unused := [i for i in loaded if i not in self.indices]:
            new = [i for i in self.indices if i not in self.updater.states]
            warn_user(
                f"this call starts states of {brief(new)}, and does not use those that were loaded "
                f"of {brief(unused)}: if these are the same weights, give the optimizer "
                "param_idx2name={name here: name in the file} before load(), else delete them from "
                "updater.states"
            )

    def _warn_of_numbers(self, new: Sequence[Index]) -> None:
        """Warn of an int and a str of the same digits, which are two parameters."""
        for index in new:
            number = isinstance(index, str) and index.isdecimal()
            other = int(index) if number else str(index) if isinstance(index, int) else index
            if other in self.updater.states:
                warn_user(
                    f"this call starts a state of {index!r}, and {other!r} has another: an int and "
                    "a str are two indices, so give a weight the same one in each call"
                )

    def _enroll_on_devices(self, grads: Sequence[Any]) -> dict[Index, Any]:
        """Create the missing records and states of parameters on devices; return the states."""
        new = [k for k in self.new if is_cuda(self.weights[k])]
        if not new:
            return {}
        records, updater, made = self.records, self.updater, dict[Index, Any]()
        plain = all(optimizer.starts_at_zero for optimizer in self.parameters.optimizers())
        with allocated_together() if plain else nullcontext():
            for k in new:
                index, weight, grad = self.indices[k], self.weights[k], grads[k]
                if index not in made:
                    param = self.parameters.of(index)
                    self.parameters.check(param.context, weight, grad, param.copy)
                    made[index] = updater._state(index, weight, isinstance(grad, RowSparse))
        for k in new:
            index = self.indices[k]
            if records.record_of(index) is None:
                of = self.parameters.of(index)
                with of.compiling():
                    records.on_devices(updater).enroll(of, records.key_of(index), self.weights[k])
        return made

    def _number(self) -> None:
        """Give new parameters their numbers (counts, carried ones) before records have addresses.

        Otherwise numbers that move would change settings, and with them records, between two.
        """
        new: dict[Any, list[Index]] = {}
        for k in self.new:
            new.setdefault(self.parameters.of(self.indices[k]).optimizer, []).append(
                self.indices[k]
            )
        for optimizer, indices in new.items():
            optimizer._index_update_count.slots(indices, optimizer.begin_num_update)
            optimizer.carried_slots(indices)
        if self.records.version != self.updater.optimizer.version:
            self.records.refresh(self.updater)
            self.new = self._unknown()  # a rule for each index may have changed with the version

    def _begin(self, ready: Mapping[Index, tuple[Parameter, Template]]) -> dict[Index, Any]:
        """Create states of zeros, and records, of parameters with templates; return the states."""
        made, end = dict[Index, Any](), 0
        blanks = [template.blank for _, template in ready.values() if template.blank is not None]
        memory = zeros(sum(blank.spacing for blank in blanks if blank.spacing < ALONE_FROM))
        first = address_of(memory)
        for (index, (of, template)), blank in zip(ready.items(), blanks, strict=True):
            if blank.spacing < ALONE_FROM:
                arrays, start, end = blank.arrays(memory, end), first + end, end + blank.spacing
            else:  # memory that is freed with the state
                alone = zeros(blank.spacing)
                arrays, start = blank.arrays(alone, 0), address_of(alone)
            made[index] = blank.state(arrays)
            others = [arrays[k] for k in template.leaves]
            addresses = [start + blank.slots[k].offset for k in template.leaves]
            self._write(of, template, others, addresses)
        return made

    def _key(self, of: Parameter, grad: Any, weight: Array) -> Any:
        """Return what state and record of a new tensor depend on; None if it is like no other."""
        index, optimizer = of.index, of.optimizer
        if optimizer not in self._common:
            self._common[optimizer] = self._settings(optimizer)
        common, known = self._common[optimizer], self.updater.states
        if not common or of.copy is not None or of.offset or index in known:
            return None
        if isinstance(grad, RowSparse) or index in optimizer.whole_shapes:
            return None
        same = getattr(grad, "dtype", None) == weight.dtype
        return common, weight.dtype, weight.shape, is_fortran(weight), same

    def _settings(self, optimizer: OptimizerLike) -> Any:
        """Return what the records of an optimizer depend on; False if each one differs."""
        differs = optimizer.rule_by_index or self.parameters.averages is not None
        if differs or self.records.mode.defers or not optimizer.starts_at_zero:
            return False
        kind = type(optimizer), optimizer.multi_precision, optimizer.rounding
        stored = optimizer.state_dtype, optimizer.state_min_size
        return optimizer.rule, self.records.mode.passes, kind, stored

    def _create(self, new: FirstCall, known: bool) -> Template | None:
        """Create the record of a parameter; return its template, None if the checks refuse it.

        With `known`, a record of another parameter of the same form may be the template; the front
        refuses the arrays if they have another form.
        """
        of, weight, state = new.parameter, new.weight, new.state
        basic, arrays = of.rule, [*leaves(state)]
        if kind_of(weight.dtype) is None:
            return None  # the checks report it
        rule, average = basic, tuple[Array, ...]()
        averages = self.parameters.averages
        if averages is not None:
            rule, average = averages.derived(of.context, of.index, basic, new.check()[0], ())
            arrays = [*arrays, *average]
        known &= not any(starmap(np.may_share_memory, combinations(arrays, 2)))
        template = self._template(new, rule, average, known)
        others = new.others(template, arrays)
        self._write(of, template, others, list(map(address_of, others)))
        if averages is not None and averages.average.alternates:
            rests = self._template(new, basic, (), False)  # the front checks the other record alone
            self._write_resting(new, rests, arrays)
        if basic.extra:
            self.records.prepared, self.records.quick, self.records.direct = True, False, False
        if new.copies or not is_fixed(state):
            self._single.append(of.index)
            self._copied += new.copies.values()
        return template

    def _template(
        self, new: FirstCall, rule: Rule, average: tuple[Array, ...], known: bool
    ) -> Template:
        """Return the template of a record, that of another one if `known`.

        The rule may have one more slot than that of the optimizer, the `average` of the weight.
        """
        key = new.key(rule, self.records.mode.passes)
        template = TEMPLATES.get(key) if known and new.has_template else None
        if template is None:
            template = self._new_template(new, rule, average)
            if new.has_template:
                remember(key, template)
        return template

    def _new_template(self, new: FirstCall, rule: Rule, average: tuple[Array, ...]) -> Template:
        """Check the arrays of a parameter and return the template of its record."""
        of, weight, state = new.parameter, new.weight, new.state
        exact, arrays = new.check(rule, average)
        others = tuple(array for array in (*exact, *arrays) if array is not weight)
        records = self.records
        scaled = records.mode.factors and not of.optimizer.folds
        changes = scaled or records.mode.clips or (is_half(weight) and not new.same)
        kind = real_of(exact[0].dtype) if changes else kind_of(weight.dtype)  # of the gradient
        layout = layout_of(rule, exact, arrays, kind, of.optimizer.rounding, of.copy)
        order, in_place = C_ORDER, not (new.indexed or layout.keyed or layout.coded)
        if rule.elementwise and in_place and is_fortran(weight):
            order = F_ORDER
        if self._is_pitched(new, layout, (*exact, *arrays)):
            layout, order = replace(layout, pitched=True), C_ORDER
        places = {id(array): k for k, array in enumerate([*leaves(state), *average])}
        positions = [places[id(array)] for array in others if id(array) in places]
        if not layout.pitched:
            others = tuple(new.readable(array, order) for array in others)
        kernels = None
        if not new.indexed:
            with of.compiling():
                loops = Loops(layout, kind_of(weight.dtype), records.mode.norms, records.mode.clips)
                kernels = loops.addresses
        column = ADDRESS + next(k for k, array in enumerate(exact) if array is weight)
        template = template_of(layout, kernels, weight, others, order, column, positions)
        template.block[w.SCALED] = scaled
        in_pairs = weight.shape[-1:] == (2,) and order == C_ORDER and not layout.pitched
        if in_pairs and rule.row is None and not (records.mode.clips and weight.ndim == 2):
            pair = PAIRS.get(kind_of(weight.dtype))
            template.block[w.PAIR_DTYPE] = 0 if pair is None else kind_word(np.dtype(pair))
        if layout.pitched:
            template.block[w.CLEAR_WEIGHT] = address_of(weight)
        return template

    def _is_pitched(self, new: FirstCall, layout: Layout, arrays: Sequence[Array]) -> bool:
        """Whether indexed rows are updated where they lie, in rows with a common stride."""
        records, rule = self.records, layout.rule
        plain = new.indexed and records.averages is None and not (records.mode.clips or rule.passes)
        rows = rule.row is not None or updates_rows(new.parameter.optimizer, layout)
        return plain and rows and is_pitched(arrays)

    def _write(
        self, of: Parameter, template: Template, others: Sequence[Array], addresses: Sequence[int]
    ) -> None:
        """Write the record of a parameter whose arrays besides the weight are `others`."""
        records, index, optimizer = self.records, of.index, of.optimizer
        key = records.key_of(index)
        headers, written = identities(others)
        block, words, base = template.filled(addresses, headers)
        words[template.row + OFFSET] = of.offset
        if template.layout.keyed:
            words[w.NUMBER], words[w.SEED] = index_number(index), index_number(optimizer.seed)
        counts = optimizer._index_update_count
        words[w.COUNT] = counts.slot(index, optimizer.begin_num_update)
        if optimizer.carried is not None:
            words[w.CARRIED] = int(optimizer.carried_slots([index])[0])
        shared = self._shared_by(of, template.layout)
        words[w.HYPER], words[w.INDEX_ID] = shared.address, id(key)
        if len(others) > records.widest:
            records.widest, records.words[w.CAPACITY] = len(others), 0
        alive = [*others, *written, template.kernels, key]
        of.record = Record(block, words, template.layout, template, shared, alive)
        records.slots[key] = base
        if of.record is None:  # a signal handler has dropped all records
            records.slots.pop(key, None)

    def _shared_by(self, of: Parameter, layout: Layout) -> Shared:
        """Return the hyper-parameters of a parameter, which those without multipliers share."""
        optimizer, key = of.optimizer, (of.optimizer, layout.rule, layout.real)
        differs = optimizer.lr_mult or optimizer.wd_mult or optimizer.param_dict
        shared = None if differs or optimizer.fields_of(of.index) else self._alike.get(key)
        if shared is None:
            shared = self._alike[key] = self.records.shared_by(of, layout)
        return shared

    def _write_resting(self, new: FirstCall, template: Template, arrays: Sequence[Array]) -> None:
        """Write the record of a parameter for steps that do not average its weight."""
        of, others = new.parameter, new.others(template, arrays)
        kept = of.record
        assert isinstance(kept, Record)
        headers, written = identities(others)
        block, words, base = template.filled(list(map(address_of, others)), headers)
        words[template.row + OFFSET] = of.offset
        words[w.FIELDS] = kept.words[w.FIELDS]
        kept.words[w.RESTING] = base
        alive = [*kept.alive, *others, *written, template.kernels]
        resting = block, template.layout
        of.record = kept._replace(alive=alive, resting=resting)

    def copy_back(self) -> None:
        """Copy what a completed call has changed to the arrays that kernels cannot read."""
        for array, copy in self._copied:
            array[...] = copy

    def drop_single(self) -> None:
        """Drop the records that serve one call."""
        for index in self._single:
            self.records.drop(index)

    def withdraw(self) -> None:
        """Drop the new records of a failed call, and what else it has stored for parameters."""
        for k in self.new:
            index = self.indices[k]
            self.records.drop(index)
            for table, values in self._tables:
                if index in values:
                    dict.__setitem__(table, index, values[index])
                else:
                    dict.pop(table, index, None)
        for table, length in self._numbers:
            for index in list(table)[length:]:
                table.pop(index)
