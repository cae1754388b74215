"""Loops of linear regression in compiled code: fastopt's functions, Adam by hand, and Python."""

import numpy as np
from numba import njit

import fastopt

from .common import ratio

STEPS = 10_000

ADAM = fastopt.Adam(lr=0.01, formula="torch")
FUNCTIONS = fastopt.jit_functions(ADAM)


@njit
def compiled(x, y, weight):
    """Train with the functions of an optimizer."""
    state = FUNCTIONS.init(weight)
    for _ in range(STEPS):
        FUNCTIONS.update(x.T @ (x @ weight - y) / np.float32(len(y)), weight, state)


@njit
def by_hand(x, y, weight):
    """Train with Adam written by hand."""
    mean, var, lr, eps = np.zeros_like(weight), np.zeros_like(weight), np.float32(0.01), 1e-8
    for t in range(1, STEPS + 1):
        grad = x.T @ (x @ weight - y) / np.float32(len(y))
        first, second = np.float32(1 - 0.9**t), np.float32(1 - 0.999**t)
        for i in range(weight.size):
            mean[i] = np.float32(0.9) * mean[i] + np.float32(0.1) * grad[i]
            var[i] = np.float32(0.999) * var[i] + np.float32(0.001) * grad[i] * grad[i]
            weight[i] -= lr * (mean[i] / first) / (np.sqrt(var[i] / second) + np.float32(eps))


class InsideNumba:
    unit = "ratio"

    def setup(self):
        rng = np.random.default_rng(0)
        x, y = (rng.normal(size=shape).astype(np.float32) for shape in ((64, 20), 64))
        weight = np.zeros(20, np.float32)

        def python():
            updater = fastopt.Updater(ADAM)
            for _ in range(STEPS):
                updater("w", x.T @ (x @ weight - y) / np.float32(len(y)), weight)

        self.loop = lambda: compiled(x, y, weight)
        self.hand, self.python = lambda: by_hand(x, y, weight), python
        self.loop()  # compile both, which is not measured
        self.hand()

    def track_python_loop(self):
        return ratio(self.python, self.loop)

    def track_loop_by_hand(self):
        return ratio(self.hand, self.loop)
