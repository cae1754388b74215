"""SOAP: Adam in the eigenbasis of Shampoo's preconditioner, for weight matrices."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from fastopt._engine.buffers import Buffers
from fastopt._engine.eigenbases import (
    averaged,
    axes,
    by_axis,
    eigenbasis,
    first_whiteners,
    iterated,
    rotated,
)
from fastopt._engine.validate import leaves
from fastopt.arguments import FLAG, Integer, OrNone, Real, alias, arg
from fastopt.optimizer.adam import Adam
from fastopt.optimizer.matrices import MatrixFamily, Part, Rescaled, Shape
from fastopt.optimizer.optimizer import Array, Index, register
from fastopt.optimizer.rates import RateAttribute

MOMENTS = ("beta1", "beta2", "epsilon", "stable", "idx2name")
"""Attributes that the inner Adam shares with SOAP."""


class _Rotated:
    """Directions: steps of Adam in the eigenbases, from 0 with a learning rate of 1."""

    def __init__(self) -> None:
        self._rescaled = Rescaled()
        self._adam = Part(Adam(learning_rate=1.0), MOMENTS)
        self._buffers = Buffers()
        self._kept: dict[Any, tuple[Array, Array]] = {}

    def reserve(self, main: "SOAP", index: Index, direction: Array) -> None:
        """See :meth:`Directions.reserve <fastopt.optimizer.matrices.Directions.reserve>`."""
        shape, dtype = direction.shape, direction.dtype
        for name in ("rotated 0", "rotated 1"):
            self._buffers(name, shape, dtype)
        for name, size in main.slots(shape).items():
            if name.startswith("factor"):
                self._buffers(name, size, dtype)
        if (shape, dtype) not in self._kept:
            self._kept[shape, dtype] = np.empty(shape, dtype), np.empty(shape, dtype)
        self._rescaled.reserve(direction)

    def write(
        self, main: "SOAP", index: Index, weight: Array, direction: Array, grad: Array, state: Any
    ) -> bool:
        """See :meth:`Directions.write <fastopt.optimizer.matrices.Directions.write>`.

        Decompositions are computed before the state changes, so that a failure changes nothing.
        """
        mean, var, steps, *pairs = state
        inside, step = self._kept[direction.shape, direction.dtype]
        gradient = self._rescaled(main, index, direction, grad)
        lengths, count = main.axes(direction.shape), int(steps[0])
        largest, beta = main.max_precond_dim, main.shampoo_beta
        factors, bases = (by_axis(lengths, pairs[first::2], largest) for first in (0, 1))
        share = 1 - (main.beta2 if beta is None else beta)
        with np.errstate(all="ignore"):  # NaN and infinity propagate without a warning
            shaped, whiteners = gradient.reshape(lengths), None
            if main.kl:
                whiteners = (
                    _whiteners(factors, bases, main.epsilon)
                    if count
                    else first_whiteners(factors, shaped)
                )
            averages = averaged(factors, shaped, share, self._buffers, whiteners)
            new, orders = _next_bases(lengths, averages, bases, count, main.precondition_frequency)
            if count:
                rotated(shaped, bases, False, self._buffers, inside)
                step.fill(0)
                self._adam.step(main, index, count - 1, step, inside, (mean, var))
                rotated(step.reshape(lengths), bases, True, self._buffers, direction)
                np.negative(direction, out=direction)
            if orders is not None:
                rotated(mean.reshape(lengths), bases, True, self._buffers, inside)
                rotated(inside.reshape(lengths), new, False, self._buffers, mean)
                var[...] = var.reshape(lengths)[np.ix_(*orders)].reshape(var.shape)
        for targets, values in ((factors, averages), (bases, new)):
            for target, value in zip(targets, values, strict=True):
                if target is not None and target is not value:
                    target[...] = value
        steps += 1
        return count > 0


def _whiteners(
    factors: Sequence[Array | None], bases: Sequence[Array | None], floor: float
) -> list[Array | None]:
    """Return the basis of each axis, divided by the roots of the eigenvalues that it estimates."""
    found: list[Array | None] = []
    for factor, basis in zip(factors, bases, strict=True):
        if factor is None or basis is None:
            found.append(None)
            continue
        values = np.einsum("ij,ij->j", basis, factor @ basis)
        found.append(basis / np.sqrt(np.maximum(values, factor.dtype.type(floor))))
    return found


def _next_bases(
    lengths: Shape,
    factors: Sequence[Array | None],
    bases: Sequence[Array | None],
    count: int,
    every: int,
) -> tuple[Sequence[Array | None], list[Array] | None]:
    """Return the bases of the next step, and, if they change, the column order for each axis."""
    if count == 0:
        return [None if factor is None else eigenbasis(factor) for factor in factors], None
    if count % every:
        return bases, None
    new, orders = list(bases), [np.arange(length) for length in lengths]
    for axis, (factor, basis) in enumerate(zip(factors, bases, strict=True)):
        if factor is not None and basis is not None:
            new[axis], orders[axis] = iterated(factor, basis)
    return new, orders


@register
class SOAP(MatrixFamily):
    r"""SOAP: Adam in the eigenbasis of Shampoo's preconditioner, for weight matrices.

    .. math::
        h &= \mathrm{clip}(r g) \\
        p &= Q_L^T h Q_R \\
        m &\leftarrow \beta_1 m + (1 - \beta_1) p \\
        v &\leftarrow \beta_2 v + (1 - \beta_2) p^2 \\
        w &\leftarrow (1 - \eta \lambda) \left( w - \eta \frac{\sqrt{1 - \beta_2^t}}{1 - \beta_1^t}
            Q_L \frac{m}{\sqrt{v} + \epsilon} Q_R^T \right) \\
        L &\leftarrow \beta_s L + (1 - \beta_s) h h^T \\
        R &\leftarrow \beta_s R + (1 - \beta_s) h^T h

    The columns of :math:`Q_L` and :math:`Q_R` are the eigenvectors of L and R. The first update of
    a weight initializes L and R, computes their eigenvectors and does not change the weight, so t
    counts updates from the second one on. Every `precondition_frequency` updates, :math:`Q_L` and
    :math:`Q_R` are replaced by the orthogonal factors of the QR decompositions of :math:`L Q_L` and
    :math:`R Q_R`, with columns sorted by eigenvalue; m is rotated into the new bases, and v is
    sorted in the same order.

    Weights with more than two dimensions have a basis for each axis. An axis longer than
    `max_precond_dim` has no basis and is not rotated. With `precondition_1d`, weights with fewer
    dimensions have one basis.

    With `kl` it is KL-SOAP, whose L and R minimize a Kullback-Leibler divergence: :math:`h h^T` is
    :math:`h R^{-1} h^T / n` and :math:`h^T h` is :math:`h^T L^{-1} h / m`, with the inverses in the
    present bases, :math:`Q_R \mathrm{diag}(\max(Q_R^T R Q_R, \epsilon))^{-1} Q_R^T`, and the number
    of rows m and of columns n. In the first update both inverses are :math:`I / \mathrm{rms}(h)`,
    for k axes :math:`\mathrm{rms}(h)^{-2 / k} I`. This is the form of the paper; the authors' code
    averages the eigenvalues apart, starts them at 0.1, bounds their inverses, and does not sort v.

    Source: Vyas et al., "SOAP: Improving and Stabilizing Shampoo using Adam", arXiv:2409.11321,
    with the order of operations of the authors' code; Lin et al., "Understanding and Improving
    Shampoo and SOAP via Kullback-Leibler Minimization", arXiv:2509.03378.

    Weights with fewer dimensions need a `fallback`; without one they raise an error. Embeddings
    and output layers should use it too, by `fallback_for`.

    Products and decompositions use NumPy in float32, or in float64 for float64 weights and if
    LAPACK fails in float32. Their last bits may depend on the number of threads of NumPy's BLAS. A
    non-finite gradient makes the whole weight NaN.

    State: the tuple of m and v, in the weight's shape, an array of shape (1,) with the number of
    updates, and for each axis with a basis the matrices L and :math:`Q_L`.

    Parameters
    ----------
    learning_rate : float or callable, optional
        Default 0.003; None uses the scheduler's ``base_lr``.
    beta1, beta2 : float
        Decay rates of m and v, at least 0 and below 1. Defaults 0.95, 0.95.
    epsilon : float
        :math:`\epsilon`, at least 0. Default 1e-8.
    shampoo_beta : float, optional
        Decay rate :math:`\beta_s` of L and R, at least 0 and below 1. Default None: `beta2`.
    precondition_frequency : int
        Number of updates between updates of the bases, at least 1. Default 10.
    max_precond_dim : int
        Maximum length of an axis with a basis, at least 1. Default 10000.
    merge_dims : bool
        Merge adjacent axes while the product of their lengths is at most `max_precond_dim`.
        Default False.
    precondition_1d : bool
        Update weights with fewer than two dimensions too. Default False.
    kl : bool
        Use KL-SOAP. Default False.
    fallback : Optimizer or str, optional
        Optimizer of weights with fewer than two dimensions, and of those in `fallback_for`, see
        :class:`~fastopt.optimizer.Muon`. Default None: such weights raise an error.
    fallback_for : str or sequence of str, optional
        Regular expressions for the names of weights that the fallback updates.
    cautious, cautious_decay, stable : bool
        See :class:`~fastopt.optimizer.AdamW`, for the weights that the fallback does not update.
        With both, the elements that are not updated decay. `stable` measures the rotated gradient.
        Default False.
    **common
        Arguments of :class:`~fastopt.optimizer.Optimizer`; `state_dtype` must be None.

    Raises
    ------
    ValueError
        An argument is NaN or out of range, a pattern is not a regular expression, or
        `fallback_for` is given without `fallback`. In an update: a weight has fewer than two
        dimensions and there is no fallback.
    TypeError
        An argument has the wrong type, or the fallback has no rule. In an update: the gradient of
        a matrix is row-sparse, or the matrix is on a CUDA device.

    Examples
    --------
    >>> import numpy as np
    >>> from fastopt import optimizer
    >>> updater = optimizer.get_updater(optimizer.SOAP(learning_rate=0.1, fallback="adamw"))
    >>> weight, bias = np.zeros((2, 2), np.float32), np.zeros(2, np.float32)
    >>> grads = [np.array([[3, 0], [0, -1]], np.float32), np.ones(2, np.float32)]
    >>> for _ in range(2):
    ...     updater([0, 1], grads, [weight, bias])
    >>> weight.round(2) + 0
    array([[-0.1,  0. ],
           [ 0. ,  0.1]], dtype=float32)
    >>> bias.round(2)
    array([-0.2, -0.2], dtype=float32)

    With the preconditioners of KL-SOAP:

    >>> updater = optimizer.get_updater(optimizer.SOAP(learning_rate=0.1, kl=True))
    >>> weight = np.zeros((2, 2), np.float32)
    >>> for _ in range(2):  # the first update only starts the preconditioners
    ...     updater(0, np.array([[3, 0], [0, -1]], np.float32), weight)
    >>> weight.round(2) + 0
    array([[-0.1,  0. ],
           [ 0. ,  0.1]], dtype=float32)
    """

    decays_last = True
    learning_rate: RateAttribute = arg(default=0.003)
    beta1: float = arg(default=0.95, check=Real(least=0, below=1))
    beta2: float = arg(default=0.95, check=Real(least=0, below=1))
    epsilon: float = arg(default=1e-08, check=Real(least=0))
    shampoo_beta: float | None = arg(default=None, check=OrNone(Real(least=0, below=1)))
    precondition_frequency: int = arg(default=10, check=Integer(least=1))
    max_precond_dim: int = arg(default=10000, check=Integer(least=1))
    merge_dims: bool = arg(default=False, check=FLAG)
    precondition_1d: bool = arg(default=False, check=FLAG)
    kl: bool = arg(default=False, check=FLAG)
    cautious: bool = arg(default=False, check=FLAG, kw_only=True, new=True)
    cautious_decay: bool = arg(default=False, check=FLAG, kw_only=True, new=True)
    stable: bool = arg(default=False, check=FLAG, kw_only=True, new=True)
    betas: tuple[float, float] = alias("beta1", "beta2", default=(0.9, 0.999), kw_only=True)
    eps: float = alias("epsilon", default=1e-8, kw_only=True)
    rounds_state = False

    @property
    def takes_vectors(self) -> bool:
        """See :attr:`MatrixFamily.takes_vectors`."""
        return self.precondition_1d

    def axes(self, shape: Shape) -> Shape:
        """Return the lengths of the axes that may have a basis, merged if requested."""
        return axes(shape or (1,), self.max_precond_dim, self.merge_dims)

    def check_saved(self, index: Index, state: Any) -> None:
        """See :meth:`Optimizer.check_saved <fastopt.optimizer.Optimizer.check_saved>`."""
        paired = isinstance(state, (tuple, list)) and len(state) == 2
        arrays = leaves(state[not self.master_last] if paired else state)
        if len(arrays) < 3 or np.shape(arrays[2]) != (1,) or self.falls_back(index, arrays[0]):
            return
        steps = arrays[2]
        largest = 2 / np.finfo(steps.dtype).eps  # adding 1 to it changes nothing
        if not (float(steps[0]).is_integer() and 0 <= steps[0] <= largest):
            raise ValueError(
                f"state 'steps' must be a whole number from 0 to {largest:.0f}, got {steps[0]}"
            )

    def directions(self) -> _Rotated:
        """See :meth:`MatrixFamily.directions`."""
        return _Rotated()

    def slots(self, shape: Shape) -> Mapping[str, Shape]:
        """See :meth:`MatrixFamily.slots`."""
        found: dict[str, Shape] = {"mean": shape, "var": shape, "steps": (1,)}
        for axis, length in enumerate(self.axes(shape)):
            if length <= self.max_precond_dim:
                found[f"factor {axis}"] = found[f"basis {axis}"] = (length, length)
        return found
