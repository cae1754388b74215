"""Adafactor: steps of torch and optax, and what updaters promise."""

import json

import numpy as np
import pytest

import fastopt
from fastopt.optimizer import Adafactor
from helpers.matrix_rules import check_recorded, drawn, single
from helpers.paths import GOLDEN

RECORDED = json.loads((GOLDEN / "matrices.json").read_text())
CASES = RECORDED["adafactor"]
F32 = np.float32


def named(case):
    return f"{case['library']}-{'x'.join(map(str, case['shape']))}"


def stepped(weight, gradients, lr=0.01, decay_rate=0.8, d=1.0, wd=0.0):
    """Weights after each step in float64, with the second moment written out."""
    weight, var = weight.astype(np.float64), [0.0, 0.0]
    for t, grad in enumerate(gradients, 1):
        square, share = grad.astype(np.float64) ** 2, t**-decay_rate
        if grad.ndim < 2:
            var[0] = (1 - share) * var[0] + share * square
            step = grad / np.sqrt(var[0])
        else:
            for k, axis in enumerate((-1, -2)):
                mean = square.mean(axis, keepdims=True)
                var[k] = (1 - share) * var[k] + share * mean
            step = grad / np.sqrt(var[0] * var[1] / var[0].mean(-2, keepdims=True))
        step = step / max(1.0, np.sqrt(np.mean(step**2)) / d)
        size = max(1e-3, np.sqrt(np.mean(weight**2)))
        weight = (1 - lr * wd) * weight - min(lr, t**-0.5) * size * step
        yield weight


def test_there_are_steps_of_both_libraries_and_of_vectors():
    assert {case["library"] for case in CASES} == {"torch", "optax"}
    assert {len(case["shape"]) for case in CASES} == {1, 2, 3}


@pytest.mark.parametrize("case", CASES, ids=named)
@pytest.mark.parametrize(
    ("dtype", "rtol"),
    [(F32, 3e-5), pytest.param(np.float64, 1e-8, marks=pytest.mark.slow("exhaustive"))],
)
def test_each_step_is_that_of_the_library(case, dtype, rtol):
    """That of optax has decay rates of float32."""
    data = RECORDED["data"]["x".join(map(str, case["shape"]))]
    check_recorded(Adafactor(**case["arguments"]), data, case["weights"], dtype, rtol)


@pytest.mark.parametrize("shape", [(4, 6), (2, 3, 4), (5,)])
def test_it_agrees_with_the_formula_in_float64(shape, rng):
    weight, gradients = single(rng, shape, steps=12)
    gradients = [grad * F32(10 ** (step / 4)) for step, grad in enumerate(gradients)]
    arguments = {"lr": 0.6, "wd": 0.3, "decay_rate": 0.7}
    updater, got = fastopt.Updater(Adafactor(clip_threshold=0.9, **arguments)), weight.copy()
    for grad, expected in zip(
        gradients, stepped(weight, gradients, d=0.9, **arguments), strict=True
    ):
        updater(0, grad, got)
        np.testing.assert_allclose(got, expected, rtol=2e-5, atol=2e-5)


def test_the_state_has_one_number_for_each_row_and_column(rng):
    weights, (grads, *_) = drawn(rng, (4, 6), (2, 3, 5), (7,), ())
    updater = fastopt.Updater(Adafactor())
    updater([0, 1, 2, 3], grads, weights)
    shapes = [[array.shape for array in updater.states[k]] for k in (0, 1)]
    assert shapes == [[(4,), (6,)], [(2, 3), (2, 5)]]
    assert [updater.states[k].shape for k in (2, 3)] == [(7,), ()]
    np.testing.assert_allclose(updater.states[0][0], np.square(grads[0]).mean(1), rtol=1e-6)
