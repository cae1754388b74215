"""Base class of optimizers for weight matrices, with a fallback for others; orthogonalization."""

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import repeat
from operator import index as as_index
from types import MappingProxyType
from typing import Any, ClassVar, Generic, Literal, NamedTuple, TypeVar

import numpy as np
from numpy.typing import ArrayLike

from fastopt import arguments
from fastopt._engine import validate
from fastopt._engine.hyper_rows import multipliers
from fastopt._engine.mixed_precision import has_master, split_state, to_float32
from fastopt._engine.newton_schulz import COEFFICIENTS, NewtonSchulz, Polynomial
from fastopt._engine.parameters import Call
from fastopt._engine.validate import Grad, label
from fastopt._interrupts import uninterrupted
from fastopt._kernels.device_memory import like
from fastopt._kernels.devices import header, is_cuda
from fastopt._kernels.layout import real_of
from fastopt._notices import warn_user
from fastopt.arguments import FLAG, Description, Descriptions, Integer, Real, Stored, arg, local
from fastopt.kernels import variants
from fastopt.kernels.rule import Hyper, Rule, Scalar, State, Step, rule, scalar
from fastopt.kernels.scalars import rescaled, same_sign
from fastopt.kernels.variants import Traits, Variant
from fastopt.optimizer.optimizer import (
    FOLLOWED,
    MULTIPLIERS,
    Array,
    Index,
    Optimizer,
    RateAttribute,
    constant,
    create,
    reject_reentrant,
)
from fastopt.optimizer.sgd import SGD
from fastopt.sparse import RowSparse

Shape = tuple[int, ...]
Arrays = tuple[Array, ...]
Main = TypeVar("Main", bound="MatrixOptimizer", contravariant=True)

SCALES = ("rescale_grad", "clip_gradient", "maximize", "idx2name")
"""Attributes that :class:`Rescaled` copies from the optimizer."""

ROUNDED = ("seed", "rounding", "idx2name")
"""Attributes that the step along a direction shares with the optimizer."""

SHARED = (*FOLLOWED, *MULTIPLIERS)
"""Attributes that every fallback shares with the optimizer."""

NAMED = (
    *("lr", "lr_scheduler", "wd", "corrected_decay", "seed", "rounding"),
    *("clip_gradient", "multi_precision", "state_dtype", "maximize"),
)
"""Further attributes that a fallback given by name shares."""


@rule(hyper=("lr", "shrink"))
def descent(weight: Scalar, grad: Scalar, state: State, h: Hyper) -> Step:
    """Weight decay, and a step along a direction."""
    return h.shrink * weight - h.lr * grad, ()


@scalar
def _undecayed(weight: Scalar, grad: Scalar, state: State, h: Hyper) -> Step:
    return weight - h.lr * grad, ()


@rule(hyper=("lr", "shrink"))
def descent_and_decay(weight: Scalar, grad: Scalar, state: State, h: Hyper) -> Step:
    """Step along a direction, and weight decay after it."""
    return h.shrink * (weight - h.lr * grad), ()


def _aligned_sums(weight: Scalar, grad: Scalar, state: State, h: Hyper) -> State:
    aligned = same_sign(weight, rescaled(grad, h))
    return type(weight)(1) if aligned else type(weight)(0), type(weight)(1)


@rule(
    hyper=("rescale_grad", "clip_gradient", "aligned_scale"),
    passes=((_aligned_sums, variants.aligned_finish),),
)
def mask(weight: Scalar, grad: Scalar, state: State, h: Hyper) -> Step:
    """Set a direction to 0 where its sign is not that of the gradient, and scale up the rest."""
    return -variants.cautious_move(-weight, rescaled(grad, h), h), ()


@scalar
def _direction(weight: Scalar, grad: Scalar, h: Hyper) -> Scalar:
    return grad


OF_DESCENT = Traits(_direction, variants.shrunk_by, from_zero=True)

DESCENTS = (descent, OF_DESCENT), (descent_and_decay, OF_DESCENT._replace(step=_undecayed))
"""Last part of a step with its traits, with decay before it and after it."""


class _Mask(Optimizer):
    """Middle part of a step of a cautious variant; ``weight`` is the direction."""

    rule = mask


class _Descent(Optimizer):
    """Last part of a step, along the direction."""

    cautious_decay = False
    decays_last = False
    fields: ClassVar[Mapping[str, float]] = MappingProxyType({})
    """Hyper-parameters of the present step."""

    @property
    def rule(self) -> Rule:
        """Descent, with decay of all weights or cautious decay."""
        return variants.varied(
            *DESCENTS[self.decays_last], Variant(cautious_decay=self.cautious_decay)
        )

    @constant
    def hyper(self, t: int, lr: float, wd: float) -> Mapping[str, float]:
        """See :meth:`Optimizer.hyper <fastopt.optimizer.Optimizer.hyper>`."""
        return self.fields

    def take(self, fields: Mapping[str, float]) -> None:
        """Take other hyper-parameters."""
        if fields != self.fields:
            vars(self)["fields"] = fields
            self._direct(False).refill()


class Update(NamedTuple):
    """A step of one weight."""

    parameter: Index
    weight: Array
    target: Array
    """Memory for the direction; the weight itself for a step in place."""
    grad: Array
    state: Arrays


class Directions(Generic[Main]):
    """Abstract base of what computes the directions of steps, in buffers of this process."""

    rescales: ClassVar[bool] = True
    """Whether :meth:`write` gets gradients that are rescaled and clipped, in C order."""

    skips_empty: ClassVar[bool] = True
    """Whether steps of weights without elements are only counted."""

    def reserve(self, main: Main, index: Index, direction: Array) -> None:
        """Allocate buffers for the step of a weight, before anything changes."""

    def write(self, main: Main, update: Update) -> bool:
        """Write the direction and the state; return whether to step along the direction."""
        raise NotImplementedError

    def fits(self, main: Main, weight: Array, grad: Array, state: Arrays) -> bool:
        """Whether :meth:`step_in_place` can do a step, without an array for its direction."""
        return False

    def step_in_place(self, main: Main, update: Update, rates: tuple[float, float]) -> None:
        """Update the weight, with the factors ``shrink`` and ``lr`` in `rates`."""
        raise NotImplementedError


@dataclass(eq=False)
class Part:
    """An inner optimizer that shares some attributes of another optimizer.

    Parameters
    ----------
    optimizer : Optimizer
        The inner optimizer, which must not be used otherwise.
    names : sequence of str
        Names of the shared attributes.
    source : Optimizer, optional
        Optimizer of the same class whose other attributes the inner optimizer has.
    """

    optimizer: Optimizer
    names: Sequence[str]
    source: Optimizer | None = None
    _version: tuple[int, int] = (-1, -1)
    _tables: int = -1

    def follow(self, main: Optimizer) -> Any:
        """Return the optimizer with the current attributes of `main`, and of the source."""
        version = main.version, -1 if self.source is None else self.source.version
        if self._version != version:
            fields, of_main = vars(self.optimizer), vars(main)
            if self.source is not None:
                of = vars(self.source)
                fields.update((name, of[name]) for name in of if name not in main.transient)
            fields.update((name, of_main[name]) for name in self.names)
            fields["unchecked"] = False  # `main` checks the multipliers
            for name in {*main.by_index} & {*self.names}:
                of_main[name].add_owner(self.optimizer)
            if self._tables != main.multipliers_version:
                self.optimizer._changed_tables()
            else:
                self.optimizer._changed()
            self._version, self._tables = version, main.multipliers_version
        return self.optimizer

    def step(
        self, main: Optimizer, index: Index, count: int, weight: Array, grad: Array, state: object
    ) -> None:
        """Update `weight`, which has been updated `count` times before."""
        optimizer = self.follow(main)
        optimizer._index_update_count[index] = count
        optimizer._direct(False).update(index, weight, grad, state)


class Rescaled:
    """Rescales and clips gradients, by a step of SGD from 0 with a learning rate of 1."""

    def __init__(self) -> None:
        self._descent = Part(SGD(learning_rate=1.0), SCALES)
        self._kept: dict[Any, Array] = {}

    def reserve(self, direction: Array) -> None:
        """Allocate a gradient with the shape and dtype of `direction`, in C order."""
        if (direction.shape, direction.dtype) not in self._kept:
            made = np.empty(direction.shape, direction.dtype)
            self._kept[direction.shape, direction.dtype] = made

    def __call__(self, main: Optimizer, index: Index, direction: Array, grad: Array) -> Array:
        """Return the gradient, in a buffer that is reused for the next one of this shape."""
        gradient = self._kept[direction.shape, direction.dtype]
        gradient.fill(0)
        self._descent.step(main, index, 0, gradient, grad, None)
        return np.negative(gradient, out=gradient)


class _Work:
    """Buffers and inner optimizers of a matrix optimizer, which belong to one process.

    Parameters
    ----------
    main : MatrixOptimizer
        The optimizer.
    """

    def __init__(self, main: "MatrixOptimizer") -> None:
        self.fallback: Part | None = None
        if isinstance(main.fallback, Optimizer) and main.overridden is not None:
            self.fallback = _twin(main.fallback, main.overridden)  # as it has other multipliers
        elif isinstance(main.fallback, Optimizer):
            vars(main)["fallback"] = main.fallback.claimed(main)
            self.fallback = Part(main.fallback, SHARED)
        elif main.fallback is not None:
            self.fallback = Part(create(main.fallback), (*SHARED, *NAMED))
        self.given = main.fallback
        decay = ["cautious_decay"] * main._has_argument("cautious_decay")
        self._last = _Descent()
        self._last.decays_last = main.decays_last
        self._descent = Part(self._last, (*ROUNDED, *decay))
        self._mask = Part(_Mask(), SCALES)
        self._rescaled = Rescaled()
        self._directions = main.directions()
        self._kept: dict[Any, Array] = {}
        self.slots: dict[Shape, Mapping[str, Shape]] = {}
        self.slots_version = -1

    def _reserved(self, main: "MatrixOptimizer", index: Index, weight: Array) -> Array:
        """Return memory for a direction, after all allocations and checks of the step."""
        real = np.dtype(real_of(weight.dtype))
        fortran = weight.ndim == 2 and validate.is_fortran(weight)
        direction = self._kept.get((weight.shape, real, fortran))
        if direction is None:
            direction = np.empty(weight.shape, real, order="F" if fortran else "C")
            self._kept[weight.shape, real, fortran] = direction
        if self._directions.rescales:
            self._rescaled.reserve(direction)
        self._directions.reserve(main, index, direction)
        self._descent.follow(main)._direct(False).check([(index, weight, direction, None)])
        return direction

    def step(
        self, main: "MatrixOptimizer", index: Index, weight: Array, grad: Array, state: Arrays
    ) -> None:
        """Update a weight; its direction is computed after the step is counted."""
        directions = self._directions
        in_place = directions.fits(main, weight, grad, state)
        direction = weight if in_place else self._reserved(main, index, weight)
        counts = main._index_update_count
        before, largest = counts.get(index), counts.largest
        known = main.snapshot() if main.per_index else None
        try:
            main._update_count(index)
            lr, wd = main.rates(index)
            shrink = 1 - lr * wd
            if in_place:
                update = Update(index, weight, weight, grad, state)
                directions.step_in_place(main, update, (shrink, lr))
                return
            if not weight.size and directions.skips_empty:
                return
            exact = self._rescaled(main, index, direction, grad) if directions.rescales else grad
            if directions.write(main, Update(index, weight, direction, exact, state)):
                if vars(main).get("cautious"):
                    self._mask.step(main, index, 0, direction, grad, None)
                self._last.take({"shrink": shrink, "lr": lr})
                self._descent.step(main, index, counts[index] - 1, weight, direction, None)
        except BaseException:
            if known is not None:
                main.put_back(known)
            counts.largest = largest
            if before is None:
                counts.pop(index, None)
            else:
                counts[index] = before
            raise


def _twin(fallback: Optimizer, overridden: frozenset[str]) -> Part:
    """Return a copy of the fallback for the weights of a group, with overridden attributes."""
    kind = type(fallback)
    made = kind.__new__(kind)
    made._start()
    names = [name for name in NAMED if name in overridden]
    names += ["lr_scheduler"] * ("lr" in overridden)  # the group's learning rate is a number
    return Part(made, (*SHARED, *names), fallback)


def _has(array: Any, shape: Shape, exact: Array) -> bool:
    """Whether an array is writeable, in C order, and has this shape and the dtype of `exact`."""
    usual = type(array) is np.ndarray and array.shape == shape and array.dtype == exact.dtype
    return usual and array.flags.carray


def _check_fallback(name: str, value: str | Optimizer | None) -> Any:
    """Check a fallback: None, the name of an optimizer, or an optimizer with a rule."""
    if value is None:
        return None
    made = create(value)
    kind = type(made).__name__
    if not made.native:
        raise TypeError(f"{name} must be an optimizer with a rule, got {kind}")
    if made.batches is not None:
        raise TypeError(f"{name} cannot be {kind}, which adds up gradients of several calls")
    if made.sparse_decay != "touched":
        raise ValueError(f"{name} must have sparse_decay='touched', got {made.sparse_decay!r}")
    return value


def _check_patterns(name: str, value: object) -> tuple[str, ...] | None:
    """Check one regular expression, several, or None."""
    if value is None:
        return None
    if isinstance(value, str):
        value = (value,)
    if not isinstance(value, (tuple, list)):
        raise TypeError(f"{name} must be regular expressions, got {arguments.brief(value)}")
    return tuple(arguments.regex(f"{name}[{k}]", text) for k, text in enumerate(value))


@dataclass(frozen=True)
class ByPattern:
    """Values by regular expressions for names of weights, or None; they become pairs."""

    kind: str
    check: Description

    def __call__(self, name: str, value: object) -> tuple[tuple[str, Any], ...] | None:
        """Return the checked value."""
        if value is None:
            return None
        pairs = tuple(value.items()) if isinstance(value, Mapping) else value
        if not isinstance(pairs, (tuple, list)) or not all(
            isinstance(pair, (tuple, list)) and len(pair) == 2 for pair in pairs
        ):
            raise TypeError(
                f"{name} must map regular expressions to {self.kind}, got {arguments.brief(value)}"
            )
        return tuple(
            (arguments.regex(name, key), self.check(f"{name}[{key!r}]", entry))
            for key, entry in pairs
        )


Coefficients = Literal["polar", "polar_express", "quintic"] | Polynomial
"""Name of the polynomials of an orthogonalization, or the coefficients of one."""


def _coefficients(name: str, value: object) -> Coefficients:
    """Check the polynomials of an orthogonalization."""
    if not isinstance(value, (tuple, list)):
        scheme: Any = arguments.choice(name, value, *COEFFICIENTS)
        return scheme  # type: ignore[no-any-return]
    if len(value) != 3:
        raise ValueError(f"{name} must be 3 numbers, got {arguments.brief(value)}")
    a, b, c = (arguments.number(f"{name}[{k}]", item) for k, item in enumerate(value))
    return a, b, c


CHECKS: Descriptions = {
    "coefficients": _coefficients,
    "steps": Integer(1, 100),
    "eps": Real(1e-30),
}


def orthogonalize(
    matrix: ArrayLike,
    coefficients: Coefficients = "polar",
    steps: int = 5,
    eps: float = 1e-7,
) -> Array:
    r"""Return the nearest matrix with orthonormal rows or columns, approximately.

    For the singular value decomposition :math:`U S V^T` it approximates :math:`U V^T` by matrix
    products alone, see :class:`~fastopt.optimizer.Muon`.

    Parameters
    ----------
    matrix : array_like
        Matrix of shape (rows, columns), or several of shape (count, rows, columns); float32 or
        float64. Other types are converted to float32.
    coefficients : str or tuple of three floats
        'polar' and 'polar_express', of Polar Express, or 'quintic', of the first Newton-Schulz
        iteration of Muon; or :math:`a, b, c` of one polynomial :math:`a s + b s^3 + c s^5` for
        all steps. Default 'polar'.
    steps : int
        Number of iterations, from 1 to 100. Default 5.
    eps : float
        Lower bound of the Frobenius norm that the matrix is divided by, at least 1e-30. Default
        1e-7.

    Returns
    -------
    numpy.ndarray
        New array of the same shape.

    Raises
    ------
    ValueError
        `matrix` has neither two nor three dimensions, or another argument is out of range.
    TypeError
        `matrix` has other than real numbers.

    Examples
    --------
    >>> import numpy as np
    >>> from fastopt import optimizer
    >>> optimizer.orthogonalize(np.array([[3.0, 0.0], [0.0, -0.5]])).round(1) + 0
    array([[ 1.,  0.],
           [ 0., -1.]])
    """
    matrix = np.asarray(matrix)
    if matrix.ndim not in (2, 3):
        raise ValueError(f"matrix must have two or three dimensions, got shape {matrix.shape}")
    if matrix.dtype.kind in "cOSU":
        raise TypeError(f"matrix must have real numbers, got {matrix.dtype}")
    if matrix.dtype not in (np.float32, np.float64):
        matrix = matrix.astype(np.float32)
    options = {"coefficients": coefficients, "steps": steps, "eps": eps}
    checked = [check(name, options[name]) for name, check in CHECKS.items()]
    result = np.empty(matrix.shape, matrix.dtype)
    if result.size:
        NewtonSchulz()(matrix, result, *checked)
    return result


def _real(context: str, shape: Shape, value: object) -> Array:
    """Return `value` as an array of real numbers, or raise if it has another shape."""
    if value is None:
        raise TypeError(f"{context} an array of shape {shape}, got None")
    array = np.asarray(value)
    if array.shape != shape:
        raise ValueError(f"{context} an array of shape {shape}, got {array.shape}")
    if np.iscomplexobj(array):
        raise TypeError(f"{context} an array of real numbers, got {array.dtype}")
    return array


class _Computed(Directions["MatrixOptimizer"]):
    """Directions that the method of a subclass computes."""

    skips_empty = False

    def write(self, main: "MatrixOptimizer", update: Update) -> bool:
        """See :meth:`Directions.write <fastopt.optimizer.matrices.Directions.write>`."""
        index, weight, direction, grad, state = update
        arrays = dict(zip(main.named_slots(weight.shape), state, strict=True))
        slots = dict(arrays)
        result = main.direction(main.updates_of(index), grad, slots)
        context = f"{label(index, main.idx2name)}: {type(main).__name__}.direction() must"
        if slots.keys() != arrays.keys():
            raise ValueError(f"{context} keep the slots {[*arrays]}, got {[*slots]}")
        assigned = {
            name: _real(f"{context} assign to {name!r}", arrays[name].shape, value).copy()
            for name, value in slots.items()
            if value is not arrays[name]
        }
        direction[...] = _real(f"{context} return", weight.shape, result)
        for name, value in assigned.items():
            arrays[name][...] = value
        return True


class MatrixOptimizer(Optimizer):
    r"""Base class of optimizers for matrices, whose steps are computed by NumPy.

    .. math::
        w \leftarrow (1 - \eta \lambda) w - \eta d

    with the direction d that the method :meth:`direction` of a subclass returns. The base class
    counts updates, computes the learning rate and the weight decay, rescales and clips the gradient
    before, and has the masters of half-precision weights, the forms `cautious` and
    `cautious_decay`, and another optimizer for vectors and other weights.

    Parameters
    ----------
    learning_rate : float or callable, optional
        Default 0.001; None uses the scheduler's ``base_lr``.
    fallback : Optimizer or str, optional
        Optimizer of weights with fewer than two dimensions, and of those in `fallback_for`, see
        :class:`~fastopt.optimizer.Muon`. Default None: such weights raise an error.
    fallback_for : str or sequence of str, optional
        Regular expressions for the names of weights that the fallback updates.
    cautious, cautious_decay : bool
        See :class:`~fastopt.optimizer.AdamW`. Default False.
    **common
        Arguments of :class:`~fastopt.optimizer.Optimizer`.

    Raises
    ------
    ValueError, TypeError
        Like :class:`~fastopt.optimizer.Muon`; in an update also if :meth:`direction` returns an
        array of another shape.

    Examples
    --------
    >>> import numpy as np
    >>> import fastopt
    >>> from fastopt import optimizer
    >>> class Orthogonal(optimizer.MatrixOptimizer):
    ...     def slots(self, shape):
    ...         return {"mom": shape}
    ...
    ...     def direction(self, t, grad, state):
    ...         state["mom"] += 0.1 * (grad - state["mom"])
    ...         return optimizer.orthogonalize(state["mom"])
    >>> updater = fastopt.Updater(Orthogonal(lr=0.1))
    >>> weight = np.zeros((2, 2))
    >>> updater.step(np.array([[3.0, 0.0], [0.0, -1.0]]), weight)
    >>> weight.round(2) + 0
    array([[-0.1,  0. ],
           [ 0. ,  0.1]])
    """

    ascends = True
    corrects_decay = True
    decays_last: ClassVar[bool] = False
    """Whether weight decay is applied after the step along the direction."""
    rounds_state: ClassVar[bool] = False
    """Whether the state may be stored in bfloat16."""
    takes_vectors: ClassVar[bool] = False
    """Whether weights with fewer than two dimensions are updated too."""
    directions: ClassVar[type[Directions[Any]]] = _Computed
    """Class of the objects that compute directions, one for each process."""
    learning_rate: RateAttribute = arg(default=0.001)
    fallback: Optimizer | str | None = arg(default=None, check=_check_fallback, last=True)
    fallback_for: Stored[Any, str | Sequence[str] | None] = arg(
        default=None, check=_check_patterns, last=True
    )
    cautious: bool = arg(default=False, check=FLAG, kw_only=True, new=True)
    cautious_decay: bool = arg(default=False, check=FLAG, kw_only=True, new=True)
    work: _Work | None = local(None)

    # Methods for subclasses

    def slots(self, shape: Shape) -> Mapping[str, Shape]:
        """Return the shapes of the state arrays of a weight by name; by default there are none.

        Parameters
        ----------
        shape : tuple of int
            Shape of the weight.
        """
        return {}

    def direction(self, t: int, grad: Array, state: dict[str, Array]) -> Array:
        """Return the direction of a step, which is subtracted from the weight.

        Parameters
        ----------
        t : int
            Number of updates of this weight, from 1, whatever `begin_num_update` is.
        grad : numpy.ndarray
            Rescaled and clipped gradient in the weight's shape, float32 or float64. The array
            belongs to the optimizer, and has another gradient after the call.
        state : dict of str to numpy.ndarray
            The arrays of :meth:`slots`, which are 0 at first. Change them in place, or assign
            others of the same shape, which are copied. If the method raises an error, what it has
            changed in place until then remains.

        Returns
        -------
        numpy.ndarray
            Array of the same shape.
        """
        raise NotImplementedError(f"{type(self).__name__} needs a method direction(t, grad, state)")

    def check_shape(self, index: Index, shape: Shape) -> None:
        """Raise ValueError unless a weight of this shape can be updated."""

    def patterns(self) -> Mapping[str, Sequence[str]]:
        """Return the regular expressions for names of weights, by argument."""
        tables = [name for name, check in self._arguments.items() if isinstance(check, ByPattern)]
        patterns = {name: [regex for regex, _ in vars(self)[name] or ()] for name in tables}
        return {"fallback_for": self.fallback_for or (), **patterns}

    def check_together(self) -> None:
        """See :meth:`Optimizer.check_together <fastopt.optimizer.Optimizer.check_together>`."""
        super().check_together()
        kind = type(self).__name__
        if self.master != "float32":
            raise ValueError(f"{kind} keeps masters in float32: master must be 'float32'")
        if self.state_dtype is not None and not self.rounds_state:
            raise ValueError(f"{kind} computes with its state in NumPy: state_dtype must be None")
        if self.state_dtype == "int8":
            raise ValueError(
                f"{kind} computes with its state in NumPy: state_dtype cannot be 'int8'"
            )
        if self.fallback is None and self.fallback_for:
            raise ValueError("fallback_for needs a fallback: fallback='adamw' or an Optimizer")
        if isinstance(self.fallback, Optimizer) and self.fallback.maximize != self.maximize:
            raise ValueError(
                f"maximize is {self.maximize}, that of the fallback {self.fallback.maximize}"
            )

    # Selection of weights

    def name_of(self, index: Index) -> str:
        """Return the name of a parameter, or its index as a string."""
        name = getattr(self.param_dict.get(index), "name", None)
        return self.idx2name.get(index, name if isinstance(name, str) else str(index))

    def selected(self, table: Sequence[tuple[str, Any]] | None, index: Index, usual: object) -> Any:
        """Return the value of the first pattern of a table that is found in a parameter's name."""
        name = self.name_of(index)
        return next((value for pattern, value in table or () if re.search(pattern, name)), usual)

    def falls_back(self, index: Index, weight: Array) -> bool:
        """Whether the fallback updates a weight.

        Raises
        ------
        ValueError
            The weight is not a matrix, and there is no fallback.
        """
        shape = header(weight).shape
        other = len(shape) < 2 and not self.takes_vectors
        if self.fallback is not None:
            name = self.name_of(index)
            return other or any(re.search(pattern, name) for pattern in self.fallback_for or ())
        if other:
            raise ValueError(
                f"{label(index, self.idx2name)}: {type(self).__name__} updates weights of two or "
                f"more dimensions, got shape {shape}; pass fallback='adamw', or an Optimizer, for "
                "others"
            )
        return False

    def check_multipliers(
        self, indices: Sequence[Index], also: Collection[Index] = (), grouped: bool = False
    ) -> None:
        """See :meth:`Optimizer.check_multipliers`; also warn about patterns that match no name."""
        super().check_multipliers(indices, also, grouped or any(self.patterns().values()))
        if self.unchecked:
            return
        known = {*indices, *also, *self._index_update_count, *self.idx2name, *self.param_dict}
        names = sorted(map(self.name_of, known))
        for role, patterns in self.patterns().items():
            for pattern in patterns:
                if not any(re.search(pattern, name) for name in names):
                    warn_user(
                        f"{role}: {pattern!r} has no effect: it matches none of "
                        f"{arguments.brief(names)}"
                    )

    def _check_matrix(self, index: Index, weight: Array) -> None:
        """Raise unless a weight can be updated, regardless of its gradient and state."""
        if is_cuda(weight):
            raise TypeError(
                f"{label(index, self.idx2name)}: {type(self).__name__} computes with NumPy, and "
                "the weight is on a CUDA device"
            )
        self.check_shape(index, weight.shape)

    def _check_slots(self, context: str, exact: Array, state: object) -> Arrays:
        """Raise unless a state matches a weight with the shape and dtype of `exact`."""
        slots, arrays = self.named_slots(exact.shape), validate.leaves(state)
        if len(arrays) == len(slots) and all(map(_has, arrays, slots.values(), repeat(exact))):
            return arrays
        if len(arrays) != len(slots):
            raise ValueError(
                f"{context}: {type(self).__name__} needs {len(slots)} state arrays {tuple(slots)}, "
                f"got {len(arrays)}; {validate.OF_OTHER_SETTINGS}"
            )
        dtypes = [np.dtype(real_of(exact.dtype)).name] + ["bfloat16"] * self.rounds_state
        for (slot, shape), array in zip(slots.items(), map(header, arrays), strict=True):
            validate.check_like(context, f"state {slot!r}", array, dtypes, shape)
        return arrays

    def named_slots(self, shape: Shape) -> Mapping[str, Shape]:
        """Return :meth:`slots`, which are computed once for each shape.

        Raises
        ------
        TypeError
            The method does not return a dictionary of shapes.
        """
        work = self._working()
        if work.slots_version != self.mode_version:
            work.slots_version = self.mode_version
            work.slots.clear()
        shapes = work.slots.get(shape)
        if shapes is None:
            declared = self.slots(shape)
            try:
                shapes = {name: tuple(map(as_index, size)) for name, size in declared.items()}
            except (AttributeError, TypeError):
                raise TypeError(
                    f"{type(self).__name__}.slots() must return a dict of a shape for each name, "
                    f"such as {{'mom': shape}}, got {arguments.brief(declared)}"
                ) from None
            work.slots[shape] = shapes
        return shapes

    def dense_gradient(self, index: Index, weight: Array, grad: RowSparse) -> Any:
        """See :meth:`Optimizer.dense_gradient`; a fallback accepts row-sparse gradients."""
        if self.falls_back(index, weight):
            return grad
        raise TypeError(
            f"{label(index, self.idx2name)}: {type(self).__name__} takes dense gradients of "
            "matrices, got a row-sparse one; pass grad.to_dense(), or update it with AdamW, which "
            "fastopt.optimizer has as fallback='adamw' with fallback_for= a pattern of its name"
        )

    # States

    def create_state(self, index: Index, weight: Array) -> Any:
        """See :meth:`Optimizer.create_state <fastopt.optimizer.Optimizer.create_state>`."""
        if self.falls_back(index, weight):
            return self._fallback().create_state(index, weight)
        weight = header(weight)
        self._check_matrix(index, weight)
        dtype, order = self._state_dtype(index, weight), validate.order_of(weight)
        arrays = tuple(
            like(weight, shape, dtype, order) for shape in self.named_slots(weight.shape).values()
        )
        return arrays[0] if len(arrays) == 1 else arrays or None

    def create_state_multi_precision(self, index: Index, weight: Array) -> Any:
        """See :meth:`Optimizer.create_state_multi_precision`."""
        if self.falls_back(index, weight):
            return self._fallback().create_state_multi_precision(index, weight)
        return super().create_state_multi_precision(index, weight)

    def _warn_of_halves(self, weight: Array) -> None:
        if self.rounding != "stochastic":
            super()._warn_of_halves(weight)

    def restore(self, attributes: Mapping[str, Any]) -> None:
        """See :meth:`Optimizer.restore`; the fallback is restored in place."""
        now, saved = vars(self).get("fallback"), attributes.get("fallback")
        if isinstance(now, Optimizer) and isinstance(saved, type(now)) and now is not saved:
            now.restore(saved.__getstate__())
            attributes = {**attributes, "fallback": now}
        super().restore(attributes)

    def restart(self, indices: Collection[Index]) -> None:
        """See :meth:`Optimizer.restart <fastopt.optimizer.Optimizer.restart>`."""
        super().restart(indices)
        if self.fallback is not None:
            self._fallback().restart(indices)

    # Steps

    def updates_of(self, index: Index) -> int:
        """Return the number of updates of a weight since `begin_num_update`, with the present one.

        Moments start at 0 then, so that their bias corrections depend on this number.
        """
        return int(self._index_update_count[index]) - self.begin_num_update

    def rates(self, index: Index) -> tuple[float, float]:
        """Return learning rate and weight decay of a counted step; ask a schedule once."""
        if self.per_index:
            return self._get_lr(index), self._get_wd(index)
        rates = self.rates_at(self.learning_rate, multipliers(self, index))
        self.check_rates(index, rates["lr"], rates["wd"])
        return rates["lr"], rates["wd"]

    def _working(self) -> _Work:
        """Return the buffers and inner optimizers of this process."""
        work = vars(self).get("work")
        if work is None or work.given is not self.fallback:
            work = vars(self)["work"] = _Work(self)
        return work

    def _fallback(self) -> Any:
        """Return the fallback, which must exist, with the current shared attributes."""
        part = self._working().fallback
        assert part is not None
        return part.follow(self)

    def check_calls(self, calls: Sequence[Call]) -> None:
        """See :meth:`Optimizer.check_calls <fastopt.optimizer.Optimizer.check_calls>`."""
        for index, weight, grad, state in calls:
            if self.falls_back(index, weight):
                if grad.dtype != weight.dtype and not validate.is_half(weight):
                    grad = to_float32(grad)  # the weight has a half-precision copy
                self._fallback().check_calls([(index, weight, grad, state)])
                continue
            context, inner = label(index, self.idx2name), state
            self._get_lr(index)
            self._get_wd(index)
            self._check_matrix(index, weight)
            exact = weight
            if has_master(self, weight):
                (exact, *_), inner = split_state(self, context, weight, state)
            self._check_slots(context, exact, inner)

    def update(self, index: Index, weight: Array, grad: Any, state: Any) -> None:
        """See :meth:`Optimizer.update <fastopt.optimizer.Optimizer.update>`."""
        validate.check_key(index)
        with self.call_lock, reject_reentrant(self.stepping), uninterrupted:
            if self.falls_back(index, weight):
                self._fallback().update(index, weight, grad, state)
                return
            self._check_matrix(index, weight)
            arrays = self._check_slots(label(index, self.idx2name), weight, state)
            if isinstance(grad, RowSparse):
                self.dense_gradient(index, weight, grad)
            if validate.is_half(weight):
                grad = to_float32(grad)
            self._working().step(self, index, weight, grad, arrays)

    def update_in_python(
        self, index: Index, weight: Array, grad: Grad, state: object, copy: Array | None
    ) -> None:
        """See :meth:`Optimizer.update_in_python`; a fallback handles its own masters."""
        if copy is None and self.falls_back(index, weight):
            with self.call_lock:
                self._fallback().update_multi_precision(index, weight, grad, state)
        else:
            super().update_in_python(index, weight, grad, state, copy)
