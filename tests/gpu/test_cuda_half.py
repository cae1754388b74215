"""Half precision and codes on the device: masters, copies, rounding."""

import numpy as np
import pytest
from numba import cuda

from fastopt import optimizer
from fastopt._kernels.device_memory import owned
from fastopt._kernels.devices import header
from fastopt.device import cuda as cuda_device
from helpers.device_arrays import host, on_device

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("order", ["C", "F"])
def test_bfloat16_arrays_are_sent_as_bits(order, bfloat16, monkeypatch):
    """NumPy gives no buffer of bfloat16, from which numba takes an array's address."""
    seen, to_device = [], cuda.to_device

    def record(array, **kwargs):
        seen.append(memoryview(array))
        return to_device(array, **kwargs)

    monkeypatch.setattr(cuda, "to_device", record)
    array = np.arange(6).reshape(2, 3).astype(bfloat16, order=order)
    made = owned(array, cuda_device(0))
    assert len(seen) == 1
    assert header(made).dtype == bfloat16
    assert header(made).strides == array.strides
    np.testing.assert_array_equal(host(made), array)


def test_a_copy_follows_its_weight(half, rng):
    weight = rng.normal(size=20).astype(np.float32)
    device, copy = on_device(weight), on_device(np.zeros(20, half))
    updater = optimizer.get_updater(optimizer.Adam())
    updater.set_copy(0, copy)
    updater(0, on_device(np.ones(20, np.float32)), device)
    np.testing.assert_array_equal(host(copy), host(device).astype(half))


def test_a_copy_at_the_address_of_a_freed_one_is_another_one():
    """A list call remembers copies by the ids of their objects."""
    updater = optimizer.get_updater(optimizer.SGD(learning_rate=1.0))
    weight = on_device(np.zeros(3, np.float32))
    grads = [on_device(np.ones(3, np.float32))]
    copies = [on_device(np.zeros(3, np.float16))]
    updater.set_copy(0, copies[0])
    updater([0], grads, [weight])
    updater.set_copy(0, None)
    updater(0, grads[0], weight)
    freed = id(copies.pop())
    while len(copies) < 1000 and freed not in map(id, copies[-1:]):
        copies.append(on_device(np.zeros(3, np.float16)))
    updater.set_copy(0, copies[-1])
    updater([0], grads, [weight])
    np.testing.assert_array_equal(host(copies[-1]), [-3, -3, -3])


def test_a_master_can_be_given_before_and_after_the_first_step(half):
    exact = np.full(3, 0.1, np.float32)
    weight = on_device(exact.astype(half))
    updater = optimizer.get_updater(optimizer.SGD(learning_rate=1.0, multi_precision=True))
    updater.set_master(0, exact)
    updater(0, on_device(np.zeros(3, half)), weight)
    np.testing.assert_array_equal(host(updater.states[0][1]), exact)
    updater.set_master(0, on_device(2 * exact))
    np.testing.assert_array_equal(host(updater.states[0][1]), 2 * exact)


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_number_that_is_not_finite_spoils_its_block_of_codes_only(value, rng):
    grad = rng.normal(size=(2, 256)).astype(np.float32)
    grad[1, 130] = value
    updater = optimizer.Updater(optimizer.Adam(state_dtype="int8", state_min_size=1))
    updater(0, on_device(grad), on_device(np.zeros((2, 256), np.float32)))
    (_, scales), _ = host(updater.states[0])
    np.testing.assert_array_equal(np.isfinite(scales), [[True, True], [True, False]])
