"""Records: row-sparse gradients in any form have the bits of updates one by one."""

from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

import numpy as np
import pytest
import scipy.sparse

from fastopt import optimizer
from fastopt._engine import templates
from fastopt._kernels.numpy_abi import readable
from helpers.tensor_lists import everything
from helpers.written_headers import read_in_python

pytestmark = [
    pytest.mark.skipif(not readable(), reason="records are read by compiled code"),
    pytest.mark.usefixtures("unrecorded"),
]


def rows_of(seed, height, count=6):
    """Row indices, some of them repeated."""
    return np.random.default_rng(seed).integers(0, height, count)


@pytest.mark.parametrize("kind", ["csr_array", "coo_matrix"])
def test_arrays_of_scipy_have_records(kind):
    """Their rows with stored entries become a RowSparse in each call."""
    ends = []
    for on_records in (True, False):
        updater, weight = optimizer.Updater(optimizer.Adam()), np.ones((9, 4), np.float32)
        updater = updater if on_records else read_in_python(updater)
        for step in range(3):
            dense = np.zeros((9, 4), np.float32)
            dense[rows_of(step, 9)] = step + 1.0
            updater(0, getattr(scipy.sparse, kind)(dense), weight)
        ends.append(everything(updater, [weight]))
    assert ends[0] == ends[1]


def test_indices_that_a_schedule_spoils_are_checked_again():
    updater, weight, rows = optimizer.Updater(optimizer.SGD()), np.ones((9, 2)), np.array([1, 3])
    grad = np.ones((2, 2)), rows
    updater(0, grad, weight)

    def schedule(update):
        rows[1] = 9
        return 0.1

    updater.optimizer.lr_scheduler = schedule
    before = weight.copy()
    with pytest.raises(ValueError, match="index 0: indices must be at least 0 and below 9, got 9"):
        updater(0, grad, weight)
    np.testing.assert_array_equal(weight, before)
    assert updater.optimizer.num_update == updater.optimizer._index_update_count[0] == 1


def test_loops_that_two_threads_look_up_at_once_are_the_same_array(monkeypatch):
    """Records have its address, so that it must stay."""
    both = Barrier(2)

    def compiled(loops):
        both.wait(10)
        return np.zeros(8, np.int64)

    monkeypatch.setattr(templates, "LOOPS", {})
    monkeypatch.setattr(templates, "_compiled", compiled)
    loops = templates.Loops(None, None, False, False)
    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(lambda _: loops.addresses, range(2))
    assert first is second is loops.addresses
