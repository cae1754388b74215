"""Shampoo: the formula in float64, blocks and axes."""

import math

import numpy as np
import pytest

import fastopt
from fastopt.optimizer import Shampoo
from helpers.matrix_rules import drawn

F32 = np.float32


def stepped(weight, gradients, every, start, kl=False, lr=0.1, wd=0.3):
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
def test_it_agrees_with_the_formula_in_float64(every, start, kl, rng):
    (weight,), gradients = drawn(rng, (4, 6), steps=8, dtype=float)
    times = {"precondition_frequency": every, "start_step": start}
    updater = fastopt.Updater(Shampoo(lr=0.1, wd=0.3, root_epsilon=0.1, kl=kl, **times))
    got = weight.copy()
    expected = stepped(weight, [grad for (grad,) in gradients], every, start, kl)
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
