"""Split masters: a bfloat16 weight and 16 more bits hold exactly the float32 master."""

import numpy as np
import pytest
from numba import njit

from fastopt import optimizer
from fastopt._kernels import half as conversions
from fastopt._kernels.weights import parts
from helpers.half_precision import bits, every_case, flat, lively, master_of
from helpers.plans import LAYOUTS
from helpers.tensor_lists import frozen

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


@pytest.mark.parametrize("shape", [(), (0,), (7,), (3, 4)])
def test_a_remainder_takes_two_bytes_an_element(shape, bfloat16):
    updater, weight = sgd(), np.ones(shape, bfloat16)
    updater(0, np.ones(shape, bfloat16), weight)
    remainder, inner = master_of(updater)
    assert (remainder.dtype, remainder.shape) == (np.uint16, shape)
    assert inner is None
    np.testing.assert_array_equal(bits(weight), split(np.full(shape, 0.9, np.float32))[0])


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
    np.testing.assert_array_equal(master_of(updater)[0], low)
    nearest = exact.astype(bfloat16)
    assert (weight[:25] != nearest[:25]).any()
    np.testing.assert_array_equal(weight[25:], nearest[25:])


def test_a_split_or_missing_master_cannot_be_set_after_the_first_update(bfloat16):
    """Nor is the state of a rule taken for one."""
    for updater, dtype in (
        (sgd(), bfloat16),
        (optimizer.Updater(optimizer.Adam(multi_precision=True)), "f4"),
    ):
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


def test_float16_weights_are_refused_and_others_are_not_split():
    updater = sgd(param_idx2name={0: "fc"})
    with pytest.raises(TypeError, match=r"index 0 \(fc\): master='split' needs a bfloat16 weight"):
        updater(0, np.ones(3, np.float16), np.ones(3, np.float16))
    assert (updater.states, updater.optimizer.num_update) == ({}, 0)
    updater(0, np.ones(3, np.float32), np.ones(3, np.float32))
    assert updater.states == {0: None}


def test_a_remainder_that_does_not_fit_is_refused(bfloat16):
    updater, weight = sgd(), np.ones(3, bfloat16)
    updater(0, np.ones(3, bfloat16), weight)
    half_weight = np.ones(3, np.float16)
    with pytest.raises(TypeError, match="only a bfloat16 weight has a split master"):
        updater(0, half_weight, half_weight.copy())
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
