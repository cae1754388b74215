"""`corrected_decay`: each step is that of the optimizer with the decay of that step."""

import numpy as np
import pytest

import fastopt
from fastopt import optimizer
from helpers.cases import exhaustive

RATES = [0.01, 0.05, 0.1, 0.1, 0.02]
PEAK = 0.1
DECOUPLED = {
    "adamw": {"formula": "torch"},
    "adamw of mxnet": {},
    "adamw cautious": {"cautious_decay": True},
    "sgd": {"decouple": True, "momentum": 0.9},
    "nadam": {"decouple": True},
    "prodigy": {"d0": 0.1},
    **{
        name: {}
        for name in ("adagrad", "lion", "adan", "radam", "muon", "sm3", "adafactor", "soap")
    },
}
BY_DEFAULT = ("adamw", "muon")


def check(kind, change=lambda grad: grad, **arguments):
    """Steps of a list of two are those of the optimizer whose rate and decay are set."""
    made = kind(lr=lambda n: RATES[n - 1], wd=0.5, corrected_decay=PEAK, **arguments)
    plain = kind(lr=RATES[0], wd=0.5, **arguments)
    for each in (made, plain):
        each.set_lr_mult({1: 0.0 if kind is optimizer.Prodigy else 0.5})
    updaters, rng = [fastopt.Updater(each) for each in (made, plain)], np.random.default_rng(3)
    weights = [[np.ones((4, 6)), np.full((4, 6), 2.0)] for _ in updaters]
    for rate in RATES:
        plain.lr, plain.wd = rate, 0.5 * (rate / PEAK)
        grads = [change(rng.normal(size=(4, 6))) for _ in range(2)]
        for updater, own in zip(updaters, weights, strict=True):
            updater([0, 1], grads, own)
        np.testing.assert_array_equal(*weights)


@pytest.mark.parametrize(
    "name", [name if name in BY_DEFAULT else exhaustive(name)[0] for name in DECOUPLED]
)
def test_each_step_has_the_decay_of_its_learning_rate(name):
    check(optimizer.Optimizer.opt_registry[name.partition(" ")[0]], **DECOUPLED[name])


@pytest.mark.parametrize("sparse_decay", ["catch_up", *exhaustive("dense")])
def test_deferred_decay_is_corrected_too(sparse_decay):
    rows = {"change": lambda grad: (grad[:1], np.array([0])), "sparse_decay": sparse_decay}
    check(optimizer.AdamW, formula="torch", **rows)


def test_without_a_gradient_a_weight_shrinks_by_the_square_of_the_rate():
    made = fastopt.AdamW(lr=lambda n: RATES[n - 1], wd=0.5, corrected_decay=PEAK, formula="torch")
    updater, weight = fastopt.Updater(made), np.ones(3)
    for _ in RATES:
        updater(0, np.zeros(3), weight)
    np.testing.assert_allclose(weight, np.prod([1 - 0.5 * rate**2 / PEAK for rate in RATES]))


def test_of_a_group_alone_it_corrects_the_decay_of_that_group():
    updater = fastopt.Updater(
        fastopt.AdamW(lr=0.05, wd=0.5, formula="torch", param_idx2name={0: "a", 1: "b"}),
        groups={"b": {"corrected_decay": PEAK}},
    )
    updater.optimizer.set_wd_mult({0: 1.0, 1: 1.0})
    weights = [np.ones(3), np.ones(3)]
    updater([0, 1], [np.zeros(3), np.zeros(3)], weights)
    np.testing.assert_allclose([w[0] for w in weights], [1 - 0.5 * 0.05, 1 - 0.5 * 0.05 * 0.5])
