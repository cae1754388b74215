"""Matching of saved parameters with an optimizer's parameters, by name or index."""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from fastopt.optimizer.optimizer import Index, Optimizer

Keys = Mapping[Index, Index]
"""Map from the key of a parameter to its index."""


class Skipped(NamedTuple):
    """Parameters left out by a load with ``strict=False``, as names, or indices without names.

    Parameters
    ----------
    missing : list of int or str
        Parameters of the updater that the checkpoint lacks; they start from scratch.
    extra : list of int or str
        Parameters of the checkpoint that the updater does not have.

    Examples
    --------
    >>> import numpy as np
    >>> from fastopt import optimizer
    >>> optimizers = [optimizer.Adam(param_idx2name={0: name}) for name in ("a_weight", "b_weight")]
    >>> old, new = map(optimizer.get_updater, optimizers)
    >>> old(0, np.ones(2), np.ones(2))
    >>> new.load_states_dict(old.states_dict(), strict=False)
    Skipped(missing=['b_weight'], extra=['a_weight'])
    """

    missing: list[Index]
    extra: list[Index]

    def __repr__(self) -> str:
        lists = f"missing={self.missing}, extra={self.extra}"
        return f"{type(self).__name__}({lists if any(self) else 'nothing'})"


def names_of(optimizer: Optimizer) -> dict[Index, str | None]:
    """Names of parameters by index, from ``idx2name`` or else from ``param_dict``."""
    names = {i: getattr(parameter, "name", None) for i, parameter in optimizer.param_dict.items()}
    return names | optimizer.idx2name


def keys_of(names: Mapping[Index, str | None], indices: Iterable[Index]) -> dict[Index, Index]:
    """Map the key of each parameter to its index: a unique name is the key, else the index is.

    The parameters are those in `names` and `indices`.
    """
    known = dict.fromkeys([*names, *indices])
    if not names:
        return dict(zip(known, known, strict=True))
    often = Counter(names.values())
    keys: dict[Index, Index] = {}
    for index in known:
        name = names.get(index)
        if isinstance(name, str) and often[name] == 1 and (name == index or name not in known):
            keys[name] = index
        else:
            keys[index] = index
    return keys


@dataclass(frozen=True)
class Matching:
    """Correspondence between saved parameters and the updater's parameters."""

    index: Keys
    """Current index by saved index."""

    saved: frozenset[Index]
    """Keys and indices of all saved parameters."""

    dropped: frozenset[Index]
    """Keys and indices of saved parameters that the updater does not have."""

    fresh: frozenset[Index]
    """Keys and indices of parameters of the updater that are not saved."""

    skipped: Skipped

    def table(self, table: Mapping[Any, Any]) -> dict[Any, Any]:
        """Map the keys of a table to the current indices, and remove dropped parameters."""
        return {self.index.get(k, k): v for k, v in table.items() if k not in self.dropped}

    def attribute(self, value: Any) -> Any:
        """Map an optimizer's attribute, if it is a dict whose keys are all saved parameters."""
        is_table = isinstance(value, Mapping) and self.saved.issuperset(value)
        return self.table(value) if is_table else value


def match(saved: Keys, present: Keys) -> Matching:
    """Match saved parameters with current ones by key, or by index if there is no such key.

    If current parameters have names, a saved parameter with a name is matched by name only; the
    path of a weight is a name too.
    """
    renamed = {index for key, index in present.items() if key != index}
    paths = {index for index in renamed if isinstance(index, str)}
    index_of = {index: present[key] for key, index in saved.items() if key in present}
    taken = set(index_of.values())
    extra: dict[Index, Index] = {}
    for key, index in saved.items():
        if index in index_of:
            continue
        if (renamed and key != index) or index in taken or index in paths:
            extra[key] = index
        else:
            index_of[index] = index
            taken.add(index)
    missing = {key: index for key, index in present.items() if index not in taken}
    return Matching(
        index=index_of,
        saved=_both(saved),
        dropped=_both(extra),
        fresh=_both(missing),
        skipped=Skipped(list(missing), list(extra)),
    )


def _both(keys: Keys) -> frozenset[Index]:
    return frozenset(keys) | frozenset(keys.values())
