"""AdamW: Adam with decoupled weight decay."""

import math
from typing import Any, ClassVar

from fastopt.arguments import Descriptions, Flag, OrNone, Real
from fastopt.engine.hyper import corrected
from fastopt.kernels.rule import Hyper, Scalar, State, Step, rule
from fastopt.kernels.scalars import moments, rescaled
from fastopt.optimizer.families import MOMENTS, AdamFamily
from fastopt.optimizer.optimizer import register

__all__ = ["AdamW", "adamw"]


@rule(state=("mean", "var"), hyper=(*MOMENTS, "eta"))
def adamw(weight: Scalar, grad: Scalar, state: State, h: Hyper) -> Step:
    """Adam and decay side by side, both scaled by ``eta``."""
    mean, var = moments(rescaled(grad, h), state, h)
    step = h.lr * mean / (math.sqrt(var) + h.epsilon) + h.wd * weight
    return weight - h.eta * step, (mean, var)


def corrected_eta(t: Scalar, h: Hyper, carried: Any) -> None:
    """Put the correction of both moving averages' bias towards 0 into ``eta``."""
    h.eta = h.eta * math.sqrt(1 - h.beta2**t) / (1 - h.beta1**t)


@register
class AdamW(AdamFamily):
    r"""Adam with decoupled weight decay.

    .. math::
        h &= \mathrm{clip}(r g) \\
        m &\leftarrow \beta_1 m + (1 - \beta_1) h \\
        v &\leftarrow \beta_2 v + (1 - \beta_2) h^2 \\
        w &\leftarrow w - E \left( A \frac{m}{\sqrt{v} + \epsilon} + \lambda w \right)

    By default :math:`A = 1` and :math:`E = \eta \sqrt{1 - \beta_2^t} / (1 - \beta_1^t)`, so
    that the bias correction scales the decay too; without `correct_bias` :math:`E` is the rate.
    With `eta`, :math:`A` is the rate, :math:`E` is `eta`, and there is no bias correction. A
    ``rescale_grad`` that is 0, infinite or NaN skips the update: a loss scale that overflowed.

    Source: Loshchilov and Hutter, "Decoupled Weight Decay Regularization", arXiv:1711.05101.

    State of a parameter: the tuple :math:`(m, v)` of arrays like the weight.

    Parameters
    ----------
    learning_rate : float, optional
        Default 0.001; None keeps a scheduler's own rate.
    beta1, beta2 : float
        Decay rates of :math:`m` and :math:`v`, at least 0 and below 1. Defaults 0.9, 0.999.
    epsilon : float
        :math:`\epsilon`, at least 0. Default 1e-6.
    correct_bias : bool
        Correct the averages' bias towards 0. Default True.
    eta : float, optional
        Schedule multiplier of the paper. Default None.
    **kwargs
        Arguments of :class:`~fastopt.optimizer.Optimizer`.

    Raises
    ------
    ValueError
        An argument is NaN or out of range.

    Examples
    --------
    >>> import numpy as np
    >>> from fastopt import optimizer
    >>> updater = optimizer.get_updater(optimizer.AdamW(learning_rate=0.1, wd=0.01))
    >>> weight = np.ones(2)
    >>> updater(0, np.array([1.0, -5.0]), weight)
    >>> weight.round(4)
    array([0.8997, 1.0997])
    """

    rule = adamw
    decoupled = True
    arguments: ClassVar[Descriptions] = {"correct_bias": Flag(), "eta": OrNone(Real())}

    def __init__(
        self,
        learning_rate: float | None = 0.001,
        beta1: float = 0.9,
        beta2: float = 0.999,
        epsilon: float = 1e-6,
        correct_bias: bool = True,
        eta: float | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(learning_rate, beta1, beta2, epsilon, **kwargs)
        self.correct_bias = correct_bias
        self.eta = eta

    @corrected(corrected_eta, when=lambda self: self.eta is None and self.correct_bias)
    def hyper(self, t: int, lr: float, wd: float) -> dict[str, float]:
        """See :meth:`Optimizer.hyper <fastopt.optimizer.Optimizer.hyper>`."""
        fields = super().hyper(t, lr, wd)
        if self.eta is not None:
            return {**fields, "eta": self.eta}
        return {**fields, "lr": 1.0, "eta": lr}

    def decay(self, t: int, lr: float, wd: float) -> float:
        """See :meth:`Optimizer.decay <fastopt.optimizer.Optimizer.decay>`."""
        return 0.0 if self.skips() else self.hyper(t, lr, wd)["eta"] * wd

    def skips(self) -> bool:
        """See :meth:`Optimizer.skips <fastopt.optimizer.Optimizer.skips>`."""
        return not math.isfinite(self.rescale_grad) or self.rescale_grad == 0
