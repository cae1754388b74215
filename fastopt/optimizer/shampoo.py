"""Shampoo and SOAP: preconditioners for each axis of a weight."""

import math
from collections.abc import Mapping, Sequence
from itertools import islice, product
from types import MappingProxyType
from typing import Any, ClassVar

import numpy as np

from fastopt._engine import eigenbases
from fastopt._engine.buffers import Buffers
from fastopt._engine.eigenbases import ByAxis
from fastopt._engine.validate import leaves
from fastopt.arguments import FLAG, Integer, OrNone, Real, arg
from fastopt.optimizer.adam import Adam
from fastopt.optimizer.families import AdamFamily
from fastopt.optimizer.matrices import Directions, Main, MatrixOptimizer, Part, Shape, Update
from fastopt.optimizer.optimizer import Array, Index, RateAttribute, register


class _OfAdam(Directions[Main]):
    """Abstract base of directions with preconditioners, whose step sizes are those of Adam."""

    adam: ClassVar[Mapping[str, Any]] = {}
    """Arguments of the inner Adam."""
    shared: ClassVar[tuple[str, ...]] = ("beta1", "beta2", "epsilon", "idx2name")
    """Attributes that the inner Adam shares with the optimizer."""
    scratch: ClassVar[tuple[str, ...]]
    """Names of buffers in the weight's shape."""

    def __init__(self) -> None:
        self._buffers = Buffers()
        self._adam = Part(Adam(learning_rate=1.0, **self.adam), self.shared)

    def reserve(self, main: Main, index: Index, direction: Array) -> None:
        """See :meth:`Directions.reserve <fastopt.optimizer.matrices.Directions.reserve>`."""
        for name in self.scratch:
            self._buffers(name, direction.shape, direction.dtype)
        for name, size in main.slots(direction.shape).items():
            if name.startswith("factor"):
                self._buffers(name, size, direction.dtype)


def _assign(targets: ByAxis, values: ByAxis) -> None:
    """Write the values of axes that have changed."""
    for axis, value in values.items():
        if targets[axis] is not value:
            targets[axis][...] = value


class _Preconditioned(_OfAdam["Shampoo"]):
    """Directions: the preconditioned mean gradient, with the norm of Adam's step."""

    adam = MappingProxyType({"formula": "torch"})
    scratch = ("rotated 0", "rotated 1", "turned")

    def write(self, main: "Shampoo", update: Update) -> bool:
        """See :meth:`Directions.write <fastopt.optimizer.matrices.Directions.write>`.

        Roots are computed before the state changes, so that a failure changes nothing.
        """
        index, _, direction, gradient, (mean, var, *pairs) = update
        lengths = main.axes(direction.shape)
        count = main.updates_of(index)
        blocks, rest, renewed = main.blocks(lengths), iter(pairs), []
        with np.errstate(all="ignore"):  # NaN and infinity propagate without a warning
            for at, sizes in blocks:
                arrays = list(islice(rest, 2 * sum(size <= main.max_precond_dim for size in sizes)))
                factors = eigenbases.by_axis(sizes, arrays, main.max_precond_dim)
                averages, roots = self._renewed(main, factors, gradient.reshape(lengths)[at], count)
                if len(blocks) > 1:  # the buffers are those of the next block
                    averages = {axis: average.copy() for axis, average in averages.items()}
                renewed.append((at, factors, (averages, roots)))
            direction.fill(0)
            self._adam.step(main, index, count - 1, direction, gradient, (mean, var))
            if count >= main.start:
                result = direction.reshape(lengths)
                for at, _, (_, roots) in renewed:
                    self._precondition(result[at], mean.reshape(lengths)[at], roots)
                if not np.may_share_memory(result, direction):
                    direction[...] = result.reshape(direction.shape)
            else:
                np.negative(direction, out=direction)
        for _, factors, results in renewed:
            for targets, values in zip(factors, results, strict=True):
                _assign(targets, values)
        return True

    def _renewed(
        self, main: "Shampoo", matrices: Sequence[ByAxis], gradient: Array, count: int
    ) -> tuple[ByAxis, ByAxis]:
        """Return the averages and the roots of a block after update `count`."""
        factors, roots = matrices
        whiteners = None
        if main.kl:
            whiteners = (
                roots if count > main.start else eigenbases.first_whiteners(factors, gradient)
            )
        averages = eigenbases.averaged(factors, gradient, 1 - main.beta2, self._buffers, whiteners)
        return averages, main.roots(averages, count) if main.renews(count) else roots

    def _precondition(self, step: Array, mean: Array, roots: ByAxis) -> None:
        """Turn a step of Adam, which is negative, into a preconditioned one of the same norm."""
        size, turned = _norm(step), self._buffers("turned", step.shape, step.dtype)
        eigenbases.rotated(mean, roots, False, self._buffers, turned)
        norm = _norm(turned)
        np.multiply(turned, step.dtype.type(size / norm if norm != 0 else 0.0), out=step)


def _norm(array: Array) -> float:
    """Return the Frobenius norm, with the squares summed in float64."""
    flat = array.reshape(-1)
    return math.sqrt(np.einsum("i,i->", flat, flat, dtype=np.float64))


@register
class Shampoo(MatrixOptimizer, AdamFamily):
    r"""Shampoo: preconditioners for each axis, with the step size of Adam, for weight matrices.

    .. math::
        h &= \mathrm{clip}(r g) \\
        L &\leftarrow \beta_2 L + (1 - \beta_2) h h^T, \qquad
        R \leftarrow \beta_2 R + (1 - \beta_2) h^T h \\
        m &\leftarrow \beta_1 m + (1 - \beta_1) h, \qquad
        v \leftarrow \beta_2 v + (1 - \beta_2) h^2 \\
        a &= \frac{m}{1 - \beta_1^t}
            \Big/ \left( \sqrt{\frac{v}{1 - \beta_2^t}} + \epsilon \right), \qquad
        p = \hat L^{-1/4} m \hat R^{-1/4} \\
        w &\leftarrow (1 - \eta \lambda) w - \eta \frac{\|a\|_F}{\|p\|_F} p

    with :math:`\hat L = L / (1 - \beta_2^t) + \epsilon_r I`, and :math:`\hat R` like it. The roots
    are computed every `precondition_frequency` updates. Before update `start`, the step is that of
    Adam, :math:`\eta a`. The norm of the step is always that of Adam's, which is called grafting.

    Weights with more than two dimensions have a preconditioner for each of k axes, with the
    exponent :math:`-1 / (2 k)`. An axis longer than `max_precond_dim` has none and does not count.
    With `block_size`, longer axes are cut into blocks of at most that length, each with
    preconditioners and a norm of its own, as in the distributed Shampoo that won AlgoPerf.

    With `kl` it is KL-Shampoo with grafting, whose L and R minimize a Kullback-Leibler divergence:
    :math:`h h^T` is :math:`h \hat R^{-1} h^T / n` and :math:`h^T h` is
    :math:`h^T \hat L^{-1} h / m`, for m rows and n columns, with the inverses of the last roots,
    and the exponents of :math:`\hat L` and :math:`\hat R` are :math:`-1 / 2`, as in the paper.
    Until update `start`, both inverses are :math:`I / \mathrm{rms}(h)`, for k axes
    :math:`\mathrm{rms}(h)^{-2 / k} I`, so that L and R have equal scales, and the step does not
    depend on the scale of the gradients. The authors' code averages the eigenvalues apart, from
    0.1 at first; the RootInvKL of distributed Shampoo has the exponent :math:`-1 / 4` and sums
    instead of means.

    Sources: Gupta, Koren and Singer, "Shampoo: Preconditioned Stochastic Tensor Optimization",
    arXiv:1802.09568; Anil et al., "Scalable Second Order Optimization for Deep Learning",
    arXiv:2002.09018 (grafting); with the formulas of Shi et al., "A Distributed Data-Parallel
    PyTorch Implementation of the Distributed Shampoo Optimizer", arXiv:2309.06497, whose code has
    `block_size` as its ``max_preconditioner_dim``; Lin et al., "Understanding and Improving Shampoo
    and SOAP via Kullback-Leibler Minimization", arXiv:2509.03378.

    Weights with fewer dimensions need a `fallback`; without one they raise an error. Embeddings
    and output layers should use it too, by `fallback_for`.

    Products and decompositions use NumPy in float32, or in float64 for float64 weights and if
    LAPACK fails in float32. Their last bits may depend on the number of threads of NumPy's BLAS. A
    non-finite gradient makes the whole weight NaN.

    State: the tuple of m and v, in the weight's shape, and for each axis with a preconditioner, of
    each block in turn, the matrices L and :math:`\hat L^{-1/4}`.

    Parameters
    ----------
    learning_rate : float or callable, optional
        Default 0.001; None uses the scheduler's ``base_lr``.
    beta1, beta2 : float
        Decay rates of m, and of v, L and R, at least 0 and below 1. Defaults 0.9, 0.999.
    epsilon : float
        :math:`\epsilon`, at least 0. Default 1e-8.
    root_epsilon : float
        :math:`\epsilon_r`, above 0. If L has negative eigenvalues by rounding, their size is added
        too. Default 1e-12.
    precondition_frequency : int
        Number of updates between computations of the roots, at least 1. Default 10.
    start_step : int, optional
        First update with preconditioners, at least 1. Default None: `precondition_frequency`.
    max_precond_dim : int
        Maximum length of an axis with a preconditioner, at least 1. Default 8192.
    merge_dims : bool
        Merge adjacent axes while the product of their lengths is at most `max_precond_dim`.
        Default False.
    block_size : int, optional
        Maximum length of the blocks of an axis, at least 1. Default None: axes are not cut.
    kl : bool
        Use KL-Shampoo. Default False.
    fallback : Optimizer or str, optional
        Optimizer of weights with fewer than two dimensions, and of those in `fallback_for`, see
        :class:`~fastopt.optimizer.Muon`. Default None: such weights raise an error.
    fallback_for : str or sequence of str, optional
        Regular expressions for the names of weights that the fallback updates.
    cautious, cautious_decay : bool
        See :class:`~fastopt.optimizer.AdamW`, for the weights that the fallback does not update.
        With both, the elements that are not updated decay. Default False.
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
    >>> import fastopt
    >>> shampoo = fastopt.Shampoo(lr=0.1, precondition_frequency=1, fallback="adamw")
    >>> updater = fastopt.Updater(shampoo)
    >>> weight, bias = np.zeros((2, 2), np.float32), np.zeros(2, np.float32)
    >>> grads = [np.array([[3, 0], [0, -1]], np.float32), np.ones(2, np.float32)]
    >>> updater.step(grads, [weight, bias])
    >>> weight.round(2) + 0
    array([[-0.1,  0. ],
           [ 0. ,  0.1]], dtype=float32)
    >>> bias.round(2)
    array([-0.1, -0.1], dtype=float32)

    In blocks, which bound the size of the matrices that are decomposed:

    >>> updater = fastopt.Updater(fastopt.Shampoo(block_size=2))
    >>> updater.step({"w": np.ones((4, 6))}, {"w": np.zeros((4, 6))})
    >>> sorted({array.shape for array in updater.states["w"]})
    [(2, 2), (4, 6)]
    """

    root_epsilon: float = arg(default=1e-12, check=Real(least=1e-30))
    precondition_frequency: int = arg(default=10, check=Integer(least=1))
    start_step: int | None = arg(default=None, check=OrNone(Integer(least=1)))
    max_precond_dim: int = arg(default=8192, check=Integer(least=1))
    merge_dims: bool = arg(default=False, check=FLAG)
    block_size: int | None = arg(default=None, check=OrNone(Integer(least=1)))
    kl: bool = arg(default=False, check=FLAG)

    @property
    def start(self) -> int:
        """First update with preconditioners."""
        return self.precondition_frequency if self.start_step is None else self.start_step

    def renews(self, count: int) -> bool:
        """Whether update `count` computes the roots."""
        due = count % self.precondition_frequency == 0 and count > self.start
        return due or count == self.start

    def roots(self, factors: ByAxis, count: int) -> ByAxis:
        """Return the inverse roots of the bias-corrected averages of each axis."""
        root, share = 2 if self.kl else 2 * len(factors), 1 - self.beta2**count
        return {
            axis: eigenbases.inverse_root(factor / share, root, self.root_epsilon)
            for axis, factor in factors.items()
        }

    def axes(self, shape: Shape) -> Shape:
        """Return the lengths of the axes that may have a preconditioner, merged if requested."""
        return eigenbases.axes(shape, self.max_precond_dim, self.merge_dims)

    directions = _Preconditioned

    def blocks(self, lengths: Shape) -> list[tuple[tuple[slice, ...], Shape]]:
        """Return the slices and the lengths of each block of an array with these axes."""
        size = self.block_size
        cuts = [
            [slice(at, min(at + size, length)) for at in range(0, length, size)]
            if size is not None and length > size
            else [slice(0, length)]
            for length in lengths
        ]
        return [(at, tuple(cut.stop - cut.start for cut in at)) for at in product(*cuts)]

    def slots(self, shape: Shape) -> Mapping[str, Shape]:
        """See :meth:`MatrixOptimizer.slots`."""
        shapes: dict[str, Shape] = {"mean": shape, "var": shape}
        blocks = self.blocks(self.axes(shape))
        for k, (_, sizes) in enumerate(blocks):
            of = f" of block {k}" if len(blocks) > 1 else ""
            for axis, length in enumerate(sizes):
                if length <= self.max_precond_dim:
                    shapes[f"factor {axis}{of}"] = shapes[f"root {axis}{of}"] = (length, length)
        return shapes


class _Rotated(_OfAdam["SOAP"]):
    """Directions: steps of Adam in the eigenbases, from 0 with a learning rate of 1."""

    skips_empty = False
    shared = (*_OfAdam.shared, "stable")
    scratch = ("rotated 0", "rotated 1", "inside", "step")

    def write(self, main: "SOAP", update: Update) -> bool:
        """See :meth:`Directions.write <fastopt.optimizer.matrices.Directions.write>`.

        Decompositions are computed before the state changes, so that a failure changes nothing.
        """
        index, _, direction, gradient, (mean, var, steps, *pairs) = update
        shape, dtype = direction.shape, direction.dtype
        inside, step = (self._buffers(name, shape, dtype) for name in ("inside", "step"))
        lengths, count = main.axes(direction.shape), int(steps[0])
        factors, bases = eigenbases.by_axis(lengths, pairs, main.max_precond_dim)
        share = 1 - (main.beta2 if main.shampoo_beta is None else main.shampoo_beta)
        with np.errstate(all="ignore"):  # NaN and infinity propagate without a warning
            shaped, whiteners = gradient.reshape(lengths), None
            if main.kl and count:
                whiteners = _whiteners(factors, bases, main.epsilon)
            elif main.kl:
                whiteners = eigenbases.first_whiteners(factors, shaped)
            averages = eigenbases.averaged(factors, shaped, share, self._buffers, whiteners)
            new, orders = _next_bases(lengths, averages, bases, count, main.precondition_frequency)
            if count:
                eigenbases.rotated(shaped, bases, False, self._buffers, inside)
                step.fill(0)
                self._adam.step(main, index, count - 1, step, inside, (mean, var))
                eigenbases.rotated(step.reshape(lengths), bases, True, self._buffers, direction)
                np.negative(direction, out=direction)
            if orders is not None:
                eigenbases.rotated(mean.reshape(lengths), bases, True, self._buffers, inside)
                eigenbases.rotated(inside.reshape(lengths), new, False, self._buffers, mean)
                var[...] = var.reshape(lengths)[np.ix_(*orders)].reshape(var.shape)
        _assign(factors, averages)
        _assign(bases, new)
        steps += 1
        return count > 0


def _whiteners(factors: ByAxis, bases: ByAxis, floor: float) -> ByAxis:
    """Return the basis of each axis, divided by the roots of the eigenvalues that it estimates."""
    whiteners = {}
    for axis, factor in factors.items():
        values = np.einsum("ij,ij->j", bases[axis], factor @ bases[axis])
        whiteners[axis] = bases[axis] / np.sqrt(np.maximum(values, factor.dtype.type(floor)))
    return whiteners


def _next_bases(
    lengths: Shape, factors: ByAxis, bases: ByAxis, count: int, every: int
) -> tuple[ByAxis, list[Array] | None]:
    """Return the bases of the next step, and, if they change, the column order for each axis."""
    if count == 0:
        return {axis: eigenbases.eigenbasis(factor) for axis, factor in factors.items()}, None
    if count % every:
        return bases, None
    new, orders = {}, [np.arange(length) for length in lengths]
    for axis, factor in factors.items():
        new[axis], orders[axis] = eigenbases.iterated(factor, bases[axis])
    return new, orders


@register
class SOAP(MatrixOptimizer, AdamFamily):
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
    >>> import fastopt
    >>> updater = fastopt.Updater(fastopt.SOAP(lr=0.1, fallback="adamw"))
    >>> weight, bias = np.zeros((2, 2), np.float32), np.zeros(2, np.float32)
    >>> grads = [np.array([[3, 0], [0, -1]], np.float32), np.ones(2, np.float32)]
    >>> for _ in range(2):
    ...     updater.step(grads, [weight, bias])
    >>> weight.round(2) + 0
    array([[-0.1,  0. ],
           [ 0. ,  0.1]], dtype=float32)
    >>> bias.round(2)
    array([-0.2, -0.2], dtype=float32)

    With the preconditioners of KL-SOAP:

    >>> updater = fastopt.Updater(fastopt.SOAP(lr=0.1, kl=True))
    >>> weight = np.zeros((2, 2), np.float32)
    >>> for _ in range(2):  # the first update only starts the preconditioners
    ...     updater.step(np.array([[3, 0], [0, -1]], np.float32), weight)
    >>> weight.round(2) + 0
    array([[-0.1,  0. ],
           [ 0. ,  0.1]], dtype=float32)
    """

    decays_last = True
    learning_rate: RateAttribute = arg(default=0.003)
    beta1: float = arg(default=0.95)
    beta2: float = arg(default=0.95)
    shampoo_beta: float | None = arg(default=None, check=OrNone(Real(least=0, below=1)))
    precondition_frequency: int = arg(default=10, check=Integer(least=1))
    max_precond_dim: int = arg(default=10000, check=Integer(least=1))
    merge_dims: bool = arg(default=False, check=FLAG)
    precondition_1d: bool = arg(default=False, check=FLAG)
    kl: bool = arg(default=False, check=FLAG)
    stable: bool = arg(default=False, check=FLAG, kw_only=True, new=True)

    @property
    def takes_vectors(self) -> bool:  # type: ignore[override]
        """See :attr:`MatrixOptimizer.takes_vectors`."""
        return self.precondition_1d

    def axes(self, shape: Shape) -> Shape:
        """Return the lengths of the axes that may have a basis, merged if requested."""
        return eigenbases.axes(shape or (1,), self.max_precond_dim, self.merge_dims)

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

    directions = _Rotated

    def slots(self, shape: Shape) -> Mapping[str, Shape]:
        """See :meth:`MatrixOptimizer.slots`."""
        shapes: dict[str, Shape] = {"mean": shape, "var": shape, "steps": (1,)}
        for axis, length in enumerate(self.axes(shape)):
            if length <= self.max_precond_dim:
                shapes[f"factor {axis}"] = shapes[f"basis {axis}"] = (length, length)
        return shapes
