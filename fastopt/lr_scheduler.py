"""Learning rate schedules: functions from the number of updates so far to a rate."""

import math
import warnings
from bisect import bisect_left, bisect_right
from collections.abc import Iterable
from inspect import signature
from itertools import pairwise
from numbers import Integral, Real
from typing import Any, TypeVar

__all__ = [
    "CosineRestartsScheduler",
    "CosineScheduler",
    "ExponentialScheduler",
    "FactorScheduler",
    "JoinedScheduler",
    "LRScheduler",
    "MultiFactorScheduler",
    "OneCycleScheduler",
    "PlateauScheduler",
    "PolyScheduler",
    "register",
    "scheduler_registry",
]

Class = TypeVar("Class", bound="type[LRScheduler]")

#: Registered schedules by class name.
scheduler_registry: dict[str, type["LRScheduler"]] = {}


def register(klass: Class) -> Class:
    """Enter a class into `scheduler_registry` under its name, as a decorator.

    Parameters
    ----------
    klass : type
        Subclass of `LRScheduler`. A class of the same name is replaced with a warning.

    Raises
    ------
    TypeError
        `klass` is not a subclass of `LRScheduler`.

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
        warnings.warn(
            f"scheduler {klass.__module__}.{klass.__name__} replaces "
            f"{old.__module__}.{old.__name__} in the registry",
            stacklevel=2,
        )
    scheduler_registry[klass.__name__] = klass
    return klass


class LRScheduler:
    r"""Base class of all schedules: a warm-up, then what the subclass says.

    A subclass writes ``_rate(num_update)``, the rate after warm-up; the registered ones depend on
    nothing but `num_update` (:class:`PlateauScheduler` aside), so they can be called in any order.
    Update :math:`n` of a linear warm-up over :math:`s` updates has the rate

    .. math:: \eta_0 + (\eta - \eta_0) \, n / s

    with :math:`\eta_0` = `warmup_begin_lr` and :math:`\eta` = `base_lr`. All attributes are plain
    numbers, strings, None and lists: a class and ``vars()`` are all there is to a schedule.

    An optimizer with a learning rate of its own assigns it to ``base_lr``. The schedules with a
    `factor` multiply that value. The others run between rates fixed by the constructor, which an
    assignment does not change. Warm-up always ends at the constructor's `base_lr`.

    Parameters
    ----------
    base_lr : float
        Rate at the end of warm-up, 0 or more. Default 0.01.
    warmup_steps : int
        Length of warm-up in updates. Default 0.
    warmup_begin_lr : float
        Rate at update 0 of warm-up, from 0 to `base_lr`. Default 0.
    warmup_mode : {'linear', 'constant'}
        Rise to `base_lr`, or stay at `warmup_begin_lr` until warm-up ends. Default 'linear'.

    Raises
    ------
    TypeError
        An argument is not a number, or a number of updates is not an integer.
    ValueError
        An argument is NaN, infinite or out of range; also when called with a negative number.
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
        self.warmup_steps = _count("warmup_steps", warmup_steps, least=0)
        self.warmup_begin_lr = _number("warmup_begin_lr", warmup_begin_lr)
        if self.warmup_begin_lr > self.base_lr:
            raise ValueError(
                f"warmup_begin_lr must be at most base_lr={self.base_lr}, got {warmup_begin_lr}"
            )
        self.warmup_mode = _choice("warmup_mode", warmup_mode, ("linear", "constant"))

    def __setattr__(self, name: str, value: Any) -> None:
        # Optimizers assign base_lr; it gets the same check and type as the argument.
        super().__setattr__(name, _number(name, value) if name == "base_lr" else value)

    def __call__(self, num_update: int) -> float:
        """Return the rate of update `num_update`."""
        if num_update < self.warmup_steps or num_update < 0:
            return self.get_warmup_lr(num_update)
        return self._rate(num_update)

    def get_warmup_lr(self, num_update: int) -> float:
        """Return the rate that warm-up alone gives update `num_update`."""
        if num_update < 0:
            raise ValueError(f"num_update must be at least 0, got {num_update}")
        if num_update >= self.warmup_steps:
            return self.warmup_final_lr
        if self.warmup_mode == "constant":
            return self.warmup_begin_lr
        progress = num_update / self.warmup_steps
        return self.warmup_begin_lr + (self.warmup_final_lr - self.warmup_begin_lr) * progress

    def __repr__(self) -> str:
        names = [name for name in signature(type(self)).parameters if hasattr(self, name)]
        arguments = ", ".join(f"{name}={getattr(self, name)!r}" for name in names)
        return f"{type(self).__name__}({arguments})"

    def _rate(self, num_update: int) -> float:
        raise NotImplementedError(f"{type(self).__name__} must define _rate(num_update)")


class _Reduced(LRScheduler):
    """`base_lr` times a power of `factor`, never reduced below `stop_factor_lr`."""

    def __init__(
        self,
        factor: float,
        stop_factor_lr: float,
        base_lr: float,
        warmup_steps: int,
        warmup_begin_lr: float,
        warmup_mode: str,
    ) -> None:
        super().__init__(base_lr, warmup_steps, warmup_begin_lr, warmup_mode)
        self.factor = _number("factor", factor, most=1)
        self.stop_factor_lr = _number("stop_factor_lr", stop_factor_lr)

    def _rate(self, num_update: int) -> float:
        power = self._power(num_update)
        if power <= 0:
            return self.base_lr
        return max(self.base_lr * self.factor**power, self.stop_factor_lr)

    def _power(self, num_update: int) -> float:
        raise NotImplementedError


@register
class FactorScheduler(_Reduced):
    r"""Multiply the rate by `factor` after every `step` updates.

    .. math:: \eta_n = \max(\mathrm{base\_lr} \cdot
        \mathrm{factor}^{\lfloor (n - 1) / \mathrm{step} \rfloor}, \mathrm{stop\_factor\_lr})

    Reductions that fall into warm-up take effect when it ends.

    Parameters
    ----------
    step : int
        Updates between reductions, at least 1.
    factor : float
        From 0 to 1. Default 1.
    stop_factor_lr : float
        No reduction goes below this rate. Default 1e-8.
    base_lr, warmup_steps, warmup_begin_lr, warmup_mode
        See :class:`LRScheduler`.

    Raises
    ------
    TypeError, ValueError
        An argument has the wrong type or is out of range.

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
        self.step = _count("step", step)

    def _power(self, num_update: int) -> float:
        return (num_update - 1) // self.step


@register
class ExponentialScheduler(FactorScheduler):
    r"""Multiply the rate by `factor` over every `step` updates, a little in each.

    .. math:: \eta_n = \max(\mathrm{base\_lr} \cdot
        \mathrm{factor}^{(n - \mathrm{warmup\_steps}) / \mathrm{step}}, \mathrm{stop\_factor\_lr})

    Parameters
    ----------
    step, factor, stop_factor_lr
        See :class:`FactorScheduler`.
    base_lr, warmup_steps, warmup_begin_lr, warmup_mode
        See :class:`LRScheduler`.

    Raises
    ------
    TypeError, ValueError
        An argument has the wrong type or is out of range.

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

    .. math:: \eta_n = \mathrm{base\_lr} \cdot \mathrm{factor}^{|\{s \in \mathrm{step}: s < n\}|}

    Reductions that fall into warm-up take effect when it ends.

    Parameters
    ----------
    step : list of int
        Strictly increasing numbers of updates, the first at least 1.
    factor : float
        From 0 to 1. Default 1.
    base_lr, warmup_steps, warmup_begin_lr, warmup_mode
        See :class:`LRScheduler`.

    Raises
    ------
    TypeError, ValueError
        An argument has the wrong type or is out of range.

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
    r"""Multiply the rate by `factor` when a metric has stopped improving.

    .. math:: \eta = \max(\mathrm{base\_lr} \cdot \mathrm{factor}^k, \mathrm{stop\_factor\_lr})

    after :math:`k` reductions. Unlike the other schedules this one has state: :meth:`step` decides
    about reductions, and a call returns the present rate for any number of updates after warm-up.

    Parameters
    ----------
    factor : float
        From 0 to 1. Default 0.1.
    patience : int
        Steps in a row without improvement that cause a reduction, at least 1. Default 10.
    min_delta : float
        An improvement is a change for the better by more than this. Default 0.
    mode : {'min', 'max'}
        Whether lower or higher is better. Default 'min'.
    cooldown : int
        Steps after a reduction in which missing improvements do not count. Default 0.
    stop_factor_lr : float
        No reduction goes below this rate. Default 1e-8.
    base_lr, warmup_steps, warmup_begin_lr, warmup_mode
        See :class:`LRScheduler`.

    Raises
    ------
    TypeError, ValueError
        An argument has the wrong type or is out of range.

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
        cooldown: int = 0,
        stop_factor_lr: float = 1e-8,
        base_lr: float = 0.01,
        warmup_steps: int = 0,
        warmup_begin_lr: float = 0,
        warmup_mode: str = "linear",
    ) -> None:
        super().__init__(
            factor, stop_factor_lr, base_lr, warmup_steps, warmup_begin_lr, warmup_mode
        )
        self.patience = _count("patience", patience)
        self.min_delta = _number("min_delta", min_delta)
        self.mode = _choice("mode", mode, ("min", "max"))
        self.cooldown = _count("cooldown", cooldown, least=0)
        self.best: float | None = None
        self.reductions = self.bad_steps = self.cooldown_left = 0

    def step(self, metric: float) -> None:
        """Take note of the metric's new value, and reduce the rate if it is time.

        Parameters
        ----------
        metric : float
            What is watched, for example the validation loss after an epoch.

        Raises
        ------
        TypeError
            `metric` is not a number.
        ValueError
            `metric` is NaN or infinite.
        """
        metric = _number("metric", metric, least=-math.inf)
        sign = 1 if self.mode == "max" else -1
        if self.best is None or sign * (metric - self.best) > self.min_delta:
            self.best, self.bad_steps = metric, 0
        elif self.cooldown_left == 0:
            self.bad_steps += 1
        self.cooldown_left = max(self.cooldown_left - 1, 0)
        if self.bad_steps == self.patience:
            self.reductions += 1
            self.bad_steps, self.cooldown_left = 0, self.cooldown

    def _power(self, num_update: int) -> float:
        return self.reductions


class _Annealed(LRScheduler):
    """From the constructor's `base_lr` to `final_lr` at `max_update`, along a curve."""

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
        self.max_update = _count("max_update", max_update)
        self.final_lr = _number("final_lr", final_lr)
        if self.warmup_steps >= self.max_update:
            raise ValueError(
                f"warmup_steps must be less than max_update={max_update}, got {warmup_steps}"
            )

    def _rate(self, num_update: int) -> float:
        if num_update >= self.max_update:
            return self.final_lr
        progress = (num_update - self.warmup_steps) / (self.max_update - self.warmup_steps)
        return _between(self.warmup_final_lr, self.final_lr, self._share(progress))

    def _share(self, progress: float) -> float:
        raise NotImplementedError


@register
class PolyScheduler(_Annealed):
    r"""Fall from `base_lr` to `final_lr` along a power of the remaining time.

    .. math:: \eta_n = \mathrm{final\_lr} + (\mathrm{base\_lr} - \mathrm{final\_lr})
        \left(1 - x\right)^{\mathrm{pwr}}, \quad
        x = \frac{n - \mathrm{warmup\_steps}}{\mathrm{max\_update} - \mathrm{warmup\_steps}}

    Parameters
    ----------
    max_update : int
        Update from which the rate is `final_lr`, more than `warmup_steps`.
    base_lr : float
        Rate at the start. Default 0.01.
    pwr : float
        Exponent, 0 or more; 1 is a straight line. Default 2.
    final_lr : float
        Rate at the end, 0 or more. Default 0.
    warmup_steps, warmup_begin_lr, warmup_mode
        See :class:`LRScheduler`.

    Raises
    ------
    TypeError, ValueError
        An argument has the wrong type or is out of range.

    Examples
    --------
    >>> from fastopt.lr_scheduler import PolyScheduler
    >>> schedule = PolyScheduler(max_update=4, base_lr=0.4, pwr=1)
    >>> [round(schedule(n), 12) for n in range(6)]
    [0.4, 0.3, 0.2, 0.1, 0.0, 0.0]
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
        self.pwr = _number("pwr", pwr)

    def _share(self, progress: float) -> float:
        return (1 - progress) ** self.pwr


@register
class CosineScheduler(_Annealed):
    r"""Fall from `base_lr` to `final_lr` along half a cosine (Loshchilov and Hutter, [1]_).

    .. math:: \eta_n = \mathrm{final\_lr} + (\mathrm{base\_lr} - \mathrm{final\_lr})
        \frac{1 + \cos \pi x}{2}, \quad
        x = \frac{n - \mathrm{warmup\_steps}}{\mathrm{max\_update} - \mathrm{warmup\_steps}}

    Parameters
    ----------
    max_update : int
        Update from which the rate is `final_lr`, more than `warmup_steps`.
    base_lr : float
        Rate at the start. Default 0.01.
    final_lr : float
        Rate at the end, 0 or more. Default 0.
    warmup_steps, warmup_begin_lr, warmup_mode
        See :class:`LRScheduler`.

    Raises
    ------
    TypeError, ValueError
        An argument has the wrong type or is out of range.

    References
    ----------
    .. [1] SGDR: Stochastic Gradient Descent with Warm Restarts, arXiv:1608.03983, equation 5.

    Examples
    --------
    >>> from fastopt.lr_scheduler import CosineScheduler
    >>> schedule = CosineScheduler(max_update=4, base_lr=0.4)
    >>> [round(schedule(n), 3) for n in range(6)]
    [0.4, 0.341, 0.2, 0.059, 0.0, 0.0]
    """

    def _share(self, progress: float) -> float:
        return _half_cosine(progress)


@register
class CosineRestartsScheduler(LRScheduler):
    r"""Fall along half a cosine again and again (SGDR, [1]_).

    .. math:: \eta_n = \mathrm{final\_lr} + (\mathrm{base\_lr} - \mathrm{final\_lr})
        \frac{1 + \cos(\pi \, t / T_i)}{2}, \quad T_i = \mathrm{period} \cdot \mathrm{period\_mult}^i

    where :math:`t` counts the updates since restart :math:`i`; update :math:`t = T_i` is the next
    restart, at `base_lr`.

    Parameters
    ----------
    period : int
        Updates from the end of warm-up to the first restart, at least 1.
    base_lr : float
        Rate at every restart. Default 0.01.
    final_lr : float
        Rate that each period falls to, 0 or more. Default 0.
    period_mult : int
        How many times as long as the one before a period is, at least 1. Default 1.
    warmup_steps, warmup_begin_lr, warmup_mode
        See :class:`LRScheduler`.

    Raises
    ------
    TypeError, ValueError
        An argument has the wrong type or is out of range.

    References
    ----------
    .. [1] I. Loshchilov, F. Hutter, SGDR: Stochastic Gradient Descent with Warm Restarts,
       arXiv:1608.03983.

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
        self.period = _count("period", period)
        self.final_lr = _number("final_lr", final_lr)
        self.period_mult = _count("period_mult", period_mult)

    def _rate(self, num_update: int) -> float:
        since, period = num_update - self.warmup_steps, self.period
        if self.period_mult == 1:
            since %= period
        while since >= period:
            since -= period
            period *= self.period_mult
        return _between(self.warmup_final_lr, self.final_lr, _half_cosine(since / period))


@register
class OneCycleScheduler(LRScheduler):
    r"""Rise to `base_lr` and fall far below the start, both along half a cosine (1cycle, [1]_).

    The rate goes from :math:`\eta_0 = \mathrm{base\_lr} / \mathrm{div\_factor}` up to `base_lr` at
    update :math:`p = \mathrm{pct\_start} \cdot \mathrm{max\_update}`, and from there down to
    :math:`\eta_1 = \eta_0 / \mathrm{final\_div\_factor}` at `max_update`:

    .. math:: \eta_n = b + (a - b) \frac{1 + \cos \pi x}{2}, \quad (a, b, x) = \begin{cases}
        (\eta_0, \mathrm{base\_lr}, n / p) & n < p \\
        (\mathrm{base\_lr}, \eta_1, (n - p) / (\mathrm{max\_update} - p)) & n \ge p \end{cases}

    Parameters
    ----------
    max_update : int
        Update from which the rate is the lowest, at least 1.
    base_lr : float
        Highest rate. Default 0.01.
    pct_start : float
        Share of the updates in which the rate rises, from 0 to 1. Default 0.3.
    div_factor : float
        Highest rate / first rate, at least 1. Default 25.
    final_div_factor : float
        First rate / last rate, at least 1. Default 1e4.

    Raises
    ------
    TypeError, ValueError
        An argument has the wrong type or is out of range.

    References
    ----------
    .. [1] L. N. Smith, N. Topin, Super-Convergence: Very Fast Training of Neural Networks Using
       Large Learning Rates, arXiv:1708.07120; there the rate changes along straight lines.

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
        self.max_update = _count("max_update", max_update)
        self.pct_start = _number("pct_start", pct_start, most=1)
        self.div_factor = _number("div_factor", div_factor, least=1)
        self.final_div_factor = _number("final_div_factor", final_div_factor, least=1)

    def _rate(self, num_update: int) -> float:
        highest = self.warmup_final_lr
        first = highest / self.div_factor
        last = first / self.final_div_factor
        turn = self.pct_start * self.max_update
        if num_update >= self.max_update:
            return last
        if num_update < turn:
            return _between(first, highest, _half_cosine(num_update / turn))
        progress = (num_update - turn) / (self.max_update - turn)
        return _between(highest, last, _half_cosine(progress))


@register
class JoinedScheduler(LRScheduler):
    r"""Run one schedule after the other.

    .. math:: \eta_n = \mathrm{schedules}_i(n - b_i), \quad b_i \le n < b_{i+1}

    with :math:`b_0 = 0` and the `boundaries` after it: each schedule counts from 0, its own warm-up
    included, and keeps its own ``base_lr``.

    Parameters
    ----------
    schedules : list of LRScheduler
        At least one.
    boundaries : list of int
        Updates at which the second, third, ... schedule begins; strictly increasing, at least 1.

    Raises
    ------
    TypeError
        `schedules` does not hold schedules, or `boundaries` does not hold integers.
    ValueError
        There is no schedule, or `boundaries` has the wrong length or order.

    Examples
    --------
    >>> from fastopt.lr_scheduler import CosineScheduler, FactorScheduler, JoinedScheduler
    >>> constant = FactorScheduler(step=1, base_lr=0.4)
    >>> schedule = JoinedScheduler([constant, CosineScheduler(2, base_lr=0.4)], [3])
    >>> [round(schedule(n), 12) for n in range(6)]
    [0.4, 0.4, 0.4, 0.4, 0.2, 0.0]
    """

    def __init__(self, schedules: Iterable[LRScheduler], boundaries: Iterable[int]) -> None:
        self.schedules = _listed("schedules", schedules)
        for i, schedule in enumerate(self.schedules):
            if not isinstance(schedule, LRScheduler):
                raise TypeError(f"schedules[{i}] must be an LRScheduler, got {schedule!r}")
        if not self.schedules:
            raise ValueError("schedules must hold at least one schedule, got []")
        self.boundaries = _increasing("boundaries", boundaries)
        if len(self.boundaries) != len(self.schedules) - 1:
            raise ValueError(
                f"boundaries must have one entry less than the {len(self.schedules)} schedules, "
                f"got {self.boundaries}"
            )
        super().__init__(self.schedules[0].base_lr)

    def _rate(self, num_update: int) -> float:
        piece = bisect_right(self.boundaries, num_update)
        begin = self.boundaries[piece - 1] if piece else 0
        return self.schedules[piece](num_update - begin)


def _between(first: float, last: float, share: float) -> float:
    return last + (first - last) * share


def _half_cosine(progress: float) -> float:
    return (1 + math.cos(math.pi * progress)) / 2


def _number(name: str, value: Any, *, least: float = 0, most: float = math.inf) -> float:
    if not isinstance(value, Real) or isinstance(value, bool):
        raise TypeError(f"{name} must be a number, got {value!r}")
    if not (least <= value <= most and math.isfinite(value)):
        bounds = f" from {least:g} to {most:g}" if math.isfinite(most) else f" of at least {least:g}"
        raise ValueError(f"{name} must be a finite number{bounds}, got {value}")
    return float(value)


def _count(name: str, value: Any, *, least: int = 1) -> int:
    if not isinstance(value, Integral) or isinstance(value, bool):
        raise TypeError(f"{name} must be an integer, got {value!r}")
    if value < least:
        raise ValueError(f"{name} must be at least {least}, got {value}")
    return int(value)


def _choice(name: str, value: str, choices: tuple[str, ...]) -> str:
    if value not in choices:
        raise ValueError(f"{name} must be one of {', '.join(map(repr, choices))}, got {value!r}")
    return value


def _listed(name: str, values: Iterable[Any]) -> list[Any]:
    if not isinstance(values, Iterable):
        raise TypeError(f"{name} must be a list, got {values!r}")
    return list(values)


def _increasing(name: str, values: Iterable[Any]) -> list[int]:
    counts = [_count(f"{name}[{i}]", value) for i, value in enumerate(_listed(name, values))]
    if any(second <= first for first, second in pairwise(counts)):
        raise ValueError(f"{name} must be strictly increasing, got {counts}")
    return counts
