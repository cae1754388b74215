"""Optimizers of other libraries than MXNet: recorded steps, formulas, and defaults of torch."""

import json
from functools import partial

import numpy as np
import pytest

import fastopt
from fastopt import optimizer
from fastopt.lr_scheduler import FactorScheduler
from helpers import defaults, oracles
from helpers.cases import CASES, OF_STEPS, exhaustive, kept, slow
from helpers.paths import GOLDEN
from helpers.schedules import with_schedule

TORCH = {"formula": "torch"}
RECORDED = json.loads((GOLDEN / "formulas.json").read_text())
OTHERS = RECORDED["others"]
OF_TORCH = [{**case, "arguments": {**case["arguments"], **TORCH}} for case in RECORDED["cases"]]
ids = [f"{i}-{case['name']}" for i, case in enumerate(OTHERS + OF_TORCH)]


SIZES = np.array([1e2, 1.0, 1e-1, 1e-2, 1e-4, 0.0])

OF_MXNET = partial(oracles.adam, formula="mxnet")
NADAM = partial(oracles.adam, kind="nadam")
NADAMW = partial(oracles.adam, kind="nadamw", decoupled=True)
PAPERS = "adabelief", "lans", "lion", "radam"
"""Optimizers whose formulas have no other test."""
FORMULAS = {
    "adam amsgrad": (OF_MXNET, "adam", {"amsgrad": True}),
    "adamw amsgrad": (partial(OF_MXNET, decoupled=True, eps=1e-6), "adamw", {"amsgrad": True}),
    "nadam amsgrad": (NADAM, "nadam", {"amsgrad": True}),
    "nadam amsgrad of torch": (NADAM, "nadam", {"amsgrad": True, **TORCH}),
    "nadamw": (NADAMW, "nadamw", {"correction": "present"}),
    "nadamw amsgrad": (NADAMW, "nadamw", {"amsgrad": True}),
    "adamatan2": (oracles.adamatan2, "adamatan2", {"a": 1.3, "b": 0.8}),
    "stablespam": (oracles.stablespam, "stablespam", {"reset_interval": 5}),
    **{name: (getattr(oracles, name), name, {}) for name in PAPERS},
    "radam from a length": (oracles.radam, "radam", {"threshold": 5}),
}
"""Function of oracles.py, optimizer and its arguments, which are those of the function too."""
BY_DEFAULT = *PAPERS, "radam from a length", "adamatan2", "stablespam"
"""Formulas of classes without recorded numbers, and with restarts."""


def trained(made, start, gradients, dtype):
    """Weights after each step, in another array each time: so only one kernel is compiled."""
    updater, weight = fastopt.Updater(made), np.array(start, dtype)
    for gradient in np.asarray(gradients, dtype):
        weight = weight.copy()
        updater(0, gradient, weight)
        yield weight.copy(), updater


def made_of(case):
    return getattr(fastopt, case["class"])(**with_schedule(case["arguments"]))


PRECISIONS = [np.float64, *exhaustive(np.float32)]


def compare(dtype, found, expected):
    rtol, atol = (1e-11, 1e-15) if dtype is np.float64 else (3e-5, 1e-5)
    np.testing.assert_allclose(found, expected, rtol=rtol, atol=atol)


def test_every_form_without_tests_by_default_has_recorded_numbers_or_a_formula():
    """Or is a variant of a form that has, which test_families.py compares."""
    names = {case["class"].lower() for case in OTHERS} | {name for _, name, _ in FORMULAS.values()}
    plain = (case for case in CASES if case.recorded and "cautious" not in str(case))
    assert {case.name for case in plain} - {*OF_STEPS} <= names


@pytest.mark.parametrize("case", slow(*OTHERS) + OF_TORCH, ids=ids)
@pytest.mark.parametrize("dtype", PRECISIONS)
def test_each_step_is_that_of_the_library(case, dtype):
    steps = list(trained(made_of(case), RECORDED["start"], RECORDED["gradients"], dtype))
    compare(dtype, [weight for weight, _ in steps], case["weights"])
    if "averages" in case:
        updater, weight = steps[-1][1], steps[-1][0].copy()
        with updater.averaged({0: weight}):
            compare(dtype, weight, case["averages"][-1])


@pytest.mark.parametrize("name", kept(FORMULAS, *BY_DEFAULT))
@pytest.mark.parametrize("dtype", PRECISIONS)
def test_each_step_is_that_of_the_formula(name, dtype):
    oracle, klass, arguments = FORMULAS[name]
    rng = np.random.default_rng(1)
    start, gradients = rng.normal(size=6), rng.normal(size=(12, 6)) * SIZES
    made = optimizer.create(klass, lr=0.05, wd=0.1, **arguments)
    expected = oracle(start, lr=0.05, wd=0.1, **arguments)
    next(expected)
    steps = trained(made, start, gradients, dtype)
    for (weight, _), gradient in zip(steps, gradients, strict=True):
        compare(dtype, weight, expected.send(gradient))


WITH_EPSILON = ("Adam", "AdamW", "AdaGrad", "RMSProp", "Nadam")
CLASSES = (*WITH_EPSILON, "SGD")
every_class = pytest.mark.parametrize("name", CLASSES)


@pytest.mark.slow
@pytest.mark.parametrize("name", WITH_EPSILON)
def test_clipping_comes_before_decay_as_it_does_with_torch(name):
    gradients = np.array(RECORDED["gradients"])
    make = partial(optimizer.create, name, lr=0.05, formula="torch", eps=0.01, weight_decay=0.1)
    made = make(clip_gradient=0.05, rescale_grad=0.5)
    found = trained(made, RECORDED["start"], gradients, float)
    clipped = trained(make(), RECORDED["start"], np.clip(0.5 * gradients, -0.05, 0.05), float)
    for (weight, _), (expected, _) in zip(found, clipped, strict=True):
        compare(np.float64, weight, expected)


@every_class
def test_a_checkpoint_from_before_has_the_formula_of_mxnet_and_descends(name):
    updater = fastopt.Updater(optimizer.create(name, formula="torch"))
    saved = updater.state_dict()
    del saved["attributes"]["formula"], saved["attributes"]["maximize"]
    updater.load_state_dict(saved)
    assert (updater.optimizer.formula, updater.optimizer.maximize) == ("mxnet", False)


def test_the_formula_of_torch_shows_the_defaults_that_differ():
    words = repr(optimizer.AdamW(lr=0.1, formula="torch"))
    assert words == "AdamW(learning_rate=0.1, epsilon=1e-08, formula='torch', wd=0.01)"
    assert "eps=1e-10" in repr(optimizer.AdaGrad(formula="torch"))
    assert "eps" not in repr(optimizer.AdaGrad())


@every_class
def test_the_formula_of_torch_has_the_defaults_of_torch(name):
    own = defaults.of(name, formula="torch")
    differing = [each for each in defaults.compared(name, own) if not defaults.same(*each[1:])]
    assert differing == []


def test_given_arguments_and_schedules_come_before_the_defaults_of_torch():
    made = fastopt.AdamW(eps=1e-6, weight_decay=0.0, formula="torch")
    assert (made.epsilon, made.wd, made.lr) == (1e-6, 0.0, 0.001)
    schedule = FactorScheduler(step=1, base_lr=0.4)
    assert fastopt.SGD(lr_scheduler=schedule, formula="torch").learning_rate == 0.4
    later = fastopt.AdamW()
    later.formula = "torch"
    assert (later.epsilon, later.wd) == (1e-6, 0.0)


RMSPROP = {
    "plain": {},
    "momentum": {"momentum": 0.9},
    "centered": {"centered": True},
    "of torch": {"formula": "torch", "gamma1": 0.9, "momentum": 0.9},
}


def rmsprop(form, **options):
    arguments = {"initial_accumulator_value": 1.0, **RMSPROP[form], **options}
    return fastopt.Updater(optimizer.RMSProp(0.01, **arguments))


@pytest.mark.parametrize("form", RMSPROP)
def test_rmsprop_starts_with_the_initial_second_moment(form):
    updater, weight = rmsprop(form, epsilon=0.001), np.zeros(2)
    grad = np.array([0.1, -3.0])
    updater(0, grad, weight)
    var = 0.9 + 0.1 * grad**2 - (0.01 * grad**2 if form == "centered" else 0)
    root = np.sqrt(var) + 0.001 if form == "of torch" else np.sqrt(var + 0.001)
    np.testing.assert_allclose(weight, -0.01 * grad / root, rtol=1e-12)


@pytest.mark.parametrize("state", ["bfloat16", "int8"])
def test_rmsprop_starts_the_second_moment_alone_above_zero(state):
    pytest.importorskip("ml_dtypes")
    updater = rmsprop("momentum", state_dtype=state, state_min_size=1)
    updater(0, np.zeros((2, 3)), np.zeros((2, 3)))
    first, *others = updater.state_as(0)
    np.testing.assert_allclose(first, 0.9, rtol=0.01)
    assert not np.any(others)
    with pytest.raises(ValueError, match="8 bits would freeze sums"):
        rmsprop("centered", state_dtype="int8", state_min_size=1)(0, *np.zeros((2, 2, 3)))
