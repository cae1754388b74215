"""Slow NumPy formulas in float64, from the papers, for algorithms without recorded numbers.

Each is a generator: it is sent gradients and yields weights.
"""

import numpy as np


def adabelief(w, lr=0.001, beta1=0.9, beta2=0.999, eps=1e-8, wd=0.0):
    """arXiv:2010.07468, algorithm 2, with decoupled decay."""
    m, s, t = 0.0, 0.0, 0
    while True:
        g = yield w
        t += 1
        m = beta1 * m + (1 - beta1) * g
        s = beta2 * s + (1 - beta2) * (g - m) ** 2 + eps
        m_hat, s_hat = m / (1 - beta1**t), s / (1 - beta2**t)
        w = w - lr * (m_hat / (np.sqrt(s_hat) + eps) + wd * w)


def lans(w, lr=0.001, beta1=0.9, beta2=0.999, eps=1e-6, wd=0.0):
    """arXiv:2006.13484, algorithm 2, for one block."""
    m, v, t = 0.0, 0.0, 0
    while True:
        g = yield w
        t += 1
        g = g / np.linalg.norm(g)
        m = beta1 * m + (1 - beta1) * g
        v = beta2 * v + (1 - beta2) * g**2
        root = np.sqrt(v / (1 - beta2**t)) + eps
        r = m / (1 - beta1**t) / root + wd * w
        c = g / root + wd * w
        norm = np.linalg.norm(w)
        d = beta1 * norm / np.linalg.norm(r) * r + (1 - beta1) * norm / np.linalg.norm(c) * c
        w = w - lr * d


def radam(w, lr=0.001, beta1=0.9, beta2=0.999, eps=1e-8, wd=0.0):
    """arXiv:1908.03265, algorithm 2, with decoupled decay and epsilon beside the root."""
    m, v, t = 0.0, 0.0, 0
    rho_inf = 2 / (1 - beta2) - 1
    while True:
        g = yield w
        t += 1
        m = beta1 * m + (1 - beta1) * g
        v = beta2 * v + (1 - beta2) * g**2
        m_hat = m / (1 - beta1**t)
        rho = rho_inf - 2 * t * beta2**t / (1 - beta2**t)
        step = m_hat
        if rho > 4:
            r = np.sqrt((rho - 4) * (rho - 2) * rho_inf / ((rho_inf - 4) * (rho_inf - 2) * rho))
            step = r * m_hat * np.sqrt(1 - beta2**t) / (np.sqrt(v) + eps)
        w = w - lr * (step + wd * w)


def lion(w, lr=0.0001, beta1=0.9, beta2=0.99, wd=0.0):
    """arXiv:2302.06675, algorithm 2."""
    m = 0.0
    while True:
        g = yield w
        c = beta1 * m + (1 - beta1) * g
        w = w - lr * (np.sign(c) + wd * w)
        m = beta2 * m + (1 - beta2) * g
