"""DAdaptAdam: Adam with D-Adaptation, a learning rate estimated from the distance to a solution."""

import math
from collections.abc import Sequence

from fastopt.arguments import FLAG, arg, kept
from fastopt.kernels.rule import Hyper, Scalar, State, Step, rule
from fastopt.optimizer.jointsums import EstimatedAdam, EstimateOf, of_tensor, with_decay
from fastopt.optimizer.optimizer import register
from fastopt.optimizer.rates import RateAttribute

ESTIMATE = "d", "numerator_weighted"


def parts(weight: Scalar, grad: Scalar, state: State, h: Hyper) -> State:
    """Return the gradient times the normalized gradient sum, and the absolute gradient sum."""
    _, var, total = state
    grad = with_decay(weight, grad, h)
    along = total / (math.sqrt(var) + h.epsilon) if total != type(weight)(0) else total
    return grad * along, abs(h.beta3 * total + h.sum_rate * grad)


@rule(
    state=("mean", "var", "sum"),
    hyper=(
        *("lr", "rescale_grad", "clip_gradient", "coupled", "shrink", "epsilon", "beta1", "beta2"),
        *("mean_rate", "var_rate", "beta3", "sum_rate", "progress_rate", "counts"),
    ),
    passes=((parts, of_tensor),),
    kept=("numerator", "denominator"),
)
def dadaptadam(weight: Scalar, grad: Scalar, state: State, h: Hyper) -> Step:
    """Adam's step, whose first moment has the estimated rate, and the gradient sum."""
    mean, var, total = state
    grad = with_decay(weight, grad, h)
    mean = h.beta1 * mean + h.mean_rate * grad
    var = h.beta2 * var + h.var_rate * grad * grad
    total = h.beta3 * total + h.sum_rate * grad
    weight = h.shrink * weight - h.lr * mean / (math.sqrt(var) + h.epsilon)
    return weight, (mean, var, total)


@register
class DAdaptAdam(EstimatedAdam):
    r"""DAdaptAdam: Adam with D-Adaptation, which estimates the learning rate.

    .. math::
        h &= \mathrm{clip}(r g) + \lambda w, \qquad \gamma = \eta d_k, \qquad
        \beta_3 = \sqrt{\beta_2} \\
        q &\leftarrow \beta_3 q + (1 - \beta_3) \gamma \sum \left\langle h, \frac{s}{\sqrt v +
            \epsilon} \right\rangle \\
        m &\leftarrow \beta_1 m + (1 - \beta_1) \gamma h, \qquad
        v \leftarrow \beta_2 v + (1 - \beta_2) h^2, \qquad
        s \leftarrow \beta_3 s + (1 - \beta_3) \gamma h \\
        w &\leftarrow w - \frac{m}{\sqrt v + \epsilon} \\
        d_{k + 1} &= \max\!\Big(d_k, \; \min\!\Big(\frac{q}{(1 - \beta_3) \sum \|s\|_1}, \;
            g_{\max} d_k\Big)\Big)

    The sums run over all parameters of a step, so that there is a single estimate :math:`d`. It
    starts at :math:`d_0` = `d0` and never decreases; :math:`g_{\max}` is `growth_rate`. With
    `bias_correction`, :math:`\gamma` is multiplied by
    :math:`\sqrt{1 - \beta_2^t} / (1 - \beta_1^t)`. With `decouple`, the weight is multiplied by
    :math:`1 - \gamma \lambda` instead of adding :math:`\lambda w` to :math:`h`.

    What is a step, what the learning rate means and what row-sparse gradients do is as in
    :class:`~fastopt.optimizer.Prodigy`.

    Source: Defazio and Mishchenko, "Learning-Rate-Free Learning by D-Adaptation",
    arXiv:2301.07733, in the form of the authors' package dadaptation.

    State: the tuple of the arrays :math:`m, v, s`, in the weight's shape, and two zero-dimensional
    arrays, the parameter's terms in both sums of the last step.

    Parameters
    ----------
    learning_rate : float or callable, optional
        Default 1; None uses the scheduler's ``base_lr``.
    beta1, beta2 : float
        Decay rates of :math:`m` and :math:`v`, at least 0 and below 1. Defaults 0.9, 0.999.
    epsilon : float
        :math:`\epsilon`, at least 0. Default 1e-8.
    d0 : float
        Initial estimate, at least 1e-30; must be set before the first update. Default 1e-6.
    growth_rate : float
        Maximum factor by which the estimate grows in a step, at least 1. Default: infinity.
    decouple : bool
        Use decoupled weight decay. Default False.
    bias_correction : bool
        Correct the bias of both moments. Default False.
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
    >>> updater = optimizer.get_updater(optimizer.DAdaptAdam(beta2=0.99))
    >>> weight, bias = np.ones(2), np.ones(1)
    >>> for _ in range(300):
    ...     updater([0, 1], [weight - 3, bias + 2], [weight, bias])
    >>> print(weight.round(1), bias.round(1), f"{updater.info.d:.2f}")
    [3. 3.] [-2.] 3.94
    """

    plain = dadaptadam
    same_in_groups = (*EstimatedAdam.same_in_groups, "bias_correction")
    learning_rate: RateAttribute = arg(default=1.0)
    beta1: float = arg(default=0.9)
    beta2: float = arg(default=0.999)
    epsilon: float = arg(default=1e-08)
    d0: float = arg(default=1e-06)
    growth_rate: float = arg(default=math.inf)
    decouple: bool = arg(default=False)
    bias_correction: bool = arg(default=False, check=FLAG)
    estimate: dict[str, float] = kept(factory=dict, check=EstimateOf(ESTIMATE))

    def hyper(self, t: int, lr: float, wd: float) -> dict[str, float]:
        """See :meth:`Optimizer.hyper <fastopt.optimizer.Optimizer.hyper>`."""
        if lr == 0:
            nothing = ("lr", "mean_rate", "var_rate", "sum_rate", "progress_rate", "counts")
            still = ("beta1", "beta2", "beta3", "shrink", "epsilon")
            return {**dict.fromkeys((*nothing, "coupled"), 0.0), **dict.fromkeys(still, 1.0)}
        rate, beta3 = self.d * lr, math.sqrt(self.beta2)
        if self.bias_correction:
            rate *= math.sqrt(1 - self.beta2**t) / (1 - self.beta1**t)
        return {
            "lr": 1.0,
            "beta1": self.beta1,
            "mean_rate": rate * (1 - self.beta1),
            "beta2": self.beta2,
            "var_rate": 1 - self.beta2,
            "beta3": beta3,
            "sum_rate": rate * (1 - beta3),
            "progress_rate": rate,
            "counts": 1.0,
            "shrink": 1 - rate * wd if self.decouple else 1.0,
            "coupled": 0.0 if self.decouple else wd,
            "epsilon": self.epsilon,
        }

    def advance(self, sums: Sequence[float]) -> None:
        """See :meth:`JointSums.advance <fastopt.optimizer.JointSums.advance>`."""
        progress, size = sums
        if size != 0:
            d, beta3 = self.d, math.sqrt(self.beta2)
            numerator = self.estimate.get("numerator_weighted", 0.0)
            numerator = beta3 * numerator + (1 - beta3) * progress
            found = min(numerator / ((1 - beta3) * size), d * self.growth_rate)
            self.estimate.update(d=found if found > d else d, numerator_weighted=numerator)
