"""Attributes of optimizers: checked, followed by versions, copied and restored."""

import itertools
import threading
from collections.abc import Mapping
from typing import Any, ClassVar, Self, cast
from weakref import WeakSet, ref

import numpy as np

from fastopt._engine.per_index import Counts, Index, PerIndex
from fastopt._engine.tracked import Tracked, weakly
from fastopt._kernels.device_memory import host
from fastopt._kernels.threads import start_locks
from fastopt.arguments import Checked

Array = np.ndarray[Any, Any]

Snapshot = dict[str, tuple[Any, dict[Any, Any] | None]]
"""Attributes of an optimizer, and the items of those that are mappings."""

TABLES = ("lr_mult", "wd_mult", "idx2name", "param_dict")
"""Attributes that determine the multipliers."""

MULTIPLIERS = ("lr_mult", "wd_mult")

CHANGED = ("version", "mode_version")

CHANGED_TABLES = (*CHANGED, "multipliers_version")
"""Versions that change with an attribute, and with one of TABLES."""

VALUES = ("rescale_grad", "lr", "learning_rate")
"""Attributes that trainers assign in every step, and on which no kernel depends."""

TRANSIENT = frozenset(
    {"lock", "direct", "unchecked", "version", "mode_version", "multipliers_version", "_warned"}
    | {"updating", "stepping", "work", "whole_shapes", "followers", "overridden"}
    | {"claim", "inherits", "siblings", "divided"}
)
"""Attributes that belong to the current process and are not saved or copied."""

_versions = itertools.count()
"""Version numbers, unique among all optimizers of the process."""


def _is_table(factory: Any) -> bool:
    return isinstance(factory, type) and issubclass(factory, PerIndex)


class Attributes(Checked):
    """Abstract base of :class:`Optimizer`: what holds for any attribute, whatever it means.

    Every assignment sets a new version, from which records know that they are old.
    """

    _plain: ClassVar[bool] = True
    """Whether all arguments are stored as attributes, without properties or own ``__setattr__``."""

    _followed: ClassVar[frozenset[str]] = frozenset()
    """Attributes whose assignment does more than to check the value."""

    by_index: ClassVar[dict[str, type[PerIndex]]] = {"_index_update_count": Counts}
    """Attributes that store a number for each index."""

    in_arrays: ClassVar[tuple[str, ...]] = ("num_update",)
    """Properties whose values are stored in the arrays of `by_index` attributes."""

    unlisted = Checked.unlisted | {
        *("add_follower", "by_index", "call_lock", "checked", "claim", "claimed", "constructed"),
        *("described", "divided", "followers", "forget_updates", "in_arrays"),
        *("inherits", "keep_updates", "lock"),
        *("mode_version", "multipliers_version", "overridden", "put_back", "restore"),
        *("restore_from", "siblings", "snapshot", "stepping", "updating", "version"),
    }
    lock: Any
    """Lock of updates without an updater, see :attr:`call_lock`."""
    updating: Any
    """Lock that is held during the updates of updaters; the thread that holds `lock` tests it."""
    stepping: Any
    """Lock like `updating`, held during updates without an updater, which may be inside of one."""
    version: int
    """Number that changes whenever an attribute or a multiplier changes."""
    mode_version: int
    """Like `version`, but not changed by VALUES, which do not affect the kernels."""
    multipliers_version: int
    """Like `version`, but changed only by multipliers."""
    followers: "WeakSet[Attributes] | None"
    """Optimizers whose versions change with those of this one, the optimizer of a group."""
    claim: "ref[Any] | None"
    """The updater that has the optimizer, see :meth:`claimed`."""
    inherits: bool
    """Whether counts of another updater are here, for parameters whose states may be set."""
    siblings: "WeakSet[Attributes] | None"
    """The optimizers of several updaters that were given the same one: all have its settings."""
    divided: tuple[float, float]
    """``rescale_grad`` before and after a trainer has divided it by its batch size."""
    overridden: frozenset[str] | None
    """Attributes that a group overrides in a twin of its updater's optimizer; None for others."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        tables = {name: kind for name, kind in cls._factories.items() if _is_table(kind)}
        cls.by_index = {**cls.by_index, **tables}
        cls._followed = frozenset({*TABLES, *cls.by_index, *cls.aliases})

    def _assign(self, argument: str, value: Any) -> None:
        """Validate and set the attribute of an argument in a constructor, without a version."""
        declared = self.declared.get(argument)
        name = argument if declared is None else declared.stored or argument
        if self._plain:
            described = self._arguments.get(name)
            self.__dict__[name] = value if described is None else described(argument, value)
        else:
            setattr(self, name, value)

    def _start(self) -> None:
        """Initialize the attributes of the current process."""
        start_locks(self)
        vars(self).update(followers=None, overridden=None)
        vars(self).update(claim=None, inherits=False, siblings=None, divided=(1.0, 1.0))

    def _start_locks(self) -> None:
        locks = {
            "lock": threading.RLock(),
            "updating": threading.Lock(),
            "stepping": threading.Lock(),
        }
        vars(self).update(locks)

    @classmethod
    def constructed(cls, instance: Any) -> None:
        """Set versions for the first time, once all attributes are set."""
        if "lock" in vars(instance):
            instance._changed_tables()

    def __setattr__(self, name: str, value: Any) -> None:
        own = self.__dict__
        if "version" not in own:  # it is being made, and constructed() sets versions
            if name in self._followed:
                value = self._stored(name, value)
            described = self._arguments.get(name)
            object.__setattr__(self, name, value if described is None else described(name, value))
            return
        if name in self._followed:
            value = self._stored(name, value)
        before = own.get(name)
        try:
            super().__setattr__(name, value)
            if name in own and name in self._arguments and name not in VALUES:
                self._check_assigned(name, before)
            self._share(name)
        finally:  # even if Ctrl-C interrupts the assignment
            if name not in VALUES:
                self._set_versions(*(CHANGED_TABLES if name in TABLES else CHANGED))
            elif before != own.get(name):  # trainers assign them in every step
                self._set_versions("version")

    def _check_assigned(self, name: str, before: Any) -> None:
        """Set an attribute back to `before` if it contradicts the others."""
        try:
            self.check_together()
        except BaseException:
            self.__dict__[name] = before
            raise

    def _stored(self, name: str, value: Any) -> Any:
        """Return the mapping that stores a value; raise for an alias of other attributes."""
        if name in TABLES:
            return self._table(value)
        if name in self.by_index:
            return self._by_index(name, value)
        own, names = vars(self), type(self).aliases[name]
        if name not in own and own.keys() >= {*names}:
            kind = f"{type(self).__name__!r} object has no attribute {name!r}"
            raise AttributeError(f"{kind} to set; set {' and '.join(names)}")
        return value

    def _table(self, items: Mapping[Any, Any]) -> Tracked:
        return Tracked(items, weakly(self._edited_tables))

    def _by_index(self, name: str, values: Mapping[Index, Any]) -> PerIndex:
        """Return a new PerIndex of `values`; numbers that belong to no index are kept."""
        numbers, before = self.by_index[name](values), vars(self).get(name)
        if before is not None:
            numbers.array[: numbers.first] = before.array[: numbers.first]
        numbers.add_owner(self)
        return numbers

    def __delattr__(self, name: str) -> None:
        super().__delattr__(name)
        self._changed()

    def _changed(self) -> None:
        """Set a new version, which records follow."""
        self._set_versions(*CHANGED)

    def _changed_tables(self) -> None:
        self._set_versions(*CHANGED_TABLES)

    def _edited_tables(self) -> None:
        """Follow a change inside of one of TABLES."""
        for name in MULTIPLIERS:
            self._share(name)
        self._changed_tables()

    def _set_versions(self, *names: str) -> None:
        own, number = vars(self), next(_versions)
        for name in names:
            own[name] = number
        followers = own.get("followers")
        if followers is not None:
            for follower in followers:
                follower._set_versions(*names)

    def add_follower(self, follower: "Attributes") -> None:
        """Change the versions of `follower` with those of this optimizer."""
        if self.followers is None:
            vars(self)["followers"] = WeakSet()
        cast("WeakSet[Attributes]", self.followers).add(follower)

    # Updaters

    @property
    def call_lock(self) -> Any:
        """Lock that is held during updates: that of the updater that has the optimizer, if any."""
        owner = None if self.claim is None else self.claim()
        return self.lock if owner is None else owner.lock

    def _share(self, name: str) -> None:
        """Set an attribute of the siblings to the value here, if it is a setting."""
        own = self.__dict__
        siblings = own.get("siblings")
        if siblings is None or name not in own or not self._is_setting(name):
            return
        for other in list(siblings):
            if other is not self:
                vars(other)[name] = other._table(own[name]) if name in TABLES else own[name]
                other._set_versions(*(CHANGED_TABLES if name in TABLES else CHANGED))

    def _is_setting(self, name: str) -> bool:
        """Whether an attribute is an argument of the constructor, and not about parameters."""
        named = name in self._arguments or name in type(self).__signature__.parameters
        return name in MULTIPLIERS or (named and name not in TABLES)

    # Copies

    def snapshot(self) -> Snapshot:
        """Return attributes and copies of mappings for :meth:`put_back`; arrays are not copied."""
        return {
            name: (value, dict(value) if isinstance(value, Mapping) else None)
            for name, value in vars(self).items()
            if name not in TRANSIENT
        } | {name: (getattr(self, name), None) for name in self.in_arrays}

    def put_back(self, saved: Snapshot) -> None:
        """Restore a snapshot; mappings are changed in place, since other objects may hold them."""
        for name, (value, content) in saved.items():
            if content is not None:
                value.clear()
                value.update(content)
            if name not in self.in_arrays:
                vars(self)[name] = value
        for name in self.in_arrays:
            setattr(self, name, saved[name][0])
        self._changed_tables()

    def __getstate__(self) -> dict[str, Any]:
        """All attributes except param_dict, which holds live parameters, and TRANSIENT ones.

        Arrays on a device are copied to the host.
        """
        kept = {k: v for k, v in vars(self).items() if k not in TRANSIENT and k != "param_dict"}
        plain = {
            name: dict(value) if isinstance(value, (PerIndex, Tracked)) else host(value)
            for name, value in kept.items()
        }
        return plain | {name: getattr(self, name) for name in self.in_arrays}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._start()
        self.restore({**state, "param_dict": {}})

    def restore(self, attributes: Mapping[str, Any]) -> None:
        """Set attributes without validation, such as those of a validated checkpoint."""
        own = vars(self)
        for name, value in attributes.items():
            if name in TABLES:
                own[name] = self._table(value)
            elif name in self.by_index:
                own[name] = self.by_index[name](value)
                own[name].add_owner(self)
            elif name not in self.in_arrays:
                own[name] = value
        for name in self.in_arrays:
            if name in attributes:
                setattr(self, name, attributes[name])
        self._changed_tables()

    def restore_from(self, other: Self) -> None:
        """Restore the attributes of another optimizer of the same class.

        Attributes that are never saved belong to this process or the user, and are kept.
        """
        kept = vars(self).keys() - self.__getstate__().keys()
        self.restore({k: v for k, v in other.__getstate__().items() if k not in kept})
