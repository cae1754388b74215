"""The guide to optimizers: papers written from it compute what the papers say.

Those that the library has too, NorMuon and Adam-mini, are compared with it on the page itself.
"""

import re

import numpy as np
import pytest

import fastopt
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
    needed += ("class Sophia", "class AggMo")
    for line, code in blocks(PAGE, "python"):
        if any(part in code for part in needed) and not code.startswith('"""'):
            exec(compile("\n" * line + code, str(PAGE), "exec"), namespace)
    return namespace


def mars():
    exact, mean, var = np.ones(5), 0, 0
    for t, (grad, old) in enumerate(PAIRS, 1):
        ahead = grad + 0.025 * 0.9 / (1 - 0.9) * (grad - old)
        mean, var = 0.9 * mean + 0.1 * ahead, 0.999 * var + 0.001 * ahead**2
        rate = 0.1 * np.sqrt(1 - 0.999**t) / (1 - 0.9**t)
        yield (exact := exact - rate * mean / (np.sqrt(var) + 1e-8))


def spam():
    exact, mean, var = np.ones(5), 0, 0
    for t, (grad, _) in enumerate(PAIRS):
        limit = np.sqrt(2.0 * var)
        spiking = (limit > 0) & (abs(grad) > limit)
        grad = np.where(spiking, np.sign(grad) * limit, grad)
        if t % 3 == 0:
            mean = var = 0
        mean, var = 0.9 * mean + 0.1 * grad, 0.999 * var + 0.001 * grad**2
        rate = 0.1 * np.sqrt(1 - 0.999 ** (t % 3 + 1)) / (1 - 0.9 ** (t % 3 + 1))
        yield (exact := exact - rate * mean / (np.sqrt(var) + 1e-8))


def sophia():
    exact, mean, curvature = np.ones(5), 0, 0
    for t, (grad, estimate) in enumerate(PAIRS):
        mean = 0.96 * mean + 0.04 * grad
        if t % 2 == 0:
            curvature = 0.9 * curvature + 0.1 * estimate
        step = np.clip(mean / np.maximum(0.7 * curvature, 1e-12), -1, 1)
        yield (exact := exact - 0.1 * step - 0.1 * 0.5 * exact)


WRITTEN = {
    "ExactMARS": (mars, {}, {}, True),
    "SPAM": (spam, {}, {"bound": 2.0, "period": 3}, False),
    "Sophia": (sophia, {"wd": 0.5, "gamma": 0.7, "interval": 2, "beta2": 0.9}, {}, True),
}
"""Weights by the paper, arguments and attributes, and whether the second numbers are given."""


@pytest.mark.slow
@pytest.mark.parametrize("name", WRITTEN)
def test_weights_are_those_of_the_paper(written, name):
    by_paper, arguments, attributes, has_extra = WRITTEN[name]
    made, weight = written[name](learning_rate=0.1, **arguments), np.ones(5)
    vars(made).update(attributes)
    updater = optimizer.get_updater(made)
    for (grad, extra), exact in zip(PAIRS, by_paper(), strict=True):
        updater(0, grad, weight, **({"extra": extra} if has_extra else {}))
        np.testing.assert_allclose(weight, exact, rtol=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize("betas", [(0.5,), (0.0, 0.9, 0.99), (0.0, 0.5, 0.9, 0.99)])
def test_aggmo_has_a_slot_for_each_momentum(written, betas):
    updater = optimizer.get_updater(written["AggMo"](learning_rate=0.1, betas=betas))
    weight, exact, moms = np.ones(5), np.ones(5), [np.zeros(5) for _ in betas]
    for grad, _ in PAIRS:
        updater(0, grad, weight)
        moms = [beta * mom - grad for beta, mom in zip(betas, moms, strict=True)]
        exact = exact + 0.1 / len(betas) * sum(moms)
        np.testing.assert_allclose(weight, exact, rtol=1e-12)
    with pytest.raises(ValueError, match=r"betas\[1\] must be .* below 1"):
        updater.optimizer.betas = (0.5, 1.0)


def test_the_guide_lists_the_names_that_fields_cannot_have():
    after = PAGE.read_text("utf-8").partition("attributes of NumPy's arrays")[2]
    names = set(re.findall(r"`(\w+)`", after.partition("Slots")[0]))
    assert names >= {name for name in dir(np.recarray) if not name.startswith("_")}
    with pytest.raises(TypeError, match="'size' is an attribute of NumPy records"):
        fastopt.rule(hyper=("lr", "size"))
