"""Counts of updates, and the rate and decay of each parameter."""

import math
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

from fastopt.arguments import brief, count, number
from fastopt.optimizer.border import Array, label
from fastopt.optimizer.counts import Counts, Index

__all__ = ["Array", "Index", "Rates", "Schedule", "as_float"]

Schedule = Callable[[int], float]


class Rates:
    """Abstract base of :class:`~fastopt.optimizer.Optimizer`, which documents the arguments."""

    def __init__(
        self,
        learning_rate: float | None,
        lr_scheduler: Schedule | None,
        wd: float,
        begin_num_update: int,
        param_idx2name: Mapping[Index, str] | None,
        sym: Any,
        param_dict: Mapping[Index, Any] | None,
    ) -> None:
        if param_idx2name is not None and not isinstance(param_idx2name, Mapping):
            raise TypeError(f"param_idx2name must map indices to names, got {param_idx2name!r}")
        for index, name in (param_idx2name or {}).items():
            if not isinstance(name, str):
                raise TypeError(f"param_idx2name[{index!r}] must be a name, got {name!r}")
        if param_dict is not None and not isinstance(param_dict, Mapping):
            raise TypeError(f"param_dict must map indices to parameters, got {brief(param_dict)}")
        _check_schedule(lr_scheduler)
        self.lr_scheduler = lr_scheduler
        self.lr = self._first_rate(learning_rate)
        self.wd = number("wd", wd)
        self.lr_mult: dict[Index, float] = {}
        self.wd_mult: dict[Index, float] = {}
        self.begin_num_update = count("begin_num_update", begin_num_update, least=0)
        self.num_update = self.begin_num_update
        self._index_update_count = Counts()
        self.idx2name: dict[Any, str] = dict(param_idx2name or {})
        if not (sym is None or (hasattr(sym, "attr_dict") and hasattr(sym, "list_arguments"))):
            raise TypeError(f"sym must have attr_dict() and list_arguments(), got {sym!r}")
        self.sym_info = (sym.attr_dict(), sym.list_arguments()) if sym is not None else ()
        self.param_dict = dict(param_dict or {})
        self.set_lr_mult({})
        self.set_wd_mult({})

    def _first_rate(self, learning_rate: float | None) -> float:
        scheduler = self.lr_scheduler
        if learning_rate is None:
            return float(getattr(scheduler, "base_lr", 0.01))
        learning_rate = number("learning_rate", learning_rate, least=0)
        if hasattr(scheduler, "base_lr"):
            scheduler.base_lr = learning_rate  # type: ignore[union-attr]
        return learning_rate

    def _update_count(self, index: Index) -> None:
        count = self._index_update_count.increment(index, self.begin_num_update)
        if count > self.num_update:
            self.num_update = count

    def _reset_count(self, index: Index, count: int | None, num_update: int) -> None:
        """Undo :meth:`_update_count`."""
        self.num_update = num_update
        if count is None:
            self._index_update_count.pop(index, None)
        else:
            self._index_update_count[index] = count

    def _get_lr(self, index: Index) -> float:
        rate = self.learning_rate * self.multiplier(index, self.lr_mult, "lr_mult")
        if not 0 <= rate < math.inf:
            self.check_rates(index, rate, 0.0)
        return rate

    def _get_wd(self, index: Index) -> float:
        decay = as_float("wd", self.wd) * self.multiplier(index, self.wd_mult, "wd_mult")
        if not math.isfinite(decay):
            self.check_rates(index, 0.0, decay)
        return decay

    def check_rates(self, index: Index, rate: float, decay: float) -> None:
        """Raise ValueError unless rate and decay of a parameter are numbers that make sense."""
        if not 0 <= rate < math.inf:
            number(f"{label(index, self.idx2name)}: learning rate", rate, least=0)
        if not math.isfinite(decay):
            number(f"{label(index, self.idx2name)}: weight decay", decay)

    def multiplier(self, index: Index, table: Mapping[Any, float], attribute: str) -> float:
        """Multiplier of a parameter: the first hit of its object, its index and its name."""
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
        except (TypeError, ValueError):
            words = f"{label(index, self.idx2name)}: {attribute}{of}"
            raise TypeError(f"{words} must be a number, got {brief(value)}") from None

    @property
    def learning_rate(self) -> float:
        """The present rate, before multipliers; setting it is :meth:`set_learning_rate`."""
        if self.lr_scheduler is None:
            return as_float("lr", self.lr)
        try:
            rate = self.lr_scheduler(self.num_update)
        except TypeError:
            _check_schedule(self.lr_scheduler)
            raise
        try:
            return float(rate)
        except (TypeError, ValueError):
            raise TypeError(f"lr_scheduler must return a number, got {brief(rate)}") from None

    @learning_rate.setter
    def learning_rate(self, lr: float) -> None:
        self.set_learning_rate(lr)

    def set_learning_rate(self, lr: float) -> None:
        """Set the rate.

        Parameters
        ----------
        lr : float
            New learning rate.

        Raises
        ------
        UserWarning
            There is a scheduler, which decides alone.
        ValueError
            `lr` is negative, NaN or infinite.
        """
        if self.lr_scheduler is not None:
            raise UserWarning(
                "the learning rate comes from lr_scheduler; set_learning_rate works without one"
            )
        self.lr = number("learning_rate", lr, least=0)

    def set_lr_scale(self, args_lrscale: Any) -> None:
        """Raise DeprecationWarning: :meth:`set_lr_mult` has taken its place."""
        raise DeprecationWarning("set_lr_scale is gone, use set_lr_mult")

    def set_lr_mult(self, args_lr_mult: Mapping[Index, float]) -> None:
        """Set rate multipliers, forgetting those set before.

        Parameters
        ----------
        args_lr_mult : dict of int or str to float
            Multipliers by index or by name; an index takes precedence.

        Raises
        ------
        ValueError
            A multiplier is NaN or infinite.
        """
        self.lr_mult = self._attributes("__lr_mult__") | _multipliers("lr_mult", args_lr_mult)

    def set_wd_mult(self, args_wd_mult: Mapping[Index, float]) -> None:
        """Set weight decay multipliers, forgetting those set before.

        Named parameters that end neither in ``_weight`` nor in ``_gamma`` start at 0.

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
        self.wd_mult = spared | self._attributes("__wd_mult__") | given

    _decayed: ClassVar[tuple[str, ...]] = ("_weight", "_gamma")

    def _attributes(self, key: str) -> dict[Index, float]:
        if not self.sym_info:
            return {}
        attributes, names = self.sym_info
        return {n: float(attributes[n][key]) for n in names if key in attributes.get(n, {})}


def as_float(name: str, value: Any) -> float:
    """Attribute as a float; faster than the check of the argument, which it has passed."""
    try:
        return float(value)
    except (TypeError, ValueError):
        raise TypeError(f"{name} must be a number, got {brief(value)}") from None


def _check_schedule(lr_scheduler: Any) -> None:
    if lr_scheduler is None or (callable(lr_scheduler) and not isinstance(lr_scheduler, type)):
        return
    raise TypeError(f"lr_scheduler must be a function or an object, got {brief(lr_scheduler)}")


def _multipliers(name: str, given: Mapping[Index, float]) -> dict[Index, float]:
    if not isinstance(given, Mapping):
        raise TypeError(f"{name} must be a dict of multipliers, got {brief(given)}")
    return {key: number(f"{name}[{key!r}]", value) for key, value in given.items()}
