"""What every optimizer of matrices promises, driven by a table of their forms."""

from functools import partial

import numpy as np
import pytest

import fastopt
from fastopt._engine.validate import leaves
from helpers.cases import OF_MATRICES, exhaustive
from helpers.matrix_rules import F32, FORMS, check_lists, drawn, single, trained

RATES = dict.fromkeys(FORMS, 0.5) | dict.fromkeys(("soap", "shampoo", "adammini"), 0.1)
"""Initial rates with which a quadratic is minimized in 200 steps."""

LAYOUTS = {
    "F": np.asfortranarray,
    "strided": lambda array: np.repeat(array, 2, axis=0)[::2],
    "reversed": lambda array: array[::-1].copy()[::-1],
}
every_form = pytest.mark.parametrize("form", FORMS)


def test_every_optimizer_of_matrices_is_in_the_table():
    assert {name.split()[0] for name in FORMS} == {*OF_MATRICES}


@every_form
def test_gradients_are_rescaled_clipped_and_turned_before_all_else(form, rng):
    weight, gradients = single(rng)
    make = partial(FORMS[form], lr=0.1, wd=0.1)
    _, got = trained(make(rescale_grad=0.5, clip_gradient=0.25, maximize=True), weight, gradients)
    turned = [-np.clip(g * F32(0.5), -0.25, 0.25) for g in gradients]
    _, other = trained(make(), weight, turned)
    np.testing.assert_array_equal(got, other)


@every_form
def test_the_gradient_is_not_written(form, rng):
    weight, (grad, *_) = single(rng)
    grad.flags.writeable = False
    trained(FORMS[form](rescale_grad=0.5, clip_gradient=0.1), weight, [grad] * 3)


@every_form
def test_a_list_call_equals_single_calls_and_the_fallback_updates_the_rest(form, rng):
    shapes = (4, 6), (6, 4), (5,), (4, 6), (2, 3, 2, 2), (4, 12), (3, 2)
    weights, gradients = drawn(rng, *shapes)
    names = dict(enumerate(["a", "b", "bias", "c", "kernel", "d", "embed_weight"]))
    alone = fastopt.Updater(fastopt.AdamW(lr=0.1, wd=0.2))
    embedding = weights[-1].copy()
    for grads in gradients:
        alone(0, grads[-1], embedding)
    check_lists(
        partial(
            FORMS[form],
            lr=0.1,
            wd=0.2,
            fallback="adamw",
            fallback_for="^embed",
            param_idx2name={k: f"{name}.weight" for k, name in names.items()},
        ),
        list(names),
        weights,
        gradients,
    )
    np.testing.assert_array_equal(weights[-1], embedding)


@pytest.mark.parametrize("layout", ["F", "strided", *exhaustive("reversed")])
@pytest.mark.parametrize("shape", [(4, 6), (3, 2, 2)], ids=str)
@every_form
def test_any_layout_gives_the_same_weights(form, shape, layout, rng):
    weight, gradients = single(rng, shape)
    laid, make = LAYOUTS[layout], partial(FORMS[form], lr=0.1)
    updater, got = fastopt.Updater(make()), laid(weight)
    for grad in gradients:
        updater(0, laid(grad), got)
    _, expected = trained(make(), weight, gradients)
    if form.startswith("sm3"):
        np.testing.assert_array_equal(got, expected)
    else:
        np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-6)


@every_form
def test_masters_give_the_rounded_float32_step(form, half, rng):
    weights, gradients = drawn(rng, (4, 6), (5,), dtype=half)
    exact = [weight.astype(F32) for weight in weights]
    halves, floats = (
        fastopt.Updater(FORMS[form](lr=0.01, multi_precision=p, fallback="sgd"))
        for p in (True, False)
    )
    for grads in gradients:
        halves([0, 1], grads, weights)
        floats([0, 1], [g.astype(F32) for g in grads], exact)
    for index, (weight, other) in enumerate(zip(weights, exact, strict=True)):
        np.testing.assert_array_equal(weight, other.astype(half))
        np.testing.assert_array_equal(leaves(halves.states[index])[0], other)


@every_form
def test_it_converges_on_a_convex_problem(form):
    target = np.linspace(-2, 2, 35, dtype=F32).reshape(7, 5)
    made = FORMS[form](learning_rate=lambda t: RATES[form] * (1 - t / 201))
    updater, weight = fastopt.Updater(made), np.ones((7, 5), F32)
    start = np.square(weight - target).sum()
    for _ in range(200):
        updater(0, weight - target, weight)
    assert np.square(weight - target).sum() < 0.01 * start
