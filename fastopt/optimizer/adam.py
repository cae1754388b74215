"""Adam."""

import math
from collections.abc import Mapping
from typing import Any

from fastopt.kernels.rule import rule
from fastopt.kernels.scalars import clip
from fastopt.optimizer.base import Optimizer, number, register

__all__ = ["Adam", "adam"]


@rule(
    state=("mean", "var"),
    hyper=(
        "lr",
        "wd",
        "rescale_grad",
        "clip_gradient",
        "beta1",
        "one_minus_beta1",
        "beta2",
        "one_minus_beta2",
        "epsilon",
    ),
)
def adam(weight, grad, state, h):
    mean, var = state
    grad = clip(h.rescale_grad * grad + h.wd * weight, h.clip_gradient)
    mean = h.beta1 * mean + h.one_minus_beta1 * grad
    var = h.beta2 * var + h.one_minus_beta2 * grad * grad
    return weight - h.lr * mean / (math.sqrt(var) + h.epsilon), (mean, var)


@register
class Adam(Optimizer):
    def __init__(
        self,
        learning_rate: float | None = 0.001,
        beta1: float = 0.9,
        beta2: float = 0.999,
        epsilon: float = 1e-8,
        lazy_update: bool = True,
        **kwargs: Any,
    ) -> None:
        super().__init__(learning_rate=learning_rate, **kwargs)
        self.beta1, self.beta2 = beta1, beta2
        self.epsilon = epsilon
        self.lazy_update = lazy_update

    rule = adam

    def hyper(self, t: int, lr: float, wd: float) -> Mapping[str, float]:
        return {
            "lr": lr * math.sqrt(1 - self.beta2**t) / (1 - self.beta1**t),
            "beta1": self.beta1,
            "one_minus_beta1": 1 - self.beta1,
            "beta2": self.beta2,
            "one_minus_beta2": 1 - self.beta2,
            "epsilon": self.epsilon,
        }
