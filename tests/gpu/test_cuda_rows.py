"""Row-sparse updates on the device."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numba import cuda

from fastopt import RowSparse, optimizer
from fastopt._kernels.device_memory import zero
from helpers.device_arrays import check_steps, host, leaves, on_device

pytestmark = pytest.mark.gpu

SHAPE = (12, 5)


@pytest.mark.parametrize("count", [127, 128, 200])
def test_groups_may_start_anywhere(count):
    """Exact sums: whole numbers."""
    for before in (0, 63):
        ids = np.array([5] * before + [7] * count + [9] * 3)
        values = np.arange(1, len(ids) + 1, dtype=np.float32)[:, np.newaxis]
        weight = on_device(np.zeros((12, 1), np.float32))
        optimizer.get_updater("test")(0, (on_device(values), on_device(ids[::-1].copy())), weight)
        expected = [values[ids[::-1] == row].sum() for row in range(12)]
        np.testing.assert_array_equal(host(weight)[:, 0], expected)


@pytest.mark.parametrize("count", [5000, 200_000])
@pytest.mark.parametrize("name", ["adam", "groupadagrad", "lamb"])
def test_many_indexed_rows_step_as_in_float64_on_the_cpu(name, count, rng):
    """Lists that several blocks sort and merge, with a row that has a tenth of all positions.

    In float32 the sum of that row has rounding errors on either side, as its order differs.
    """
    shape = (100_000, 33)
    ids = np.where(rng.random(count) < 0.1, 77, rng.integers(0, shape[0], count))
    weight, values = (rng.normal(size=(n, 33)).astype(np.float32) for n in (shape[0], count))
    here, there = optimizer.get_updater(name), optimizer.get_updater(name)
    exact, device = weight.astype(np.float64), on_device(weight)
    here(0, RowSparse(values.astype(np.float64), ids, shape), exact)
    there(0, on_device(RowSparse(values, ids, shape)), device)
    pairs = zip(leaves([device, there.states[0]]), leaves([exact, here.states[0]]), strict=True)
    for found, expected in pairs:
        np.testing.assert_allclose(host(found), expected, rtol=1e-4, atol=5e-5)


def test_a_step_gives_the_same_bits_again(rng):
    ids, shape = rng.integers(0, 1000, 50_000), (20_000, 65)
    grad = on_device(RowSparse(rng.normal(size=(50_000, 65)).astype(np.float32), ids, shape))
    found = []
    for _ in range(3):
        weight = on_device(np.zeros(shape, np.float32))
        optimizer.Updater(optimizer.Adam(), clip_global_norm=1.0)(0, grad, weight)
        found.append(host(weight))
    np.testing.assert_array_equal(found[0], found[1])
    np.testing.assert_array_equal(found[0], found[2])


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:float16 weights without masters")
@pytest.mark.parametrize("lazy", [True, False], ids=["lazy", "standard"])
def test_rows_on_both_sides_of_element_2_to_the_31_are_updated(lazy, rng):
    width = 64
    height, middle = 2**31 // width + 100, 2**31 // width
    weight = cuda.device_array((height, width), np.float16)
    zero(weight, 0)
    ids = np.array([middle + 99, 0, middle - 1, middle, middle + 99])
    values = rng.integers(1, 9, (5, width)).astype(np.float16)
    updater = optimizer.get_updater(optimizer.SGD(learning_rate=1.0, lazy_update=lazy))
    updater(0, (on_device(values), on_device(ids)), weight)
    expected = {0: values[1], middle - 1: values[2], middle: values[3]}
    expected[middle + 99] = values[0] + values[4]
    for row in (*expected, 1, middle - 2, middle + 1):
        found = weight[row : row + 1].copy_to_host()[0]
        np.testing.assert_array_equal(found, -expected.get(row, np.zeros(width)))


@pytest.mark.parametrize("wrong", [-1, 12])
def test_rows_on_the_host_are_checked_there(wrong, rng):
    """They may have been changed after the gradient was created."""
    weight = on_device(rng.normal(size=SHAPE).astype(np.float32))
    before, updater = host(weight), optimizer.get_updater("adam")
    ids = np.array([3, 5])
    grad = RowSparse(on_device(np.ones((2, 5), np.float32)), ids, SHAPE)
    ids[1] = wrong
    with pytest.raises(ValueError, match=f"index 0: indices must be .* below 12, got {wrong}"):
        updater(0, grad, weight)
    np.testing.assert_array_equal(host(weight), before)


@pytest.mark.parametrize("wrong", [-1, 12, 2**62 + 1, -(2**63)])
def test_a_row_outside_is_refused_and_nothing_changes(wrong, rng):
    weight = rng.normal(size=SHAPE).astype(np.float32)
    device, updater = on_device(weight), optimizer.get_updater(optimizer.Adam())
    with pytest.raises(ValueError, match=r"index 0: indices must be at least 0 and below 12"):
        updater(
            0, (on_device(np.ones((2, 5), np.float32)), on_device(np.array([3, wrong]))), device
        )
    np.testing.assert_array_equal(host(device), weight)
    assert updater.optimizer.num_update == 0
    assert not updater.states


@settings(max_examples=8)
@given(st.lists(st.integers(0, 40), max_size=60), st.integers(41, 70_000))
def test_rows_are_summed_in_the_order_of_the_list(rows, height):
    rows = np.array(rows, np.int64)
    values = np.arange(1, len(rows) + 1, dtype=np.float32)[:, np.newaxis] ** 3 / 7
    here, there = np.zeros((height, 1), np.float32), np.zeros((height, 1), np.float32)
    there = on_device(there)
    optimizer.get_updater(optimizer.Test())(0, (values, rows), here)
    if len(rows):
        optimizer.get_updater(optimizer.Test())(0, (on_device(values), on_device(rows)), there)
    np.testing.assert_array_equal(host(there), here)


@pytest.mark.parametrize("shape", [(0, 3), (3, 0)], ids=str)
@pytest.mark.parametrize("name", ["adam", "lamb", "groupadagrad"])
def test_empty_tables_take_row_sparse_gradients(name, shape):
    count = min(shape[0], 1)
    grad = RowSparse(np.ones((count, shape[1]), np.float32), np.zeros(count, np.int64), shape)
    make = lambda: optimizer.Updater(optimizer.create(name), clip_global_norm=1.0)  # noqa: E731
    check_steps(make, np.ones(shape, np.float32), [grad] * 3)


def test_methods_that_work_on_numpy_say_so():
    grad = on_device(RowSparse(np.ones((2, 5), np.float32), np.array([1, 2]), SHAPE))
    for method in (grad.coalesce, grad.to_dense, lambda: grad.retain([1]), lambda: grad + grad):
        with pytest.raises(TypeError, match="on the host"):
            method()
