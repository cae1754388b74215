"""Cautious, stable and corrected forms: steps of the plain form with masks, factors and decays."""

import numpy as np
import pytest

import fastopt
from fastopt import optimizer
from fastopt.optimizer import Optimizer
from fastopt.optimizer.jointsums import JointSums
from fastopt.optimizer.matrices import MatrixOptimizer
from helpers.cases import kept

VARIANTS = ("cautious", "cautious_decay", "stable")
KINDS = dict(Optimizer.opt_registry.items())
FORMS = {
    **{
        name: {}
        for name, kind in KINDS.items()
        if name != "ccsgd"
        and kind.__module__.startswith("fastopt.")
        and any(map(kind._has_argument, VARIANTS))
    },
    "radam": {"beta2": 0.7},
    "ademamix": {"beta3": 0.9},
    "stablespam": {"reset_interval": 3},
    "adamw": {"formula": "torch"},
    "adam of torch": {"formula": "torch", "amsgrad": True},
    "nadam of torch": {"formula": "torch"},
    "prodigy": {"d0": 0.1},
    "prodigy with coupled decay": {"d0": 0.1, "decouple": False},
    "dadaptadam": {"d0": 0.1, "decouple": True},
    "dadaptadam with coupled decay": {"d0": 0.1},
    "sgd": {"momentum": 0.9},
    "nag": {"momentum": 0.9},
    "signum": {"wd_lh": 0.3},
    "soap": {"precondition_frequency": 2},
    "shampoo": {"precondition_frequency": 2},
    "galore": {"rank": 3},
    "apollo": {"rank": 3},
}
"""Arguments of the forms by name, which begins with that of the class."""

BY_DEFAULT = ("adamatan2", "sgd", "adan", "galore", "sm3", "lion")
LAST = ("adan", "apollo", "galore", "soap")
"""Forms whose decay comes after the step."""
RATE, DECAY = 0.1, 0.5
VAR = {"ademamix": 2}
"""Place of the second moment in the state, if not 1."""


COUPLED = {"adam", "adamax", "ccsgd", "nadam", "nag", "novograd", "sgd", "signum", "yogi"}
"""Optimizers whose moving averages average the decay too."""


def is_coupled(name):
    return "coupled" in name or (name.partition(" ")[0] in COUPLED and "decoupled" not in name)


def class_of(name):
    return KINDS[name.partition(" ")[0]]


def flags_of(name):
    """Flags of a form; SOAP is stable in another way, and decay that is coupled is not masked."""
    without = "cautious_decay" if "coupled" in name else "stable" if name == "soap" else None
    return {f: True for f in VARIANTS if class_of(name)._has_argument(f) and f != without}


def decay_of(name, made, step):
    """Share of the weight that decoupled decay takes."""
    rate = made.d * RATE if isinstance(made, JointSums) else RATE
    if name == "adan":
        return rate * DECAY / (1 + rate * DECAY)
    if name == "signum":
        return rate * FORMS[name]["wd_lh"]
    first = name in ("adopt", "soap") and step == 0
    return 0.0 if is_coupled(name) or first else rate * DECAY


def seen_by(name, made, grad, weight, state):
    """The gradient that moving averages average: with decay if that is not decoupled."""
    if name == "novograd":
        grad = grad / np.sqrt(state[1])
    return grad + DECAY * weight if is_coupled(name) else grad


def factor_of(name, made, seen, state, step):
    """Inverse root mean ratio of the squared gradient to its corrected average, at most 1."""
    if name == "radam" and not made.hyper(step + 1, RATE, DECAY)["rectified"]:
        return 1.0
    var = state[VAR.get(name, 1)] / (1 - made.beta2 ** (step + 1))
    return 1 / max(1.0, np.sqrt(np.mean(seen**2 / np.maximum(var, made.epsilon**2))))


def expected(name, flags, plain, grad, weight, step):
    """Weight after a step: that of the plain form from there, with masks and a factor."""
    probe, made = weight.copy(), plain.optimizer
    plain(0, grad, probe)
    state, share = plain.states[0], decay_of(name, made, step)
    move = probe / (1 - share) - weight if name in LAST else probe - (1 - share) * weight
    seen = seen_by(name, made, grad, weight, state)
    factor = factor_of(name, made, seen, state, step) if flags.get("stable") else 1.0
    downhill = move * seen < 0 if flags.get("cautious") else np.ones_like(weight)
    masked = move * downhill / max(downhill.mean(), 1e-3)
    of_decay = masked if isinstance(made, MatrixOptimizer) else move
    decays = of_decay * weight <= 0 if flags.get("cautious_decay") else np.ones_like(weight)
    decaying = weight + masked if name in LAST else weight
    return weight + factor * (masked - share * decays * decaying)


@pytest.mark.slow
@pytest.mark.parametrize("name", kept(FORMS, *BY_DEFAULT))
def test_a_variant_masks_and_scales_the_step_of_the_plain_form(name, rng):
    """Gradients sometimes grow by much."""
    kind, flags, arguments = class_of(name), flags_of(name), dict(lr=RATE, wd=DECAY, **FORMS[name])
    plain, varied = (fastopt.Updater(kind(**arguments, **each)) for each in ({}, flags))
    weight = rng.normal(size=(5, 7))
    for step, size in enumerate([3.0, 0.1, 0.1, 3.0, 30.0, 0.1, 3.0, 0.1]):
        grad = size * rng.normal(size=weight.shape)
        after = expected(name, flags, plain, grad, weight, step)
        varied(0, grad, weight)
        np.testing.assert_allclose(weight, after, rtol=1e-9, atol=1e-9, err_msg=f"step {step}")


@pytest.mark.slow("exhaustive")
def test_soap_is_stable_in_the_bases(rng):
    """Without rotations, it is Adam: a diagonal basis keeps the elements apart."""
    plain, stable = (fastopt.Updater(optimizer.SOAP(lr=RATE, stable=on)) for on in (False, True))
    weights = [np.ones((2, 2)), np.ones((2, 2))]
    for step in range(6):
        grad = (30.0 if step == 4 else 1.0) * np.diag([4.0, 1.0]) * (1 - 2 * (step % 2))
        before = np.array(weights)
        for updater, weight in zip((plain, stable), weights, strict=True):
            updater(0, grad, weight)
        move, stable_move = np.array(weights) - before
        if step:
            _, var, _, _, left, _, right = stable.states[0]
            square, var = np.square(left.T @ grad @ right), var / (1 - 0.95**step)
            ratio = np.mean(np.divide(square, var, out=np.zeros_like(var), where=var > 1e-12))
            np.testing.assert_allclose(stable_move, move / max(1, np.sqrt(ratio)), atol=1e-9)
            assert (ratio > 1) == (step == 4)


def test_without_momentum_cautious_is_plain():
    for name in ("sgd", "nag", "signum"):
        made, plain = (optimizer.create(name, momentum=0.0, cautious=on) for on in (True, False))
        assert made.rule is plain.rule


RATES = [0.01, 0.05, 0.1, 0.1, 0.02]
PEAK = 0.1
DEFERRED = ("catch_up", "dense")
WITHOUT = ("adagrad", "lion", "adan", "radam", "muon", "sm3", "adafactor", "soap")
DECOUPLED = {
    "adamw": {"formula": "torch"},
    "adamw of mxnet": {},
    "adamw cautious": {"cautious_decay": True},
    "sgd": {"decouple": True, "momentum": 0.9},
    "nadam": {"decouple": True},
    "prodigy": {"d0": 0.1},
    **{name: {} for name in WITHOUT},
    **{f"adamw {each}": {"formula": "torch", "sparse_decay": each} for each in DEFERRED},
}


@pytest.mark.parametrize("name", kept(DECOUPLED, "adamw", "adamw catch_up", "muon"))
def test_corrected_decay_is_that_of_its_learning_rate(name):
    """Steps of a list of two are those of the optimizer whose rate and decay are set."""
    kind, arguments = class_of(name), DECOUPLED[name]
    made = kind(lr=lambda n: RATES[n - 1], wd=0.5, corrected_decay=PEAK, **arguments)
    plain = kind(lr=RATES[0], wd=0.5, **arguments)
    for each in (made, plain):
        each.set_lr_mult({1: 0.0 if kind is optimizer.Prodigy else 0.5})
    updaters, rng = [fastopt.Updater(each) for each in (made, plain)], np.random.default_rng(3)
    weights = [[np.ones((4, 6)), np.full((4, 6), 2.0)] for _ in updaters]
    for rate in RATES:
        plain.lr, plain.wd = rate, 0.5 * (rate / PEAK)
        grads = [rng.normal(size=(4, 6)) for _ in range(2)]
        if "sparse_decay" in arguments:
            grads = [(grad[:1], np.array([0])) for grad in grads]
        for updater, own in zip(updaters, weights, strict=True):
            updater([0, 1], grads, own)
        np.testing.assert_array_equal(*weights)
        assert made._get_wd(0) == plain._get_wd(0)
