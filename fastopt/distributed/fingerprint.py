"""Fingerprint of an optimizer, which ranks compare before each call, with digests of a user's code.

Reason: ranks that would update by other formulas raise an error before anything changes.

The code of fastopt itself is compared by its version.

Tests: ``tests/distributed/test_versions.py``.
"""

import hashlib
import inspect
import platform
import sysconfig
from collections.abc import Iterator, Mapping, Sequence, Set
from functools import cached_property, partial
from types import FunctionType
from typing import Any

import numpy as np

from fastopt._engine.per_index import PerIndex
from fastopt._engine.tracked import Tracked
from fastopt._engine.validate import label
from fastopt.distributed.agreement import Fact, Facts, Numbers
from fastopt.kernels.rule import Rule, code_of, frozen_text
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
        optimizer, values = self.optimizer, vars(self.optimizer)
        if self._version != optimizer.version:
            names = [name for name in values if name not in optimizer.transient]
            known = Tracked, PerIndex
            plain = [name for name in names if _is_plain(values[name])]
            self._loose = [n for n in names if n not in plain and not isinstance(values[n], known)]
            simple = {name: described(values[name]) for name in plain}
            fixed = {"optimizer": type(optimizer).__name__, **simple, **self._codes}
            self._fixed = self._named(fixed)
            self._version = optimizer.version
        if self._tables_version != optimizer.multipliers_version:
            names = [name for name in ("lr_mult", "wd_mult", "idx2name") if name in values]
            self._tables = self._named({name: described(values[name]) for name in names})
            self._tables_version = optimizer.multipliers_version
        loose = {name: described(values[name]) for name in self._loose}
        counted = [values[name] for name in optimizer.by_index if name in values]
        numbers = [table.array[: table.first + len(table)] for table in counted]
        kind = self._named({"optimizer": type(optimizer).__name__, **loose})
        return [kind, self._fixed, self._tables, Numbers(numbers, self._numbers)]

    def _named(self, texts: Mapping[str, str | None]) -> Facts:
        """Facts under their full names, without those that are specific to a rank."""
        return Facts({name + self.of: text for name, text in texts.items() if text is not None})

    def _numbers(self) -> dict[str, str]:
        """Numbers by index, formatted for an error message."""
        optimizer = self.optimizer
        numbers: dict[str, str] = {}
        for name in optimizer.by_index:
            table = getattr(optimizer, name)
            numbers |= {f"{name} of {_label(i, optimizer)}": str(table[i]) for i in table}
        return numbers | {
            name + self.of: str(getattr(optimizer, name)) for name in optimizer.in_arrays
        }

    def rates(self, indices: Sequence[Index]) -> Facts:
        """Learning rates and weight decays that the next ``update()`` in NumPy will use."""
        optimizer, rates = self.optimizer, Facts()
        before = optimizer.snapshot()
        try:
            for index in indices:
                optimizer._update_count(index)
                parameter = _label(index, optimizer)
                rates[f"learning rate of {parameter}"] = str(float(optimizer._get_lr(index)))
                rates[f"weight decay of {parameter}"] = str(float(optimizer._get_wd(index)))
        finally:
            optimizer.put_back(before)
        return rates


def fingerprints(main: Optimizer, groups: Groups | None) -> list[Fingerprint]:
    """Fingerprints of the optimizers of an updater and its groups."""
    labels = {id(group.optimizer): group.label for group in (groups.groups if groups else ())}
    others = groups.optimizers() if groups else ()
    of_groups = [Fingerprint(other, f" of {labels[id(other)]}") for other in others]
    return [Fingerprint(main), *of_groups]


def _label(index: Index, optimizer: Optimizer) -> str:
    return label(index, optimizer.idx2name)


def _is_plain(value: object) -> bool:
    """Whether a value cannot change without being assigned."""
    return value is None or isinstance(value, (bool, int, float, str, bytes, np.generic))


def described(value: object, depth: int = DEPTH) -> str | None:
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
        if not value or any(map(holds_array, value.values())):
            return None
        items = sorted((str(key), described(part, depth - 1)) for key, part in value.items())
        return "{" + ", ".join(f"{key}: {text}" for key, text in items) + "}"
    if depth > 0 and isinstance(value, Set):
        return "{" + ", ".join(sorted(str(described(part, depth - 1)) for part in value)) + "}"
    if depth > 0 and isinstance(value, (list, tuple)):
        return "[" + ", ".join(str(described(part, depth - 1)) for part in value) + "]"
    name = getattr(value, "__qualname__", None)
    if name is not None or not hasattr(value, "__dict__"):  # functions and classes have names
        return str(name or type(value).__name__)
    plain = {name: part for name, part in vars(value).items() if _is_plain(part)}
    return f"{type(value).__name__} {described(plain)}" if plain else type(value).__name__


def holds_array(value: object) -> bool:
    """Whether a value is an array, or contains one."""
    if isinstance(value, Mapping):
        return any(map(holds_array, value.values()))
    if isinstance(value, (tuple, list)):
        return any(map(holds_array, value))
    return isinstance(value, np.ndarray)


INSTALLED = tuple(sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib"))
"""Folders of packages, whose functions are not compared."""


def codes(optimizer: Optimizer) -> dict[str, str]:
    """Return digests of what a class outside of fastopt defines, and of its rule, by name.

    A digest is that of the bytecode, with the functions that it calls. It depends on no file, since
    classes may be sent to ranks on other machines, but on the version of Python.
    """
    members: dict[str, Any] = {}
    for kind in type(optimizer).__mro__:
        if not _is_ours(kind):
            members |= {f"{kind.__name__}.{name}": value for name, value in vars(kind).items()}
    rule = optimizer.rule
    if rule is not None and not _is_ours(rule.fn):
        members[f"rule {rule.name}"] = rule
    return {f"code of {name}": text for name, part in members.items() if (text := _digest(part))}


def _is_ours(value: type | FunctionType) -> bool:
    """Whether a class or function is one of fastopt, or the base of all classes."""
    module = value.__module__ or ""
    return value is object or module.partition(".")[0] == "fastopt"


def _functions(value: object) -> Iterator[FunctionType]:
    """Yield the functions of an attribute of a class, or of a global variable."""
    if isinstance(value, Rule):
        parts: Any = value.functions
    elif isinstance(value, property):
        parts = value.fget, value.fset
    else:
        value = value.func if isinstance(value, (cached_property, partial)) else value
        value = inspect.unwrap(value) if callable(value) else value
        parts = (getattr(value, "py_func", getattr(value, "__func__", value)),)
    for part in parts:
        if isinstance(part, FunctionType):
            yield part


def _digest(value: object) -> str:
    """Return the digest of an attribute; empty if it is no function."""
    seen, is_rule = set[FunctionType](), isinstance(value, Rule)
    text = [part for function in _functions(value) for part in _codes(function, seen, is_rule)]
    if not text:
        return ""
    digest = hashlib.blake2b("\0".join(text).encode(errors="replace"), digest_size=6).hexdigest()
    return f"{digest} (Python {'.'.join(platform.python_version_tuple()[:2])})"


def _codes(fn: FunctionType, seen: set[FunctionType], is_rule: bool) -> Iterator[str]:
    """Yield the code of a function, and of those that it refers to.

    Only a rule has the numbers that it refers to compiled in: others may be a rank's own.
    """
    if fn in seen:
        return
    seen.add(fn)
    yield repr(code_of(fn.__code__)) + "".join(map(frozen_text, fn.__defaults__ or ()))
    try:
        names = inspect.getclosurevars(fn)
    except ValueError:  # a variable has no value yet
        return
    for name, value in sorted({**names.globals, **names.nonlocals}.items()):
        if is_rule:
            yield f"{name}={frozen_text(value)}"
        for callee in _functions(value):
            package = (callee.__module__ or "").partition(".")[0]
            same = package == (fn.__module__ or "").partition(".")[0]
            if same or not (_is_ours(callee) or callee.__code__.co_filename.startswith(INSTALLED)):
                yield from _codes(callee, seen, is_rule)
