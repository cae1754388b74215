"""SM3 and Adam-mini: steps that kernels over the rows of a matrix compute."""

import math
from collections.abc import Callable, Mapping
from itertools import accumulate
from typing import Any, ClassVar

import numpy as np

from fastopt._engine.buffers import Buffers
from fastopt._engine.hyper import values_of
from fastopt._engine.validate import label
from fastopt._kernels.compiling import bind
from fastopt._kernels.factored import SCALED, covered, shared
from fastopt.arguments import Integer, Real, Stored, alias, arg
from fastopt.optimizer.families import AdamFamily
from fastopt.optimizer.matrices import (
    Arrays,
    ByPattern,
    Directions,
    Main,
    MatrixOptimizer,
    Update,
    descent,
)
from fastopt.optimizer.optimizer import Array, Index, RateAttribute, register

SCALE = SCALED[:2]
"""Fields that scale and clip the gradient."""

UNSCALED = (1.0, math.inf)


class RowSteps(Directions[Main]):
    """Abstract base of directions that kernels compute, which can also step along them.

    A step is in place if gradient, weight and state are in C order and the weight's precision, and
    no form of the optimizer needs the whole direction.
    """

    fields: ClassVar[tuple[str, ...]] = ()
    """Fields of the kernels' record besides :data:`SCALED`."""

    def __init__(self) -> None:
        self.buffers = Buffers()
        self._records: dict[Any, Array] = {}
        self._scale: tuple[float, ...] = UNSCALED
        self._version = -1
        self._bound: dict[Any, Callable[..., Any]] = {}

    # Methods for subclasses

    def run(self, main: Main, update: Update, record: Array) -> None:
        """Subtract ``lr`` times a step from ``shrink`` times the target, and write the state.

        Buffers are allocated before anything changes. Arrays are in C order; the record has
        :data:`SCALED` and :attr:`fields`, with which the kernels rescale the gradient.
        """
        raise NotImplementedError

    def call(self, kernel: Callable[..., Any], *arguments: Any) -> Any:
        """Call a kernel with arrays of the same kinds in each precision."""
        key = kernel, arguments[0].dtype
        bound = self._bound.get(key)
        if bound is None:
            bound = bind(kernel, *arguments)
            if bound is kernel:  # it is not compiled, and would warn of what it propagates
                bound = np.errstate(all="ignore")(kernel)
            self._bound[key] = bound
        return bound(*arguments)

    # Steps

    def fits(self, main: Main, weight: Array, grad: Array, state: Arrays) -> bool:
        """See :meth:`Directions.fits <fastopt.optimizer.matrices.Directions.fits>`."""
        kind = weight.dtype
        return (
            type(grad) is np.ndarray
            and not any(main.rule_variant)
            and grad.shape == weight.shape
            and grad.dtype == kind
            and grad.flags.c_contiguous
            and weight.flags.carray
            and (kind == np.float32 or kind == np.float64)
            and weight.size > 0
            and all(array.flags.carray and array.dtype == kind for array in state)
            and not np.may_share_memory(grad, weight)
        )

    def step_in_place(self, main: Main, update: Update, rates: tuple[float, float]) -> None:
        """See :meth:`Directions.step_in_place`."""
        if self._version != main.version:
            self._scale = tuple(values_of(main, descent, SCALE, {}, {}))
            self._version = main.version
        self.run(main, update, self._record(main, update.weight.dtype, self._scale, rates))

    def write(self, main: Main, update: Update) -> bool:
        """See :meth:`Directions.write <fastopt.optimizer.matrices.Directions.write>`."""
        index, weight, direction, grad, arrays = update
        target, exact = (
            self.buffers(name, direction.shape, direction.dtype) for name in ("direction", "weight")
        )
        target.fill(0)
        exact[...] = weight
        ordered = tuple(np.ascontiguousarray(array) for array in arrays)
        record = self._record(main, direction.dtype, UNSCALED, (0.0, -1.0))
        self.run(main, Update(index, exact, target, grad, ordered), record)
        for array, values in zip(arrays, ordered, strict=True):
            if values is not array:
                array[...] = values
        direction[...] = target
        return True

    def _record(
        self, main: Main, dtype: np.dtype[Any], scale: tuple[float, ...], rates: tuple[float, float]
    ) -> Array:
        """Return the kernels' record, which is reused."""
        record = self._records.get(dtype)
        if record is None:
            fields = [(name, dtype) for name in (*SCALED, *self.fields)]
            record = self._records[dtype] = np.zeros(1, np.dtype((np.record, fields)))
        record[0] = (*scale, *rates, *self.values(main))
        return record

    def values(self, main: Main) -> tuple[float, ...]:
        """Return the values of :attr:`fields`."""
        return ()


class _Covered(RowSteps["SM3"]):
    """Directions: momentum of gradients divided by roots of bounds on their sums of squares."""

    fields = ("eps", "momentum", "fresh")

    def __init__(self) -> None:
        super().__init__()
        self._known: dict[Any, Any] = {}

    def values(self, main: "SM3") -> tuple[float, ...]:
        """See :meth:`RowSteps.values <fastopt.optimizer.rowsteps.RowSteps.values>`."""
        return main.eps, main.momentum, 1 - main.momentum

    def run(self, main: "SM3", update: Update, record: Array) -> None:
        """See :meth:`RowSteps.run <fastopt.optimizer.rowsteps.RowSteps.run>`."""
        _, _, target, grad, state = update
        flat, scratch = self._scratch(grad.shape, grad.dtype)
        *covers, columns = state[: max(grad.ndim, 1)]
        ahead = covers[0] if len(covers) == 1 else scratch[0]
        if len(covers) > 1:
            np.concatenate(covers, out=ahead)
        target = target.reshape(flat)
        mean = state[-1].reshape(flat) if main.momentum else target
        kernel = covered(grad.dtype.type, main.momentum != 0)
        columns = columns.reshape(flat[1])
        self.call(kernel, grad.reshape(flat), target, mean, ahead, columns, *scratch[1:], record)
        if len(covers) > 1:
            ends = list(accumulate(map(len, covers)))
            for cover, values in zip(covers, np.split(ahead, ends[:-1]), strict=True):
                cover[...] = values

    def _scratch(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Any:
        """Return the shape of a weight as rows along the last axis, and scratch memory."""
        known = self._known.get((shape, dtype))
        if known is None:
            lengths, width = shape[:-1], shape[-1] if shape else 1
            flat, count = (math.prod(lengths), width), sum(lengths)
            ahead, raised = (np.empty(count, dtype) for _ in range(2))
            sizes = np.array(lengths, np.int64)
            memory = ahead, raised, np.empty(width, dtype), sizes, np.empty_like(sizes)
            known = self._known[shape, dtype] = flat, memory
        return known


@register
class SM3(MatrixOptimizer):
    r"""SM3: AdaGrad with one accumulator for each slice along each axis.

    .. math::
        h &= \mathrm{clip}(r g) \\
        \nu_{ij} &= \min(R_i, C_j) + h_{ij}^2, \qquad
        R_i \leftarrow \max_j \nu_{ij}, \qquad C_j \leftarrow \max_i \nu_{ij} \\
        m &\leftarrow \mu m + (1 - \mu) \frac{h}{\sqrt{\nu + \epsilon}} \\
        w &\leftarrow (1 - \eta \lambda) w - \eta m

    for a matrix. Weights with more dimensions have an accumulator for each index along each axis,
    and the minimum is taken over all accumulators of an element. :math:`\nu` is an upper bound of
    AdaGrad's sum of squares for each element. Weights with fewer dimensions have these sums
    themselves. The quotient is 0 where :math:`\nu + \epsilon` is 0.

    Source: Anil, Gupta, Koren and Singer, "Memory-Efficient Adaptive Optimization",
    arXiv:1901.11150, algorithm SM3-II. optax.sm3 has an :math:`\epsilon` of 1e-8.

    A step reads and writes each array once, on one thread.

    State: a tuple with one accumulator for each axis, of its length (for weights with fewer than
    two dimensions one array in the weight's shape), and :math:`m`, in the weight's shape, unless
    `momentum` is 0. A single array is not wrapped in a tuple.

    Parameters
    ----------
    learning_rate : float or callable, optional
        Default 0.1; None uses the scheduler's ``base_lr``.
    momentum : float
        Decay rate :math:`\mu`, at least 0 and below 1. Default 0.9.
    eps : float
        :math:`\epsilon`, at least 0. Default 0.
    fallback : Optimizer or str, optional
        Optimizer of the weights in `fallback_for`, see :class:`~fastopt.optimizer.Muon`. Default
        None.
    fallback_for : str or sequence of str, optional
        Regular expressions for the names of weights that the fallback updates.
    cautious, cautious_decay : bool
        See :class:`~fastopt.optimizer.AdamW`, for weights that the fallback does not update;
        with both, the elements that are not updated decay. `cautious` has no effect without
        `momentum`. Default False.
    **common
        Arguments of :class:`~fastopt.optimizer.Optimizer`; `state_dtype` must be None.

    Raises
    ------
    ValueError
        An argument is NaN or out of range, a pattern is not a regular expression, or
        `fallback_for` is given without `fallback`.
    TypeError
        An argument has the wrong type, or the fallback has no rule. In an update: the gradient is
        row-sparse, or the weight is on a CUDA device.

    Examples
    --------
    >>> import numpy as np
    >>> import fastopt
    >>> updater = fastopt.Updater(fastopt.SM3(lr=0.1, momentum=0.0))
    >>> weight = np.ones((2, 3), np.float32)
    >>> for _ in range(2):
    ...     updater.step({"w": np.array([[1, -2, 0], [2, -4, 0]], np.float32)}, {"w": weight})
    >>> weight.round(3)
    array([[0.855, 1.171, 1.   ],
           [0.829, 1.171, 1.   ]], dtype=float32)
    >>> updater.states["w"]
    (array([ 8., 32.], dtype=float32), array([ 8., 32.,  0.], dtype=float32))
    """

    takes_vectors = True
    learning_rate: RateAttribute = arg(default=0.1)
    momentum: float = arg(default=0.9, check=Real(least=0, below=1))
    eps: float = arg(default=0.0, check=Real(least=0))
    epsilon: float = alias("eps", default=1e-8, kw_only=True)

    directions = _Covered

    def slots(self, shape: tuple[int, ...]) -> Mapping[str, tuple[int, ...]]:
        """See :meth:`MatrixOptimizer.slots`."""
        if len(shape) < 2:
            covers = {"sums": shape}
        else:
            covers = {f"axis {axis}": (length,) for axis, length in enumerate(shape)}
        return {**covers, "mom": shape} if self.momentum else covers


class _Shared(RowSteps["AdamMini"]):
    """Directions: momentum divided by the root of the mean square of each block of rows."""

    fields = ("fresh", "mean_scale")

    def values(self, main: "AdamMini") -> tuple[float, ...]:
        """See :meth:`RowSteps.values <fastopt.optimizer.rowsteps.RowSteps.values>`."""
        return 1 - main.beta1, 1.0

    def run(self, main: "AdamMini", update: Update, record: Array) -> None:
        """See :meth:`RowSteps.run <fastopt.optimizer.rowsteps.RowSteps.run>`."""
        index, _, target, grad, (mean, var) = update
        flat, rows = (var.size, grad.size // var.size), main.rows_of(index, grad.shape)
        count = main.updates_of(index)
        record["mean_scale"] = 1 / (1 - main.beta1**count)
        self.call(
            shared(grad.dtype.type),
            *(grad.reshape(flat), target.reshape(flat), mean.reshape(flat), var.reshape(-1), rows),
            *(1 - main.beta2, 1 / (1 - main.beta2**count), main.epsilon, record),
        )


@register
class AdamMini(MatrixOptimizer, AdamFamily):
    r"""Adam-mini: Adam with one second moment for each row, or for each head of attention.

    .. math::
        h &= \mathrm{clip}(r g), \qquad m \leftarrow \beta_1 m + (1 - \beta_1) h \\
        v_b &\leftarrow \beta_2 v_b + (1 - \beta_2) \frac{1}{|b|} \sum_{i \in b} h_i^2 \\
        w_i &\leftarrow (1 - \eta \lambda) w_i - \eta \frac{m_i}{1 - \beta_1^t}
            \Big/ \left( \sqrt{\frac{v_b}{1 - \beta_2^t}} + \epsilon \right)

    for the elements i of each block b. A block is a row of a matrix, that is, the weights of one
    output, or a slice along the first axis of weights with more dimensions. The rows of a head of
    attention are one block, for queries and keys that `heads` selects, and a weight with fewer than
    two dimensions is one block.

    Source: Zhang et al., "Adam-mini: Use Fewer Learning Rates To Gain More", arXiv:2406.16793, with
    the code of the authors, whose blocks are selected by names of modules. Weights named ``bias``
    have a second moment for each element there, as with AdamW for a group of the updater:
    ``groups={"bias$": {"optimizer": AdamW(formula="torch")}}``.

    State: the tuple of the arrays :math:`m`, in the weight's shape, and :math:`v`, of shape
    (rows, 1), with equal numbers for the rows of a head; for weights with fewer than two dimensions
    :math:`v` has no dimensions.

    Parameters
    ----------
    learning_rate : float or callable, optional
        Default 0.001; None uses the scheduler's ``base_lr``.
    beta1, beta2 : float
        Decay rates of :math:`m` and :math:`v`, at least 0 and below 1. Defaults 0.9, 0.999.
    epsilon : float
        :math:`\epsilon`, at least 0. Default 1e-8.
    heads : dict of str to int, optional
        Numbers of heads. Maps a regular expression for names of weights to the number of equal
        parts along the first axis that have a second moment each. The first pattern that
        ``re.search`` finds in the name applies; the name is the entry in ``idx2name``, the name of
        the object in ``param_dict``, or the index.
    fallback : Optimizer or str, optional
        Optimizer of the weights in `fallback_for`, see :class:`~fastopt.optimizer.Muon`. Default
        None.
    fallback_for : str or sequence of str, optional
        Regular expressions for the names of weights that the fallback updates.
    cautious, cautious_decay : bool
        See :class:`~fastopt.optimizer.AdamW`, for the weights that the fallback does not update.
        Default False.
    **common
        Arguments of :class:`~fastopt.optimizer.Optimizer`; `state_dtype` must be None.

    Raises
    ------
    ValueError
        An argument is NaN or out of range, a pattern is not a regular expression, or
        `fallback_for` is given without `fallback`. In an update: the rows of a weight cannot be
        divided among its heads.
    TypeError
        An argument has the wrong type, or the fallback has no rule. In an update: the gradient is
        row-sparse, or the weight is on a CUDA device.

    Examples
    --------
    >>> import numpy as np
    >>> import fastopt
    >>> updater = fastopt.Updater(fastopt.AdamMini(lr=0.1))
    >>> weight = np.ones((2, 2))
    >>> updater.step({"w": np.array([[1.0, 7.0], [-3.0, 3.0]])}, {"w": weight})
    >>> weight
    array([[0.98, 0.86],
           [1.1 , 0.9 ]])
    >>> [array.shape for array in updater.states["w"]]
    [(2, 2), (2, 1)]

    With one second moment for each of two heads of attention:

    >>> updater = fastopt.Updater(fastopt.AdamMini(lr=0.1, heads={"query": 2}))
    >>> weight = np.zeros((4, 1))
    >>> updater.step({"query": np.array([[1.0], [7.0], [3.0], [3.0]])}, {"query": weight})
    >>> weight.ravel().round(2)
    array([-0.02, -0.14, -0.1 , -0.1 ])
    """

    takes_vectors = True
    heads: Stored[Any, Mapping[str, int] | None] = arg(
        default=None, check=ByPattern("counts", Integer(least=1))
    )

    directions = _Shared

    def slots(self, shape: tuple[int, ...]) -> Mapping[str, tuple[int, ...]]:
        """See :meth:`MatrixOptimizer.slots`."""
        return {"mean": shape, "var": (shape[0], 1) if len(shape) > 1 else ()}

    def check_shape(self, index: Index, shape: tuple[int, ...]) -> None:
        """See :meth:`MatrixOptimizer.check_shape`."""
        self.rows_of(index, shape)

    def rows_of(self, index: Index, shape: tuple[int, ...]) -> int:
        """Return the number of rows that share a second moment."""
        if not self.heads or len(shape) < 2:
            return 1
        heads = self.selected(self.heads, index, shape[0])
        if heads and shape[0] % heads:
            raise ValueError(
                f"{label(index, self.idx2name)}: {shape[0]} rows of shape {shape} cannot be "
                f"divided among {heads} heads"
            )
        return shape[0] // heads if heads else 1
