"""SOAP and Shampoo: their formulas in float64, decompositions, blocks and axes."""

import copy
import math

import numpy as np
import pytest

import fastopt
from fastopt import optimizer
from fastopt._engine.eigenbases import axes, iterated
from fastopt.lr_scheduler import FactorScheduler
from fastopt.optimizer import SOAP, Shampoo
from helpers.cases import exhaustive
from helpers.matrix_rules import drawn, single, trained

F32 = np.float32


def stepped(weight, gradients, rates, every, wd=0.0, kl=False):
    """Weights after each step in float64, with the momentum kept in the space of the weight."""
    beta1, beta2, eps = 0.95, 0.95, 1e-8
    weight, mom, var = weight.astype(np.float64), 0.0, 0.0
    left = right = q_left = q_right = np.zeros((1, 1))
    for t, (grad, rate) in enumerate(zip(gradients, rates, strict=True)):
        grad = grad.astype(np.float64)
        if t:
            mom = beta1 * mom + (1 - beta1) * grad
            var = beta2 * var + (1 - beta2) * (q_left.T @ grad @ q_right) ** 2
            step = (q_left.T @ mom @ q_right) / (np.sqrt(var) + eps)
            rate *= math.sqrt(1 - beta2**t) / (1 - beta1**t)
            weight = weight - rate * q_left @ step @ q_right.T
            weight = weight * (1 - rates[t] * wd)
        ahead, below = grad, grad.T
        if kl:
            inverses = [
                basis / np.sqrt(np.maximum(np.diag(basis.T @ factor @ basis), eps))
                for factor, basis in ((left, q_left), (right, q_right))
                if t
            ] or [np.eye(n) / np.sqrt(np.sqrt(np.mean(grad**2))) for n in grad.shape]
            ahead = grad @ inverses[1] / math.sqrt(grad.shape[1])
            below = grad.T @ inverses[0] / math.sqrt(grad.shape[0])
        left = beta2 * left + (1 - beta2) * ahead @ ahead.T
        right = beta2 * right + (1 - beta2) * below @ below.T
        if t == 0:
            q_left, q_right = (np.linalg.eigh(each)[1] for each in (left, right))
        elif t % every == 0:
            orders = []
            for factor, basis in ((left, q_left), (right, q_right)):
                orders.append(np.argsort(np.diag(basis.T @ factor @ basis)))
            var = var[np.ix_(*orders)]
            # The orthogonal factor depends on the order of columns: the largest comes first.
            q_left, q_right = (
                np.linalg.qr((factor @ basis[:, order])[:, ::-1])[0][:, ::-1]
                for factor, basis, order in zip(
                    (left, right), (q_left, q_right), orders, strict=True
                )
            )
        yield weight


@pytest.mark.parametrize("every", [3, *exhaustive(1)])
@pytest.mark.parametrize("kl", [True, *exhaustive(False)])
def test_soap_agrees_with_the_formula_in_float64(every, kl, rng):
    weight, gradients = single(rng, (5, 5), steps=8)
    weight, gradients = weight.astype(float), [grad.astype(float) for grad in gradients]
    schedule = FactorScheduler(2, 0.5, base_lr=0.4)
    made = SOAP(copy.deepcopy(schedule), wd=0.3, precondition_frequency=every, kl=kl)
    rates = [schedule(t) for t in range(1, 9)]
    updater, got = fastopt.Updater(made), weight.copy()
    expected = stepped(weight, gradients, rates, every, 0.3, kl)
    for grad, each in zip(gradients, expected, strict=True):
        updater(0, grad, got)
        np.testing.assert_allclose(got, each, rtol=1e-9, atol=1e-9)


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


def test_bases_stay_orthonormal(rng):
    weight, gradients = single(rng, (4, 7), steps=25)
    updater, _ = trained(SOAP(lr=0.1, precondition_frequency=2), weight, gradients)
    *_, q_left, _, q_right = updater.states[0]
    for basis in (q_left, q_right):
        np.testing.assert_allclose(basis.T @ basis, np.eye(len(basis)), atol=1e-5)


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
    assert axes(shape, largest, False) == shape
    assert math.prod(expected) == math.prod(shape)


@pytest.mark.parametrize("name", ["soap", *exhaustive("muon", "adafactor", "sm3")])
def test_records_serve_each_part_of_a_step(name, rng, unrecorded):
    """Updates tensor by tensor take longer than a step of a small weight."""
    weights, gradients = drawn(rng, (4, 6), (6, 4), steps=6)
    updater = fastopt.Updater(optimizer.create(name))
    for grads in gradients:
        updater([0, 1], grads, weights)
    assert not unrecorded


@pytest.mark.parametrize("precision", [{}, {"multi_precision": True}], ids=["alone", "masters"])
@pytest.mark.parametrize("merges", [False, True])
def test_a_weight_in_fortran_order_has_the_same_bits(merges, precision, rng):
    """The direction is rounded at random after it is complete, wherever it is written."""
    weight, gradients = single(rng, (4, 6), dtype=np.float16)
    arguments = {"rounding": "stochastic", "merge_dims": merges, **precision}
    finished = []
    for order in "CF":
        made = SOAP(lr=0.1, precondition_frequency=2, **arguments)
        updater, got = fastopt.Updater(made), np.array(weight, order=order)
        for grad in gradients:
            updater(0, grad, got)
        finished.append(got)
    np.testing.assert_array_equal(*finished)
    assert not np.array_equal(finished[0], weight)


def test_it_shows_what_is_not_the_default():
    assert repr(SOAP()) == "SOAP(learning_rate=0.003)"
    assert repr(SOAP(lr=0.1, merge_dims=True)) == "SOAP(learning_rate=0.1, merge_dims=True)"


def shampoo_steps(weight, gradients, every, start, kl=False, lr=0.1, wd=0.3):
    """Weights after each step, with roots by singular values."""
    beta1, beta2, eps, power = 0.9, 0.999, 1e-8, -0.5 if kl else -0.25
    mom, var = np.zeros_like(weight), np.zeros_like(weight)
    roots = []
    left, right = (np.zeros((n, n)) for n in weight.shape)
    for t, grad in enumerate(gradients, 1):
        mom = beta1 * mom + (1 - beta1) * grad
        var = beta2 * var + (1 - beta2) * grad**2
        ahead, below = grad, grad.T
        if kl:
            first = [np.eye(n) / np.sqrt(np.sqrt(np.mean(grad**2))) for n in weight.shape]
            whiteners = roots if t > start else first
            ahead = grad @ whiteners[1] / math.sqrt(weight.shape[1])
            below = grad.T @ whiteners[0] / math.sqrt(weight.shape[0])
        left = beta2 * left + (1 - beta2) * ahead @ ahead.T
        right = beta2 * right + (1 - beta2) * below @ below.T
        step = mom / (1 - beta1**t) / (np.sqrt(var / (1 - beta2**t)) + eps)
        if t == start or (t > start and t % every == 0):
            roots = []
            for factor in (left, right):
                vectors, values, _ = np.linalg.svd(factor / (1 - beta2**t))
                roots.append(vectors * (values + 0.1) ** power @ vectors.T)
        if t >= start:
            turned = roots[0] @ mom @ roots[1]
            step = turned * np.linalg.norm(step) / np.linalg.norm(turned)
        weight = (1 - lr * wd) * weight - lr * step
        yield weight


@pytest.mark.parametrize(("every", "start"), [(1, 1), (3, 2), (2, 5)])
@pytest.mark.parametrize("kl", [False, True])
def test_shampoo_agrees_with_the_formula_in_float64(every, start, kl, rng):
    (weight,), gradients = drawn(rng, (4, 6), steps=8, dtype=float)
    times = {"precondition_frequency": every, "start_step": start}
    updater = fastopt.Updater(Shampoo(lr=0.1, wd=0.3, root_epsilon=0.1, kl=kl, **times))
    got = weight.copy()
    expected = shampoo_steps(weight, [grad for (grad,) in gradients], every, start, kl)
    for (grad,), each in zip(gradients, expected, strict=True):
        updater(0, grad, got)
        np.testing.assert_allclose(got, each, rtol=1e-9, atol=1e-9)


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
    arguments = {"lr": 0.1, "wd": 0.1, "precondition_frequency": 2, "kl": kl}
    whole = fastopt.Updater(Shampoo(block_size=3, **arguments))
    apart = fastopt.Updater(Shampoo(**arguments))
    others = [weight.copy() for weight in weights]
    cuts = [(slice(0, 3), slice(3, 6), slice(6, 9))] * 2
    for grads in gradients:
        whole([0, 1], grads, weights)
        for k, (grad, other) in enumerate(zip(grads, others, strict=True)):
            for i, rows in enumerate(cuts[0]):
                for j, columns in enumerate(cuts[1]):
                    part = other[rows, columns]
                    if part.size:
                        own = part.copy()
                        apart(f"{k}.{i}.{j}", grad[rows, columns].copy(), own)
                        part[...] = own
        for weight, other in zip(weights, others, strict=True):
            np.testing.assert_allclose(weight, other, rtol=1e-11)
    assert len(whole.states[0]) == 2 + 6 * 4


def test_convolutions_merge_axes(rng):
    (weight,), ((grad,),) = drawn(rng, (4, 2, 3, 3), steps=1)
    made = Shampoo(precondition_frequency=1, max_precond_dim=18, merge_dims=True)
    updater = fastopt.Updater(made)
    updater(0, grad, weight)
    assert [each.shape for each in updater.states[0][2:]] == [(8, 8)] * 2 + [(9, 9)] * 2
    assert np.isfinite(weight).all()


@pytest.mark.parametrize("shape", [(32, 32), (4, 3, 5)], ids=str)
@pytest.mark.parametrize("kind", ["shampoo", "soap"])
def test_factors_of_kl_have_one_scale_whatever_that_of_the_gradients(kind, shape, rng):
    """For elements of size s, each of k factors is a multiple of s**(2/k)."""
    steps, ends = rng.normal(size=(40, *shape)), []
    for size in (1e-3, 1.0, 1e3):
        made = fastopt.optimizer.create(kind, lr=0.1, kl=True, epsilon=1e-30)
        updater, weight = fastopt.Updater(made), np.zeros(shape)
        for grad in steps:
            updater(0, size * grad, weight)
        factors = updater.states[0][2 if kind == "shampoo" else 3 :: 2]
        scales = [np.trace(factor) / len(factor) for factor in factors]
        assert max(scales) < 2.5 * min(scales)
        ends.append((weight, np.array(scales) / size ** (2 / len(shape))))
    for weight, scales in ends:
        np.testing.assert_allclose(weight, ends[1][0], rtol=1e-6, atol=1e-9)
        np.testing.assert_allclose(scales, ends[1][1], rtol=1e-6)
