"""Schedule-Free optimizers: averaging of the weights instead of a learning rate schedule."""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from fastopt.arguments import Integer, OrNone, Real, TableOf, arg, kept
from fastopt.kernels.rule import Hyper, Scalar, State, scalar
from fastopt.kernels.scalars import COMMON
from fastopt.optimizer.optimizer import Array, Index, Optimizer, PerIndex, corrected
from fastopt.optimizer.rates import RateAttribute

FREE = (*COMMON, "pull", "one_minus_pull", "weight_rate", "lead_rate")
"""Hyper-parameters set by :meth:`ScheduleFreeFamily.hyper` and the base class."""


@scalar
def interpolated(weight: Scalar, step: Scalar, lead: Scalar, h: Hyper) -> State:
    """Return the weight w and the lead z - w after a step of the fast weight z."""
    moved = weight + h.pull * lead - h.weight_rate * step
    return moved, h.one_minus_pull * (lead - h.lead_rate * step)


def averaged(t: Scalar, h: Hyper, carried: Any) -> None:
    """Compute the learning rate of this step, and the averaging rate of the fast weight."""
    past = t - h.begun
    if past < h.warmup_steps:
        h.lr = h.lr * (past / h.warmup_steps)
    share = h.constant_share
    if share == 0:
        part = past**h.r * h.lr**h.weight_lr_power
        carried[0] = carried[0] + part
        share = part / carried[0] if carried[0] > 0 else 0.0
    h.pull = share
    h.one_minus_pull = 1 - share
    h.weight_rate = h.lr * (1 - h.inner * (1 - share))
    h.lead_rate = h.lr * h.inner


class ScheduleFreeFamily(Optimizer):
    """Abstract base of Schedule-Free optimizers.

    Parameters
    ----------
    learning_rate : float or callable, optional
        None uses the scheduler's ``base_lr``.
    warmup_steps : int
        Number of updates with a linearly increasing learning rate, at least 0. Default 0.
    r, weight_lr_power : float
        Exponents of the update number and of the learning rate in the averaging weights. Defaults
        0, 2.
    average_rate : float, optional
        Constant averaging rate of the fast weights. Default None.
    **common
        Arguments of :class:`~fastopt.optimizer.Optimizer`.

    Raises
    ------
    ValueError
        An argument is NaN or out of range.
    """

    learning_rate: RateAttribute = arg(default=None)
    warmup_steps: int = arg(default=0, check=Integer(least=0))
    r: float = arg(default=0.0, check=Real(least=0))
    weight_lr_power: float = arg(default=2.0, check=Real(least=0))
    average_rate: float | None = arg(default=None, check=OrNone(Real(least=1e-09, most=1)))
    positional: ClassVar[tuple[str, ...]] = (
        "learning_rate",
        "warmup_steps",
        "r",
        "weight_lr_power",
        "average_rate",
    )
    _weight_sums: PerIndex = kept(factory=PerIndex, check=TableOf(Real(least=0)))

    @property
    def inner(self) -> float:
        """Interpolation factor of the average in the weights at which gradients are computed."""
        raise NotImplementedError

    @property
    def carried(self) -> PerIndex:
        """Sums of the averaging weights so far."""
        return self._weight_sums

    def carried_slots(self, indices: Sequence[Index]) -> NDArray[np.int64]:
        """See :meth:`Optimizer.carried_slots`; 0 before the first update."""
        return self._weight_sums.slots(indices, 0.0)

    @corrected(
        averaged,
        *("begun", "warmup_steps", "constant_share", "r", "weight_lr_power", "inner"),
        carries=True,
    )
    def hyper(self, t: int, lr: float, wd: float) -> Mapping[str, float]:
        """See :meth:`Optimizer.hyper <fastopt.optimizer.Optimizer.hyper>`."""
        return {
            **dict.fromkeys(("pull", "one_minus_pull", "weight_rate", "lead_rate"), 0.0),
            "begun": float(self.begin_num_update),
            "warmup_steps": float(self.warmup_steps),
            "constant_share": self.average_rate or 0.0,
            "r": self.r,
            "weight_lr_power": self.weight_lr_power,
            "inner": self.inner,
        }

    def evaluated(self, weight: Array, state: Sequence[Array]) -> Array:
        """See :meth:`Optimizer.evaluated <fastopt.optimizer.Optimizer.evaluated>`."""
        averages: Array = weight - (1 / self.inner - 1) * state[-1]
        return averages
