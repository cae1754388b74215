"""The guide to optimizers: papers written from it compute what the papers say.

Those that the library has too, NorMuon and Adam-mini, are compared with it on the page itself.
"""

import numpy as np
import pytest

from fastopt import optimizer
from helpers.pages import blocks
from helpers.paths import ROOT

PAGE = ROOT / "docs" / "add-an-optimizer.md"
PAIRS = np.random.default_rng(0).normal(size=(7, 2, 5))


@pytest.fixture(scope="module")
def written():
    """The namespace after the blocks of the page that define these optimizers."""
    namespace = {"__name__": "__main__"}
    needed = ("import fastopt", "class SPAM", "class ExactMARS", "def corrected_rate")
    for line, code in blocks(PAGE, "python"):
        if any(part in code for part in needed) and not code.startswith('"""'):
            exec(compile("\n" * line + code, str(PAGE), "exec"), namespace)
    return namespace


@pytest.mark.further
def test_mars_with_both_gradients(written):
    made = written["ExactMARS"](learning_rate=0.1)
    updater, weight, exact = optimizer.get_updater(made), np.ones(5), np.ones(5)
    mean = var = np.zeros(5)
    for t, (grad, old) in enumerate(PAIRS, 1):
        updater(0, grad, weight, extra=old)
        ahead = grad + 0.025 * 0.9 / (1 - 0.9) * (grad - old)
        mean, var = 0.9 * mean + 0.1 * ahead, 0.999 * var + 0.001 * ahead**2
        rate = 0.1 * np.sqrt(1 - 0.999**t) / (1 - 0.9**t)
        exact = exact - rate * mean / (np.sqrt(var) + 1e-8)
        np.testing.assert_allclose(weight, exact, rtol=1e-12)


@pytest.mark.further
def test_spam(written):
    made = written["SPAM"](learning_rate=0.1)
    made.bound, made.period = 2.0, 3
    updater, weight, exact = optimizer.get_updater(made), np.ones(5), np.ones(5)
    mean = var = np.zeros(5)
    for t, (grad, _) in enumerate(PAIRS, 1):
        updater(0, grad, weight)
        limit = np.sqrt(2.0 * var)
        spiking = (limit > 0) & (abs(grad) > limit)
        grad = np.where(spiking, np.sign(grad) * limit, grad)
        if t % 3 == 1:
            mean = var = np.zeros(5)
        mean, var = 0.9 * mean + 0.1 * grad, 0.999 * var + 0.001 * grad**2
        since = (t - 1) % 3 + 1
        rate = 0.1 * np.sqrt(1 - 0.999**since) / (1 - 0.9**since)
        exact = exact - rate * mean / (np.sqrt(var) + 1e-8)
        np.testing.assert_allclose(weight, exact, rtol=1e-12)
