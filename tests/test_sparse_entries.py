"""Gradients from scipy.sparse, known by their attributes alone."""

import numpy as np
import pytest
import scipy.sparse
from hypothesis import given
from hypothesis import strategies as st

from fastopt.sparse import as_row_sparse, is_row_sparse


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


def test_scipy_gradient_of_integers_is_refused():
    with pytest.raises(TypeError, match=r"gradient must be float16, .* got int64"):
        as_row_sparse(scipy.sparse.csr_array(np.eye(3, dtype=np.int64)), (3, 3))


def test_scipy_gradients_are_recognized_without_scipy(run_python):
    code = """
import sys
from types import SimpleNamespace
import numpy as np
sys.modules["scipy"] = None
from fastopt.sparse import as_row_sparse
indptr, indices, data = np.array([0, 0, 2]), np.array([1, 1]), np.array([0.5, 0.25])
grad = SimpleNamespace(format="csr", tocsr=None, indptr=indptr, indices=indices, data=data)
grad.shape, grad.dtype = (2, 3), data.dtype
print(as_row_sparse(grad, (2, 3)).to_dense().tolist())
"""
    assert run_python(code) == "[[0.0, 0.0, 0.0], [0.0, 0.75, 0.0]]\n"
