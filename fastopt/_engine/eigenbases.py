"""Eigenvectors of the second-moment matrices of a gradient along each axis.

Tests: ``tests/optimizer/test_soap.py``.
"""

import math
from collections.abc import Sequence

import numpy as np

from fastopt._engine.buffers import Buffers
from fastopt._engine.validate import Array

ByAxis = dict[int, Array]
"""Matrices of the axes of a gradient that have one."""


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


def by_axis(lengths: Sequence[int], pairs: Sequence[Array], largest: int) -> list[ByAxis]:
    """Return the first and the second matrix of each axis of at most `largest`, given pairs."""
    axes = [axis for axis, length in enumerate(lengths) if length <= largest]
    return [dict(zip(axes, pairs[k::2], strict=True)) for k in (0, 1)]


def averaged(
    factors: ByAxis,
    gradient: Array,
    share: float,
    buffers: Buffers,
    whiteners: ByAxis | None = None,
) -> ByAxis:
    """Return the moving averages of the gradient's products with itself along each axis.

    Parameters
    ----------
    factors : dict of int to numpy.ndarray
        The averages before, which do not change.
    gradient : numpy.ndarray
        The gradient.
    share : float
        Weight of the gradient.
    buffers : Buffers
        Memory of the result.
    whiteners : dict of int to numpy.ndarray, optional
        Matrix W of each of these axes: the gradient is multiplied by W along all axes but that of
        the average, and the products are means over these axes instead of sums. With
        :math:`W W^T` the inverse of the factor, the averages minimize a Kullback-Leibler
        divergence. Default: gradients as they are.
    """
    blended = {}
    for axis, factor in factors.items():
        blended[axis] = buffers(f"factor {axis}", factor.shape, factor.dtype)
        whitened = gradient if whiteners is None else _whitened(gradient, axis, whiteners)
        _blend(factor, whitened, axis, share, blended[axis])
    return blended


def first_whiteners(factors: ByAxis, gradient: Array) -> ByAxis:
    """Return the whiteners of a gradient before the factors are known: multiples of the identity.

    They are those of factors of equal scale for a gradient whose elements are independent, so that
    no axis depends on the scale of the gradient in another way than the rest.
    """
    square = np.square(gradient, dtype=np.float64).sum() / max(gradient.size, 1)
    scale = square ** (-0.5 / len(factors)) if factors and square != 0 else 1.0
    return {
        axis: np.eye(len(factor), dtype=factor.dtype) * factor.dtype.type(scale)
        for axis, factor in factors.items()
    }


def _whitened(gradient: Array, axis: int, whiteners: ByAxis) -> Array:
    """Return the gradient whitened along all axes but one, over the root of their common length."""
    size = gradient.size // gradient.shape[axis] if gradient.size else 1
    for other, matrix in whiteners.items():
        if other != axis:
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
    power: Array = (vectors * values ** (-1 / root)) @ vectors.T
    return power.astype(factor.dtype)


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


def rotated(array: Array, bases: ByAxis, back: bool, buffers: Buffers, out: Array) -> None:
    """Rotate an array into the bases of its axes, or back, and write the result to `out`.

    Parameters
    ----------
    array : numpy.ndarray
        The array.
    bases : dict of int to numpy.ndarray
        Matrix with orthonormal columns of each axis; other axes are left as they are.
    back : bool
        Whether to rotate back: `array` holds coordinates in the bases.
    buffers : Buffers
        Scratch memory.
    out : numpy.ndarray
        Array of the same shape, which may be `array` if it has two axes or more.
    """
    last = array.ndim - 1
    for axis in range(array.ndim):
        basis = bases.get(axis)
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
