"""Row-sparse arrays, such as gradients of large tables with few non-zero rows."""

from numbers import Integral
from typing import Any, Self, TypeGuard

import numpy as np
from numpy.typing import ArrayLike, DTypeLike, NDArray

from fastopt._kernels.devices import device_of, header, is_cuda
from fastopt.arguments import brief, constructor, count, is_masked

__all__ = ["RowSparse", "as_row_sparse", "is_row_sparse", "row_sparse_array"]

Array = NDArray[Any]
HALVES = ("float16", "bfloat16")
COMPLEX = ("complex64", "complex128")
REALS = (*HALVES, "float32", "float64")


class RowSparse:
    """A row-sparse array: the values and indices of some rows; all other rows are zero.

    Row ``indices[j]`` of the array is ``values[j]``. Indices may be in any order. The rows of a
    repeated index are summed.

    Parameters
    ----------
    values : array_like
        The indexed rows, of shape ``(*indices.shape, *shape[1:])``: float16, bfloat16, float32,
        float64, complex64 or complex128. Arrays are kept without a copy, whatever their layout,
        unless they have another byte order. They may be on a CUDA device, with indices there or on
        the host; methods that compute with the values then raise TypeError.
    indices : array_like
        The row indices, from 0 to ``shape[0] - 1``. int32 and int64 arrays are kept without a copy;
        other integers are converted to int64. They may have any shape on the host, such as
        ``(batch, length)``; the attributes `values` and `indices` are flattened to one axis of
        rows.
    shape : int or tuple of int
        Shape of the whole array, with at least one dimension.

    Attributes
    ----------
    values, indices : numpy.ndarray
        The indexed rows and their indices.
    shape, dtype, ndim
        Shape, dtype and number of dimensions of the whole array, as in NumPy.

    Raises
    ------
    TypeError, ValueError
        An argument has the wrong type, the shapes do not match, or an index is out of range.

    Examples
    --------
    >>> import numpy as np
    >>> from fastopt.sparse import RowSparse
    >>> grad = RowSparse(np.array([[1.0, 2.0], [3.0, 4.0]]), np.array([3, 0]), (4, 2))
    >>> grad
    <RowSparse of shape (4, 2), float64, 2 indexed rows>
    >>> grad.to_dense()
    array([[3., 4.],
           [0., 0.],
           [0., 0.],
           [1., 2.]])
    """

    __array_ufunc__ = None  # keeps NumPy operators from treating the object as a scalar

    def __init__(self, values: ArrayLike, indices: ArrayLike, shape: int | tuple[int, ...]) -> None:
        self.shape = _shape(shape)
        self.values: Any
        self.indices: Any
        if is_cuda(values):
            self.values, self.indices = values, _device_indices(values, indices, self.shape[0])
        else:
            _check_order(values, indices)
            self.values = _reals("values", values)
            self.indices = _positions("indices", indices, self.shape[0])
        listed, actual = header(self.indices).shape, header(self.values).shape
        expected = (*listed, *self.shape[1:])
        if actual != expected:
            rows = f"{listed[0]} indices" if len(listed) == 1 else f"indices of shape {listed}"
            raise ValueError(
                f"values must have shape {expected} for {rows} into shape {self.shape}, "
                f"got {actual}"
            )
        if len(listed) != 1:
            self.indices = self.indices.reshape(-1)
            self.values = self.values.reshape(self.indices.size, *self.shape[1:])

    @property
    def dtype(self) -> np.dtype[Any]:
        """Dtype of the values."""
        dtype: np.dtype[Any] = header(self.values).dtype
        return dtype

    @property
    def ndim(self) -> int:
        """Number of dimensions of the whole array."""
        return len(self.shape)

    @constructor
    def from_dense(cls, dense: ArrayLike) -> Self:
        """Return the row-sparse array of the non-zero rows of a dense array.

        Parameters
        ----------
        dense : array_like
            Floating-point or complex numbers, with at least one dimension.

        Raises
        ------
        TypeError, ValueError
            `dense` has another dtype or no dimensions.

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
        """Return the dense array; rows of a repeated index are summed like in :meth:`coalesce`."""
        summed = self.coalesce()
        dense = np.zeros(self.shape, self.dtype)
        dense[summed.indices] = summed.values
        return dense

    def coalesce(self) -> Self:
        """Return an equal array with sorted, unique indices.

        Rows of a repeated index are added in their order: float16 and bfloat16 values in float32
        with one rounding at the end, other values in their own dtype. If the indices are already
        sorted and unique, the array itself is returned.

        Examples
        --------
        >>> import numpy as np
        >>> from fastopt.sparse import RowSparse
        >>> grad = RowSparse(np.array([1.0, 2.0, 4.0]), np.array([7, 3, 7]), 9).coalesce()
        >>> grad.indices, grad.values
        (array([3, 7]), array([2., 5.]))
        """
        self._require_host()
        if (self.indices[1:] > self.indices[:-1]).all():
            return self
        order = np.argsort(self.indices, kind="stable")
        ordered = self.indices[order]
        first = np.append(True, ordered[1:] != ordered[:-1])
        sums = self.values[order[first]].astype(_wide(self.dtype), order="C")
        again = self.values[order[~first]].astype(sums.dtype, copy=False)
        # np.add.at is several times faster on elements of flat arrays than on rows.
        width = sums[0].size
        target = (np.cumsum(first) - 1)[~first, np.newaxis] * width + np.arange(width)
        np.add.at(sums.reshape(-1), target.reshape(-1), again.reshape(-1))
        return type(self)(sums.astype(self.dtype, copy=False), ordered[first], self.shape)

    def retain(self, row_ids: ArrayLike) -> Self:
        """Return the rows whose index is in `row_ids`, in their present order.

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
        self._require_host()
        kept = np.isin(self.indices, _positions("row_ids", row_ids, self.shape[0]))
        return type(self)(self.values[kept], self.indices[kept], self.shape)

    def astype(self, dtype: DTypeLike) -> Self:
        """Return a copy with values of another dtype.

        Parameters
        ----------
        dtype : dtype_like
            One of the dtypes of values.
        """
        self._require_host()
        return type(self)(self.values.astype(dtype), self.indices.copy(), self.shape)

    def __array__(self, dtype: DTypeLike | None = None, copy: bool | None = None) -> Array:
        raise TypeError("a RowSparse is not converted to an array implicitly; call to_dense()")

    def __add__(self, other: object) -> Self:
        if not isinstance(other, RowSparse):
            return NotImplemented
        if other.dtype != self.dtype:
            raise TypeError(f"arrays must have the same dtype, got {self.dtype} and {other.dtype}")
        if other.shape != self.shape:
            raise ValueError(f"arrays must have the same shape, got {self.shape} and {other.shape}")
        self._require_host()
        other._require_host()
        values = np.concatenate([self.values, other.values])
        indices = np.concatenate([self.indices, other.indices])
        return type(self)(values, indices, self.shape).coalesce()

    def _require_host(self) -> None:
        if is_cuda(self.values):
            raise TypeError(f"arrays must be on the host, got {self!r} on a CUDA device")

    def __repr__(self) -> str:
        length = len(header(self.indices))
        rows = f"{length} indexed row{'s' * (length != 1)}"
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
        `pair` is not a pair, or :class:`RowSparse` raises.

    Examples
    --------
    >>> from fastopt.sparse import row_sparse_array
    >>> row_sparse_array(([[0.5, 0.5]], [2]), shape=(1000, 2))
    <RowSparse of shape (1000, 2), float64, 1 indexed row>
    """
    if not _is_pair(pair):
        raise TypeError(f"a row-sparse array must be a pair (values, indices), got {pair!r}")
    return RowSparse(*pair, shape)


def is_row_sparse(grad: object) -> bool:
    """Whether `grad` is a gradient in a form that :func:`as_row_sparse` accepts.

    Parameters
    ----------
    grad : object
        A gradient: a RowSparse, a pair of arrays (the second one may be integers, or a list of
        them) or a sparse array is row-sparse, a single array is dense.

    Examples
    --------
    >>> import numpy as np
    >>> from fastopt.sparse import is_row_sparse
    >>> is_row_sparse((np.ones((1, 3)), np.array([7]))), is_row_sparse(np.ones((8, 3)))
    (True, False)
    """
    if _is_pair(grad):
        values, indices = grad
        if isinstance(indices, (list, Integral)):
            listed = indices if isinstance(indices, list) else [indices]
            return isinstance(values, np.ndarray) and all(isinstance(i, Integral) for i in listed)
        return all(isinstance(part, np.ndarray) or is_cuda(part) for part in grad)
    is_scipy = getattr(grad, "format", None) in ("csr", "coo") and hasattr(grad, "tocsr")
    return is_scipy or isinstance(grad, RowSparse)


def as_row_sparse(grad: Any, shape: int | tuple[int, ...]) -> RowSparse:
    """Convert a gradient in any row-sparse form to a :class:`RowSparse`.

    Parameters
    ----------
    grad : RowSparse, pair (values, indices), or scipy.sparse array or matrix
        A scipy.sparse array must be in CSR or COO format. Its rows with stored entries become the
        indexed rows, sorted; duplicate entries are summed in order, like in
        :meth:`RowSparse.coalesce`.
    shape : int or tuple of int
        Shape that the whole gradient must have.

    Raises
    ------
    TypeError, ValueError
        `grad` has another type or shape, or :class:`RowSparse` raises.

    Examples
    --------
    >>> import numpy as np
    >>> from fastopt.sparse import as_row_sparse
    >>> as_row_sparse((np.ones((1, 3)), np.array([7])), (100, 3))
    <RowSparse of shape (100, 3), float64, 1 indexed row>
    """
    if isinstance(grad, RowSparse) and grad.shape == shape:
        if grad.values is None or grad.indices is None:
            raise TypeError("the values and indices of a RowSparse must be arrays, got None")
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
    return RowSparse(*_listed_rows(grad, _wide(_reals("gradient", grad.data).dtype)), grad.shape)


def _is_pair(grad: object) -> TypeGuard[tuple[Any, Any]]:
    return isinstance(grad, (tuple, list)) and len(grad) == 2


def _wide(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """Return the dtype in which values of `dtype` are summed."""
    return np.dtype(np.float32) if dtype.name in HALVES else dtype


def _shape(shape: object) -> tuple[int, ...]:
    if not isinstance(shape, (tuple, list, Integral)):
        raise TypeError(f"shape must be an integer or a tuple of integers, got {brief(shape)}")
    lengths = (shape,) if isinstance(shape, Integral) else shape
    if not lengths:
        raise ValueError("shape must have one dimension or more, got ()")
    return tuple(count("shape", length, least=0) for length in lengths)


def _check_order(values: object, indices: object) -> None:
    """Raise TypeError if indices and values are swapped."""
    first, second = (getattr(array, "dtype", None) for array in (values, indices))
    if first is not None and second is not None and first.kind in "iu" and second.kind in "fc":
        raise TypeError(
            f"a row-sparse gradient is (values, indices), in this order, got {first} values and "
            f"{second} indices"
        )


def _reals(name: str, values: object) -> Array:
    """Return floating-point `values` as an array in native byte order."""
    if values is None:
        raise TypeError(f"{name} must be an array, got None")
    array = header(values) if is_cuda(values) else unmasked(name, values)
    dtype = array.dtype  # dtype.name takes microseconds, so `char` is compared first
    if not (dtype.char in "fdFD" or dtype.name in HALVES):
        cure = ": convert with astype('float32')" if dtype.kind in "biuf" else ""
        known = (*REALS, *COMPLEX)
        raise TypeError(f"{name} must be {', '.join(known[:-1])} or {known[-1]}, got {dtype}{cure}")
    return array if dtype.isnative else array.astype(dtype.newbyteorder("="))


def _positions(name: str, values: object, rows: int) -> Array:
    """Return row indices as int32 or int64, after checking that they are in ``range(rows)``."""
    if is_cuda(values):
        raise ValueError(f"{name} are on {device_of(header(values))}, the values on the host")
    array = unmasked(name, values)
    if not (isinstance(values, np.ndarray) or array.size):
        array = array.astype(np.int64)  # an empty list becomes a float array
    if array.dtype.kind not in "iu":
        raise TypeError(f"{name} must be integers, got {array.dtype}")
    if array.size:
        _require_memory(name, array)
        least, most = array.min(), array.max()
        if least < 0 or most >= rows:
            wrong = least if least < 0 else most
            raise ValueError(f"{name} must be at least 0 and below {rows}, got {wrong}")
    return array if array.dtype in (np.int32, np.int64) else array.astype(np.int64)


def _require_memory(name: str, indices: Array) -> None:
    """Raise MemoryError unless memory can hold a copy of row indices, which every update makes.

    An array whose strides are 0 may be so long that reading it would never end.
    """
    try:
        np.empty(indices.size, np.int64)
    except (MemoryError, ValueError):
        raise MemoryError(f"{name} do not fit into memory: {indices.size} integers") from None


def _device_indices(values: object, indices: object, rows: int) -> Any:
    """Return the row indices of device `values`, on the same device or on the host.

    Indices on the device are range-checked on use.
    """
    values_header = _reals("values", values)
    if not is_cuda(indices):
        return _positions("indices", indices, rows)
    array = header(indices)
    if device_of(array) != device_of(values_header):
        raise ValueError(f"values are on {device_of(values_header)}, indices on {device_of(array)}")
    if array.dtype not in (np.int32, np.int64) or array.ndim != 1:
        raise TypeError(
            "indices on a CUDA device must be int32 or int64 in one dimension, got "
            f"{array.dtype} of shape {array.shape}"
        )
    return indices


def unmasked(name: str, values: object) -> Array:
    """Return `values` as an array; TypeError if they are masked."""
    if type(values) is np.ndarray:
        return values
    if is_masked(values):
        raise TypeError(f"{name} must be an array without a mask, got a MaskedArray")
    return np.asarray(values)


def _listed_rows(array: Any, wide: DTypeLike) -> tuple[Array, Array]:
    """Return the values and the sorted indices of the rows with stored entries.

    Duplicate entries are summed in storage order, in the dtype `wide`.
    """
    rest: list[Array]
    if len(array.shape) == 2 and array.format == "csr":
        ends, rest = array.indptr, [array.indices]
        rows = np.flatnonzero(ends[1:] != ends[:-1])  # of booleans in a tenth of the time
        if array.shape[1] == 1 and len(rows) == len(array.data):
            return array.data[:, None], rows
        position = np.repeat(np.arange(len(rows)), ends[rows + 1] - ends[rows])
    else:
        first, *rest = (array.indices,) if array.format == "csr" else array.coords
        rows, position = np.unique(first, return_inverse=True)
    values = np.zeros((len(rows), *array.shape[1:]), wide)
    target = np.ravel_multi_index((position, *rest), values.shape) if rest else position
    np.add.at(values.reshape(-1), target, array.data.astype(wide, copy=False))
    return values.astype(array.dtype, copy=False), rows
