"""Steps on few float32 weights: fastopt, NumPy without temporaries, and a handwritten loop."""

import math
from itertools import count

import numpy as np
from numba import njit, prange

from fastopt.amp import LossScaler
from fastopt.bench.clock import Call
from fastopt.bench.steps import MOMENTUM
from fastopt.lr_scheduler import CosineScheduler

from .common import microseconds, ratio
from .tables import LR, Shapes, drawn, list_step

BETA1, BETA2, EPSILON = 0.9, 0.999, 1e-8
DEMO: Shapes = [(64, 128), (128,), (128, 10), (10,)]
"""Weights and biases of the demo's network."""


def guarded_step(algorithm: str, shapes: Shapes, fresh: bool) -> Call:
    """Return a step with a loss scaler, global-norm clipping and a cosine schedule."""
    rates = CosineScheduler(10**9, base_lr=LR)
    settings = {"loss_scaler": LossScaler(), "clip_global_norm": 1.0}
    return list_step(shapes, fresh, algorithm, rates, **settings)


def numpy_step(algorithm: str, shapes: Shapes, fresh: bool) -> Call:
    """Return a step in plain NumPy without temporary arrays."""
    weights, gradients = drawn(shapes, fresh)
    arrays = [(w, *(np.zeros_like(w) for _ in range(3))) for w in weights]
    counts = count(1)

    def adam() -> None:
        t = next(counts)
        rate = np.float32(LR * math.sqrt(1 - BETA2**t) / (1 - BETA1**t))
        for grad, (weight, mean, var, buffer) in zip(gradients(), arrays, strict=True):
            mean *= BETA1
            np.multiply(grad, 1 - BETA1, out=buffer)
            mean += buffer
            var *= BETA2
            np.multiply(grad, grad, out=buffer)
            buffer *= 1 - BETA2
            var += buffer
            np.sqrt(var, out=buffer)
            buffer += EPSILON
            np.divide(mean, buffer, out=buffer)
            buffer *= rate
            weight -= buffer

    def momentum() -> None:
        for grad, (weight, mom, _, buffer) in zip(gradients(), arrays, strict=True):
            mom *= MOMENTUM
            np.multiply(grad, LR, out=buffer)
            mom -= buffer
            weight += mom

    return adam if algorithm == "adam" else momentum


@njit(parallel=True, error_model="numpy", cache=True)
def _adam(weight, grad, mean, var, rate, beta1, beta2, epsilon, one):
    for i in prange(weight.size):
        mean[i] = beta1 * mean[i] + (one - beta1) * grad[i]
        var[i] = beta2 * var[i] + (one - beta2) * grad[i] * grad[i]
        weight[i] -= rate * mean[i] / (math.sqrt(var[i]) + epsilon)


def loop_step(algorithm: str, shapes: Shapes, fresh: bool) -> Call:
    """Return a step as a handwritten parallel numba loop, for one weight."""
    if algorithm != "adam" or len(shapes) > 1:
        raise NotImplementedError
    ((weight,), gradients) = drawn(shapes, fresh)
    mean, var, counts, real = np.zeros_like(weight), np.zeros_like(weight), count(1), np.float32
    (grad,) = gradients()

    def step() -> None:
        t = next(counts)
        rate = real(LR * math.sqrt(1 - BETA2**t) / (1 - BETA1**t))
        _adam(weight, grad, mean, var, rate, real(BETA1), real(BETA2), real(EPSILON), real(1))

    return step


class Few:
    """A list of small weights in one call, with the same or with new gradient arrays."""

    params = (("4 x 1,000", "demo", "20 x 1,000"), ("adam", "sgd"), ("same", "new"))
    param_names = ("weights", "optimizer", "gradients")

    def setup(self, weights, algorithm, gradients):
        sizes = {"4 x 1,000": [(1_000,)] * 4, "demo": DEMO, "20 x 1,000": [(1_000,)] * 20}
        shapes, fresh = sizes[weights], gradients == "new"
        self.step = list_step(shapes, fresh, algorithm)
        self.plain = numpy_step(algorithm, shapes, fresh)

    def track_time(self, *_):
        return microseconds(self.step)

    track_time.unit = "us"

    def track_slowdown(self, *_):
        return ratio(self.step, self.plain)

    track_slowdown.unit = "times NumPy in place"


class Guarded:
    """A list of weights with a loss scaler, global-norm clipping and a schedule."""

    def setup(self):
        arguments = "adam", [(1_000,)] * 20, True
        self.step, self.plain = guarded_step(*arguments), numpy_step(*arguments)

    def track_time(self):
        return microseconds(self.step)

    track_time.unit = "us"

    def track_slowdown(self):
        return ratio(self.step, self.plain)

    track_slowdown.unit = "times NumPy in place without them"


class One:
    """Adam on one weight, against NumPy in place and against the handwritten loop."""

    params = (10, 1_000, 100_000, 1_000_000)
    param_names = ("elements",)

    def setup(self, elements):
        arguments = "adam", [(elements,)], False
        self.step = list_step([(elements,)])
        self.plain, self.loop = numpy_step(*arguments), loop_step(*arguments)

    def track_slowdown(self, _):
        return ratio(self.step, self.plain)

    track_slowdown.unit = "times NumPy in place"

    def track_slowdown_of_loop(self, _):
        return ratio(self.step, self.loop)

    track_slowdown_of_loop.unit = "times the loop"
