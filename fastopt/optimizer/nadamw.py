"""NAdamW: Adam with Nesterov momentum and decoupled weight decay."""

from typing import Any, Literal

from fastopt.arguments import FLAG, Choice, arg
from fastopt.kernels.rule import Hyper, Rule, Scalar, scalar
from fastopt.kernels.variants import beside_decay
from fastopt.optimizer.families import MOMENTS, StableFamily, moment_rules, scaled_ratio
from fastopt.optimizer.nadam import look_ahead
from fastopt.optimizer.optimizer import corrected, register

FIELDS = (*MOMENTS, "grad_scale", "mean_scale", "var_scale")


@scalar
def with_decay(weight: Scalar, grad: Scalar, mean: Scalar, var: Scalar, h: Hyper) -> Scalar:
    """Step, with decay of the present weight."""
    return weight - (look_ahead(grad, mean, var, h) + h.lr * h.wd * weight)


RULES = moment_rules("nadamw", beside_decay, with_decay, FIELDS)
"""Rules without and with AMSGrad."""


def corrected_scales(t: Scalar, h: Hyper, carried: Any) -> None:
    """Compute the scales of the gradient and of both moments, including the bias corrections."""
    h.grad_scale = h.one_minus_beta1 / (1 - h.beta1**t)
    h.mean_scale = h.beta1 / (1 - h.beta1 ** (t + h.ahead))
    h.var_scale = 1 / (1 - h.beta2**t)


@register
class NAdamW(StableFamily):
    r"""NAdamW: Adam with Nesterov momentum and decoupled weight decay.

    .. math::
        h &= \mathrm{clip}(r g) \\
        m &\leftarrow \beta_1 m + (1 - \beta_1) h, \qquad
        v \leftarrow \beta_2 v + (1 - \beta_2) h^2 \\
        w &\leftarrow w - \eta \left( \left( \frac{\beta_1 m}{1 - \beta_1^{t + 1}}
            + \frac{(1 - \beta_1) h}{1 - \beta_1^t} \right)
            \Big/ \left( \sqrt{\frac{v}{1 - \beta_2^t}} + \epsilon \right) + \lambda w \right)

    This is optax.nadamw. With ``correction="present"`` the first exponent is also :math:`t`, as in
    the baselines of AlgoPerf. For `amsgrad`, `stable`, `cautious` and `cautious_decay` see
    :class:`~fastopt.optimizer.AdamW`.

    The default weight decay is 0, that of optax.nadamw 1e-4.

    Source: Dozat, "Incorporating Nesterov Momentum into Adam", ICLR 2016 workshop; Loshchilov and
    Hutter, "Decoupled Weight Decay Regularization", arXiv:1711.05101; Dahl et al., "Benchmarking
    Neural Network Training Algorithms", arXiv:2306.07179.

    State: the tuple :math:`(m, v)` of arrays in the weight's shape, with `amsgrad`
    :math:`(m, v, p)`.

    Parameters
    ----------
    learning_rate : float or callable, optional
        Default 0.001; None uses the scheduler's ``base_lr``.
    beta1, beta2 : float
        Decay rates of :math:`m` and :math:`v`, at least 0 and below 1. Defaults 0.9, 0.999.
    epsilon : float
        :math:`\epsilon`, at least 0. Default 1e-8.
    correction : str
        Step whose bias correction is applied to :math:`m`: 'next' or 'present'. Default 'next'.
    amsgrad : bool
        Divide by the root of the maximum of :math:`v` so far. Default False.
    cautious : bool
        Update only elements whose step has the sign of the gradient. Default False.
    cautious_decay : bool
        Decay only weights that the step does not move away from 0. Default False.
    stable : bool
        Bound the root mean square of the tensor's step. Default False.
    **common
        Arguments of :class:`~fastopt.optimizer.Optimizer`.

    Raises
    ------
    ValueError
        An argument is NaN, out of range, or incompatible with the others.

    Examples
    --------
    >>> import numpy as np
    >>> from fastopt import optimizer
    >>> updater = optimizer.get_updater(optimizer.NAdamW(learning_rate=0.1, wd=0.01))
    >>> weight = np.ones(2, np.float32)
    >>> updater(0, np.array([1.0, -5.0], np.float32), weight)
    >>> print(weight.round(4))
    [0.8516 1.1464]

    Elements whose step has another sign than their gradient are not updated:

    >>> updater = optimizer.get_updater(optimizer.NAdamW(learning_rate=0.1, cautious=True))
    >>> weight = np.ones(2)
    >>> for grad in ([1.0, 1.0], [1.0, -0.1]):
    ...     updater(0, np.array(grad), weight)
    >>> weight.round(4)
    array([0.6212, 0.8526])
    """

    ratio = staticmethod(scaled_ratio)
    correction: Literal["next", "present"] = arg(
        default="next", check=Choice("next", "present"), kw_only=True
    )
    amsgrad: bool = arg(default=False, check=FLAG, kw_only=True)

    @property
    def plain(self) -> Rule:
        """Rule without or with AMSGrad."""
        return RULES[self.amsgrad]

    @corrected(corrected_scales, "ahead")
    def hyper(self, t: int, lr: float, wd: float) -> dict[str, float]:
        """See :meth:`Optimizer.hyper <fastopt.optimizer.Optimizer.hyper>`."""
        return {
            **super().hyper(t, lr, wd),
            "grad_scale": 1.0,
            "mean_scale": 1.0,
            "var_scale": 1.0,
            "ahead": float(self.correction == "next"),
        }
