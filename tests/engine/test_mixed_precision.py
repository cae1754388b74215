"""Weights of half precision: masters, their start values, copies, odd shapes and odd numbers."""

import copy
import pickle
from functools import partial

import numpy as np
import pytest
from numba import njit

from fastopt import optimizer
from fastopt._kernels import half as conversions
from fastopt._kernels.weights import parts
from helpers.cases import exhaustive
from helpers.half_precision import bits, every_case, flat, lively, master_of, silent
from helpers.plans import LAYOUTS
from helpers.refusals import check_refused
from helpers.tensor_lists import frozen
from helpers.users import InNumPy

pytestmark = silent


@pytest.mark.slow("exhaustive")
def test_lars_takes_the_norm_of_the_rounded_weight(half, rng):
    exact = np.full((4, 3), 1 + float(np.spacing(half.type(1))) * 0.49, np.float32)
    gradient = rng.normal(size=exact.shape).astype(np.float32)
    made = optimizer.LARS(learning_rate=1.0, eta=0.1, momentum=0.0, multi_precision=True)
    updater, weight = optimizer.get_updater(made), exact.astype(half)
    updater.set_master(0, exact)
    updater(0, gradient, weight)
    norms = [np.linalg.norm(w.astype(float)) for w in (np.ones_like(exact), exact)]
    rounded, unrounded = (exact - 0.1 * n / np.linalg.norm(gradient) * gradient for n in norms)
    np.testing.assert_allclose(master_of(updater)[0], rounded, rtol=3e-7)
    assert abs(rounded - unrounded).max() > 5e-5


KINDS = ["adam", InNumPy, *exhaustive("sgd", "lamb", "groupadagrad", "sgld")]


@pytest.mark.parametrize("kind", KINDS)
def test_a_float32_gradient_is_used_as_it_is(kind, half, rng):
    wide, narrow, single = (updater_of(kind, multi_precision=on) for on in (True, True, False))
    weights = [np.ones((5, 3), half), np.ones((5, 3), half), np.ones((5, 3), np.float32)]
    for _ in range(3):
        gradient = rng.normal(size=(5, 3)).astype(np.float32)
        wide(0, gradient, weights[0])
        narrow(0, gradient.astype(half), weights[1])
        single(0, gradient, weights[2])
    np.testing.assert_array_equal(bits(master_of(wide)[0]), bits(weights[2]))
    np.testing.assert_array_equal(weights[0], weights[2].astype(half))
    assert kind is not InNumPy or narrow.optimizer.seen == (np.float32,) * 3
    assert not np.array_equal(master_of(wide)[0], master_of(narrow)[0])


def updater_of(kind="adam", **kwargs):
    make = partial(optimizer.create, kind) if isinstance(kind, str) else kind
    return optimizer.get_updater(make(learning_rate=0.1, **kwargs))


@pytest.mark.parametrize("order", ["C", "F"])
@pytest.mark.parametrize("name", ["adam", *exhaustive("sgd", "dcasgd")])
def test_a_master_starts_from_unrounded_values(name, order, half, rng):
    start, gradient = rng.normal(size=(2, 5, 3)).astype(np.float32)
    mixed, single = updater_of(name, multi_precision=True), updater_of(name)
    start.flags.writeable = False
    mixed.set_master(0, start)
    weight, exact = start.astype(half, order), start.copy()
    for _ in range(2):
        mixed(0, gradient.astype(half), weight)
        single(0, gradient.astype(half).astype(np.float32), exact)
    master, _ = master_of(mixed)
    np.testing.assert_array_equal(bits(np.ascontiguousarray(master)), bits(exact))
    np.testing.assert_array_equal(weight, exact.astype(half))
    assert type(master) is np.ndarray
    assert master.flags[f"{order}_CONTIGUOUS"]


def call(updater):
    updater(0, np.zeros(3, np.float16), np.ones(3, np.float16))


def failing(updater):
    updater.optimizer.lr_mult[0] = float("nan")
    with pytest.raises(ValueError, match="learning rate"):
        call(updater)
    updater.optimizer.lr_mult.clear()
    return updater


BETWEEN = {
    "nothing": lambda updater: updater,
    "a failed update": failing,
    "a copy": copy.deepcopy,
    "a pickle": lambda updater: pickle.loads(pickle.dumps(updater)),
    "a reset": lambda updater: updater.reset() or updater,
}


@pytest.mark.parametrize("kind", ["sgd", InNumPy])
@pytest.mark.parametrize("between", BETWEEN)
@pytest.mark.parametrize("called", [False, True])
def test_an_initial_master_is_released_after_its_first_use_or_a_reset(kind, between, called):
    updater, start = updater_of(kind, multi_precision=True), np.full(3, 0.1, np.float32)
    if called:
        call(updater)
        updater.states.clear()
    updater.set_master(0, start)
    start[:] = 7
    updater = BETWEEN[between](updater)
    call(updater)
    expected = 1 if between == "a reset" else np.float32(0.1)
    np.testing.assert_array_equal(master_of(updater)[0], expected)
    assert updater.optimizer.masters_given == {}
    updater.states.clear()
    call(updater)
    np.testing.assert_array_equal(master_of(updater)[0], 1)


def test_a_master_can_be_set_between_updates(half, rng):
    updater, weight = updater_of(multi_precision=True), np.ones(4, half)
    updater(0, np.ones(4, half), weight)
    exact = rng.normal(size=4).astype(np.float32)
    updater.set_master(0, exact)
    updater.optimizer.set_learning_rate(0.0)
    updater(0, np.ones(4, half), weight)
    np.testing.assert_array_equal(master_of(updater)[0], exact)
    np.testing.assert_array_equal(weight, exact.astype(half))


@pytest.mark.parametrize("given", ["set_master", "set_copy"])
def test_a_master_or_copy_of_no_weight_warns(given, half):
    updater, weight = updater_of(multi_precision=True), np.ones(3, half)
    for _ in range(3):
        updater("layer.w", np.ones(3, half), weight)
    getattr(updater, given)("w", np.ones(3, np.float32 if given == "set_master" else half))
    with pytest.warns(UserWarning, match="the master or copy of 'w' has no effect"):
        updater("layer.w", np.ones(3, half), weight)


F32 = np.ones(3, np.float32)


def test_a_master_of_another_shape_is_refused_at_the_first_update_and_later(half):
    updater, weight = updater_of(multi_precision=True), np.ones(4, half)
    updater.set_master(0, F32)
    with pytest.raises(ValueError, match=r"index 0: master must have shape \(4,\), got \(3,\)"):
        updater(0, np.ones(4, half), weight)
    assert updater.states == {}
    assert updater.optimizer.num_update == 0
    updater.set_master(0, np.ones(4, np.float32))
    updater(0, np.ones(4, half), weight)
    with pytest.raises(ValueError, match=r"master must have shape \(4,\), got \(3,\)"):
        updater.set_master(0, F32)


def test_a_numpy_update_is_followed_by_its_copy(half):
    updater, weight, rounded = updater_of(InNumPy), np.ones(3, "f4"), np.zeros(3, half)
    updater.set_copy(0, rounded)
    updater(0, np.full(3, 2.5, half), weight)
    np.testing.assert_array_equal(rounded, np.full(3, 0.75, half))


LOCKED = np.ones(3, np.float16)
LOCKED.flags.writeable = False
MASTERS = {"multi_precision": True}
REFUSED = [
    ("set_master", {}, F32, r"ValueError: index 0 \(fc\): a master needs .*multi_precision=True"),
    ("set_master", MASTERS, [1.0], "TypeError: master must be a NumPy array, got list"),
    ("set_master", MASTERS, np.ones(3), "TypeError: must have dtype float32, got float64"),
    ("set_copy", {}, [1.0], r"TypeError: index 0 \(fc\): copy must be a NumPy array, got list"),
    ("set_copy", {}, F32, "TypeError: copy must have dtype float16 or bfloat16, got float32"),
    ("set_copy", {}, LOCKED, "ValueError: copy is read-only"),
]


@pytest.mark.parametrize(("method", "arguments", "array", "error"), REFUSED)
def test_masters_and_copies_that_do_not_fit_are_refused(method, arguments, array, error):
    updater = updater_of(param_idx2name={0: "fc"}, **arguments)
    check_refused("give(0, array)", error, {"give": getattr(updater, method), "array": array})
    updater(0, F32, F32.copy())


def test_copies_that_do_not_fit_a_weight_are_refused(half):
    updater, weight = updater_of(), np.ones(3, np.float32)
    for given, rounded, error, words in (
        (weight, np.zeros(4, half), ValueError, r"copy must have shape \(3,\), got \(4,\)"),
        (weight, weight.view(half)[:3], ValueError, "share memory"),
        (np.ones(3), np.zeros(3, half), TypeError, "only a float32 weight has a copy, got float64"),
    ):
        updater.set_copy(0, rounded)
        with pytest.raises(error, match=words):
            updater(0, np.ones(3, given.dtype), given)
        assert (given == 1).all()
        assert (updater.states, updater.optimizer.num_update) == ({}, 0)


def test_an_update_in_numpy_without_masters_gets_half_precision_and_none_that_is_split(bfloat16):
    updater, weight = updater_of(InNumPy, rounding="stochastic"), np.ones(3, bfloat16)
    with pytest.warns(UserWarning, match="lose small updates"):
        updater(0, np.ones(3, bfloat16), weight)
    assert updater.optimizer.seen == (bfloat16,) * 3
    np.testing.assert_array_equal(weight, bfloat16.type(0.9))
    updater, before = updater_of(InNumPy, multi_precision=True, master="split"), weight.copy()
    with pytest.raises(TypeError, match="an update\\(\\) in NumPy needs master='float32'"):
        updater(0, np.ones(3, bfloat16), weight)
    assert updater.states == {}
    assert (weight == before).all()


@pytest.mark.parametrize("klass", [optimizer.SGD, InNumPy])
def test_what_is_beyond_float16_becomes_infinite_without_a_warning(klass):
    updater = updater_of(klass, multi_precision=True)
    weight = np.array([60000, 1], np.float16)
    for _ in range(2):
        updater(0, np.array([-1e6, 0], np.float32), weight)
    np.testing.assert_array_equal(weight, [np.inf, 1])
    assert np.isfinite(master_of(updater)[0]).all()


@pytest.mark.parametrize("state", [None, np.ones(3, np.float32), (np.ones(3, np.float32),) * 3])
def test_a_state_without_a_master_is_refused(state, half):
    updater, weight = updater_of(multi_precision=True), np.ones(3, half)
    updater(0, np.ones(3, half), weight)
    updater.states[0] = [*updater.states[0]]  # a list of as many arrays has another form
    updater(0, np.ones(3, half), weight)
    updater.states[0] = state
    with pytest.raises(ValueError, match="index 0: the state of a weight with a master must be a"):
        updater(0, np.ones(3, half), weight)
    assert updater.optimizer._index_update_count == {0: 2}


SPLIT = {"multi_precision": True, "master": "split"}


def split(exact):
    """What the weight and its remainder are for a float32 master without NaN."""
    numbers = bits(exact).astype(np.uint64)
    return ((numbers + 0x8000) >> 16).astype(np.uint16), (numbers & 0xFFFF).astype(np.uint16)


@njit
def split_number(exact):
    """What kernels split a number to."""
    return conversions.split_float32(exact)


def sgd(**kwargs):
    return optimizer.get_updater(optimizer.SGD(**{"learning_rate": 0.1, **SPLIT, **kwargs}))


@pytest.mark.slow
@every_case
def test_the_trajectory_is_that_of_a_float32_master_bit_for_bit(case, rng, bfloat16):
    kwargs = {"multi_precision": True, **lively(case)}
    divided, whole = case.updater(master="split", **kwargs), case.updater(**kwargs)
    weight = rng.normal(size=case.shape).astype(bfloat16)
    other = weight.copy()
    for _ in range(4):
        gradient = rng.normal(size=case.shape).astype(bfloat16)
        divided(0, gradient, weight)
        whole(0, gradient, other)
        (remainder, inner), (master, theirs) = master_of(divided), master_of(whole)
        high, low = split(master)
        np.testing.assert_array_equal(bits(weight), high)
        np.testing.assert_array_equal(remainder, low)
        for one, another in zip(flat(inner), flat(theirs), strict=True):
            np.testing.assert_array_equal(bits(one), bits(another))
        exactly_between = low == 0x8000
        np.testing.assert_array_equal(weight[~exactly_between], other[~exactly_between])


@pytest.mark.parametrize("layout", ["plain", "strided", "Fortran order"])
def test_an_initial_master_sets_the_weight_and_its_low_bits(layout, rng, bfloat16):
    exact = rng.normal(size=(50, 4)).astype(np.float32)
    bits(exact)[:25] |= 0x8000  # half of them exactly between two numbers of bfloat16
    bits(exact)[:25] &= 0xFFFF8000
    weight = LAYOUTS[layout](np.zeros((50, 4), bfloat16))
    updater = sgd()
    updater.set_master(0, exact)
    updater(0, np.zeros((50, 4), bfloat16), weight)
    high, low = split(exact)
    np.testing.assert_array_equal(bits(weight), high)
    assert frozen(master_of(updater)) == frozen((low, None))
    nearest = exact.astype(bfloat16)
    assert (weight[:25] != nearest[:25]).any()
    np.testing.assert_array_equal(weight[25:], nearest[25:])


def test_a_split_or_missing_master_cannot_be_set_after_the_first_update(bfloat16):
    """Nor is the state of a rule taken for one."""
    for updater, dtype in ((sgd(), bfloat16), (updater_of(multi_precision=True), "f4")):
        updater(0, np.ones(3, dtype), np.ones(3, dtype))
        before = frozen(updater.states[0])
        with pytest.raises(ValueError, match="split or missing master cannot be set after the fir"):
            updater.set_master(0, np.ones(3, np.float32))
        assert frozen(updater.states[0]) == before


def test_a_weight_that_the_user_changes_is_part_of_the_master(bfloat16):
    """Unlike a float32 master, which never reads its weight."""
    updater, weight = sgd(), np.ones(3, bfloat16)
    updater(0, np.ones(3, bfloat16), weight)
    weight[1] = 4
    updater(0, np.zeros(3, bfloat16), weight)
    np.testing.assert_allclose(weight.astype(float), [0.9, 4, 0.9], rtol=2**-8)


def test_only_bfloat16_weights_are_split_with_a_remainder_that_fits(bfloat16):
    updater, weight = sgd(param_idx2name={0: "fc"}), np.ones(3, bfloat16)
    with pytest.raises(TypeError, match=r"index 0 \(fc\): master='split' needs a bfloat16 weight"):
        call(updater)
    assert (updater.states, updater.optimizer.num_update) == ({}, 0)
    updater(1, F32, F32.copy())
    assert updater.states == {1: None}
    updater(0, np.ones(3, bfloat16), weight)
    with pytest.raises(TypeError, match="only a bfloat16 weight has a split master"):
        call(updater)
    for remainder, error, words in (
        (np.zeros(4, np.uint16), ValueError, r"master must have shape \(3,\), got \(4,\)"),
        (np.zeros(3, np.int16), TypeError, "master must have dtype float32 or uint16, got int16"),
        (bits(weight), ValueError, "weight and its copy or remainder share memory"),
    ):
        updater.states[0] = (None, remainder)
        with pytest.raises(error, match=words):
            updater(0, np.ones(3, bfloat16), weight)


def test_arrays_are_split_as_kernels_split_numbers():
    numbers = np.random.default_rng(0).integers(0, 1 << 32, 2000, np.uint32)
    edges = [0, 0x8000, 0x7F7FFFFF, 0x7F800000, 0x7F800001, 0x7FFFFFFF, 0xFF800000, 0x80008000]
    exact = np.append(numbers, np.array(edges, np.uint32)).view(np.float32)
    for place, (high, low) in enumerate(zip(*parts(exact), strict=True)):
        assert (high, low) == split_number(exact[place])
