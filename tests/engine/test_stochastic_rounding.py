"""Weights and states in half precision: arithmetic in float32, then one rounding of each."""

import warnings

import numpy as np
import pytest

from fastopt import optimizer
from fastopt.sparse import RowSparse
from helpers.cases import CASES, LIGHT, OF_STEPS, exhaustive, sampled
from helpers.half_precision import bits, every_case, flat, lively, silent
from helpers.tensor_lists import frozen

DITHERED = {
    "weight": {"rounding": "stochastic"},
    "state": {"multi_precision": True, "state_dtype": "bfloat16"},
    "both": {"rounding": "stochastic", "state_dtype": "bfloat16"},
}
"""What may be rounded stochastically."""


def updater_of(name="sgd", learning_rate=0.1, **kwargs):
    return optimizer.get_updater(optimizer.create(name, learning_rate=learning_rate, **kwargs))


@pytest.mark.slow
@silent
@every_case
def test_a_step_is_a_float32_step_rounded_once(case, half, rng):
    ours, single = case.updater(**lively(case)), case.updater(**lively(case))
    weight = rng.normal(size=case.shape).astype(half)
    for _ in range(4):
        gradient, exact = rng.normal(size=case.shape).astype(half), weight.astype(np.float32)
        ours(0, gradient, weight)
        single(0, gradient.astype(np.float32), exact)
        np.testing.assert_array_equal(bits(weight), bits(exact.astype(half)))
        for one, other in zip(flat(ours.states[0]), flat(single.states[0]), strict=True):
            assert one.dtype == np.float32
            np.testing.assert_array_equal(bits(one), bits(other))


def test_an_optimizer_warns_once_and_names_the_line_that_called(half):
    updater = updater_of()
    weights = [np.ones(3, half) for _ in range(3)]
    with pytest.warns(UserWarning, match=f"^{half} weights without masters lose .* SGD$") as seen:
        updater(0, np.ones(3, half), weights[0])
    assert [warning.filename for warning in seen] == [__file__]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        updater(1, np.ones(3, half), weights[1])
        updater([0, 1, 2], [np.ones(3, half)] * 3, weights)
    with pytest.warns(UserWarning, match="without masters") as seen:
        updater_of()([0, 1], [np.ones(3, half)] * 2, weights[:2])
    assert [warning.filename for warning in seen] == [__file__]


def test_the_warning_as_an_error_changes_nothing(half):
    updater, weight = updater_of(), np.ones(3, half)
    for _ in range(2):
        with pytest.raises(UserWarning, match="without masters"):
            updater(0, np.ones(3, half), weight)
    assert (weight == 1).all()
    assert (updater.states, updater.optimizer.num_update) == ({}, 0)


@pytest.mark.parametrize("start", [1.0, *exhaustive(-3.14159, 300.1, 1e-4, 1.2e-6)])
@pytest.mark.parametrize("kind", ["dense", *exhaustive("lazy", "rows", "passes")])
def test_stochastic_rounding_is_right_in_the_mean(kind, start, half):
    """Two numbers are next to the exact one; the nearer one comes up the more often."""
    shape, name = (200, 500), {"rows": "groupadagrad", "passes": "lamb"}.get(kind, "sgd")
    weight, gradient = np.full(shape, start, half), np.ones(shape, np.float32)
    exact, given = weight.astype(np.float32), gradient
    rate = 0.0013 * (1 if kind == "passes" else abs(start))
    if kind == "lazy":
        given = RowSparse(gradient, np.arange(len(gradient)), shape)
    updater_of(name, rate)(0, gradient, exact)
    updater_of(name, rate, rounding="stochastic")(0, given, weight)
    wanted, numbers = float(exact[0, 0]), np.unique(weight)
    low, high = numbers.astype(float)
    assert numbers[1] == np.nextafter(numbers[0], half.type(np.inf))
    assert low < wanted < high
    share = (wanted - low) / (high - low)
    deviation = np.sqrt(share * (1 - share) / weight.size)
    assert abs((weight == numbers[1]).mean() - share) < 5 * deviation


@pytest.mark.parametrize("distance", [1, 2, 301, 8192])
def test_elements_are_rounded_independently(distance, bfloat16):
    weight = np.ones((300, 301), bfloat16)
    halfway = np.full(weight.shape, -(2.0**-8), np.float32)
    updater_of(learning_rate=1.0, rounding="stochastic")(0, halfway, weight)
    signs = np.where(weight == 1, -1.0, 1.0).ravel()
    assert abs(signs.mean()) < 5 / np.sqrt(signs.size)
    assert abs((signs * np.roll(signs, distance)).mean()) < 5 / np.sqrt(signs.size)


@pytest.mark.slow
@pytest.mark.parametrize("form", DITHERED)
def test_seed_index_and_step_each_change_the_draws(form, bfloat16):
    gradient = np.random.default_rng(0).normal(size=1000).astype(bfloat16)

    def outcome(seed=0, index=0, begin=0):
        # Without memory of the past, steps of one gradient differ by their draws alone.
        kwargs = {"beta1": 0.0, "beta2": 0.0, "seed": seed, "begin_num_update": begin}
        updater, weight = updater_of("adam", **kwargs, **DITHERED[form]), np.ones(1000, bfloat16)
        updater(index, gradient, weight)
        return frozen((weight, flat(updater.states[index])))

    first = outcome()
    assert outcome() == first
    for other in (outcome(seed=1), outcome(index=1), outcome(index="a"), outcome(begin=1)):
        assert other != first


@pytest.mark.slow
def test_weight_and_state_have_draws_of_their_own(bfloat16):
    updater = updater_of("sgd", 1.0, momentum=0.9, **DITHERED["both"])
    weight = np.ones(20_000, bfloat16)
    updater(0, np.full(20_000, -(1 + 2.0**-8), np.float32), weight)
    raised = [(weight > 2).astype(float), (updater.states[0] > 1).astype(float)]
    assert [share.mean() for share in raised] == pytest.approx([0.25, 0.5], abs=0.02)
    assert abs(np.corrcoef(raised)[0, 1]) < 5 / np.sqrt(weight.size)


ROWS = 3000
UNMOVED = {"signum", "lion", "test", "asgd"}
"""Optimizers whose state decides signs alone, or nothing about the weight."""


def repeated(case, **kwargs):
    """Weight with many equal rows after equal gradients: as many draws of one experiment."""
    rng, updater = np.random.default_rng(0), case.updater(**lively(case), **kwargs)
    weight = np.tile(rng.normal(size=5), (ROWS, 1)).astype(np.float32)
    for _ in range(6):
        updater(0, np.tile(rng.normal(size=5), (ROWS, 1)).astype(np.float32), weight)
    return weight.astype(float), updater


def agree_in_the_mean(compressed, exact):
    """Whether the rows of one scatter around those of the other."""
    deviation = compressed.std(axis=0) / np.sqrt(ROWS)
    return bool((abs(compressed.mean(axis=0) - exact[0]) <= 5 * deviation + 1e-6).all())


@pytest.mark.slow
@pytest.mark.parametrize(
    "case", sampled((c for c in CASES if c.name not in OF_STEPS), LIGHT), ids=str
)
def test_the_trajectory_is_that_of_float32_state_in_the_mean(case, bfloat16):
    exact, plain = repeated(case)
    compressed, updater = repeated(case, state_dtype="bfloat16")
    ours, theirs = (flat(u.states[0]) for u in (updater, plain))
    # Numbers that are kept once for each tensor are not compressed.
    expected = [(bfloat16 if a.shape else a.dtype, a.shape) for a in theirs]
    assert [(a.dtype, a.shape) for a in ours] == expected
    if not theirs:
        np.testing.assert_array_equal(compressed, exact)
        return
    if case.name != "adopt":  # which clips what it makes of its state: noise has a mean then
        assert agree_in_the_mean(compressed, exact)
    assert compressed.std(axis=0).any() == (case.name not in UNMOVED)


WITHOUT = """
import sys
sys.modules["ml_dtypes"] = None
import numpy as np
from fastopt import optimizer
updater = optimizer.get_updater(optimizer.Adam(multi_precision=True))
updater(0, np.ones(3, np.float16), np.ones(3, np.float16))
try:
    optimizer.Adam(state_dtype="bfloat16")
except ImportError as error:
    print(error)
"""


def test_without_ml_dtypes_the_extra_is_named_and_float16_works(run_python):
    assert run_python(WITHOUT).strip() == ("bfloat16 arrays need ml_dtypes: pip install ml_dtypes")
