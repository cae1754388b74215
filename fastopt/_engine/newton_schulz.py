"""Orthogonalization by Newton-Schulz iteration, using only matrix products."""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from fastopt._engine.buffers import Buffers
from fastopt._engine.validate import Array

Polynomial = tuple[float, float, float]
"""Coefficients of ``a x + b x**3 + c x**5``, applied to the singular values."""

POLAR: tuple[Polynomial, ...] = (
    (8.405177706456076, -24.850807291013737, 18.424617028583587),
    (4.07717411748317, -3.0350424167195014, 0.5722070525540578),
    (3.605791397455821, -2.699632979767103, 0.5340115004951567),
    (2.617733084509828, -1.9412888952818128, 0.4486398450192731),
    (1.944933980118409, -1.3256873940189362, 0.38264556306640507),
    (1.875, -1.25, 0.375),
)
"""Composition of optimal polynomials for singular values from 0.0025 to 1: five of them map to
[0.99, 1.01]. The last one converges to 1."""

PUBLISHED: tuple[Polynomial, ...] = (
    (8.156554524902461, -22.48329292557795, 15.878769915207462),
    (4.042929935166739, -2.808917465908714, 0.5000178451051316),
    (3.8916678022926607, -2.772484153217685, 0.5060648178503393),
    (3.285753657755655, -2.3681294933425376, 0.46449024233003106),
    (2.3465413258596377, -1.7097828382687081, 0.42323551169305323),
    (1.875, -1.25, 0.375),
)
"""Coefficients of the Polar Express paper: for singular values from 0.001 to 1, with a cushion."""

QUINTIC: tuple[Polynomial, ...] = ((3.4445, -4.7750, 2.0315),)


class Scheme(NamedTuple):
    """Polynomials, and the number that a matrix is divided by before the first one."""

    polynomials: tuple[Polynomial, ...]
    """One for each step; the last one is repeated."""
    safety: float = 1.0
    """Factor of the norm that divides the matrix.

    At the end of the range, the slope of the composition is about 1e4: it would magnify rounding.
    """
    tight: bool = False
    """Whether the norm is the Schatten 8-norm instead of the Frobenius norm."""


COEFFICIENTS: dict[str, Scheme] = {
    "polar": Scheme(POLAR, safety=1.01, tight=True),
    "polar_express": Scheme(PUBLISHED, safety=1.02),
    "quintic": Scheme(QUINTIC),
}
"""Schemes by the name that the user gives."""

GRAM_FROM = 3
"""Ratio of columns to rows from which the Gram form takes fewer operations."""

RESTART = 2
"""Steps of the Gram form before it recomputes the Gram matrix.

Rounding makes some eigenvalues of the Gram matrix slightly negative, and these grow.
"""


BATCHED = 2**14
"""Maximum elements of a matrix that is multiplied in a batch with others of its shape.

Call overhead dominates for smaller matrices; larger ones leave the cache between two products.
"""


class NewtonSchulz:
    """Orthogonalizes matrices, reusing its buffers.

    A batch of products is one call of ``numpy.matmul``, which calls the same BLAS routine for
    each matrix: the result has the same bits with and without a batch.
    """

    def __init__(self) -> None:
        self._buffers = Buffers()

    def __call__(
        self,
        matrix: Array,
        out: Array,
        coefficients: str | Polynomial,
        steps: int,
        eps: float,
        scale: float = 1.0,
        gram: bool | None = None,
    ) -> None:
        """Write the orthogonalized matrix times `scale`.

        Parameters
        ----------
        matrix : numpy.ndarray
            Matrix, or batch of matrices in three dimensions; float32 or float64.
        out : numpy.ndarray
            Array of the same shape and dtype, which may be `matrix`.
        coefficients : str or tuple of float
            Key of :data:`COEFFICIENTS`, or one polynomial.
        steps : int
            Number of steps.
        eps : float
            Lower bound of the Frobenius norm that `matrix` is divided by.
        scale : float
            Factor of the result.
        gram : bool, optional
            Whether to iterate on the Gram matrix. Default: if that takes fewer operations.
        """
        wide = matrix.shape[-2] <= matrix.shape[-1]
        if isinstance(coefficients, str):
            polynomials, safety, tight = COEFFICIENTS[coefficients]
        else:
            polynomials, safety, tight = Scheme((coefficients,))
        chosen = [*polynomials[:steps], *[polynomials[-1]] * (steps - len(polynomials))]
        with np.errstate(all="ignore"):  # NaN and infinity propagate without a warning
            for part, target in zip(_stacks(matrix), _stacks(out), strict=True):
                source = part if wide else part.swapaxes(1, 2)
                rows, columns = source.shape[1:]
                x = self._buffers("x", source.shape, matrix.dtype)
                for one, scaled in zip(source, x, strict=True):
                    squares = float(np.einsum("ij,ij->", one, one, dtype=np.float64))
                    norm = math.sqrt(squares)
                    divisor = norm if norm > eps or norm != norm else eps
                    np.divide(one, matrix.dtype.type(divisor * safety), out=scaled)
                if gram if gram is not None else columns >= GRAM_FROM * rows:
                    x = self._gram(x, chosen, tight)
                else:
                    x = self._plain(x, chosen, tight)
                np.multiply(x if wide else x.swapaxes(1, 2), matrix.dtype.type(scale), out=target)

    def reserve(self, matrix: Array) -> None:
        """Allocate the buffers for matrices of this shape, so that later calls need not."""
        count = len(_stacks(matrix)[0])
        rows, columns = sorted(matrix.shape[-2:])
        for name, size in {"x": columns, "y": columns, **dict.fromkeys("gpsq", rows)}.items():
            self._buffers(name, (count, rows, size), matrix.dtype)

    def _plain(self, x: Array, polynomials: Sequence[Polynomial], tight: bool) -> Array:
        """Iterate on the matrices."""
        count, rows, _ = x.shape
        other = self._buffers("y", x.shape, x.dtype)
        gram, p, scratch = (self._buffers(name, (count, rows, rows), x.dtype) for name in "gps")
        for step, polynomial in enumerate(polynomials):
            np.matmul(x, x.swapaxes(1, 2), out=gram)
            _even_part(gram, polynomial, p, scratch, tight and step == 0)
            np.matmul(p, x, out=other)
            x, other = other, x
        return x

    def _gram(self, x: Array, polynomials: Sequence[Polynomial], tight: bool) -> Array:
        """Iterate on the Gram matrix: all factors are polynomials of one symmetric matrix."""
        count, rows, _ = x.shape
        other = self._buffers("y", x.shape, x.dtype)
        gram, p, scratch, q = (self._buffers(name, (count, rows, rows), x.dtype) for name in "gpsq")
        last = len(polynomials) - 1
        for step, polynomial in enumerate(polynomials):
            starts = step in (0, RESTART)
            if starts:
                if step:
                    np.matmul(q, x, out=other)
                    x, other = other, x
                np.matmul(x, x.swapaxes(1, 2), out=gram)
            _even_part(gram, polynomial, p, scratch, tight and step == 0)
            if starts:
                q[...] = p
            else:
                np.matmul(p, q, out=scratch)
                q, scratch = scratch, q
            if step + 1 not in (RESTART, last + 1):
                np.matmul(p, p.swapaxes(1, 2), out=scratch)
                np.matmul(gram, scratch, out=p)
                gram, p = p, gram
        np.matmul(q, x, out=other)
        return other


def _stacks(matrix: Array) -> Sequence[Array]:
    """Split into three-dimensional arrays, each one batch of matrices."""
    if matrix.ndim == 2:
        return [matrix[np.newaxis]]
    together = math.prod(matrix.shape[1:]) <= BATCHED or len(matrix) < 2
    return [matrix] if together else [matrix[k : k + 1] for k in range(len(matrix))]


def _even_part(
    gram: Array, polynomial: Polynomial, out: Array, scratch: Array, tight: bool = False
) -> None:
    """Write ``a I + b G + c G**2`` for symmetric matrices G.

    With `tight`, the polynomial is applied to singular values divided by :func:`_bounds`.
    """
    np.matmul(gram, gram.swapaxes(1, 2), out=out)
    bounds = _bounds(gram, out) if tight else np.ones((1, 1, 1))
    a, b, c = (
        (factor / bounds**power).astype(gram.dtype)
        for factor, power in zip(polynomial, (1, 3, 5), strict=True)
    )
    out *= c
    np.multiply(gram, b, out=scratch)
    out += scratch
    count, rows, _ = out.shape
    out.reshape(count, rows * rows)[:, :: rows + 1] += a[:, 0]


def _bounds(gram: Array, square: Array) -> Array:
    """Return upper bounds of the largest singular values, relative to the Frobenius norm.

    The bound is the Schatten 8-norm: the eighth root of the sum of their eighth powers, which is
    the squared Frobenius norm of `square`.

    Parameters
    ----------
    gram : numpy.ndarray
        Gram matrices of the matrices.
    square : numpy.ndarray
        Squares of `gram`.
    """
    norms = np.trace(gram, axis1=1, axis2=2, dtype=np.float64)
    eighths = [np.einsum("ij,ij->", product, product, dtype=np.float64) for product in square]
    bounds = np.array(eighths) ** 0.125 / np.sqrt(norms)
    factors: Array = np.where(norms > 0, bounds, 1.0 + norms)  # 1 for zeros, NaN stays NaN
    return factors.reshape(-1, 1, 1)
