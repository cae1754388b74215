"""Learning rates for each layer: LARS, LAMB and LANS."""

import math

from fastopt.arguments import FLAG, OrNone, Real, TableOf, alias, arg, kept
from fastopt.kernels.rule import Carried, Hyper, Rule, Scalar, State, Step, Sums, rule, scalar
from fastopt.kernels.scalars import moments, rescaled
from fastopt.optimizer.families import (
    MEAN_AND_VAR,
    MOMENTS,
    AdamFamily,
    MomentumFamily,
    mean_and_var,
    squared,
)
from fastopt.optimizer.optimizer import Index, Optimizer, PerIndex, corrected, endings, register
from fastopt.optimizer.sgd import sgd, sgd_momentum


def lars_sums(weight: Scalar, grad: Scalar, state: State, h: Hyper) -> State:
    """Return the squares of the weight and of the raw gradient."""
    return weight * weight, grad * grad


def lars_finish(sums: Sums, h: Hyper) -> None:
    """Scale the learning rate of the layer, unless one of the norms is 0."""
    weight, grad = math.sqrt(sums[0]), math.sqrt(sums[1])
    if weight == 0 or grad == 0:
        return
    grad = grad * (h.rescale_grad * h.direction)
    h.lr = h.lr * h.eta * weight / (grad + h.wd * weight + h.epsilon)


PASSES, FIELDS = ((lars_sums, lars_finish),), ("eta", "epsilon", "direction")
lars = sgd.with_passes("lars", PASSES, *FIELDS, rounded=True)
lars_momentum = sgd_momentum.with_passes("lars_momentum", PASSES, *FIELDS, rounded=True)


def corrected_momentum(t: Scalar, h: Hyper, carried: Carried) -> None:
    """Scale the momentum by the change of the learning rate since the last update."""
    if h.momentum_correction != 0 and carried[0] != 0:
        h.momentum = h.momentum * (h.rate / carried[0])
    carried[0] = h.rate


@register
class LARS(MomentumFamily):
    r"""LARS: gradient descent with a layer-wise learning rate.

    .. math::
        \eta' &= \eta \frac{\eta_0 \|w\|}{r \|g\| + \lambda \|w\| + \epsilon} \\
        m &\leftarrow \mu m - \eta' (\mathrm{clip}(r g) + \lambda w) \\
        w &\leftarrow w + m

    with :math:`\eta_0` = `eta`. Parameters whose name ends in ``gamma``, ``beta`` or ``bias``,
    and layers with a norm of 0, use :math:`\eta' = \eta`. Norms are summed in float64, in an order
    that does not depend on the number of threads. By default weight decay applies only to names
    whose last part, after ``_``, ``.`` or ``/``, is ``weight`` or ``kernel``.

    Source: You, Gitman and Ginsburg, "Large Batch Training of Convolutional Networks",
    arXiv:1708.03888.

    State: None, or with momentum the array :math:`m`, in the weight's shape.

    Parameters
    ----------
    momentum : float
        Momentum :math:`\mu`. Default 0.
    lazy_update : bool, optional
        Update only the indexed rows of row-sparse gradients. Default True.
    eta : float
        Trust coefficient :math:`\eta_0`. Default 0.001.
    eps : float
        :math:`\epsilon`, at least 0. Default 0.
    momentum_correction : bool
        After a change of the learning rate, multiply the momentum by the ratio of the new to the
        old learning rate in the next update of the parameter. Default True.
    **common
        Arguments of :class:`~fastopt.optimizer.Optimizer`.

    Raises
    ------
    ValueError
        An argument is NaN or out of range.

    Examples
    --------
    >>> import numpy as np
    >>> import fastopt
    >>> updater = fastopt.Updater(fastopt.LARS(lr=1.0, eta=0.1))
    >>> weight = np.array([3.0, 4.0])
    >>> updater.step(np.array([0.0, 10.0]), weight)
    >>> weight
    array([3. , 3.5])
    """

    forms = (lars, lars_momentum)
    lazy_by_default = master_last = True
    _decayed = endings("weight", "kernel")
    eta: float = arg(default=0.001, check=Real())
    eps: float = arg(default=0.0, check=Real(least=0))
    momentum_correction: bool = arg(default=True, check=FLAG)
    epsilon: float = alias("eps", default=1e-8, kw_only=True)
    positional = ("momentum", "lazy_update", "eta", "eps", "momentum_correction")
    _last_rates: PerIndex = kept(factory=PerIndex, check=TableOf(Real(least=0)))

    def rule_for(self, index: Index) -> Rule:
        """See :meth:`Optimizer.rule_for <fastopt.optimizer.Optimizer.rule_for>`."""
        plain = self.idx2name.get(index, "").endswith(("gamma", "beta", "bias"))
        return ((sgd, sgd_momentum) if plain else self.forms)[self.momentum != 0]

    carried_in = "_last_rates"
    hyper = corrected(corrected_momentum, "momentum", "rate", "momentum_correction", carries=True)(
        Optimizer.hyper
    )


TRUST = (*MOMENTS, "mean_scale", "var_scale", "lower_bound", "upper_bound")

BOUND = OrNone(Real(least=0, infinite=True))


@scalar
def trust_ratio(square_weight: Scalar, square_step: Scalar, h: Hyper) -> Scalar:
    """Return the bounded weight norm over the step norm, or 1 if either is 0."""
    norm = math.sqrt(square_weight)
    if norm > h.upper_bound:
        norm = h.upper_bound * 1.0
    if norm < h.lower_bound:
        norm = h.lower_bound * 1.0
    step = math.sqrt(square_step)
    return 1.0 if norm == 0 or step == 0 else norm / step


class TrustFamily(AdamFamily):
    """Abstract base of optimizers like Adam whose steps are scaled by the norms of the layer.

    Parameters
    ----------
    learning_rate, beta1, beta2, epsilon
        See :class:`~fastopt.optimizer.families.AdamFamily`. Default of `epsilon`: 1e-6.
    lower_bound, upper_bound : float, optional
        Bounds of the norm of the weight, at least 0; None or 0 for no bound.
    bias_correction : bool
        Correct the bias of both moments.
    **common
        Arguments of :class:`~fastopt.optimizer.Optimizer`.

    Raises
    ------
    ValueError
        An argument is NaN or out of range.
    """

    epsilon: float = arg(default=1e-06)
    lower_bound: float | None = arg(default=None, check=BOUND)
    upper_bound: float | None = arg(default=None, check=BOUND)
    bias_correction: bool = arg(default=True, check=FLAG)

    @corrected(mean_and_var, when=lambda made: made.bias_correction)
    def hyper(self, t: int, lr: float, wd: float) -> dict[str, float]:
        """See :meth:`Optimizer.hyper <fastopt.optimizer.Optimizer.hyper>`."""
        return {"lower_bound": self.lower_bound or 0.0, "upper_bound": self.upper_bound or math.inf}


@scalar
def direction(
    weight: Scalar, grad: Scalar, state: State, h: Hyper
) -> tuple[Scalar, Scalar, Scalar]:
    """Return Adam's step with decay, before the trust ratio, and the new moments."""
    mean, var = moments(rescaled(grad, h), state, h)
    root = math.sqrt(var * h.var_scale) + h.epsilon
    return mean * h.mean_scale / root + h.wd * weight, mean, var


def lamb_sums(weight: Scalar, grad: Scalar, state: State, h: Hyper) -> State:
    """Return the squares of the weight and of the step."""
    step, _, _ = direction(weight, grad, state, h)
    return weight * weight, step * step


def lamb_finish(sums: Sums, h: Hyper) -> None:
    """Scale the learning rate by the trust ratio."""
    h.lr = h.lr * trust_ratio(sums[0], sums[1], h)


@rule(**MEAN_AND_VAR, hyper=TRUST, passes=((lamb_sums, lamb_finish),))
def lamb(weight: Scalar, grad: Scalar, state: State, h: Hyper) -> Step:
    """Adam's step with the layer's learning rate."""
    step, mean, var = direction(weight, grad, state, h)
    return weight - h.lr * step, (mean, var)


@register
class LAMB(TrustFamily):
    r"""LAMB: Adam with a layer-wise learning rate, for large batches.

    .. math::
        h &= \mathrm{clip}(r g) \\
        m &\leftarrow \beta_1 m + (1 - \beta_1) h, \qquad
        v \leftarrow \beta_2 v + (1 - \beta_2) h^2 \\
        q &= \frac{\hat m}{\sqrt{\hat v} + \epsilon} + \lambda w \\
        w &\leftarrow w - \eta \frac{\min(\max(\|w\|, l), u)}{\|q\|} q

    with :math:`\hat m = m / (1 - \beta_1^t)`, :math:`\hat v = v / (1 - \beta_2^t)`, and a ratio
    of 1 if either norm is 0. Norms are summed in float64, in an order that does not depend on the
    number of threads.

    Source: You et al., "Large Batch Optimization for Deep Learning: Training BERT in 76
    minutes", arXiv:1904.00962.

    State: the tuple :math:`(m, v)` of arrays in the weight's shape.

    Parameters
    ----------
    learning_rate : float or callable, optional
        Default 0.001; None uses the scheduler's ``base_lr``.
    beta1, beta2 : float
        Decay rates of :math:`m` and :math:`v`, at least 0 and below 1. Defaults 0.9, 0.999.
    epsilon : float
        :math:`\epsilon`, at least 0. Default 1e-6.
    lower_bound, upper_bound : float, optional
        Bounds :math:`l, u` of the weight norm. Default None; None and 0 mean no bound.
    bias_correction : bool
        Correct the bias of the moving averages; otherwise :math:`\hat m = m` and
        :math:`\hat v = v`. Default True.
    **common
        Arguments of :class:`~fastopt.optimizer.Optimizer`.

    Raises
    ------
    ValueError
        An argument is NaN or out of range.

    Examples
    --------
    >>> import numpy as np
    >>> import fastopt
    >>> updater = fastopt.Updater(fastopt.LAMB(lr=0.1))
    >>> weight = np.ones(2)
    >>> updater.step(np.array([1.0, -5.0]), weight)
    >>> weight.round(6)
    array([0.9, 1.1])
    """

    rule = lamb


@scalar
def directions(
    weight: Scalar, grad: Scalar, state: State, h: Hyper
) -> tuple[Scalar, Scalar, Scalar, Scalar]:
    """Return the steps along the mean and the current gradient, and the new moments."""
    grad = rescaled(grad, h) * h.inverse_norm
    mean, var = moments(grad, state, h)
    root = math.sqrt(var * h.var_scale) + h.epsilon
    decay = h.wd * weight
    return mean * h.mean_scale / root + decay, grad / root + decay, mean, var


def norm_finish(sums: Sums, h: Hyper) -> None:
    """Compute the inverse of the gradient norm, or 1 if the norm is 0."""
    h.inverse_norm = 1.0 / math.sqrt(sums[0]) if sums[0] != 0 else 1.0


def trust_sums(weight: Scalar, grad: Scalar, state: State, h: Hyper) -> State:
    """Return the squares of the weight and of both steps."""
    along_mean, along_grad, _, _ = directions(weight, grad, state, h)
    return weight * weight, along_mean * along_mean, along_grad * along_grad


def trust_finish(sums: Sums, h: Hyper) -> None:
    """Compute the learning rates of both steps."""
    h.mean_rate = h.lr * h.beta1 * trust_ratio(sums[0], sums[1], h)
    h.grad_rate = h.lr * h.one_minus_beta1 * trust_ratio(sums[0], sums[2], h)


@rule(
    **MEAN_AND_VAR,
    hyper=(*TRUST, "inverse_norm", "mean_rate", "grad_rate"),
    passes=((squared, norm_finish), (trust_sums, trust_finish)),
)
def lans(weight: Scalar, grad: Scalar, state: State, h: Hyper) -> Step:
    """Both steps, each with its own learning rate."""
    along_mean, along_grad, mean, var = directions(weight, grad, state, h)
    return weight - h.mean_rate * along_mean - h.grad_rate * along_grad, (mean, var)


@register
class LANS(TrustFamily):
    r"""LANS: LAMB with normalized gradients and Nesterov momentum.

    .. math::
        h &= \mathrm{clip}(r g), \qquad h \leftarrow h / \|h\| \\
        m &\leftarrow \beta_1 m + (1 - \beta_1) h, \qquad
        v \leftarrow \beta_2 v + (1 - \beta_2) h^2 \\
        q &= \frac{\hat m}{\sqrt{\hat v} + \epsilon} + \lambda w, \qquad
        c = \frac{h}{\sqrt{\hat v} + \epsilon} + \lambda w \\
        w &\leftarrow w - \eta \left( \beta_1 \frac{\phi(\|w\|)}{\|q\|} q
            + (1 - \beta_1) \frac{\phi(\|w\|)}{\|c\|} c \right)

    with :math:`\hat m = m / (1 - \beta_1^t)`, :math:`\hat v = v / (1 - \beta_2^t)`,
    :math:`\phi(x) = \min(\max(x, l), u)`, and a ratio of 1 if either norm is 0.

    Source: Zheng et al., "Accelerated Large Batch Optimization of BERT Pretraining in 54
    minutes", arXiv:2006.13484.

    State: the tuple :math:`(m, v)` of arrays in the weight's shape.

    Parameters
    ----------
    learning_rate : float or callable, optional
        Default 0.001; None uses the scheduler's ``base_lr``.
    beta1, beta2 : float
        Decay rates of :math:`m` and :math:`v`, at least 0 and below 1. Defaults 0.9, 0.999.
    epsilon : float
        :math:`\epsilon`, at least 0. Default 1e-6.
    lower_bound, upper_bound : float, optional
        Bounds :math:`l, u` of the weight norm. Default None; None and 0 mean no bound.
    bias_correction : bool
        Correct the bias of the moving averages; otherwise :math:`\hat m = m` and
        :math:`\hat v = v`. Default True.
    **common
        Arguments of :class:`~fastopt.optimizer.Optimizer`.

    Raises
    ------
    ValueError
        An argument is NaN or out of range.

    Examples
    --------
    >>> import numpy as np
    >>> import fastopt
    >>> updater = fastopt.Updater(fastopt.LANS(lr=0.1))
    >>> weight = np.ones(2)
    >>> updater.step(np.array([3.0, -3.0]), weight)
    >>> weight.round(6)
    array([0.9, 1.1])
    """

    rule = lans
