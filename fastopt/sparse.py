"""Row-sparse arrays: gradients of tables of which a step has touched few rows."""

from typing import Any, Self

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fastopt.arguments import count
from fastopt.entries import listed_rows
from fastopt.kernels.device_memory import placed
from fastopt.kernels.devices import device_of, header, is_cuda

__all__ = ["RowSparse", "as_row_sparse", "is_row_sparse", "row_sparse_array"]

Array = NDArray[Any]
HALVES = ("float16", "bfloat16")
REALS = (*HALVES, "float32", "float64")


class RowSparse:
    """Some rows of an array, all other rows of which are zero.

    Row ``indices[j]`` is ``values[j]``. Indices may come in any order. An index that is repeated
    stands for the sum of its rows.

    Parameters
    ----------
    values : array_like
        The listed rows, of shape ``(k, *shape[1:])``: float16, bfloat16, float32 or float64. An
        array of any layout is kept without a copy, also one on a CUDA device; methods that compute
        with it then raise TypeError.
    indices : array_like
        Their `k` positions from 0 to ``shape[0] - 1``. int32 and int64 arrays are kept without a
        copy, other integers become int64.
    shape : int or tuple of int
        Shape of the whole array, of one dimension or more.

    Attributes
    ----------
    values, indices : numpy.ndarray
        The listed rows and their positions.
    shape, dtype, ndim
        Of the whole array, as in NumPy.

    Raises
    ------
    TypeError, ValueError
        An argument is of another type than described, the shapes do not fit together, or an index
        is negative or too large.

    Examples
    --------
    >>> import numpy as np
    >>> from fastopt.sparse import RowSparse
    >>> grad = RowSparse(np.array([[1.0, 2.0], [3.0, 4.0]]), np.array([3, 0]), (4, 2))
    >>> grad
    <RowSparse of shape (4, 2), float64, 2 rows listed>
    >>> grad.to_dense()
    array([[3., 4.],
           [0., 0.],
           [0., 0.],
           [1., 2.]])
    """

    __array_ufunc__ = None  # NumPy's operators are not to take it for a scalar.

    def __init__(self, values: ArrayLike, indices: ArrayLike, shape: int | tuple[int, ...]) -> None:
        self.shape = _shape(shape)
        self.values: Any
        self.indices: Any
        if is_cuda(values):
            self.values, self.indices = values, _listed_on_device(values, indices, self.shape[0])
        else:
            self.values = _reals("values", values)
            self.indices = _positions("indices", indices, self.shape[0])
        told = header(self.values)
        listed = len(header(self.indices))
        expected = (listed, *self.shape[1:])
        if told.shape != expected:
            raise ValueError(
                f"values must have shape {expected} for {listed} indices into "
                f"shape {self.shape}, got {told.shape}"
            )

    @property
    def dtype(self) -> np.dtype[Any]:
        """Type of the values, which may be replaced."""
        told: np.dtype[Any] = header(self.values).dtype
        return told

    @property
    def ndim(self) -> int:
        """Number of dimensions of the whole array."""
        return len(self.shape)

    @classmethod
    def from_dense(cls, dense: ArrayLike) -> Self:
        """Return the rows of an array that are not zero everywhere.

        Parameters
        ----------
        dense : array_like
            float16, bfloat16, float32 or float64, of one dimension or more.

        Raises
        ------
        TypeError, ValueError
            `dense` is not of the values' types, or has no dimension.

        Examples
        --------
        >>> import numpy as np
        >>> from fastopt.sparse import RowSparse
        >>> RowSparse.from_dense(np.array([0.0, 5.0, 0.0])).indices
        array([1])
        """
        dense = _reals("dense", dense)
        if dense.ndim == 0:
            raise ValueError("dense must have one dimension or more, got a single number")
        rows = np.flatnonzero((dense != 0).any(axis=tuple(range(1, dense.ndim))))
        return cls(dense[rows], rows, dense.shape)

    def to_dense(self) -> Array:
        """Return the whole array, with repeated rows summed as :meth:`coalesce` sums them."""
        summed = self.coalesce()
        dense = np.zeros(self.shape, self.dtype)
        dense[summed.indices] = summed.values
        return dense

    def coalesce(self) -> Self:
        """Return the same array with indices that are sorted and unique.

        Rows of a repeated index are added one after the other in the order in which they are
        listed: in float32 for float16 and bfloat16, with one rounding at the end, else in the
        values' own type. An array that is sorted and unique already is returned itself.

        Examples
        --------
        >>> import numpy as np
        >>> from fastopt.sparse import RowSparse
        >>> grad = RowSparse(np.array([1.0, 2.0, 4.0]), np.array([7, 3, 7]), 9).coalesce()
        >>> grad.indices, grad.values
        (array([3, 7]), array([2., 5.]))
        """
        self._require_main_memory()
        if (self.indices[1:] > self.indices[:-1]).all():
            return self
        order = np.argsort(self.indices, kind="stable")
        ordered = self.indices[order]
        first = np.append(True, ordered[1:] != ordered[:-1])
        sums = self.values[order[first]].astype(_wide(self.dtype), order="C")
        again = self.values[order[~first]].astype(sums.dtype, copy=False)
        # Elements of flat arrays are added several times faster than rows.
        width = sums[0].size
        target = (np.cumsum(first) - 1)[~first, np.newaxis] * width + np.arange(width)
        np.add.at(sums.reshape(-1), target.reshape(-1), again.reshape(-1))
        return type(self)(sums.astype(self.dtype, copy=False), ordered[first], self.shape)

    def retain(self, row_ids: ArrayLike) -> Self:
        """Return the listed rows whose index is among `row_ids`, in the order they had.

        Parameters
        ----------
        row_ids : array_like
            Integers, in any order.

        Raises
        ------
        TypeError, ValueError
            `row_ids` are not integers from 0 to ``shape[0] - 1``.

        Examples
        --------
        >>> import numpy as np
        >>> from fastopt.sparse import RowSparse
        >>> grad = RowSparse(np.array([1.0, 2.0, 4.0]), np.array([7, 3, 7]), 9)
        >>> grad.retain([0, 7]).values
        array([1., 4.])
        """
        self._require_main_memory()
        kept = np.isin(self.indices, _positions("row_ids", row_ids, self.shape[0]))
        return type(self)(self.values[kept], self.indices[kept], self.shape)

    def astype(self, dtype: Any) -> Self:
        """Return a copy with values of another dtype.

        Parameters
        ----------
        dtype : dtype_like
            float16, bfloat16, float32 or float64.
        """
        self._require_main_memory()
        return type(self)(self.values.astype(dtype), self.indices.copy(), self.shape)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Array:
        raise TypeError("a RowSparse does not become an array by itself, to_dense() makes one")

    def __add__(self, other: object) -> Self:
        if not isinstance(other, RowSparse):
            return NotImplemented
        if other.dtype != self.dtype:
            raise TypeError(f"arrays must have the same dtype, got {self.dtype} and {other.dtype}")
        if other.shape != self.shape:
            raise ValueError(f"arrays must have the same shape, got {self.shape} and {other.shape}")
        self._require_main_memory()
        other._require_main_memory()
        values = np.concatenate([self.values, other.values])
        indices = np.concatenate([self.indices, other.indices])
        return type(self)(values, indices, self.shape).coalesce()

    def _require_main_memory(self) -> None:
        if is_cuda(self.values):
            raise TypeError(f"this needs arrays in main memory, got {self!r} on a CUDA device")

    def __repr__(self) -> str:
        listed = len(header(self.indices))
        rows = f"{listed} row{'s' * (listed != 1)} listed"
        return f"<{type(self).__name__} of shape {self.shape}, {self.dtype}, {rows}>"


def row_sparse_array(pair: tuple[ArrayLike, ArrayLike], shape: int | tuple[int, ...]) -> RowSparse:
    """Return ``RowSparse(values, indices, shape)``, with MXNet's arguments.

    Parameters
    ----------
    pair : tuple of array_like
        The pair (values, indices).
    shape : int or tuple of int
        Shape of the whole array.

    Raises
    ------
    TypeError, ValueError
        As :class:`RowSparse` does, and if `pair` is not a pair.

    Examples
    --------
    >>> from fastopt.sparse import row_sparse_array
    >>> row_sparse_array(([[0.5, 0.5]], [2]), shape=(1000, 2))
    <RowSparse of shape (1000, 2), float64, 1 row listed>
    """
    if not _is_pair(pair):
        raise TypeError(f"a row-sparse array is made of a pair (values, indices), got {pair!r}")
    return RowSparse(*pair, shape)


def is_row_sparse(grad: Any) -> bool:
    """Whether :func:`as_row_sparse` is the function for `grad`.

    Parameters
    ----------
    grad : object
        Any gradient; an array that is not one of a pair is dense.

    Examples
    --------
    >>> import numpy as np
    >>> from fastopt.sparse import is_row_sparse
    >>> is_row_sparse((np.ones((1, 3)), np.array([7]))), is_row_sparse(np.ones((8, 3)))
    (True, False)
    """
    if _is_pair(grad):
        return all(isinstance(part, np.ndarray) or is_cuda(part) for part in grad)
    listed = getattr(grad, "format", None) in ("csr", "coo") and hasattr(grad, "tocsr")
    return listed or isinstance(grad, RowSparse)


def as_row_sparse(grad: Any, shape: int | tuple[int, ...]) -> RowSparse:
    """Return a gradient in any of the row-sparse forms as a :class:`RowSparse`.

    Parameters
    ----------
    grad : RowSparse, pair (values, indices), or scipy.sparse array or matrix
        The last in CSR or COO format. Its rows with stored entries become the listed rows, sorted;
        entries at the same place are summed in their order, as :meth:`RowSparse.coalesce` does.
    shape : int or tuple of int
        Shape that the whole gradient must have.

    Raises
    ------
    TypeError, ValueError
        `grad` is none of these or has another shape, and as :class:`RowSparse` does.

    Examples
    --------
    >>> import numpy as np
    >>> from fastopt.sparse import as_row_sparse
    >>> as_row_sparse((np.ones((1, 3)), np.array([7])), (100, 3))
    <RowSparse of shape (100, 3), float64, 1 row listed>
    """
    if isinstance(grad, RowSparse) and grad.shape == shape:
        return grad
    if _is_pair(grad):
        return row_sparse_array(grad, shape)
    if not is_row_sparse(grad):
        raise TypeError(
            "gradient must be a RowSparse, a pair (values, indices), or a scipy.sparse array in "
            f"CSR or COO format, got {type(grad).__name__}"
        )
    if grad.shape != _shape(shape):
        raise ValueError(f"gradient must have shape {_shape(shape)}, got {grad.shape}")
    if isinstance(grad, RowSparse):
        return grad
    return RowSparse(*listed_rows(grad, _wide(_reals("gradient", grad.data).dtype)), grad.shape)


def _is_pair(grad: object) -> bool:
    return isinstance(grad, (tuple, list)) and len(grad) == 2


def _wide(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """Type in which values of `dtype` are summed."""
    return np.dtype(np.float32) if dtype.name in HALVES else dtype


def _shape(shape: Any) -> tuple[int, ...]:
    lengths = shape if isinstance(shape, (tuple, list)) else (shape,)
    if not lengths:
        raise ValueError("shape must have one dimension or more, got ()")
    return tuple(count("shape", length, least=0) for length in lengths)


def _reals(name: str, values: Any) -> Array:
    """Return `values` as an array, once they are known to be of a type that is taken."""
    array = header(values) if is_cuda(values) else _unmasked(name, values)
    dtype = array.dtype  # its name takes microseconds to look up
    if not (dtype.isnative and (dtype.char in "fd" or dtype.name in REALS)):
        raise TypeError(f"{name} must be {', '.join(REALS[:-1])} or {REALS[-1]}, got {array.dtype}")
    return array


def _positions(name: str, values: Any, rows: int) -> Array:
    """Return row numbers as int32 or int64, once they are known to be of an array's `rows`."""
    if is_cuda(values):
        raise ValueError(f"{name} are on {device_of(header(values))}, the values in main memory")
    array = _unmasked(name, values)
    if not (isinstance(values, np.ndarray) or array.size):
        array = array.astype(np.int64)  # NumPy takes an empty list for floats.
    if array.dtype.kind not in "iu":
        raise TypeError(f"{name} must be integers, got {array.dtype}")
    if array.ndim != 1:
        raise ValueError(f"{name} must have one dimension, got shape {array.shape}")
    if array.size:
        least, most = array.min(), array.max()
        if least < 0 or most >= rows:
            wrong = least if least < 0 else most
            raise ValueError(f"{name} must be at least 0 and below {rows}, got {wrong}")
    return array if array.dtype in (np.int32, np.int64) else array.astype(np.int64)


def _listed_on_device(values: Any, indices: Any, rows: int) -> Any:
    """Row numbers on the device of `values`; those that are there are checked when they are used.

    Others are known to be of an array's `rows`.
    """
    of = _reals("values", values)
    if not is_cuda(indices):
        return placed(np.ascontiguousarray(_positions("indices", indices, rows)), of)
    told = header(indices)
    if device_of(told) != device_of(of):
        raise ValueError(f"values are on {device_of(of)}, indices on {device_of(told)}")
    if told.dtype not in (np.int32, np.int64) or told.ndim != 1:
        raise TypeError(
            "indices on a CUDA device must be int32 or int64 in one dimension, got "
            f"{told.dtype} of shape {told.shape}"
        )
    return indices


def _unmasked(name: str, values: Any) -> Array:
    if isinstance(values, np.ma.MaskedArray):
        raise TypeError(f"{name} must be an array without a mask, got a MaskedArray")
    return np.asarray(values)
