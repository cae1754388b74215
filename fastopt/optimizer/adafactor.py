"""Adafactor: second moments of rows and columns instead of single elements."""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from fastopt._kernels.factored import stepped
from fastopt.arguments import FLAG, OrNone, Real, arg
from fastopt.optimizer.factoredsteps import FactoredSteps, clipped_factor, root_mean_square
from fastopt.optimizer.matrices import MatrixFamily, Shape
from fastopt.optimizer.optimizer import Array, Index, register
from fastopt.optimizer.rates import RateAttribute


class _Factored(FactoredSteps):
    """Directions: gradients divided by the root of the factored second moment."""

    def run(
        self,
        main: "Adafactor",
        index: Index,
        target: Array,
        weight: Array,
        grad: Array,
        state: tuple[Array, ...],
        record: Array,
    ) -> None:
        """See :meth:`RowSteps.run <fastopt.optimizer.rowsteps.RowSteps.run>`."""
        steps = self.measured(grad, weight, state, main.share(index), main.eps1, record)
        factor = main.factor(index, steps.weight_size)
        record["lr"] *= factor * clipped_factor(steps.size, main.clip_threshold)
        self.call(stepped(), steps.source, steps.scales, target.reshape(steps.source.shape), record)

    def write_vector(
        self,
        main: "Adafactor",
        index: Index,
        weight: Array,
        direction: Array,
        grad: Array,
        state: Any,
    ) -> None:
        """See :meth:`FactoredSteps.write_vector`."""
        step, size = self.divided(main, grad, state, main.share(index))
        factor = main.factor(index, root_mean_square(weight))
        factor *= clipped_factor(size, main.clip_threshold)
        np.multiply(step, step.dtype.type(factor), out=direction)


@register
class Adafactor(MatrixFamily):
    r"""Adafactor: second moments of rows and columns instead of single elements.

    .. math::
        h &= \mathrm{clip}(r g), \qquad \beta = 1 - t^{-c} \\
        R_i &\leftarrow \beta R_i + (1 - \beta) \frac{1}{m} \sum_j (h_{ij}^2 + \epsilon_1) \\
        C_j &\leftarrow \beta C_j + (1 - \beta) \frac{1}{n} \sum_i (h_{ij}^2 + \epsilon_1) \\
        u_{ij} &= h_{ij} \Big/ \sqrt{R_i C_j \Big/ \frac{1}{n} \sum_k R_k} \\
        \alpha &= \min(\eta, t^{-1/2}) \max(\epsilon_2, \mathrm{RMS}(w)) \\
        w &\leftarrow (1 - \eta \lambda) w
            - \alpha \frac{u}{\max(1, \mathrm{RMS}(u) / d)}

    with :math:`c` = `decay_rate`, :math:`d` = `clip_threshold` and the root mean square
    :math:`\mathrm{RMS}`. For weights with more than two dimensions, rows and columns are the last
    two axes. Weights with fewer dimensions have a second moment for each element:
    :math:`v \leftarrow \beta v + (1 - \beta) (h^2 + \epsilon_1)` and :math:`u = h / \sqrt v`.

    Source: Shazeer and Stern, "Adafactor: Adaptive Learning Rates with Sublinear Memory Cost",
    arXiv:1804.04235. torch.optim.Adafactor uses a lower bound instead of adding :math:`\epsilon_1`;
    the results agree if both are small. optax.adafactor has :math:`\alpha` without
    :math:`t^{-1/2}`, like ``relative_step=False``.

    Means are computed in float64, on one thread.

    State: the tuple of arrays :math:`R` and :math:`C`, with the weight's shape without the last
    axis and without the second to last; for weights with fewer than two dimensions the array
    :math:`v`.

    Parameters
    ----------
    learning_rate : float or callable, optional
        Default 0.01; None uses the scheduler's ``base_lr``.
    decay_rate : float
        Exponent :math:`c`, at least 0. Default 0.8.
    eps1 : float
        :math:`\epsilon_1`, added to squared gradients, at least 0. Default 1e-30.
    eps2 : float
        :math:`\epsilon_2`, lower bound of the root mean square of a weight, at least 0. Default
        0.001.
    clip_threshold : float, optional
        Maximum root mean square :math:`d` of :math:`u`, at least 1e-30; None for no limit.
        Default 1.
    scale_parameter : bool
        Scale steps by the root mean square of the weight; otherwise :math:`\alpha` has no second
        factor. Default True.
    relative_step : bool
        Bound the learning rate by :math:`t^{-1/2}`. Default True.
    fallback : Optimizer or str, optional
        Optimizer of the weights in `fallback_for`, see :class:`~fastopt.optimizer.Muon`. Default
        None.
    fallback_for : str or sequence of str, optional
        Regular expressions for the names of weights that the fallback updates.
    cautious_decay : bool
        See :class:`~fastopt.optimizer.AdamW`, for the weights that the fallback does not update.
        Default False.
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
    >>> updater = optimizer.get_updater(optimizer.Adafactor(learning_rate=0.1))
    >>> weight = np.ones((2, 3), np.float32)
    >>> updater(0, np.array([[1, -2, 3], [2, -4, 6]], np.float32), weight)
    >>> weight.round(3)
    array([[0.9, 1.1, 0.9],
           [0.9, 1.1, 0.9]], dtype=float32)
    >>> [array.shape for array in updater.states[0]]
    [(2,), (3,)]

    With the given learning rate alone, as in optax:

    >>> made = optimizer.Adafactor(learning_rate=0.1, relative_step=False, scale_parameter=False)
    >>> updater, weight = optimizer.get_updater(made), np.ones((2, 3))
    >>> for _ in range(2):
    ...     updater(0, np.ones((2, 3)), weight)
    >>> weight[0].round(3)
    array([0.8, 0.8, 0.8])
    """

    takes_vectors = True
    learning_rate: RateAttribute = arg(default=0.01)
    decay_rate: float = arg(default=0.8, check=Real(least=0))
    eps1: float = arg(default=1e-30, check=Real(least=0))
    eps2: float = arg(default=0.001, check=Real(least=0))
    clip_threshold: float | None = arg(default=1.0, check=OrNone(Real(least=1e-30)))
    scale_parameter: bool = arg(default=True, check=FLAG)
    relative_step: bool = arg(default=True, check=FLAG)
    cautious_decay: bool = arg(default=False, check=FLAG, kw_only=True, new=True)
    rounds_state = False

    def share(self, index: Index) -> float:
        """Return the share of the present gradient in the second moments."""
        return float(self.updates_of(index) ** -self.decay_rate)

    def factor(self, index: Index, size: float) -> float:
        """Return the factor of the learning rate for a weight with root mean square `size`."""
        lr, bound = self._get_lr(index), 1 / math.sqrt(self.updates_of(index))
        factor = bound / lr if self.relative_step and lr > bound else 1.0
        if self.scale_parameter:
            factor *= size if not size < self.eps2 else self.eps2
        return factor

    def directions(self) -> _Factored:
        """See :meth:`MatrixFamily.directions`."""
        return _Factored()

    def slots(self, shape: Shape) -> Mapping[str, Shape]:
        """See :meth:`MatrixFamily.slots`."""
        if len(shape) < 2:
            return {"var": shape}
        return {"rows": shape[:-1], "columns": (*shape[:-2], shape[-1])}
