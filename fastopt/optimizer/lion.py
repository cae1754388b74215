"""Lion: evolved sign momentum."""

from fastopt.arguments import alias, arg
from fastopt.kernels.rule import Hyper, Scalar, State, Step, rule
from fastopt.kernels.scalars import rescaled, sign
from fastopt.optimizer.families import MOMENTS, CautiousFamily
from fastopt.optimizer.optimizer import register
from fastopt.optimizer.rates import RateAttribute


@rule(state=("mom",), signed=("mom",), hyper=tuple(f for f in MOMENTS if f != "epsilon"))
def lion(weight: Scalar, grad: Scalar, state: State, h: Hyper) -> Step:
    """Step along the sign of one average; another average is the state."""
    (mom,) = state
    grad = rescaled(grad, h)
    step = sign(h.beta1 * mom + h.one_minus_beta1 * grad) + h.wd * weight
    return weight - h.lr * step, (h.beta2 * mom + h.one_minus_beta2 * grad,)


@register
class Lion(CautiousFamily):
    r"""Lion: steps of equal magnitude along the sign of the averaged gradient.

    .. math::
        h &= \mathrm{clip}(r g) \\
        w &\leftarrow w - \eta (\mathrm{sign}(\beta_1 m + (1 - \beta_1) h) + \lambda w) \\
        m &\leftarrow \beta_2 m + (1 - \beta_2) h

    Weight decay is decoupled. For `cautious` and `cautious_decay` see
    :class:`~fastopt.optimizer.AdamW`. Source: Chen et al., "Symbolic Discovery of Optimization
    Algorithms", arXiv:2302.06675.

    State: the array :math:`m`, in the weight's shape.

    Parameters
    ----------
    learning_rate : float or callable, optional
        Default 0.0001; None uses the scheduler's ``base_lr``.
    beta1, beta2 : float
        Decay rates of the average in the step and of :math:`m`, at least 0 and below 1. Defaults
        0.9, 0.99.
    cautious : bool
        Update only elements whose step has the sign of the gradient. Default False.
    cautious_decay : bool
        Decay only weights that the step does not move away from 0. Default False.
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
    >>> updater = optimizer.get_updater(optimizer.Lion(learning_rate=0.1))
    >>> weight = np.ones(3)
    >>> updater(0, np.array([1.0, 0.0, -5.0]), weight)
    >>> weight
    array([0.9, 1. , 1.1])
    """

    plain = lion

    epsilon: float = arg(default=0.0, init=False)
    eps: float = alias("epsilon", default=0.0, kw_only=True, init=False)
    learning_rate: RateAttribute = arg(default=0.0001)
    beta2: float = arg(default=0.99)
