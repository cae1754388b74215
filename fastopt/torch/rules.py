"""Optimizers with torch's formulas where fastopt's own differ.

Torch's buffers of momentum wait while the momentum is 0, such as in a schedule, and are used again
after it: they stay in the state of the parameter, of which the rule without momentum knows nothing.

Tests: ``tests/pytorch/test_torch.py``.
"""

import math
from collections.abc import Mapping

from fastopt._engine.hyper import constant, corrected
from fastopt.arguments import FLAG, Real, arg
from fastopt.kernels.rule import Hyper, Rule, Scalar, State, Step, rule
from fastopt.kernels.scalars import COMMON, clip, decayed, moments, rescaled
from fastopt.optimizer import rmsprop
from fastopt.optimizer.adagrad import AdaDelta, adapted
from fastopt.optimizer.denominators import rectified
from fastopt.optimizer.families import MEAN_AND_VAR, MOMENTS, AdamFamily
from fastopt.optimizer.sgd import NAG, first_undamped, sgd

BUFFER = ("momentum", "one_minus_dampening", "of_mom", "of_grad")
"""Hyper-parameters of a buffer: its factor, that of what is added, and those in the step."""


def buffer(momentum: float, share: float = 1.0, nesterov: bool = False) -> dict[str, float]:
    """Return the hyper-parameters BUFFER; without momentum the buffer waits."""
    if momentum == 0:
        return dict(zip(BUFFER, (1.0, 0.0, 0.0, 1.0), strict=True))
    ahead = momentum if nesterov else 1.0
    return dict(zip(BUFFER, (momentum, share, ahead, float(nesterov)), strict=True))


@rule(state=("mom",), signed=("mom",), hyper=(*COMMON, *BUFFER))
def heavy_ball(weight: Scalar, grad: Scalar, state: State, h: Hyper) -> Step:
    """Momentum whose buffer does not include the learning rate."""
    grad = decayed(weight, grad, h)
    mom = h.momentum * state[0] + h.one_minus_dampening * grad
    return weight - h.lr * (h.of_mom * mom + h.of_grad * grad), (mom,)


class HeavyBall(NAG):
    """SGD as in torch: the momentum buffer does not include the learning rate."""

    forms = (sgd, heavy_ball)
    lazy_by_default = True
    dampening: float = arg(default=0.0, check=Real(), kw_only=True)
    nesterov: bool = arg(default=False, check=FLAG, kw_only=True)

    @property
    def base_rule(self) -> Rule:
        """See :attr:`NAG.base_rule <fastopt.optimizer.NAG>`."""
        return self.forms[self.momentum != 0]

    @corrected(first_undamped, when=lambda self: self.momentum != 0 != self.dampening)
    def hyper(self, t: int, lr: float, wd: float) -> Mapping[str, float]:
        """See :meth:`Optimizer.hyper <fastopt.optimizer.Optimizer.hyper>`."""
        return buffer(self.momentum, 1 - self.dampening, self.nesterov)


@rule(state=("n", "mean", "buffer"), hyper=(*rmsprop.FIELDS, *BUFFER))
def centered(weight: Scalar, grad: Scalar, state: State, h: Hyper) -> Step:
    """RMSProp with variances, and with momentum."""
    n, mean, mom = state
    grad = decayed(weight, grad, h)
    n, mean, var = rmsprop.variance(grad, n, mean, h)
    grad = grad / (math.sqrt(var) + h.epsilon)
    mom = h.momentum * mom + h.one_minus_dampening * grad
    step = h.of_mom * mom + h.of_grad * grad
    return clip(weight - h.lr * step, h.clip_weights), (n, mean, mom)


class RMSProp(rmsprop.RMSProp):
    """RMSProp as in torch, whose buffer also waits if it is centered."""

    @property
    def rule(self) -> Rule:
        """See :attr:`RMSProp.rule <fastopt.optimizer.RMSProp>`."""
        return centered if self.centered else super().rule

    @constant
    def hyper(self, t: int, lr: float, wd: float) -> Mapping[str, float]:
        """See :meth:`Optimizer.hyper <fastopt.optimizer.Optimizer.hyper>`."""
        fields = super().hyper(t, lr, wd)
        return {**fields, **buffer(self.gamma2)} if self.centered else fields


@rule(
    state=("acc_g", "acc_delta"),
    nonnegative=("acc_g", "acc_delta"),
    hyper=(*COMMON, "rho", "one_minus_rho", "epsilon"),
)
def adadelta_of_torch(weight: Scalar, grad: Scalar, state: State, h: Hyper) -> Step:
    """AdaDelta with a learning rate, and weight decay in the gradient."""
    delta, new = adapted(decayed(weight, grad, h), state, h)
    return weight - h.lr * delta, new


class Delta(AdaDelta):
    """AdaDelta as in torch."""

    rule = adadelta_of_torch
    decoupled = False


@rule(**MEAN_AND_VAR, hyper=(*MOMENTS, "coupled", "decoupled", "mean_scale", "rectified"))
def radam_of_torch(weight: Scalar, grad: Scalar, state: State, h: Hyper) -> Step:
    """RAdam with either kind of weight decay."""
    mean, var = moments(rescaled(grad, h) + h.coupled * weight, state, h)
    step = mean * h.mean_scale
    if h.rectified:
        step = step * (h.rectified / (math.sqrt(var) + h.epsilon))
    return weight - h.lr * (step + h.decoupled * weight), (mean, var)


class Rectified(AdamFamily):
    """RAdam as in torch: it is rectified one step later, and weight decay is in the gradient."""

    rule = radam_of_torch
    decoupled_weight_decay: bool = arg(default=False, check=FLAG, kw_only=True)

    @corrected(rectified, "var_scale", "threshold")
    def hyper(self, t: int, lr: float, wd: float) -> dict[str, float]:
        """See :meth:`Optimizer.hyper <fastopt.optimizer.Optimizer.hyper>`."""
        coupled, decoupled = (0.0, wd) if self.decoupled_weight_decay else (wd, 0.0)
        return {"threshold": 5.0, "coupled": coupled, "decoupled": decoupled}
