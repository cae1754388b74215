"""Schedules that anneal the learning rate along a curve."""

import math
from typing import ClassVar

from fastopt.arguments import Descriptions, Integer, Real
from fastopt.lr_scheduler.base import LRScheduler, between, half_cosine, register

__all__ = ["CosineRestartsScheduler", "CosineScheduler", "OneCycleScheduler", "PolyScheduler"]


class _Annealed(LRScheduler):
    """Anneal from `base_lr` to `final_lr` at `max_update`; ``_share`` is the remaining fraction."""

    arguments: ClassVar[Descriptions] = {"max_update": Integer(), "final_lr": Real(least=0)}
    keeps_base_lr = True

    def __init__(
        self,
        max_update: int,
        base_lr: float = 0.01,
        final_lr: float = 0,
        warmup_steps: int = 0,
        warmup_begin_lr: float = 0,
        warmup_mode: str = "linear",
    ) -> None:
        self.max_update = max_update
        self.final_lr = final_lr
        super().__init__(base_lr, warmup_steps, warmup_begin_lr, warmup_mode)

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
        self.pwr = pwr

    def _share(self, done: float) -> float:
        return math.pow(1 - done, self.pwr)


@register
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

    def _share(self, done: float) -> float:
        return half_cosine(done)


@register
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
        self.period = period
        self.final_lr = final_lr
        self.period_mult = period_mult

    def _rate(self, num_update: int) -> float:
        since, period = num_update - self.warmup_steps, self.period
        if self.period_mult == 1:
            since %= period
        while since >= period:
            since -= period
            period *= self.period_mult
        return between(self.final_lr, self.warmup_final_lr, half_cosine(since / period))


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
            return between(highest, first, half_cosine(num_update / turn))
        return between(last, highest, half_cosine((num_update - turn) / (self.max_update - turn)))
