"""Averages and sums of gradients on the device are those of the CPU."""

import copy
import pickle

import numpy as np
import pytest

from fastopt import EMA, SWA, RowSparse, optimizer
from helpers.device_arrays import Bare, check_close, host, on_device

pytestmark = pytest.mark.gpu

SUMMED = {
    "Adam": (optimizer.Adam, {}, {"accumulate": 3}),
    "Adam, all rows": (optimizer.Adam, {"lazy_update": False}, {"accumulate": 3}),
    "Adam, norm": (optimizer.Adam, {}, {"accumulate": 3, "clip_global_norm": 0.5}),
    "AdamW, deferred decay": (optimizer.AdamW, {"sparse_decay": "catch_up"}, {"accumulate": 3}),
    "Adam, averaged": (optimizer.Adam, {}, {"accumulate": 3, "average": EMA(0.5)}),
    "LBSGD": (optimizer.LBSGD, {"batch_scale": 3, "warmup_epochs": 0}, {}),
    "LBSGD, all rows": (optimizer.LBSGD, {"batch_scale": 3, "lazy_update": False}, {}),
}
CALLS = {
    "rows": ["rows"] * 3,
    "rows, then none": ["rows", "none", "none"],
    "none at first": ["none", "rows", "rows"],
    "dense at last": ["rows", "rows", "dense"],
    "dense at first": ["dense", "rows", "rows"],
}


def gradients(kind, shape, rng, dtype=np.float32):
    """A gradient of a call, on the host and on the device: some rows, no rows, or dense."""
    if kind == "dense":
        grad = rng.normal(size=shape).astype(dtype)
        return grad, on_device(grad)
    rows = rng.integers(0, shape[0], size=3 if kind == "rows" else 0)
    values = rng.normal(size=(len(rows), *shape[1:])).astype(dtype)
    there = rows.astype(np.int32) if len(rows) and rows[0] % 2 else on_device(rows)
    return RowSparse(values, rows, shape), RowSparse(on_device(values), there, shape)


@pytest.mark.parametrize("calls", CALLS.values(), ids=CALLS)
@pytest.mark.parametrize(("make", "kwargs", "settings"), SUMMED.values(), ids=SUMMED)
def test_row_sparse_gradients_are_summed_by_row(make, kwargs, settings, calls, rng):
    here, there = (
        optimizer.Updater(make(learning_rate=0.1, wd=0.1, **kwargs), **settings) for _ in range(2)
    )
    weight = rng.normal(size=(9, 2)).astype(np.float32)
    device = on_device(weight)
    for kind in [*calls, *CALLS["rows"], *calls]:
        grad, twin = gradients(kind, weight.shape, rng)
        here(0, grad, weight)
        there(0, twin, Bare(device))
        check_close(device, weight)


@pytest.mark.parametrize("name", ["Adam", "LBSGD"])
def test_a_sum_of_rows_is_saved_and_goes_on(name, half, rng):
    make, kwargs, settings = SUMMED[name]
    updater = optimizer.Updater(make(multi_precision=True, **kwargs), **settings)
    weight = rng.normal(size=(9, 2)).astype(half)
    device = on_device(weight)
    updater(0, gradients("rows", weight.shape, rng, half)[1], device)
    copied, twin = pickle.loads(pickle.dumps(updater)), on_device(host(device))
    for kind in ("rows", "rows", "dense"):
        grad = gradients(kind, weight.shape, rng, half)[1]
        updater(0, grad, device)
        copied(0, grad, twin)
    np.testing.assert_array_equal(host(twin), host(device))
    assert not (host(device) == weight).all()


def test_a_failed_update_keeps_the_sum_of_rows(rng):
    rates = {}
    made = optimizer.Adam(lr_scheduler=lambda count: rates["present"])
    updater = optimizer.Updater(made, accumulate=2)
    weight = rng.normal(size=(9, 2)).astype(np.float32)
    device, twin = on_device(weight), on_device(weight)
    first, last = (gradients("rows", weight.shape, rng)[1] for _ in range(2))
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
