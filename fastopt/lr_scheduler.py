"""Learning rate schedules: functions from the number of updates so far to a rate."""

import math
import warnings
from bisect import bisect_left, bisect_right
from collections.abc import Iterable
from itertools import pairwise
from typing import Any, TypeVar

from fastopt.arguments import choice, count, number

Class = TypeVar("Class", bound="type[LRScheduler]")

scheduler_registry: dict[str, type["LRScheduler"]] = {}


def register(klass: Class) -> Class:
    """Enter a class into ``scheduler_registry`` under its name, as a decorator.

    Parameters
    ----------
    klass : type
        Subclass of :class:`LRScheduler`. A class of the same name is replaced with a warning.

    Raises
    ------
    TypeError
        `klass` is not a subclass of :class:`LRScheduler`.

    Examples
    --------
    >>> from fastopt.lr_scheduler import LRScheduler, register, scheduler_registry
    >>> @register
    ... class InverseRootScheduler(LRScheduler):
    ...     def _rate(self, num_update):
    ...         return self.base_lr / max(num_update, 1) ** 0.5
    >>> scheduler_registry["InverseRootScheduler"](base_lr=0.2)(4)
    0.1
    """
    if not (isinstance(klass, type) and issubclass(klass, LRScheduler)):
        raise TypeError(f"only subclasses of LRScheduler can be registered, got {klass!r}")
    old = scheduler_registry.get(klass.__name__)
    if old is not None:
        warnings.warn(f"{klass!r} replaces {old!r} in scheduler_registry", stacklevel=2)
    scheduler_registry[klass.__name__] = klass
    return klass


class LRScheduler:
    r"""Base class of all schedules: a warm-up, then the rate that a subclass defines.

    A subclass writes ``_rate(num_update)``, called from update `warmup_steps` on. Before, a linear
    warm-up has the rate

    .. math:: \mathrm{warmup\_begin\_lr} + (\mathrm{base\_lr} - \mathrm{warmup\_begin\_lr})
        \frac{n}{\mathrm{warmup\_steps}}

    An optimizer with a learning rate of its own assigns it to ``base_lr``. Schedules with a
    `factor` multiply that value; the others, and warm-up, keep the `base_lr` they were made with.

    Parameters
    ----------
    base_lr : float, default 0.01
        Rate at the end of warm-up, 0 or more.
    warmup_steps : int, default 0
        Number of warm-up updates.
    warmup_begin_lr : float, default 0
        Rate at update 0 of a warm-up, from 0 to `base_lr`.
    warmup_mode : {'linear', 'constant'}
        Rise to `base_lr`, or wait at `warmup_begin_lr`.

    Raises
    ------
    TypeError
        An argument of any schedule is not a number, or not an integer where updates are counted.
    ValueError
        An argument of any schedule is out of range, NaN or infinite; a call's number is negative.

    Examples
    --------
    >>> from fastopt.lr_scheduler import FactorScheduler
    >>> schedule = FactorScheduler(step=100, base_lr=0.5, warmup_steps=2)
    >>> [schedule(n) for n in range(4)]
    [0.0, 0.25, 0.5, 0.5]
    """

    base_lr: float

    def __init__(
        self,
        base_lr: float = 0.01,
        warmup_steps: int = 0,
        warmup_begin_lr: float = 0,
        warmup_mode: str = "linear",
    ) -> None:
        self.base_lr = base_lr
        self.warmup_final_lr = self.base_lr
        self.warmup_steps = count("warmup_steps", warmup_steps, least=0)
        self.warmup_begin_lr = number("warmup_begin_lr", warmup_begin_lr, least=0)
        self.warmup_mode = choice("warmup_mode", warmup_mode, "linear", "constant")
        if self.warmup_begin_lr > self.base_lr:
            raise ValueError(
                f"warmup_begin_lr must be at most base_lr={base_lr}, got {warmup_begin_lr}"
            )

    def __setattr__(self, name: str, value: Any) -> None:
        # Optimizers assign base_lr: the same check as for the argument, and a plain float.
        super().__setattr__(name, number(name, value, least=0) if name == "base_lr" else value)

    def __call__(self, num_update: int) -> float:
        """Return the rate at update `num_update`."""
        if num_update < self.warmup_steps or num_update < 0:
            return float(self.get_warmup_lr(num_update))
        return float(self._rate(num_update))

    def get_warmup_lr(self, num_update: int) -> float:
        """Return the rate of warm-up at update `num_update`, or at its end if that is over."""
        if num_update < 0:
            raise ValueError(f"num_update must be at least 0, got {num_update}")
        if num_update >= self.warmup_steps:
            return self.warmup_final_lr
        if self.warmup_mode == "constant":
            return self.warmup_begin_lr
        done = num_update / self.warmup_steps
        return _between(self.warmup_begin_lr, self.warmup_final_lr, done)

    def __repr__(self) -> str:
        attributes = ", ".join(f"{name}={value!r}" for name, value in vars(self).items())
        return f"{type(self).__name__}({attributes})"

    def _rate(self, num_update: int) -> float:
        raise NotImplementedError(f"{type(self).__name__} must define _rate(num_update)")


class _Reduced(LRScheduler):
    """`base_lr` times a power of `factor`; no reduction goes below `stop_factor_lr`."""

    def __init__(self, factor: float, stop_factor_lr: float, *base: Any) -> None:
        super().__init__(*base)
        self.factor = number("factor", factor, most=1, least=0)
        self.stop_factor_lr = number("stop_factor_lr", stop_factor_lr, least=0)

    def _rate(self, num_update: int) -> float:
        power = self._power(num_update)
        if power <= 0:
            return self.base_lr
        return max(self.base_lr * math.pow(self.factor, power), self.stop_factor_lr)

    def _power(self, num_update: int) -> float:
        raise NotImplementedError


@register
class FactorScheduler(_Reduced):
    r"""Multiply the rate by `factor` after every `step` updates.

    .. math:: \max(\mathrm{base\_lr} \cdot \mathrm{factor}^{\lfloor (n-1) / \mathrm{step} \rfloor},
        \mathrm{stop\_factor\_lr})

    Reductions that are due in warm-up take effect when it ends.

    Parameters
    ----------
    step : int, at least 1
        Updates from one reduction to the next.
    factor : float, from 0 to 1, default 1
    stop_factor_lr : float, default 1e-8
        Least rate after a reduction.
    base_lr, warmup_steps, warmup_begin_lr, warmup_mode
        See :class:`LRScheduler`, also for errors.

    Examples
    --------
    >>> from fastopt.lr_scheduler import FactorScheduler
    >>> schedule = FactorScheduler(step=2, factor=0.5, base_lr=0.4)
    >>> [schedule(n) for n in range(1, 6)]
    [0.4, 0.4, 0.2, 0.2, 0.1]
    """

    def __init__(
        self,
        step: int,
        factor: float = 1,
        stop_factor_lr: float = 1e-8,
        base_lr: float = 0.01,
        warmup_steps: int = 0,
        warmup_begin_lr: float = 0,
        warmup_mode: str = "linear",
    ) -> None:
        super().__init__(
            factor, stop_factor_lr, base_lr, warmup_steps, warmup_begin_lr, warmup_mode
        )
        self.step = count("step", step)

    def _power(self, num_update: int) -> float:
        return (num_update - 1) // self.step


@register
class ExponentialScheduler(FactorScheduler):
    r"""Multiply the rate by `factor` over every `step` updates, a little in each of them.

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
    r"""Multiply the rate by `factor` after each of the given updates.

    .. math:: \mathrm{base\_lr} \cdot \mathrm{factor}^{|\{s \in \mathrm{step}: s < n\}|}

    Reductions that are due in warm-up take effect when it ends.

    Parameters
    ----------
    step : list of int, increasing, at least 1
        Numbers of updates.
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

    def __init__(
        self,
        step: Iterable[int],
        factor: float = 1,
        base_lr: float = 0.01,
        warmup_steps: int = 0,
        warmup_begin_lr: float = 0,
        warmup_mode: str = "linear",
    ) -> None:
        super().__init__(factor, 0, base_lr, warmup_steps, warmup_begin_lr, warmup_mode)
        self.step = _increasing("step", step)
        if not self.step:
            raise ValueError("step must hold at least one number of updates, got []")

    def _power(self, num_update: int) -> float:
        return bisect_left(self.step, num_update)


@register
class PlateauScheduler(_Reduced):
    r"""Multiply the rate by `factor` when a metric stops improving.

    .. math:: \max(\mathrm{base\_lr} \cdot \mathrm{factor}^k, \mathrm{stop\_factor\_lr})

    after :math:`k` reductions. This one has state: :meth:`step` decides about reductions, and a
    call returns the present rate whatever `num_update` is, warm-up aside.

    Parameters
    ----------
    factor : float, from 0 to 1, default 0.1
    patience : int, at least 1, default 10
        Steps in a row without improvement that lead to a reduction.
    min_delta : float, default 0
        Only a change for the better by more than this is an improvement.
    mode : {'min', 'max'}
        Whether a lower or a higher metric is better.
    stop_factor_lr : float, default 1e-8
        Least rate after a reduction.
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

    def __init__(
        self,
        factor: float = 0.1,
        patience: int = 10,
        min_delta: float = 0,
        mode: str = "min",
        stop_factor_lr: float = 1e-8,
        base_lr: float = 0.01,
        warmup_steps: int = 0,
        warmup_begin_lr: float = 0,
        warmup_mode: str = "linear",
    ) -> None:
        super().__init__(
            factor, stop_factor_lr, base_lr, warmup_steps, warmup_begin_lr, warmup_mode
        )
        self.patience = count("patience", patience)
        self.min_delta = number("min_delta", min_delta, least=0)
        self.mode = choice("mode", mode, "min", "max")
        self.best: float | None = None
        self.reductions = self.bad_steps = 0

    def step(self, metric: float) -> None:
        """Take the present value of the metric, and reduce the rate if it is time.

        Raises
        ------
        TypeError, ValueError
            `metric` is not a number, or not a finite one.
        """
        metric = number("metric", metric)
        sign = 1 if self.mode == "max" else -1
        if self.best is None or sign * (metric - self.best) > self.min_delta:
            self.best, self.bad_steps = metric, 0
        else:
            self.bad_steps += 1
        if self.bad_steps == self.patience:
            self.reductions, self.bad_steps = self.reductions + 1, 0

    def _power(self, num_update: int) -> float:
        return self.reductions


class _Annealed(LRScheduler):
    """From `base_lr` to `final_lr` at `max_update`; ``_share`` of the way is left."""

    def __init__(
        self,
        max_update: int,
        base_lr: float = 0.01,
        final_lr: float = 0,
        warmup_steps: int = 0,
        warmup_begin_lr: float = 0,
        warmup_mode: str = "linear",
    ) -> None:
        super().__init__(base_lr, warmup_steps, warmup_begin_lr, warmup_mode)
        self.max_update = count("max_update", max_update)
        self.final_lr = number("final_lr", final_lr, least=0)
        if self.warmup_steps >= self.max_update:
            raise ValueError(
                f"warmup_steps must be less than max_update={max_update}, got {self.warmup_steps}"
            )

    def _rate(self, num_update: int) -> float:
        if num_update >= self.max_update:
            return self.final_lr
        done = (num_update - self.warmup_steps) / (self.max_update - self.warmup_steps)
        return _between(self.final_lr, self.warmup_final_lr, self._share(done))

    def _share(self, done: float) -> float:
        raise NotImplementedError


@register
class PolyScheduler(_Annealed):
    r"""Go from `base_lr` to `final_lr` along a power of the remaining time.

    .. math:: \mathrm{final\_lr} + (\mathrm{base\_lr} - \mathrm{final\_lr}) (1-x)^\mathrm{pwr},
        \quad x = \frac{n - \mathrm{warmup\_steps}}{\mathrm{max\_update} - \mathrm{warmup\_steps}}

    Parameters
    ----------
    max_update : int, more than `warmup_steps`
        Update from which on the rate is `final_lr`.
    pwr : float, 0 or more, default 2
    final_lr : float, 0 or more, default 0
    base_lr, warmup_steps, warmup_begin_lr, warmup_mode
        See :class:`LRScheduler`, also for errors.

    Examples
    --------
    >>> from fastopt.lr_scheduler import PolyScheduler
    >>> schedule = PolyScheduler(max_update=4, base_lr=0.4, pwr=2)
    >>> [round(schedule(n), 3) for n in range(6)]
    [0.4, 0.225, 0.1, 0.025, 0.0, 0.0]
    """

    def __init__(
        self,
        max_update: int,
        base_lr: float = 0.01,
        pwr: float = 2,
        final_lr: float = 0,
        warmup_steps: int = 0,
        warmup_begin_lr: float = 0,
        warmup_mode: str = "linear",
    ) -> None:
        super().__init__(max_update, base_lr, final_lr, warmup_steps, warmup_begin_lr, warmup_mode)
        self.pwr = number("pwr", pwr, least=0)

    def _share(self, done: float) -> float:
        return math.pow(1 - done, self.pwr)


@register
class CosineScheduler(_Annealed):
    r"""Go from `base_lr` to `final_lr` along half a cosine (arXiv:1608.03983, equation 5).

    .. math:: \mathrm{final\_lr} + (\mathrm{base\_lr} - \mathrm{final\_lr}) (1 + \cos \pi x) / 2,
        \quad x = \frac{n - \mathrm{warmup\_steps}}{\mathrm{max\_update} - \mathrm{warmup\_steps}}

    Parameters
    ----------
    max_update : int, more than `warmup_steps`
        Update from which on the rate is `final_lr`.
    final_lr : float, 0 or more, default 0
    base_lr, warmup_steps, warmup_begin_lr, warmup_mode
        See :class:`LRScheduler`, also for errors.

    Examples
    --------
    >>> from fastopt.lr_scheduler import CosineScheduler
    >>> schedule = CosineScheduler(max_update=4, base_lr=0.4)
    >>> [round(schedule(n), 3) for n in range(6)]
    [0.4, 0.341, 0.2, 0.059, 0.0, 0.0]
    """

    def _share(self, done: float) -> float:
        return _half_cosine(done)


@register
class CosineRestartsScheduler(LRScheduler):
    r"""Go from `base_lr` to `final_lr` along half a cosine again and again (SGDR).

    .. math:: \mathrm{final\_lr} + (\mathrm{base\_lr} - \mathrm{final\_lr})
        (1 + \cos(\pi t / T_i)) / 2, \quad T_i = \mathrm{period} \cdot \mathrm{period\_mult}^i

    with :math:`t < T_i` updates since restart :math:`i` (arXiv:1608.03983).

    Parameters
    ----------
    period : int, at least 1
        Updates from the end of warm-up to the first restart.
    final_lr : float, 0 or more, default 0
    period_mult : int, at least 1, default 1
    base_lr, warmup_steps, warmup_begin_lr, warmup_mode
        See :class:`LRScheduler`, also for errors.

    Examples
    --------
    >>> from fastopt.lr_scheduler import CosineRestartsScheduler
    >>> schedule = CosineRestartsScheduler(period=2, base_lr=0.4, period_mult=2)
    >>> [round(schedule(n), 3) for n in range(7)]
    [0.4, 0.2, 0.4, 0.341, 0.2, 0.059, 0.4]
    """

    def __init__(
        self,
        period: int,
        base_lr: float = 0.01,
        final_lr: float = 0,
        period_mult: int = 1,
        warmup_steps: int = 0,
        warmup_begin_lr: float = 0,
        warmup_mode: str = "linear",
    ) -> None:
        super().__init__(base_lr, warmup_steps, warmup_begin_lr, warmup_mode)
        self.period = count("period", period)
        self.final_lr = number("final_lr", final_lr, least=0)
        self.period_mult = count("period_mult", period_mult)

    def _rate(self, num_update: int) -> float:
        since, period = num_update - self.warmup_steps, self.period
        if self.period_mult == 1:
            since %= period
        while since >= period:
            since -= period
            period *= self.period_mult
        return _between(self.final_lr, self.warmup_final_lr, _half_cosine(since / period))


@register
class OneCycleScheduler(LRScheduler):
    r"""Rise to `base_lr`, then fall far below the first rate (1cycle, arXiv:1708.07120).

    .. math:: b + (a - b) (1 + \cos \pi x) / 2, \quad (a, b, x) = \begin{cases}
        (\eta_0, \mathrm{base\_lr}, n / p) & n < p \\
        (\mathrm{base\_lr}, \eta_1, (n - p) / (\mathrm{max\_update} - p)) & n \ge p \end{cases}

    with :math:`p` = `pct_start` * `max_update`, :math:`\eta_0` = `base_lr` / `div_factor` and
    :math:`\eta_1 = \eta_0` / `final_div_factor`. In the paper both ways are straight lines.

    Parameters
    ----------
    max_update : int, at least 1
        Update from which on the rate is :math:`\eta_1`.
    base_lr : float, default 0.01
        Highest rate; see :class:`LRScheduler`, also for errors.
    pct_start : float, from 0 to 1, default 0.3
        Share of the updates in which the rate rises.
    div_factor : float, at least 1, default 25
    final_div_factor : float, at least 1, default 1e4

    Examples
    --------
    >>> from fastopt.lr_scheduler import OneCycleScheduler
    >>> schedule = OneCycleScheduler(max_update=4, base_lr=0.5, pct_start=0.5, div_factor=5)
    >>> [round(schedule(n), 6) for n in range(6)]
    [0.1, 0.3, 0.5, 0.250005, 1e-05, 1e-05]
    """

    def __init__(
        self,
        max_update: int,
        base_lr: float = 0.01,
        pct_start: float = 0.3,
        div_factor: float = 25,
        final_div_factor: float = 1e4,
    ) -> None:
        super().__init__(base_lr)
        self.max_update = count("max_update", max_update)
        self.pct_start = number("pct_start", pct_start, most=1, least=0)
        self.div_factor = number("div_factor", div_factor, least=1)
        self.final_div_factor = number("final_div_factor", final_div_factor, least=1)

    def _rate(self, num_update: int) -> float:
        highest = self.warmup_final_lr
        first = highest / self.div_factor
        last = first / self.final_div_factor
        turn = self.pct_start * self.max_update
        if num_update >= self.max_update:
            return last
        if num_update < turn:
            return _between(highest, first, _half_cosine(num_update / turn))
        return _between(last, highest, _half_cosine((num_update - turn) / (self.max_update - turn)))


@register
class JoinedScheduler(LRScheduler):
    r"""Run one schedule after the other.

    .. math:: \mathrm{schedules}_i(n - b_i), \quad b_i \le n < b_{i+1}

    with :math:`b_0 = 0` and :math:`b_1, b_2, \ldots` = `boundaries`: each schedule counts from 0
    and keeps its own warm-up and ``base_lr``.

    Parameters
    ----------
    schedules : list of LRScheduler
    boundaries : list of int, increasing, at least 1
        First update of each schedule but the first.

    Raises
    ------
    TypeError, ValueError
        `schedules` does not hold schedules, one more than there are boundaries, or the boundaries
        are not integers in increasing order.

    Examples
    --------
    >>> from fastopt.lr_scheduler import CosineScheduler, FactorScheduler, JoinedScheduler
    >>> constant = FactorScheduler(step=1, base_lr=0.4)
    >>> schedule = JoinedScheduler([constant, CosineScheduler(2, base_lr=0.4)], [3])
    >>> [round(schedule(n), 3) for n in range(6)]
    [0.4, 0.4, 0.4, 0.4, 0.2, 0.0]
    """

    def __init__(self, schedules: Iterable[LRScheduler], boundaries: Iterable[int]) -> None:
        self.schedules: list[LRScheduler] = _listed("schedules", schedules)
        for i, schedule in enumerate(self.schedules):
            if not isinstance(schedule, LRScheduler):
                raise TypeError(f"schedules[{i}] must be an LRScheduler, got {schedule!r}")
        self.boundaries = _increasing("boundaries", boundaries)
        if len(self.schedules) != len(self.boundaries) + 1:
            raise ValueError(
                "schedules must be one more than boundaries, "
                f"got {len(self.schedules)} and {len(self.boundaries)}"
            )
        super().__init__(self.schedules[0].base_lr)

    def _rate(self, num_update: int) -> float:
        piece = bisect_right(self.boundaries, num_update)
        begin = self.boundaries[piece - 1] if piece else 0
        return self.schedules[piece](num_update - begin)


def _between(first: float, second: float, share: float) -> float:
    return first + (second - first) * share


def _half_cosine(done: float) -> float:
    return (1 + math.cos(math.pi * done)) / 2


def _listed(name: str, values: Iterable[Any]) -> list[Any]:
    if not isinstance(values, Iterable):
        raise TypeError(f"{name} must be a list, got {values!r}")
    return list(values)


def _increasing(name: str, values: Iterable[Any]) -> list[int]:
    counts = [count(f"{name}[{i}]", value) for i, value in enumerate(_listed(name, values))]
    if any(second <= first for first, second in pairwise(counts)):
        raise ValueError(f"{name} must be strictly increasing, got {counts}")
    return counts
