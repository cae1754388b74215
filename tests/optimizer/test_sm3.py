"""SM3: steps of optax, and what updaters promise."""

import json
from functools import reduce

import numpy as np
import pytest

import fastopt
from fastopt.optimizer import SM3
from helpers.matrix_rules import check_recorded, drawn, trained
from helpers.paths import GOLDEN

RECORDED = json.loads((GOLDEN / "matrices.json").read_text())
CASES = RECORDED["sm3"]
F32 = np.float32


def named(case):
    return f"{case['arguments']['momentum']}-{'x'.join(map(str, case['shape']))}"


def stepped(weight, gradients, lr=0.1, momentum=0.9, wd=0.0):
    """Weights after each step in float64, element by element as the paper's SM3-II has it."""
    weight, mean = weight.astype(np.float64), 0.0
    covers = [np.zeros(length) for length in weight.shape]
    for grad in gradients:
        new, bound = [np.zeros_like(cover) for cover in covers], np.empty(weight.shape)
        for place in np.ndindex(*weight.shape):
            held = [cover[k] for cover, k in zip(covers, place, strict=True)]
            bound[place] = reduce(min, held) + float(grad[place]) ** 2
            for cover, k in zip(new, place, strict=True):
                cover[k] = max(cover[k], bound[place])
        covers = new
        step = np.divide(grad, np.sqrt(bound), out=np.zeros(weight.shape), where=bound > 0)
        mean = momentum * mean + (1 - momentum) * step
        weight = (1 - lr * wd) * weight - lr * mean
        yield weight


@pytest.mark.parametrize("case", CASES, ids=named)
@pytest.mark.parametrize(
    ("dtype", "rtol"),
    [(F32, 3e-5), pytest.param(np.float64, 1e-12, marks=pytest.mark.slow("exhaustive"))],
)
def test_each_step_is_that_of_optax(case, dtype, rtol):
    data = RECORDED["data"]["x".join(map(str, case["shape"]))]
    check_recorded(SM3(**case["arguments"]), data, case["weights"], dtype, rtol)


@pytest.mark.parametrize("shape", [(4, 6), (2, 3, 4), (5,)])
@pytest.mark.parametrize("momentum", [0.0, 0.8])
def test_it_agrees_with_the_pseudocode_in_float64(shape, momentum, rng):
    (weight,), gradients = drawn(rng, shape, steps=12)
    gradients = [grad * F32(10 ** (step / 4 - 2)) for step, (grad,) in enumerate(gradients)]
    gradients[0][:2] = 0
    arguments = {"lr": 0.6, "wd": 0.3, "momentum": momentum}
    updater, got = fastopt.Updater(SM3(**arguments)), weight.copy()
    for grad, expected in zip(gradients, stepped(weight, gradients, **arguments), strict=True):
        updater(0, grad, got)
        np.testing.assert_allclose(got, expected, rtol=2e-5, atol=2e-5)


def test_the_state_has_one_number_for_each_row_and_column(rng):
    weights, (grads, *_) = drawn(rng, (4, 6), (2, 3, 5), (7,), ())
    with_mean, without = fastopt.Updater(SM3()), fastopt.Updater(SM3(momentum=0))
    for updater in (with_mean, without):
        updater([0, 1, 2, 3], grads, weights)
    shapes = [[array.shape for array in with_mean.states[k]] for k in range(4)]
    assert shapes == [[(4,), (6,), (4, 6)], [(2,), (3,), (5,), (2, 3, 5)], [(7,)] * 2, [()] * 2]
    assert [array.shape for array in without.states[0]] == [(4,), (6,)]
    assert [without.states[k].shape for k in (2, 3)] == [(7,), ()]
    np.testing.assert_allclose(without.states[0][0], np.square(grads[0]).max(1), rtol=1e-6)


@pytest.mark.slow
def test_accumulators_bound_the_sums_of_squares(rng):
    (weight,), gradients = drawn(rng, (4, 6), steps=9, dtype=np.float64)
    updater, _ = trained(SM3(), weight, [grad for (grad,) in gradients])
    rows, columns, _ = updater.states[0]
    total = sum(grad**2 for (grad,) in gradients)
    assert (np.minimum(rows[:, np.newaxis], columns) >= total * (1 - 1e-12)).all()


def test_a_gradient_that_is_not_finite_spreads_to_row_and_column(rng):
    (weight,), gradients = drawn(rng, (4, 6))
    gradients[1][0][1, 2] = np.nan
    _, got = trained(SM3(), weight, [grad for (grad,) in gradients[:3]])
    hit = np.zeros((4, 6), bool)
    hit[1], hit[:, 2] = True, True
    np.testing.assert_array_equal(np.isnan(got), hit)


def test_a_state_that_does_not_fit_is_refused(rng):
    (weight,), ((grad,), *_) = drawn(rng, (4, 3))
    updater, got = trained(SM3(), weight, [grad])
    updater.states[0] = updater.states[0][::-1]
    with pytest.raises(ValueError, match=r"state 'axis 0' must have shape \(4,\), got \(4, 3\)"):
        updater(0, grad, got)
    assert updater.optimizer.num_update == 1
