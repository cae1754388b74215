"""Row-sparse gradients that do not fit are refused by name, and nothing changes."""

import copy

import numpy as np
import pytest

from fastopt import optimizer
from fastopt._kernels.strided import proportion
from fastopt.sparse import RowSparse
from fastopt.table import EmbeddingTable
from helpers.tensor_lists import frozen


def updater(name, **kwargs):
    return optimizer.get_updater(optimizer.create(name, learning_rate=0.1, **kwargs))


TABLE = np.ones((5, 2))
BAD = {
    "values of integers": (np.ones((1, 2), int), [1], TypeError, "must .*float.*, got int64"),
    "other columns": (np.ones((1, 3)), [1], ValueError, r"shape \(1, 2\) for 1 indices.*\(1, 3\)"),
    "index too large": (np.ones((2, 2)), [1, 5], ValueError, "below 5, got 5"),
    "fewer values": (np.ones((1, 2)), [1, 3], ValueError, "shape .2, 2. for 2 indices.*got .1, 2."),
    "negative index": (np.ones((2, 2)), [-1, 1], ValueError, "at least 0 .* got -1"),
    "index beyond int64": (np.ones((1, 2)), [2**63], ValueError, "got 9223372036854775808"),
    "indices of floats": (np.ones((1, 2)), [1.0], TypeError, "integers, got float64"),
    "values in the weight": (TABLE[1:2], [1], ValueError, "weight and gradient share memory"),
}


@pytest.mark.parametrize("part", ["values", "indices"])
def test_a_row_sparse_gradient_without_arrays_is_refused_by_name(part):
    grad = RowSparse(np.ones((1, 2)), [1], (5, 2))
    setattr(grad, part, None)
    with pytest.raises(TypeError, match=r"index 't': the values .* must be arrays, got None"):
        updater("adam")("t", grad, TABLE)


def spoilt(values, indices):
    """A gradient that was spoilt after it was made."""
    grad = RowSparse(np.ones((2, 2)), np.array([1, 3]), (5, 2))
    grad.values, grad.indices = values, indices
    return grad


@pytest.mark.parametrize("form", [lambda *pair: pair, spoilt], ids=["pair", "spoilt"])
@pytest.mark.parametrize("accumulates", [False, True], ids=["", "accumulates"])
@pytest.mark.parametrize("seen", [False, True], ids=["first", "later"])
@pytest.mark.parametrize("case", BAD.values(), ids=BAD.keys())
def test_what_does_not_fit_is_refused_by_name_and_changes_nothing(case, seen, accumulates, form):
    values, indices, error, words = case
    kwargs = {"batch_scale": 2} if accumulates else {}
    made = updater("lbsgd" if accumulates else "adam", param_idx2name={0: "table"}, **kwargs)
    if seen:
        made(0, (np.ones((1, 2)), np.array([3])), TABLE)
    before = frozen((TABLE, dict(made.states))), repr(made.optimizer.__getstate__())
    grad = form(values, np.array(indices))
    for call in ((0, grad, TABLE), ([1, 0], [np.ones(3), grad], [np.ones(3), TABLE])):
        with pytest.raises(error, match=words) as raised:
            made(*call)
        assert "index 0 (table)" in str(raised.value)
        after = frozen((TABLE, dict(made.states))), repr(made.optimizer.__getstate__())
        assert after == before


def repeated(count, dtype=np.int8):
    """A gradient of `count` equal rows, in the memory of one."""
    return np.broadcast_to(np.float32(1), (count, 2)), np.broadcast_to(dtype(1), (count,))


@pytest.mark.parametrize("count", [2**45, 2**57, 2**58, 2**59])
@pytest.mark.parametrize(
    "settings", [{}, {"clip_global_norm": 1.0}, {"clip_adaptive": 0.1}], ids=str
)
def test_rows_whose_bytes_would_overflow_do_not_fit_into_memory(count, settings):
    """Their indices are not read either, which would never end."""
    updater = optimizer.Updater(optimizer.SGD(lr=0.1), **settings)
    weights, some = list(np.ones((3, 5, 2), np.float32)), RowSparse(np.ones((1, 2)), [1], (5, 2))
    for number in range(3):  # without a record, and with one
        before = copy.deepcopy((weights, updater.optimizer._index_update_count))
        for call in ((0, repeated(count), weights[0]), ([0, 1, 2], [repeated(count)] * 3, weights)):
            with pytest.raises(MemoryError, match=f"index 0: indices do not .* {count} integers"):
                updater(*call)
        np.testing.assert_equal((weights, updater.optimizer._index_update_count), before)
        updater([0, 1, 2], [some] * 3, weights)
        assert updater.optimizer.num_update == number + 1


@pytest.mark.parametrize("dtype", [np.int64, np.uint8, np.uint64])
def test_ids_of_a_table_that_do_not_fit_into_memory_are_not_read(dtype):
    table = EmbeddingTable(2, optimizer.SGD(lr=0.1))
    table.lookup([1])
    with pytest.raises(MemoryError):
        table.lookup(repeated(2**50, dtype)[1])


@pytest.mark.parametrize("settings", [{}, {"clip_adaptive": 0.1}], ids=str)
@pytest.mark.parametrize("rows", [[2**56, 1, 2**56], [], None], ids=["mixed", "none", "dense"])
def test_a_weight_of_any_height_without_elements_is_updated(rows, settings):
    updater = optimizer.Updater(optimizer.SGD(lr=0.1), **settings)
    weight = np.zeros((2**57, 0))
    grad = weight if rows is None else RowSparse(np.zeros((len(rows), 0)), rows, weight.shape)
    for _ in range(3):
        updater(0, grad, weight)
    assert updater.optimizer.num_update == 3


def test_shares_of_more_elements_than_fit_into_four_bytes():
    size = 2**34 + 3
    assert [proportion(k * size // 4, size, size) for k in range(4)] == [
        k * size // 4 for k in range(4)
    ]
    assert proportion(3 * 2**40, 2**42, 2**33) == 3 * 2**31
