"""Formulas of optimizers in plain NumPy: the baseline of benchmarks and demos, the oracle of tests.

Decoupled weight decay is included; clipping, rescaling and coupled decay are omitted, as they are
off by default. The formulas are given in the docstrings of :mod:`fastopt.optimizer`.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fastopt import optimizer

Array = NDArray[Any]
Update = Callable[[int, Array, Array], None]
Make = Callable[[Array], tuple[Array, ...]]
Formula = Callable[..., None]


def numpy_sgd(opt: optimizer.SGD) -> Update:
    """Return an SGD update in plain NumPy, with or without momentum."""
    lr, momentum = opt.learning_rate, opt.momentum
    moments: dict[int, Array] = {}

    def update(index: int, grad: Array, weight: Array) -> None:
        if momentum == 0:
            weight -= lr * grad
            return
        if index not in moments:
            moments[index] = np.zeros_like(weight)
        mom = moments[index]
        mom *= momentum
        mom -= lr * grad
        weight += mom

    return update


def numpy_adam(opt: optimizer.Adam) -> Update:
    """Return an Adam update in plain NumPy."""
    lr, beta1, beta2, epsilon = opt.learning_rate, opt.beta1, opt.beta2, opt.epsilon
    moments: dict[int, tuple[Array, Array]] = {}
    counts: dict[int, int] = {}

    def update(index: int, grad: Array, weight: Array) -> None:
        if index not in moments:
            moments[index] = np.zeros_like(weight), np.zeros_like(weight)
        t = counts[index] = counts.get(index, 0) + 1
        mean, var = moments[index]
        mean *= beta1
        mean += (1 - beta1) * grad
        var *= beta2
        var += (1 - beta2) * grad * grad
        rate = lr * math.sqrt(1 - beta2**t) / (1 - beta1**t)
        weight -= rate * mean / (np.sqrt(var) + epsilon)

    return update


def with_masters(update: Update) -> Update:
    """Apply an update to float32 masters of half-precision weights, with casts around it."""
    masters: dict[int, Array] = {}

    def cast(index: int, grad: Array, weight: Array) -> None:
        if index not in masters:
            masters[index] = weight.astype(np.float32)
        update(index, grad.astype(np.float32), masters[index])
        weight[...] = masters[index]

    return cast


FORMULAS: dict[str, Callable[[Any], Update]] = {
    "adam": numpy_adam,
    "sgd": numpy_sgd,
    "lbsgd": numpy_sgd,  # batch_scale=1: no accumulation and no warm-up
}
"""Functions that create an update from an optimizer, by the optimizer's name."""

UPDATES: dict[str, Callable[[Any], Update]] = {
    "sgd": numpy_sgd,
    "ccsgd": numpy_sgd,
    "adam": numpy_adam,
}
"""Those that the demos compare with."""


def zeros(slots: int) -> Make:
    """Return a function that creates `slots` state arrays of the weight's shape."""
    return lambda weight: tuple(np.zeros_like(weight) for _ in range(slots))


def formula(name: str, state: Make) -> Callable[[Formula], Formula]:
    """Register ``step(opt, t, grad, weight, *state)`` under an optimizer's name."""

    def enter(step: Formula) -> Formula:
        FORMULAS[name] = partial(_update, step, state)
        return step

    return enter


def _update(step: Formula, state: Make, opt: Any) -> Update:
    kept: dict[int, tuple[Array, ...]] = {}
    counts: dict[int, int] = {}

    def update(index: int, grad: Array, weight: Array) -> None:
        if index not in kept:
            kept[index] = state(weight)
        t = counts[index] = counts.get(index, 0) + 1
        step(opt, t, grad, weight, *kept[index])

    return update


def average(old: Array, beta: float, new: Array) -> None:
    """Update a moving average in place."""
    old *= beta
    old += (1 - beta) * new


def decayed(opt: Any, step: Array, weight: Array) -> Array:
    """Add decoupled weight decay to a step."""
    return step + opt.wd * weight if opt.wd else step


def _averages(opt: Any, t: int, grad: Array, mean: Array, var: Array) -> tuple[Array, Array]:
    """Return bias-corrected moving averages of the gradient and of its square."""
    average(mean, opt.beta1, grad)
    average(var, opt.beta2, grad * grad)
    return mean / (1 - opt.beta1**t), var / (1 - opt.beta2**t)


@formula("nag", zeros(1))
def _nag(opt: Any, t: int, grad: Array, weight: Array, mom: Array) -> None:
    mom *= opt.momentum
    mom += grad
    weight -= opt.learning_rate * (grad + opt.momentum * mom)


@formula("signum", zeros(1))
def _signum(opt: Any, t: int, grad: Array, weight: Array, mom: Array) -> None:
    average(mom, opt.momentum, grad)
    weight -= opt.learning_rate * np.sign(mom)


@formula("lion", zeros(1))
def _lion(opt: Any, t: int, grad: Array, weight: Array, mom: Array) -> None:
    step = np.sign(opt.beta1 * mom + (1 - opt.beta1) * grad)
    weight -= opt.learning_rate * decayed(opt, step, weight)
    average(mom, opt.beta2, grad)


@formula("dcasgd", lambda weight: (np.zeros_like(weight), weight.copy()))
def _dcasgd(opt: Any, t: int, grad: Array, weight: Array, mom: Array, previous: Array) -> None:
    mom *= opt.momentum
    mom -= opt.learning_rate * (grad + opt.lamda * grad * grad * (weight - previous))
    previous[...] = weight
    weight += mom


@formula("lars", zeros(1))
def _lars(opt: Any, t: int, grad: Array, weight: Array, mom: Array) -> None:
    trust = opt.eta * np.linalg.norm(weight) / (np.linalg.norm(grad) + opt.eps)
    mom *= opt.momentum
    mom -= opt.learning_rate * trust * grad
    weight += mom


@formula("adagrad", zeros(1))
def _adagrad(opt: Any, t: int, grad: Array, weight: Array, history: Array) -> None:
    history += grad * grad
    weight -= opt.learning_rate * grad / np.sqrt(history + opt.float_stable_eps)


@formula("groupadagrad", lambda weight: (np.zeros_like(weight[:, :1]),))
def _groupadagrad(opt: Any, t: int, grad: Array, weight: Array, history: Array) -> None:
    history += (grad * grad).mean(axis=1, keepdims=True)
    weight -= opt.learning_rate * grad / np.sqrt(history + opt.float_stable_eps)


@formula("adadelta", zeros(2))
def _adadelta(
    opt: Any, t: int, grad: Array, weight: Array, acc_grad: Array, acc_delta: Array
) -> None:
    average(acc_grad, opt.rho, grad * grad)
    delta = np.sqrt((acc_delta + opt.epsilon) / (acc_grad + opt.epsilon)) * grad
    average(acc_delta, opt.rho, delta * delta)
    weight -= delta


@formula("rmsprop", zeros(2))
def _rmsprop(opt: Any, t: int, grad: Array, weight: Array, square: Array, delta: Array) -> None:
    average(square, opt.gamma1, grad * grad)
    delta *= opt.momentum
    delta -= opt.learning_rate * grad / np.sqrt(square + opt.epsilon)
    weight += delta


@formula("ftrl", zeros(2))
def _ftrl(opt: Any, t: int, grad: Array, weight: Array, z: Array, n: Array) -> None:
    root = np.sqrt(n)
    n += grad * grad
    new_root = np.sqrt(n)
    z += grad - (new_root - root) / opt.learning_rate * weight
    excess = np.clip(z, -opt.lamda1, opt.lamda1) - z
    weight[...] = excess * opt.learning_rate / (opt.beta + new_root)


@formula("ftml", zeros(3))
def _ftml(opt: Any, t: int, grad: Array, weight: Array, d: Array, var: Array, z: Array) -> None:
    average(var, opt.beta2, grad * grad)
    leader = np.sqrt(var / (1 - opt.beta2**t)) + opt.epsilon
    leader *= (1 - opt.beta1**t) / opt.learning_rate
    average(z, opt.beta1, grad)
    z -= (leader - opt.beta1 * d) * weight
    d[...] = leader
    np.divide(-z, leader, out=weight)


@formula("adamax", zeros(2))
def _adamax(opt: Any, t: int, grad: Array, weight: Array, mean: Array, norm: Array) -> None:
    average(mean, opt.beta1, grad)
    norm *= opt.beta2
    np.maximum(norm, abs(grad), out=norm)
    weight -= opt.learning_rate / (1 - opt.beta1**t) * mean / norm


@formula("nadam", lambda weight: (*zeros(2)(weight), np.ones(1)))
def _nadam(
    opt: Any, t: int, grad: Array, weight: Array, mean: Array, var: Array, product: Array
) -> None:
    now, ahead = (opt.beta1 * (1 - 0.5 * 0.96 ** (k * opt.schedule_decay)) for k in (t, t + 1))
    product *= now
    past = float(product[0])
    average(mean, opt.beta1, grad)
    average(var, opt.beta2, grad * grad)
    step = (1 - now) / (1 - past) * grad + ahead / (1 - past * ahead) * mean
    weight -= opt.learning_rate * step / (np.sqrt(var / (1 - opt.beta2**t)) + opt.epsilon)


@formula("adamw", zeros(2))
def _adamw(opt: Any, t: int, grad: Array, weight: Array, mean: Array, var: Array) -> None:
    average(mean, opt.beta1, grad)
    average(var, opt.beta2, grad * grad)
    rate = opt.learning_rate * math.sqrt(1 - opt.beta2**t) / (1 - opt.beta1**t)
    weight -= rate * decayed(opt, mean / (np.sqrt(var) + opt.epsilon), weight)


@formula("adabelief", zeros(2))
def _adabelief(opt: Any, t: int, grad: Array, weight: Array, mean: Array, var: Array) -> None:
    average(mean, opt.beta1, grad)
    average(var, opt.beta2, (grad - mean) ** 2)
    var += opt.epsilon
    root = np.sqrt(var / (1 - opt.beta2**t)) + opt.epsilon
    step = mean / (1 - opt.beta1**t) / root
    weight -= opt.learning_rate * decayed(opt, step, weight)


@formula("radam", zeros(2))
def _radam(opt: Any, t: int, grad: Array, weight: Array, mean: Array, var: Array) -> None:
    step, square = _averages(opt, t, grad, mean, var)
    limit = 2 / (1 - opt.beta2) - 1
    length = limit - 2 * t * opt.beta2**t / (1 - opt.beta2**t)
    if length > 4:
        grown = (length - 4) * (length - 2) / length
        rectified = math.sqrt(grown * limit / ((limit - 4) * (limit - 2)))
        # Epsilon is added to the root of the average before bias correction.
        step *= rectified / (np.sqrt(square) + opt.epsilon / math.sqrt(1 - opt.beta2**t))
    weight -= opt.learning_rate * decayed(opt, step, weight)


@formula("lamb", zeros(2))
def _lamb(opt: Any, t: int, grad: Array, weight: Array, mean: Array, var: Array) -> None:
    step, square = _averages(opt, t, grad, mean, var)
    step /= np.sqrt(square) + opt.epsilon
    weight -= opt.learning_rate * np.linalg.norm(weight) / np.linalg.norm(step) * step


@formula("lans", zeros(2))
def _lans(opt: Any, t: int, grad: Array, weight: Array, mean: Array, var: Array) -> None:
    grad = grad / np.linalg.norm(grad)
    along, square = _averages(opt, t, grad, mean, var)
    root = np.sqrt(square) + opt.epsilon
    norm = opt.learning_rate * np.linalg.norm(weight)
    steps = [decayed(opt, each / root, weight) for each in (along, grad)]
    for step, share in zip(steps, (opt.beta1, 1 - opt.beta1), strict=True):
        weight -= norm * share / np.linalg.norm(step) * step


@formula("test", zeros(1))
def _test(opt: Any, t: int, grad: Array, weight: Array, copy: Array) -> None:
    weight += grad
    copy[...] = weight


def _sgld(opt: Any) -> Update:
    rng, rate = np.random.default_rng(0), opt.learning_rate

    def update(index: int, grad: Array, weight: Array) -> None:
        weight -= rate / 2 * grad
        weight += math.sqrt(rate) * rng.standard_normal(weight.shape, np.float32)

    return update


FORMULAS["sgld"] = _sgld
