"""AdamW: Adam with decoupled weight decay."""

import math
from collections.abc import Mapping
from typing import Any, ClassVar, Unpack

from fastopt.arguments import Descriptions, Flag, OrNone, Real
from fastopt.engine.hyper import corrected
from fastopt.kernels.rule import Hyper, Rule, Scalar, State, Step, rule
from fastopt.kernels.scalars import moments, rescaled
from fastopt.optimizer.families import FORMULA, MOMENTS, AdamFamily
from fastopt.optimizer.keywords import Formula, MomentArguments, Rate
from fastopt.optimizer.optimizer import register

__all__ = ["AdamW", "adamw", "adamw_of_torch"]


@rule(state=("mean", "var"), hyper=(*MOMENTS, "eta"))
def adamw(weight: Scalar, grad: Scalar, state: State, h: Hyper) -> Step:
    """Adam and decay side by side, both scaled by ``eta``."""
    mean, var = moments(rescaled(grad, h), state, h)
    step = h.lr * mean / (math.sqrt(var) + h.epsilon) + h.wd * weight
    return weight - h.eta * step, (mean, var)


@rule(state=("mean", "var"), hyper=(*MOMENTS, "eta", "shrink"))
def adamw_of_torch(weight: Scalar, grad: Scalar, state: State, h: Hyper) -> Step:
    """Decay by ``shrink``, then Adam at the rate ``eta``."""
    mean, var = moments(rescaled(grad, h), state, h)
    return h.shrink * weight - h.eta * mean / (math.sqrt(var) + h.epsilon), (mean, var)


def corrected_eta(t: Scalar, h: Hyper, carried: Any) -> None:
    """Put the correction of both moving averages' bias towards 0 into ``eta``.

    An epsilon beside the root of the corrected average is one that depends on the step.
    """
    root = math.sqrt(1 - h.beta2**t)
    h.eta = h.eta * root / (1 - h.beta1**t)
    if h.corrects_epsilon != 0:
        h.epsilon = h.epsilon * root


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

    With ``formula="torch"`` it is the formula of torch.optim.AdamW and optax, where the bias
    correction does not scale the decay, and :math:`\epsilon` is beside the corrected root:

    .. math::
        w \leftarrow (1 - \eta \lambda) w - \eta \frac{m}{1 - \beta_1^t}
            \Big/ \left( \sqrt{\frac{v}{1 - \beta_2^t}} + \epsilon \right)

    Source: Loshchilov and Hutter, "Decoupled Weight Decay Regularization", arXiv:1711.05101.

    State of a parameter: the tuple :math:`(m, v)` of arrays like the weight.

    Parameters
    ----------
    learning_rate : float or callable, optional
        Default 0.001; None keeps a scheduler's own rate.
    beta1, beta2 : float
        Decay rates of :math:`m` and :math:`v`, at least 0 and below 1. Defaults 0.9, 0.999.
    epsilon : float
        :math:`\epsilon`, at least 0. Default 1e-6.
    correct_bias : bool
        Correct the averages' bias towards 0. Default True.
    eta : float, optional
        Schedule multiplier of the paper. Default None.
    formula : str
        'mxnet' or 'torch', which has neither `eta` nor ``correct_bias=False``. Default 'mxnet'.
        Torch's own defaults are ``eps=1e-8`` and ``weight_decay=0.01``.
    **common
        Arguments of :class:`~fastopt.optimizer.Optimizer`.

    Raises
    ------
    ValueError
        An argument is NaN or out of range, or does not go with torch's formula.

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

    decoupled = True
    arguments: ClassVar[Descriptions] = {
        "correct_bias": Flag(),
        "eta": OrNone(Real()),
        "formula": FORMULA,
    }
    added: ClassVar[Mapping[str, Any]] = {"formula": "mxnet"}

    def __init__(
        self,
        learning_rate: Rate = 0.001,
        beta1: float = 0.9,
        beta2: float = 0.999,
        epsilon: float = 1e-6,
        correct_bias: bool = True,
        eta: float | None = None,
        *,
        formula: Formula = "mxnet",
        **common: Unpack[MomentArguments],
    ) -> None:
        self.correct_bias = correct_bias
        self.eta = eta
        self.formula = formula
        super().__init__(learning_rate, beta1, beta2, epsilon, **common)

    @property
    def rule(self) -> Rule:
        """The rule of the formula."""
        return adamw_of_torch if self.formula == "torch" else adamw

    def check_together(self) -> None:
        """See :meth:`Optimizer.check_together <fastopt.optimizer.Optimizer.check_together>`."""
        super().check_together()
        if self.formula == "torch" and not (self.correct_bias and self.eta is None):
            raise ValueError("formula='torch' needs correct_bias=True and eta=None")

    @corrected(
        corrected_eta,
        "corrects_epsilon",
        when=lambda self: self.eta is None and self.correct_bias,
    )
    def hyper(self, t: int, lr: float, wd: float) -> dict[str, float]:
        """See :meth:`Optimizer.hyper <fastopt.optimizer.Optimizer.hyper>`."""
        fields = super().hyper(t, lr, wd)
        fields["corrects_epsilon"] = float(self.formula == "torch")
        if self.formula == "torch":
            return {**fields, "eta": lr, "shrink": 1 - lr * wd}
        if self.eta is not None:
            return {**fields, "eta": self.eta}
        return {**fields, "lr": 1.0, "eta": lr}

    def decay(self, t: int, lr: float, wd: float) -> float:
        """See :meth:`Optimizer.decay <fastopt.optimizer.Optimizer.decay>`."""
        if self.skips():
            return 0.0
        return (lr if self.formula == "torch" else self.hyper(t, lr, wd)["eta"]) * wd

    def skips(self) -> bool:
        """See :meth:`Optimizer.skips <fastopt.optimizer.Optimizer.skips>`."""
        return not math.isfinite(self.rescale_grad) or self.rescale_grad == 0
