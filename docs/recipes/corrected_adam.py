"""Adam as torch, Keras, optax, autograd and mynn have it."""

import math

from fastopt import optimizer


def long_formula(t, h, carried):
    """What depends on the step: compiled, like a rule."""
    h.epsilon *= math.sqrt(1 - h.beta2**t)
    h.lr *= math.sqrt(1 - h.beta2**t) / (1 - h.beta1**t)


class CorrectedAdam(optimizer.Adam):
    """Adam with epsilon beside the root of the corrected average of squares."""

    @optimizer.corrected(long_formula)
    def hyper(self, t, lr, wd):
        beta1, beta2 = self.beta1, self.beta2
        return {
            "lr": lr,
            "beta1": beta1,
            "one_minus_beta1": 1 - beta1,
            "beta2": beta2,
            "one_minus_beta2": 1 - beta2,
            "epsilon": self.epsilon,
        }
