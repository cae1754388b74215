"""Schedules that anneal the learning rate along a curve."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import ClassVar

from fastopt.arguments import Choice, Descriptions, Integer, OrNone, Real
from fastopt.lr_scheduler.base import LRScheduler, between, register


def _half_cosine(done: float) -> float:
    """Return half a period of a cosine, which falls from 1 to 0."""
    return (1 + math.cos(math.pi * done)) / 2


class _Annealed(LRScheduler):
    """Anneal from `base_lr` to `final_lr` at `max_update`; ``_share`` is the remaining fraction."""

    arguments: ClassVar[Descriptions] = {"max_update": Integer(), "final_lr": Real(least=0)}
    keeps_base_lr = True

    max_update: int
    final_lr: float

    def check_together(self) -> None:
        """See :meth:`LRScheduler.check_together`."""
        super().check_together()
        if self.warmup_steps >= self.max_update:
            raise ValueError(
                f"warmup_steps must be less than max_update={self.max_update}, "
                f"got {self.warmup_steps}"
            )

    def _rate(self, num_update: int) -> float:
        if num_update >= self.max_update:
            return self.final_lr
        done = (num_update - self.warmup_steps) / (self.max_update - self.warmup_steps)
        return between(self.final_lr, self.warmup_final_lr, self._share(done))

    def _share(self, done: float) -> float:
        raise NotImplementedError


@register
@dataclass(eq=False, repr=False, match_args=False)
class PolyScheduler(_Annealed):
    r"""Polynomial decay from `base_lr` to `final_lr`.

    .. math:: \mathrm{final\_lr} + (\mathrm{base\_lr} - \mathrm{final\_lr}) (1-x)^\mathrm{pwr},
        \quad x = \frac{n - \mathrm{warmup\_steps}}{\mathrm{max\_update} - \mathrm{warmup\_steps}}

    Parameters
    ----------
    max_update : int, more than `warmup_steps`
        First update with the learning rate `final_lr`.
    base_lr
        See :class:`LRScheduler`.
    pwr : float, 0 or more, default 2
    final_lr : float, 0 or more, default 0
    warmup_steps, warmup_begin_lr, warmup_mode
        See :class:`LRScheduler`, also for errors.

    Examples
    --------
    >>> from fastopt.lr_scheduler import PolyScheduler
    >>> schedule = PolyScheduler(max_update=4, base_lr=0.4, pwr=2)
    >>> [round(schedule(n), 3) for n in range(6)]
    [0.4, 0.225, 0.1, 0.025, 0.0, 0.0]
    """

    arguments: ClassVar[Descriptions] = {"pwr": Real(least=0)}

    max_update: int
    base_lr: float = 0.01
    pwr: float = 2
    final_lr: float = 0
    warmup_steps: int = 0
    warmup_begin_lr: float = 0
    warmup_mode: str = "linear"

    def _share(self, done: float) -> float:
        return math.pow(1 - done, self.pwr)


@register
@dataclass(eq=False, repr=False, match_args=False)
class CosineScheduler(_Annealed):
    r"""Cosine annealing from `base_lr` to `final_lr` (arXiv:1608.03983, equation 5).

    .. math:: \mathrm{final\_lr} + (\mathrm{base\_lr} - \mathrm{final\_lr}) (1 + \cos \pi x) / 2,
        \quad x = \frac{n - \mathrm{warmup\_steps}}{\mathrm{max\_update} - \mathrm{warmup\_steps}}

    Parameters
    ----------
    max_update : int, more than `warmup_steps`
        First update with the learning rate `final_lr`.
    base_lr
        See :class:`LRScheduler`.
    final_lr : float, 0 or more, default 0
    warmup_steps, warmup_begin_lr, warmup_mode
        See :class:`LRScheduler`, also for errors.

    Examples
    --------
    >>> from fastopt.lr_scheduler import CosineScheduler
    >>> schedule = CosineScheduler(max_update=4, base_lr=0.4)
    >>> [round(schedule(n), 3) for n in range(6)]
    [0.4, 0.341, 0.2, 0.059, 0.0, 0.0]
    """

    max_update: int
    base_lr: float = 0.01
    final_lr: float = 0
    warmup_steps: int = 0
    warmup_begin_lr: float = 0
    warmup_mode: str = "linear"

    def _share(self, done: float) -> float:
        return _half_cosine(done)


COOLDOWNS: Mapping[str, Callable[[float], float]] = {
    "linear": lambda done: 1 - done,
    "cosine": _half_cosine,
    "1-sqrt": lambda done: 1 - math.sqrt(done),
}
"""Remaining fraction by the form of a cool-down."""


@register
@dataclass(eq=False, repr=False, match_args=False)
class WSDScheduler(_Annealed):
    r"""Warmup-stable-decay: `base_lr` until a cool-down to `final_lr` at the end.

    .. math:: \mathrm{final\_lr} + (\mathrm{base\_lr} - \mathrm{final\_lr}) f(x), \quad
        x = \max\left(0, 1 - \frac{\mathrm{max\_update} - n}{\mathrm{cooldown\_steps}}\right)

    with :math:`f(x) = 1 - x`, :math:`(1 + \cos \pi x) / 2` or :math:`1 - \sqrt{x}`. Until the
    cool-down the schedule does not depend on `max_update`, so a run can be continued with a larger
    one: assign ``optimizer.lr_scheduler.max_update`` after ``updater.load()``, which restores the
    schedule of the checkpoint.

    Sources: Hu et al., "MiniCPM", arXiv:2404.06395; the forms of the cool-down: Hägele et al.,
    "Scaling Laws and Compute-Optimal Training Beyond Fixed Training Durations", arXiv:2405.18392,
    where :math:`1 - \sqrt{x}` was best.

    Parameters
    ----------
    max_update : int, more than `warmup_steps`
        First update with the learning rate `final_lr`.
    cooldown_steps : int, at least 1 and at most `max_update` - `warmup_steps`
        Number of updates of the cool-down.
    base_lr
        See :class:`LRScheduler`.
    cooldown : {'linear', 'cosine', '1-sqrt'}
        Form of the cool-down. Default 'linear'.
    final_lr : float, 0 or more, default 0
    warmup_steps, warmup_begin_lr, warmup_mode
        See :class:`LRScheduler`, also for errors.

    Raises
    ------
    ValueError
        Warm-up and cool-down are together longer than `max_update`.

    Examples
    --------
    >>> from fastopt.lr_scheduler import WSDScheduler
    >>> schedule = WSDScheduler(max_update=8, cooldown_steps=4, base_lr=0.4, cooldown="1-sqrt")
    >>> [round(schedule(n), 3) for n in range(3, 10)]
    [0.4, 0.4, 0.2, 0.117, 0.054, 0.0, 0.0]
    """

    arguments: ClassVar[Descriptions] = {
        "cooldown_steps": Integer(),
        "cooldown": Choice(*COOLDOWNS),
    }

    max_update: int
    cooldown_steps: int
    base_lr: float = 0.01
    cooldown: str = "linear"
    final_lr: float = 0
    warmup_steps: int = 0
    warmup_begin_lr: float = 0
    warmup_mode: str = "linear"

    def check_together(self) -> None:
        """See :meth:`LRScheduler.check_together`."""
        super().check_together()
        if self.warmup_steps + self.cooldown_steps > self.max_update:
            raise ValueError(
                f"cooldown_steps must be at most max_update - warmup_steps = "
                f"{self.max_update - self.warmup_steps}, got {self.cooldown_steps}"
            )

    def _rate(self, num_update: int) -> float:
        if num_update <= self.max_update - self.cooldown_steps:
            return self.warmup_final_lr
        return super()._rate(num_update)

    def _share(self, done: float) -> float:
        length = (self.max_update - self.warmup_steps) / self.cooldown_steps
        return COOLDOWNS[self.cooldown](max(0.0, 1 - (1 - done) * length))


@register
@dataclass(eq=False, repr=False, match_args=False)
class InverseRootScheduler(LRScheduler):
    r"""Inverse square root of the number of updates, from `base_lr` at update `timescale`.

    .. math:: \mathrm{base\_lr} \sqrt{\mathrm{timescale} / \max(n, \mathrm{timescale})}

    With a linear warm-up of `timescale` updates and `base_lr` = ``(d * timescale) ** -0.5`` this is
    the schedule of "Attention Is All You Need" (arXiv:1706.03762, equation 3) for models of
    dimension `d`, also known as Noam; without a warm-up, ``timescale=10_000`` and ``base_lr=0.01``
    that of T5 (arXiv:1910.10683).

    Parameters
    ----------
    base_lr
        See :class:`LRScheduler`.
    timescale : int, optional
        Last update with the learning rate `base_lr`, at least 1 and at least `warmup_steps`.
        Default: `warmup_steps`, or 1 without a warm-up.
    warmup_steps, warmup_begin_lr, warmup_mode
        See :class:`LRScheduler`, also for errors.

    Examples
    --------
    >>> from fastopt.lr_scheduler import InverseRootScheduler
    >>> schedule = InverseRootScheduler(base_lr=0.4, warmup_steps=4)
    >>> [round(schedule(n), 3) for n in (0, 2, 4, 8, 16, 64)]
    [0.0, 0.2, 0.4, 0.283, 0.2, 0.1]
    """

    arguments: ClassVar[Descriptions] = {"timescale": OrNone(Integer())}

    base_lr: float = 0.01
    timescale: int | None = None
    warmup_steps: int = 0
    warmup_begin_lr: float = 0
    warmup_mode: str = "linear"

    def check_together(self) -> None:
        """See :meth:`LRScheduler.check_together`."""
        super().check_together()
        if self.timescale is not None and self.timescale < self.warmup_steps:
            raise ValueError(
                f"timescale must be at least warmup_steps={self.warmup_steps}, got {self.timescale}"
            )

    def _rate(self, num_update: int) -> float:
        scale = self.timescale or max(self.warmup_steps, 1)
        return self.base_lr * math.sqrt(scale / max(num_update, scale))


@register
@dataclass(eq=False, repr=False, match_args=False)
class CosineRestartsScheduler(LRScheduler):
    r"""Cosine annealing from `base_lr` to `final_lr` with warm restarts (SGDR).

    .. math:: \mathrm{final\_lr} + (\mathrm{base\_lr} - \mathrm{final\_lr})
        (1 + \cos(\pi t / T_i)) / 2, \quad T_i = \mathrm{period} \cdot \mathrm{period\_mult}^i

    with :math:`t < T_i` the number of updates since restart :math:`i` (arXiv:1608.03983).

    Parameters
    ----------
    period : int, at least 1
        Number of updates from the end of warm-up to the first restart.
    base_lr
        See :class:`LRScheduler`.
    final_lr : float, 0 or more, default 0
    period_mult : int, at least 1, default 1
    warmup_steps, warmup_begin_lr, warmup_mode
        See :class:`LRScheduler`, also for errors.

    Examples
    --------
    >>> from fastopt.lr_scheduler import CosineRestartsScheduler
    >>> schedule = CosineRestartsScheduler(period=2, base_lr=0.4, period_mult=2)
    >>> [round(schedule(n), 3) for n in range(7)]
    [0.4, 0.2, 0.4, 0.341, 0.2, 0.059, 0.4]
    """

    arguments: ClassVar[Descriptions] = {
        "period": Integer(),
        "final_lr": Real(least=0),
        "period_mult": Integer(),
    }
    keeps_base_lr = True

    period: int
    base_lr: float = 0.01
    final_lr: float = 0
    period_mult: int = 1
    warmup_steps: int = 0
    warmup_begin_lr: float = 0
    warmup_mode: str = "linear"

    def _rate(self, num_update: int) -> float:
        since, period = num_update - self.warmup_steps, self.period
        if self.period_mult == 1:
            since %= period
        while since >= period:
            since -= period
            period *= self.period_mult
        return between(self.final_lr, self.warmup_final_lr, _half_cosine(since / period))


@register
class OneCycleScheduler(LRScheduler):
    r"""1cycle: rise to `base_lr`, then anneal far below the initial rate (arXiv:1708.07120).

    .. math:: b + (a - b) (1 + \cos \pi x) / 2, \quad (a, b, x) = \begin{cases}
        (\eta_0, \mathrm{base\_lr}, n / p) & n < p \\
        (\mathrm{base\_lr}, \eta_1, (n - p) / (\mathrm{max\_update} - p)) & n \ge p \end{cases}

    with :math:`p` = `pct_start` * `max_update`, :math:`\eta_0` = `base_lr` / `div_factor` and
    :math:`\eta_1 = \eta_0` / `final_div_factor`. In the paper both phases are linear.

    Parameters
    ----------
    max_update : int, at least 1
        First update with the learning rate :math:`\eta_1`.
    base_lr : float, default 0.01
        Maximum learning rate; see :class:`LRScheduler`, also for errors.
    pct_start : float, from 0 to 1, default 0.3
        Fraction of the updates in which the learning rate rises.
    div_factor : float, at least 1, default 25
    final_div_factor : float, at least 1, default 1e4

    Examples
    --------
    >>> from fastopt.lr_scheduler import OneCycleScheduler
    >>> schedule = OneCycleScheduler(max_update=4, base_lr=0.5, pct_start=0.5, div_factor=5)
    >>> [round(schedule(n), 6) for n in range(6)]
    [0.1, 0.3, 0.5, 0.250005, 1e-05, 1e-05]
    """

    arguments: ClassVar[Descriptions] = {
        "max_update": Integer(),
        "pct_start": Real(least=0, most=1),
        "div_factor": Real(least=1),
        "final_div_factor": Real(least=1),
    }
    keeps_base_lr = True

    def __init__(
        self,
        max_update: int,
        base_lr: float = 0.01,
        pct_start: float = 0.3,
        div_factor: float = 25,
        final_div_factor: float = 1e4,
    ) -> None:
        super().__init__(base_lr)
        self.max_update = max_update
        self.pct_start = pct_start
        self.div_factor = div_factor
        self.final_div_factor = final_div_factor

    def _rate(self, num_update: int) -> float:
        highest = self.warmup_final_lr
        first = highest / self.div_factor
        last = first / self.final_div_factor
        turn = self.pct_start * self.max_update
        if num_update >= self.max_update:
            return last
        if num_update < turn:
            return between(highest, first, _half_cosine(num_update / turn))
        return between(last, highest, _half_cosine((num_update - turn) / (self.max_update - turn)))
