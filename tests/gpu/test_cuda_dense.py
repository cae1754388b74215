"""Dense updates on the device are those of the CPU."""

import numpy as np
import pytest
from numba import cuda

from fastopt import optimizer
from fastopt._kernels.device_memory import zero
from fastopt._kernels.devices import header
from helpers.cases import CASES
from helpers.device_arrays import Foreign, check_close, check_steps, on_device

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("size", [1023, 10_001, 70_000])
@pytest.mark.parametrize("dtype", [np.float32, np.float64], ids=["float32", "float64"])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_every_rule_steps_in_several_blocks(case, dtype, size, rng):
    """Sizes that reach whole packs and single elements, one block and many, and groups of sums."""
    shape = (size // 7, 7) if case.shape[1:] else (size,)
    weight = rng.normal(size=shape).astype(dtype)
    grads = [rng.normal(size=shape).astype(dtype) for _ in range(2)]
    exact = dtype == np.float64 and case.name != "sgld"
    tolerance = {"rtol": 1e-11, "atol": 1e-13} if exact else {"rtol": 1e-5, "atol": 5e-6}
    check_steps(lambda: case.updater(wd=case.wd), weight, grads, **tolerance)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:float16 weights without masters")
def test_elements_beyond_2_to_the_31_are_updated(rng):
    shown = 10_000
    weight, grad = (cuda.device_array(2**31 + 20_481, np.float16) for _ in range(2))
    for array in (weight, grad):
        zero(array, 0)
    ends = rng.normal(size=shown).astype(np.float16)
    middle = slice(2**31 - shown // 2, 2**31 + shown // 2)
    parts = slice(0, shown), middle, slice(-shown, None)
    for part in parts:
        grad[part].copy_to_device(ends)
    optimizer.get_updater(optimizer.SGD(learning_rate=1.0))(0, grad, weight)
    for part in parts:
        np.testing.assert_array_equal(weight[part].copy_to_host(), -ends)
    assert not weight[shown : 10 * shown].copy_to_host().any()


def lying(values, order):
    """An array on the device whose axes lie in another order in memory."""
    memory = np.ascontiguousarray(values.transpose(order))
    strides = memory.transpose(np.argsort(order)).strides
    return Foreign(on_device(memory), shape=values.shape, strides=strides)


@pytest.mark.parametrize("order", [(0, 2, 3, 1), (3, 2, 1, 0), (1, 0, 2, 3)], ids=str)
def test_dense_arrays_are_updated_as_they_lie(order, rng):
    """With gradients that lie alike or in C order."""
    array, grad = (rng.normal(size=(4, 3, 2, 5)).astype(np.float32) for _ in range(2))
    weight = lying(array, order)
    updater, expected = (optimizer.get_updater("adam") for _ in range(2))
    for given in (lying(grad, order), on_device(grad)) * 2:
        updater(0, given, weight)
        expected(0, grad, array)
    check_close(weight.array, array.transpose(order))
    assert header(updater.states[0][0]).strides == header(weight).strides
