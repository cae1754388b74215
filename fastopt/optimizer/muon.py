"""Muon and its kin: steps of orthogonalized matrices, and of fixed size in other norms."""

import math
from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any, ClassVar, Literal, TypeVar

import numpy as np
from numpy.typing import ArrayLike

from fastopt._engine.newton_schulz import NewtonSchulz
from fastopt._engine.validate import check_like, label
from fastopt.arguments import FLAG, Choice, Integer, Real, Stored, alias, arg, brief, number
from fastopt.kernels.rule import Hyper, Scalar, State, Step, rule
from fastopt.kernels.scalars import rescaled
from fastopt.optimizer.matrices import (
    CHECKS,
    ByPattern,
    Coefficients,
    Directions,
    MatrixOptimizer,
    Part,
    Shape,
    Update,
)
from fastopt.optimizer.optimizer import Array, Index, Optimizer, RateAttribute, constant, register

SCALES = ("rescale_grad", "clip_gradient", "momentum", "nesterov", "idx2name", "maximize", "seed")
"""Attributes that the inner momentum optimizer shares with Muon."""


@rule(
    state=("mom",),
    hyper=("rescale_grad", "clip_gradient", "momentum", "one_minus_momentum", "fresh", "kept"),
)
def muon_momentum(weight: Scalar, grad: Scalar, state: State, h: Hyper) -> Step:
    """Moving average of the gradient; the direction is written to the weight."""
    grad = rescaled(grad, h)
    mom = h.momentum * state[0] + h.one_minus_momentum * grad
    return h.fresh * grad + h.kept * mom, (mom,)


Adjust = Literal["rms", "original", "spectral"]
"""How the scale of a step depends on the shape of the matrix."""

Main = TypeVar("Main", bound="MuonFamily", contravariant=True)


class _Momentum(Optimizer):
    """First part of a step: writes the direction to ``weight``; the state is the momentum."""

    rule = muon_momentum
    momentum: float = arg(default=0.95, kw_only=True)
    nesterov: bool = arg(default=True, kw_only=True)

    @constant
    def hyper(self, t: int, lr: float, wd: float) -> Mapping[str, float]:
        """See :meth:`Optimizer.hyper <fastopt.optimizer.Optimizer.hyper>`."""
        beta = self.momentum
        return {"fresh": 1 - beta, "kept": beta} if self.nesterov else {"fresh": 0.0, "kept": 1.0}


class Orthogonal(Directions[Main]):
    """Directions: the momentum, with each matrix orthogonalized separately."""

    rescales = False

    def __init__(self) -> None:
        self._momentum = Part(_Momentum(), SCALES)
        self._orthogonalize = NewtonSchulz()

    def reserve(self, main: Main, index: Index, direction: Array) -> None:
        """See :meth:`Directions.reserve <fastopt.optimizer.matrices.Directions.reserve>`."""
        if direction.ndim < 2:
            return
        for matrix in main.matrices(index, direction):
            self._orthogonalize.reserve(matrix)

    def write(self, main: Main, update: Update) -> bool:
        """See :meth:`Directions.write <fastopt.optimizer.matrices.Directions.write>`."""
        self.average(main, update)
        for matrix in main.matrices(update.parameter, update.target):
            self.orthogonalize(main, matrix, main.scale(*matrix.shape[-2:]))
        return True

    def average(self, main: Main, update: Update) -> None:
        """Update the momentum, and write the direction before it is orthogonalized."""
        index, _, direction, grad, state = update
        count = main._index_update_count[index] - 1
        self._momentum.step(main, index, count, direction, grad, state[0])

    def orthogonalize(self, main: Main, matrix: Array, scale: float = 1.0) -> None:
        """Orthogonalize a matrix in place and multiply it by `scale`."""
        self._orthogonalize(matrix, matrix, main.coefficients, main.steps, main.eps, scale)


def _check_parts(name: str, parts: object) -> int | tuple[int, ...]:
    whole = Integer(least=1)
    if isinstance(parts, (tuple, list)) and parts:
        return tuple(whole(f"{name}[{k}]", part) for k, part in enumerate(parts))
    return whole(name, parts)


class MuonFamily(MatrixOptimizer):
    """Abstract base of optimizers whose directions are orthogonalized averages of gradients.

    Parameters
    ----------
    learning_rate, momentum, nesterov, coefficients, steps, eps, adjust, split
        See :class:`Muon`, whose defaults these are.
    **common
        Arguments of :class:`~fastopt.optimizer.MatrixOptimizer`.

    Raises
    ------
    ValueError, TypeError
        Like :class:`Muon`.
    """

    rule = muon_momentum
    orthogonalizes_signs: ClassVar[bool] = False
    momentum: float = arg(default=0.95, check=Real(least=0, below=1))
    nesterov: bool = arg(default=True, check=FLAG)
    coefficients: Coefficients = arg(default="polar", check=CHECKS["coefficients"])
    steps: int = arg(default=5, check=CHECKS["steps"])
    eps: float = arg(default=1e-07, check=CHECKS["eps"])
    adjust: Adjust = arg(default="rms", check=Choice("rms", "original", "spectral"))
    split: Stored[Any, Mapping[str, int | Sequence[int]] | None] = arg(
        default=None, check=ByPattern("parts", _check_parts)
    )
    epsilon: float = alias("eps", default=1e-8, kw_only=True)

    def slots(self, shape: Shape) -> Mapping[str, Shape]:
        """See :meth:`MatrixOptimizer.slots`."""
        return {"mom": shape}

    def check_shape(self, index: Index, shape: Shape) -> None:
        """See :meth:`MatrixOptimizer.check_shape`."""
        self._sizes(index, shape)

    def _sizes(self, index: Index, shape: tuple[int, ...]) -> Sequence[int]:
        """Return the numbers of rows of the matrices in a weight."""
        if self.split is None:
            return shape[:1]
        rows, parts = shape[0], self.selected(self.split, index, 1)
        sizes = (rows // parts,) * parts if isinstance(parts, int) else parts
        if sum(sizes) != rows:
            raise ValueError(
                f"{label(index, self.idx2name)}: {rows} rows of shape {shape} cannot be split "
                f"into {parts}"
            )
        return sizes

    def matrices(self, index: Index, array: Array) -> list[Array]:
        """Return views of the matrices in an array that are orthogonalized separately.

        Equal parts are returned as one three-dimensional view.
        """
        flat = array if array.ndim == 2 else array.reshape(len(array), math.prod(array.shape[1:]))
        sizes = self._sizes(index, array.shape)
        if len({*sizes}) == 1 and len(sizes) > 1:
            return [flat.reshape(len(sizes), sizes[0], flat.shape[1])]
        ends = accumulate(sizes)
        return [flat[end - size : end] for end, size in zip(ends, sizes, strict=True)]

    def scale(self, rows: int, columns: int) -> float:
        """Return the factor of the orthogonalized step of a matrix of this shape."""
        if self.adjust == "rms":
            return 0.2 * math.sqrt(max(rows, columns))
        ratio = rows / columns if columns else 1.0
        return math.sqrt(ratio if self.adjust == "spectral" else max(1.0, ratio))


@register
class Muon(MuonFamily):
    r"""Muon: momentum with orthogonalized steps, for weight matrices.

    .. math::
        h &= \mathrm{clip}(r g) \\
        m &\leftarrow \mu m + (1 - \mu) h \\
        d &= (1 - \mu) h + \mu m \\
        w &\leftarrow (1 - \eta \lambda) w - \eta s \, \mathrm{orth}(d)

    Without `nesterov` :math:`d = m`. With the singular value decomposition :math:`d = U S V^T`,
    :math:`\mathrm{orth}(d)` approximates :math:`U V^T` by `steps` iterations
    :math:`X \leftarrow a X + (b A + c A^2) X` with :math:`A = X X^T`, starting from
    :math:`X = d / \sigma`. A matrix with more rows than columns is transposed before and after. If
    one side is at least three times the other, the iteration runs on Gram matrices of the shorter
    side. `coefficients` selects a, b and c, and the bound :math:`\sigma` of the singular values
    :math:`s_i` of d:

    * ``"polar"``: the method of Polar Express, a different triple in each iteration, with
      coefficients that are optimal for :math:`s_i` between :math:`0.0025 \sigma` and
      :math:`\sigma = 1.01 (\sum_i s_i^8)^{1/8}`, a sum that the first iteration computes anyway.
      Five iterations map this range to [0.99, 1.01];
    * ``"polar_express"``: the triples of the paper, for five iterations from
      :math:`0.001 \sigma`, with :math:`\sigma = 1.02 \|d\|_F`. They map to [0.87, 1.13];
    * ``"quintic"``: 3.4445, -4.775 and 2.0315 in all iterations with :math:`\sigma = \|d\|_F`,
      as in torch.optim.Muon and optax. They yield singular values between about 0.7 and 1.2.

    With O the result and n its shorter side, :math:`\|O O^T - I\|_F / \sqrt n` is below 0.02 for
    ``"polar"`` if all singular values are in its range. Square random matrices have some below it:
    the median for 64 to 1024 rows is 0.02 to 0.06. It is 0.2 for ``"polar_express"`` and 0.35 for
    ``"quintic"``. Singular values that are zero stay zero.

    For a matrix with n rows and m columns, :math:`s` is :math:`0.2 \sqrt{\max(n, m)}` with
    ``adjust="rms"``, so that learning rates and weight decays of AdamW can be reused,
    :math:`\sqrt{\max(1, n / m)}` with ``adjust="original"``, and :math:`\sqrt{n / m}` with
    ``adjust="spectral"``.

    Sources: Jordan et al., "Muon: An optimizer for hidden layers in neural networks", 2024; Amsel
    et al., "The Polar Express", arXiv:2505.16932; Liu et al., "Muon is Scalable for LLM
    Training", arXiv:2502.16982 (``adjust="rms"``).

    Weights with more than two dimensions, such as convolution kernels, are reshaped to matrices of
    the first axis by all others, from which s follows too. (The package muon-optimizer computes
    :math:`\sqrt{\max(1, n / m)}` from the last two axes, usually 1.) Weights with fewer dimensions
    need a `fallback`; without one they raise an error. Embeddings and output layers should use it
    too, by `fallback_for`.

    The iteration uses NumPy matrix products in float32, or in float64 for float64 weights. Their
    last bits may depend on the number of threads of NumPy's BLAS. A step of a square matrix with n
    rows takes about :math:`10 n^3` multiplications.

    State: the array :math:`m`, in the weight's shape; weights of the fallback have its state.

    Parameters
    ----------
    learning_rate : float or callable, optional
        Default 0.001; None uses the scheduler's ``base_lr``.
    momentum : float
        Decay rate :math:`\mu`, at least 0 and below 1. Default 0.95.
    nesterov : bool
        Nesterov's momentum. Default True.
    coefficients : str or tuple of three floats
        'polar', 'polar_express' or 'quintic', or a, b and c for all steps. Default 'polar'; torch
        has 'quintic'.
    steps : int
        Number of iterations, from 1 to 100. After the fifth, except with 'quintic', the triple is
        15/8, -5/4, 3/8, which converges. Default 5.
    eps : float
        Directions whose Frobenius norm is smaller are divided by `eps` instead of that norm, at
        least 1e-30. Default 1e-7.
    adjust : str
        'rms', 'original' or 'spectral'. Default 'rms'; torch has 'original', and a weight decay of
        0.1.
    split : dict of str to int or sequence of int, optional
        Weights that consist of several matrices stacked along the first axis, such as the queries,
        keys and values of attention, or its heads. Maps a regular expression for names to the
        number of equal parts, or to the number of rows of each part. The parts are orthogonalized
        separately. The first pattern that ``re.search`` finds in the name applies; the name is the
        entry in ``idx2name``, the name of the object in ``param_dict``, or the index.
    fallback : Optimizer or str, optional
        Optimizer of weights with fewer than two dimensions, and of those in `fallback_for`. It
        shares the update counts, `rescale_grad`, names and multipliers of this optimizer. A name
        creates an optimizer with the same learning rate, schedule, weight decay, clip and
        precision; an Optimizer object must not be used elsewhere. Default None: such weights
        raise an error.
    fallback_for : str or sequence of str, optional
        Regular expressions for the names of weights that the fallback updates.
    cautious, cautious_decay : bool
        See :class:`~fastopt.optimizer.AdamW`, for the weights that the fallback does not update.
        With both, the elements that are not updated decay. Default False.
    **common
        Arguments of :class:`~fastopt.optimizer.Optimizer`.

    Raises
    ------
    ValueError
        An argument is NaN or out of range, a pattern is not a regular expression, or
        `fallback_for` is given without `fallback`. In an update: a weight has fewer than two
        dimensions and there is no fallback, or its rows cannot be split as requested.
    TypeError
        An argument has the wrong type, or the fallback has no rule. In an update: the gradient of
        a matrix is row-sparse, or the matrix is on a CUDA device.

    Examples
    --------
    >>> import numpy as np
    >>> import fastopt
    >>> muon = fastopt.Muon(lr=0.1, adjust="original", fallback="adamw")
    >>> updater = fastopt.Updater(muon)
    >>> weight, bias = np.zeros((2, 2), np.float32), np.zeros(2, np.float32)
    >>> grads = [np.array([[3, 0], [0, -1]], np.float32), np.ones(2, np.float32)]
    >>> updater.step(grads, [weight, bias])
    >>> weight.round(2) + 0
    array([[-0.1,  0. ],
           [ 0. ,  0.1]], dtype=float32)
    >>> bias.round(2)
    array([-0.1, -0.1], dtype=float32)

    Matrices that are stored as one, such as queries, keys and values, are orthogonalized apart:

    >>> updater = fastopt.Updater(fastopt.Muon(lr=0.1, split={"qkv": 3}))
    >>> weight = np.zeros((6, 2))
    >>> updater.step({"qkv": np.vstack([np.eye(2), 2 * np.eye(2), 3 * np.eye(2)])}, {"qkv": weight})
    >>> np.ptp(weight.reshape(3, 2, 2), axis=0).round(6)  # all steps are equal
    array([[0., 0.],
           [0., 0.]])
    """

    rounds_state = True
    directions = Orthogonal


def clip_attention(
    query: Array, key: Array, largest: ArrayLike, limit: float = 100.0, share: float = 0.5
) -> None:
    r"""Scale down projections of attention whose logits are too large, in place: QK-Clip.

    .. math::
        \gamma_i = \min(1, \tau / S_i), \qquad
        Q_i \leftarrow \gamma_i^\alpha Q_i, \qquad K_i \leftarrow \gamma_i^{1 - \alpha} K_i

    for the heads i, so that the largest logit of a head becomes at most :math:`\tau`. After each
    step of Muon it makes MuonClip. A head of `key` that several heads of `query` share is scaled by
    the smallest of their factors, so that those with smaller logits shrink with it.

    Source: Kimi Team, "Kimi K2: Open Agentic Intelligence", arXiv:2507.20534, algorithm 1.

    Parameters
    ----------
    query, key : numpy.ndarray
        Weights of the projections, whose rows are those of the heads, in order: float32 or
        float64. Half-precision weights have masters that an updater keeps, so they are refused.
    largest : array_like
        Largest logit :math:`S_i` of each head of `query`, before the softmax, in a batch; at least
        0. Its length is the number of heads.
    limit : float
        :math:`\tau`, above 0. Default 100.
    share : float
        :math:`\alpha`, from 0 to 1. Default 0.5.

    Raises
    ------
    ValueError
        The rows of `query` or `key` cannot be divided among their heads, or a number is out of
        range. Nothing changes.
    TypeError
        A weight is not an array of float32 or float64.

    Examples
    --------
    >>> import numpy as np
    >>> from fastopt import optimizer
    >>> query, key = np.ones((4, 3)), np.ones((4, 3))
    >>> optimizer.clip_attention(query, key, [400.0, 50.0])
    >>> query[:, 0], key[:, 0]
    (array([0.5, 0.5, 1. , 1. ]), array([0.5, 0.5, 1. , 1. ]))
    """
    for name, weight in (("query", query), ("key", key)):
        check_like(
            f"clip_attention: {name}", "weight", weight, ("float32", "float64"), np.shape(weight)
        )
    limit, share = number("limit", limit, least=1e-30), number("share", share, least=0, most=1)
    sizes = np.array(largest, np.float64)
    if sizes.ndim != 1 or not len(sizes) or not (sizes >= 0).all():
        raise ValueError(f"largest must have a number of at least 0 for each head, got {largest!r}")
    heads, of_head = len(sizes), len(query) // len(sizes)
    if len(query) % heads or not of_head or len(key) % of_head or heads % (len(key) // of_head):
        raise ValueError(
            f"{len(query)} rows of query and {len(key)} of key cannot be divided among {heads} "
            "heads"
        )
    factors = limit / np.maximum(sizes, limit)
    shared = factors.reshape(len(key) // of_head, -1).min(axis=1)
    of_keys = shared ** (1 - share)
    of_queries = np.minimum(factors / np.repeat(of_keys, heads // len(of_keys)), 1.0)
    for weight, scales in ((query, of_queries), (key, of_keys)):
        rows = np.repeat(scales, of_head).astype(weight.dtype)
        weight *= rows.reshape(-1, *[1] * (weight.ndim - 1))


FLOOR = 1e-10
"""Number of the authors that is added to roots and norms."""


class Normalized(Orthogonal["NormalizedFamily"]):
    """Directions: the orthogonalized momentum, divided by the root of its second moment.

    The optimizer's function `squares` returns what the second moment averages.
    """

    def write(self, main: "NormalizedFamily", update: Update) -> bool:
        """See :meth:`Directions.write <fastopt.optimizer.matrices.Directions.write>`."""
        index, _, direction, _, (_, var) = update
        self.average(main, update)
        parts = zip(main.matrices(index, direction), main.matrices(index, var), strict=True)
        with np.errstate(all="ignore"):  # NaN and infinity propagate without a warning
            for matrix, average in parts:
                if main.orthogonalizes_signs:
                    np.sign(matrix, out=matrix)
                self.orthogonalize(main, matrix)
                before = norm(matrix)
                average *= main.beta2
                average += (1 - main.beta2) * main.squares(matrix)
                matrix /= np.sqrt(average) + FLOOR
                rows, columns = matrix.shape[-2:]
                matrix *= step_norm(main, rows, columns, before) / (norm(matrix) + FLOOR)
        return True


def norm(matrix: Array) -> Array:
    """Return the Frobenius norm of one or several matrices."""
    squares = np.einsum("...ij,...ij->...", matrix, matrix)
    return np.asarray(np.sqrt(squares))[..., np.newaxis, np.newaxis]


def step_norm(main: MuonFamily, rows: int, columns: int, before: Array) -> Any:
    """Return the norm of the step of a matrix, whose norm was `before` when orthogonalized."""
    if main.adjust == "rms":
        return 0.2 * math.sqrt(rows * columns)
    return before * main.scale(rows, columns)


def squares_of_rows(matrix: Array) -> Array:
    """Return the mean square of each row."""
    sums = np.einsum("...ij,...ij->...i", matrix, matrix)
    return np.asarray(sums / matrix.shape[-1])[..., np.newaxis]


class NormalizedFamily(MuonFamily):
    """Abstract base of optimizers that divide the orthogonalized momentum by its second moment.

    Parameters
    ----------
    beta2 : float
        Decay rate of the second moment, at least 0 and below 1.
    learning_rate, momentum, **common
        See :class:`MuonFamily`.

    Raises
    ------
    ValueError, TypeError
        Like :class:`Muon`.
    """

    beta2: float = arg(default=0.95, check=Real(least=0, below=1))
    positional = ("learning_rate", "momentum", "beta2")
    directions = Normalized
    squares: ClassVar[Any]


@register
class NorMuon(NormalizedFamily):
    r"""NorMuon: Muon whose rows have steps of equal size.

    .. math::
        h &= \mathrm{clip}(r g), \qquad m \leftarrow \mu m + (1 - \mu) h, \qquad
        d = (1 - \mu) h + \mu m, \qquad O = \mathrm{orth}(d) \\
        v_i &\leftarrow \beta_2 v_i + (1 - \beta_2) \frac{1}{n} \sum_j O_{ij}^2, \qquad
        \hat O_{ij} = \frac{O_{ij}}{\sqrt{v_i} + 10^{-10}} \\
        w &\leftarrow (1 - \eta \lambda) w - \eta s \frac{\hat O}{\|\hat O\|}

    The rows of an orthogonalized matrix with more rows than columns differ in length, so that some
    neurons move faster than others; the second moment of each row removes this. :math:`s` is
    :math:`0.2 \sqrt{m n}` for a matrix of m rows and n columns with ``adjust="rms"``, as in the
    paper, and :math:`\|O\| \sqrt{\max(1, m / n)}` with ``adjust="original"``, as in the authors'
    code. See :class:`~fastopt.optimizer.Muon` for orth, `split` and the weights of the fallback.

    Source: Li et al., "NorMuon: Making Muon more efficient and scalable", arXiv:2510.05491. The
    authors' code has the arguments ``adjust="original", coefficients="quintic"`` for matrices, and
    rounds d to bfloat16. Weights with more dimensions are matrices of the first axis by all others,
    like in pytorch_optimizer; the authors' code orthogonalizes and normalizes each matrix of the
    last two axes.

    State: the tuple :math:`(m, v)` of an array in the weight's shape and one of shape (rows, 1).

    Parameters
    ----------
    learning_rate : float or callable, optional
        Default 0.001; None uses the scheduler's ``base_lr``.
    momentum : float
        Decay rate :math:`\mu`, at least 0 and below 1. Default 0.95.
    beta2 : float
        Decay rate of :math:`v`, at least 0 and below 1. Default 0.95.
    **common
        Further arguments of :class:`~fastopt.optimizer.Muon`, with its defaults.

    Raises
    ------
    ValueError, TypeError
        Like :class:`~fastopt.optimizer.Muon`.

    Examples
    --------
    >>> import numpy as np
    >>> import fastopt
    >>> updater = fastopt.Updater(fastopt.NorMuon(lr=0.1, fallback="adamw"))
    >>> weight = np.zeros((3, 2))
    >>> updater.step(np.array([[3.0, 0.0], [0.0, -1.0], [0.0, 0.1]]), weight)
    >>> weight.round(3) + 0
    array([[-0.028,  0.   ],
           [ 0.   ,  0.028],
           [ 0.   , -0.028]])
    """

    squares = staticmethod(squares_of_rows)

    def slots(self, shape: Shape) -> Mapping[str, Shape]:
        """See :meth:`MatrixOptimizer.slots`."""
        return {"mom": shape, "var": (shape[0], 1)}


@register
class AdaMuon(NormalizedFamily):
    r"""AdaMuon: Muon of signs, with a second moment for each element.

    .. math::
        h &= \mathrm{clip}(r g), \qquad m \leftarrow \mu m + (1 - \mu) h, \qquad
        d = (1 - \mu) h + \mu m, \qquad O = \mathrm{orth}(\mathrm{sign}(d)) \\
        v &\leftarrow \beta_2 v + (1 - \beta_2) O^2, \qquad
        \hat O = \frac{O}{\sqrt{v} + 10^{-10}} \\
        w &\leftarrow (1 - \eta \lambda) w - \eta s \frac{\hat O}{\|\hat O\|}

    with :math:`s = 0.2 \sqrt{m n}` for a matrix of m rows and n columns, so that learning rates of
    AdamW can be used; ``adjust="original"`` is that of :class:`~fastopt.optimizer.NorMuon`. See
    :class:`~fastopt.optimizer.Muon` for orth, `split` and the weights of the fallback.

    Source: Si, Zhang and Shen, "AdaMuon: Adaptive Muon Optimizer", arXiv:2507.11005. The authors'
    code has ``coefficients="quintic"`` and one number for :math:`\mu` and :math:`\beta_2`, adds
    1e-8 to roots and norms, and rounds d to bfloat16.

    State: the tuple :math:`(m, v)` of an array in the weight's shape and one of shape (rows, size
    of a row).

    Parameters
    ----------
    learning_rate : float or callable, optional
        Default 0.001; None uses the scheduler's ``base_lr``.
    momentum : float
        Decay rate :math:`\mu`, at least 0 and below 1. Default 0.95.
    beta2 : float
        Decay rate of :math:`v`, at least 0 and below 1. Default 0.95.
    **common
        Further arguments of :class:`~fastopt.optimizer.Muon`, with its defaults.

    Raises
    ------
    ValueError, TypeError
        Like :class:`~fastopt.optimizer.Muon`.

    Examples
    --------
    >>> import numpy as np
    >>> import fastopt
    >>> updater = fastopt.Updater(fastopt.AdaMuon(lr=0.1, fallback="adamw"))
    >>> weight = np.zeros((2, 2))
    >>> updater.step(np.array([[3.0, 1.0], [0.5, -1.0]]), weight)
    >>> weight.round(3) + 0
    array([[-0.02, -0.02],
           [-0.02,  0.02]])
    """

    orthogonalizes_signs = True
    squares = staticmethod(np.square)

    def slots(self, shape: Shape) -> Mapping[str, Shape]:
        """See :meth:`MatrixOptimizer.slots`."""
        return {"mom": shape, "var": (shape[0], math.prod(shape[1:]))}


LEAST = 1e-8
"""Number of the authors that is added to norms."""

NORMS = "spectral", "sign", "rows", "rms"

BALL = "a norm and a radius, such as {'head': ('sign', 3000)}"


class _Extreme(Orthogonal["Scion"]):
    """Directions: the point of a ball that is farthest along the momentum."""

    def write(self, main: "Scion", update: Update) -> bool:
        """See :meth:`Directions.write <fastopt.optimizer.matrices.Directions.write>`."""
        index, direction = update.parameter, update.target
        self.average(main, update)
        norm, radius = main.ball(index, direction.shape)
        real, columns = direction.dtype.type, math.prod(direction.shape[1:])
        with np.errstate(all="ignore"):  # NaN and infinity propagate without a warning
            if norm == "spectral":
                radius /= math.sqrt(math.prod(direction.shape[2:]))
                for matrix in main.matrices(index, direction):
                    self.orthogonalize(main, matrix, radius * main.scale(*matrix.shape[-2:]))
            elif norm == "sign":
                np.sign(direction, out=direction)
                direction *= real(radius / columns)
            else:
                axes = None if norm == "rms" else tuple(range(1, direction.ndim))
                squares = np.square(direction, dtype=np.float64).mean(axes, keepdims=True)
                size = np.sqrt(squares) * (1 if norm == "rms" else columns) + LEAST
                direction *= (radius / size).astype(direction.dtype)
        return True


def _check_ball(name: str, value: object) -> tuple[str, float]:
    """Check a norm and a radius."""
    if not isinstance(value, (tuple, list)) or len(value) != 2:
        raise TypeError(f"{name} must be {BALL}, got {brief(value)}")
    return Choice(*NORMS)(name, value[0]), Real(least=0)(name, value[1])


@register
class Scion(MuonFamily):
    r"""Scion: steps of fixed size in a norm of each layer.

    .. math::
        h &= \mathrm{clip}(r g), \qquad m \leftarrow \mu m + (1 - \mu) h \\
        w &\leftarrow (1 - \eta \lambda) w - \eta \rho \, \mathrm{lmo}(m)

    The linear minimization oracle is the point of the unit ball of a norm that is farthest along m,
    for a weight of shape (n, c), or (n, c, k, l) with :math:`K = k l`:

    * ``"spectral"``: :math:`\sqrt{n / c} / K \cdot \mathrm{orth}(m)`, for hidden layers, see
      :class:`~fastopt.optimizer.Muon` for orth, `split`, and `adjust`;
    * ``"sign"``: :math:`\mathrm{sign}(m) / (c K)`, for the last layer, and for embeddings that it
      shares;
    * ``"rows"``: each row divided by :math:`\sqrt{c K}` times its Euclidean norm, for the last
      layer;
    * ``"rms"``: m divided by its root mean square, for vectors.

    ``wd=0`` is the unconstrained form of the paper. ``wd=1`` is the constrained one,
    :math:`w \leftarrow (1 - \eta) w - \eta \rho \, \mathrm{lmo}(m)`, which keeps each weight in a
    ball of radius :math:`\rho`.

    Source: Pethick et al., "Training Deep Learning Models with Norm-Constrained LMOs",
    arXiv:2502.07529, whose code has ``coefficients="quintic"``, rounds m to bfloat16, and names
    :math:`1 - \mu` the momentum.

    State: the array :math:`m`, in the weight's shape.

    Parameters
    ----------
    learning_rate : float or callable, optional
        Default 0.0002; None uses the scheduler's ``base_lr``.
    momentum : float
        Decay rate :math:`\mu`, at least 0 and below 1. Default 0.9.
    radius : float
        :math:`\rho` of the weights that `norms` does not select, at least 0: those with two or more
        dimensions have the norm ``"spectral"``, others ``"rms"``. Default 50.
    norms : dict of str to (str, float), optional
        Maps a regular expression for names of weights to a norm and its radius, for example
        ``{"head|embed": ("sign", 3000)}``. The first pattern that ``re.search`` finds in the name
        applies. Default None.
    nesterov, adjust
        See :class:`~fastopt.optimizer.Muon`. Defaults False and 'spectral'.
    **common
        Further arguments of :class:`~fastopt.optimizer.Muon`. Vectors need no fallback.

    Raises
    ------
    ValueError, TypeError
        Like :class:`~fastopt.optimizer.Muon`; also if a norm other than ``"rms"`` is selected for a
        weight with fewer than two dimensions.

    Examples
    --------
    >>> import numpy as np
    >>> import fastopt
    >>> scion = fastopt.Scion(0.1, radius=1.0, norms={"head": ("sign", 4.0)})
    >>> updater = fastopt.Updater(scion)
    >>> weights = {"hidden": np.zeros((2, 2)), "head": np.zeros((1, 2))}
    >>> grads = {"hidden": np.array([[3.0, 0.0], [0.0, -1.0]]), "head": np.array([[1.0, -5.0]])}
    >>> updater.step(grads, weights)
    >>> weights["hidden"].round(2) + 0
    array([[-0.1,  0. ],
           [ 0. ,  0.1]])
    >>> weights["head"]
    array([[-0.2,  0.2]])

    The output layer with another norm, whose steps are signs:

    >>> scion = fastopt.Scion(lr=0.1, norms={"output": ("sign", 2.0)})
    >>> updater, weight = fastopt.Updater(scion), np.zeros((2, 2))
    >>> updater.step({"output": np.array([[3.0, -1.0], [0.5, 2.0]])}, {"output": weight})
    >>> weight.round(2)
    array([[-0.1,  0.1],
           [-0.1, -0.1]])
    """

    takes_vectors = rounds_state = True
    learning_rate: RateAttribute = arg(default=0.0002)
    momentum: float = arg(default=0.9)
    radius: float = arg(default=50.0, check=Real(least=0))
    norms: Stored[Any, Mapping[str, tuple[str, float]] | None] = arg(
        default=None, check=ByPattern(f"pairs of {BALL}", _check_ball)
    )
    nesterov: bool = arg(default=False)
    adjust: Adjust = arg(default="spectral")
    positional = ("learning_rate", "momentum", "radius", "norms", "nesterov", "adjust")

    directions = _Extreme

    def check_shape(self, index: Index, shape: Shape) -> None:
        """See :meth:`MatrixOptimizer.check_shape`."""
        norm, _ = self.ball(index, shape)
        if norm == "spectral":
            super().check_shape(index, shape)

    def ball(self, index: Index, shape: Shape) -> tuple[str, float]:
        """Return the norm of a weight, and its radius."""
        usual = "spectral" if len(shape) > 1 else "rms", self.radius
        norm, radius = self.selected(self.norms, index, usual)
        if len(shape) < 2 and norm != "rms":
            raise ValueError(
                f"norms: {norm!r} needs weights of two or more dimensions, and "
                f"{self.name_of(index)!r} has shape {shape}: select ('rms', radius) for it"
            )
        return norm, radius
