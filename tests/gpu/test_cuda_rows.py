"""Row-sparse updates on the device."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numba import cuda

from fastopt import RowSparse, optimizer
from fastopt._kernels.device_memory import zero
from helpers.device_arrays import host, leaves, on_device

pytestmark = pytest.mark.gpu

SHAPE = (12, 5)


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
    weights = [on_device(np.zeros(shape, np.float32)) for _ in range(3)]
    for weight in weights:
        optimizer.Updater("adam", clip_global_norm=1.0)(0, grad, weight)
    assert len({host(weight).tobytes() for weight in weights}) == 1


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


@pytest.mark.parametrize("are_here", [False, True], ids=["on the device", "on the host"])
@pytest.mark.parametrize("wrong", [-1, 12, 2**62 + 1, -(2**63)])
def test_a_row_outside_is_refused_and_nothing_changes(wrong, are_here):
    """Also if it was changed after the gradient was created."""
    weight = on_device(np.ones(SHAPE, np.float32))
    updater, ids = optimizer.get_updater("adam"), np.array([3, 5])
    grad = RowSparse(on_device(np.ones((2, 5), np.float32)), ids, SHAPE)
    ids[1] = wrong
    grad.indices = ids if are_here else on_device(ids)
    with pytest.raises(ValueError, match="index 0: indices must be at least 0 and below 12"):
        updater(0, grad, weight)
    np.testing.assert_array_equal(host(weight), 1)
    assert updater.optimizer.num_update == 0
    assert not updater.states


@settings(max_examples=8)
@given(st.integers(0, 300), st.integers(1, 40), st.integers(41, 70_000))
def test_rows_are_summed_in_the_order_of_the_list(count, kinds, height):
    rows = np.random.default_rng(count).integers(0, kinds, count)
    values = np.arange(1, count + 1, dtype=np.float32)[:, np.newaxis] ** 3 / 7
    here, there = np.zeros((height, 1), np.float32), on_device(np.zeros((height, 1), np.float32))
    optimizer.get_updater("test")(0, RowSparse(values, rows, here.shape), here)
    optimizer.get_updater("test")(0, on_device(RowSparse(values, rows, here.shape)), there)
    np.testing.assert_array_equal(host(there), here)


def test_methods_that_work_on_numpy_say_so():
    grad = on_device(RowSparse(np.ones((2, 5), np.float32), np.array([1, 2]), SHAPE))
    for method in (grad.coalesce, grad.to_dense, lambda: grad.retain([1]), lambda: grad + grad):
        with pytest.raises(TypeError, match="on the host"):
            method()
