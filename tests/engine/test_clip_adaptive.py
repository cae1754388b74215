"""Adaptive clipping of gradients by the norms of units."""

from functools import partial

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastopt import optimizer
from fastopt.amp import LossScaler
from fastopt.checkpoint import CheckpointError
from helpers.users import InNumPy

SHAPES = [(), (1,), (0,), (7,), (5, 3), (3, 0), (0, 3), (4, 2, 3), (3, 2, 2, 5), (2, 70_000)]


def norms(array):
    """Norm of each unit, in float64."""
    if array.ndim < 2:
        return np.atleast_1d(np.linalg.norm(array.astype(np.float64)))
    squares = array.astype(np.float64) ** 2
    return np.sqrt(squares.sum(axis=tuple(range(1, array.ndim))))


def clipped(weight, grad, limit, eps=1e-3, factor=1.0):
    """The formula of the paper in float64."""
    most = limit * np.maximum(norms(weight), eps)
    norm = abs(factor) * norms(grad)
    scale = np.where(norm > most, most / np.maximum(norm, 1e-6), 1.0)
    shape = (len(scale),) + (1,) * (grad.ndim - 1) if grad.ndim > 1 else ()
    return np.asarray(grad, np.float64) * scale.reshape(shape)


def plain(**kwargs):
    """Updater that adds gradients to weights."""
    rescale_grad = kwargs.pop("rescale_grad", 1.0)
    return optimizer.Updater(optimizer.Test(rescale_grad=rescale_grad), **kwargs)


@pytest.mark.slow("exhaustive")
@given(
    shape=st.sampled_from(SHAPES),
    dtype=st.sampled_from([np.float32, np.float64]),
    limit=st.floats(0, 2),
    eps=st.floats(0, 1),
    rescale_grad=st.sampled_from([1.0, -0.25, 3.0]),
    seed=st.integers(0, 1000),
)
def test_units_are_clipped_as_in_the_paper(shape, dtype, limit, eps, rescale_grad, seed):
    rng = np.random.default_rng(seed)
    weight = np.asarray(rng.normal(size=shape), dtype)
    grad = np.asarray(rng.normal(size=shape) * 10.0 ** rng.integers(-4, 3), dtype)
    before, given_grad = weight.copy(), grad.copy()
    made = plain(clip_adaptive=limit, clip_adaptive_eps=eps, rescale_grad=rescale_grad)
    for _ in range(2):
        expected = before + rescale_grad * clipped(before, grad, limit, eps, rescale_grad)
        made(0, grad, weight)
        tolerance = 1e-5 if dtype == np.float32 else 1e-12
        np.testing.assert_allclose(weight, expected, rtol=tolerance, atol=tolerance)
        np.testing.assert_array_equal(grad, given_grad)
        before = weight.copy()


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_large_weights_and_gradients_are_clipped_like_small_ones(dtype):
    """The sum of their squares may be larger than any number."""
    results = []
    for scale in (1.0, {"float32": 2.0**100, "float64": 2.0**1000}[dtype]):
        weight, grad = (np.random.default_rng(0).normal(size=(2, 8, 5)) * scale).astype(dtype)
        grad[:4] *= grad.dtype.type(0.1)
        plain(clip_adaptive=0.5, clip_adaptive_eps=0)(0, grad, weight)
        results.append(weight / weight.dtype.type(scale))
    np.testing.assert_allclose(*results, rtol=1e-6)


@pytest.mark.slow
def test_the_numbers_are_those_of_optax():
    # optax 0.2.8, adaptive_grad_clip(0.1, eps=1e-3), on the transpose: its units are the last axis.
    for weight, grad, expected in (
        ([0.5, -1.0, 2.0], [3.0, 4.0, 0.0], [0.13747727870941162, 0.18330302834510803, 0.0]),
        ([0.0] * 3, [1.0, -2.0, 2.0], np.array([0.5, -1, 1]) * 6.666666740784422e-05),
        ([1.0] * 3, [0.01, 0.02, 0.03], [0.01, 0.02, 0.03]),
    ):
        after = np.array([weight], np.float32)
        plain(clip_adaptive=0.1)(0, np.array([grad], np.float32), after)
        np.testing.assert_allclose(after - weight, [expected], rtol=1e-5, atol=1e-7)
    vector = np.array([3.0, -4.0], np.float32)
    plain(clip_adaptive=0.1)(0, np.array([6.0, 8.0], np.float32), vector)
    np.testing.assert_allclose(vector, [3.30000001192092896, -3.5999999940395354], rtol=1e-6)


F64, ROWS = np.float64, np.array([4, 1, 4])
sgd, in_numpy = partial(optimizer.SGD, learning_rate=1.0), partial(InNumPy, learning_rate=1.0)
FORMS = {
    "a norm": (F64, sgd, {"clip_global_norm": 1e9}, np.array),
    "NumPy": (F64, in_numpy, {}, np.array),
    "a scale": (F64, sgd, {"loss_scaler": LossScaler(1024.0)}, np.array),
    "NumPy and a scale": (F64, in_numpy, {"loss_scaler": LossScaler(1024.0)}, np.array),
    "a mean": (F64, sgd, {"accumulate": 2}, np.array),
    "masters": (np.float16, partial(sgd, multi_precision=True), {}, np.array),
    "lazy rows": (F64, partial(sgd, lazy_update=True), {}, lambda g: (g[ROWS], ROWS)),
    "rows": (F64, partial(sgd, lazy_update=False), {}, lambda g: (g[ROWS], ROWS)),
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("shape", [(6, 2), (6,)])
def test_units_are_clipped_before_all_else(form, shape, rng):
    """A unit of row-sparse gradients is an indexed row, and that of a vector the whole."""
    dtype, make, settings, given = FORMS[form]
    settings = {**settings, "clip_adaptive": 0.1, "clip_adaptive_eps": 1.0}
    updater = optimizer.Updater(make(clip_gradient=0.05), **settings)
    weight, grad = rng.normal(size=shape).astype(dtype), (10 * rng.normal(size=shape)).astype(dtype)
    whole = grad
    if "rows" in form:
        whole = np.zeros(shape)
        np.add.at(whole, ROWS, grad[ROWS])
    change = clipped(weight.astype(F64), whole.astype(F64), 0.1, 1.0)
    expected = weight - (change if "NumPy" in form else np.clip(change, -0.05, 0.05))
    for share in (0.5, 1.5) if form == "a mean" else [1024.0 if "scale" in form else 1.0]:
        updater(0, given(grad * dtype(share)), weight)
    ours = updater.states[0][1] if form == "masters" else weight
    np.testing.assert_allclose(ours, expected, rtol=1e-5 if form == "masters" else 1e-12)
    if form == "a norm":
        assert updater.info.global_norm == pytest.approx(np.linalg.norm(change))


def test_settings_are_part_of_a_checkpoint():
    made, new = plain(clip_adaptive=0.1, clip_adaptive_eps=0.5), plain()
    made(0, np.ones(2), np.ones(2))
    saved = made.states_dict()
    new.load_states_dict(saved)
    assert (new.clip_adaptive, new.clip_adaptive_eps) == (0.1, 0.5)
    saved["updater"]["clip_adaptive_eps"] = None
    with pytest.raises(CheckpointError, match="clip_adaptive_eps"):
        new.load_states_dict(saved)


def test_an_index_comes_once_in_a_call():
    updater, weight = optimizer.Updater(optimizer.SGD(), clip_adaptive=0.1), np.ones(2)
    for _ in range(2):
        with pytest.raises(ValueError, match="index 0: clip_adaptive updates an index once a call"):
            updater([0, 0], [np.ones(2), np.ones(2)], [weight, weight])
    assert (weight == 1).all()
