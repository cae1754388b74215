"""Prodigy: Adam with a learning rate estimated from the distance to a solution."""

import math
from collections.abc import Sequence
from typing import Any

from fastopt.arguments import FLAG, OrNone, Real, arg, kept
from fastopt.kernels.rule import Hyper, Scalar, State, Step, rule
from fastopt.optimizer.jointsums import EstimatedAdam, EstimateOf, of_tensor, with_decay
from fastopt.optimizer.optimizer import Array, Index, corrected, register
from fastopt.optimizer.rates import RateAttribute

ESTIMATE = "d", "d_max", "d_numerator"

FIELDS = (
    *("lr", "rescale_grad", "clip_gradient", "coupled", "shrink", "floor"),
    *("beta1", "mean_rate", "beta2", "var_rate", "beta3", "sum_rate", "progress_rate", "counts"),
)


def parts(weight: Scalar, grad: Scalar, state: State, h: Hyper) -> State:
    """Return the progress along the gradient since the start, and the absolute gradient sum."""
    grad = with_decay(weight, grad, h)
    return grad * (state[3] - weight), abs(h.beta3 * state[2] + h.sum_rate * grad)


@rule(
    state=("mean", "var", "sum", "start"),
    hyper=FIELDS,
    passes=((parts, of_tensor),),
    kept=("numerator", "denominator"),
)
def prodigy(weight: Scalar, grad: Scalar, state: State, h: Hyper) -> Step:
    """Adam's step with the estimated learning rate, and the gradient sum used to estimate it."""
    mean, var, total, start = state
    grad = with_decay(weight, grad, h)
    mean = h.beta1 * mean + h.mean_rate * grad
    var = h.beta2 * var + h.var_rate * grad * grad
    total = h.beta3 * total + h.sum_rate * grad
    weight = h.shrink * weight - h.lr * mean / (math.sqrt(var) + h.floor)
    return weight, (mean, var, total, start)


def corrected_rates(t: Scalar, h: Hyper, carried: Any) -> None:
    """Apply the bias correction to the learning rate and to everything proportional to it."""
    if h.lr > 0:
        scale = math.sqrt(1 - h.beta2**t) / (1 - h.beta1**t)
        h.lr = h.lr * scale
        h.shrink = 1 - h.lr * h.decay_rate
        h.progress_rate = h.progress_rate * scale
        if h.safeguarded == 0:
            h.sum_rate = h.sum_rate * scale


@register
class Prodigy(EstimatedAdam):
    r"""Prodigy: Adam with a learning rate estimated from the distance to a solution.

    .. math::
        h &= \mathrm{clip}(r g), \qquad \gamma = \eta d_k \\
        m &\leftarrow \beta_1 m + (1 - \beta_1) d_k h, \qquad
        v \leftarrow \beta_2 v + (1 - \beta_2) d_k^2 h^2 \\
        s &\leftarrow \beta_3 s + \frac{d_k}{d_0} \gamma h, \qquad
        q \leftarrow \beta_3 q + \frac{d_k}{d_0} \gamma \sum \langle h, w_0 - w \rangle \\
        w &\leftarrow (1 - \gamma \lambda) w - \gamma \frac{m}{\sqrt v + d_k \epsilon} \\
        d_{k + 1} &= \min\!\Big(d^{\max}, \; g_{\max} d_k\Big), \qquad
        d^{\max} \leftarrow \max\!\Big(d^{\max}, \; c \, q \Big/ \sum \|s\|_1 \Big)

    The sums run over all parameters of a step, so that there is a single estimate :math:`d`. It
    starts at :math:`d_0` = `d0` and never decreases. :math:`c` is `d_coef`, :math:`g_{\max}` is
    `growth_rate`, and :math:`w_0` are the weights before the first update. With `bias_correction`,
    :math:`\gamma` is multiplied by :math:`\sqrt{1 - \beta_2^t} / (1 - \beta_1^t)`. Without
    `decouple`, :math:`\lambda w` is added to :math:`h` instead.

    A step ends when a parameter that is already part of it is updated again: a call with a list is
    a step, and so are single calls for each parameter, with bitwise equal results. The next call
    uses the new :math:`d`, which is available as ``updater.info.d``. Parameters without a gradient
    in a step do not contribute to its estimate. With single calls, a parameter that was skipped
    contributes to the step in which it is next updated. A list must not contain an index twice.

    The learning rate is a factor for schedules, usually 1 at first, and the same for all
    parameters: multipliers must be 0 or 1. A parameter with learning rate 0 is not updated and does
    not contribute to the estimate. A non-finite gradient stays in the sums and so stops the growth
    of :math:`d`; a `loss_scaler` or `clip_global_norm` of the updater skips such gradients. Lazy
    updates do not change :math:`s` of rows that are not indexed; these rows count as
    :math:`\beta_3 |s|`, which makes the estimate smaller. `sparse_decay` must be 'touched'.

    Source: Mishchenko and Defazio, "Prodigy: An Expeditiously Adaptive Parameter-Free Learner",
    arXiv:2306.06101, algorithm 4, with the sums of the authors' package prodigyopt. That package
    has :math:`d_{k + 1} \epsilon` in the denominator, which requires all sums before the first
    weight is updated; so has optax.contrib.prodigy, which also always corrects the bias.

    State: the tuple of the arrays :math:`m, v, s, w_0`, in the weight's shape, and two
    zero-dimensional arrays, the parameter's terms in both sums of the last step.

    Parameters
    ----------
    learning_rate : float or callable, optional
        Default 1; None uses the scheduler's ``base_lr``.
    beta1, beta2 : float
        Decay rates of :math:`m` and :math:`v`, at least 0 and below 1. Defaults 0.9, 0.999.
    beta3 : float, optional
        Decay rate of the sums, at least 0 and below 1. Default None: :math:`\sqrt{\beta_2}`.
    epsilon : float
        :math:`\epsilon`, at least 0. Default 1e-8.
    d0 : float
        Initial estimate, at least 1e-30; must be set before the first update. Default 1e-6.
    d_coef : float
        Factor of the estimate, at least 0; the preferred way to tune it. Default 1.
    growth_rate : float
        Maximum factor by which the estimate grows in a step, at least 1. Default: infinity.
    decouple : bool
        Use decoupled weight decay. Default True.
    bias_correction : bool
        Correct the bias of both moments. Default False.
    safeguard_warmup : bool
        Leave the learning rate out of :math:`s`, for schedules with a warm-up. Default False.
    cautious, cautious_decay : bool
        See :class:`~fastopt.optimizer.AdamW`; `cautious_decay` needs `decouple`. Default False.
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
    >>> updater = optimizer.get_updater(optimizer.Prodigy())
    >>> weight, bias = np.ones(2), np.ones(1)
    >>> for _ in range(150):
    ...     updater([0, 1], [weight - 3, bias + 2], [weight, bias])
    >>> print(weight.round(1), bias.round(1), f"{updater.info.d:.2f}")
    [3. 3.] [-2.] 1.07
    """

    plain = prodigy
    same_in_groups = (
        *EstimatedAdam.same_in_groups,
        *("beta3", "d_coef", "bias_correction", "safeguard_warmup"),
    )
    learning_rate: RateAttribute = arg(default=1.0)
    beta1: float = arg(default=0.9)
    beta2: float = arg(default=0.999)
    beta3: float | None = arg(default=None, check=OrNone(Real(least=0, below=1)))
    epsilon: float = arg(default=1e-08)
    d0: float = arg(default=1e-06)
    d_coef: float = arg(default=1.0, check=Real(least=0))
    growth_rate: float = arg(default=math.inf)
    decouple: bool = arg(default=True)
    bias_correction: bool = arg(default=False, check=FLAG)
    safeguard_warmup: bool = arg(default=False, check=FLAG)
    estimate: dict[str, float] = kept(factory=dict, check=EstimateOf(ESTIMATE))
    positional = (
        *("learning_rate", "beta1", "beta2", "beta3", "epsilon", "d0", "d_coef", "growth_rate"),
        *("decouple", "bias_correction", "safeguard_warmup"),
    )

    def create_state(self, index: Index, weight: Array) -> Any:
        """See :meth:`Optimizer.create_state <fastopt.optimizer.Optimizer.create_state>`."""
        return self.with_start("start", super().create_state(index, weight), weight)

    @corrected(corrected_rates, "decay_rate", "safeguarded", when=lambda made: made.bias_correction)
    def hyper(self, t: int, lr: float, wd: float) -> dict[str, float]:
        """See :meth:`Optimizer.hyper <fastopt.optimizer.Optimizer.hyper>`."""
        if lr == 0:
            nothing = ("mean_rate", "var_rate", "sum_rate", "progress_rate", "counts", "coupled")
            still = ("beta1", "beta2", "beta3", "shrink", "floor")
            return {
                **dict.fromkeys((*nothing, "lr", "decay_rate", "safeguarded"), 0.0),
                **dict.fromkeys(still, 1.0),
            }
        d = self.d
        rate, scale = d * lr, d / self.d0
        decay = wd if self.decouple else 0.0
        return {
            "beta1": self.beta1,
            "mean_rate": d * (1 - self.beta1),
            "beta2": self.beta2,
            "var_rate": d * d * (1 - self.beta2),
            "beta3": self.sum_decay,
            "sum_rate": scale * (d if self.safeguard_warmup else rate),
            "progress_rate": scale * rate,
            "counts": 1.0,
            "lr": rate,
            "shrink": 1 - rate * decay,
            "decay_rate": decay,
            "coupled": wd - decay,
            "floor": d * self.epsilon,
            "safeguarded": float(self.safeguard_warmup),
        }

    @property
    def sum_decay(self) -> float:
        """Decay rate of the sums."""
        return math.sqrt(self.beta2) if self.beta3 is None else self.beta3

    def advance(self, sums: Sequence[float]) -> None:
        """See :meth:`JointSums.advance <fastopt.optimizer.JointSums.advance>`."""
        progress, size = sums
        if size != 0:
            d, known = self.d, self.estimate
            numerator = self.sum_decay * known.get("d_numerator", 0.0) + progress
            found = self.d_coef * numerator / size
            if d == self.d0 and found > d:
                d = found
            largest = known.get("d_max", self.d0)
            largest = found if found > largest else largest
            now = min(largest, d * self.growth_rate), largest, numerator
            known.update(zip(ESTIMATE, now, strict=True))
