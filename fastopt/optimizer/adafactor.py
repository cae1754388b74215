"""Adafactor and CAME: second moments of rows and columns instead of single elements."""

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from fastopt._kernels.factored import confident, factored, stepped
from fastopt.arguments import FLAG, OrNone, Real, alias, arg
from fastopt.optimizer.matrices import Arrays, Main, MatrixOptimizer, Shape, Update
from fastopt.optimizer.optimizer import Array, Index, RateAttribute, register
from fastopt.optimizer.rowsteps import RowSteps


class Measured(NamedTuple):
    """Gradients, and the inverse roots of their second moments."""

    source: Array
    """Gradients, as a batch of matrices."""
    scales: Array
    """Inverse roots of rows and columns, which the gradients are multiplied by."""
    sums: Array
    """Scratch memory for sums of columns in float64."""
    size: float
    """Root mean square of the products."""
    weight_size: float
    """Root mean square of the weight."""


class FactoredSteps(RowSteps[Main]):
    """Abstract base of directions with the second moments of rows and columns."""

    def fits(self, main: Main, weight: Array, grad: Array, state: Arrays) -> bool:
        """See :meth:`RowSteps.fits <fastopt.optimizer.rowsteps.RowSteps.fits>`."""
        return weight.ndim > 1 and super().fits(main, weight, grad, state)

    def measured(
        self, update: Update, record: Array, moments: Sequence[Array], share: float, floor: float
    ) -> Measured:
        """Move the moments of rows and columns by `share` towards those of squared gradients."""
        weight, grad = update.weight, update.grad
        height, width = grad.shape[-2:]
        flat, (rows, columns) = (grad.size // (height * width), height, width), moments
        scales = self.buffers("scales", (flat[0], height + width), grad.dtype)
        sums, source = self.buffers("sums", (width,), np.float64), grad.reshape(flat)
        squares, sizes = self.call(
            factored(grad.dtype.type),
            *(source, weight.reshape(flat), rows.reshape(flat[:2]), columns.reshape(-1, width)),
            *(scales, sums, share, floor, record),
        )
        roots = (math.sqrt(total / grad.size) for total in (squares, sizes))
        return Measured(source, scales, sums, *roots)

    def write(self, main: Main, update: Update) -> bool:
        """See :meth:`Directions.write <fastopt.optimizer.matrices.Directions.write>`."""
        if update.target.ndim > 1:
            return super().write(main, update)
        with np.errstate(all="ignore"):  # NaN and infinity propagate without a warning
            self.write_vector(main, update)
        return True

    def write_vector(self, main: Main, update: Update) -> None:
        """Write direction and state of a weight with fewer than two dimensions."""
        raise NotImplementedError

    def divided(
        self, main: "Adafactor | CAME", grad: Array, var: Array, share: float
    ) -> tuple[Array, float]:
        """Move `var` towards the squared gradient; return a quotient and its root mean square."""
        var += (grad * grad + grad.dtype.type(main.eps1) - var) * share
        step = np.asarray(grad / np.sqrt(var))
        return step, root_mean_square(step)


def root_mean_square(array: Array) -> float:
    """Return the root mean square, with the squares summed in float64."""
    return math.sqrt(np.square(array, dtype=np.float64).sum() / array.size)


def clipped_factor(size: float, threshold: float | None) -> float:
    """Return the factor of a direction of root mean square `size` that bounds it."""
    return 1.0 if threshold is None or size <= threshold else threshold / size


class _Factored(FactoredSteps["Adafactor"]):
    """Directions: gradients divided by the root of the factored second moment."""

    def run(self, main: "Adafactor", update: Update, record: Array) -> None:
        """See :meth:`RowSteps.run <fastopt.optimizer.rowsteps.RowSteps.run>`."""
        steps = self.measured(update, record, update.state, main.share(update.parameter), main.eps1)
        factor = main.factor(update.parameter, steps.weight_size)
        target = update.target.reshape(steps.source.shape)
        record["lr"] *= factor * clipped_factor(steps.size, main.clip_threshold)
        self.call(stepped(), steps.source, steps.scales, target, record)

    def write_vector(self, main: "Adafactor", update: Update) -> None:
        """See :meth:`FactoredSteps.write_vector`."""
        index, weight, direction, grad, (var,) = update
        step, size = self.divided(main, grad, var, main.share(index))
        factor = main.factor(index, root_mean_square(weight))
        factor *= clipped_factor(size, main.clip_threshold)
        np.multiply(step, step.dtype.type(factor), out=direction)


@register
class Adafactor(MatrixOptimizer):
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
    >>> import fastopt
    >>> updater = fastopt.Updater(fastopt.Adafactor(lr=0.1))
    >>> weight = np.ones((2, 3), np.float32)
    >>> updater.step({"w": np.array([[1, -2, 3], [2, -4, 6]], np.float32)}, {"w": weight})
    >>> weight.round(3)
    array([[0.9, 1.1, 0.9],
           [0.9, 1.1, 0.9]], dtype=float32)
    >>> [array.shape for array in updater.states["w"]]
    [(2,), (3,)]

    With the given learning rate alone, as in optax:

    >>> adafactor = fastopt.Adafactor(lr=0.1, relative_step=False, scale_parameter=False)
    >>> updater, weight = fastopt.Updater(adafactor), np.ones((2, 3))
    >>> for _ in range(2):
    ...     updater.step({"w": np.ones((2, 3))}, {"w": weight})
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
    cautious: bool = arg(default=False, init=False)

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

    directions = _Factored

    def slots(self, shape: Shape) -> Mapping[str, Shape]:
        """See :meth:`MatrixOptimizer.slots`."""
        if len(shape) < 2:
            return {"var": shape}
        return {"rows": shape[:-1], "columns": (*shape[:-2], shape[-1])}


class _Confident(FactoredSteps["CAME"]):
    """Directions: momentum divided by the root of the factored second moment of its residuals."""

    def run(self, main: "CAME", update: Update, record: Array) -> None:
        """See :meth:`RowSteps.run <fastopt.optimizer.rowsteps.RowSteps.run>`."""
        _, _, target, grad, (mean, *moments, left, right) = update
        steps = self.measured(update, record, moments, 1 - main.beta2, main.eps1)
        source, flat = steps.source, steps.source.shape
        self.call(
            confident(grad.dtype.type),
            *(source, mean.reshape(flat), left.reshape(flat[:2]), right.reshape(-1, flat[2])),
            *(steps.scales, steps.sums, clipped_factor(steps.size, main.clip_threshold)),
            *(1 - main.beta1, 1 - main.beta3, main.eps2, record),
        )
        record["rescale_grad"], record["clip_gradient"] = 1, np.inf  # mean is scaled already
        self.call(stepped(), mean.reshape(flat), steps.scales, target.reshape(flat), record)

    def write_vector(self, main: "CAME", update: Update) -> None:
        """See :meth:`FactoredSteps.write_vector`."""
        _, _, direction, grad, (mean, var) = update
        step, size = self.divided(main, grad, var, 1 - main.beta2)
        step *= step.dtype.type(clipped_factor(size, main.clip_threshold))
        mean += (step - mean) * step.dtype.type(1 - main.beta1)
        direction[...] = mean


@register
class CAME(MatrixOptimizer):
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
    >>> import fastopt
    >>> updater = fastopt.Updater(fastopt.CAME(lr=0.01))
    >>> weight = np.ones((2, 3), np.float32)
    >>> updater.step({"w": np.array([[1, -2, 3], [2, -4, 6]], np.float32)}, {"w": weight})
    >>> weight.round(3)
    array([[0.889, 1.111, 0.889],
           [0.889, 1.111, 0.889]], dtype=float32)
    >>> [array.shape for array in updater.states["w"]]
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
    betas: tuple[float, float, float] = alias(
        "beta1", "beta2", "beta3", default=(0.9, 0.999, 0.9999), kw_only=True
    )

    directions = _Confident

    def slots(self, shape: Shape) -> Mapping[str, Shape]:
        """See :meth:`MatrixOptimizer.slots`."""
        if len(shape) < 2:
            return {"mean": shape, "var": shape}
        rows, columns = shape[:-1], (*shape[:-2], shape[-1])
        moments = {"rows": rows, "columns": columns}
        return {"mean": shape, **moments, "residual rows": rows, "residual columns": columns}
