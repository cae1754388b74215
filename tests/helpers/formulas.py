"""Formulas of optimizers in plain NumPy, as the docstrings of :mod:`fastopt.optimizer` give them.

Decoupled weight decay is included; clipping, rescaling and coupled decay are omitted, as they are
off by default.
"""

import math
from functools import partial

import numpy as np

__all__ = ["FORMULAS"]

FORMULAS = {}
"""Functions that create ``update(index, grad, weight)`` from an optimizer, by its name."""


def zeros(slots):
    """Return a function that creates `slots` state arrays of the weight's shape."""
    return lambda weight: tuple(np.zeros_like(weight) for _ in range(slots))


def formula(name, state):
    """Register ``step(opt, t, grad, weight, *state)`` under an optimizer's name."""

    def enter(step):
        FORMULAS[name] = partial(_update, step, state)
        return step

    return enter


def _update(step, state, opt):
    kept, counts = {}, {}

    def update(index, grad, weight):
        if index not in kept:
            kept[index] = state(weight)
        t = counts[index] = counts.get(index, 0) + 1
        step(opt, t, grad, weight, *kept[index])

    return update


def average(old, beta, new):
    """Update a moving average in place."""
    old *= beta
    old += (1 - beta) * new


def decayed(opt, step, weight):
    """Add decoupled weight decay to a step."""
    return step + opt.wd * weight if opt.wd else step


def _averages(opt, t, grad, mean, var):
    """Return bias-corrected moving averages of the gradient and of its square."""
    average(mean, opt.beta1, grad)
    average(var, opt.beta2, grad * grad)
    return mean / (1 - opt.beta1**t), var / (1 - opt.beta2**t)


@formula("sgd", zeros(1))
@formula("lbsgd", zeros(1))  # batch_scale=1: no accumulation and no warm-up
def _sgd(opt, t, grad, weight, mom):
    mom *= opt.momentum
    mom -= opt.learning_rate * grad
    weight += mom


@formula("nag", zeros(1))
def _nag(opt, t, grad, weight, mom):
    mom *= opt.momentum
    mom += grad
    weight -= opt.learning_rate * (grad + opt.momentum * mom)


@formula("signum", zeros(1))
def _signum(opt, t, grad, weight, mom):
    average(mom, opt.momentum, grad)
    weight -= opt.learning_rate * np.sign(mom)


@formula("lion", zeros(1))
def _lion(opt, t, grad, weight, mom):
    step = np.sign(opt.beta1 * mom + (1 - opt.beta1) * grad)
    weight -= opt.learning_rate * decayed(opt, step, weight)
    average(mom, opt.beta2, grad)


@formula("dcasgd", lambda weight: (np.zeros_like(weight), weight.copy()))
def _dcasgd(opt, t, grad, weight, mom, previous):
    mom *= opt.momentum
    mom -= opt.learning_rate * (grad + opt.lamda * grad * grad * (weight - previous))
    previous[...] = weight
    weight += mom


@formula("lars", zeros(1))
def _lars(opt, t, grad, weight, mom):
    trust = opt.eta * np.linalg.norm(weight) / (np.linalg.norm(grad) + opt.eps)
    mom *= opt.momentum
    mom -= opt.learning_rate * trust * grad
    weight += mom


@formula("adagrad", zeros(1))
def _adagrad(opt, t, grad, weight, history):
    history += grad * grad
    weight -= opt.learning_rate * grad / np.sqrt(history + opt.float_stable_eps)


@formula("groupadagrad", lambda weight: (np.zeros_like(weight[:, :1]),))
def _groupadagrad(opt, t, grad, weight, history):
    history += (grad * grad).mean(axis=1, keepdims=True)
    weight -= opt.learning_rate * grad / np.sqrt(history + opt.float_stable_eps)


@formula("adadelta", zeros(2))
def _adadelta(opt, t, grad, weight, acc_grad, acc_delta):
    average(acc_grad, opt.rho, grad * grad)
    delta = np.sqrt((acc_delta + opt.epsilon) / (acc_grad + opt.epsilon)) * grad
    average(acc_delta, opt.rho, delta * delta)
    weight -= delta


@formula("rmsprop", zeros(2))
def _rmsprop(opt, t, grad, weight, square, delta):
    average(square, opt.gamma1, grad * grad)
    delta *= opt.momentum
    delta -= opt.learning_rate * grad / np.sqrt(square + opt.epsilon)
    weight += delta


@formula("ftrl", zeros(2))
def _ftrl(opt, t, grad, weight, z, n):
    root = np.sqrt(n)
    n += grad * grad
    new_root = np.sqrt(n)
    z += grad - (new_root - root) / opt.learning_rate * weight
    excess = np.clip(z, -opt.lamda1, opt.lamda1) - z
    weight[...] = excess * opt.learning_rate / (opt.beta + new_root)


@formula("ftml", zeros(3))
def _ftml(opt, t, grad, weight, d, var, z):
    average(var, opt.beta2, grad * grad)
    leader = np.sqrt(var / (1 - opt.beta2**t)) + opt.epsilon
    leader *= (1 - opt.beta1**t) / opt.learning_rate
    average(z, opt.beta1, grad)
    z -= (leader - opt.beta1 * d) * weight
    d[...] = leader
    np.divide(-z, leader, out=weight)


@formula("adamax", zeros(2))
def _adamax(opt, t, grad, weight, mean, norm):
    average(mean, opt.beta1, grad)
    norm *= opt.beta2
    np.maximum(norm, abs(grad) + opt.epsilon, out=norm)
    weight -= opt.learning_rate / (1 - opt.beta1**t) * mean / norm


@formula("nadam", lambda weight: (*zeros(2)(weight), np.ones(1)))
def _nadam(opt, t, grad, weight, mean, var, product):
    now, ahead = (opt.beta1 * (1 - 0.5 * 0.96 ** (k * opt.schedule_decay)) for k in (t, t + 1))
    product *= now
    past = float(product[0])
    average(mean, opt.beta1, grad)
    average(var, opt.beta2, grad * grad)
    step = (1 - now) / (1 - past) * grad + ahead / (1 - past * ahead) * mean
    weight -= opt.learning_rate * step / (np.sqrt(var / (1 - opt.beta2**t)) + opt.epsilon)


@formula("adam", zeros(2))
@formula("adamw", zeros(2))
def _adamw(opt, t, grad, weight, mean, var):
    average(mean, opt.beta1, grad)
    average(var, opt.beta2, grad * grad)
    rate = opt.learning_rate * math.sqrt(1 - opt.beta2**t) / (1 - opt.beta1**t)
    weight -= rate * decayed(opt, mean / (np.sqrt(var) + opt.epsilon), weight)


@formula("adabelief", zeros(2))
def _adabelief(opt, t, grad, weight, mean, var):
    average(mean, opt.beta1, grad)
    average(var, opt.beta2, (grad - mean) ** 2)
    var += opt.epsilon
    root = np.sqrt(var / (1 - opt.beta2**t)) + opt.epsilon
    step = mean / (1 - opt.beta1**t) / root
    weight -= opt.learning_rate * decayed(opt, step, weight)


@formula("radam", zeros(2))
def _radam(opt, t, grad, weight, mean, var):
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
def _lamb(opt, t, grad, weight, mean, var):
    step, square = _averages(opt, t, grad, mean, var)
    step /= np.sqrt(square) + opt.epsilon
    weight -= opt.learning_rate * np.linalg.norm(weight) / np.linalg.norm(step) * step


@formula("lans", zeros(2))
def _lans(opt, t, grad, weight, mean, var):
    grad = grad / np.linalg.norm(grad)
    along, square = _averages(opt, t, grad, mean, var)
    root = np.sqrt(square) + opt.epsilon
    norm = opt.learning_rate * np.linalg.norm(weight)
    steps = [decayed(opt, each / root, weight) for each in (along, grad)]
    for step, share in zip(steps, (opt.beta1, 1 - opt.beta1), strict=True):
        weight -= norm * share / np.linalg.norm(step) * step


@formula("test", zeros(1))
def _test(opt, t, grad, weight, copy):
    weight += grad
    copy[...] = weight
