"""A rule with one number for each element and one for each row: Adam with one v for each row."""

import math

import numpy as np

import fastopt
from fastopt import optimizer
from fastopt.kernels.scalars import rescaled


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
