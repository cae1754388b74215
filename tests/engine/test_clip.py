"""Loss scale and clip of the global norm: exact, all or nothing, for every way to update."""

import math
from functools import partial

import numpy as np
import pytest

from fastopt import optimizer
from fastopt.amp import LossScaler, StepInfo
from fastopt.optimizer import Updater
from fastopt.sparse import RowSparse
from helpers.cases import exhaustive
from helpers.tensor_lists import frozen
from helpers.users import InNumPy, Unscaled


@pytest.mark.slow
@pytest.mark.parametrize("name", ["adam", *exhaustive("sgd", "lbsgd")])
def test_gradients_in_float16_are_divided_in_float32(name):
    """1e-7 is no number of float16; the gradient of a scaled loss tells it."""
    ends = []
    for scale, dtype in ((1.0, "f4"), (2.0**12, "f2")):
        made = optimizer.create(name, learning_rate=1.0, multi_precision=True)
        updater = Updater(made, LossScaler(scale))
        for _ in range(2):
            updater(0, np.full(3, 2.0**-30 * scale, dtype), np.zeros(3, np.float16))
        ends.append(frozen(updater.states[0]))
    assert ends[0] == ends[1]


def test_each_step_is_divided_by_the_scale_of_its_own_loss():
    """The sum of several calls, too."""
    for make in (optimizer.SGD, partial(optimizer.LBSGD, batch_scale=2), InNumPy):
        scaled, plain = Updater(make(), LossScaler(2.0, growth_interval=1)), Updater(make())
        first, second = np.ones((2, 3))
        for step in range(1, 5):
            grad = np.array([step, -1.0, 2.0])
            scaled(0, grad * scaled.loss_scaler.scale, first)
            plain(0, grad, second)
        assert scaled.loss_scaler.scale == 32
        np.testing.assert_array_equal(first, second)
        assert not np.array_equal(first, np.ones(3))


MADE = {
    "sgd": partial(optimizer.SGD, learning_rate=0.5),
    "lbsgd": partial(optimizer.LBSGD, learning_rate=0.5),
    "NumPy": partial(InNumPy, learning_rate=0.5),
    "own rule": partial(Unscaled, learning_rate=0.5),
}


@pytest.mark.parametrize("made", MADE.values(), ids=MADE)
@pytest.mark.parametrize("calls", [1, 2], ids=["one call", "a window"])
def test_every_kind_of_optimizer_is_scaled_and_clipped(made, calls, rng):
    updater = Updater(made(), LossScaler(64.0), clip_global_norm=1.0, accumulate=calls)
    plain = Updater(made())
    first, second = (list(np.ones((3, 4, 2))) for _ in range(2))
    for size in (0.01, 100.0):
        grads = list(size * rng.normal(size=(3, 4, 2)))
        norm = math.sqrt(sum(np.square(grad).sum() for grad in grads))
        for _ in range(calls):
            updater([0, 1, 2], [64 * grad for grad in grads], first)
        assert updater.info == StepInfo(True, False, pytest.approx(norm), ())
        plain([0, 1, 2], [grad * min(1, 1 / norm) for grad in grads], second)
        np.testing.assert_allclose(first, second, rtol=1e-13)


REPEATED = np.array([[3.0], [1.0], [3.0]]), np.array([2, 0, 2])
GRADIENTS = [
    ([np.array([30.0, 40.0])], 50),
    ([np.ones(1_000_000)], 1000),
    ([np.full(1_000_000, 0.1, np.float32)], 1000 * float(np.float32(0.1))),
    ([RowSparse(*REPEATED, (4, 1))], 37**0.5),
    ([REPEATED, np.ones(4)], 41**0.5),
]
NORMS = [(made, {}, *row) for made in MADE.values() for row in GRADIENTS]
RESCALED = [np.full(1, 120.0), np.full(1, 160.0)]


@pytest.mark.parametrize(
    ("made", "settings", "grads", "norm"),
    [*NORMS, *((MADE[kind], {"rescale_grad": -0.1}, RESCALED, 20) for kind in ("sgd", "NumPy"))],
)
@pytest.mark.parametrize("limit", [0, math.inf])
def test_the_norm_is_that_of_all_rescaled_gradients_whose_repeated_rows_are_summed(
    limit, made, settings, grads, norm
):
    updater = Updater(made(**settings), clip_global_norm=limit)
    rows = tuple, RowSparse
    weights = [np.zeros((4, 1)) if isinstance(g, rows) else np.zeros_like(g) for g in grads]
    for _ in range(2):
        updater([*range(len(grads))], grads, weights)
        assert updater.info.global_norm == pytest.approx(norm, rel=1e-12)
    assert all(weight.any() == (limit > 0) for weight in weights)


NORM, UNITS = {"clip_global_norm": 1.0}, {"clip_adaptive": 0.1}


@pytest.mark.parametrize("scale", [1.0, 2.0**10])
@pytest.mark.parametrize("settings", [NORM, UNITS, NORM | UNITS, NORM | {"accumulate": 2}], ids=str)
@pytest.mark.parametrize("kind", ["dense", "rows", "large", "NumPy"])
def test_the_sum_of_squares_of_finite_gradients_may_overflow(kind, settings, scale):
    """A power of two as a factor of gradients has no effect but on the norm."""

    def run(factor):
        made = InNumPy(lr=1.0) if kind == "NumPy" else optimizer.SGD(lr=1.0, momentum=0.5)
        updater, rng = Updater(made, LossScaler(scale), **settings), np.random.default_rng(0)
        weights = [np.ones((4, 30_000 if kind == "large" else 5)), np.ones(3)]
        for _ in range(4):
            grads = [rng.normal(size=each.shape) * factor for each in weights]
            if kind == "rows":
                grads[0] = grads[0][[0, 1]], np.array([3, 1])
            updater([0, 1], grads, weights)
        return weights, updater.info

    (weights, info), (expected, plain) = run(2.0**600), run(2.0**505)
    assert info.stepped
    for weight, other in zip(weights, expected, strict=True):
        np.testing.assert_allclose(weight, other, rtol=1e-12)
        assert (weight != weight.flat[0]).any()
    if "clip_adaptive" not in settings:
        assert info.global_norm == pytest.approx(plain.global_norm * 2.0**95)


@pytest.mark.parametrize("limit", [1.0, math.inf])
@pytest.mark.parametrize("made", [optimizer.SGD(lr=1.0), InNumPy()])
def test_a_large_finite_gradient_is_not_named_beside_one_that_is_not(made, limit):
    updater = Updater(made, clip_global_norm=limit)
    for bad in (math.nan, math.inf):
        updater([0, 1], [np.full(2, 3e200), np.array([1.0, bad])], [np.ones(2), np.ones(2)])
        assert (updater.info.skipped, updater.info.non_finite) == (True, ("1",))


WIDE = {
    "dense": lambda value: np.full((3, 2), value),
    "a copy": lambda value: np.full((2, 3), value).T,
    "rows": lambda value: RowSparse(np.full((2, 2), value), np.array([1, 1]), (3, 2)),
    "a pair": lambda value: (np.full((1, 2), value), [2]),
}


@pytest.mark.parametrize("settings", [{}, UNITS, NORM, NORM | UNITS, NORM | {"accumulate": 2}])
@pytest.mark.parametrize("form", WIDE)
@pytest.mark.parametrize("made", [optimizer.Adam, optimizer.LBSGD, InNumPy])
def test_a_float64_gradient_is_infinite_where_its_arithmetic_is(made, form, settings):
    """That of a float32 weight, or of one with a float32 master."""
    ends, dtypes = [], (np.float32, np.float16, np.float64)
    for value in (1e37, 1e40, 1e300, math.inf):
        scaler = None if "clip_global_norm" in settings else LossScaler()
        updater, weights = Updater(made(), scaler, **settings), [np.ones((3, 2), k) for k in dtypes]
        updater.optimizer.multi_precision = True
        for _ in range(2 * updater.accumulate):
            updater([0, 1, 2], [*map(WIDE[form], (value, value, 1.0))], weights)
        ends.append((updater.info._replace(global_norm=None), frozen([weights, updater.states])))
    assert ends[1] == ends[2] == ends[3]
    assert (ends[0][0].stepped, ends[1][0].non_finite) == (True, ("0", "1"))


def test_info_reports_the_last_call():
    updater, weight = Updater(optimizer.SGD(param_idx2name={1: "one"})), np.ones(3)
    assert updater.info == StepInfo(stepped=False, skipped=False)
    updater(0, np.full(3, np.nan), weight.copy())
    assert updater.info == StepInfo(stepped=True, skipped=False)
    updater.clip_global_norm = 1.0
    updater([1, "two"], [np.full(3, np.inf), np.full(3, np.nan)], [weight, weight.copy()])
    assert updater.info.non_finite == ("one", "two")
    updater([1], [np.zeros(3)], [weight])
    assert updater.info == StepInfo(True, False, 0.0, ())


@pytest.mark.parametrize(
    ("name", "wrong", "words"),
    [
        ("loss_scaler", 1024, r"a LossScaler .* got 1024"),
        ("clip_global_norm", -1, ".*at least 0, got -1"),
        ("clip_global_norm", -math.inf, ".*at least 0"),
        ("clip_global_norm", "1", "a number, got '1'"),
        ("clip_global_norm", math.nan, "a number"),
        *((f"clip_adaptive{x}", bad, "") for x in ("", "_eps") for bad in (-0.1, math.inf, "a")),
        *(("accumulate", wrong, "") for wrong in (0, -1, 1.5, True, None)),
    ],
)
def test_wrong_settings_are_named(name, wrong, words):
    with pytest.raises((TypeError, ValueError), match=f"{name} must be {words}"):
        Updater(optimizer.SGD(), **{name: wrong})
