"""Slow NumPy formulas in float64, from the papers, for algorithms without recorded numbers.

Each is a generator: it is sent gradients and yields weights.
"""

import math

import numpy as np


def adam(
    w, lr, wd, kind="adam", decoupled=False, formula="torch", amsgrad=False, correction="next",
    beta1=0.9, beta2=0.999, eps=1e-8,
):  # fmt: skip
    """arXiv:1412.6980 and 1904.09237 with the bias correction of torch or MXNet, in any form.

    `kind` "nadam" is Dozat 2016 for one parameter, with a schedule of the momentum; "nadamw" is
    optax.nadamw, and the baseline of AlgoPerf with the present correction.
    """
    m, v, peak, t, product = 0.0, 0.0, 0.0, 0, 1.0
    while True:
        g = yield w
        t += 1
        g = g if decoupled else g + wd * w
        m = beta1 * m + (1 - beta1) * g
        v = beta2 * v + (1 - beta2) * g**2
        peak = np.maximum(peak, v) if amsgrad else v
        decay, root = wd * decoupled, np.sqrt(peak / (1 - beta2**t))
        if kind == "nadam":
            now, ahead = (beta1 * (1 - 0.5 * 0.96 ** (n * 0.004)) for n in (t, t + 1))
            product *= now
            u = ahead * m / (1 - product * ahead) + (1 - now) * g / (1 - product)
        elif kind == "nadamw":
            last = t + (correction == "next")
            u = beta1 * m / (1 - beta1**last) + (1 - beta1) * g / (1 - beta1**t)
        elif formula == "torch":
            u = m / (1 - beta1**t)
        else:
            rate = np.sqrt(1 - beta2**t) / (1 - beta1**t)
            u, root, decay = rate * m, np.sqrt(peak), rate * decay
        u = u / (root + eps)
        w = w - lr * decay * w - lr * u


def adamatan2(w, lr, wd, a, b, beta1=0.9, beta2=0.999):
    """arXiv:2407.05872, with decoupled decay."""
    m, v, t = 0.0, 0.0, 0
    while True:
        g = yield w
        t += 1
        m = beta1 * m + (1 - beta1) * g
        v = beta2 * v + (1 - beta2) * g**2
        u = a * np.arctan2(m / (1 - beta1**t), b * np.sqrt(v / (1 - beta2**t)))
        w = w - lr * (u + wd * w)


def stablespam(w, lr, wd, reset_interval, beta1=0.9, beta2=0.999, eps=1e-8):
    """arXiv:2502.17055, algorithm 1, for one layer."""
    gamma1, gamma2, gamma3 = 0.7, 0.9, 0.999
    m, v, peak, length, square, t, since = 0.0, 0.0, 0.0, 0.0, 0.0, 0, 0
    while True:
        g = yield w
        t, since = t + 1, since + 1
        largest = np.abs(g).max()
        peak = gamma3 * peak + (1 - gamma3) * largest
        bound = peak / (1 - gamma3**t)
        g = np.where(np.abs(g) > bound, g / largest * bound, g)
        norm = np.linalg.norm(g)
        length = gamma1 * length + (1 - gamma1) * norm
        square = gamma2 * square + (1 - gamma2) * norm**2
        g = g / norm * (length / (1 - gamma1**t)) / (np.sqrt(square / (1 - gamma2**t)) + eps)
        if t % reset_interval == 0:
            m, v, since = 0.0, 0.0, 1
        m = beta1 * m + (1 - beta1) * g
        v = beta2 * v + (1 - beta2) * g**2
        u = m / (1 - beta1**since) / (np.sqrt(v / (1 - beta2**since)) + eps)
        w = w - lr * (u + wd * w)


def adabelief(w, lr, wd, beta1=0.9, beta2=0.999, eps=1e-8):
    """arXiv:2010.07468, algorithm 2, with decoupled decay."""
    m, v, t = 0.0, 0.0, 0
    while True:
        g = yield w
        t += 1
        m = beta1 * m + (1 - beta1) * g
        v = beta2 * v + (1 - beta2) * (g - m) ** 2 + eps
        u = m / (1 - beta1**t) / (np.sqrt(v / (1 - beta2**t)) + eps)
        w = w - lr * (u + wd * w)


def lans(w, lr, wd, beta1=0.9, beta2=0.999, eps=1e-6):
    """arXiv:2006.13484, algorithm 2, for one layer."""
    m, v, t = 0.0, 0.0, 0
    while True:
        g = yield w
        t += 1
        g = g / np.linalg.norm(g)
        m = beta1 * m + (1 - beta1) * g
        v = beta2 * v + (1 - beta2) * g**2
        root, norm = np.sqrt(v / (1 - beta2**t)) + eps, np.linalg.norm(w)
        both = [each / root + wd * w for each in (m / (1 - beta1**t), g)]
        along, across = (norm / np.linalg.norm(each) * each for each in both)
        w = w - lr * (beta1 * along + (1 - beta1) * across)


def lion(w, lr, wd, beta1=0.9, beta2=0.99):
    """arXiv:2302.06675, algorithm 2."""
    m = 0.0
    while True:
        g = yield w
        w = w - lr * (np.sign(beta1 * m + (1 - beta1) * g) + wd * w)
        m = beta2 * m + (1 - beta2) * g


def radam(w, lr, wd, beta1=0.9, beta2=0.999, eps=1e-8, threshold=4):
    """arXiv:1908.03265, algorithm 2, with decoupled decay; epsilon is added before correction."""
    m, v, t, limit = 0.0, 0.0, 0, 2 / (1 - beta2) - 1
    while True:
        g = yield w
        t += 1
        m = beta1 * m + (1 - beta1) * g
        v = beta2 * v + (1 - beta2) * g**2
        u, length = m / (1 - beta1**t), limit - 2 * t * beta2**t / (1 - beta2**t)
        if length > threshold:
            part = (length - 4) * (length - 2) * limit / ((limit - 4) * (limit - 2) * length)
            u = u * math.sqrt(part * (1 - beta2**t)) / (np.sqrt(v) + eps)
        w = w - lr * (u + wd * w)
