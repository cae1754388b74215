"""state_dtype='int8': moving averages in 8 bits, with a scale for each block of a row."""

import copy
import importlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numba import njit
from numba.core.registry import cpu_target

import fastopt
from fastopt import optimizer
from fastopt._engine.validate import leaves
from fastopt._kernels.blocks import inverse_root
from fastopt._kernels.codes import decoded, encoded, scales_shape
from fastopt._kernels.vectors import LITTLE_THROTTLED, prefer_wide_vectors
from helpers.cases import exhaustive, named, nightly
from helpers.half_precision import bits
from helpers.paths import ROOT

BLOCK = 128
SHAPES = [(40, 200), (3, 5, 300), (16, 4096)]

NAMES = {
    "adam": {},
    "sgd": {"momentum": 0.9},
    "nag": {"momentum": 0.9},
    "signum": {},
    "lion": {},
    "lars": {"momentum": 0.9},
    "lbsgd": {"momentum": 0.9, "warmup_strategy": "lars"},
    "novograd": {},
    "rmsprop": {},
    "adadelta": {},
    "adamw": {"cautious": True, "cautious_decay": True},
    "adamax": {},
    "adabelief": {},
    "adopt": {},
    "ademamix": {},
    "adamatan2": {},
    "nadam": {"amsgrad": True},
    "nadamw": {},
    "radam": {},
    "lamb": {},
    "lans": {},
}
"""Optimizers with moving averages, and arguments with which they have some."""

REFUSED = {
    "adagrad": {},
    "adan": {},
    "asgd": {},
    "dcasgd": {"momentum": 0.9},
    "ftml": {},
    "ftrl": {},
    "groupadagrad": {},
    "rmsprop": {"centered": True},
    "rprop": {},
    "schedulefreeadamw": {},
    "schedulefreesgd": {},
    "test": {},
    "yogi": {},
}


def made(name="adam", state_dtype="int8", **kwargs):
    arguments = {"learning_rate": 0.01, **NAMES.get(name, {}), **kwargs}
    return fastopt.Updater(optimizer.create(name, state_dtype=state_dtype, **arguments))


def gradients(shape, steps, dtype=np.float32, seed=0):
    rng = np.random.default_rng(seed)
    return [rng.normal(size=shape).astype(dtype) for _ in range(steps)]


def trained(updater, shape, steps=3, dtype=np.float32):
    weight = np.random.default_rng(1).normal(size=shape).astype(dtype)
    for gradient in gradients(shape, steps, dtype):
        updater(0, gradient, weight)
    return weight


def exact_twin(updater):
    """Updater whose state is what the codes of another stand for."""
    twin = fastopt.Updater(copy.deepcopy(updater.optimizer))
    twin.optimizer.state_dtype = None
    twin.states = {index: updater.state_as(index) for index in updater.states}
    return twin


def pairs(state):
    """Codes and scales of each slot of codes."""
    arrays = leaves(state)
    following = zip(arrays, (*arrays[1:], None), strict=True)
    return [(one, other) for one, other in following if one.dtype.name in ("int8", "uint8")]


def same_bits(one, other):
    return all(
        a.dtype == b.dtype and a.tobytes() == b.tobytes()
        for a, b in zip(leaves(one), leaves(other), strict=True)
    )


# Encoding


def blocks_of(array):
    """Blocks of an array, each as a vector."""
    rows = array.reshape(len(array) if array.ndim > 1 else 1, -1)
    return [row[k : k + BLOCK] for row in rows for k in range(0, len(row), BLOCK)]


def made_numbers(rng, shape, kind, real, exponent):
    numbers = (rng.normal(size=shape) * np.exp(rng.normal(0, 3, shape))).astype(real)
    numbers *= real(10.0) ** exponent
    numbers[rng.random(shape) < 0.2] = 0
    return numbers * numbers if kind == np.uint8 else numbers


shapes = st.sampled_from([(1,), (127,), (300,), (4, 7), (3, 128), (2, 257), (5, 2, 70)])
settings_of_encoding = {
    "real": st.sampled_from([np.float32, np.float64]),
    "exponent": st.integers(-12, 12),
    "seed": st.integers(0, 1000),
}


@settings(max_examples=40)
@given(shape=shapes, **settings_of_encoding)
def test_signed_numbers_are_within_half_a_code(shape, real, exponent, seed):
    numbers = made_numbers(np.random.default_rng(seed), shape, np.int8, real, exponent)
    codes, scales = encoded(numbers, np.int8)
    assert (codes.shape, codes.dtype) == (shape, np.int8)
    assert (scales.shape, scales.dtype) == (scales_shape(shape), real)
    restored = decoded(codes, scales)
    assert (restored[numbers == 0] == 0).all()
    for exact, found in zip(blocks_of(numbers), blocks_of(restored), strict=True):
        top = np.abs(exact).max(initial=0)
        assert np.abs(exact - found).max(initial=0) <= top / 127 / 2 * 1.001
        np.testing.assert_allclose(np.abs(found).max(), top, rtol=1e-6)


@settings(max_examples=40)
@given(shape=shapes, **settings_of_encoding)
def test_roots_of_nonnegative_numbers_keep_their_size_down_to_1e_6(shape, real, exponent, seed):
    numbers = made_numbers(np.random.default_rng(seed), shape, np.uint8, real, exponent)
    codes, scales = encoded(numbers, np.uint8)
    assert (codes.shape, codes.dtype) == (shape, np.uint8)
    assert (scales.shape, scales.dtype) == (scales_shape(shape), real)
    restored = decoded(codes, scales)
    for exact, found in zip(blocks_of(np.sqrt(numbers)), blocks_of(np.sqrt(restored)), strict=True):
        top = exact.max(initial=0)
        np.testing.assert_allclose(found.max(), top, rtol=1e-6)
        if not top:
            assert not found.any()
            continue
        for least, most in (
            (0.06, 0.017),
            (4e-3, 0.033),
            (3e-4, 0.065),
            (2e-5, 0.13),
            (2e-6, 0.26),
        ):
            large = exact >= least * top
            np.testing.assert_allclose(found[large], exact[large], rtol=most)
        assert (found[exact < 1e-6 * top] < 1.8e-6 * top).all()
        assert (found > 0).all()


@settings(max_examples=40)
@given(shape=shapes, **settings_of_encoding)
def test_signed_numbers_beside_nonnegative_ones_keep_their_quotients(shape, real, exponent, seed):
    """So no element's step changes by more than a part of the largest step of its block."""
    rng = np.random.default_rng(seed)
    squares = made_numbers(rng, shape, np.uint8, real, exponent)
    steps = rng.normal(size=shape).astype(real)
    numbers = steps * np.sqrt(squares)
    pair = encoded(squares, np.uint8)
    restored = decoded(*encoded(numbers, np.int8, squares), pair)
    roots = np.sqrt(decoded(*pair))
    for step, found, root, of in zip(
        *map(blocks_of, (steps, restored, roots, squares)), strict=True
    ):
        there = of > 0
        top = np.abs(step[there]).max(initial=0)
        difference = np.abs(found[there] / root[there] - step[there])
        assert (difference <= top / 254 * 1.001 + 1e-3 * np.abs(step[there])).all()


def test_a_block_that_is_not_finite_is_nan_and_others_are_not():
    numbers = np.ones((2, 300), np.float32)
    numbers[0, 130] = np.inf
    numbers[1, 299] = np.nan
    for kind in (np.int8, np.uint8):
        lost = np.isnan(decoded(*encoded(numbers, kind)))
        assert lost[0, 128:256].all()
        assert lost[1, 256:].all()
        assert lost.sum() == 128 + 44


def test_rows_do_not_share_blocks():
    numbers = np.random.default_rng(0).normal(size=(4, 200)).astype(np.float32)
    changed = numbers.copy()
    changed[2] *= 1000
    for one, other in zip(encoded(numbers, np.int8), encoded(changed, np.int8), strict=True):
        assert (one[[0, 1, 3]] == other[[0, 1, 3]]).all()


# Updates


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("name", named(NAMES, "adam"))
def test_a_step_is_the_one_of_float32_from_what_the_codes_stand_for(name, shape):
    updater = made(name, wd=0.1)
    weight = trained(updater, shape)
    twin, other = exact_twin(updater), weight.copy()
    gradient = gradients(shape, 1, seed=5)[0]
    updater(0, gradient, weight)
    twin(0, gradient, other)
    np.testing.assert_array_equal(bits(weight), bits(other))
    expected = iter(leaves(twin.states[0]))
    for array in leaves(updater.state_as(0)):
        exact = next(expected)
        if array.ndim == 0:
            np.testing.assert_array_equal(array, exact)
    rule = updater.optimizer.rule
    slots = dict(zip(rule.state, leaves(twin.states[0]), strict=False))
    found = iter(pairs(updater.states[0]))
    for slot, kind in rule.codes.items():
        codes, scales = next(found)
        by = slots[rule.divisor] if kind == "int8" and rule.divisor else None
        wanted = encoded(slots[slot], np.dtype(kind), by)
        np.testing.assert_array_equal(codes, wanted[0])
        np.testing.assert_array_equal(scales, wanted[1])


@pytest.mark.parametrize("dtype", exhaustive("float64", "float16", "bfloat16"))
@pytest.mark.parametrize("master", [None, "float32", "split"])
def test_other_weights_take_the_same_steps(dtype, master):
    if (master == "split" and dtype != "bfloat16") or (master and dtype == "float64"):
        pytest.skip("no such master")
    dtype = pytest.importorskip("ml_dtypes").bfloat16 if dtype == "bfloat16" else np.dtype(dtype)
    masters = {"rounding": "stochastic"}
    if master:
        masters = {"multi_precision": True, "master": master}
    updater = made(**masters)
    weight = trained(updater, (40, 200), dtype=dtype)
    twin, other = exact_twin(updater), weight.copy()
    if dtype == np.float64:
        twin.states = {0: updater.state_as(0, np.float64)}
    gradient = gradients((40, 200), 1, dtype, seed=5)[0]
    updater(0, gradient, weight)
    twin(0, gradient, other)
    np.testing.assert_array_equal(bits(weight), bits(other))
    assert len(pairs(updater.states[0])) == 2


# Which weights, and how much memory


@pytest.mark.parametrize(
    ("shape", "least", "coded"),
    [
        ((64, 64), None, True),
        ((63, 64), None, False),
        ((100_000,), None, False),
        ((100_000,), 4096, True),
        ((4, 20), 80, True),
        ((4, 20), 81, False),
        ((5000, 15), 1, False),
        ((5000, 16), None, True),
        ((), 1, True),
    ],
    ids=str,
)
def test_small_weights_vectors_and_narrow_rows_stay_float32(shape, least, coded):
    state = optimizer.Adam(state_dtype="int8", state_min_size=least).create_state(
        0, np.ones(shape, np.float32)
    )
    assert len(pairs(state)) == 2 * coded
    assert {a.dtype.name for a in leaves(state)} == (
        {"int8", "uint8", "float32"} if coded else {"float32"}
    )


@pytest.mark.parametrize(("shape", "most"), [((1000, 1000), 2.2), ((20_000, 64), 2.3)])
def test_adam_keeps_little_more_than_two_bytes_a_parameter(shape, most):
    weight = np.ones(shape, np.float32)
    state = optimizer.Adam(state_dtype="int8").create_state(0, weight)
    assert 2 <= sum(array.nbytes for array in leaves(state)) / weight.size <= most


@pytest.mark.parametrize("name", REFUSED)
def test_state_that_8_bits_cannot_hold_is_refused(name):
    updater = fastopt.Updater(optimizer.create(name, state_dtype="int8", **REFUSED[name]))
    weight = np.ones((64, 64), np.float32)
    with pytest.raises(ValueError, match=r"moving averages, and rule .* declares none"):
        updater(0, np.ones_like(weight), weight)
    assert (weight == 1).all()
    assert not updater.states
    assert updater.optimizer.num_update == 0


def test_rules_without_state_work():
    updater = made("sgd", momentum=0.0)
    weight = np.ones((64, 64), np.float32)
    updater(0, weight.copy(), weight)
    assert updater.states[0] is None


@pytest.mark.parametrize("name", ["muon", "soap"])
def test_matrix_optimizers_refuse(name):
    with pytest.raises(ValueError, match="state_dtype"):
        optimizer.create(name, state_dtype="int8")


@pytest.mark.parametrize(
    ("slots", "message"),
    [
        ({"signed": ("other",)}, "'other' must be in state"),
        ({"signed": ("mom",), "nonnegative": ("mom",)}, "in one of signed and nonnegative"),
        ({"signed": "mom"}, "signed must be a sequence of names"),
        ({"signed": ("mom",), "row": lambda grad, h: grad}, "rows have one number"),
    ],
)
def test_rules_declare_their_own_slots(slots, message):
    with pytest.raises(TypeError, match=message):
        fastopt.rule(state=("mom",), hyper=("lr",), **slots)


# States that users set


def test_states_that_do_not_fit_are_refused():
    updater = made()
    weight = trained(updater, (64, 64), 1)
    (m, m_scales), (v, v_scales) = updater.states[0]
    wrong = [
        ((m, (v, v_scales)), ValueError, "state 'var' must have shape"),
        (((m, m_scales[:-1]), (v, v_scales)), ValueError, "scales of state 'mean' must have shape"),
        (((m, m_scales.astype(float)), (v, v_scales)), TypeError, "scales of state 'mean' must"),
        (((v, m_scales), (v, v_scales)), TypeError, "state 'mean' must have dtype"),
        (((m[:-1], m_scales), (v, v_scales)), ValueError, "state 'mean' must have shape"),
        (((m, m_scales), (v, m_scales)), ValueError, "share memory"),
    ]
    before = weight.copy()
    for state, error, message in wrong:
        updater.states[0] = state
        with pytest.raises(error, match=message):
            updater(0, np.ones_like(weight), weight)
    np.testing.assert_array_equal(weight, before)


@pytest.mark.slow
def test_slots_in_float32_and_in_8_bits_work_together():
    updater, plain = made(), made(state_dtype=None)
    weight, other = (trained(each, (64, 64), 0) for each in (updater, plain))
    zeros = np.zeros((64, 64), np.float32)
    updater.states = {0: (zeros, encoded(zeros, np.uint8))}
    for gradient in gradients((64, 64), 3):
        updater(0, gradient, weight)
        plain(0, gradient, other)
    np.testing.assert_array_equal(updater.states[0][0], plain.states[0][0])
    np.testing.assert_allclose(weight, other, atol=3e-3)


# Numbers that are not finite


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_bad_gradient_spreads_over_its_block_with_the_next_step(bad):
    updater = made()
    weight = trained(updater, (40, 200))
    gradient = np.ones((40, 200), np.float32)
    gradient[3, 7] = bad
    updater(0, gradient, weight)
    assert np.isnan(weight).sum() == 1
    updater(0, np.ones_like(gradient), weight)
    lost = np.isnan(weight)
    assert lost[3, :128].all()
    assert lost.sum() == 128


# Checkpoints and conversion


def test_a_checkpoint_with_other_scales_is_refused():
    updater = made()
    trained(updater, (40, 200))
    for damaged in ("shape", "dtype", "missing"):
        saved = updater.states_dict()
        (m, scales), var = next(iter(saved["states"].values()))
        part = {"shape": (m, scales[1:]), "dtype": (m, scales.astype(np.int64)), "missing": m}
        key = next(iter(saved["states"]))
        saved["states"][key] = (part[damaged], var)
        with pytest.raises(fastopt.checkpoint.CheckpointError, match="state of index 0"):
            made().load_states_dict(saved)


@pytest.mark.slow("exhaustive")
@pytest.mark.parametrize("masters", [{}, {"multi_precision": True}])
def test_states_are_converted_between_all_precisions(masters, bfloat16):
    dtype = np.float16 if masters else np.float32
    updater = made(state_dtype=None, **masters)
    weight = trained(updater, (64, 64), dtype=dtype)
    exact = updater.state_as(0)
    kinds = {"int8": {"int8", "uint8", "float32"}, "bfloat16": {"bfloat16"}, None: {"float32"}}
    for state_dtype in ("int8", "bfloat16", "int8", None, "bfloat16", None):
        updater.set_state_dtype(state_dtype)
        inner = updater.states[0][1] if masters else updater.states[0]
        assert {array.dtype.name for array in leaves(inner)} == kinds[state_dtype]
        assert updater.optimizer.state_dtype == state_dtype
        updater(0, np.zeros((64, 64), dtype), weight.copy())
    found = updater.state_as(0)
    if masters:
        np.testing.assert_allclose(found[0], exact[0], atol=0.1)
        found, exact = found[1], exact[1]
    np.testing.assert_allclose(found[0], exact[0] * 0.9**6, atol=0.05 * exact[0].max())
    np.testing.assert_allclose(found[1], exact[1] * 0.999**6, atol=0.1 * exact[1].max())


def test_conversion_to_8_bits_and_back_is_that_of_the_arrays():
    updater = made(state_dtype=None)
    trained(updater, (40, 200))
    m, v = updater.states[0]
    updater.set_state_dtype("int8")
    assert same_bits(updater.states[0], (encoded(m, np.int8, v), encoded(v, np.uint8)))
    as_float32 = updater.state_as(0)
    updater.set_state_dtype(None)
    assert same_bits(updater.states[0], as_float32)


def test_conversion_of_state_that_8_bits_cannot_hold_changes_nothing():
    updater = made("adagrad", state_dtype=None)
    trained(updater, (64, 64))
    before = updater.states[0]
    with pytest.raises(ValueError, match="declares none"):
        updater.set_state_dtype("int8")
    assert updater.states[0] is before
    assert updater.optimizer.state_dtype is None
    with pytest.raises(TypeError, match="floating-point"):
        updater.state_as(0, np.int8)


# Row-sparse gradients


def listed(rows, shape, seed, dtype=np.float32):
    values = np.random.default_rng(seed).normal(size=(len(rows), *shape[1:])).astype(dtype)
    return fastopt.RowSparse(values, np.array(rows), shape)


@pytest.mark.parametrize("shape", [(300, 64), (40, 200), (20, 2, 150)], ids=str)
def test_a_lazy_update_is_the_one_of_float32_and_touches_its_rows_alone(shape):
    updater = made(wd=0.1)
    weight = trained(updater, shape, 1)
    for step, rows in enumerate([[1, 4, 9], [9, 1, 9, 3], [0, len(weight) - 1]]):
        twin, other = exact_twin(updater), weight.copy()
        before = copy.deepcopy(updater.states[0])
        gradient = listed(rows, shape, step)
        updater(0, gradient, weight)
        twin(0, gradient, other)
        np.testing.assert_array_equal(bits(weight), bits(other))
        kept = np.setdiff1d(np.arange(len(weight)), rows)
        for now, old in zip(leaves(updater.states[0]), leaves(before), strict=True):
            assert now[kept].tobytes() == old[kept].tobytes()
        m, v = (array[rows] for array in twin.states[0])
        found = [array[rows] for array in leaves(updater.states[0])]
        assert same_bits(found, (encoded(m, np.int8, v), encoded(v, np.uint8)))


@pytest.mark.slow
@pytest.mark.parametrize("lazy", [True, False])
def test_rows_on_all_rows_are_a_dense_gradient(lazy):
    shape = (300, 200)
    one, other = made(lazy_update=lazy), made()
    weight, expected = (trained(each, shape, 1) for each in (one, other))
    rows = np.random.default_rng(0).permutation(len(weight))
    gradient = listed(rows, shape, 3)
    one(0, gradient, weight)
    other(0, gradient.to_dense(), expected)
    assert same_bits((weight, one.states[0]), (expected, other.states[0]))


@pytest.mark.parametrize("decay", exhaustive("catch_up", "dense"))
def test_deferred_decay_works(decay):
    updater = made("adamw", wd=0.5, sparse_decay=decay, cautious=False, cautious_decay=False)
    weight = trained(updater, (100, 64), 1)
    twin, other = exact_twin(updater), weight.copy()
    for step in range(3):
        updater(0, listed([1, 5 + step], weight.shape, step), weight)
        twin(0, listed([1, 5 + step], weight.shape, step), other)
    for each, array in ((updater, weight), (twin, other)):
        each.flush(0, array)
    np.testing.assert_allclose(weight, other, atol=2e-3)
    assert len(pairs(updater.states[0])) == 2


def test_rows_of_a_vector_are_refused():
    updater = made(state_min_size=1)
    weight = np.ones(500, np.float32)
    gradient = fastopt.RowSparse(np.ones(2, np.float32), np.array([1, 5]), (500,))
    with pytest.raises(TypeError, match="weight of one dimension needs a dense gradient"):
        updater(0, gradient, weight)
    assert (weight == 1).all()


# What works around an update


@pytest.mark.slow
def test_averages_copies_and_sums_of_gradients_work():
    plain = made()
    expected = trained(plain, (40, 200), 4)
    with_average = made()
    with_average.average = fastopt.EMA(decay=0.5)
    copied = made()
    half = np.zeros((40, 200), np.float16)
    copied.set_copy(0, half)
    for updater in (with_average, copied):
        np.testing.assert_array_equal(trained(updater, (40, 200), 4), expected)
        assert same_bits(updater.states[0], plain.states[0])
    np.testing.assert_array_equal(half, expected.astype(np.float16))
    assert abs(with_average.averages[0] - expected).max() < 0.05
    summing = made()
    summing.accumulate = 2
    weight = np.random.default_rng(1).normal(size=(40, 200)).astype(np.float32)
    for gradient in gradients((40, 200), 4):
        summing(0, gradient, weight)
        summing(0, gradient, weight)
    np.testing.assert_allclose(weight, expected, atol=1e-6)


# Accuracy

STEPS, SIZE = 400, 16_384

MOST = {"sigma 0.5": 0.055, "sigma 2": 0.12, "sigma 4": 0.5, "sign flips every step": 0.055}
MOST |= {"sigma 2, in 1 of 20 steps": 0.06, "sigma 2, in 1 of 100 steps": 0.06}
MOST |= dict.fromkeys(("spikes of 3 rows by 1e4", "1e6 falling to 1e-8"), 0.04)
MOST |= {"bursts of 1e6 times every 50 steps": 0.04}
"""Bounds of the relative error of Adam's steps."""


@pytest.fixture
def errors(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "asv_benchmarks")
    return importlib.import_module("state_errors")


def steps_of(errors, name, stream, small=False):
    arguments = NAMES[name] | ({"epsilon": 1e-30} if small else {})
    ours, exact = (errors.Ours(state, SIZE, name, **arguments) for state in ("int8", None))
    return errors.compared({name: ours}, exact, stream, small)[name]


@pytest.mark.slow
@pytest.mark.parametrize("stream", MOST)
@pytest.mark.parametrize("seed", [11, *exhaustive(*range(15))])
def test_updates_of_adam_stay_near_those_of_float32(errors, stream, seed):
    assert MOST.keys() == errors.STREAMS.keys()
    gradients = errors.gradients(seed, STEPS, SIZE, **errors.STREAMS[stream])
    found = steps_of(errors, "adam", gradients)
    assert found.largest[1] < 2.6
    assert found.largest[0] <= max(2.5, 1.02 * found.largest[1])
    assert found.error <= MOST[stream]


@pytest.mark.slow
@pytest.mark.parametrize("share", [10.0**-k for k in range(1, 9)])
@pytest.mark.parametrize("seed", [0, *exhaustive(*range(1, 16))])
def test_small_elements_of_a_block_move_as_with_float32_or_less(errors, share, seed):
    """Down to 1e-6 of the largest they move as far; below, they move less, and never jump."""
    found = steps_of(errors, "adam", errors.shared(seed, STEPS, SIZE, share), small=True)
    assert found.largest[0] <= 2.5
    assert found.mean <= 1.2
    assert found.mean >= 0.5 or share < 1e-6


@pytest.mark.parametrize("stream", ["sigma 0.5", *nightly("sigma 2", "sigma 2, in 1 of 20 steps")])
@pytest.mark.parametrize(
    "name",
    exhaustive("rmsprop", "adadelta", "adamax", "adopt", "adamatan2", "nadam", "radam", "ademamix")
    + exhaustive("adabelief", "novograd", "sgd", "nag"),
)
def test_updates_of_others_stay_near_those_of_float32(errors, name, stream):
    gradients = errors.gradients(11, STEPS, SIZE, **errors.STREAMS[stream])
    found = steps_of(errors, name, gradients)
    assert found.largest[0] <= max(12, 1.2 * found.largest[1])
    assert stream != "sigma 0.5" or found.error <= 0.06


# Compilation


def test_kernels_use_wide_vectors_where_these_hardly_slow_the_processor_down():
    @njit
    def doubled(x):
        prefer_wide_vectors()
        for i in range(x.size):
            x[i] *= 2

    doubled(np.ones(8, np.float32))
    (text,) = doubled.inspect_llvm().values()
    features = cpu_target.target_context.codegen().magic_tuple()[2]
    assert ('"prefer-vector-width"="512"' in text) == (LITTLE_THROTTLED in features)


def test_inverse_roots_are_exact_to_a_twentieth_of_a_code():
    x = np.geomspace(1e-37, 1e38, 100_001, dtype=np.float32)
    np.testing.assert_allclose(inverse_root(x), 1 / np.sqrt(x.astype(float)), rtol=7e-4)
    assert np.isfinite(inverse_root(np.float32(0)))
    assert np.isfinite(inverse_root(np.float64(0)))
