"""Learning rate and weight decay of optimizers, their multipliers, and counts of updates."""

import math
from collections.abc import Collection, Mapping, Sequence
from itertools import product
from math import inf
from typing import Any, ClassVar, dataclass_transform

import numpy as np

from fastopt._engine.per_index import Counts, Index
from fastopt._engine.validate import label
from fastopt._notices import warn_user
from fastopt.arguments import (
    Descriptions,
    Instance,
    Integer,
    Real,
    Stored,
    TableOf,
    alias,
    arg,
    as_float,
    brief,
    kept,
    number,
)
from fastopt.lr_scheduler.base import Schedule, rebased, restored
from fastopt.optimizer.attributes import Array, Attributes

__all__ = [
    *("RATE", "LazyAttribute", "Rate", "RateAttribute", "Rates", "ScheduledRateError"),
    *("check_parameters", "check_rate", "check_schedule", "endings", "largest_rate"),
]

Rate = float | Schedule | None
"""A learning rate or a schedule."""

RateAttribute = Stored[float, Rate]
LazyAttribute = Stored[bool, bool | None]

RATE = Real(least=0)

SMALLEST_RATE = float(np.finfo(np.float32).tiny)

RATES = ("lr", "learning_rate")
"""Names of the learning rate."""


def check_parameters(param_idx2name: Any, param_dict: Any, sym: Any) -> None:
    """Raise TypeError unless arguments that describe the parameters have the right types."""
    if param_idx2name is not None and not isinstance(param_idx2name, Mapping):
        raise TypeError(f"param_idx2name must map indices to names, got {param_idx2name!r}")
    for index, name in (param_idx2name or {}).items():
        if not isinstance(name, str):
            raise TypeError(f"param_idx2name[{index!r}] must be a name, got {name!r}")
    if param_dict is not None and not isinstance(param_dict, Mapping):
        raise TypeError(f"param_dict must map indices to parameters, got {brief(param_dict)}")
    if not (sym is None or (hasattr(sym, "attr_dict") and hasattr(sym, "list_arguments"))):
        raise TypeError(f"sym must have attr_dict() and list_arguments(), got {sym!r}")


def check_schedule(name: str, lr_scheduler: Any) -> Any:
    if lr_scheduler is None or (callable(lr_scheduler) and not isinstance(lr_scheduler, type)):
        return lr_scheduler
    got = brief(lr_scheduler)
    if isinstance(lr_scheduler, type):
        got = f"the class {lr_scheduler.__name__}: pass an instance"
    raise TypeError(f"{name} must be a function of the number of updates, got {got}")


def check_rate(name: str, lr: Any) -> float:
    """Return a learning rate; raise unless it is a finite number, at least 0."""
    if callable(lr):
        raise TypeError(f"{name} must be a number; assign a schedule to lr_scheduler")
    if isinstance(lr, (int, float)) and lr < 0:
        must = f"{name} must be a finite number, at least 0, got {lr}"
        raise ValueError(f"{must}; maximize=True ascends")
    return RATE(name, lr)


def largest_rate(name: str, value: Any) -> float:
    """Check the learning rate that others are divided by."""
    rate = number(name, value)
    if rate < SMALLEST_RATE:
        raise ValueError(
            f"{name} must be the largest learning rate, above 0, or None for uncorrected decay, "
            f"got {brief(value)}"
        )
    return rate


def _check_sym_info(name: str, value: Any) -> Any:
    """Check `sym_info`: an empty tuple, or the attributes and argument names of a symbol."""
    if isinstance(value, tuple) and len(value) in (0, 2):
        attributes, names = value or ({}, [])
        if isinstance(attributes, Mapping) and isinstance(names, (list, tuple)):
            for key in names:
                for multiplier in ("__lr_mult__", "__wd_mult__"):
                    number(f"{name}[{key!r}]", float(attributes.get(key, {}).get(multiplier, 1)))
            return value
    raise TypeError(f"{name} must be a pair of attributes and names, got {brief(value)}")


class ScheduledRateError(RuntimeError, UserWarning):
    """The learning rate of an optimizer with a schedule cannot be set.

    It is also a UserWarning, which is what MXNet raises.

    Examples
    --------
    >>> from fastopt import optimizer
    >>> made = optimizer.SGD(lr_scheduler=lambda n: 0.1)
    >>> try:
    ...     made.set_learning_rate(0.2)
    ... except optimizer.ScheduledRateError:
    ...     print(made.learning_rate)
    0.1
    """


def endings(*words: str) -> tuple[str, ...]:
    """Return the suffixes of names whose last part, after ``_``, ``.`` or ``/``, is in `words`."""
    return tuple(map("".join, product("_./", words)))


def _multipliers(name: str, given: Mapping[Index, float]) -> dict[Index, float]:
    if not isinstance(given, Mapping):
        raise TypeError(f"{name} must be a dict of multipliers, got {brief(given)}")
    return {key: number(f"{name}[{key!r}]", value) for key, value in given.items()}


@dataclass_transform(eq_default=False, field_specifiers=(arg, kept, alias))
class Rates(Attributes):
    """Abstract base of :class:`Optimizer`: the rates of each parameter at each of its updates."""

    decoupled: ClassVar[bool] = False
    """Whether weight decay only multiplies the weight by a factor, see :meth:`decay`."""

    rates_before_count: ClassVar[bool] = False
    """Whether the schedule is evaluated before the update is counted."""

    _plain_rate: ClassVar[bool] = True
    """Whether the class assigns learning rates like this one."""

    _decayed: ClassVar[tuple[str, ...]] = endings("weight", "gamma", "kernel")
    """Suffixes of the names that decay by default, see :meth:`set_wd_mult`."""

    progress: ClassVar[Descriptions] = {
        "num_update": Integer(least=0),
        "_index_update_count": TableOf(Integer(least=0)),
        "lr_mult": TableOf(Real()),
        "wd_mult": TableOf(Real()),
        "idx2name": TableOf(Instance(str, "a name")),
        "sym_info": _check_sym_info,
    }

    unlisted = Attributes.unlisted | {
        *("check_multipliers", "check_rates", "corrects_decay", "multiplier", "rates_at"),
        *("rates_before_count", "scheduled", "sym_info", "unchecked"),
    }
    lr: RateAttribute
    lr_scheduler: Schedule | None
    wd: float
    begin_num_update: int
    corrected_decay: float | None
    row_decay: dict[Index, tuple[Array, float]]
    masters_given: dict[Index, Array]
    direct: dict[bool, Any]
    """What updates without an updater, with states that have masters, and with others."""
    _warned: bool
    whole_shapes: dict[Index, tuple[int, ...]]
    """Shapes of the tensors whose weights are slices, such as the rows that one process has."""
    sym_info: tuple[Any, ...]
    _index_update_count: Counts
    lr_mult: dict[Any, float]
    wd_mult: dict[Any, float]
    idx2name: dict[Any, str]
    param_dict: dict[Any, Any]
    unchecked: bool = False
    """Whether :meth:`check_multipliers` still has to check the multipliers."""

    def __setattr__(self, name: str, value: Any) -> None:
        own = self.__dict__
        plain = name in RATES and type(value) is float and 0 <= value < inf
        plain = plain and self._plain_rate and "lr" in own and "version" in own
        if not plain or own["lr_scheduler"] is not None:
            super().__setattr__(name, value)
        elif own["lr"] != value:  # trainers assign it in every step
            own["lr"] = value
            self._set_versions("version")
            self._share("lr")

    def restore(self, attributes: Mapping[str, Any]) -> None:
        """See :meth:`Attributes.restore`; a schedule of the same class is restored in place."""
        if "lr_scheduler" in attributes:
            schedule = restored(vars(self).get("lr_scheduler"), attributes["lr_scheduler"])
            attributes = {**attributes, "lr_scheduler": schedule}
        super().restore(attributes)

    # Counts

    @property
    def num_update(self) -> int:
        """Largest update count of a parameter, at which the schedule is evaluated."""
        return self._index_update_count.largest

    @num_update.setter
    def num_update(self, value: int) -> None:
        self._index_update_count.largest = value

    def _update_count(self, index: Index) -> None:
        counts = self._index_update_count
        count = counts.get(index, self.begin_num_update) + 1
        counts[index] = count
        counts.largest = max(counts.largest, count)

    # Rates

    def _first_rate(self, learning_rate: Any, lr_scheduler: Any) -> float:
        """Set the schedule, which may be given as the learning rate, and return the latter."""
        if callable(learning_rate):
            if lr_scheduler is not None:
                raise TypeError("learning_rate is a schedule already, and lr_scheduler another")
            learning_rate, lr_scheduler = None, check_schedule("learning_rate", learning_rate)
        self._assign("lr_scheduler", lr_scheduler)
        own = getattr(self.lr_scheduler, "base_lr", None)
        if learning_rate is None:
            return 0.01 if own is None else float(own)
        rate: float = check_rate("learning_rate", learning_rate)
        if own is not None and own != rate:
            self.lr_scheduler = rebased(self.lr_scheduler, rate, type(self))
        return rate

    @property
    def learning_rate(self) -> float:
        """Current learning rate, before multipliers; assigning calls :meth:`set_learning_rate`."""
        if self.lr_scheduler is None:
            return as_float("lr", self.lr)
        try:
            rate = self.lr_scheduler(self.num_update)
        except TypeError:
            check_schedule("lr_scheduler", self.lr_scheduler)
            raise
        return self.scheduled(rate)

    @learning_rate.setter
    def learning_rate(self, lr: float) -> None:
        self.set_learning_rate(lr)

    @staticmethod
    def scheduled(rate: Any) -> float:
        """Return the result of a schedule as a float."""
        try:
            return float(rate)
        except OverflowError:
            return math.inf  # rejected when the rate of a parameter is checked
        except (TypeError, ValueError):
            raise TypeError(f"lr_scheduler must return a number, got {brief(rate)}") from None

    def set_learning_rate(self, lr: float) -> None:
        """Set the learning rate.

        Parameters
        ----------
        lr : float
            New learning rate.

        Raises
        ------
        ScheduledRateError
            The optimizer has a schedule, which determines the learning rate.
        ValueError
            `lr` is negative, NaN or infinite.
        """
        if self.lr_scheduler is not None:
            raise ScheduledRateError(
                "the learning rate comes from lr_scheduler; set_learning_rate works without one"
            )
        self.lr = check_rate("learning_rate", lr)

    def _get_lr(self, index: Index) -> float:
        rate = self.learning_rate * self.multiplier(index, self.lr_mult, "lr_mult")
        if not 0 <= rate < math.inf:
            self.check_rates(index, rate, 0.0)
        return rate

    def _get_wd(self, index: Index) -> float:
        base = as_float("wd", self.wd)
        if self.corrected_decay is not None:
            base = self.rates_at(self.learning_rate)["wd"]
        decay = base * self.multiplier(index, self.wd_mult, "wd_mult")
        if not 0 <= decay < math.inf:
            self.check_rates(index, 0.0, decay)
        return decay

    @property
    def corrects_decay(self) -> bool:
        """Whether decay is decoupled and proportional to the learning rate: `corrected_decay`."""
        return self.decoupled

    def rates_at(
        self, rate: float, multipliers: tuple[float, float] = (1.0, 1.0)
    ) -> dict[str, float]:
        """Return learning rate ``lr`` and weight decay ``wd`` of a parameter, and ``rate``.

        Parameters
        ----------
        rate : float
            The learning rate before multipliers.
        multipliers : tuple of float
            Those of learning rate and weight decay.
        """
        (lr_mult, wd_mult), decay = multipliers, self.wd
        if self.corrected_decay is not None and self.corrects_decay:
            decay = decay * (rate / self.corrected_decay)
        return {"rate": rate, "lr": rate * lr_mult, "wd": decay * wd_mult}

    def check_rates(self, index: Index, rate: float, decay: float) -> None:
        """Raise ValueError unless a parameter's learning rate and weight decay are valid."""
        if not 0 <= rate < math.inf:
            number(f"{label(index, self.idx2name)}: learning rate", rate, least=0)
        if not 0 <= decay < math.inf:
            number(f"{label(index, self.idx2name)}: weight decay", decay, least=0)

    # Multipliers

    def multiplier(self, index: Index, table: Mapping[Any, float], attribute: str) -> float:
        """Return the multiplier of a parameter, looked up by its object, index and name in turn."""
        value: Any
        if index in self.param_dict:
            value, of = getattr(self.param_dict[index], attribute, None), " of its parameter"
        elif table:
            name = index if index in table else self.idx2name.get(index)
            value, of = table.get(name, 1.0), ""
        else:
            return 1.0
        try:
            return float(value)
        except OverflowError:
            return math.inf
        except (TypeError, ValueError):
            context = label(index, self.idx2name)
            raise TypeError(
                f"{context}: {attribute}{of} must be a number, got {brief(value)}"
            ) from None

    def set_lr_scale(self, args_lrscale: Any) -> None:
        """Raise DeprecationWarning; use :meth:`set_lr_mult` instead."""
        raise DeprecationWarning("set_lr_scale is gone, use set_lr_mult")

    def set_lr_mult(self, args_lr_mult: Mapping[Index, float]) -> None:
        """Set learning rate multipliers, replacing all earlier ones.

        Parameters
        ----------
        args_lr_mult : dict of int or str to float
            Multipliers by index or by name; an index takes precedence.

        Raises
        ------
        ValueError
            A multiplier is NaN or infinite.
        """
        given = _multipliers("lr_mult", args_lr_mult)
        vars(self)["unchecked"] = True
        self.lr_mult = self._attributes("__lr_mult__") | given

    def set_wd_mult(self, args_wd_mult: Mapping[Index, float]) -> None:
        """Set weight decay multipliers, replacing all earlier ones.

        The default is 0 for named parameters whose last part, after ``_``, ``.`` or ``/``, is not
        ``weight``, ``gamma`` or ``kernel``.

        Parameters
        ----------
        args_wd_mult : dict of int or str to float
            Multipliers by index or by name; an index takes precedence.

        Raises
        ------
        ValueError
            A multiplier is NaN or infinite.
        """
        given = _multipliers("wd_mult", args_wd_mult)
        spared = {n: 0.0 for n in self.idx2name.values() if not n.endswith(self._decayed)}
        vars(self)["unchecked"] = True
        self.wd_mult = spared | self._attributes("__wd_mult__") | given

    def _attributes(self, key: str) -> dict[Index, float]:
        if not self.sym_info:
            return {}
        attributes, names = self.sym_info
        return {n: float(attributes[n][key]) for n in names if key in attributes.get(n, {})}

    def check_multipliers(
        self, indices: Sequence[Index], also: Collection[Index] = (), grouped: bool = False
    ) -> None:
        """Warn once about multipliers of unknown parameters, and if weight decay has no effect.

        The check runs when all parameters are assumed to be known: every index of ``idx2name`` has
        been updated, a list is updated, or an index is updated for the second time.

        Parameters
        ----------
        indices : sequence of int or str
            Parameters that are about to be updated and are not counted yet.
        also : collection of int or str
            Parameters with accumulated gradients that are not applied yet.
        grouped : bool
            Whether patterns of names are checked at the same time. Default False.
        """
        counted, names = self._index_update_count, self.idx2name
        if not (names or self.lr_mult or self.wd_mult or grouped):
            vars(self)["unchecked"] = False
            return
        again = len(indices) > 1 or indices[0] in counted or indices[0] in also
        seen = {*indices, *counted, *also}
        if not again and not (names and names.keys() <= seen):
            return
        vars(self)["unchecked"] = False  # no result depends on it, so the versions stay
        known = {*seen, *names, *names.values(), *self.param_dict}
        for attribute in ("lr_mult", "wd_mult"):
            symbol = self._attributes(f"__{attribute}__").keys()
            if lost := getattr(self, attribute).keys() - known - symbol:
                unknown = ", ".join(sorted(map(repr, lost)))
                warn_user(f"{attribute} of {unknown} has no effect: no parameter is called so")
        if names and as_float("wd", self.wd) > 0 and not any(map(self._decays, names)):
            warn_user(
                f"wd={self.wd} decays none of the parameters {brief(list(names.values()))}: by "
                f"default only names that end in {', '.join(self._decayed)} decay; set_wd_mult "
                "sets others"
            )

    def _decays(self, index: Index) -> bool:
        """Whether the weight decay multiplier of a parameter is not 0."""
        return self.multiplier(index, self.wd_mult, "wd_mult") != 0
