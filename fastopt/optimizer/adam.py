"""Adam."""

import math
from collections.abc import Callable
from typing import Any

from fastopt.arguments import FLAG, arg
from fastopt.kernels.rule import Hyper, Rule, Scalar, scalar
from fastopt.kernels.scalars import clipped_decayed, decayed
from fastopt.optimizer.families import (
    FORMULA,
    AdamFamily,
    Formula,
    biased_ratio,
    moment_rules,
)
from fastopt.optimizer.optimizer import corrected, register
from fastopt.optimizer.rates import RateAttribute


@scalar
def descended(weight: Scalar, grad: Scalar, mean: Scalar, var: Scalar, h: Hyper) -> Scalar:
    """Step along the first moment divided by the root of the second moment.

    ``lr``, and with torch's formula ``epsilon``, include the bias correction.
    """
    return weight - h.lr * mean / (math.sqrt(var) + h.epsilon)


RULES = {
    "mxnet": moment_rules("adam", clipped_decayed, descended),  # decay is inside of the clip
    "torch": moment_rules("adam_of_torch", decayed, descended),
}
"""Rules of each formula, without and with AMSGrad."""
adam = RULES["mxnet"][False]


def corrected_rate(t: Scalar, h: Hyper, carried: Any) -> None:
    """Fold the bias corrections of both moments into the learning rate.

    For torch's formula ``sqrt(v / c) + epsilon``, epsilon is multiplied by ``sqrt(c)`` too.
    """
    h.var_bias = 1 - h.beta2**t
    root = math.sqrt(h.var_bias)
    h.lr = h.lr * root / (1 - h.beta1**t)
    if h.corrects_epsilon != 0:
        h.epsilon = h.epsilon * root


@register
class Adam(AdamFamily):
    r"""Adam, with weight decay added to the gradient (L2 regularization, unlike AdamW).

    .. math::
        h &= \mathrm{clip}(r g + \lambda w) \\
        m &\leftarrow \beta_1 m + (1 - \beta_1) h \\
        v &\leftarrow \beta_2 v + (1 - \beta_2) h^2 \\
        w &\leftarrow w - \eta \frac{\sqrt{1 - \beta_2^t}}{1 - \beta_1^t}
            \frac{m}{\sqrt{v} + \epsilon}

    ``formula="torch"`` uses the formula of torch.optim.Adam and optax, where :math:`\epsilon` is
    added to the bias-corrected root, and the clip does not include the weight decay:

    .. math::
        h &= \mathrm{clip}(r g) + \lambda w \\
        w &\leftarrow w - \eta \frac{m}{1 - \beta_1^t}
            \Big/ \left( \sqrt{\frac{v}{1 - \beta_2^t}} + \epsilon \right)

    With `amsgrad`, :math:`p \leftarrow \max(p, v)` replaces :math:`v` under the root.

    Source: Kingma and Ba, "Adam: A Method for Stochastic Optimization", arXiv:1412.6980:
    algorithm 1 is torch's formula, the end of its section 2 is MXNet's. AMSGrad: Reddi, Kale and
    Kumar, "On the Convergence of Adam and Beyond", ICLR 2018, arXiv:1904.09237.

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
    lazy_update : bool, optional
        Update only the indexed rows of row-sparse gradients. Default True.
    formula : str
        'mxnet' or 'torch'. Default 'mxnet'.
    amsgrad : bool
        Divide by the root of the maximum of :math:`v` so far. Default False.
    cautious : bool
        Update only elements whose step has the sign of the gradient including weight decay, see
        :class:`~fastopt.optimizer.AdamW`. Default False.
    stable : bool
        Bound the root mean square of the tensor's step, see :class:`~fastopt.optimizer.AdamW`.
        Default False.
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
    >>> updater = optimizer.get_updater(optimizer.Adam(learning_rate=0.1))
    >>> weight = np.zeros(2)
    >>> updater(0, np.array([1.0, -5.0]), weight)
    >>> weight.round(6)
    array([-0.1,  0.1])

    With the formula and defaults of torch, and a row-sparse gradient:

    >>> updater = optimizer.get_updater(optimizer.Adam(learning_rate=0.1, formula="torch"))
    >>> table = np.zeros((3, 2))
    >>> updater(0, (np.ones((1, 2)), np.array([1])), table)
    >>> table.round(6)
    array([[ 0. ,  0. ],
           [-0.1, -0.1],
           [ 0. ,  0. ]])
    """

    lazy_by_default = True
    learning_rate: RateAttribute = arg(default=0.001)
    formula: Formula = arg(default="mxnet", check=FORMULA, kw_only=True, new=True)
    amsgrad: bool = arg(default=False, check=FLAG, kw_only=True, new=True)
    cautious: bool = arg(default=False, check=FLAG, kw_only=True, new=True)
    stable: bool = arg(default=False, check=FLAG, kw_only=True, new=True)
    positional = (*AdamFamily.positional, "lazy_update")
    ratio = staticmethod(biased_ratio)
    ratio_fields = ("var_bias",)

    @property
    def plain(self) -> Rule:
        """Rule of the selected formula."""
        return RULES[self.formula][self.amsgrad]

    @property
    def seen(self) -> Callable[..., Any]:
        """See :attr:`~fastopt.optimizer.families.Varied.seen`."""
        return clipped_decayed if self.formula == "mxnet" else decayed

    @corrected(corrected_rate, "corrects_epsilon", "var_bias")
    def hyper(self, t: int, lr: float, wd: float) -> dict[str, float]:
        """See :meth:`Optimizer.hyper <fastopt.optimizer.Optimizer.hyper>`."""
        fields = {**super().hyper(t, lr, wd), "var_bias": 1.0}
        return {**fields, "corrects_epsilon": float(self.formula == "torch")}
