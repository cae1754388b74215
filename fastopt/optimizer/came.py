"""CAME: Adafactor with momentum, whose steps are smaller where they are unstable."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from fastopt._kernels.factored import confident, stepped
from fastopt.arguments import FLAG, Real, alias, arg
from fastopt.optimizer.factoredsteps import FactoredSteps, clipped_factor
from fastopt.optimizer.matrices import MatrixFamily, Shape
from fastopt.optimizer.optimizer import Array, Index, register
from fastopt.optimizer.rates import RateAttribute


class _Confident(FactoredSteps):
    """Directions: momentum divided by the root of the factored second moment of its residuals."""

    def run(
        self,
        main: "CAME",
        index: Index,
        target: Array,
        weight: Array,
        grad: Array,
        state: tuple[Array, ...],
        record: Array,
    ) -> None:
        """See :meth:`RowSteps.run <fastopt.optimizer.rowsteps.RowSteps.run>`."""
        mean, *moments, left, right = state
        share = 1 - main.beta2
        steps = self.measured(grad, weight, moments, share, main.eps1, record)
        source, flat = steps.source, steps.source.shape
        self.call(
            confident(grad.dtype.type),
            *(source, mean.reshape(flat), left.reshape(flat[:2]), right.reshape(-1, flat[2])),
            *(steps.scales, steps.sums, clipped_factor(steps.size, main.clip_threshold)),
            *(1 - main.beta1, 1 - main.beta3, main.eps2, record),
        )
        record["rescale_grad"], record["clip_gradient"] = 1, np.inf  # mean is scaled already
        self.call(stepped(), mean.reshape(flat), steps.scales, target.reshape(flat), record)

    def write_vector(
        self, main: "CAME", index: Index, weight: Array, direction: Array, grad: Array, state: Any
    ) -> None:
        """See :meth:`FactoredSteps.write_vector`."""
        mean, var = state
        step, size = self.divided(main, grad, var, 1 - main.beta2)
        step *= step.dtype.type(clipped_factor(size, main.clip_threshold))
        mean += (step - mean) * step.dtype.type(1 - main.beta1)
        direction[...] = mean


@register
class CAME(MatrixFamily):
    r"""CAME: Adafactor with momentum, whose steps are smaller where they are unstable.

    .. math::
        h &= \mathrm{clip}(r g), \qquad
        u = \frac{h}{\sqrt{\mathrm{moment}_{\beta_2}(h^2 + \epsilon_1)}}, \qquad
        \hat u = \frac{u}{\max(1, \mathrm{RMS}(u) / d)} \\
        m &\leftarrow \beta_1 m + (1 - \beta_1) \hat u \\
        w &\leftarrow (1 - \eta \lambda) w
            - \eta \frac{m}{\sqrt{\mathrm{moment}_{\beta_3}((\hat u - m)^2 + \epsilon_2)}}

    with the factored second moment

    .. math::
        R_i &\leftarrow \beta R_i + (1 - \beta) \frac{1}{m} \sum_j x_{ij}, \qquad
        C_j \leftarrow \beta C_j + (1 - \beta) \frac{1}{n} \sum_i x_{ij} \\
        \mathrm{moment}_\beta(x)_{ij} &= R_i C_j \Big/ \frac{1}{n} \sum_k R_k

    for a matrix of n rows and m columns. For weights with more than two dimensions, rows and
    columns are the last two axes. Weights with fewer dimensions have a second moment for each
    element, :math:`v \leftarrow \beta_2 v + (1 - \beta_2) (h^2 + \epsilon_1)`, and the step
    :math:`\eta m`. There is no bias correction: a schedule should start with a warm-up.

    Source: Luo et al., "CAME: Confidence-guided Adaptive Memory Efficient Optimization",
    arXiv:2307.02047, with the code of the authors.

    State: the tuple of the arrays :math:`m`, in the weight's shape, R and C of the gradients, and
    those of the residuals; for weights with fewer than two dimensions :math:`m` and :math:`v`.

    Parameters
    ----------
    learning_rate : float or callable, optional
        Default 0.0002; None uses the scheduler's ``base_lr``.
    beta1, beta2, beta3 : float
        Decay rates of :math:`m`, and of the moments of gradients and residuals, at least 0 and
        below 1. Defaults 0.9, 0.999, 0.9999.
    eps1, eps2 : float
        :math:`\epsilon_1` and :math:`\epsilon_2`, at least 0. Defaults 1e-30, 1e-16.
    clip_threshold : float
        Maximum root mean square :math:`d` of :math:`u`, at least 1e-30. Default 1.
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
        `fallback_for` is given without `fallback`.
    TypeError
        An argument has the wrong type, or the fallback has no rule. In an update: the gradient is
        row-sparse, or the weight is on a CUDA device.

    Examples
    --------
    >>> import numpy as np
    >>> from fastopt import optimizer
    >>> updater = optimizer.get_updater(optimizer.CAME(learning_rate=0.01))
    >>> weight = np.ones((2, 3), np.float32)
    >>> updater(0, np.array([[1, -2, 3], [2, -4, 6]], np.float32), weight)
    >>> weight.round(3)
    array([[0.889, 1.111, 0.889],
           [0.889, 1.111, 0.889]], dtype=float32)
    >>> [array.shape for array in updater.states[0]]
    [(2, 3), (2,), (3,), (2,), (3,)]
    """

    takes_vectors = True
    learning_rate: RateAttribute = arg(default=0.0002)
    beta1: float = arg(default=0.9, check=Real(least=0, below=1))
    beta2: float = arg(default=0.999, check=Real(least=0, below=1))
    beta3: float = arg(default=0.9999, check=Real(least=0, below=1))
    eps1: float = arg(default=1e-30, check=Real(least=0))
    eps2: float = arg(default=1e-16, check=Real(least=0))
    clip_threshold: float = arg(default=1.0, check=Real(least=1e-30))
    cautious: bool = arg(default=False, check=FLAG, kw_only=True, new=True)
    cautious_decay: bool = arg(default=False, check=FLAG, kw_only=True, new=True)
    betas: tuple[float, float, float] = alias(
        "beta1", "beta2", "beta3", default=(0.9, 0.999, 0.9999), kw_only=True
    )
    rounds_state = False

    def directions(self) -> _Confident:
        """See :meth:`MatrixFamily.directions`."""
        return _Confident()

    def slots(self, shape: Shape) -> Mapping[str, Shape]:
        """See :meth:`MatrixFamily.slots`."""
        if len(shape) < 2:
            return {"mean": shape, "var": shape}
        rows, columns = shape[:-1], (*shape[:-2], shape[-1])
        moments = {"rows": rows, "columns": columns}
        return {"mean": shape, **moments, "residual rows": rows, "residual columns": columns}
