"""Formulas of torch: step by step as torch, optax and their papers have them."""

import json
from functools import partial

import numpy as np
import pytest

import fastopt
from fastopt import optimizer
from fastopt.lr_scheduler import FactorScheduler
from helpers import defaults
from helpers.paths import GOLDEN
from helpers.schedules import with_schedule

RECORDED = json.loads((GOLDEN / "formulas.json").read_text())
CASES = RECORDED["cases"]
WITH_EPSILON = ("Adam", "AdamW", "AdaGrad", "RMSProp", "Nadam")
CLASSES = (*WITH_EPSILON, "SGD")
every_class = pytest.mark.parametrize("name", CLASSES)


def trained(made, start, gradients, dtype=np.float64):
    """Weights after each step."""
    updater, weight = fastopt.Updater(made), np.array(start, dtype)
    for gradient in np.asarray(gradients, dtype):
        updater(0, gradient, weight)
        yield weight.copy()


def made_of(case, **more):
    arguments = with_schedule(case["arguments"])
    return getattr(fastopt, case["class"])(formula="torch", **arguments, **more)


def test_the_file_names_its_packages_and_has_every_class():
    assert {*RECORDED["packages"]} == {"torch", "optax", "jax"}
    assert {case["class"] for case in CASES} == {*CLASSES}
    assert {case["library"] for case in CASES} == {"torch", "optax"}


def data():
    return RECORDED["start"], RECORDED["gradients"]


@pytest.mark.slow
@pytest.mark.parametrize("name", WITH_EPSILON)
@pytest.mark.parametrize("clip", [None, 0.05])
def test_clipping_comes_before_decay_as_it_does_with_torch(name, clip):
    start, gradients = data()
    arguments = {"eps": 0.01, "weight_decay": 0.1}
    make = partial(optimizer.create, name, lr=0.05, formula="torch", **arguments)
    found = trained(make(clip_gradient=clip, rescale_grad=0.5), start, gradients)
    limit = np.inf if clip is None else clip
    expected = trained(make(), start, np.clip(0.5 * np.array(gradients), -limit, limit))
    np.testing.assert_allclose([*found], [*expected], rtol=1e-11, atol=1e-15)


@every_class
def test_a_checkpoint_from_before_has_the_formula_of_mxnet_and_descends(name):
    updater = fastopt.Updater(optimizer.create(name, formula="torch"))
    saved = updater.state_dict()
    del saved["attributes"]["formula"], saved["attributes"]["maximize"]
    updater.load_state_dict(saved)
    assert (updater.optimizer.formula, updater.optimizer.maximize) == ("mxnet", False)


@pytest.mark.parametrize("arguments", [{"eta": 0.5}, {"correct_bias": False}])
def test_adamw_of_torch_has_no_arguments_of_other_libraries(arguments):
    with pytest.raises(ValueError, match="formula='torch' needs correct_bias=True and eta=None"):
        fastopt.AdamW(formula="torch", **arguments)


def test_decay_of_torchs_adagrad_cannot_be_deferred():
    fastopt.AdaGrad(sparse_decay="catch_up")
    with pytest.raises(ValueError, match="needs decoupled decay; that of AdaGrad"):
        fastopt.AdaGrad(sparse_decay="catch_up", formula="torch")


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
