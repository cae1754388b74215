"""Kron: PSGD with triangular preconditioners for each axis of a weight."""

import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np

from fastopt.arguments import Choice, Integer, OrNone, Real, arg
from fastopt.optimizer.matrices import MatrixOptimizer, Shape
from fastopt.optimizer.optimizer import Array, register

LARGEST = 1.1
"""Largest root mean square of a step, in learning rates."""

BALANCED = 100
"""Updates of the preconditioners from one balancing of their norms to the next."""

TINY = 1e-37


@register
class Kron(MatrixOptimizer):
    r"""Kron: PSGD, preconditioned gradient descent with a triangular factor for each axis.

    .. math::
        h &= \mathrm{clip}(r g), \qquad
        m \leftarrow \mu m + (1 - \mu) h, \qquad \hat m = m / (1 - \mu^t) \\
        A &= Q_1 \hat m Q_2^T, \qquad
        B = Q_1^{-T} v Q_2^{-1}, \qquad v \sim \mathcal{N}(0, 1) \\
        Q_1 &\leftarrow Q_1 - \alpha \, \mathrm{triu}\!\left( \frac{A A^T - B B^T}
            {\|A A^T + B B^T\|_2} \right) Q_1, \qquad Q_2 \text{ likewise, with } A^T A, B^T B \\
        p &= Q_1^T Q_1 \hat m Q_2^T Q_2, \qquad
        w \leftarrow (1 - \eta \lambda) w - \eta \min\!\left(1, \frac{1.1}{\mathrm{rms}(p)}
            \right) p

    with the spectral norm estimated from below. The preconditioners start at 1 and are fitted to
    whiten the gradient, without roots or decompositions. They are updated with a probability that
    is 1 in the first 500 updates and then falls to 0.03: every
    :math:`\lceil 1 / \mathrm{probability} \rceil` updates. Weights may have any number of axes,
    each with its own factor, which is diagonal for vectors, for axes of length 1 or above
    `max_precond_dim`, and for those of `diagonal`.

    Source: Li, "Preconditioned Stochastic Gradient Descent", arXiv:1512.04202, in the form of the
    class Kron of the package pytorch_optimizer, with noise of another generator; it balances the
    norms of the factors at random, here every 100 updates of them, which changes no product.
    All weights decay, as in timm; in that package, and in kron-torch, only those with two or more
    dimensions do. A group excludes the others: ``groups={"bias$|norm": {"wd": 0.0}}``.

    Products and solutions use NumPy in float32, or in float64 for float64 weights. Their last bits
    may depend on the number of threads of NumPy's BLAS. A non-finite gradient makes the whole
    weight NaN.

    State: the tuple of m, in the weight's shape, an array of shape (2,) with the number of updates
    since the last one of the preconditioners and the number of these, and the factor of each axis:
    a matrix, or a vector if it is diagonal.

    Parameters
    ----------
    learning_rate : float or callable, optional
        Default 0.001; None uses the scheduler's ``base_lr``.
    momentum : float
        :math:`\mu`, at least 0 and below 1. Default 0.9.
    precondition_lr : float
        :math:`\alpha`, at least 0. Default 0.1.
    precondition_probability : float, optional
        Constant probability of an update of the preconditioners, above 0 and at most 1. Default
        None: as above.
    max_precond_dim : int
        Maximum length of an axis with a triangular factor, at least 1. Default 8192.
    diagonal : str, optional
        Axes with a diagonal factor, to save memory: 'one_diag' the longest, 'smart_one_diag' the
        longest if it is longer than the others, 'all_diag' all. Default None.
    fallback : Optimizer or str, optional
        Optimizer of the weights in `fallback_for`, see :class:`~fastopt.optimizer.Muon`. Default
        None.
    fallback_for : str or sequence of str, optional
        Regular expressions for the names of weights that the fallback updates.
    cautious, cautious_decay : bool
        See :class:`~fastopt.optimizer.AdamW`. Default False.
    **common
        Arguments of :class:`~fastopt.optimizer.Optimizer`; `state_dtype` must be None.

    Raises
    ------
    ValueError, TypeError
        Like :class:`~fastopt.optimizer.Muon`.

    Examples
    --------
    >>> import numpy as np
    >>> import fastopt
    >>> updater = fastopt.Updater(fastopt.Kron(lr=0.1))
    >>> weight = np.zeros((2, 2))
    >>> updater.step({"w": np.full((2, 2), 1e6)}, {"w": weight})
    >>> np.sqrt(np.mean(weight**2)).round(2)
    np.float64(0.11)
    >>> [array.shape for array in updater.states["w"]]
    [(2, 2), (2,), (2, 2), (2, 2)]
    """

    takes_vectors = True
    momentum: float = arg(default=0.9, check=Real(least=0, below=1))
    precondition_lr: float = arg(default=0.1, check=Real(least=0))
    precondition_probability: float | None = arg(
        default=None, check=OrNone(Real(least=1e-06, most=1))
    )
    max_precond_dim: int = arg(default=8192, check=Integer(least=1))
    diagonal: Literal["one_diag", "smart_one_diag", "all_diag"] | None = arg(
        default=None, check=OrNone(Choice("one_diag", "smart_one_diag", "all_diag"))
    )

    def triangular(self, shape: Shape) -> list[bool]:
        """Return whether the factor of each axis is a triangular matrix; a number has one axis."""
        if len(shape) < 2 or self.diagonal == "all_diag":
            return [False] * max(len(shape), 1)
        is_triangular = [1 < length <= self.max_precond_dim for length in shape]
        alone = shape.count(max(shape)) == 1
        if self.diagonal == "one_diag" or (self.diagonal == "smart_one_diag" and alone):
            is_triangular[int(np.argsort(shape)[-1])] = False
        return is_triangular

    def slots(self, shape: Shape) -> Mapping[str, Shape]:
        """See :meth:`MatrixOptimizer.slots`."""
        shapes: dict[str, Shape] = {"mom": shape, "counts": (2,)}
        for axis, (length, full) in enumerate(
            zip(shape or (1,), self.triangular(shape), strict=True)
        ):
            shapes[f"factor {axis}"] = (length, length) if full else (length,)
        return shapes

    def noise(self, t: int, like: Array) -> Array:
        """Return normal random numbers that depend on the seed, the update and the shape alone."""
        source = np.random.Generator(np.random.Philox(key=[self.seed, t]))
        return np.asarray(source.standard_normal(like.shape), like.dtype)

    def probability(self, t: int) -> float:
        """Return the probability of an update of the preconditioners in update `t`."""
        if self.precondition_probability is not None:
            return self.precondition_probability
        return min(max(math.exp(-0.001 * (t - 1 - 500)), 0.03), 1.0)

    def direction(self, t: int, grad: Array, state: dict[str, Array]) -> Array:
        """See :meth:`MatrixOptimizer.direction`."""
        if not grad.size:
            return grad
        real = grad.dtype.type
        factors = [array for name, array in state.items() if name.startswith("factor")]
        since, renewed = state["counts"]
        if not renewed:
            factors = [
                np.eye(len(q), dtype=real) if q.ndim > 1 else np.ones_like(q) for q in factors
            ]
        with np.errstate(all="ignore"):  # NaN and infinity propagate without a warning
            mom = state["mom"] + real(1 - self.momentum) * (grad - state["mom"])
            ahead = np.atleast_1d(mom / real(1 - self.momentum**t))
            since += 1
            if since >= 1 / self.probability(t):
                since, renewed = 0, renewed + 1
                if len(factors) > 1 and renewed % BALANCED == 0:
                    factors = balanced(factors)
                noise = np.atleast_1d(self.noise(t, grad))
                factors = renewal(factors, ahead, noise, real(self.precondition_lr))
            for axis, factor in enumerate(factors):
                ahead = along(ahead, axis, factor)
                ahead = along(ahead, axis, factor.T)
            rms = math.sqrt(np.mean(np.square(ahead, dtype=np.float64)))
            ahead = ahead * real(min(1.0, LARGEST / (rms + 1e-6)) if rms == rms else rms)
        state.update({f"factor {axis}": factor for axis, factor in enumerate(factors)})
        state.update(mom=mom, counts=np.array([since, renewed], real))
        return np.asarray(ahead.reshape(grad.shape))


def along(array: Array, axis: int, factor: Array, solves: bool = False) -> Array:
    """Multiply an axis by a factor, a matrix or the vector of a diagonal; or solve with it."""
    moved = np.moveaxis(array, axis, 0)
    flat = moved.reshape(len(moved), moved.size // len(moved))
    if factor.ndim < 2:
        flat = flat / factor[:, None] if solves else flat * factor[:, None]
    else:
        flat = np.linalg.solve(factor, flat) if solves else factor @ flat
    return np.moveaxis(flat.reshape(moved.shape), 0, axis)


def renewal(
    factors: Sequence[Array], grad: Array, noise: Array, rate: np.floating[Any]
) -> list[Array]:
    """Return the next factors, given the gradient to whiten and random numbers."""
    for axis, factor in enumerate(factors):
        grad = along(grad, axis, factor)
        noise = along(noise, axis, factor.T, solves=True)
    return [
        _renewed(factor, _unfolded(grad, axis), _unfolded(noise, axis), rate)
        for axis, factor in enumerate(factors)
    ]


def _unfolded(array: Array, axis: int) -> Array:
    moved = np.moveaxis(array, axis, 0)
    return moved.reshape(len(moved), moved.size // len(moved))


def _renewed(factor: Array, grad: Array, noise: Array, rate: np.floating[Any]) -> Array:
    """Return the next factor of an axis, given both terms unfolded along it."""
    tiny = factor.dtype.type(TINY)
    if factor.ndim < 2:
        first, second = (np.einsum("ij,ij->i", rows, rows) for rows in (grad, noise))
        size = np.abs(first + second).max()
        return np.asarray(factor - rate * (first - second) * factor / (size + tiny))
    first, second = grad @ grad.T, noise @ noise.T
    change = np.triu(first - second) * (rate / (spectral_bound(first + second) + tiny))
    return np.asarray(factor - change @ factor)


def spectral_bound(matrix: Array) -> Any:
    """Return a lower bound of the spectral norm of a symmetric matrix, often within 10 %."""
    size = np.abs(matrix).max()
    scaled = matrix / size if size > 0 else matrix
    start = scaled[:, np.argmax(np.sum(scaled * scaled, axis=0))] @ scaled
    length = np.linalg.norm(start)
    return size * np.linalg.norm(scaled @ (start / length if length > 0 else start))


def balanced(factors: Sequence[Array]) -> list[Array]:
    """Return factors with equal largest elements and the same product."""
    sizes = [np.abs(factor).max() for factor in factors]
    mean = math.exp(sum(math.log(size) for size in sizes) / len(sizes))
    return [
        factor * factor.dtype.type(mean / size) for factor, size in zip(factors, sizes, strict=True)
    ]
