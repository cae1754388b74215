"""Natural forms of training loops have the results of Adam by hand."""

import multiprocessing
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

import fastopt
from helpers.oracles import adam

LR, STEPS = 0.1, 4
A = np.random.default_rng(0).normal(size=(6, 4))
B = np.random.default_rng(1).normal(size=(6, 3))
START = {"w": np.full((4, 3), 0.5), "b": np.zeros(3), "x": 0.5}


def errors(w, b):
    return A @ w + b - B


def gradients(w, b):
    error = errors(w, b)
    return {"w": A.T @ error, "b": error.sum(axis=0)}


def by_hand(name):
    """Adam in NumPy; a count for each name, as in fastopt."""
    return adam(START[name], LR, 0.0, formula="mxnet")


def in_numpy():
    steps = {name: by_hand(name) for name in "wb"}
    params = {name: next(step) for name, step in steps.items()}
    for _ in range(STEPS):
        grads = gradients(**params)
        params = {name: step.send(grads[name]) for name, step in steps.items()}
    return params


def updater():
    return fastopt.Updater(fastopt.Adam(lr=LR))


def copies():
    return {name: START[name].copy() for name in "wb"}


def in_place():
    params, step = copies(), updater().step
    for _ in range(STEPS):
        step(gradients(**params), params)
    return params


def experts():
    params, step = {k: copies() for k in "abc"}, updater().step
    for chosen in ("ab", "bc", "ca", "abc", "abc"):
        step({k: gradients(**params[k]) for k in chosen}, params, missing="skip")
    return params["b"]


def episodes():
    step = updater()
    for _ in range(3):
        step.states, step.optimizer = {}, fastopt.Adam(lr=LR)
        params = copies()
        for _ in range(STEPS):
            step.step(gradients(**params), params)
    return params


def threads():
    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(lambda _: in_place(), range(3)))[-1]


def forked():
    in_place()  # imports and loads kernels
    with multiprocessing.get_context("fork").Pool(1) as pool:
        return pool.apply(in_place)


FORMS = [in_place, experts, episodes, threads, forked]


@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")
@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.__name__)
def test_a_form_has_the_results_of_adam_by_hand(form):
    found, expected = form(), in_numpy()
    for name in ("w", "b"):
        np.testing.assert_allclose(found[name], expected[name], rtol=1e-10)


@pytest.mark.parametrize("number", [np.array(0.5), np.array([0.5]), np.array([[0.5]])])
@pytest.mark.parametrize("kind", [float, np.float64, np.float32, np.array])
def test_numbers_are_parameters_and_gradients(number, kind):
    params, expected, step = {"x": number.copy(), "w": np.ones(2)}, by_hand("x"), updater()
    value = next(expected)
    for _ in range(STEPS):
        grad = kind(value - 2.0)
        grad = grad.reshape(number.shape) if kind is np.array else grad
        step.step({"x": grad, "w": np.ones(2)}, params)
        value = expected.send(value - 2.0)
    assert params["x"].item() == pytest.approx(value, rel=1e-6)
