"""Groups of weights with hyper-parameters of their own: one optimizer for each group.

A group is found by a regular expression over the names of parameters. What it overrides makes it
a twin of the updater's optimizer, which shares counts, names and all that is not overridden.
"""

import inspect
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from operator import itemgetter
from types import MappingProxyType
from typing import Any
from weakref import WeakMethod

from fastopt.arguments import brief, flag, number
from fastopt.averages import Average
from fastopt.engine.joint import Joint
from fastopt.engine.per_index import Index, PerIndex
from fastopt.engine.planner import Call, Planner, disjoint
from fastopt.naming import Same, rename, unknown_arguments
from fastopt.notices import warn_user
from fastopt.optimizer.averaged import check_averaged, check_averaged_together
from fastopt.optimizer.optimizer import TRANSIENT, Optimizer, create

__all__ = ["Groups"]

MULTIPLIERS = ("lr_mult", "wd_mult")
ATTRIBUTES = {"learning_rate": "lr"}
"""Attributes of arguments that have another name."""

SHARED = ("rescale_grad", "begin_num_update", "param_idx2name", "param_dict", "sym")
"""Arguments of an optimizer that hold for all groups."""

FOLLOWED = (
    *("_index_update_count", "idx2name", "param_dict", "rescale_grad", "begin_num_update"),
    *("row_decay", "masters_given"),
)
"""Attributes that another optimizer has of the updater's."""


class Group:
    """Weights whose names match a pattern, and the optimizer that updates them.

    Parameters
    ----------
    pattern : str
        Regular expression.
    given : mapping
        What the user gave for it.
    main : Optimizer
        The optimizer of the updater.
    """

    def __init__(self, pattern: str, given: Mapping[str, Any], main: Any) -> None:
        self.pattern, self.label = pattern, f"groups[{pattern!r}]"
        if not isinstance(pattern, str):
            raise TypeError(f"groups must have regular expressions as keys, got {brief(pattern)}")
        try:
            self.search = re.compile(pattern).search
        except re.error as error:
            raise ValueError(f"{self.label} is not a regular expression: {error}") from None
        if not isinstance(given, Mapping):
            raise TypeError(f"{self.label} must be a dict of hyper-parameters, got {brief(given)}")
        rest = self._completed(given)
        self.given: Mapping[str, Any] = MappingProxyType(dict(rest))
        self.frozen = flag(f"{self.label}: frozen", rest.pop("frozen", False))
        if self.frozen and rest:
            raise ValueError(f"{self.label} is frozen and cannot have {', '.join(rest)} too")
        self.multipliers = {
            name: number(f"{self.label}: {name}", rest.pop(name))
            for name in MULTIPLIERS
            if name in rest
        }
        self.own = {*self.multipliers}
        """Attributes that the group does not have of the updater's optimizer."""
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

    def _completed(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """What was given, with an optimizer in place of its name and a schedule as such."""
        rest = dict(given)
        try:
            if isinstance(rest.get("optimizer"), str):
                rest["optimizer"] = create(rest["optimizer"])
        except ValueError as error:
            raise ValueError(f"{self.label}: {error}") from None
        for name in ("lr", "learning_rate"):
            if callable(rest.get(name)):
                if "lr_scheduler" in rest:
                    raise TypeError(f"{self.label}: {name} is a schedule, and lr_scheduler another")
                rest["lr_scheduler"] = rest.pop(name)
        return rest

    def _twin(self, main: Any, overrides: dict[str, Any]) -> Any:
        """Optimizer of the same class with other hyper-parameters."""
        taken = _arguments(main)
        try:
            rename(type(main), overrides)
        except TypeError as error:
            raise TypeError(f"{self.label}: {error}") from None
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
        kind: Any = type(main)
        twin = kind.__new__(kind)
        twin._start()
        self.optimizer = twin
        twin.unchecked = False
        attributes = [ATTRIBUTES.get(name, name) for name in overrides]
        self.own |= {*attributes}
        self._copy(main)
        try:
            for name, value in overrides.items():
                setattr(twin, ATTRIBUTES.get(name, name), value)
            twin.check_together()
        except (TypeError, ValueError) as error:
            raise type(error)(f"{self.label}: {error}") from error
        self._check_rate()
        return twin

    def _copy(self, main: Any) -> bool:
        """Take the attributes of the updater's optimizer; whether one has changed."""
        own, found, changed = vars(self.optimizer), vars(main), False
        names = FOLLOWED if self.is_other else [name for name in found if name not in TRANSIENT]
        for name in names:
            if name in self.own or name in MULTIPLIERS:
                continue
            if name not in own or own[name] is not found[name]:
                changed |= name != "rescale_grad"
                if name == "rescale_grad" and name in own:
                    self.optimizer.rescale_grad = found[name]
                else:
                    own[name] = found[name]
        return changed

    def follow(self, main: Any, tables: bool) -> None:
        """Have what the updater's optimizer has now; `tables` if its multipliers have changed."""
        changed = self._copy(main)
        self._check_rate()
        if tables:
            for name in MULTIPLIERS:
                self._fill(name, getattr(main, name))
            self.optimizer._changed_tables()
        elif changed:
            self.optimizer._changed()

    def _fill(self, name: str, table: Mapping[Any, float]) -> None:
        """Set multipliers of the optimizer: those of the updater's, or its own, and the group's."""
        own = dict(getattr(self.optimizer, name) if self.is_other else table)
        if name in self.multipliers:
            own |= dict.fromkeys(self.indices, self.multipliers[name])
        setattr(self.optimizer, name, own)

    def _check_rate(self) -> None:
        if "lr" in self.own and self.optimizer.lr_scheduler is not None:
            raise ValueError(
                f"{self.label}: learning_rate has no effect beside an lr_scheduler; use lr_mult, "
                "or an lr_scheduler of the group, which may be None"
            )


class Groups:
    """The groups of an updater; each index belongs to the first whose pattern matches its name.

    Parameters
    ----------
    groups : mapping of str to mapping
        What the user gave.
    planner : Planner
        The planner of the updater.

    Raises
    ------
    TypeError, ValueError
        A pattern, a hyper-parameter or its value is not what it must be; the message names it.
    """

    def __init__(self, groups: Mapping[str, Any], planner: Planner) -> None:
        if not isinstance(groups, Mapping):
            raise TypeError(
                "groups must map patterns to hyper-parameters, such as "
                f'{{"bias$": {{"wd_mult": 0.0}}}}, got {brief(groups)}'
            )
        self.main, self.planner = planner.optimizer, planner
        _check_optimizer("groups", self.main)
        self.groups = [Group(pattern, given, self.main) for pattern, given in groups.items()]
        self.given = MappingProxyType({group.pattern: group.given for group in self.groups})
        self.freezes = any(group.frozen for group in self.groups)
        self.unchecked = True
        self._planners: dict[int, Planner] = {}
        self._routes: dict[Index, Group | None] = {}
        self._selectors: dict[tuple[Index, ...], Any] = {}
        self._watched: dict[str, PerIndex] = {}
        self._names: dict[Any, str] = {}
        self._generation = 0
        self._version = self._tables_version = -1
        for group in self.groups:
            if group.follows:
                made = self._planners.setdefault(id(group.optimizer), Planner(group.optimizer))
                made.copies, made.offsets = planner.copies, planner.offsets

    # Routes

    def route(self, index: Index) -> Group | None:
        """The group of a parameter; None if no pattern matches."""
        if index in self._routes:
            return self._routes[index]
        name = self.main.idx2name.get(index, str(index))
        group = next((group for group in self.groups if group.search(name)), None)
        self._routes[index] = group
        if group is not None and group.multipliers:
            group.indices.add(index)
            self._version = self._tables_version = -1
        return group

    def planner_of(self, index: Index) -> Planner:
        """The planner with the optimizer of a parameter, which follows that of the updater."""
        self.sync()
        group = self.route(index)
        if group is None or not group.follows:
            return self.planner
        return self._planners[id(group.optimizer)]

    def note(self, indices: Sequence[Index]) -> None:
        """Know parameters that have no gradient, so that no pattern of theirs is warned of."""
        if self.unchecked:
            for index in indices:
                self.route(index)

    def optimizer_of(self, index: Index) -> Optimizer:
        """The optimizer of a parameter as it is."""
        group = self.route(index)
        found: Optimizer = self.main if group is None else group.optimizer
        return found

    def select(self, indices: Sequence[Index]) -> Callable[[Sequence[Any]], list[Any]] | None:
        """Function that leaves frozen parameters out of a list; None if there are none."""
        self.sync()
        key = tuple(indices)
        if key not in self._selectors:
            groups = [self.route(index) for index in indices]
            places = [k for k, group in enumerate(groups) if group is None or not group.frozen]
            if len(self._selectors) > 256:
                self._selectors.clear()
            self._selectors[key] = None if len(places) == len(key) else _taking(places)
        found: Callable[[Sequence[Any]], list[Any]] | None = self._selectors[key]
        return found

    def is_frozen(self, index: Index) -> bool:
        """Whether a parameter is left alone."""
        if not self.freezes:
            return False
        self.sync()
        group = self.route(index)
        return group is not None and group.frozen

    def check_average(self, average: Average) -> None:
        """Raise TypeError unless an average can be kept of the weights of all groups."""
        for group in self.groups:
            if group.is_other:
                check_averaged(group.optimizer, average, f"{group.label}: ")
                check_averaged_together(self.main, group.optimizer, group.label)

    def warn_of_unused(self, indices: Sequence[Index]) -> None:
        """Warn, once, of patterns that no known parameter matches, nor one of `indices`."""
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
        """Let the optimizers of groups follow that of the updater."""
        main = self.main
        if self._version == main.version:
            return
        for name in main.by_index:
            numbers = vars(main)[name]
            if self._watched.get(name) is not numbers:
                self._watched[name] = numbers
                numbers.changed = _chain(numbers.changed, WeakMethod(self._changed))
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
        """Number that changes when parameters may belong to other groups than before."""
        self.sync()
        return self._generation

    def _changed(self) -> None:
        """Give the plans of all groups a new version, since counts have moved."""
        for group in self.groups:
            if group.follows:
                group.optimizer._changed()

    # Plans

    @property
    def folds(self) -> bool:
        """Whether a factor of all gradients may be put into `rescale_grad` of all optimizers."""
        optimizers = [planner.optimizer for planner in self._planners.values()]
        return all(optimizer.folds for optimizer in (self.main, *optimizers))

    @property
    def evaluates(self) -> bool:
        """Whether an optimizer of a group has weights to evaluate."""
        return any(planner.optimizer.evaluates for planner in self._planners.values())

    def prepare(
        self, calls: Sequence[Call], single: bool, masters: bool, key: Any, averaging: Any
    ) -> "Joint | None":
        """The plan of a call with parameters of groups; None if they are all the main's."""
        for planner in self._planners.values():
            planner.measures = self.planner.measures
            vars(planner.optimizer)["unchecked"] = False  # no names of its multipliers are unknown
        planners = [self.planner_of(index) for index, *_ in calls]
        self.sync()  # what new indices have changed
        if all(planner is self.planner for planner in planners):
            return None
        places: dict[int, list[int]] = {}
        for k, planner in enumerate(planners):
            places.setdefault(id(planner), []).append(k)
        by_id = {id(planner): planner for planner in planners}
        shared = [(by_id[of], own) for of, own in places.items()]
        optimizers = [planner.optimizer for planner in by_id.values()]

        def planned(parts: Iterable[tuple[Planner, list[int]]]) -> list[tuple[Any, list[int]]]:
            if averaging is not None:
                averaging.whole.clear()
            return [
                (planner.plan_of([calls[k] for k in own], single, masters, averaging), own)
                for planner, own in parts
            ]

        parts = planned(shared)
        joint = Joint(self, calls, single, parts, key, averaging)
        ordered = any(optimizer.in_list_order for optimizer in optimizers)
        if len(parts) > 1:
            tables = [table for plan, _ in parts for table in plan.tables]
            if ordered or joint.is_uneven() or not disjoint(tables):
                each = [(planner, [k]) for k, planner in enumerate(planners)]
                joint = Joint(self, calls, single, planned(each), key, averaging, in_order=True)
        return joint


def _chain(before: Callable[[], None], method: Any) -> Callable[[], None]:
    """Function that calls another one, and a method as long as its object lives."""

    def changed() -> None:
        before()
        alive = method()
        if alive is not None:
            alive()

    return changed


def _taking(places: Sequence[int]) -> Callable[[Sequence[Any]], list[Any]]:
    """Function that returns the items of a list at `places`."""
    if len(places) < 2:
        return lambda values: [values[k] for k in places]
    get = itemgetter(*places)
    return lambda values: list(get(values))


def _arguments(optimizer: Any) -> list[str]:
    """Arguments of an optimizer's class that it keeps as attributes."""
    names = dict.fromkeys(
        name
        for klass in type(optimizer).__mro__
        if klass is not object and "__init__" in vars(klass)
        for name in inspect.signature(vars(klass)["__init__"]).parameters
    )
    return [
        name
        for name in [*names, *(own for own in optimizer._arguments if own not in names)]
        if name not in SHARED and ATTRIBUTES.get(name, name) in vars(optimizer)
    ]


def _check_optimizer(label: str, optimizer: Any) -> None:
    """Raise TypeError unless an optimizer's updates can be prepared together with others."""
    if not isinstance(optimizer, Optimizer):
        raise TypeError(f"{label}: optimizer must be an Optimizer, got {brief(optimizer)}")
    kind = type(optimizer).__name__
    if not optimizer.native:
        raise TypeError(
            f"{label}: {kind} overrides update(), and groups need optimizers with a rule: use an "
            f"updater of its own for the weights of {kind}"
        )
    if optimizer.accumulates:
        raise TypeError(
            f"{label}: {kind} accumulates gradients, which groups do not: use an updater of its "
            f"own for the weights of {kind}"
        )
