"""States of parameters as torch keeps them: tensors by name, whose memory the updater writes.

``opt.state[p]`` is what counts. Before a step, what a program has written, replaced or removed
there is entered in the updater. After the first update of a parameter its arrays are there as
tensors.

Tests: ``tests/pytorch/test_torch_state.py``.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from typing import Any

import numpy as np
import torch
from torch.utils._pytree import register_pytree_node

from fastopt._engine.mixed_precision import has_master
from fastopt._engine.tracked import Tracked, weakly
from fastopt._engine.validate import leaves, mapped
from fastopt._foreign import Array, as_real, of_tensor, resolved
from fastopt._kernels.codes import is_coded
from fastopt._updater.updater import Updater
from fastopt.arguments import brief, number
from fastopt.checkpoint.foreign.torch import Form
from fastopt.checkpoint.format.errors import CheckpointError
from fastopt.optimizer import Optimizer
from fastopt.optimizer.matrices import MatrixOptimizer
from fastopt.torch.recipes import plain
from fastopt.torch.tensors import Snapshot, report
from fastopt.torch.views import Views

State = MutableMapping[torch.Tensor, dict[str, Any]]


TABLES = ("row_decay", "cumgrads", "shares")
"""Attributes of optimizers with what is no part of the states, by index."""


class Entry(Tracked):
    """State of a parameter, which says when it changes; otherwise as a plain dictionary."""

    __slots__ = ()

    def __reduce__(self) -> tuple[Any, ...]:
        return OrderedDict, (), None, None, iter(self.items())  # which torch.load() accepts


register_pytree_node(
    Entry,
    lambda entry: ([*entry.values()], [*entry]),
    lambda values, names: dict(zip(names, values, strict=True)),
)


def tensor_of(array: Array) -> torch.Tensor:
    """Return a tensor with the memory of an array."""
    if array.dtype.name == "bfloat16":
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)


def array_of(role: str, tensor: object) -> Array:
    """Return a view of a tensor, or a copy if its memory does not hold its values."""
    if not isinstance(tensor, torch.Tensor):
        raise CheckpointError(f"{role} must be a tensor, got {brief(tensor)}")
    array: Array = as_real(of_tensor(role, resolved(tensor.detach().cpu())))
    return array


class States:
    """States of the parameters of a group.

    Parameters
    ----------
    updater : Updater
        The updater of the group.
    form : Form or None
        Torch's names of the state arrays, if torch has the same rule.
    views : Views
        The parameters.
    """

    def __init__(self, updater: Updater, form: Form | None, views: Views) -> None:
        self.updater, self.form, self.views = updater, form, views
        optimizer, count = updater.optimizer, len(views.params)
        self.counted = (
            form is None
            or form.counted
            or updater.average is not None
            or optimizer.rounding != "nearest"
        )
        """Whether entries have the number of steps, which torch's SGD and Muon do not count."""
        self.carried = optimizer.carried_in and (
            "mu_product"
            if form and form.torch == "NAdam"
            else optimizer.carried_in.strip("_").removesuffix("s")
        )
        """Name in an entry of a number that the rule carries from step to step."""
        sums = optimizer.step_sums is not None or optimizer.sparse_decay != "touched"
        self.changes = sums or not optimizer.native or "cumgrads" in vars(optimizer)
        """Whether an update may replace arrays or numbers of an entry."""
        self.steps, self.numbers = torch.zeros(count), torch.zeros(count, dtype=torch.float64)
        self.own_steps, self.own_numbers = self.steps.numpy(), self.numbers.numpy()
        self.known: tuple[object, ...] = b"", b""
        """The two as they were after the last step."""
        self.positions: Any = None
        """Positions of the counts, and the array that they are positions in."""
        self.fresh = set[int]()
        """Positions of parameters that had no state when the group was last followed."""
        self.written = False
        """Whether a program has written to an entry."""
        self._snapshot = Snapshot([])

    # Before a step

    def fit(self) -> bool:
        """Whether the entries are as they were after the last step."""
        return (
            not self.written
            and self._snapshot.look() == self._snapshot.seen
            and self.own_steps.tobytes() == self.known[0]
            and (not self.carried or self.own_numbers.tobytes() == self.known[1])
        )

    def follow(self, state: State, loads: bool = False) -> None:
        """Enter the states of the parameters in the updater, with `loads` those of a state dict.

        Raises
        ------
        CheckpointError
            An entry is not a state of its parameter.
        """
        for k, param in enumerate(self.views.params):
            self._enter(k, state.get(param) or {}, loads)
        counts = self.updater.optimizer._index_update_count
        counts.largest = max(counts.values(), default=0)
        self._note(state)

    def _enter(self, k: int, entry: dict[str, Any], loads: bool) -> None:
        """Enter the state of one parameter."""
        updater, index, name = self.updater, self.views.indices[k], self.views.names[k]
        optimizer, counts = updater.optimizer, updater.optimizer._index_update_count
        context = f"the state of {name}"
        steps = number_of_steps(context, entry["step"]) if entry.get("step") is not None else None
        shown = index in updater.states and self._is_shown(k, entry)
        if shown and not self.counted:
            steps = counts.get(index, 0)
        if not shown:
            template = optimizer.create_state_multi_precision(index, self.views.arrays[k])
            slots = dict(self._named(k, template))
            present = [slot for slot in slots if entry.get(slot) is not None]
            optional = self.form.optional if self.form else None
            missing = [slot for slot in slots if slot not in present and slot != optional]
            if missing and (present or (loads and steps)):
                raise CheckpointError(f"{context} lacks {missing}")
            ours = {"step", "average", self.carried, *TABLES}
            others = [key for key in entry.keys() - ours if torch.is_tensor(entry[key])]
            if loads and missing and others:
                raise CheckpointError(
                    f"{context} has {others}, of another optimizer, not {missing}"
                )
            if not present:
                self.fresh.add(k)
                updater.states.pop(index, None)
            else:
                self.fresh.discard(k)
                arrays = iter(
                    [
                        self._array(k, f"{context}: {slot}", entry[slot], like)
                        if slot in present
                        else like
                        for slot, like in slots.items()
                    ]
                )
                updater.states[index] = mapped(lambda _: next(arrays), template)
            self._enter_average(k, context, entry)
            if steps is None and slots and not self.counted:
                steps = int(bool(present))  # torch does not count, and knows the first update
            shown = bool(present)
        if (steps or 0) != counts.get(index, 0):
            counts[index] = steps or 0
        if self.carried:
            self._enter_carried(index, context, entry.get(self.carried))
        for table in TABLES:
            numbers = vars(optimizer).get(table, {})
            numbers.pop(index, None)
            if entry.get(table) is not None:
                value = converted(entry[table], lambda part: array_of(context, part))
                numbers[index] = tuple(value.tolist()) if isinstance(value, np.ndarray) else value
        if shown:
            self._show(k, entry)

    def _enter_carried(self, index: int, context: str, value: object) -> None:
        carried = self.updater.optimizer.carried
        if carried is None:
            return
        if value is None:
            carried.pop(index, None)
        else:
            carried[index] = number(f"{context}: {self.carried}", plain(value))

    def _enter_average(self, k: int, context: str, entry: dict[str, Any]) -> None:
        averages, index = self.updater._averages, self.views.indices[k]
        average = entry.get("average")
        if averages is None:
            return
        if average is None:
            averages.arrays.pop(index, None)
            self.fresh.add(k)  # the next update begins one
        else:
            weight = self.views.arrays[k]
            like = np.empty_like(weight, np.float64 if weight.itemsize == 8 else np.float32)
            averages.arrays[index] = self._array(k, f"{context}: average", average, like)
        self.updater.forget()

    def _named(self, k: int, state: Any) -> Iterator[tuple[str, Array]]:
        """Return the arrays of a state with their names."""
        optimizer, inner = self.updater.optimizer, state
        if has_master(optimizer, self.views.arrays[k]):
            master, inner = state[::-1] if optimizer.master_last else state
            yield "master", master
        slots = iter(self.form.slots if self.form else self._slots(k))
        coded = ""
        for j, array in enumerate(leaves(inner)):
            if coded:
                yield f"{coded}_scale", array
                coded = ""
            else:
                slot = next(slots, f"state_{j}")
                yield slot, array
                coded = slot if is_coded(array) else ""

    def _slots(self, k: int) -> Iterable[str]:
        """Return the names that the rule or the optimizer has for the arrays of a state."""
        index, array = self.views.indices[k], self.views.arrays[k]
        optimizer: Optimizer = self.updater.optimizer
        if isinstance(optimizer, MatrixOptimizer):
            if not optimizer.falls_back(index, array):
                return optimizer.named_slots(array.shape)
            optimizer = optimizer._fallback()
        rule = optimizer.rule_for(index) if optimizer.native else None
        return rule.slots if rule else ()

    def _array(self, k: int, role: str, tensor: Any, like: Array) -> Array:
        """Return the array of a tensor, or a copy in the form of `like` if it has another."""
        array, views = array_of(role, tensor), self.views
        if like.shape == views.arrays[k].shape and tensor.shape == views.params[k].shape:
            array = array.reshape(like.shape)
        if array.shape != like.shape:
            raise CheckpointError(f"{role} must have shape {like.shape}, got {array.shape}")
        same = array.dtype == like.dtype
        if not same and (like.dtype.kind in "iu" or array.dtype.kind in "iub"):
            raise CheckpointError(f"{role} must have dtype {like.dtype}, got {array.dtype}")
        of = like.flags
        laid = array.flags.c_contiguous if of.c_contiguous else array.flags.f_contiguous
        if same and laid and array.flags.aligned:
            return array
        like[...] = array
        return like

    # After a step

    def note(self, state: State, positions: Sequence[int]) -> bool:
        """Show the states of parameters after an update; return whether some are new."""
        new = self.fresh.intersection(positions)
        tables, views = vars(self.updater.optimizer), self.views
        for k in positions if self.changes else ():
            index, entry = views.indices[k], state.get(views.params[k], {})
            named = self._named(k, self.updater.states.get(index))
            if any(index in tables.get(table, ()) for table in TABLES) or any(
                _is_elsewhere(entry.get(slot), array) for slot, array in named
            ):
                new.add(k)
        for k in new:
            self._show_in(state, k)
        self.fresh -= new
        if new:
            self._note(state)
        else:
            self.count()
        return bool(new)

    def show(self, state: State) -> None:
        """Show the states of all parameters that have been updated."""
        for k, index in enumerate(self.views.indices):
            if index in self.updater.states:
                self._show_in(state, k)
        self.count()

    def _show_in(self, state: State, k: int) -> None:
        """Show the state of a parameter, which has no entry if it is empty."""
        entry = state.get(self.views.params[k], {})
        self._show(k, entry)
        if entry:
            state[self.views.params[k]] = entry

    def _arrays(self, k: int) -> dict[str, Array]:
        """Return the arrays that the updater has of a parameter."""
        updater, index = self.updater, self.views.indices[k]
        named = dict(self._named(k, updater.states.get(index)))
        if updater._averages is not None and index in updater._averages.arrays:
            named["average"] = updater._averages.arrays[index]
        return named

    def _is_shown(self, k: int, entry: dict[str, Any]) -> bool:
        """Whether the tensors of an entry have the memory of the arrays."""
        arrays = self._arrays(k).items()
        return all(_are_one(entry.get(slot), self._tensor(k, array)) for slot, array in arrays)

    def _show(self, k: int, entry: dict[str, Any]) -> None:
        """Enter the arrays of a state, and its numbers, as tensors."""
        tables, index = vars(self.updater.optimizer), self.views.indices[k]
        if self.counted:
            entry["step"] = self.steps[k]
        if self.carried:
            entry[self.carried] = self.numbers[k]
        for slot, array in self._arrays(k).items():
            if _is_elsewhere(entry.get(slot), array):
                entry[slot] = self._tensor(k, array)
        for table in TABLES:
            if index in tables.get(table, ()):
                value = tables[table][index]  # of shares only numbers
                entry[table] = converted(np.array(value) if table == "shares" else value, tensor_of)

    def _tensor(self, k: int, array: Array) -> torch.Tensor:
        """Return a tensor with the memory of an array, in the shape of its parameter."""
        tensor, param = tensor_of(array), self.views.params[k]
        if array.shape != self.views.arrays[k].shape:
            return tensor
        if param.is_complex():
            tensor = torch.view_as_complex(tensor)
        return tensor.view(param.shape) if tensor.shape != param.shape else tensor

    def count(self) -> None:
        """Write the numbers of steps, and those that the rule carries."""
        optimizer, indices = self.updater.optimizer, self.views.indices
        if self.counted:
            counts = optimizer._index_update_count
            if self.positions is None or self.positions[1] is not counts.counted:
                self.positions = counts.slots(indices, 0), counts.counted
            self.own_steps[:] = self.positions[1][self.positions[0]]
        if self.carried and (carried := optimizer.carried) is not None:
            slots = carried.slots(indices, optimizer.first_carried)
            self.own_numbers[:] = carried.array[slots]
        self.known = self.own_steps.tobytes(), self.carried and self.own_numbers.tobytes()

    def _note(self, state: State) -> None:
        """Note what the entries have, and let them say when that changes."""
        self.count()
        written = weakly(self._write)
        tensors = list[torch.Tensor]()
        for k, param in enumerate(self.views.params):
            entry = state.get(param)
            if isinstance(entry, Entry):
                entry.changed = written
            elif isinstance(entry, dict):
                state[param] = Entry(entry, written)
            if entry:
                tensors += [entry[slot] for slot in self._arrays(k)]
        self._snapshot, self.written = Snapshot(tensors), False

    def _write(self, *_: object) -> None:
        self.written = True


def _is_elsewhere(tensor: torch.Tensor | None, array: Array) -> bool:
    """Whether a tensor lies elsewhere than an array."""
    return tensor is None or not array.size or tensor.data_ptr() != array.ctypes.data


def _are_one(tensor: object, other: torch.Tensor) -> bool:
    """Whether a tensor has the memory and the form of another one."""
    is_dense = isinstance(tensor, torch.Tensor) and tensor.layout is torch.strided
    return is_dense and other.numel() > 0 and report(tensor) == report(other)


def number_of_steps(context: str, value: object) -> int:
    """Return a number of steps; raise CheckpointError if it is not one."""
    steps = plain(value)
    if isinstance(steps, (int, float)) and steps >= 0 and float(steps).is_integer():
        return int(steps)
    raise CheckpointError(f"{context}: step must be a whole number, at least 0, got {brief(value)}")


def converted(tree: Any, function: Callable[[Any], Any]) -> Any:
    """Return nested dicts, tuples and lists with arrays, tensors and the like converted."""
    if isinstance(tree, Mapping):
        return {key: converted(part, function) for key, part in tree.items()}
    if type(tree) in (tuple, list):
        return type(tree)(converted(part, function) for part in tree)
    return function(tree) if isinstance(tree, (np.ndarray, torch.Tensor, Exact)) else tree


class Exact:
    """A tensor of a state dict that torch must not convert to the dtype of the parameter."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor
