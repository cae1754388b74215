"""Schedules that repeatedly multiply the learning rate by a factor, and sequences of schedules."""

import math
from bisect import bisect_left, bisect_right
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, ClassVar

from fastopt.arguments import (
    Choice,
    Descriptions,
    Instance,
    Integer,
    ListOf,
    OrNone,
    Real,
    brief,
    count,
    number,
)
from fastopt.lr_scheduler.base import LRScheduler, register


def _listed(name: str, values: Iterable[Any]) -> list[Any]:
    """Return `values` as a list, else raise TypeError."""
    if not isinstance(values, Iterable):
        raise TypeError(f"{name} must be a list, got {values!r}")
    return list(values)


def _increasing(name: str, values: Iterable[Any]) -> list[int]:
    """Return `values` as a list of positive, strictly increasing integers, else raise."""
    counts = [count(f"{name}[{i}]", value) for i, value in enumerate(_listed(name, values))]
    if any(second <= first for first, second in pairwise(counts)):
        raise ValueError(f"{name} must be strictly increasing, got {counts}")
    return counts


class _Reduced(LRScheduler):
    """`base_lr` times a power of `factor`, not reduced below `stop_factor_lr`."""

    arguments: ClassVar[Descriptions] = {
        "factor": Real(least=0, most=1),
        "stop_factor_lr": Real(least=0),
    }

    factor: float
    stop_factor_lr: float

    def _rate(self, num_update: int) -> float:
        power = self._power(num_update)
        if power <= 0:
            return self.base_lr
        return max(self.base_lr * math.pow(self.factor, power), self.stop_factor_lr)

    def _power(self, num_update: int) -> float:
        raise NotImplementedError


def _steps(name: str, value: Iterable[int]) -> list[int]:
    steps = _increasing(name, value)
    if not steps:
        raise ValueError(f"{name} must hold at least one number of updates, got []")
    return steps


@register
@dataclass(eq=False, repr=False, match_args=False)
class FactorScheduler(_Reduced):
    r"""Multiply the learning rate by `factor` after every `step` updates.

    .. math:: \max(\mathrm{base\_lr} \cdot \mathrm{factor}^{\lfloor (n-1) / \mathrm{step} \rfloor},
        \mathrm{stop\_factor\_lr})

    Reductions due during the warm-up take effect at its end.

    Parameters
    ----------
    step : int, at least 1
        Number of updates between reductions.
    factor : float, from 0 to 1, default 1
    stop_factor_lr : float, default 1e-8
        Minimum learning rate after a reduction.
    base_lr, warmup_steps, warmup_begin_lr, warmup_mode
        See :class:`LRScheduler`, also for errors.

    Examples
    --------
    >>> from fastopt.lr_scheduler import FactorScheduler
    >>> schedule = FactorScheduler(step=2, factor=0.5, base_lr=0.4)
    >>> [schedule(n) for n in range(1, 6)]
    [0.4, 0.4, 0.2, 0.2, 0.1]
    """

    arguments: ClassVar[Descriptions] = {"step": Integer()}

    step: int
    factor: float = 1
    stop_factor_lr: float = 1e-8
    base_lr: float = 0.01
    warmup_steps: int = 0
    warmup_begin_lr: float = 0
    warmup_mode: str = "linear"

    def _power(self, num_update: int) -> float:
        return (num_update - 1) // self.step


@register
class ExponentialScheduler(FactorScheduler):
    r"""Exponential decay: multiply the learning rate by `factor` over every `step` updates.

    .. math:: \max(\mathrm{base\_lr} \cdot
        \mathrm{factor}^{(n - \mathrm{warmup\_steps}) / \mathrm{step}}, \mathrm{stop\_factor\_lr})

    Parameters
    ----------
    step, factor, stop_factor_lr, base_lr, warmup_steps, warmup_begin_lr, warmup_mode
        See :class:`FactorScheduler` and :class:`LRScheduler`, also for errors.

    Examples
    --------
    >>> from fastopt.lr_scheduler import ExponentialScheduler
    >>> schedule = ExponentialScheduler(step=2, factor=0.25, base_lr=0.4)
    >>> [schedule(n) for n in range(4)]
    [0.4, 0.2, 0.1, 0.05]
    """

    def _power(self, num_update: int) -> float:
        return (num_update - self.warmup_steps) / self.step


@register
class MultiFactorScheduler(_Reduced):
    r"""Multiply the learning rate by `factor` after each of the given updates.

    .. math:: \mathrm{base\_lr} \cdot \mathrm{factor}^{|\{s \in \mathrm{step}: s < n\}|}

    Reductions due during the warm-up take effect at its end.

    Parameters
    ----------
    step : list of int, increasing, at least 1
        Numbers of updates after which the learning rate is multiplied.
    factor : float, from 0 to 1, default 1
    base_lr, warmup_steps, warmup_begin_lr, warmup_mode
        See :class:`LRScheduler`, also for errors.

    Examples
    --------
    >>> from fastopt.lr_scheduler import MultiFactorScheduler
    >>> schedule = MultiFactorScheduler(step=[2, 3], factor=0.5, base_lr=0.4)
    >>> [schedule(n) for n in range(1, 6)]
    [0.4, 0.4, 0.2, 0.1, 0.1]
    """

    arguments: ClassVar[Descriptions] = {"step": _steps}

    def __init__(
        self,
        step: Iterable[int],
        factor: float = 1,
        base_lr: float = 0.01,
        warmup_steps: int = 0,
        warmup_begin_lr: float = 0,
        warmup_mode: str = "linear",
    ) -> None:
        self.step = _listed("step", step)
        self.factor = factor
        self.stop_factor_lr = 0
        super().__init__(base_lr, warmup_steps, warmup_begin_lr, warmup_mode)

    def _power(self, num_update: int) -> float:
        return bisect_left(self.step, num_update)


_PLATEAU: Descriptions = {
    "best": OrNone(Real()),
    "reductions": Integer(least=0),
    "bad_steps": Integer(least=0),
}


def _shared(name: str, value: object) -> dict[str, Any]:
    """Check the state of a PlateauScheduler; return the same dict, because copies share it."""
    if not isinstance(value, dict) or value.keys() != _PLATEAU.keys():
        raise ValueError(f"{name} must have {', '.join(_PLATEAU)}, got {brief(value)}")
    value.update({key: check(f"{name}[{key!r}]", value[key]) for key, check in _PLATEAU.items()})
    return value


@register
@dataclass(eq=False, repr=False, match_args=False)
class PlateauScheduler(_Reduced):
    r"""Multiply the learning rate by `factor` when a metric stops improving.

    .. math:: \max(\mathrm{base\_lr} \cdot \mathrm{factor}^k, \mathrm{stop\_factor\_lr})

    after :math:`k` reductions. Unlike other schedules it has state: :meth:`step` triggers the
    reductions, and after the warm-up a call returns the current rate, whatever `num_update` is.
    The state is the dict `shared`, which shallow copies share, including those of optimizers.

    Parameters
    ----------
    factor : float, from 0 to 1, default 0.1
    patience : int, at least 1, default 10
        Consecutive steps without improvement before a reduction.
    min_delta : float, default 0
        Minimum improvement: only changes larger than this count.
    mode : {'min', 'max'}
        Whether a lower or a higher metric is better.
    stop_factor_lr : float, default 1e-8
        Minimum learning rate after a reduction.
    base_lr, warmup_steps, warmup_begin_lr, warmup_mode
        See :class:`LRScheduler`, also for errors.

    Examples
    --------
    >>> from fastopt.lr_scheduler import PlateauScheduler
    >>> schedule = PlateauScheduler(factor=0.5, patience=2, base_lr=0.4)
    >>> for loss in [1.0, 0.8, 0.9, 0.8]:
    ...     schedule.step(loss)
    >>> schedule(100)
    0.2
    """

    arguments: ClassVar[Descriptions] = {
        "patience": Integer(),
        "min_delta": Real(least=0),
        "mode": Choice("min", "max"),
        "shared": _shared,
    }

    factor: float = 0.1
    patience: int = 10
    min_delta: float = 0
    mode: str = "min"
    stop_factor_lr: float = 1e-8
    base_lr: float = 0.01
    warmup_steps: int = 0
    warmup_begin_lr: float = 0
    warmup_mode: str = "linear"
    shared: dict[str, Any] = field(
        default_factory=lambda: {"best": None, "reductions": 0, "bad_steps": 0}, init=False
    )

    def step(self, metric: float) -> None:
        """Record the current value of the metric, and reduce the rate if it has not improved.

        Parameters
        ----------
        metric : float
            The loss, or another metric to minimize, or to maximize with ``mode="max"``.

        Raises
        ------
        TypeError, ValueError
            `metric` is not a finite number.
        """
        metric, state = number("metric", metric), self.shared
        sign = 1 if self.mode == "max" else -1
        if state["best"] is None or sign * (metric - state["best"]) > self.min_delta:
            state.update(best=metric, bad_steps=0)
        else:
            state["bad_steps"] += 1
        if state["bad_steps"] >= self.patience:
            state.update(reductions=state["reductions"] + 1, bad_steps=0)

    def _power(self, num_update: int) -> float:
        reductions: int = self.shared["reductions"]
        return reductions


@register
class JoinedScheduler(LRScheduler):
    r"""Run several schedules in sequence.

    .. math:: \mathrm{schedules}_i(n - b_i), \quad b_i \le n < b_{i+1}

    with :math:`b_0 = 0` and :math:`b_1, b_2, \ldots` = `boundaries`: each schedule counts updates
    from 0 and keeps its own warm-up and ``base_lr``.

    Parameters
    ----------
    schedules : list of LRScheduler
        The schedules, one more than `boundaries`.
    boundaries : list of int, increasing, at least 1
        First update of the second and each later schedule.

    Raises
    ------
    TypeError, ValueError
        `schedules` does not hold LRScheduler objects, their number is not one more than that of
        `boundaries`, or `boundaries` are not increasing integers.

    Examples
    --------
    >>> from fastopt.lr_scheduler import CosineScheduler, FactorScheduler, JoinedScheduler
    >>> constant = FactorScheduler(step=1, base_lr=0.4)
    >>> schedule = JoinedScheduler([constant, CosineScheduler(2, base_lr=0.4)], [3])
    >>> [round(schedule(n), 3) for n in range(6)]
    [0.4, 0.4, 0.4, 0.4, 0.2, 0.0]
    """

    arguments: ClassVar[Descriptions] = {
        "schedules": ListOf(Instance(LRScheduler, "an LRScheduler")),
        "boundaries": _increasing,
    }
    keeps_base_lr = True

    def __init__(self, schedules: Iterable[LRScheduler], boundaries: Iterable[int]) -> None:
        self.schedules: list[LRScheduler] = _listed("schedules", schedules)
        self.boundaries: list[int] = _increasing("boundaries", boundaries)
        super().__init__(self.schedules[0].base_lr if self.schedules else 0.0)

    def check_together(self) -> None:
        """See :meth:`LRScheduler.check_together`."""
        super().check_together()
        if len(self.schedules) != len(self.boundaries) + 1:
            raise ValueError(
                "schedules must be one more than boundaries, "
                f"got {len(self.schedules)} and {len(self.boundaries)}"
            )

    def _rate(self, num_update: int) -> float:
        piece = bisect_right(self.boundaries, num_update)
        begin = self.boundaries[piece - 1] if piece else 0
        return self.schedules[piece](num_update - begin)
