"""SOAP and Shampoo: their formulas in float64, decompositions, blocks and axes."""

import copy
import math
from functools import partial
from itertools import product

import numpy as np
import pytest

import fastopt
from fastopt._engine.eigenbases import axes, iterated
from fastopt.lr_scheduler import FactorScheduler
from fastopt.optimizer import SOAP, Shampoo
from helpers.cases import exhaustive
from helpers.matrix_rules import check_recorded, drawn, single

F32 = np.float32


def first_whiteners(grad):
    return [np.eye(n) / np.sqrt(np.sqrt(np.mean(grad**2))) for n in grad.shape]


def averaged(factors, grad, whiteners, beta2):
    """The factors of KL with the covariances of a gradient that those of the other axis whiten."""
    sides = grad @ whiteners[1], grad.T @ whiteners[0]
    pairs = zip(factors, sides, strict=True)
    return [beta2 * f + (1 - beta2) * s @ s.T / s.shape[1] for f, s in pairs]


def check_steps(made, weight, gradients, formula, *arguments):
    gradients = [grad for (grad,) in gradients]
    expected = [*formula(weight, gradients, *arguments)]
    check_recorded(made, (weight, gradients), expected, float, 1e-9)


def soap_steps(weight, gradients, rates, every, wd):
    """Weights after each step of KL-SOAP, with the momentum kept in the space of the weight."""
    beta1, beta2, eps = 0.95, 0.95, 1e-8
    mom, var, factors = 0.0, 0.0, [np.zeros((n, n)) for n in weight.shape]
    for t, (grad, rate) in enumerate(zip(gradients, rates, strict=True)):
        if t == 0:
            factors = averaged(factors, grad, first_whiteners(grad), beta2)
            bases = [np.linalg.eigh(factor)[1] for factor in factors]
            yield weight
            continue
        mom = beta1 * mom + (1 - beta1) * grad
        var = beta2 * var + (1 - beta2) * (bases[0].T @ grad @ bases[1]) ** 2
        step = bases[0] @ (bases[0].T @ mom @ bases[1] / (np.sqrt(var) + eps)) @ bases[1].T
        weight = weight - rate * math.sqrt(1 - beta2**t) / (1 - beta1**t) * step
        weight = weight * (1 - rate * wd)
        pairs = [*zip(factors, bases, strict=True)]
        whiteners = [b / np.sqrt(np.maximum(np.diag(b.T @ f @ b), eps)) for f, b in pairs]
        factors = averaged(factors, grad, whiteners, beta2)
        if t % every == 0:
            pairs = [*zip(factors, bases, strict=True)]
            orders = [np.argsort(np.diag(b.T @ f @ b)) for f, b in pairs]
            var = var[np.ix_(*orders)]
            # The orthogonal factor depends on the order of columns: the largest comes first.
            turned = [(f @ b)[:, o[::-1]] for (f, b), o in zip(pairs, orders, strict=True)]
            bases = [np.linalg.qr(each)[0][:, ::-1] for each in turned]
        yield weight


@pytest.mark.parametrize("every", [3, *exhaustive(1)])
def test_soap_with_kl_agrees_with_the_formula_in_float64(every, rng):
    (weight,), gradients = drawn(rng, (5, 5), steps=8, dtype=float)
    schedule = FactorScheduler(2, 0.5, base_lr=0.4)
    made = SOAP(copy.deepcopy(schedule), wd=0.3, precondition_frequency=every, kl=True)
    check_steps(made, weight, gradients, soap_steps, map(schedule, range(1, 9)), every, 0.3)


@pytest.mark.parametrize("kl", [False, True])
def test_a_vector_is_updated_like_a_column(kl, rng):
    weights, gradients = drawn(rng, (5,), (), steps=6, dtype=float)
    arguments = {"lr": 0.1, "wd": 0.1, "precondition_frequency": 2, "max_precond_dim": 9}
    updater = fastopt.Updater(SOAP(precondition_1d=True, kl=kl, **arguments))
    columns, apart = [w.reshape(-1, 1).copy() for w in weights], fastopt.Updater(SOAP(**arguments))
    for grads in gradients:
        updater([0, 1], grads, weights)
        apart([0, 1], [grad.reshape(-1, 1) for grad in grads], columns)
        for weight, column in zip(weights, columns, strict=True):
            np.testing.assert_allclose(weight.ravel(), column.ravel(), rtol=1e-9)
    assert [each.shape for each in updater.states[0]] == [(5,), (5,), (1,), (5, 5), (5, 5)]


def test_products_that_overflow_in_float32_are_taken_in_float64():
    factor, basis = np.full((3, 3), 3e38, F32), np.linalg.qr(np.vander([1.0, 2, 3]))[0].astype(F32)
    new, order = iterated(factor, basis)
    np.testing.assert_allclose(new.T @ new, np.eye(3), atol=1e-5)
    np.testing.assert_allclose(np.abs(new[:, 0]), 1 / math.sqrt(3), rtol=1e-5)
    assert sorted(order) == [0, 1, 2]


@pytest.mark.parametrize(
    ("shape", "largest", "expected"),
    [
        ((8, 4, 3, 3), 16, (8, 12, 3)),
        ((2, 3), 6, (6,)),
        ((20, 2, 3), 6, (20, 6)),
        ((1, 1), 4, (1,)),
        ((1, 20, 1), 4, (20,)),
    ],
)
def test_axes_are_merged_while_their_product_is_small(shape, largest, expected):
    assert axes(shape, largest, True) == expected
    assert Shampoo(max_precond_dim=largest, merge_dims=True).axes(shape) == expected
    assert axes(shape, largest, False) == shape
    assert math.prod(expected) == math.prod(shape)


@pytest.mark.parametrize("precision", [{}, {"multi_precision": True}], ids=["alone", "masters"])
@pytest.mark.parametrize("merges", [False, True])
def test_a_weight_in_fortran_order_has_the_same_bits(merges, precision, rng):
    """The direction is rounded at random after it is complete, wherever it is written."""
    weight, gradients = single(rng, (4, 6), dtype=np.float16)
    arguments = {"rounding": "stochastic", "merge_dims": merges, **precision}
    finished = [weight.copy(order) for order in "CF"]
    for got in finished:
        updater = fastopt.Updater(SOAP(lr=0.1, precondition_frequency=2, **arguments))
        for grad in gradients:
            updater(0, grad, got)
    np.testing.assert_array_equal(*finished)
    assert not np.array_equal(finished[0], weight)


def shampoo_steps(weight, gradients, every, start, lr=0.1, wd=0.3):
    """Weights after each step of KL-Shampoo, with roots by singular values."""
    beta1, beta2, eps = 0.9, 0.999, 1e-8
    mom, var, roots, factors = 0.0, 0.0, [], [np.zeros((n, n)) for n in weight.shape]
    for t, grad in enumerate(gradients, 1):
        mom = beta1 * mom + (1 - beta1) * grad
        var = beta2 * var + (1 - beta2) * grad**2
        factors = averaged(factors, grad, roots if t > start else first_whiteners(grad), beta2)
        step = mom / (1 - beta1**t) / (np.sqrt(var / (1 - beta2**t)) + eps)
        if t == start or (t > start and t % every == 0):
            parts = [np.linalg.svd(factor / (1 - beta2**t)) for factor in factors]
            roots = [v * (w + 0.1) ** -0.5 @ v.T for v, w, _ in parts]
        if t >= start:
            turned = roots[0] @ mom @ roots[1]
            step = turned * np.linalg.norm(step) / np.linalg.norm(turned)
        weight = (1 - lr * wd) * weight - lr * step
        yield weight


@pytest.mark.parametrize(("every", "start"), [(1, 1), (3, 2), (2, 5)])
def test_shampoo_with_kl_agrees_with_the_formula_in_float64(every, start, rng):
    (weight,), gradients = drawn(rng, (4, 6), steps=8, dtype=float)
    times = {"precondition_frequency": every, "start_step": start}
    made = Shampoo(lr=0.1, wd=0.3, root_epsilon=0.1, kl=True, **times)
    check_steps(made, weight, gradients, shampoo_steps, every, start)


def test_an_axis_that_is_too_long_has_no_preconditioner(rng):
    (weight,), ((grad,),) = drawn(rng, (3, 5), steps=1, dtype=float)
    made = Shampoo(lr=1.0, precondition_frequency=1, max_precond_dim=4, root_epsilon=1e-30)
    updater, got = fastopt.Updater(made), weight.copy()
    updater(0, grad, got)
    assert [each.shape for each in updater.states[0]] == [(3, 5), (3, 5), (3, 3), (3, 3)]
    left, _, right = np.linalg.svd(grad, full_matrices=False)
    expected = weight - left @ right * math.sqrt(15 / 3)  # the root of a gradient alone
    np.testing.assert_allclose(got, expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("order", ["C", "F"])
@pytest.mark.parametrize("kl", [False, True])
def test_a_block_is_updated_like_a_weight_of_its_own(order, kl, rng):
    weights, gradients = drawn(rng, (5, 7), (4, 2, 3), steps=5, dtype=float)
    weights[0] = np.array(weights[0], order=order)
    others = copy.deepcopy(weights)
    make = partial(Shampoo, lr=0.1, wd=0.1, precondition_frequency=2, kl=kl)
    whole, apart = fastopt.Updater(make(block_size=3)), fastopt.Updater(make())
    slices = [slice(start, start + 3) for start in (0, 3, 6)]
    places = [(k, own) for k in (0, 1) for own in product(slices, slices) if others[k][own].size]
    for grads in gradients:
        whole([0, 1], grads, weights)
        for k, own in places:
            part = others[k][own].copy()
            apart(f"{k} {own}", grads[k][own].copy(), part)
            others[k][own] = part
        for weight, other in zip(weights, others, strict=True):
            np.testing.assert_allclose(weight, other, rtol=1e-11)
    assert len(whole.states[0]) == 2 + 6 * 4
