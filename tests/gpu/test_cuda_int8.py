"""State in 8 bits on the device."""

import numpy as np
import pytest

from fastopt import RowSparse, optimizer
from helpers.device_arrays import host, leaves, on_device

pytestmark = pytest.mark.gpu


def updater_of(name, **kwargs):
    kwargs = {"momentum": 0.9, **kwargs} if name == "sgd" else kwargs
    made = optimizer.create(name, state_dtype="int8", state_min_size=1, **kwargs)
    return optimizer.get_updater(made)


def check_coded(device, expected):
    """Codes may differ by one, where the last bit of a number decides, and scales in that bit."""
    for one, other in zip(leaves(host(device)), leaves(expected), strict=True):
        assert one.dtype == other.dtype
        if one.dtype.itemsize == 1:
            difference = np.abs(one.astype(int) - other.astype(int))
            assert difference.max(initial=0) <= 1
            assert (difference > 0).mean() < 0.01
        else:
            np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-12)


def check(name, weight, grads, rtol=1e-3, **kwargs):
    here, there, device = updater_of(name, **kwargs), updater_of(name, **kwargs), on_device(weight)
    for grad in grads:
        here(0, grad, weight)
        there(0, on_device(grad), device)
        check_coded(there.states[0], here.states[0])
    np.testing.assert_allclose(
        host(device).astype(np.float32), weight.astype(np.float32), rtol=rtol, atol=1e-4
    )


@pytest.mark.parametrize("shape", [(2, 128), (3, 130), (1, 37), (2, 260)], ids=str)
@pytest.mark.parametrize("name", ["sgd", "adam"])
def test_codes_are_those_of_the_cpu(name, shape, rng):
    weight = rng.normal(size=shape).astype(np.float32)
    check(name, weight, [rng.normal(size=shape).astype(np.float32) for _ in range(2)])


@pytest.mark.parametrize("name", ["lion", "rmsprop", "ademamix", "adamax", "adopt"])
def test_rules_with_averages_step_as_on_the_cpu(name, rng):
    weight = rng.normal(size=(2, 140)).astype(np.float32)
    check(name, weight, [rng.normal(size=(2, 140)).astype(np.float32) for _ in range(2)])


@pytest.mark.parametrize("lazy", [True, False], ids=["lazy", "standard"])
def test_rows_step_as_on_the_cpu(lazy, rng):
    weight, ids = rng.normal(size=(9, 150)).astype(np.float32), np.array([7, 2, 7])
    values = [rng.normal(size=(3, 150)).astype(np.float32) for _ in range(2)]
    grads = [RowSparse(each, ids, weight.shape) for each in values]
    check("adam", weight, grads, lazy_update=lazy)


def test_masters_of_half_precision_weights_step_as_on_the_cpu(half, rng):
    weight = rng.normal(size=(2, 136)).astype(half)
    grads = [rng.normal(size=(2, 136)).astype(half) for _ in range(2)]
    here, there = (updater_of("adam", multi_precision=True) for _ in range(2))
    device = on_device(weight)
    for grad in grads:
        here(0, grad, weight)
        there(0, on_device(grad), device)
    check_coded(there.states[0][0], here.states[0][0])


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_number_that_is_not_finite_spoils_its_block_only(value, rng):
    grad = rng.normal(size=(2, 256)).astype(np.float32)
    grad[1, 130] = value
    updater, weight = updater_of("adam"), on_device(np.zeros((2, 256), np.float32))
    updater(0, on_device(grad), weight)
    (_, scales), _ = host(updater.states[0])
    np.testing.assert_array_equal(np.isfinite(scales), [[True, True], [True, False]])


def test_a_list_has_the_bits_of_single_calls(rng):
    weights = [rng.normal(size=shape).astype(np.float32) for shape in [(2, 130), (3, 64)]]
    grads = [rng.normal(size=weight.shape).astype(np.float32) for weight in weights]
    together, alone = on_device(weights), on_device(weights)
    updater_of("adam")([0, 1], on_device(grads), together)
    single = updater_of("adam")
    for index in range(2):
        single(index, on_device(grads[index]), alone[index])
        np.testing.assert_array_equal(host(together[index]), host(alone[index]))
