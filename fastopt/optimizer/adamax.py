"""AdaMax."""

from collections.abc import Callable
from typing import Any

from fastopt.arguments import FLAG, alias, arg
from fastopt.kernels.rule import Hyper, Scalar, State, Step, rule
from fastopt.kernels.scalars import clipped_decayed
from fastopt.optimizer.families import MOMENTS, AdamFamily
from fastopt.optimizer.optimizer import corrected, register
from fastopt.optimizer.rates import RateAttribute


@rule(
    state=("mean", "norm"),
    signed=("mean",),
    nonnegative=("norm",),
    hyper=tuple(f for f in MOMENTS if f != "one_minus_beta2"),
)
def adamax(weight: Scalar, grad: Scalar, state: State, h: Hyper) -> Step:
    """Mean gradient divided by its decaying maximum; no step where the maximum is 0."""
    mean, norm = state
    grad = clipped_decayed(weight, grad, h)
    mean = h.beta1 * mean + h.one_minus_beta1 * grad
    norm = h.beta2 * norm
    size = abs(grad)
    if not size <= norm:
        norm = size
    if not norm:
        return weight, (mean, norm)
    return weight - h.lr * mean / norm, (mean, norm)


def corrected_rate(t: Scalar, h: Hyper, carried: Any) -> None:
    """Fold the bias correction of the first moment into the learning rate."""
    h.lr = h.lr / (1 - h.beta1**t)


@register
class Adamax(AdamFamily):
    r"""AdaMax: Adam in the infinity norm.

    .. math::
        h &= \mathrm{clip}(r g + \lambda w) \\
        m &\leftarrow \beta_1 m + (1 - \beta_1) h \\
        u &\leftarrow \max(\beta_2 u, |h|) \\
        w &\leftarrow w - \frac{\eta}{1 - \beta_1^t} \frac{m}{u}

    An element with :math:`u = 0` does not change. Source: Kingma and Ba, "Adam: A Method for
    Stochastic Optimization", arXiv:1412.6980, section 7.

    State: the tuple :math:`(m, u)` of arrays in the weight's shape.

    Parameters
    ----------
    learning_rate : float or callable, optional
        Default 0.002; None uses the scheduler's ``base_lr``.
    beta1, beta2 : float
        Decay rates of :math:`m` and :math:`u`, at least 0 and below 1. Defaults 0.9, 0.999.
    cautious : bool
        Update only elements whose step has the sign of the gradient including weight decay, see
        :class:`~fastopt.optimizer.AdamW`. Default False.
    **common
        Arguments of :class:`~fastopt.optimizer.Optimizer`.

    Raises
    ------
    ValueError
        An argument is NaN or out of range.

    Examples
    --------
    >>> import numpy as np
    >>> from fastopt import optimizer
    >>> updater = optimizer.get_updater(optimizer.Adamax(learning_rate=0.1))
    >>> weight = np.ones(3)
    >>> updater(0, np.array([1.0, -5.0, 0.0]), weight)
    >>> weight
    array([0.9, 1.1, 1. ])
    """

    plain = adamax

    epsilon: float = arg(default=0.0, init=False)
    eps: float = alias("epsilon", default=0.0, kw_only=True, init=False)
    cautious: bool = arg(default=False, check=FLAG, kw_only=True, new=True)
    learning_rate: RateAttribute = arg(default=0.002)

    @property
    def seen(self) -> Callable[..., Any]:
        """See :attr:`~fastopt.optimizer.families.Varied.seen`."""
        return clipped_decayed

    hyper = corrected(corrected_rate)(AdamFamily.hyper)
