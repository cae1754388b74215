"""Groups of weights with their own hyper-parameters, each updated by its own optimizer.

A parameter is assigned to a group by a regular expression on its name. The optimizer of a group
with overridden hyper-parameters is a twin of the updater's optimizer: it shares the update counts,
the names and everything that is not overridden.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from itertools import compress
from typing import Any, NoReturn

from fastopt._engine.per_index import Index
from fastopt._engine.validate import naming
from fastopt._notices import warn_user
from fastopt.arguments import Same, brief, flag, number, regex, rename, unknown_arguments
from fastopt.averages import Average
from fastopt.optimizer.optimizer import FOLLOWED, MULTIPLIERS, Optimizer, attribute_of, create

SHARED = ("rescale_grad", "begin_num_update", "param_idx2name", "param_dict", "sym")
"""Arguments that are common to all groups and cannot be overridden."""


Selector = Callable[[Sequence[Any]], list[Any]]
"""Function that removes frozen parameters from a list."""


class ReadOnly(dict[str, Any]):
    """Settings of groups, which change only together."""

    def _refuse(self, *args: object, **kwargs: object) -> NoReturn:
        raise TypeError(
            "groups are read-only, and the first pattern that matches wins; assign "
            "updater.groups = {pattern: {...}, **updater.groups}, or, for a pattern that exists, "
            "{**updater.groups, pattern: {...}}"
        )

    __setitem__ = __delitem__ = __ior__ = update = setdefault = _refuse
    pop = popitem = clear = _refuse

    def __reduce__(self) -> tuple[Any, ...]:
        return dict, (dict(self),)


class Group:
    """Weights whose names match a pattern, and the optimizer that updates them.

    Parameters
    ----------
    pattern : str
        Regular expression.
    given : mapping
        The user's settings for the group.
    main : Optimizer
        The optimizer of the updater.
    """

    def __init__(self, pattern: str, arguments: Mapping[str, Any], main: Optimizer) -> None:
        self.pattern, self.label = pattern, f"groups[{pattern!r}]"
        if not isinstance(pattern, str):
            raise TypeError(f"groups must have regular expressions as keys, got {brief(pattern)}")
        self.search = re.compile(regex(self.label, pattern)).search
        if not isinstance(arguments, Mapping):
            raise TypeError(
                f"{self.label} must be a dict of hyper-parameters, got {brief(arguments)}"
            )
        rest = self._completed(arguments, main)
        self.given: Mapping[str, Any] = ReadOnly(rest)
        self.frozen = flag(f"{self.label}: frozen", rest.pop("frozen", False))
        if self.frozen and rest:
            raise ValueError(f"{self.label} is frozen and cannot have {', '.join(rest)} too")
        self.multipliers = {
            name: number(f"{self.label}: {name}", rest.pop(name))
            for name in MULTIPLIERS
            if name in rest
        }
        self.own = {*self.multipliers}
        """Attributes that the group does not take from the updater's optimizer."""
        self.indices: set[Index] = set()
        self.is_other = "optimizer" in rest
        if self.is_other:
            self.optimizer = rest.pop("optimizer")
            _check_optimizer(self.label, self.optimizer)
            if rest:
                raise ValueError(
                    f"{self.label} has an optimizer: pass {', '.join(rest)} to that one"
                )
        elif self.frozen or not (rest or self.multipliers):
            self.optimizer = main
        else:
            self.optimizer = self._twin(main, rest)
        self.follows = self.optimizer is not main

    def _completed(self, arguments: Mapping[str, Any], main: Optimizer) -> dict[str, Any]:
        """Return the settings, with the updater's optimizer for a name or one that others have too.

        A schedule becomes `lr_scheduler`.
        """
        rest = dict(arguments)
        with naming(self.label):
            if isinstance(rest.get("optimizer"), str):
                rest["optimizer"] = create(rest["optimizer"])
            if isinstance(rest.get("optimizer"), Optimizer) and main.claim is not None:
                rest["optimizer"] = rest["optimizer"].claimed(main.claim())
        for name in ("lr", "learning_rate"):
            if callable(rest.get(name)):
                if "lr_scheduler" in rest:
                    raise TypeError(f"{self.label}: {name} is a schedule, and lr_scheduler another")
                rest["lr_scheduler"] = rest.pop(name)
        return rest

    def _twin(self, main: Optimizer, overrides: dict[str, Any]) -> Any:
        """Return an optimizer of the same class with overridden hyper-parameters."""
        taken = _arguments(main)
        with naming(self.label):
            rename(type(main), overrides)
        for name in overrides:
            if name in (*SHARED, *main.same_in_groups):
                raise TypeError(f"{self.label}: {name} is the same in all groups")
        if unknown := [str(name) for name in overrides if name not in taken]:
            others = [
                name
                for name, parameter in type(main).__signature__.parameters.items()
                if isinstance(parameter.default, Same)
            ]
            known = [*dict.fromkeys([*taken, *others, *MULTIPLIERS, "frozen", "optimizer"])]
            caller = f"a group of {type(main).__name__}"
            raise TypeError(
                f"{self.label}: {unknown_arguments(type(main), unknown, caller, known)}"
            )
        if overrides.get("sparse_decay", "touched") != "touched":
            overrides.setdefault("lazy_update", True)  # as in a constructor
        kind: Any = type(main)
        twin = kind.__new__(kind)
        twin._start()
        self.optimizer = twin
        twin.unchecked = False
        attributes = [attribute_of(type(main), name) for name in overrides]
        self.own |= {*attributes}
        twin.overridden = frozenset(attributes)
        with naming(self.label):
            for name, value in overrides.items():  # as in a constructor, checked together below
                setattr(twin, attribute_of(type(main), name), value)
            twin._changed_tables()
            self._copy(main)
            twin.check_together()
        self._check_rate()
        return twin

    def _copy(self, main: Optimizer) -> bool:
        """Copy the shared attributes of the updater's optimizer; return whether one has changed."""
        fields, of_main, changed = vars(self.optimizer), vars(main), False
        names = FOLLOWED if self.is_other else [*of_main.keys() - main.transient]
        for name in names:
            if name in self.own or name in MULTIPLIERS:
                continue
            if name not in fields or fields[name] is not of_main[name]:
                changed |= name != "rescale_grad"
                if name == "rescale_grad" and name in fields:
                    self.optimizer.rescale_grad = of_main[name]
                else:
                    fields[name] = of_main[name]
        return changed

    def follow(self, main: Optimizer, tables: bool) -> None:
        """Synchronize with the updater's optimizer; `tables`: its multipliers have changed."""
        changed = self._copy(main)
        self._check_rate()
        if tables:
            for name in MULTIPLIERS:
                self._fill(name, getattr(main, name))
            self.optimizer._changed_tables()
        elif changed:
            self.optimizer._changed()

    def _fill(self, name: str, table: Mapping[Any, float]) -> None:
        """Set the multipliers of the optimizer, including those of the group."""
        filled = dict(getattr(self.optimizer, name) if self.is_other else table)
        if name in self.multipliers:
            filled |= dict.fromkeys(self.indices, self.multipliers[name])
        setattr(self.optimizer, name, filled)

    def _check_rate(self) -> None:
        if "lr" in self.own and self.optimizer.lr_scheduler is not None:
            raise ValueError(
                f"{self.label}: learning_rate has no effect with an lr_scheduler; set lr_mult, "
                "or the lr_scheduler of the group (None for no schedule)"
            )


class Groups:
    """The groups of an updater; an index belongs to the first group whose pattern matches it.

    Parameters
    ----------
    groups : mapping of str to mapping
        The user's settings, by pattern.
    main : Optimizer
        The optimizer of the updater.

    Raises
    ------
    TypeError, ValueError
        A pattern, the name of a hyper-parameter or its value is invalid; the message names it.
    """

    def __init__(self, groups: Mapping[str, Any], main: Optimizer) -> None:
        if not isinstance(groups, Mapping):
            raise TypeError(
                "groups must map patterns to hyper-parameters, such as "
                f'{{"bias$": {{"wd_mult": 0.0}}}}, got {brief(groups)}'
            )
        self.main = main
        _check_optimizer("groups", self.main)
        self.groups = [
            Group(pattern, arguments, self.main) for pattern, arguments in groups.items()
        ]
        self.given = ReadOnly({group.pattern: group.given for group in self.groups})
        self.freezes = any(group.frozen for group in self.groups)
        self.unchecked = True
        self._others: dict[Optimizer, None] = {}
        self._routes: dict[Index, Group | None] = {}
        self._selectors: dict[tuple[Index, ...], Selector | None] = {}
        self._names: dict[Any, str] = {}
        self._generation = 0
        self._version = self._tables_version = -1
        for group in self.groups:
            if group.follows:
                self._others[group.optimizer] = None
                group.optimizer.whole_shapes = self.main.whole_shapes
                group.optimizer.add_follower(self.main)

    # Routes

    def route(self, index: Index) -> Group | None:
        """Return the group of a parameter; None if no pattern matches."""
        if index in self._routes:
            return self._routes[index]
        name = self.main.idx2name.get(index, str(index))
        group = next((group for group in self.groups if group.search(name)), None)
        if group is not None and group.multipliers:
            self._version = self._tables_version = -1
            group.indices.add(index)
        self._routes[index] = group  # last, as an exception may come before
        return group

    def optimizers(self) -> list[Optimizer]:
        """Return the optimizers of the groups that have one of their own."""
        return list(self._others)

    def of(self, index: Index) -> Optimizer:
        """Return the optimizer of a parameter, synchronized with the updater's."""
        self.sync()
        return self.optimizer_of(index)

    def note(self, indices: Sequence[Index]) -> None:
        """Record parameters without a gradient, so that their patterns cause no warning."""
        if self.unchecked:
            for index in indices:
                self.route(index)

    def optimizer_of(self, index: Index) -> Optimizer:
        """Return the optimizer of a parameter, without synchronizing it."""
        group = self.route(index)
        return self.main if group is None else group.optimizer

    def select(self, indices: Sequence[Index]) -> Selector | None:
        """Return a function that removes frozen parameters from a list; None if none is frozen."""
        self.sync()
        key = tuple(indices)
        if key not in self._selectors:
            moving = [not self.is_frozen(index) for index in indices]
            if len(self._selectors) > 256:
                self._selectors.clear()
            self._selectors[key] = (
                None if all(moving) else lambda items: list(compress(items, moving))
            )
        return self._selectors[key]

    def is_frozen(self, index: Index) -> bool:
        """Whether a parameter is frozen."""
        if not self.freezes:
            return False
        self.sync()
        group = self.route(index)
        return group is not None and group.frozen

    def check_average(self, average: Average) -> None:
        """Raise TypeError unless the weights of all groups can be averaged."""
        for group in self.groups:
            if group.is_other:
                check_averaged(group.optimizer, average, f"{group.label}: ")
                self._check_averaged_together(group.optimizer, group.label)

    def _check_averaged_together(self, other: Optimizer, label: str) -> None:
        """Raise TypeError if only one of two optimizers has averages in its own state."""
        if self.main.evaluates != other.evaluates:
            first, rest = (self.main, other) if self.main.evaluates else (other, self.main)
            raise TypeError(
                f"{label}: average cannot be combined with groups of {type(first).__name__} and "
                f"{type(rest).__name__}, as the former averages in its own state: use two updaters"
            )

    def warn_of_unused(self, indices: Sequence[Index]) -> None:
        """Warn once about patterns that match no known parameter and none in `indices`."""
        if not self.unchecked:
            return
        self.unchecked = False
        known = {*self.main.idx2name, *self._routes, *self.main._index_update_count, *indices}
        used = {id(self.route(index)) for index in known}
        names = [self.main.idx2name.get(index, str(index)) for index in known]
        for group in self.groups:
            if id(group) in used:
                continue
            if any(map(group.search, names)):
                warn_user(f"{group.label} has no effect: patterns before it match the same names")
            else:
                warn_user(f"{group.label} has no effect: no parameter has a name that it matches")

    # The updater's optimizer

    def sync(self) -> None:
        """Synchronize the optimizers of the groups with the updater's optimizer."""
        main = self.main
        if self._version == main.version:
            return
        for name in main.by_index:
            vars(main)[name].add_owner(self)
        tables = self._tables_version != main.multipliers_version
        if self._names != main.idx2name:
            self._names = dict(main.idx2name)
            self._generation += 1
            self._routes.clear()
            self._selectors.clear()
            for group in self.groups:
                group.indices.clear()
        for group in self.groups:
            if group.follows:
                group.follow(main, tables)
        self._tables_version, self._version = main.multipliers_version, main.version

    def generation(self) -> int:
        """Return a number that changes whenever parameters may have moved between groups."""
        self.sync()
        return self._generation

    def _changed(self) -> None:
        """Invalidate the records of all groups, since the array of counts has moved."""
        for group in self.groups:
            if group.follows:
                group.optimizer._changed()

    @property
    def folds(self) -> bool:
        """Whether all optimizers can fold a common gradient factor into `rescale_grad`."""
        return all(optimizer.folds for optimizer in (self.main, *self.optimizers()))

    @property
    def evaluates(self) -> bool:
        """Whether an optimizer of a group evaluates with other weights than it updates."""
        return any(optimizer.evaluates for optimizer in self.optimizers())


def _arguments(optimizer: Optimizer) -> list[str]:
    """Return the arguments of an optimizer's class that are stored as attributes."""
    kind, fields = type(optimizer), vars(optimizer)
    names = dict.fromkeys([*kind.__signature__.parameters, *kind.defaults, *kind._arguments])
    return [name for name in names if name not in SHARED and attribute_of(kind, name) in fields]


def _check_optimizer(label: str, optimizer: object) -> None:
    """Raise TypeError unless an optimizer can be used with groups."""
    if not isinstance(optimizer, Optimizer):
        raise TypeError(f"{label}: optimizer must be an Optimizer, got {brief(optimizer)}")
    kind = type(optimizer).__name__
    if optimizer.batches is not None:
        raise TypeError(
            f"{label}: {kind} accumulates gradients, which groups do not support: use a separate "
            f"updater for the weights of {kind}"
        )


def check_averaged(optimizer: Optimizer, average: Average, context: str = "") -> None:
    """Raise TypeError unless an optimizer's weights can be averaged during its updates.

    Parameters
    ----------
    optimizer : Optimizer
        The optimizer.
    average : Average
        The averaging method.
    context : str
        Prefix of the error message.
    """
    name = type(optimizer).__name__
    if not optimizer.native:
        raise TypeError(
            f"{context}average is computed in the pass of a rule, and {name} overrides update(): "
            "average its weights in your own code"
        )
    if optimizer.batches is not None:
        raise TypeError(
            f"{context}{name} counts calls that update nothing, so its steps cannot be averaged; "
            "use Updater(optimizer, accumulate=n) with another optimizer"
        )
    if not average.constant and type(optimizer)._update_count is not Optimizer._update_count:
        raise TypeError(
            f"{context}{average} depends on the number of updates, and {name} counts them in its "
            "own way; EMA(decay) does not"
        )
