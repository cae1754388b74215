"""Records: row-sparse gradients in any form have the bits of updates one by one."""

from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

import numpy as np
import pytest
import scipy.sparse

import fastopt
from fastopt import optimizer
from fastopt._engine import templates
from fastopt._kernels.chunks import PARALLEL_FROM
from fastopt._kernels.numpy_abi import readable
from fastopt.amp import LossScaler
from fastopt.sparse import RowSparse
from helpers.tensor_lists import everything, normal
from helpers.written_headers import read_in_python

pytestmark = [
    pytest.mark.skipif(not readable(), reason="records are read by compiled code"),
    pytest.mark.usefixtures("unrecorded"),
]


def rows_of(seed, height, count=6):
    """Row indices, some of them repeated."""
    return np.random.default_rng(seed).integers(0, height, count)


def wide(array):
    """The same numbers, not next to each other."""
    return np.repeat(array, 2, axis=-1)[..., ::2]


def backwards(array):
    return np.ascontiguousarray(array[::-1])[::-1]


def by_batch(values, rows, shape):
    """Two sequences of three rows."""
    return values.reshape(2, 3, *shape[1:]), rows.reshape(2, 3)


FORMS = {
    "RowSparse": RowSparse,
    "pair": lambda values, rows, shape: (values, rows),
    "list": lambda values, rows, shape: [values, rows],
    "list of ints": lambda values, rows, shape: (values, rows.tolist()),
    "list of NumPy integers": lambda values, rows, shape: (values, list(rows)),
    "batch": by_batch,
    "batch in Fortran order": lambda *of: tuple(map(np.asfortranarray, by_batch(*of))),
    "Fortran order": lambda values, rows, shape: (np.asfortranarray(values), rows),
    "strided": lambda values, rows, shape: (wide(values), wide(rows)),
    "backwards": lambda values, rows, shape: (backwards(values), backwards(rows)),
    "float64": lambda values, rows, shape: (values.astype(np.float64), rows),
    "read-only": lambda values, rows, shape: (np.broadcast_to(values, values.shape), rows),
}
FORMS |= {
    f"indices of {dtype}": lambda values, rows, shape, dtype=dtype: (values, rows.astype(dtype))
    for dtype in ("b", "B", "h", "H", "i", "I", "l", "L", "q", "Q")
}


def served(updater):
    """Assert that records served all calls."""
    assert not hasattr(updater.parameters, "unrecorded")
    assert updater.records.slots


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


def test_a_decay_that_takes_all_changes_nothing():
    made = optimizer.AdaGrad(learning_rate=0.1, wd=0.1, sparse_decay="catch_up")
    updater, weights = optimizer.Updater(made), [np.ones((9, 4)), np.ones((9, 4))]
    grads = [(np.ones((2, 4)), [1, 8])] * 2
    updater([0, 1], grads, weights)
    made.learning_rate, before = 10.0, everything(updater, weights)[:2]
    kept = {index: (rows.copy(), total) for index, (rows, total) in made.row_decay.items()}
    with pytest.raises(ValueError, match="needs rate times decay below 1, got 1"):
        updater([0, 1], grads, weights)
    assert everything(updater, weights)[:2] == before
    np.testing.assert_equal(made.row_decay, kept)
    assert made.num_update == made._index_update_count[0] == made._index_update_count[1] == 1


BAD = {
    "too large": (lambda rows: rows + 9, "at least 0 and below 9, got"),
    "negative": (lambda rows: rows - 9, "at least 0 and below 9, got -"),
    "beyond int64": (lambda rows: rows.astype(np.uint64) + np.uint64(2**63), "got 92233720368547"),
    "int of Python": (lambda rows: [2**70, *rows[1:]], "."),
}


@pytest.mark.parametrize("bad", BAD)
def test_a_row_out_of_range_in_the_last_table_changes_nothing(bad):
    spoil, words = BAD[bad]
    updater = optimizer.Updater(optimizer.Adam())
    weights = [np.ones((9, 4)) for _ in range(3)]
    good = np.ones((2, 4)), np.array([1, 8])
    for _ in range(2):
        updater([0, 1, 2], [good] * 3, weights)
    before = everything(updater, weights)
    with pytest.raises((ValueError, TypeError, OverflowError), match=words):
        updater([0, 1, 2], [good, good, (good[0], spoil(good[1]))], weights)
    assert everything(updater, weights) == before
    updater([0, 1, 2], [good] * 3, weights)
    served(updater)


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


@pytest.mark.parametrize("size", [6, PARALLEL_FROM])
def test_an_index_may_come_twice_and_values_may_be_another_weight(size):
    ends = []
    for way in ("list", "single"):
        updater = optimizer.Updater(optimizer.SGD(momentum=0.5, lazy_update=True))
        first, second = normal(0, (size, 2), "float32"), normal(1, (4, 2), "float32")
        rows = np.array([3, 1, 3, 0])
        for _ in range(3):
            calls = [(0, (second, rows), first), (1, first[:4], second), (0, (second, rows), first)]
            if way == "list":
                updater(*map(list, zip(*calls, strict=True)))
            else:
                for call in calls:
                    updater(*call)
        served(updater)
        ends.append((first.tobytes(), second.tobytes()))
    assert ends[0] == ends[1]


def test_a_skipped_step_names_the_table():
    updater = fastopt.Updater(
        optimizer.Adam(param_idx2name={1: "words"}), loss_scaler=LossScaler(init_scale=4.0)
    )
    weights, good = [np.ones((5, 2)), np.ones((5, 2))], (np.ones((1, 2)), [2])
    updater([0, 1], [good, good], weights)
    before = everything(updater, weights)[:3]
    updater([0, 1], [good, (np.full((1, 2), np.inf), [2])], weights)
    assert updater.info.skipped
    assert updater.info.non_finite == ("words",)
    assert everything(updater, weights)[:3] == before
    served(updater)


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
