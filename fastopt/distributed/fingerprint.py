"""Fingerprint of an optimizer, which ranks compare before each call."""

from collections.abc import Mapping, Sequence, Set
from typing import Any

import numpy as np

from fastopt._engine.per_index import PerIndex
from fastopt._engine.tracked import Tracked
from fastopt._engine.validate import label
from fastopt.distributed.agreement import Fact, Facts, Numbers
from fastopt.distributed.code import codes
from fastopt.lr_scheduler.base import LRScheduler
from fastopt.optimizer.groups import Groups
from fastopt.optimizer.optimizer import Index, Optimizer

DEPTH = 8
"""Maximum nesting depth of containers that are compared."""


class Fingerprint:
    """Attributes of an optimizer, which are read again only if they may have changed.

    Numbers, strings and tables of multipliers are read when the optimizer's version changes.
    Schedules and the user's containers are read in each call, because their changes are not
    tracked. Arrays by index are excluded: each rank has those of its own slices.

    Parameters
    ----------
    optimizer : Optimizer
        The optimizer.
    of : str
        Suffix of the names of facts, for the optimizer of a group.
    """

    def __init__(self, optimizer: Optimizer, of: str = "") -> None:
        self.optimizer, self.of = optimizer, of
        self._codes = codes(optimizer)
        self._version = self._tables_version = -1
        self._fixed = self._tables = Facts()
        self._loose: list[str] = []

    def facts(self) -> list[Fact]:
        """Facts about the current optimizer."""
        optimizer, own = self.optimizer, vars(self.optimizer)
        if self._version != optimizer.version:
            names = [name for name in own if name not in optimizer.transient]
            self._loose = [name for name in names if _may_change(own[name])]
            simple = {name: described(own[name]) for name in names if _is_plain(own[name])}
            fixed = {"optimizer": type(optimizer).__name__, **simple, **self._codes}
            self._fixed = self._named(fixed)
            self._version = optimizer.version
        if self._tables_version != optimizer.multipliers_version:
            names = [name for name in ("lr_mult", "wd_mult", "idx2name") if name in own]
            self._tables = self._named({name: described(own[name]) for name in names})
            self._tables_version = optimizer.multipliers_version
        loose = {name: described(own[name]) for name in self._loose}
        counted = [name for name in optimizer.by_index if name in own]
        numbers = [own[name].array[: own[name].first + len(own[name])] for name in counted]
        kind = self._named({"optimizer": type(optimizer).__name__, **loose})
        return [kind, self._fixed, self._tables, Numbers(numbers, self._numbers)]

    def _named(self, found: Mapping[str, str | None]) -> Facts:
        """Facts under their full names, without those that are specific to a rank."""
        return Facts({name + self.of: text for name, text in found.items() if text is not None})

    def _numbers(self) -> dict[str, str]:
        """Numbers by index, formatted for an error message."""
        optimizer = self.optimizer
        found: dict[str, str] = {}
        for name in optimizer.by_index:
            table = getattr(optimizer, name)
            found |= {f"{name} of {_label(i, optimizer)}": str(table[i]) for i in table}
        return found | {
            name + self.of: str(getattr(optimizer, name)) for name in optimizer.in_arrays
        }

    def rates(self, indices: Sequence[Index]) -> Facts:
        """Learning rates and weight decays that the next ``update()`` in NumPy will use."""
        optimizer, found = self.optimizer, Facts()
        before = optimizer.snapshot()
        try:
            for index in indices:
                optimizer._update_count(index)
                parameter = _label(index, optimizer)
                found[f"learning rate of {parameter}"] = str(float(optimizer._get_lr(index)))
                found[f"weight decay of {parameter}"] = str(float(optimizer._get_wd(index)))
        finally:
            optimizer.put_back(before)
        return found


def fingerprints(main: Optimizer, groups: Groups | None) -> list[Fingerprint]:
    """Fingerprints of the optimizers of an updater and its groups."""
    labels = {id(group.optimizer): group.label for group in (groups.groups if groups else ())}
    others = groups.optimizers() if groups else ()
    own = [Fingerprint(other, f" of {labels[id(other)]}") for other in others]
    return [Fingerprint(main), *own]


def _label(index: Index, optimizer: Optimizer) -> str:
    return label(index, optimizer.idx2name)


def _is_plain(value: Any) -> bool:
    """Whether a value cannot change without being assigned."""
    return value is None or isinstance(value, (bool, int, float, str, bytes, np.generic))


def _may_change(value: Any) -> bool:
    return not (_is_plain(value) or isinstance(value, (Tracked, PerIndex)))


def described(value: Any, depth: int = DEPTH) -> str | None:
    """Format a value such that equal values give equal strings; None for rank-specific values.

    Examples
    --------
    >>> import numpy as np
    >>> from fastopt.distributed.fingerprint import described
    >>> described({"steps": [1, 2], "rate": np.float32(0.5)})
    '{rate: 0.5, steps: [1, 2]}'
    """
    if isinstance(value, np.generic):
        return str(value.item())
    if _is_plain(value):
        return str(value)
    if isinstance(value, np.ndarray) and value.dtype.hasobject:
        return described(value.tolist(), depth)
    if isinstance(value, np.ndarray):
        return f"{value.dtype}{value.shape} {Numbers([value], dict).digest:x}"
    if isinstance(value, Optimizer):  # compared by its own fingerprint
        return type(value).__name__
    if isinstance(value, LRScheduler):
        return f"{type(value).__name__} {described(vars(value), depth - 1)}"
    if depth > 0 and isinstance(value, Mapping):
        if not value or any(map(_holds_array, value.values())):
            return None
        items = sorted((str(key), described(part, depth - 1)) for key, part in value.items())
        return "{" + ", ".join(f"{key}: {text}" for key, text in items) + "}"
    if depth > 0 and isinstance(value, Set):
        return "{" + ", ".join(sorted(str(described(part, depth - 1)) for part in value)) + "}"
    if depth > 0 and isinstance(value, (list, tuple)):
        return "[" + ", ".join(str(described(part, depth - 1)) for part in value) + "]"
    own = vars(value) if hasattr(value, "__dict__") and not _has_name(value) else {}
    plain = {name: part for name, part in own.items() if _is_plain(part)}
    name = getattr(value, "__qualname__", type(value).__name__)
    return f"{name} {described(plain)}" if plain else str(name)


def _has_name(value: Any) -> bool:
    """Whether a value is a function or class, which is described by its name."""
    return hasattr(value, "__qualname__")


def _holds_array(value: Any) -> bool:
    if isinstance(value, Mapping):
        return any(map(_holds_array, value.values()))
    if isinstance(value, (tuple, list)):
        return any(map(_holds_array, value))
    return isinstance(value, np.ndarray)
