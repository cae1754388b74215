"""Records of many tensors at once: one computation for all that have equal counts and rates."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from fastopt.kernels.layout import KEY
from fastopt.optimizer.batch import Batch
from fastopt.optimizer.rates import as_float

if TYPE_CHECKING:
    from fastopt.optimizer.planning import Planner

__all__ = ["fill"]

Column = NDArray[Any]


@dataclass(frozen=True, slots=True)
class Classes:
    """Which tensors have equal records, as long as counts advance together."""

    multipliers: tuple[Any, ...]
    """The tables that the multipliers were looked up in."""
    said: list[tuple[Any, Any]]
    """Multipliers of the parameters, which go before the tables."""
    lr_mult: Column
    wd_mult: Column
    ahead: bytes
    """By how many updates each tensor is ahead of the first; bytes are compared fastest."""
    together: bool
    """Whether none is."""
    first: Column
    """Place in the list of the first tensor of each class."""
    of: Column
    """Class of each tensor."""


def fill(planner: "Planner", batch: Batch) -> None:
    """Count one update of every tensor of `batch`, in order, and fill their records."""
    places = batch.places()
    counts = batch.counts.array[places] + 1
    batch.counts.array[places] = counts
    classes = batch.classes = _classes(planner, batch, counts)
    rates, uniform = _base_rates(planner, counts, classes.together)
    rates, decays = rates * classes.lr_mult, as_float("wd", planner.wd) * classes.wd_mult
    first, of = classes.first, classes.of
    if not uniform:
        first, of = _partition(counts, rates, decays)
    fields = []
    for place in first.tolist():
        t, lr, wd = int(counts[place]), float(rates[place]), float(decays[place])
        planner.check_rates(batch.indices[place], lr, wd)
        fields.append(planner.record(planner.rule, lr, wd, planner.hyper(t, lr, wd)))
    for table, places in batch.groups:
        table.fill_all(fields, of[places])
        if table.layout.keyed:
            table.entry[:, KEY] = [planner.key(batch.indices[place]) for place in places]
    for place in batch.singles:
        index, (table, _) = batch.indices[place], batch.rows[place]
        table.fill(fields[of[place]], planner.key(index) if table.layout.keyed else 0)
        if table.layout.catch_up:
            planner.pay(index, table, float(rates[place]), float(decays[place]))


def _base_rates(planner: "Planner", counts: Column, together: bool) -> tuple[Any, bool]:
    """Rate before multipliers at each tensor's turn, and whether it is the same for all."""
    if together:
        planner.num_update = max(int(counts[0]), planner.num_update)
        return planner.learning_rate, True
    updates = np.maximum.accumulate(np.maximum(counts, planner.num_update))
    if updates[0] == updates[-1]:
        planner.num_update = int(updates[-1])
        return planner.learning_rate, True
    rates = {}
    for update in dict.fromkeys(updates.tolist()):
        planner.num_update = update
        rates[update] = planner.learning_rate
    return np.array([rates[update] for update in updates.tolist()]), False


def _classes(planner: "Planner", batch: Batch, counts: Column) -> Classes:
    """Classes of the last call where they still hold."""
    known: Classes | None = batch.classes
    ahead = counts - counts[0]
    if known and known.ahead != ahead.tobytes():
        known = None
    tables = planner.lr_mult, planner.wd_mult, planner.idx2name
    said = _said(planner, batch)
    if known and known.multipliers == tables and known.said == said:
        return known
    lr_mult, wd_mult = (
        np.array([planner.multiplier(index, table, name) for index in batch.indices])
        for table, name in ((planner.lr_mult, "lr_mult"), (planner.wd_mult, "wd_mult"))
    )
    if known and (known.lr_mult == lr_mult).all() and (known.wd_mult == wd_mult).all():
        first, of = known.first, known.of
    else:
        first, of = _partition(ahead, lr_mult, wd_mult)
    copied = tuple(table.copy() for table in tables)
    together = not ahead.any()
    return Classes(copied, said, lr_mult, wd_mult, ahead.tobytes(), together, first, of)


def _said(planner: "Planner", batch: Batch) -> list[tuple[Any, Any]]:
    """Multipliers of the parameters in ``param_dict``, which may change at any time."""
    if not planner.param_dict:
        return []
    found = [planner.param_dict.get(index) for index in batch.indices]
    return [(getattr(p, "lr_mult", None), getattr(p, "wd_mult", None)) for p in found]


def _partition(*columns: Column) -> tuple[Column, Column]:
    """First row of each class of equal rows, and the class of each row."""
    _, first, of = np.unique(
        np.stack(columns, axis=1), axis=0, return_index=True, return_inverse=True
    )
    return first, of.reshape(-1)
