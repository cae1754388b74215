"""Eigenvectors of the second-moment matrices of a gradient along each axis."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from fastopt.engine.buffers import Buffers

__all__ = ["axes", "blended", "eigenbasis", "iterated", "rotated"]

Array = np.ndarray[Any, Any]


def axes(shape: tuple[int, ...], largest: int, merges: bool) -> tuple[int, ...]:
    """Return the axis lengths of a gradient, merging axes while their product <= `largest`.

    Examples
    --------
    >>> from fastopt.engine.eigenbases import axes
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


def blended(factor: Array, gradient: Array, axis: int, share: float, out: Array) -> None:
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
    if factor.dtype != np.float64:
        try:
            return _descending(factor)
        except np.linalg.LinAlgError:
            pass
    return _descending(factor.astype(np.float64)).astype(factor.dtype)


def _descending(factor: Array) -> Array:
    vectors = np.linalg.eigh(factor)[1]
    if not np.isfinite(vectors).all():
        raise np.linalg.LinAlgError("eigenvectors are not finite")
    return np.ascontiguousarray(vectors[:, ::-1])


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
