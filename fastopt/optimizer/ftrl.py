"""FTRL-Proximal and FTML: minimizers of the sum of all steps so far."""

import math
from collections.abc import Mapping

from fastopt.arguments import Real, arg
from fastopt.kernels.rule import Carried, Hyper, Scalar, State, Step, rule
from fastopt.kernels.scalars import COMMON, clip, clipped_decayed, rescaled
from fastopt.optimizer.families import MOMENTS, AdamFamily
from fastopt.optimizer.optimizer import Optimizer, RateAttribute, constant, corrected, register


@rule(state=("z", "n"), hyper=(*COMMON, "inverse_lr", "lamda1", "beta"))
def ftrl(weight: Scalar, grad: Scalar, state: State, h: Hyper) -> Step:
    """Minimizer of the proximal sum so far; exactly 0 within the L1 threshold."""
    if not h.lr:
        return weight, state
    z, n = state
    grad = rescaled(grad, h)
    root = math.sqrt(n)
    n = n + grad * grad
    new_root = math.sqrt(n)
    z = z + grad - (new_root - root) * h.inverse_lr * weight
    excess = clip(z, h.lamda1) - z
    weight = excess / ((h.beta + new_root) * h.inverse_lr + h.wd) if excess else excess
    return weight, (z, n)


@register
class Ftrl(Optimizer):
    r"""FTRL-Proximal: follow the regularized leader, with L1 and L2 regularization.

    .. math::
        h &= \mathrm{clip}(r g) \\
        z &\leftarrow z + h - \frac{\sqrt{n + h^2} - \sqrt{n}}{\eta} w, \qquad
        n \leftarrow n + h^2 \\
        w &\leftarrow \begin{cases}
            0 & |z| \le \lambda_1 \\
            \dfrac{\mathrm{sign}(z) \lambda_1 - z}{(\beta + \sqrt{n}) / \eta + \lambda}
            & \text{otherwise}
        \end{cases}

    The new weight depends only on :math:`z` and :math:`n`: a coordinate whose gradient has always
    been 0 becomes 0 at the first update, whatever its initial value. A learning rate of 0 changes
    nothing.

    Source: McMahan et al., "Ad Click Prediction: a View from the Trenches", KDD 2013.

    State: the tuple :math:`(z, n)` of arrays in the weight's shape.

    Parameters
    ----------
    lamda1 : float
        L1 regularization :math:`\lambda_1`. Default 0.01.
    learning_rate : float or callable, optional
        Default 0.1; None uses the scheduler's ``base_lr``.
    beta : float
        :math:`\beta`, at least 0. Default 1.
    **common
        Arguments of :class:`~fastopt.optimizer.Optimizer`; `wd` is :math:`\lambda`.

    Raises
    ------
    ValueError
        An argument is NaN or out of range.

    Examples
    --------
    >>> import numpy as np
    >>> import fastopt
    >>> updater = fastopt.Updater(fastopt.Ftrl(lamda1=0.5))
    >>> weight = np.zeros(2)
    >>> updater.step(np.array([2.0, 0.4]), weight)
    >>> weight
    array([-0.05,  0.  ])
    """

    rule = ftrl
    lazy_by_default = True
    lamda1: float = arg(default=0.01, check=Real())
    learning_rate: RateAttribute = arg(default=0.1)
    beta: float = arg(default=1.0, check=Real(least=0))
    positional = ("lamda1", "learning_rate", "beta")

    @constant
    def hyper(self, t: int, lr: float, wd: float) -> Mapping[str, float]:
        """See :meth:`Optimizer.hyper <fastopt.optimizer.Optimizer.hyper>`."""
        return {"inverse_lr": 1 / lr if lr else 0.0}


@rule(state=("d", "v", "z"), hyper=(*MOMENTS, "inverse_lr", "var_scale"))
def ftml(weight: Scalar, grad: Scalar, state: State, h: Hyper) -> Step:
    """Weight that minimizes the sum of the regularized linear models so far."""
    if not h.lr:
        return weight, state
    d, v, z = state
    grad = clipped_decayed(weight, grad, h)
    v = h.beta2 * v + h.one_minus_beta2 * grad * grad
    leader = h.inverse_lr * (math.sqrt(v * h.var_scale) + h.epsilon)
    z = h.beta1 * z + h.one_minus_beta1 * grad - (leader - h.beta1 * d) * weight
    return -z / leader, (leader, v, z)


def corrected_scales(t: Scalar, h: Hyper, carried: Carried) -> None:
    """Compute the scales of this step, including the bias corrections."""
    h.inverse_lr = (1 - h.beta1**t) / h.lr if h.lr != 0 else 0.0
    h.var_scale = 1 / (1 - h.beta2**t)


@register
class FTML(AdamFamily):
    r"""FTML: follow the moving leader.

    .. math::
        h &= \mathrm{clip}(r g + \lambda w) \\
        v &\leftarrow \beta_2 v + (1 - \beta_2) h^2 \\
        D &= \frac{1 - \beta_1^t}{\eta}
            \left( \sqrt{\frac{v}{1 - \beta_2^t}} + \epsilon \right) \\
        z &\leftarrow \beta_1 z + (1 - \beta_1) h - (D - \beta_1 d) w \\
        d &\leftarrow D, \qquad w \leftarrow -z / D

    A learning rate of 0 changes nothing. Source: Zheng and Kwok, "Follow the Moving Leader in Deep
    Learning", ICML 2017.

    State: the tuple :math:`(d, v, z)` of arrays in the weight's shape.

    Parameters
    ----------
    beta1, beta2 : float
        Decay rates, at least 0 and below 1. Defaults 0.6, 0.999.
    epsilon : float
        :math:`\epsilon`, at least 0. Default 1e-8.
    learning_rate : float or callable, optional
        See :class:`~fastopt.optimizer.Optimizer`. Default 0.01.
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
    >>> updater = fastopt.Updater(fastopt.FTML(lr=0.1))
    >>> weight = np.ones(2)
    >>> updater.step(np.array([1.0, -5.0]), weight)
    >>> weight.round(6)
    array([0.9, 1.1])
    """

    rule = ftml

    beta1: float = arg(default=0.6)
    learning_rate: RateAttribute = arg(default=None)
    positional = ("beta1", "beta2", "epsilon", "learning_rate")

    hyper = corrected(corrected_scales, "lr")(Optimizer.hyper)
