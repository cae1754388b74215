"""Eigenvectors of the second-moment matrices of a gradient along each axis.

Tests: ``tests/optimizer/test_soap.py``.
"""

import math
from collections.abc import Sequence

import numpy as np

from fastopt._engine.buffers import Buffers
from fastopt._engine.validate import Array


def axes(shape: tuple[int, ...], largest: int, merges: bool) -> tuple[int, ...]:
    """Return the axis lengths of a gradient, merging axes while their product <= `largest`.

    Examples
    --------
    >>> from fastopt._engine.eigenbases import axes
    >>> axes((8, 4, 3, 3), 16, True), axes((8, 4, 3, 3), 16, False)
    ((8, 12, 3), (8, 4, 3, 3))
    """
    if not merges:
        return shape
    merged, size = [], 1
    for length in shape:
        if size * length <= largest:
            size *= length
        elif size > 1:
            merged.append(size)
            size = length
        else:
            merged.append(length)
    return (*merged, size) if size > 1 or not merged else tuple(merged)


def by_axis(lengths: Sequence[int], arrays: Sequence[Array], largest: int) -> list[Array | None]:
    """Return an array for each axis of at most `largest`, and None for the others."""
    rest = iter(arrays)
    return [next(rest) if length <= largest else None for length in lengths]


def averaged(
    factors: Sequence[Array | None],
    gradient: Array,
    share: float,
    buffers: Buffers,
    whiteners: Sequence[Array | None] | None = None,
) -> list[Array | None]:
    """Return the moving averages of the gradient's products with itself along each axis.

    Parameters
    ----------
    factors : sequence of numpy.ndarray or None
        The averages before, which do not change.
    gradient : numpy.ndarray
        Array with one axis for each factor.
    share : float
        Weight of the gradient.
    buffers : Buffers
        Memory of the result.
    whiteners : sequence of numpy.ndarray or None, optional
        Matrix W for each axis, or None: the gradient is multiplied by W along all axes but that of
        the average, and the products are means over these axes instead of sums. With
        :math:`W W^T` the inverse of the factor, the averages minimize a Kullback-Leibler
        divergence. Default: gradients as they are.
    """
    found: list[Array | None] = []
    for axis, factor in enumerate(factors):
        out = None
        if factor is not None:
            out = buffers(f"factor {axis}", factor.shape, factor.dtype)
            own = gradient if whiteners is None else _whitened(gradient, axis, whiteners)
            _blend(factor, own, axis, share, out)
        found.append(out)
    return found


def first_whiteners(factors: Sequence[Array | None], gradient: Array) -> list[Array | None]:
    """Return the whiteners of a gradient before the factors are known: multiples of the identity.

    They are those of factors of equal scale for a gradient whose elements are independent, so that
    no axis depends on the scale of the gradient in another way than the rest.
    """
    count = sum(factor is not None for factor in factors)
    square = np.square(gradient, dtype=np.float64).sum() / max(gradient.size, 1)
    scale = square ** (-0.5 / count) if count and square != 0 else 1.0
    return [
        None if each is None else np.eye(len(each), dtype=each.dtype) * each.dtype.type(scale)
        for each in factors
    ]


def _whitened(gradient: Array, axis: int, whiteners: Sequence[Array | None]) -> Array:
    """Return the gradient whitened along all axes but one, over the root of their common length."""
    size = gradient.size // gradient.shape[axis] if gradient.size else 1
    for other, matrix in enumerate(whiteners):
        if matrix is not None and other != axis:
            gradient = np.moveaxis(np.moveaxis(gradient, other, -1) @ matrix, -1, other)
    return np.asarray(gradient * gradient.dtype.type(size**-0.5))


def _blend(factor: Array, gradient: Array, axis: int, share: float, out: Array) -> None:
    """Write ``(1 - share) * factor + share * G @ G.T``, with G the gradient unfolded along `axis`.

    It is the moving average of the gradient's second moments along that axis.
    """
    rows = gradient.shape[axis]
    flat = np.moveaxis(gradient, axis, 0).reshape(rows, gradient.size // rows if rows else 0)
    np.matmul(flat, flat.T, out=out)
    out -= factor
    out *= out.dtype.type(share)
    out += factor


def eigenbasis(factor: Array) -> Array:
    """Return the eigenvectors of a symmetric matrix as columns, by descending eigenvalue.

    If LAPACK fails in float32, float64 is used. A non-finite matrix gives NaN.

    Raises
    ------
    numpy.linalg.LinAlgError
        LAPACK fails in float64.
    """
    if not np.isfinite(factor).all():
        return np.full_like(factor, np.nan)
    return np.ascontiguousarray(_decomposed(factor)[1][:, ::-1]).astype(factor.dtype, copy=False)


def inverse_root(factor: Array, root: int, floor: float) -> Array:
    """Return the inverse p-th root of a symmetric matrix with nonnegative eigenvalues.

    If LAPACK fails in float32, float64 is used. A non-finite matrix gives NaN.

    Parameters
    ----------
    factor : numpy.ndarray
        The matrix.
    root : int
        p.
    floor : float
        Number that is added to the eigenvalues, after the smallest one if that is negative.

    Raises
    ------
    numpy.linalg.LinAlgError
        LAPACK fails in float64.

    Examples
    --------
    >>> import numpy as np
    >>> from fastopt._engine.eigenbases import inverse_root
    >>> inverse_root(np.diag([16.0, 81.0]), 4, 0.0).round(4) + 0
    array([[0.5   , 0.    ],
           [0.    , 0.3333]])
    """
    if not np.isfinite(factor).all():
        return np.full_like(factor, np.nan)
    values, vectors = _decomposed(factor)
    values = values.astype(np.float64)
    values = values - min(values.min(initial=0.0), 0.0) + floor
    found: Array = (vectors * values ** (-1 / root)) @ vectors.T
    return found.astype(factor.dtype)


def _decomposed(factor: Array) -> tuple[Array, Array]:
    """Return eigenvalues in ascending order and eigenvectors, in float64 if float32 fails."""
    try:
        values, vectors = np.linalg.eigh(factor)
        if np.isfinite(vectors).all():
            return values, vectors
    except np.linalg.LinAlgError:
        if factor.dtype == np.float64:
            raise
    if factor.dtype == np.float64:
        raise np.linalg.LinAlgError("eigenvectors are not finite")
    return _decomposed(factor.astype(np.float64))


def iterated(factor: Array, basis: Array) -> tuple[Array, Array]:
    """Do one power iteration; return the next basis and the permutation of the columns of `basis`.

    Columns are sorted by descending estimated eigenvalue. If float32 overflows or LAPACK fails in
    it, float64 is used.

    Raises
    ------
    numpy.linalg.LinAlgError
        LAPACK fails in float64.
    """
    with np.errstate(all="ignore"):
        products = factor @ basis
        if factor.dtype != np.float64 and not np.isfinite(products).all():
            factor, basis = factor.astype(np.float64), basis.astype(np.float64)
            products = factor @ basis
        estimates = np.einsum("ij,ij->j", basis, products)
        order = np.argsort(-estimates, kind="stable")
        products = products[:, order]
        try:
            return np.linalg.qr(products)[0], order
        except np.linalg.LinAlgError:
            if products.dtype == np.float64:
                raise
            return np.linalg.qr(products.astype(np.float64))[0], order


def rotated(
    array: Array, bases: Sequence[Array | None], back: bool, buffers: Buffers, out: Array
) -> None:
    """Rotate an array into the bases of its axes, or back, and write the result to `out`.

    Parameters
    ----------
    array : numpy.ndarray
        Array with one axis for each of `bases`.
    bases : sequence of numpy.ndarray or None
        Matrix with orthonormal columns for each axis; None leaves the axis as it is.
    back : bool
        Whether to rotate back: `array` holds coordinates in the bases.
    buffers : Buffers
        Scratch memory.
    out : numpy.ndarray
        Array of the same shape, which may be `array` if there are two bases or more.
    """
    last = len(bases) - 1
    for axis, basis in enumerate(bases):
        rows, rest = array.shape[0], array.shape[1:]
        flat = array.reshape(rows, math.prod(rest)).T
        target = buffers(f"rotated {axis % 2}", flat.shape, array.dtype)
        if basis is None:
            target[...] = flat
        else:
            np.matmul(flat, basis.T if back else basis, out=target)
        array = target.reshape(*rest, rows)
        if axis == last:
            out[...] = array.reshape(out.shape)
