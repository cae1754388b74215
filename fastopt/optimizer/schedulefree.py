"""Schedule-Free optimizers: averaging of the weights instead of a learning rate schedule."""

import math
from collections.abc import Mapping, Sequence
from operator import attrgetter
from typing import Any, ClassVar

from fastopt.arguments import Integer, OrNone, Real, TableOf, arg, kept
from fastopt.kernels.rule import Carried, Hyper, Scalar, State, Step, rule, scalar
from fastopt.kernels.scalars import COMMON, decayed, rescaled
from fastopt.optimizer.families import AdamFamily
from fastopt.optimizer.optimizer import (
    Array,
    Optimizer,
    PerIndex,
    RateAttribute,
    corrected,
    register,
)

FREE = (*COMMON, "pull", "one_minus_pull", "weight_rate", "lead_rate")
"""Hyper-parameters of the rules."""

FREE_STEP = (
    *("begin_num_update", "warmup_steps", "constant_share", "r", "weight_lr_power", "inner"),
)
"""Fields that :func:`averaged` reads beside them."""


@scalar
def interpolated(weight: Scalar, step: Scalar, lead: Scalar, h: Hyper) -> State:
    """Return the weight w and the lead z - w after a step of the fast weight z."""
    moved = weight + h.pull * lead - h.weight_rate * step
    return moved, h.one_minus_pull * (lead - h.lead_rate * step)


def averaged(t: Scalar, h: Hyper, carried: Carried) -> None:
    """Compute the learning rate of this step, and the averaging rate of the fast weight."""
    past = t - h.begin_num_update
    if past < h.warmup_steps:
        h.lr = h.lr * (past / h.warmup_steps)
    share = h.constant_share
    if share == 0:
        part = past**h.r * h.lr**h.weight_lr_power
        carried[0] = carried[0] + part
        share = part / carried[0] if carried[0] > 0 else 0.0
    h.pull = share
    h.one_minus_pull = 1 - share
    h.weight_rate = h.lr * (1 - h.inner * (1 - share))
    h.lead_rate = h.lr * h.inner


class ScheduleFreeFamily(Optimizer):
    """Abstract base of Schedule-Free optimizers.

    Parameters
    ----------
    learning_rate : float or callable, optional
        None uses the scheduler's ``base_lr``.
    warmup_steps : int
        Number of updates with a linearly increasing learning rate, at least 0. Default 0.
    r, weight_lr_power : float
        Exponents of the update number and of the learning rate in the averaging weights. Defaults
        0, 2.
    average_rate : float, optional
        Constant averaging rate of the fast weights. Default None.
    **common
        Arguments of :class:`~fastopt.optimizer.Optimizer`.

    Raises
    ------
    ValueError
        An argument is NaN or out of range.
    """

    learning_rate: RateAttribute = arg(default=None)
    warmup_steps: int = arg(default=0, check=Integer(least=0))
    r: float = arg(default=0.0, check=Real(least=0))
    weight_lr_power: float = arg(default=2.0, check=Real(least=0))
    average_rate: float | None = arg(default=None, check=OrNone(Real(least=1e-09, most=1)))
    _weight_sums: PerIndex = kept(factory=PerIndex, check=TableOf(Real(least=0)))

    inner: ClassVar[Any]
    """Interpolation factor of the average in the weights at which gradients are computed."""

    carried_in = "_weight_sums"

    @corrected(averaged, *FREE_STEP, carries=True)
    def hyper(self, t: int, lr: float, wd: float) -> Mapping[str, float]:
        """See :meth:`Optimizer.hyper <fastopt.optimizer.Optimizer.hyper>`."""
        return {"constant_share": self.average_rate or 0.0, "inner": self.inner}

    def evaluated(self, weight: Array, state: Sequence[Array]) -> Array:
        """See :meth:`Optimizer.evaluated <fastopt.optimizer.Optimizer.evaluated>`."""
        averages: Array = weight - (1 / self.inner - 1) * state[-1]
        return averages


@rule(state=("lead",), hyper=FREE)
def schedulefree_sgd(weight: Scalar, grad: Scalar, state: State, h: Hyper) -> Step:
    """Step of the fast weight along the gradient with decay."""
    weight, lead = interpolated(weight, decayed(weight, grad, h), state[0], h)
    return weight, (lead,)


@register
class ScheduleFreeSGD(ScheduleFreeFamily):
    r"""Schedule-Free SGD: needs neither a learning rate schedule nor the number of steps.

    .. math::
        z &\leftarrow z - \eta_t (\mathrm{clip}(r g) + \lambda w) \\
        x &\leftarrow (1 - c_t) x + c_t z, \qquad w = \mu x + (1 - \mu) z

    Gradients are computed at :math:`w`, the weight. Inside ``with updater.averaged():`` the weights
    hold :math:`x`, for evaluation. For :math:`\eta_t`, :math:`c_t` and the other arguments see
    :class:`~fastopt.optimizer.ScheduleFreeAdamW`. This is SGDScheduleFree of the package
    schedulefree.

    Source: Defazio et al., "The Road Less Scheduled", arXiv:2405.15682.

    State: the array :math:`z - w`, in the weight's shape.

    Parameters
    ----------
    learning_rate : float or callable, optional
        Default 1; None uses the scheduler's ``base_lr``.
    momentum : float
        :math:`\mu`, at least 0.01 and below 1. Default 0.9.
    warmup_steps : int
        Number of updates with a linearly increasing learning rate, at least 0. Default 0.
    r, weight_lr_power : float
        Exponents of the update number and of the learning rate in the averaging weights, at least
        0. Defaults 0, 2.
    average_rate : float, optional
        Constant :math:`c_t`, above 0 and at most 1. Default None.
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
    >>> updater = fastopt.Updater(fastopt.ScheduleFreeSGD(lr=0.1))
    >>> weight = np.ones(2, np.float32)
    >>> for _ in range(3):
    ...     updater.step(np.array([1.0, -5.0], np.float32), weight)
    >>> with updater.averaged():
    ...     print(weight.round(4))
    [0.8 2. ]
    """

    rule = schedulefree_sgd
    learning_rate: RateAttribute = arg(default=1.0)
    momentum: float = arg(default=0.9, check=Real(least=0.01, below=1))
    positional = (
        *("learning_rate", "momentum", "warmup_steps", "r", "weight_lr_power", "average_rate"),
    )

    inner = property(attrgetter("momentum"))


@rule(state=("var", "lead"), hyper=(*FREE, "beta2", "one_minus_beta2", "epsilon", "var_scale"))
def schedulefree_adamw(weight: Scalar, grad: Scalar, state: State, h: Hyper) -> Step:
    """Step of the fast weight along the normalized gradient with decay."""
    grad = rescaled(grad, h)
    var = h.beta2 * state[0] + h.one_minus_beta2 * grad * grad
    step = grad / (math.sqrt(var * h.var_scale) + h.epsilon) + h.wd * weight
    weight, lead = interpolated(weight, step, state[1], h)
    return weight, (var, lead)


def averaged_and_corrected(t: Scalar, h: Hyper, carried: Carried) -> None:
    """Compute the factors of `averaged`, and the bias correction of the second moment."""
    averaged(t, h, carried)
    h.var_scale = 1 / (1 - h.beta2**t)


@register
class ScheduleFreeAdamW(ScheduleFreeFamily, AdamFamily):
    r"""Schedule-Free AdamW: needs neither a learning rate schedule nor the number of steps.

    .. math::
        h &= \mathrm{clip}(r g), \qquad v \leftarrow \beta_2 v + (1 - \beta_2) h^2 \\
        z &\leftarrow z - \eta_t \left( h \Big/ \left( \sqrt{\frac{v}{1 - \beta_2^t}} + \epsilon
            \right) + \lambda w \right) \\
        x &\leftarrow (1 - c_t) x + c_t z, \qquad
        w = \beta_1 x + (1 - \beta_1) z

    Gradients are computed at :math:`w`, the weight. Inside ``with updater.averaged():`` the weights
    hold :math:`x`, for evaluation; save checkpoints of the weights outside this context. The
    learning rate is :math:`\eta_t = \eta \min(1, t / T)` with :math:`T` = `warmup_steps`, and
    :math:`c_t = a_t / \sum_{i \le t} a_i` with :math:`a_t = t^r \eta_t^p`, where :math:`r` is `r`
    and :math:`p` is `weight_lr_power`. With `average_rate`, :math:`c_t` is that constant, as in
    generalized primal averaging.

    This is AdamWScheduleFree of the package schedulefree, except that its :math:`a_t` uses the
    maximum learning rate so far; results differ only after the learning rate has decreased.

    Source: Defazio et al., "The Road Less Scheduled", arXiv:2405.15682; generalized primal
    averaging: arXiv:2512.17131.

    State: the tuple :math:`(v, z - w)` of arrays in the weight's shape.

    Parameters
    ----------
    learning_rate : float or callable, optional
        Default 0.0025; None uses the scheduler's ``base_lr``.
    beta1 : float
        :math:`\beta_1`, at least 0.01 and below 1. Default 0.9.
    beta2 : float
        Decay rate of :math:`v`, at least 0 and below 1. Default 0.999.
    epsilon : float
        :math:`\epsilon`, at least 0. Default 1e-8.
    warmup_steps : int
        :math:`T`, at least 0. Default 0: no warm-up.
    r, weight_lr_power : float
        :math:`r` and :math:`p`, at least 0. Defaults 0, 2.
    average_rate : float, optional
        Constant :math:`c_t`, above 0 and at most 1. Default None.
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
    >>> updater = fastopt.Updater(fastopt.ScheduleFreeAdamW(lr=0.1))
    >>> weight = np.ones(2, np.float32)
    >>> for _ in range(3):
    ...     updater.step(np.array([1.0, -5.0], np.float32), weight)
    >>> with updater.averaged():
    ...     print(weight.round(4))
    [0.8 1.2]
    >>> print(weight.round(4))
    [0.79 1.21]
    """

    rule = schedulefree_adamw
    learning_rate: RateAttribute = arg(default=0.0025)
    beta1: float = arg(default=0.9, check=Real(least=0.01, below=1))
    positional = (
        *("learning_rate", "beta1", "beta2", "epsilon", "warmup_steps", "r", "weight_lr_power"),
        *("average_rate",),
    )

    inner = property(attrgetter("beta1"))

    hyper = corrected(averaged_and_corrected, *FREE_STEP, carries=True)(ScheduleFreeFamily.hyper)
