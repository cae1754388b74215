import copy
import pickle
import sys
from types import SimpleNamespace

import ml_dtypes
import numpy as np
import pytest
import scipy.sparse
from hypothesis import given
from hypothesis import strategies as st

from fastopt.sparse import RowSparse, as_row_sparse, is_row_sparse, row_sparse_array
from helpers.refusals import check_refused

HALVES = [np.float16, ml_dtypes.bfloat16]
DTYPES = [np.float32, np.float64, *HALVES]


@st.composite
def tables(draw, dtypes=DTYPES):
    """Row-sparse arrays of any shape, with rows in any order and repeated at will."""
    shape = tuple(draw(st.lists(st.integers(0, 5), min_size=1, max_size=3)))
    number = draw(st.integers(0, 12)) if shape[0] else 0
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    indices = rng.integers(0, max(shape[0], 1), number)
    if draw(st.booleans()):
        indices = np.unique(indices)
    values = rng.standard_normal((len(indices), *shape[1:])) * 10.0 ** rng.integers(-3, 4)
    kind = draw(st.sampled_from(["i4", "i8", "i1", "u2", "u4", "u8", ">i4", ">i8"]))
    order = draw(st.sampled_from("CF"))
    values = values.astype(draw(st.sampled_from(dtypes)), order=order)
    return RowSparse(values, indices.astype(kind), shape)


def summed_one_by_one(table):
    """The whole array, by a loop over the listed rows."""
    wide = np.float32 if table.dtype in HALVES else table.dtype
    dense = np.zeros(table.shape, wide)
    for row, index in zip(table.values, table.indices, strict=True):
        dense[index] += row.astype(wide)
    return dense.astype(table.dtype)


def same_numbers(actual, expected):
    assert actual.dtype == expected.dtype
    np.testing.assert_array_equal(actual.astype(np.float64), expected.astype(np.float64))


@given(tables())
def test_rows_coalesced_rows_and_those_of_the_dense_array_are_one_array(table):
    """The sum of the rows in their order."""
    before, expected = copy.deepcopy((table.values, table.indices)), summed_one_by_one(table)
    summed, back = table.coalesce(), RowSparse.from_dense(table.to_dense())
    for each in (table, summed, back):
        same_numbers(each.to_dense(), expected)
        assert each.shape == table.shape
    assert summed.coalesce() is summed
    np.testing.assert_array_equal(summed.indices, np.unique(table.indices))
    assert summed.indices.dtype == table.indices.dtype in (np.int32, np.int64)
    assert back.coalesce() is back
    assert all((row != 0).any() for row in back.values)
    same_numbers(table.values, before[0])
    np.testing.assert_array_equal(table.indices, before[1])


def test_long_sums_are_made_one_after_the_other_not_in_pairs(rng):
    values = rng.standard_normal((3000, 5)).astype(np.float32)
    summed = RowSparse(values, [0] * 3000, (1, 5)).coalesce()
    np.testing.assert_array_equal(summed.values[0], np.cumsum(values, axis=0)[-1])


@pytest.mark.parametrize("dtype", HALVES)
def test_half_precision_values_are_summed_without_intermediate_rounding(dtype):
    values = np.array([2048, 1, 1, 1, 1], dtype)  # each 1 alone would be rounded away
    summed = RowSparse(values, [0] * 5, 1).coalesce()
    same_numbers(summed.values, np.array([2052], dtype))


@given(tables(), st.data())
def test_retained_rows_are_those_that_were_asked_for(table, data):
    ids = data.draw(st.lists(st.integers(0, table.shape[0] - 1))) if table.shape[0] else []
    expected = summed_one_by_one(table)
    expected[[row not in ids for row in range(table.shape[0])]] = 0
    kept = table.retain(ids)
    same_numbers(kept.to_dense(), expected)
    assert set(kept.indices) == set(table.indices) & set(ids)


@given(tables(), st.data())
def test_sum_of_the_parts_is_the_sum_of_all_rows(table, data):
    cut = data.draw(st.integers(0, len(table.indices)))
    parts = [
        RowSparse(table.values[part], table.indices[part], table.shape)
        for part in (slice(cut), slice(cut, None))
    ]
    both = parts[0] + parts[1]
    same_numbers(both.to_dense(), summed_one_by_one(table))
    assert both.coalesce() is both


def test_arrays_are_kept_without_a_copy():
    values, indices = np.zeros((6, 8), ml_dtypes.bfloat16)[::-2, ::2], np.arange(6, dtype="i4")[::2]
    table = RowSparse(values, indices, (6, 4))
    for each in (table, as_row_sparse(table, (6, 4)), as_row_sparse([values, indices], (6, 4))):
        assert each.values is values
        assert each.indices is indices
    assert (table.shape, table.ndim, table.dtype) == ((6, 4), 2, values.dtype)
    for kind in ("i1", "u2", "u4", "u8", ">i4"):
        assert RowSparse(np.ones(2), np.array([5, 3], kind), 6).indices.dtype == np.int64


ONE = np.ones((2, 3))
BAD = {
    "integer values": (ONE.astype(int), [0, 1], (5, 3), TypeError,
        r"values must be float16, .* got int64: convert with astype\('float32'\)"),
    "no values": (None, [0, 1], (5, 3), TypeError, "values must be an array, got None"),
    "words": (ONE.astype(str), [0, 1], (5, 3), TypeError, "or complex128, got <U32"),
    "masked values": (np.ma.array(ONE), [0, 1], (5, 3), TypeError, "values .* MaskedArray"),
    "float indices": (ONE, [0.0, 1.0], (5, 3), TypeError, "indices must be integers, got float64"),
    "masked indices": (ONE, np.ma.array([0, 1]), (5, 3), TypeError, "indices .* MaskedArray"),
    "flat values":
        (ONE, [[0, 1]], (5, 3), ValueError, r"\(1, 2, 3\) for indices of shape \(1, 2\)"),
    "two rows": (ONE, 0, (5, 3), ValueError, r"\(3,\) for indices of shape \(\) .* got \(2, 3\)"),
    "negative": (ONE, [0, -1], (5, 3), ValueError, "at least 0 and below 5, got -1"),
    "beyond int64": (ONE, np.array([0, 2**64 - 1], np.uint64), (5, 3), ValueError, "got 184467"),
    "fewer indices": (ONE, [0], (5, 3), ValueError, r"shape \(1, 3\) for 1 indices .* \(2, 3\)"),
    "other columns": (ONE, [0, 1], (5, 4), ValueError, r"shape \(2, 4\) for 2 indices"),
    "no dimension": (ONE, [0, 1], (), ValueError, "shape must have one dimension or more"),
    "float shape": (ONE, [0, 1], (5.0, 3), TypeError, "shape must be an integer, got 5.0"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD.values(), ids=BAD.keys())
def test_what_does_not_fit_is_refused_with_its_name(case):
    values, indices, shape, error, words = case
    with pytest.raises(error, match=words):
        RowSparse(values, indices, shape)
    with pytest.raises(error, match=words):
        as_row_sparse((values, indices), shape)


@pytest.mark.parametrize("shape", [(6, 3), (6,)], ids=str)
@pytest.mark.parametrize("indices", [3, [[1, 2], [5, 1]], [[[]]], [[[0]]]], ids=str)
def test_indices_may_have_any_shape(indices, shape):
    indices = np.array(indices, np.int64)
    values = np.random.default_rng(0).normal(size=(*indices.shape, *shape[1:]))
    found = RowSparse(values, indices, shape)
    flat = RowSparse(values.reshape(indices.size, *shape[1:]), indices.ravel(), shape)
    np.testing.assert_array_equal(found.indices, flat.indices)
    np.testing.assert_array_equal(found.values, flat.values)


FIVE = RowSparse(np.ones(2), [0, 1], 5)
WRONG = {
    "FIVE.retain([1, 7])": "ValueError: row_ids must be at least 0 and below 5, got 7",
    "RowSparse.from_dense([1, 2])": "TypeError: dense must be float16",
    "RowSparse.from_dense(1.0)": "ValueError: dense must have one dimension or more",
    "FIVE + FIVE.astype(np.float32)": "TypeError: same dtype, got float64 and float32",
    "FIVE + RowSparse(np.ones(2), [0, 1], 6)": r"ValueError: same shape, got \(5,\) and \(6,\)",
    "row_sparse_array(np.ones(2), shape=5)": r"TypeError: pair \(values, indices\)",
    "as_row_sparse(FIVE, (6,))": r"ValueError: shape \(6,\), got \(5,\)",
    "as_row_sparse(scipy.sparse.csr_array((5, 3)), (6, 3))":
        r"ValueError: shape \(6, 3\), got \(5, 3\)",
    "FIVE.astype(int)": "TypeError: values must be float16",
    "FIVE + 1": "TypeError: unsupported",
    "np.ones(5) + FIVE": "TypeError: unsupported|not support|not implemented",
}  # fmt: skip


@pytest.mark.parametrize("code", WRONG)
def test_other_wrong_arguments_are_refused_with_their_name(code):
    check_refused(code, WRONG[code], globals())


def test_copies_stand_for_the_same_array_and_equality_is_identity():
    table = RowSparse(np.ones((2, 3)), [3, 1], (5, 3))
    for other in (copy.copy(table), copy.deepcopy(table), pickle.loads(pickle.dumps(table))):
        np.testing.assert_array_equal(other.to_dense(), table.to_dense())
        assert table == table != other
        assert len({table, table, other}) == 2


def test_values_of_another_dtype_are_copies(rng):
    table = RowSparse(rng.random((2, 3)), [3, 1], (5, 3))
    other = table.astype(np.float32)
    np.testing.assert_array_equal(other.to_dense(), table.to_dense().astype(np.float32))
    assert not np.shares_memory(table.astype(np.float64).values, table.values)


def test_repr_shows_shape_dtype_and_number_of_rows():
    table = row_sparse_array((np.ones((1, 3), np.float32), [4]), shape=(5, 3))
    assert repr(table) == "<RowSparse of shape (5, 3), float32, 1 indexed row>"
    for empty in (table.retain([]), RowSparse(np.ones((0, 3)), [], (5, 3))):
        assert "0 indexed rows" in repr(empty)


@pytest.mark.parametrize("grad", [np.ones((5, 3)), (), scipy.sparse.csc_array((5, 3))], ids=type)
def test_other_arrays_than_row_sparse_ones_are_refused(grad):
    assert not is_row_sparse(grad)
    with pytest.raises(TypeError, match=r"gradient must be a RowSparse, a pair .* CSR or COO"):
        as_row_sparse(grad, (5, 3))


# Gradients from scipy.sparse, known by their attributes alone


def in_scipy_forms(entries, shape):
    """Arrays and matrices in COO and CSR format with these (row, column, value) entries."""
    rows, columns, values = entries
    coo = scipy.sparse.coo_array((values, (rows, columns)), shape)
    order = np.argsort(rows, kind="stable")
    starts = np.searchsorted(rows[order], np.arange(shape[0] + 1))
    parts = (values[order], columns[order], starts)
    yield from (coo, scipy.sparse.coo_matrix(coo))
    yield from (scipy.sparse.csr_array(parts, shape), scipy.sparse.csr_matrix(parts, shape))


@given(
    shape=st.tuples(st.integers(1, 6), st.integers(1, 4)) | st.just((40, 1)),
    number=st.integers(0, 20),
    seed=st.integers(0, 2**32),
    dtype=st.sampled_from([np.float32, np.float64]),
)
def test_scipy_gradients_list_the_rows_that_have_entries(shape, number, seed, dtype):
    rng = np.random.default_rng(seed)
    rows, columns = (rng.integers(length, size=number) for length in shape)
    values = rng.standard_normal(number).astype(dtype)
    dense = np.zeros(shape, dtype)
    for row, column, value in zip(rows, columns, values, strict=True):
        dense[row, column] += value
    for grad in in_scipy_forms((rows, columns, values), shape):
        assert is_row_sparse(grad)
        table = as_row_sparse(grad, shape)
        np.testing.assert_array_equal(table.indices, np.unique(rows))
        assert table.dtype == dtype
        np.testing.assert_array_equal(table.to_dense(), dense)


def test_scipy_arrays_of_one_dimension_are_taken():
    dense = np.array([0, 3.0, 0, 4.0])
    for kind in (scipy.sparse.coo_array, scipy.sparse.csr_array):
        np.testing.assert_array_equal(as_row_sparse(kind(dense), 4).to_dense(), dense)


def test_scipy_gradients_are_recognized_without_scipy(monkeypatch):
    for name in [name for name in sys.modules if name.partition(".")[0] == "scipy"]:
        monkeypatch.setitem(sys.modules, name, None)
    grad = SimpleNamespace(format="csr", tocsr=None, shape=(2, 3), dtype=np.dtype(float))
    grad.indptr, grad.indices, grad.data = map(np.array, ([0, 0, 2], [1, 1], [0.5, 0.25]))
    assert as_row_sparse(grad, (2, 3)).to_dense().tolist() == [[0, 0, 0], [0, 0.75, 0]]
