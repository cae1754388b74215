"""Averages and sums of gradients on the device are those of the CPU."""

import copy

import numpy as np
import pytest

from fastopt import SWA, RowSparse, optimizer
from helpers.device_arrays import check_close, host, on_device

pytestmark = pytest.mark.gpu


def gradient(rng):
    rows = rng.integers(0, 9, size=3)
    return RowSparse(on_device(rng.normal(size=(3, 2)).astype(np.float32)), on_device(rows), (9, 2))


def test_a_failed_update_keeps_the_sum_of_rows(rng):
    rates = {}
    made = optimizer.Adam(lr_scheduler=lambda count: rates["present"])
    updater = optimizer.Updater(made, accumulate=2)
    weight = rng.normal(size=(9, 2)).astype(np.float32)
    device, twin = on_device(weight), on_device(weight)
    first, last = gradient(rng), gradient(rng)
    updater(0, first, device)
    copied = copy.deepcopy(updater)
    with pytest.raises(KeyError, match="present"):
        updater(0, last, device)
    np.testing.assert_array_equal(host(device), weight)
    rates["present"] = 0.125
    updater(0, last, device)
    copied(0, last, twin)
    np.testing.assert_array_equal(host(twin), host(device))


def test_weights_with_two_indices_are_averaged_in_list_order():
    here, there = (optimizer.Updater("sgd", average=SWA(2, 2)) for _ in range(2))
    weight = np.arange(8, dtype=np.float32).reshape(4, 2)
    device, ones = on_device(weight), np.ones((1, 2), np.float32)
    for _ in range(5):
        for updater, place, target in ((here, np.copy, weight), (there, on_device, device)):
            grads = [RowSparse(place(ones), np.array([row]), (4, 2)) for row in (1, 2)]
            updater([0, 1], grads, [target, target])
        check_close(device, weight)
        for index, average in here.averages.items():
            check_close(there.averages[index], average)
