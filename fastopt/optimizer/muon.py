"""Muon: momentum whose direction is made orthogonal, for weight matrices."""

import math
import re
from collections.abc import Collection, Mapping, Sequence
from itertools import accumulate
from typing import Any, ClassVar, Literal, Unpack

import numpy as np

from fastopt.arguments import Choice, Descriptions, Flag, Integer, Real, brief
from fastopt.engine.hyper import constant
from fastopt.engine.mixed_precision import has_master, split_state, to_float32
from fastopt.engine.newton_schulz import COEFFICIENTS, NewtonSchulz
from fastopt.engine.planner import Call
from fastopt.engine.validate import check_like, is_fortran, is_half, label
from fastopt.interrupts import uninterrupted
from fastopt.kernels.devices import header, is_cuda
from fastopt.kernels.layout import real_of
from fastopt.kernels.rule import Hyper, Scalar, State, Step, rule
from fastopt.kernels.scalars import rescaled
from fastopt.kernels.table import Table, launch
from fastopt.notices import warn_user
from fastopt.optimizer.keywords import MatrixArguments, Rate
from fastopt.optimizer.optimizer import Array, Index, Optimizer, create, register
from fastopt.sparse import RowSparse

__all__ = ["Muon", "muon_descent", "muon_momentum"]

SCALES = ("rescale_grad", "clip_gradient", "momentum", "nesterov", "idx2name", "maximize", "seed")
"""Attributes that the momentum's part has of a Muon."""

COUNTED = ("_index_update_count", "begin_num_update", "idx2name", "param_dict")
TABLES = ("lr_mult", "wd_mult")
RATES = ("lr", "lr_scheduler", "wd", "seed", "rounding")
SHARED = (*COUNTED, *TABLES, "rescale_grad", "row_decay", "masters_given")
"""Attributes that a fallback has of a Muon, whatever its arguments."""

NAMED = (*RATES, "clip_gradient", "multi_precision", "state_dtype", "maximize")
"""Attributes that it has of it too if it is given by name."""


@rule(
    state=("mom",),
    hyper=("rescale_grad", "clip_gradient", "beta", "one_minus_beta", "fresh", "kept"),
)
def muon_momentum(weight: Scalar, grad: Scalar, state: State, h: Hyper) -> Step:
    """Moving average of the gradient; the direction takes the place of the weight."""
    grad = rescaled(grad, h)
    mom = h.beta * state[0] + h.one_minus_beta * grad
    return h.fresh * grad + h.kept * mom, (mom,)


@rule(hyper=("lr", "shrink"))
def muon_descent(weight: Scalar, grad: Scalar, state: State, h: Hyper) -> Step:
    """Decay, and descent along a direction."""
    return h.shrink * weight - h.lr * grad, ()


class _Momentum(Optimizer):
    """First part of a step: ``weight`` becomes the direction, and the state is the momentum."""

    rule = muon_momentum
    momentum: float
    nesterov: bool

    @constant
    def hyper(self, t: int, lr: float, wd: float) -> Mapping[str, float]:
        """See :meth:`Optimizer.hyper <fastopt.optimizer.Optimizer.hyper>`."""
        beta, ahead = self.momentum, self.nesterov
        return {
            "beta": beta,
            "one_minus_beta": 1 - beta,
            "fresh": 1 - beta if ahead else 0.0,
            "kept": beta if ahead else 1.0,
        }


class _Descent(Optimizer):
    """Last part of a step, along the direction; it counts the step and finds its rate."""

    rule = muon_descent

    @constant
    def hyper(self, t: int, lr: float, wd: float) -> Mapping[str, float]:
        """See :meth:`Optimizer.hyper <fastopt.optimizer.Optimizer.hyper>`."""
        return {"shrink": 1 - lr * wd}


class _Part:
    """An optimizer that has some attributes of another one.

    Parameters
    ----------
    optimizer : Optimizer
        It must not be used but through this.
    names : sequence of str
        The attributes.
    """

    def __init__(self, optimizer: Optimizer, names: Sequence[str]) -> None:
        self.optimizer, self.names = optimizer, names
        self._version = self._tables = -1

    def follow(self, main: Any) -> Any:
        """The optimizer, with the attributes that `main` has now."""
        if self._version != main.version:
            own, found = vars(self.optimizer), vars(main)
            own.update((name, found[name]) for name in self.names)
            own["unchecked"] = False  # the names of multipliers are checked for all
            if self._tables != main.multipliers_version:
                self.optimizer._changed_tables()
            else:
                self.optimizer._changed()
            self._version, self._tables = main.version, main.multipliers_version
        return self.optimizer


class _Work:
    """Buffers and parts of a Muon, which are made again in another process.

    Parameters
    ----------
    main : Muon
        The optimizer.
    """

    def __init__(self, main: "Muon") -> None:
        self.given = main.fallback
        self.fallback: _Part | None = None
        if isinstance(main.fallback, Optimizer):
            self.fallback = _Part(main.fallback, SHARED)
        elif main.fallback is not None:
            self.fallback = _Part(create(main.fallback), (*SHARED, *NAMED))
        self._momentum = _Part(_Momentum(), SCALES)
        self._descent = _Part(_Descent(), (*COUNTED, *TABLES, *RATES))
        self._descent.optimizer._direct().launcher = self._launch
        self._orthogonalize = NewtonSchulz()
        self._directions: dict[Any, Array] = {}
        self._now: Any = None

    def step(self, main: "Muon", index: Index, weight: Array, grad: Any, mom: Any) -> None:
        """Update a weight; its direction is computed once the step is counted."""
        real = np.dtype(real_of(weight.dtype))
        fortran = weight.ndim == 2 and is_fortran(weight)
        direction = self._directions.get((weight.shape, real, fortran))
        if direction is None:
            direction = np.empty(weight.shape, real, order="F" if fortran else "C")
            self._directions[weight.shape, real, fortran] = direction
        matrices = main.matrices(index, direction)
        for matrix in matrices:
            self._orthogonalize.reserve(matrix)
        self._now = main, index, direction, grad, mom, matrices
        try:
            descent = self._descent.follow(main)._direct()
            descent.update(index, weight, direction, None, masters=False)
        finally:
            self._now = None

    def _launch(self, tables: Sequence[Table]) -> None:
        """Compute the direction, then descend along it."""
        main, index, direction, grad, mom, matrices = self._now
        momentum = self._momentum.follow(main)
        momentum._index_update_count[index] = main._index_update_count[index] - 1
        momentum._direct().update(index, direction, grad, mom, masters=False)
        for matrix in matrices:
            scale = main.scale(*matrix.shape)
            self._orthogonalize(matrix, matrix, main.coefficients, main.steps, main.eps, scale)
        launch(tables)


def _check_fallback(name: str, value: Any) -> Any:
    """None, the name of an optimizer, or an optimizer with a rule."""
    if value is None:
        return None
    made = create(value)
    kind = type(made).__name__
    if not made.native:
        raise TypeError(f"{name} must be an optimizer with a rule, got {kind}")
    if made.accumulates:
        raise TypeError(f"{name} cannot be {kind}, which adds up gradients of several calls")
    if made.sparse_decay != "touched":
        raise ValueError(f"{name} must have sparse_decay='touched', got {made.sparse_decay!r}")
    return value


def _pattern(name: str, value: Any) -> str:
    """A regular expression."""
    if not isinstance(value, str):
        raise TypeError(f"{name} must be a regular expression, got {brief(value)}")
    try:
        re.compile(value)
    except re.error as error:
        raise ValueError(f"{name} is not a regular expression: {error}") from None
    return value


def _check_patterns(name: str, value: Any) -> tuple[str, ...] | None:
    """Regular expressions: one, several or none."""
    if value is None:
        return None
    if isinstance(value, str):
        value = (value,)
    if not isinstance(value, (tuple, list)):
        raise TypeError(f"{name} must be regular expressions, got {brief(value)}")
    return tuple(_pattern(f"{name}[{k}]", each) for k, each in enumerate(value))


def _check_split(name: str, value: Any) -> tuple[tuple[str, int | tuple[int, ...]], ...] | None:
    """Pairs of a regular expression and the parts: their number, or the rows of each."""
    if value is None:
        return None
    if isinstance(value, Mapping):
        value = tuple(value.items())
    if not isinstance(value, (tuple, list)) or not all(
        isinstance(pair, (tuple, list)) and len(pair) == 2 for pair in value
    ):
        raise TypeError(f"{name} must map regular expressions to parts, got {brief(value)}")
    return tuple((_pattern(name, key), _check_parts(f"{name}[{key!r}]", p)) for key, p in value)


def _check_parts(name: str, parts: Any) -> int | tuple[int, ...]:
    whole = Integer(least=1)
    if isinstance(parts, (tuple, list)) and parts:
        return tuple(whole(f"{name}[{k}]", part) for k, part in enumerate(parts))
    return whole(name, parts)


@register
class Muon(Optimizer):
    r"""Momentum with orthogonalized steps, for weight matrices.

    .. math::
        h &= \mathrm{clip}(r g) \\
        m &\leftarrow \mu m + (1 - \mu) h \\
        d &= (1 - \mu) h + \mu m \\
        w &\leftarrow (1 - \eta \lambda) w - \eta s \, \mathrm{orth}(d)

    Without `nesterov` :math:`d = m`. With the singular value decomposition :math:`d = U S V^T`,
    :math:`\mathrm{orth}(d)` approximates :math:`U V^T` by `steps` iterations
    :math:`X \leftarrow a X + (b A + c A^2) X` with :math:`A = X X^T`, which start with
    :math:`X = d / (\sigma \max(\|d\|_F, \epsilon))`. With ``coefficients="polar"`` the numbers
    a, b and c are those of Polar Express, another triple in each step, and
    :math:`\sigma = 1.02`; with ``"quintic"`` they are 3.4445, -4.775 and 2.0315 in every step, as
    in torch.optim.Muon and optax, which leaves singular values between about 0.7 and 1.2, and
    :math:`\sigma = 1`. A matrix with more rows than columns is transposed before and after; where
    one side is at least three times the other, the iteration runs on the products of its shorter
    side.

    For a matrix of n rows and m columns :math:`s` is :math:`0.2 \sqrt{\max(n, m)}` with
    ``adjust="rms"``, so that learning rates and weight decays of AdamW fit, and
    :math:`\sqrt{\max(1, n / m)}` with ``adjust="original"``.

    Sources: Jordan et al., "Muon: An optimizer for hidden layers in neural networks", 2024; Amsel
    et al., "The Polar Express", arXiv:2505.16932; Liu et al., "Muon is Scalable for LLM
    Training", arXiv:2502.16982 (``adjust="rms"``).

    Weights with more than two dimensions are updated as matrices of their first axis by all
    others, as kernels of convolutions are. Weights with fewer dimensions, embeddings and output
    layers belong to a `fallback`: they raise an error, or are chosen by `fallback_for`.

    The iteration runs in float32, and in float64 for float64 weights, by matrix products of NumPy.
    Their last bits may depend on the number of threads of NumPy's BLAS. A step of a square matrix
    of n rows takes about :math:`10 n^3` multiplications.

    State of a parameter: the array :math:`m`, like the weight; that of the fallback for its
    weights.

    Parameters
    ----------
    learning_rate : float or callable, optional
        Default 0.001; None keeps a scheduler's own rate.
    momentum : float
        Decay rate :math:`\mu`, at least 0 and below 1. Default 0.95.
    nesterov : bool
        Nesterov's momentum. Default True.
    coefficients : str
        'polar' or 'quintic'. Default 'polar'.
    steps : int
        Iterations, from 1 to 100. After the fifth one of 'polar', its last triple is repeated.
        Default 5.
    eps : float
        Smallest norm :math:`\epsilon` that a direction is divided by, at least 1e-30.
        Default 1e-7.
    adjust : str
        'rms' or 'original'. Default 'rms'.
    split : dict of str to int or sequence of int, optional
        Weights that are several matrices, one below the other, such as the joined queries, keys
        and values of attention, or its heads: by a regular expression over names, the number of
        equal parts along the first axis, or the rows of each. Each is orthogonalized by itself.
        The first pattern counts that ``re.search`` finds in the name, which is that of
        ``idx2name``, of the object in ``param_dict``, or the index.
    fallback : Optimizer or str, optional
        What updates weights with fewer than two dimensions, and those of `fallback_for`. It
        counts with this optimizer, whose `rescale_grad`, names and multipliers hold for it too.
        A name stands for an optimizer with the same learning rate, schedule, weight decay, clip
        and precision; an Optimizer must serve this one alone. Default None: such weights are
        errors.
    fallback_for : str or sequence of str, optional
        Regular expressions over names of weights that the fallback updates.
    **common
        Arguments of :class:`~fastopt.optimizer.Optimizer`.

    Raises
    ------
    ValueError
        An argument is NaN or out of range, or a pattern is not a regular expression; or
        `fallback_for` comes without `fallback`. In an update: a weight has fewer than two
        dimensions and there is no fallback, or cannot be split so.
    TypeError
        An argument has the wrong type, or the fallback has no rule. In an update: the gradient of
        a matrix is row-sparse, or the matrix is on a CUDA device.

    Examples
    --------
    >>> import numpy as np
    >>> from fastopt import optimizer
    >>> made = optimizer.Muon(learning_rate=0.1, adjust="original", fallback="adamw")
    >>> updater = optimizer.get_updater(made)
    >>> weight, bias = np.zeros((2, 2), np.float32), np.zeros(2, np.float32)
    >>> grads = [np.array([[3, 0], [0, -1]], np.float32), np.ones(2, np.float32)]
    >>> updater([0, 1], grads, [weight, bias])
    >>> weight.round(2) + 0
    array([[-0.11,  0.  ],
           [ 0.  ,  0.1 ]], dtype=float32)
    >>> bias.round(2)
    array([-0.1, -0.1], dtype=float32)
    """

    rule = muon_momentum
    ascends = True
    arguments: ClassVar[Descriptions] = {
        "momentum": Real(least=0, below=1),
        "nesterov": Flag(),
        "coefficients": Choice(*COEFFICIENTS),
        "steps": Integer(least=1, most=100),
        "eps": Real(least=1e-30),
        "adjust": Choice("rms", "original"),
        "split": _check_split,
        "fallback": _check_fallback,
        "fallback_for": _check_patterns,
    }

    def __init__(
        self,
        learning_rate: Rate = 0.001,
        momentum: float = 0.95,
        nesterov: bool = True,
        coefficients: Literal["polar", "quintic"] = "polar",
        steps: int = 5,
        eps: float = 1e-7,
        adjust: Literal["rms", "original"] = "rms",
        split: Mapping[str, int | Sequence[int]] | None = None,
        fallback: Optimizer | str | None = None,
        fallback_for: str | Sequence[str] | None = None,
        **common: Unpack[MatrixArguments],
    ) -> None:
        self.momentum = momentum
        self.nesterov = nesterov
        self.coefficients = coefficients
        self.steps = steps
        self.eps = eps
        self.adjust = adjust
        self.split: Any = split
        self.fallback = fallback
        self.fallback_for: Any = fallback_for
        super().__init__(learning_rate=learning_rate, **common)

    def check_together(self) -> None:
        """See :meth:`Optimizer.check_together <fastopt.optimizer.Optimizer.check_together>`."""
        super().check_together()
        if self.master != "float32":
            raise ValueError("Muon keeps masters in float32: master must be 'float32'")
        if self.fallback is None and self.fallback_for:
            raise ValueError("fallback_for needs a fallback: fallback='adamw' or an Optimizer")
        if isinstance(self.fallback, Optimizer) and self.fallback.maximize != self.maximize:
            raise ValueError(
                f"maximize is {self.maximize}, that of the fallback {self.fallback.maximize}"
            )

    # Which weights

    def _name(self, index: Index) -> str:
        """Name of a parameter, or its index."""
        own = getattr(self.param_dict.get(index), "name", None)
        return self.idx2name.get(index, own if isinstance(own, str) else str(index))

    def falls_back(self, index: Index, weight: Array) -> bool:
        """Whether the fallback updates a weight.

        Raises
        ------
        ValueError
            The weight is not a matrix, and there is no fallback.
        """
        shape = header(weight).shape
        if self.fallback is not None:
            name = self._name(index)
            return len(shape) < 2 or any(re.search(each, name) for each in self.fallback_for or ())
        if len(shape) < 2:
            raise ValueError(
                f"{label(index, self.idx2name)}: Muon updates weights of two or more dimensions, "
                f"got shape {shape}; pass fallback='adamw', or an Optimizer, for others"
            )
        return False

    def _sizes(self, index: Index, shape: tuple[int, ...]) -> Sequence[int]:
        """Rows of the matrices of a weight."""
        if self.split is None:
            return shape[:1]
        name, rows = self._name(index), shape[0]
        parts = next((parts for each, parts in self.split if re.search(each, name)), 1)
        sizes = (rows // parts,) * parts if isinstance(parts, int) else parts
        if sum(sizes) != rows:
            raise ValueError(
                f"{label(index, self.idx2name)}: {rows} rows of shape {shape} cannot be split "
                f"into {parts}"
            )
        return sizes

    def matrices(self, index: Index, array: Array) -> list[Array]:
        """Views of the matrices in an array like a weight, which are orthogonalized one by one."""
        flat = array if array.ndim == 2 else array.reshape(len(array), math.prod(array.shape[1:]))
        ends = accumulate(sizes := self._sizes(index, array.shape))
        return [flat[end - size : end] for end, size in zip(ends, sizes, strict=True)]

    def check_multipliers(self, indices: Sequence[Index], also: Collection[Index] = ()) -> None:
        """See :meth:`Optimizer.check_multipliers`; patterns that match no name warn too."""
        super().check_multipliers(indices, also)
        if self.unchecked:
            return
        known = {*indices, *also, *self._index_update_count, *self.idx2name, *self.param_dict}
        names = sorted(map(self._name, known))
        split = [pattern for pattern, _ in self.split or ()]
        for role, patterns in (("fallback_for", self.fallback_for or ()), ("split", split)):
            for pattern in patterns:
                if not any(re.search(pattern, name) for name in names):
                    words = f"{role}: {pattern!r} has no effect: it matches none of {brief(names)}"
                    warn_user(words)

    def scale(self, rows: int, columns: int) -> float:
        """Factor of an orthogonal matrix of this shape."""
        if self.adjust == "rms":
            return 0.2 * math.sqrt(max(rows, columns))
        return math.sqrt(max(1.0, rows / columns)) if columns else 1.0

    def _check_matrix(self, index: Index, weight: Array) -> None:
        """Raise unless a weight can be updated, whatever its gradient and state."""
        if is_cuda(weight):
            raise TypeError(
                f"{label(index, self.idx2name)}: Muon computes with NumPy, and the weight is on a "
                "CUDA device"
            )
        self._sizes(index, weight.shape)

    def dense_gradient(self, index: Index, weight: Array, grad: RowSparse) -> Any:
        """See :meth:`Optimizer.dense_gradient`; a fallback takes row-sparse gradients."""
        if self.falls_back(index, weight):
            return grad
        raise TypeError(
            f"{label(index, self.idx2name)}: Muon takes dense gradients of matrices, got a "
            "row-sparse one; pass fallback='adamw', or an Optimizer, and fallback_for= a pattern "
            "of its name"
        )

    # States

    def create_state(self, index: Index, weight: Array) -> Any:
        """See :meth:`Optimizer.create_state <fastopt.optimizer.Optimizer.create_state>`."""
        if self.falls_back(index, weight):
            return self._fallback().create_state(index, weight)
        self._check_matrix(index, weight)
        return super().create_state(index, weight)

    def create_state_multi_precision(self, index: Index, weight: Array) -> Any:
        """See :meth:`Optimizer.create_state_multi_precision`."""
        if self.falls_back(index, weight):
            return self._fallback().create_state_multi_precision(index, weight)
        return super().create_state_multi_precision(index, weight)

    def _warn_of_halves(self, weight: Array) -> None:
        if self.rounding != "stochastic":
            super()._warn_of_halves(weight)

    def restore(self, attributes: Mapping[str, Any]) -> None:
        """See :meth:`Optimizer.restore`; a fallback stays the same object."""
        now, saved = vars(self).get("fallback"), attributes.get("fallback")
        if isinstance(now, Optimizer) and isinstance(saved, type(now)) and now is not saved:
            now.restore(saved.__getstate__())
            attributes = {**attributes, "fallback": now}
        super().restore(attributes)

    # Steps

    def _working(self) -> _Work:
        """Buffers and parts of this process."""
        work = vars(self).get("work")
        if work is None or work.given is not self.fallback:
            work = vars(self)["work"] = _Work(self)
        return work

    def _fallback(self) -> Any:
        """The fallback, which must be there, with what it has of this optimizer."""
        part = self._working().fallback
        assert part is not None
        return part.follow(self)

    def check_calls(self, calls: Sequence[Call]) -> None:
        """See :meth:`Optimizer.check_calls <fastopt.optimizer.Optimizer.check_calls>`."""
        for index, weight, grad, state in calls:
            if self.falls_back(index, weight):
                if grad.dtype != weight.dtype and not is_half(weight):
                    grad = to_float32(grad)  # of a weight with a half-precision copy
                self._fallback().check_calls([(index, weight, grad, state)])
                continue
            words, inner = label(index, self.idx2name), state
            self._get_lr(index), self._get_wd(index)
            self._check_matrix(index, weight)
            exact = weight
            if has_master(self, weight):
                (exact, *_), inner = split_state(self, words, weight, state)
            dtypes = np.dtype(real_of(exact.dtype)).name, "bfloat16"
            check_like(words, "state 'mom'", header(inner), dtypes, weight.shape)

    def update(self, index: Index, weight: Array, grad: Any, state: Any) -> None:
        """See :meth:`Optimizer.update <fastopt.optimizer.Optimizer.update>`."""
        with self.lock, uninterrupted:
            if self.falls_back(index, weight):
                self._fallback().update(index, weight, grad, state)
                return
            self._check_matrix(index, weight)
            if isinstance(grad, RowSparse):
                self.dense_gradient(index, weight, grad)
            if is_half(weight):
                grad = to_float32(grad)
            self._working().step(self, index, weight, grad, state)

    def update_in_python(
        self, index: Index, weight: Array, grad: Any, state: Any, copy: Array | None
    ) -> None:
        """See :meth:`Optimizer.update_in_python`; a fallback has masters of its own."""
        if copy is None and self.falls_back(index, weight):
            with self.lock:
                self._fallback().update_multi_precision(index, weight, grad, state)
        else:
            super().update_in_python(index, weight, grad, state, copy)
