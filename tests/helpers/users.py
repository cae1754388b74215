"""Optimizers that users write."""

import math

import numpy as np

import fastopt
from fastopt import optimizer
from fastopt.kernels.scalars import rescaled


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


def square(grad, h):
    grad = rescaled(grad, h)
    return grad * grad


@fastopt.rule(
    state=("mean", "var"),
    row_state=("var",),
    row=square,
    hyper=("lr", "rescale_grad", "clip_gradient", "beta1", "fresh1", "beta2", "fresh2", "epsilon"),
)
def row_adam(weight, grad, state, h, square):
    mean = h.beta1 * state[0] + h.fresh1 * rescaled(grad, h)
    var = h.beta2 * state[1] + h.fresh2 * square
    return weight - h.lr * mean / (math.sqrt(var) + h.epsilon), (mean, var)


class RowAdam(optimizer.Optimizer):
    """Adam with one v for each row."""

    rule = row_adam

    @optimizer.constant
    def hyper(self, t, lr, wd):
        fields = {"beta1": 0.9, "fresh1": 0.1, "beta2": 0.99, "fresh2": 0.01}
        return {**fields, "epsilon": 1e-8}


def row_adam_formula(weight, grad, mean, var, lr=0.1):
    """Update float64 arrays in place; `var` has shape (rows, 1)."""
    mean += 0.1 * (grad - mean)
    var += 0.01 * ((grad * grad).mean(axis=1, keepdims=True) - var)
    weight -= lr * mean / (np.sqrt(var) + 1e-8)
