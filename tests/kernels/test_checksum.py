"""Checksums of weights, which ranks compare."""

import itertools

import numpy as np
import pytest

from fastopt._kernels.layout import bfloat16
from fastopt.distributed.agreement import checksum

RNG = np.random.default_rng(0)


def values(size, dtype="float32"):
    return RNG.normal(size=size).astype(dtype)


@pytest.mark.parametrize("dtype", ["float16", bfloat16(), "float32", "float64"], ids=str)
@pytest.mark.parametrize("size", [1, 2, 3, 7, 8, 1001])
def test_each_changed_element_changes_the_checksum(size, dtype):
    array = values(size, dtype)
    others = array + np.eye(size, dtype=dtype)
    assert len({checksum(each) for each in (array, *others)}) == 1 + size


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_order_changes_the_checksum(dtype):
    assert len({checksum(row) for row in np.eye(100, dtype=dtype)}) == 100
    rows = values((16, 64), dtype)
    orders = [RNG.permutation(16) for _ in range(50)]
    assert len({checksum(rows[order]) for order in orders}) == len({str(o) for o in orders})
    assert checksum(np.float32([1, 0, 2])) != checksum(np.float32([2, 0, 1]))


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_pairs_of_signs_change_the_checksum(dtype):
    seen = {checksum(np.ones(40, dtype))}
    for pair in itertools.combinations(range(40), 2):
        signs = np.ones(40, dtype)
        signs[[*pair]] = -1
        seen.add(checksum(signs))
    assert len(seen) == 1 + 40 * 39 // 2


def test_neither_layout_nor_memory_changes_the_checksum():
    array = values((6, 10))
    memory = np.zeros(array.nbytes + 1, np.uint8)[1:]
    memory[:] = array.reshape(-1).view(np.uint8)
    fixed = array.copy()
    fixed.flags.writeable = False
    others = array.copy(order="F"), memory.view(np.float32), fixed, np.repeat(array, 2, 1)[:, ::2]
    assert {checksum(other) for other in others} == {checksum(array)}


def test_arrays_without_elements_have_a_checksum():
    assert checksum(np.empty((0, 3), np.float32)) == checksum(np.empty(0))
