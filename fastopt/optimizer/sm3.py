"""SM3: AdaGrad with one accumulator for each slice along each axis."""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Unpack

import numpy as np

from fastopt._engine.buffers import Buffers
from fastopt._engine.validate import leaves
from fastopt.arguments import Descriptions, Real
from fastopt.optimizer.keywords import MatrixArguments, Rate
from fastopt.optimizer.matrices import MatrixFamily, Rescaled, Shape
from fastopt.optimizer.optimizer import Array, Index, Optimizer, register

__all__ = ["SM3"]


class _Covered:
    """Directions: momentum of gradients divided by roots of bounds on their sums of squares."""

    def __init__(self) -> None:
        self._rescaled = Rescaled()
        self._buffers = Buffers()

    def reserve(self, main: "SM3", index: Index, direction: Array) -> None:
        """See :meth:`Directions.reserve <fastopt.optimizer.matrices.Directions.reserve>`."""
        for name in ("bounds", "squares"):
            self._buffers(name, direction.shape, direction.dtype)
        self._rescaled.reserve(direction)

    def write(
        self, main: "SM3", index: Index, weight: Array, direction: Array, grad: Array, state: Any
    ) -> bool:
        """See :meth:`Directions.write <fastopt.optimizer.matrices.Directions.write>`."""
        if not direction.size:
            return False
        arrays, count, real = leaves(state), direction.ndim, direction.dtype.type
        bounds = self._buffers("bounds", direction.shape, direction.dtype)
        squares = self._buffers("squares", direction.shape, direction.dtype)
        gradient = self._rescaled(main, index, direction, grad)
        covers = arrays[: max(count, 1)]
        with np.errstate(all="ignore"):  # NaN and infinity propagate without a warning
            bounds.fill(np.inf)
            for axis, cover in enumerate(covers):
                ahead = cover.reshape(-1, *[1] * (count - axis - 1)) if count > 1 else cover
                np.minimum(bounds, ahead, out=bounds)
            bounds += np.multiply(gradient, gradient, out=squares)
            for axis, cover in enumerate(covers):
                others = tuple(other for other in range(count) if other != axis)
                np.max(bounds, axis=others, out=cover)
            bounds += real(main.eps)
            direction.fill(0)
            np.divide(gradient, np.sqrt(bounds, out=bounds), out=direction, where=bounds != 0)
            if main.momentum:
                mean = arrays[-1]
                mean *= real(main.momentum)
                direction *= real(1 - main.momentum)
                mean += direction
                direction[...] = mean
        return True


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

    SM3 is computed by NumPy on one thread, since column maxima do not follow the memory order,
    which the compiled kernels require.

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
    variants = ("cautious", "cautious_decay")
    rounds_state = False
    arguments: ClassVar[Descriptions] = {
        "momentum": Real(least=0, below=1),
        "eps": Real(least=0),
    }

    def __init__(
        self,
        learning_rate: Rate = 0.1,
        momentum: float = 0.9,
        eps: float = 0.0,
        fallback: Optimizer | str | None = None,
        fallback_for: str | Sequence[str] | None = None,
        **common: Unpack[MatrixArguments],
    ) -> None:
        self.momentum = momentum
        self.eps = eps
        super().__init__(learning_rate, fallback, fallback_for, **common)

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
