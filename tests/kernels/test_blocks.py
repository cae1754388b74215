"""state_dtype='int8': moving averages in 8 bits, with a scale for each block of a row."""

import copy
import importlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import fastopt
from fastopt import optimizer
from fastopt._engine.validate import leaves
from fastopt._kernels.codes import decoded, encoded, scales_shape
from helpers.cases import exhaustive, named
from helpers.half_precision import bits, master_of
from helpers.paths import ROOT
from helpers.tensor_lists import dtype_of, everything, frozen

BLOCK = 128
ARGUMENTS = {
    **{name: {"momentum": 0.9} for name in ("sgd", "nag", "lars", "dcasgd")},
    "lbsgd": {"momentum": 0.9, "warmup_strategy": "lars"},
    "adamw": {"cautious": True, "cautious_decay": True},
    "nadam": {"amsgrad": True},
}
"""Arguments with which optimizers have moving averages."""
NAMES = (
    *("adam", "sgd", "nag", "lars", "lbsgd", "signum", "lion", "novograd", "rmsprop", "adadelta"),
    *("adamw", "adamax", "adabelief", "adopt", "ademamix", "adamatan2", "nadam", "nadamw"),
    *("radam", "lamb", "lans"),
)


def made(name="adam", state_dtype="int8", **kwargs):
    arguments = {"learning_rate": 0.01, **ARGUMENTS.get(name, {}), **kwargs}
    return fastopt.Updater(optimizer.create(name, state_dtype=state_dtype, **arguments))


def normal(shape, seed, dtype=np.float32):
    return np.random.default_rng(seed).normal(size=shape).astype(dtype)


def trained(updater, shape, steps=3, dtype=np.float32):
    weight = normal(shape, 1, dtype)
    for step in range(steps):
        updater(0, normal(shape, [0, step], dtype), weight)
    return weight


def pairs(state):
    """Codes and scales of each slot of codes."""
    arrays = leaves(state)
    following = zip(arrays, (*arrays[1:], None), strict=True)
    return [(one, other) for one, other in following if one.dtype.name in ("int8", "uint8")]


# Encoding


def blocks_of(array):
    """Blocks of an array, each as a vector."""
    rows = array.reshape(len(array) if array.ndim > 1 else 1, -1)
    return [row[k : k + BLOCK] for row in rows for k in range(0, len(row), BLOCK)]


@st.composite
def drawn(draw):
    """Numbers of many sizes, and normal ones."""
    shapes = [(1,), (127,), (300,), (4, 7), (3, 128), (2, 257), (5, 2, 70)]
    shape, real = draw(st.sampled_from(shapes)), draw(st.sampled_from([np.float32, np.float64]))
    rng = np.random.default_rng(draw(st.integers(0, 1000)))
    numbers = (rng.normal(size=shape) * np.exp(rng.normal(0, 3, shape))).astype(real)
    numbers *= real(10.0) ** draw(st.integers(-12, 12))
    numbers[rng.random(shape) < 0.2] = 0
    return numbers, rng.normal(size=shape).astype(real)


def restored(numbers, dtype, squares=None):
    """What codes stand for, of numbers that may be beside squares."""
    codes, scales = encoded(numbers, dtype, squares)
    assert (codes.shape, codes.dtype) == (numbers.shape, dtype)
    assert (scales.shape, scales.dtype) == (scales_shape(numbers.shape), numbers.dtype)
    return decoded(codes, scales, None if squares is None else encoded(squares, np.uint8))


many = settings(max_examples=40)


@many
@given(drawn())
def test_signed_numbers_are_within_half_a_code(data):
    numbers, _ = data
    found = restored(numbers, np.int8)
    assert (found[numbers == 0] == 0).all()
    for exact, own in zip(blocks_of(numbers), blocks_of(found), strict=True):
        top = np.abs(exact).max()
        assert np.abs(exact - own).max() <= top / 127 / 2 * 1.001
        np.testing.assert_allclose(np.abs(own).max(), top, rtol=1e-6)


ROOTS = (0.06, 0.017), (4e-3, 0.033), (3e-4, 0.065), (2e-5, 0.13), (2e-6, 0.26)
"""Least root beside the largest of its block, and its relative error."""


@many
@given(drawn())
def test_roots_of_nonnegative_numbers_keep_their_size_down_to_1e_6(data):
    squares = data[0] ** 2
    found = np.sqrt(restored(squares, np.uint8))
    for exact, own in zip(blocks_of(np.sqrt(squares)), blocks_of(found), strict=True):
        top = exact.max()
        np.testing.assert_allclose(own.max(), top, rtol=1e-6)
        if not top:
            assert not own.any()
            continue
        for least, most in ROOTS:
            large = exact >= least * top
            np.testing.assert_allclose(own[large], exact[large], rtol=most)
        assert (own[exact < 1e-6 * top] < 1.8e-6 * top).all()
        assert (own > 0).all()


@many
@given(drawn())
def test_signed_numbers_beside_nonnegative_ones_keep_their_quotients(data):
    """So no element's step changes by more than a part of the largest step of its block."""
    squares, steps = data[0] ** 2, data[1]
    found = restored(steps * np.sqrt(squares), np.int8, squares)
    roots = np.sqrt(restored(squares, np.uint8))
    for step, own, root, of in zip(*map(blocks_of, (steps, found, roots, squares)), strict=True):
        there = of > 0
        top = np.abs(step[there]).max(initial=0)
        difference = np.abs(own[there] / root[there] - step[there])
        assert (difference <= top / 254 * 1.001 + 1e-3 * np.abs(step[there])).all()


def test_a_block_that_is_not_finite_is_nan_and_others_are_not():
    numbers = np.ones((2, 300), np.float32)
    numbers[0, 130], numbers[1, 299] = np.inf, np.nan
    for dtype in (np.int8, np.uint8):
        lost = np.isnan(restored(numbers, np.dtype(dtype)))
        assert lost[0, 128:256].all()
        assert lost[1, 256:].all()
        assert lost.sum() == 128 + 44


# Updates


def check_step(updater, grad, weight, touched=slice(None)):
    """A step is that of an updater whose state is what the codes stand for, coded again."""
    twin, other = fastopt.Updater(copy.deepcopy(updater.optimizer)), weight.copy()
    twin.optimizer.state_dtype = None
    real = np.float64 if weight.dtype == np.float64 else np.float32
    twin.states = {0: updater.state_as(0, real)}
    before = copy.deepcopy(leaves(updater.states[0]))
    updater(0, grad, weight)
    twin(0, grad, other)
    np.testing.assert_array_equal(bits(weight), bits(other))
    masters = updater.optimizer.multi_precision and weight.dtype.itemsize == 2
    inner, exact = (master_of(each)[1] if masters else each.states[0] for each in (updater, twin))
    rule, found = updater.optimizer.rule, iter(pairs(inner))
    slots = dict(zip(rule.state, leaves(exact), strict=False))
    for slot, dtype in rule.codes.items():
        squares = slots[rule.divisor] if dtype == "int8" and rule.divisor else None
        coded = encoded(slots[slot], np.dtype(dtype), squares)
        for own, expected in zip(next(found), coded, strict=True):
            np.testing.assert_array_equal(own[touched], expected[touched])
    numbers = [[a for a in leaves(each) if not a.ndim] for each in (updater.state_as(0), exact)]
    np.testing.assert_equal(*numbers)
    if not isinstance(touched, slice):
        rest = np.setdiff1d(np.arange(len(weight)), touched)
        for own, old in zip(leaves(updater.states[0]), before, strict=True):
            assert own[rest].tobytes() == old[rest].tobytes()


CAUGHT_UP = {"sparse_decay": "catch_up", "cautious": False, "cautious_decay": False}
MASTERS, ROUNDED = {"multi_precision": True}, {"rounding": "stochastic"}
HALVES = [
    *(("float16", ROUNDED), ("float16", MASTERS), ("bfloat16", ROUNDED)),
    *(("bfloat16", MASTERS), ("bfloat16", MASTERS | {"master": "split"})),
]
KINDS = [("float32", {}), *exhaustive(("float64", {}), *HALVES)]


@pytest.mark.parametrize("shape", [(40, 200), (3, 5, 300), (16, 4096)], ids=str)
@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("name", named(NAMES, "adam"))
def test_a_step_is_the_one_of_float32_from_what_the_codes_stand_for(name, kind, shape):
    dtype, kwargs = kind
    updater = made(name, wd=0.1, **kwargs)
    weight = trained(updater, shape, dtype=dtype_of(dtype))
    check_step(updater, normal(shape, 5, weight.dtype), weight)


@pytest.mark.parametrize("shape", [(300, 64), (40, 200), (20, 2, 150)], ids=str)
@pytest.mark.parametrize("kwargs", [{}, *exhaustive({"lazy_update": False}, CAUGHT_UP)], ids=str)
def test_row_sparse_steps_touch_their_rows_alone(kwargs, shape):
    """Those with deferred decay too."""
    updater = made("adamw" if kwargs is CAUGHT_UP else "adam", wd=0.1, **kwargs)
    weight = trained(updater, shape, 1)
    for step, rows in enumerate([[1, 4, 9], [9, 1, 9, 3], [0, len(weight) - 1]]):
        grad = fastopt.RowSparse(normal((len(rows), *shape[1:]), step), np.array(rows), shape)
        check_step(updater, grad, weight, rows if kwargs.get("lazy_update", True) else slice(None))


# Which weights, and how much memory


KEPT = [
    ((64, 64), None, True),
    ((63, 64), None, False),
    ((100_000,), None, False),
    ((100_000,), 4096, True),
    ((4, 20), 81, False),
    ((5000, 15), 1, False),
    ((5000, 16), None, True),
    ((), 1, True),
]


@pytest.mark.parametrize(("shape", "least", "coded"), KEPT, ids=str)
def test_small_weights_vectors_and_narrow_rows_stay_float32(shape, least, coded):
    """In codes, Adam keeps little more than two bytes for each parameter."""
    updater, weight = made(state_min_size=least), np.ones(shape, np.float32)
    updater(0, np.ones(shape, np.float32), weight)
    state = leaves(updater.states[0])
    kinds = {"int8", "uint8", "float32"} if coded else {"float32"}
    assert {array.dtype.name for array in state} == kinds
    if coded and len(shape) > 1:
        assert 2 <= sum(array.nbytes for array in state) / weight.size <= 2 + 8 / min(shape[1], 128)


# What is refused

REFUSED = "adagrad", "dcasgd", "groupadagrad", "schedulefreeadamw", "test", "yogi", "rmsprop"


@pytest.mark.parametrize("name", REFUSED)
def test_state_that_8_bits_cannot_hold_is_refused(name):
    for own in (None, "int8"):
        updater = made(name, own, **({"centered": True} if name == "rmsprop" else {}))
        weight = trained(updater, (64, 64), 0 if own else 1)
        before = everything(updater, weight)
        with pytest.raises(ValueError, match=r"moving averages, and rule .* declares none"):
            updater(0, weight.copy(), weight) if own else updater.set_state_dtype("int8")
        assert everything(updater, weight) == before
    with pytest.raises(TypeError, match="floating-point"):
        updater.state_as(0, np.int8)


def test_rows_of_a_vector_are_refused():
    updater, weight = made(state_min_size=1), np.ones(500, np.float32)
    gradient = fastopt.RowSparse(np.ones(2, np.float32), np.array([1, 5]), (500,))
    with pytest.raises(TypeError, match="weight of one dimension needs a dense gradient"):
        updater(0, gradient, weight)
    assert (weight == 1).all()


WRONG = {
    "state 'var' must have shape": lambda m, v: (m[0], v),
    "scales of state 'mean' must have shape": lambda m, v: ((m[0], m[1][:-1]), v),
    "scales of state 'mean' must": lambda m, v: ((m[0], m[1].astype(np.int64)), v),
    "state 'mean' must have dtype": lambda m, v: ((v[0], m[1]), v),
    "state 'mean' must have shape": lambda m, v: ((m[0][:-1], m[1]), v),
    "share memory": lambda m, v: (m, (v[0], m[1])),
}


@pytest.mark.parametrize("words", WRONG)
def test_states_that_do_not_fit_are_refused(words):
    """Those of a checkpoint too."""
    updater = made()
    weight = trained(updater, (64, 64), 1)
    updater.states[0] = WRONG[words](*updater.states[0])
    before, saved = weight.copy(), updater.states_dict()
    with pytest.raises((ValueError, TypeError), match=words):
        updater(0, np.ones_like(weight), weight)
    np.testing.assert_array_equal(weight, before)
    if words != "share memory":
        with pytest.raises(fastopt.checkpoint.CheckpointError, match="state of index 0"):
            made().load_states_dict(saved)


# Conversion


@pytest.mark.parametrize("masters", [{}, *exhaustive({"multi_precision": True})])
def test_states_are_converted_between_all_precisions_as_arrays_are(masters, bfloat16):
    updater, dtype = made(state_dtype=None, **masters), np.float16 if masters else np.float32
    weight = trained(updater, (40, 200), dtype=dtype)

    def inner(state):
        return state[1] if masters else state

    for state_dtype in ("int8", "bfloat16", "int8", None, "bfloat16", None):
        m, v = inner(updater.state_as(0))
        updater.set_state_dtype(state_dtype)
        expected = m, v
        if state_dtype == "int8":
            expected = encoded(m, np.int8, v), encoded(v, np.uint8)
        elif state_dtype:
            expected = m.astype(bfloat16), v.astype(bfloat16)
        assert frozen(inner(updater.states[0])) == frozen(expected)
        assert updater.optimizer.state_dtype == state_dtype
        updater(0, normal((40, 200), 7, dtype), weight)


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
    arguments = ARGUMENTS.get(name, {}) | ({"epsilon": 1e-30} if small else {})
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
