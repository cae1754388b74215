"""SM3: AdaGrad with one accumulator for each slice along each axis."""

import math
from collections.abc import Mapping
from itertools import accumulate
from typing import Any

import numpy as np

from fastopt._kernels.factored import covered
from fastopt.arguments import FLAG, Real, alias, arg
from fastopt.optimizer.matrices import MatrixFamily, Shape
from fastopt.optimizer.optimizer import Array, Index, register
from fastopt.optimizer.rates import RateAttribute
from fastopt.optimizer.rowsteps import RowSteps


class _Covered(RowSteps):
    """Directions: momentum of gradients divided by roots of bounds on their sums of squares."""

    fields = ("eps", "momentum", "fresh")

    def __init__(self) -> None:
        super().__init__()
        self._known: dict[Any, Any] = {}

    def values(self, main: "SM3") -> tuple[float, ...]:
        """See :meth:`RowSteps.values <fastopt.optimizer.rowsteps.RowSteps.values>`."""
        return main.eps, main.momentum, 1 - main.momentum

    def run(
        self,
        main: "SM3",
        index: Index,
        target: Array,
        weight: Array,
        grad: Array,
        state: tuple[Array, ...],
        record: Array,
    ) -> None:
        """See :meth:`RowSteps.run <fastopt.optimizer.rowsteps.RowSteps.run>`."""
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

    def _scratch(self, shape: Shape, dtype: Any) -> Any:
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
class SM3(MatrixFamily):
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
    >>> from fastopt import optimizer
    >>> updater = optimizer.get_updater(optimizer.SM3(learning_rate=0.1, momentum=0.0))
    >>> weight = np.ones((2, 3), np.float32)
    >>> for _ in range(2):
    ...     updater(0, np.array([[1, -2, 0], [2, -4, 0]], np.float32), weight)
    >>> weight.round(3)
    array([[0.855, 1.171, 1.   ],
           [0.829, 1.171, 1.   ]], dtype=float32)
    >>> updater.states[0]
    (array([ 8., 32.], dtype=float32), array([ 8., 32.,  0.], dtype=float32))
    """

    takes_vectors = True
    learning_rate: RateAttribute = arg(default=0.1)
    momentum: float = arg(default=0.9, check=Real(least=0, below=1))
    eps: float = arg(default=0.0, check=Real(least=0))
    cautious: bool = arg(default=False, check=FLAG, kw_only=True, new=True)
    cautious_decay: bool = arg(default=False, check=FLAG, kw_only=True, new=True)
    epsilon: float = alias("eps", default=1e-8, kw_only=True)
    rounds_state = False

    def directions(self) -> _Covered:
        """See :meth:`MatrixFamily.directions`."""
        return _Covered()

    def slots(self, shape: Shape) -> Mapping[str, Shape]:
        """See :meth:`MatrixFamily.slots`."""
        if len(shape) < 2:
            covers = {"sums": shape}
        else:
            covers = {f"axis {axis}": (length,) for axis, length in enumerate(shape)}
        return {**covers, "mom": shape} if self.momentum else covers
