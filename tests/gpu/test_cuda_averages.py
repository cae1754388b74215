"""Averages and sums of gradients on the device are those of the CPU."""

import numpy as np
import pytest

from fastopt import EMA, SWA, Lookahead, RowSparse, optimizer
from helpers.device_arrays import check_close, host, on_device

pytestmark = pytest.mark.cuda

SPECS = [EMA(decay=0.5), EMA(decay=0.5, bias_correction=True), SWA(2, 2), Lookahead(2)]


def pair(make=optimizer.Adam, **kwargs):
    """Updaters for the CPU and for the device."""
    return (optimizer.Updater(make(learning_rate=0.1), **kwargs) for _ in range(2))


def same(there, here):
    for index, average in here.averages.items():
        check_close(there.averages[index], average)


@pytest.mark.parametrize("average", SPECS, ids=str)
@pytest.mark.parametrize("make", [optimizer.Adam, optimizer.LAMB])
def test_averages_are_kept_on_the_device(make, average, rng):
    here, there = pair(make, average=average)
    weight = rng.normal(size=(3, 4)).astype(np.float32)
    device = on_device(weight)
    for _ in range(5):
        grad = rng.normal(size=(3, 4)).astype(np.float32)
        here(0, grad, weight)
        there(0, on_device(grad), device)
        check_close(device, weight)
        same(there, here)
    with there.averaged():
        check_close(device, here.averages[0])
    check_close(device, weight)


@pytest.mark.parametrize("average", [SPECS[0], SPECS[2]], ids=str)
def test_row_sparse_gradients_average_on_the_device(average, rng):
    here, there = pair(average=average)
    weight = rng.normal(size=(5, 2)).astype(np.float32)
    device = on_device(weight)
    for _ in range(4):
        rows, values = rng.integers(0, 5, size=2), rng.normal(size=(2, 2)).astype(np.float32)
        here(0, RowSparse(values, rows, (5, 2)), weight)
        there(0, RowSparse(on_device(values), on_device(rows), (5, 2)), device)
        check_close(device, weight)
        same(there, here)


def test_averages_come_back_from_a_checkpoint(rng):
    here, there = pair(average=EMA(decay=0.5))
    weight = rng.normal(size=6).astype(np.float32)
    device, grad = on_device(weight), rng.normal(size=6).astype(np.float32)
    here(0, grad, weight)
    there.load_states_dict(here.states_dict())
    there(0, on_device(grad), device := on_device(weight))
    here(0, grad, weight)
    check_close(device, weight)
    same(there, here)


def test_gradients_are_summed_on_the_device(rng):
    here, there = pair(accumulate=2)
    weight = rng.normal(size=6).astype(np.float32)
    device = on_device(weight)
    for _ in range(5):
        grad = rng.normal(size=6).astype(np.float32)
        here(0, grad, weight)
        there(0, on_device(grad), device)
        check_close(device, weight)


def test_row_sparse_gradients_are_summed_unless_updates_are_lazy(rng):
    lazy = optimizer.Updater(optimizer.Adam(), accumulate=2)
    here, there = (
        optimizer.Updater(optimizer.Adam(learning_rate=0.1, lazy_update=False), accumulate=2)
        for _ in range(2)
    )
    weight = rng.normal(size=(4, 2)).astype(np.float32)
    device = on_device(weight)
    for _ in range(4):
        rows, values = rng.integers(0, 4, size=2), rng.normal(size=(2, 2)).astype(np.float32)
        grad = RowSparse(on_device(values), on_device(rows), (4, 2))
        with pytest.raises(TypeError, match="index 0: lazy updates on a CUDA device"):
            lazy(0, grad, device)
        here(0, RowSparse(values, rows, (4, 2)), weight)
        there(0, grad, device)
        check_close(device, weight)


def test_units_are_clipped_on_the_host_alone():
    weight = on_device(np.ones((2, 2), np.float32))
    made = optimizer.Updater(optimizer.Adam(), clip_adaptive=0.1)
    with pytest.raises(TypeError, match="index 0: clip_adaptive works on arrays on the host"):
        made(0, on_device(np.ones((2, 2), np.float32)), weight)
    np.testing.assert_array_equal(host(weight), 1)


def test_a_new_sum_of_lbsgd_starts_in_all_rows(rng):
    here, there = (
        optimizer.Updater(optimizer.LBSGD(learning_rate=0.1, batch_scale=2, warmup_epochs=0))
        for _ in range(2)
    )
    weight = rng.normal(size=(4, 2)).astype(np.float32)
    device = on_device(weight)
    for rows in (range(4), range(4), [1], [2]):
        values = rng.normal(size=(len(rows), 2)).astype(np.float32)
        here(0, RowSparse(values, list(rows), (4, 2)), weight)
        there(0, RowSparse(on_device(values), np.array(rows), (4, 2)), device)
        check_close(device, weight)


def test_weights_with_two_indices_are_averaged_in_list_order():
    here, there = pair(optimizer.SGD, average=SPECS[2])
    weight = np.arange(8, dtype=np.float32).reshape(4, 2)
    device, ones = on_device(weight), np.ones((1, 2), np.float32)
    for _ in range(5):
        for updater, place, target in ((here, np.copy, weight), (there, on_device, device)):
            grads = [RowSparse(place(ones), np.array([row]), (4, 2)) for row in (1, 2)]
            updater([0, 1], grads, [target, target])
        check_close(device, weight)
        same(there, here)
