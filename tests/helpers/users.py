"""Optimizers that users write."""

import numpy as np

import fastopt
from fastopt import optimizer


class InNumPy(optimizer.Optimizer):
    """Adds up gradients in NumPy, without rescale_grad, and notes the dtypes that it is given."""

    def create_state(self, index, weight):
        return np.zeros_like(weight)

    def update(self, index, weight, grad, state):
        self._update_count(index)
        self.seen = weight.dtype, grad.dtype, state.dtype
        state += grad
        weight -= self._get_lr(index) * state


class Unscaled(optimizer.Optimizer):
    """Descent by a rule that does not read rescale_grad."""

    rule = fastopt.rule(hyper=("lr",))(lambda weight, grad, state, h: (weight - h.lr * grad, ()))


def Doubled(kind):
    """A class whose rates are asked for in Python, and twice those of `kind`."""
    double = {"_get_lr": lambda self, index: 2 * kind._get_lr(self, index)}
    return type("Doubled", (kind,), double)
