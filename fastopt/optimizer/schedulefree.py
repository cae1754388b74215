"""Schedule-Free optimizers: averaging of the weights instead of a learning rate schedule."""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Unpack

import numpy as np
from numpy.typing import NDArray

from fastopt.arguments import Descriptions, Integer, OrNone, Real, TableOf
from fastopt.kernels.rule import Hyper, Scalar, State, scalar
from fastopt.kernels.scalars import COMMON
from fastopt.optimizer.keywords import Rate, RatedArguments
from fastopt.optimizer.optimizer import Array, Index, Optimizer, PerIndex, corrected

__all__ = ["FREE", "ScheduleFreeFamily", "interpolated"]

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

    arguments: ClassVar[Descriptions] = {
        "warmup_steps": Integer(least=0),
        "r": Real(least=0),
        "weight_lr_power": Real(least=0),
        "average_rate": OrNone(Real(least=1e-9, most=1)),
    }
    progress: ClassVar[Descriptions] = {"_weight_sums": TableOf(Real(least=0))}

    def __init__(
        self,
        learning_rate: Rate,
        warmup_steps: int = 0,
        r: float = 0.0,
        weight_lr_power: float = 2.0,
        average_rate: float | None = None,
        **common: Unpack[RatedArguments],
    ) -> None:
        super().__init__(learning_rate=learning_rate, **common)
        self.warmup_steps = warmup_steps
        self.r = r
        self.weight_lr_power = weight_lr_power
        self.average_rate = average_rate
        self._weight_sums = PerIndex()

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

    by_index: ClassVar[dict[str, type[PerIndex]]] = {
        **Optimizer.by_index,
        "_weight_sums": PerIndex,
    }
