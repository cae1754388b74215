"""Schedule-Free Prodigy: neither a learning rate nor its schedule is needed."""

import math
from collections.abc import Sequence
from typing import Any

from fastopt.arguments import OrNone, Real, arg, kept
from fastopt.kernels.rule import Hyper, Scalar, State, Step, rule
from fastopt.kernels.scalars import rescaled
from fastopt.optimizer.jointsums import DistanceFamily, EstimateOf, of_tensor
from fastopt.optimizer.optimizer import Array, Index, corrected, register
from fastopt.optimizer.rates import RateAttribute
from fastopt.optimizer.schedulefree import FREE, ScheduleFreeFamily, averaged, interpolated

ESTIMATE = "d", "d_numerator"


def parts(weight: Scalar, grad: Scalar, state: State, h: Hyper) -> State:
    """Return the progress of the fast weight along the gradient, and the absolute gradient sum."""
    _, total, start, lead = state
    grad = rescaled(grad, h)
    return grad * (start - weight - lead), abs(h.beta3 * total + h.sum_rate * grad)


@rule(
    state=("var", "sum", "start", "lead"),
    hyper=(
        *FREE,
        *("beta2", "var_rate", "beta3", "sum_rate", "progress_rate", "counts", "scale", "floor"),
    ),
    passes=((parts, of_tensor),),
    kept=("numerator", "denominator"),
)
def schedulefree_prodigy(weight: Scalar, grad: Scalar, state: State, h: Hyper) -> Step:
    """Step of the fast weight along the normalized gradient with decay, and the gradient sum."""
    var, total, start, lead = state
    grad = rescaled(grad, h)
    var = h.beta2 * var + h.var_rate * grad * grad
    total = h.beta3 * total + h.sum_rate * grad
    step = h.scale * grad / (math.sqrt(var) + h.floor) + h.wd * weight
    weight, lead = interpolated(weight, step, lead, h)
    return weight, (var, total, start, lead)


@register
class ScheduleFreeProdigy(DistanceFamily, ScheduleFreeFamily):
    r"""Schedule-Free Prodigy: needs neither a learning rate nor a schedule.

    .. math::
        h &= \mathrm{clip}(r g), \qquad \gamma = \eta_t d_k, \qquad
        v \leftarrow \beta_2 v + (1 - \beta_2) d_k^2 h^2 \\
        s &\leftarrow \beta_3 s + \frac{d_k^2}{d_0} h, \qquad
        q \leftarrow \beta_3 q + \frac{d_k^2}{d_0} \sum \langle h, z_0 - z \rangle \\
        z &\leftarrow z - \gamma \left( \frac{d_k h}{\sqrt v + d_k \epsilon} + \lambda w \right) \\
        x &\leftarrow (1 - c_t) x + c_t z, \qquad
        w = \beta_1 x + (1 - \beta_1) z \\
        d_{k + 1} &= \max\!\Big(d_k, \; c \min\!\Big(\frac{q}{\sum \|s\|_1}, \; g_{\max} d_k
            \Big)\Big)

    Gradients are computed at :math:`w`, the weight. Inside ``with updater.averaged():`` the weights
    hold :math:`x`, for evaluation; save checkpoints of the weights outside this context. The
    averaging rates :math:`c_t` are those of :class:`~fastopt.optimizer.ScheduleFreeAdamW`, with
    :math:`\gamma` as the learning rate. The estimate :math:`d` starts at :math:`d_0` = `d0`,
    :math:`c` is `d_coef`, :math:`g_{\max}` is `growth_rate`, and a first :math:`q` below 0 counts
    as 0. What is a step, and what the learning rate means, is as in
    :class:`~fastopt.optimizer.Prodigy`.

    Source: the package prodigy-plus-schedule-free with ``use_stableadamw=False, factored=False,
    split_groups=False``, except that it estimates from every eleventh element, and rounds s and
    :math:`z_0` to bfloat16. Mishchenko and Defazio, arXiv:2306.06101; Defazio et al.,
    arXiv:2405.15682.

    State: the tuple :math:`(v, s, z_0, z - w)` of arrays in the weight's shape, and two
    zero-dimensional arrays, the parameter's terms in both sums of the last step.

    Parameters
    ----------
    learning_rate : float or callable, optional
        Factor of the estimate. Default 1; None uses the scheduler's ``base_lr``.
    beta1 : float
        :math:`\beta_1`, at least 0.01 and below 1. Default 0.9.
    beta2 : float
        Decay rate of :math:`v`, at least 0 and below 1. Default 0.99.
    beta3 : float, optional
        Decay rate of the sums, at least 0 and below 1. Default None: :math:`\sqrt{\beta_2}`.
    epsilon : float
        :math:`\epsilon`, at least 0. Default 1e-8.
    d0 : float
        Initial estimate, at least 1e-30; must be set before the first update. Default 1e-6.
    d_coef : float
        Factor of the estimate, at least 0; the preferred way to tune it. Default 1.
    growth_rate : float
        Maximum factor by which the estimate grows in a step, at least 1. Default
        :math:`2^{1 / 4}`.
    warmup_steps : int
        Number of updates with a linearly increasing learning rate, at least 0. Default 0.
    r, weight_lr_power : float
        See :class:`~fastopt.optimizer.ScheduleFreeAdamW`. Defaults 0, 2.
    average_rate : float, optional
        Constant :math:`c_t`, above 0 and at most 1. Default None.
    **common
        Arguments of :class:`~fastopt.optimizer.Optimizer`; `state_dtype` must be None.

    Raises
    ------
    ValueError
        An argument is NaN or out of range. In an update: a list contains an index twice, or a
        learning rate multiplier is neither 0 nor 1. Nothing changes.

    Examples
    --------
    >>> import numpy as np
    >>> from fastopt import optimizer
    >>> updater = optimizer.get_updater(optimizer.ScheduleFreeProdigy())
    >>> weight = np.ones(2)
    >>> for _ in range(300):
    ...     updater(0, weight - np.array([3.0, -1.0]), weight)
    >>> with updater.averaged():
    ...     print(weight.round(1), f"{updater.info.d:.2f}")
    [ 3. -1.] 0.52
    """

    rule = schedulefree_prodigy
    same_in_groups = (
        *DistanceFamily.same_in_groups,
        *("beta3", "d_coef", "warmup_steps", "r", "weight_lr_power", "average_rate"),
    )
    learning_rate: RateAttribute = arg(default=1.0)
    beta1: float = arg(default=0.9, check=Real(least=0.01, below=1))
    beta2: float = arg(default=0.99)
    beta3: float | None = arg(default=None, check=OrNone(Real(least=0, below=1)))
    epsilon: float = arg(default=1e-08)
    d0: float = arg(default=1e-06)
    d_coef: float = arg(default=1.0, check=Real(least=0))
    growth_rate: float = arg(default=2**0.25)
    estimate: dict[str, float] = kept(factory=dict, check=EstimateOf(ESTIMATE))
    positional = (
        *("learning_rate", "beta1", "beta2", "beta3", "epsilon", "d0", "d_coef", "growth_rate"),
        *("warmup_steps", "r", "weight_lr_power", "average_rate"),
    )

    @property
    def inner(self) -> float:
        """Interpolation factor of the average in the weights at which gradients are computed."""
        return self.beta1

    def create_state(self, index: Index, weight: Array) -> Any:
        """See :meth:`Optimizer.create_state <fastopt.optimizer.Optimizer.create_state>`."""
        return self.with_start("start", super().create_state(index, weight), weight)

    @corrected(
        averaged,
        *("begun", "warmup_steps", "constant_share", "r", "weight_lr_power", "inner"),
        carries=True,
    )
    def hyper(self, t: int, lr: float, wd: float) -> dict[str, float]:
        """See :meth:`Optimizer.hyper <fastopt.optimizer.Optimizer.hyper>`."""
        free = ScheduleFreeFamily.hyper(self, t, lr, wd)
        if lr == 0:
            nothing = ("lr", "wd", "var_rate", "sum_rate", "progress_rate", "counts", "scale")
            still = ("beta2", "beta3", "floor")
            return {**free, **dict.fromkeys(nothing, 0.0), **dict.fromkeys(still, 1.0)}
        d = self.d
        return {
            **free,
            "lr": d * lr,
            "beta2": self.beta2,
            "var_rate": d * d * (1 - self.beta2),
            "beta3": self.sum_decay,
            "sum_rate": d * d / self.d0,
            "progress_rate": d * d / self.d0,
            "counts": 1.0,
            "scale": d,
            "floor": d * self.epsilon,
        }

    @property
    def sum_decay(self) -> float:
        """Decay rate of the sums."""
        return math.sqrt(self.beta2) if self.beta3 is None else self.beta3

    def advance(self, sums: Sequence[float]) -> None:
        """See :meth:`JointSums.advance <fastopt.optimizer.JointSums.advance>`."""
        progress, size = sums
        d, numerator = self.d, self.sum_decay * self.estimate.get("d_numerator", 0.0)
        if d > self.d0 or progress > 0:
            numerator += progress
        if size > 0:
            found = self.d_coef * min(numerator / size, d * self.growth_rate)
            d = found if found > d else d
        self.estimate.update(d=d, d_numerator=numerator)
