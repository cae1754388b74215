"""Optimizers with torch's formulas where fastopt's own differ: momentum, AdaDelta and RAdam."""

import math
from collections.abc import Mapping

from fastopt._engine.hyper import constant, corrected
from fastopt.arguments import FLAG, Real, arg
from fastopt.kernels.rule import Hyper, Scalar, State, Step, rule
from fastopt.kernels.scalars import COMMON, decayed, moments, rescaled
from fastopt.optimizer.adadelta import AdaDelta
from fastopt.optimizer.families import MOMENTS, AdamFamily
from fastopt.optimizer.nag import NAG
from fastopt.optimizer.radam import rectified
from fastopt.optimizer.sgd import first_undamped, sgd

__all__ = ["Delta", "HeavyBall", "Rectified"]


@rule(
    state=("mom",),
    signed=("mom",),
    hyper=(*COMMON, "momentum", "share", "of_mom", "of_grad"),
)
def heavy_ball(weight: Scalar, grad: Scalar, state: State, h: Hyper) -> Step:
    """Momentum whose buffer does not include the learning rate."""
    grad = decayed(weight, grad, h)
    mom = h.momentum * state[0] + h.share * grad
    return weight - h.lr * (h.of_mom * mom + h.of_grad * grad), (mom,)


class HeavyBall(NAG):
    """SGD as in torch: the momentum buffer does not include the learning rate."""

    forms = (sgd, heavy_ball)
    lazy_by_default = True
    dampening: float = arg(default=0.0, check=Real(), kw_only=True)
    nesterov: bool = arg(default=False, check=FLAG, kw_only=True)

    @corrected(first_undamped, when=lambda self: self.dampening != 0)
    def hyper(self, t: int, lr: float, wd: float) -> Mapping[str, float]:
        """See :meth:`Optimizer.hyper <fastopt.optimizer.Optimizer.hyper>`."""
        return {
            "momentum": self.momentum,
            "share": 1 - self.dampening,
            "of_mom": self.momentum if self.nesterov else 1.0,
            "of_grad": float(self.nesterov),
        }


@rule(
    state=("acc_g", "acc_delta"),
    nonnegative=("acc_g", "acc_delta"),
    hyper=(*COMMON, "rho", "one_minus_rho", "epsilon"),
)
def adadelta_of_torch(weight: Scalar, grad: Scalar, state: State, h: Hyper) -> Step:
    """AdaDelta with a learning rate, and weight decay in the gradient."""
    acc_g, acc_delta = state
    grad = decayed(weight, grad, h)
    acc_g = h.rho * acc_g + h.one_minus_rho * grad * grad
    delta = math.sqrt(acc_delta + h.epsilon) / math.sqrt(acc_g + h.epsilon) * grad
    acc_delta = h.rho * acc_delta + h.one_minus_rho * delta * delta
    return weight - h.lr * delta, (acc_g, acc_delta)


class Delta(AdaDelta):
    """AdaDelta as in torch."""

    rule = adadelta_of_torch
    decoupled = False

    @constant
    def hyper(self, t: int, lr: float, wd: float) -> Mapping[str, float]:
        """See :meth:`Optimizer.hyper <fastopt.optimizer.Optimizer.hyper>`."""
        return {"rho": self.rho, "one_minus_rho": 1 - self.rho, "epsilon": self.epsilon}


@rule(
    state=("mean", "var"),
    signed=("mean",),
    nonnegative=("var",),
    hyper=(*MOMENTS, "coupled", "decoupled", "mean_scale", "rectified"),
)
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
        fields = {"mean_scale": 1.0, "rectified": 0.0, "var_scale": 1.0, "threshold": 5.0}
        return {**super().hyper(t, lr, wd), **fields, "coupled": coupled, "decoupled": decoupled}
