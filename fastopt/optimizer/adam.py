"""Adam and AdamW."""

import math
from collections.abc import Callable
from typing import Any

from fastopt.arguments import FLAG, OrNone, Real, arg
from fastopt.kernels.rule import Carried, Hyper, Rule, Scalar, scalar
from fastopt.kernels.scalars import clipped_decayed, decayed
from fastopt.kernels.variants import beside_decay as without_decay
from fastopt.kernels.variants import rate_times_decay
from fastopt.optimizer.families import (
    FORMULA,
    MOMENTS,
    AdamFamily,
    DecoupledFamily,
    Formula,
    biased_ratio,
    moment_rules,
)
from fastopt.optimizer.optimizer import corrected, register


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


CORRECTED = ("corrects_epsilon", "var_bias")
"""Fields of :func:`corrected_rate` that no rule has."""


def corrected_rate(t: Scalar, h: Hyper, carried: Carried) -> None:
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

    With `amsgrad`, :math:`p \leftarrow \max(p, v)` replaces :math:`v` under the root. Without bias
    correction: ``AdamW(correct_bias=False)``.

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
    >>> import fastopt
    >>> updater = fastopt.Updater(fastopt.Adam(lr=0.1))
    >>> weight = np.zeros(2)
    >>> updater.step(np.array([1.0, -5.0]), weight)
    >>> weight.round(6)
    array([-0.1,  0.1])

    With the formula and defaults of torch, and a row-sparse gradient:

    >>> updater = fastopt.Updater(fastopt.Adam(lr=0.1, formula="torch"))
    >>> table = np.zeros((3, 2))
    >>> updater.step((np.ones((1, 2)), np.array([1])), table)
    >>> table.round(6)
    array([[ 0. ,  0. ],
           [-0.1, -0.1],
           [ 0. ,  0. ]])
    """

    lazy_by_default = True
    formula: Formula = arg(default="mxnet", check=FORMULA, kw_only=True, new=True)
    amsgrad: bool = arg(default=False, check=FLAG, kw_only=True, new=True)
    cautious: bool = arg(default=False, check=FLAG, kw_only=True, new=True)
    stable: bool = arg(default=False, check=FLAG, kw_only=True, new=True)
    positional = (*AdamFamily.positional, "lazy_update")
    stable_ratio = staticmethod(biased_ratio)
    stable_ratio_fields = ("var_bias",)

    @property
    def base_rule(self) -> Rule:
        """Rule of the selected formula."""
        return RULES[self.formula][self.amsgrad]

    @property
    def averaged_gradient(self) -> Callable[..., Any]:
        """See :attr:`Optimizer.averaged_gradient`."""
        return clipped_decayed if self.formula == "mxnet" else decayed

    @corrected(corrected_rate, *CORRECTED)
    def hyper(self, t: int, lr: float, wd: float) -> dict[str, float]:
        """See :meth:`Optimizer.hyper <fastopt.optimizer.Optimizer.hyper>`."""
        return {"corrects_epsilon": float(self.formula == "torch")}


@scalar
def beside_decay(weight: Scalar, grad: Scalar, mean: Scalar, var: Scalar, h: Hyper) -> Scalar:
    """Adam step with the factor ``eta`` plus decay, both scaled by the learning rate."""
    step = h.eta * mean / (math.sqrt(var) + h.epsilon) + h.wd * weight
    return weight - h.lr * step


@scalar
def after_decay(weight: Scalar, grad: Scalar, mean: Scalar, var: Scalar, h: Hyper) -> Scalar:
    """Decay by the factor ``shrink``, then an Adam step."""
    return h.shrink * weight - h.lr * mean / (math.sqrt(var) + h.epsilon)


SHRUNK = (*MOMENTS, "eta", "shrink")

DECOUPLED = {
    "mxnet": moment_rules("adamw", without_decay, beside_decay, (*MOMENTS, "eta")),
    "torch": moment_rules("adamw_of_torch", without_decay, after_decay, SHRUNK),
}
"""Rules of each formula, without and with AMSGrad."""


@scalar
def eta_times_decay(weight: Scalar, h: Hyper) -> Scalar:
    """Return what decay subtracts with torch's formula, where ``eta`` is the uncorrected rate."""
    return h.eta * h.wd * weight


@register
class AdamW(DecoupledFamily):
    r"""Adam with decoupled weight decay.

    .. math::
        h &= \mathrm{clip}(r g) \\
        m &\leftarrow \beta_1 m + (1 - \beta_1) h \\
        v &\leftarrow \beta_2 v + (1 - \beta_2) h^2 \\
        w &\leftarrow w - E \left( A \frac{m}{\sqrt{v} + \epsilon} + \lambda w \right)

    By default :math:`A = 1` and :math:`E = \eta \sqrt{1 - \beta_2^t} / (1 - \beta_1^t)`, so that
    the bias correction also scales the weight decay. Without `correct_bias`, :math:`E = \eta`.
    With `eta`, :math:`A = \eta`, :math:`E` is `eta`, and there is no bias correction. A
    ``rescale_grad`` of 0, infinity or NaN indicates an overflow of the loss scale and skips the
    update.

    ``formula="torch"`` uses the formula of torch.optim.AdamW and optax, where the bias correction
    does not scale the weight decay, and :math:`\epsilon` is added to the bias-corrected root:

    .. math::
        w \leftarrow (1 - \eta \lambda) w - \eta \frac{m}{1 - \beta_1^t}
            \Big/ \left( \sqrt{\frac{v}{1 - \beta_2^t}} + \epsilon \right)

    With `amsgrad`, :math:`p \leftarrow \max(p, v)` replaces :math:`v` under the root.
    The following variants change the step. Let :math:`u` be the step without decay, which is
    subtracted from the weight:

    * `cautious`: :math:`u` is set to 0 where its sign differs from the sign of :math:`h`; the
      other elements are divided by the fraction of the tensor that they make up, or by 0.001 if
      that is larger;
    * `cautious_decay`: only weights with :math:`u w \ge 0` decay;
    * `stable`: the step, including decay, is divided by
      :math:`\max(1, \sqrt{\mathrm{mean}(h^2 / \max(\hat v, \epsilon^2))})`, with
      :math:`\hat v = v / (1 - \beta_2^t)`, or :math:`\hat v = v` without bias correction;
    * `grams`: :math:`u` is replaced by :math:`|u|\, \mathrm{sign}(h)`, so that the averages give
      the size of the step, and the gradient its direction.

    Source: Loshchilov and Hutter, "Decoupled Weight Decay Regularization", arXiv:1711.05101.
    AMSGrad: Reddi, Kale and Kumar, "On the Convergence of Adam and Beyond", arXiv:1904.09237.
    `cautious`: Liang et al., "Cautious Optimizers", arXiv:2411.16085, following the authors' code.
    `cautious_decay`: Chen et al., "Cautious Weight Decay", arXiv:2510.12402. `stable`: Wortsman et
    al., "Stable and low-precision training for large-scale vision-language models", StableAdamW,
    arXiv:2304.13013. `grams`: Cao, Li and Song, "Grams: Gradient Descent with Adaptive Momentum
    Scaling", arXiv:2412.17107, whose formula is that of ``formula="torch"``; the authors' package
    adds :math:`\epsilon` to :math:`\sqrt{v}`, like ``formula="mxnet"``.

    State: the tuple :math:`(m, v)` of arrays in the weight's shape, with `amsgrad`
    :math:`(m, v, p)`.

    Parameters
    ----------
    learning_rate : float or callable, optional
        Default 0.001; None uses the scheduler's ``base_lr``.
    beta1, beta2 : float
        Decay rates of :math:`m` and :math:`v`, at least 0 and below 1. Defaults 0.9, 0.999.
    epsilon : float
        :math:`\epsilon`, at least 0. Default 1e-6, with torch's formula 1e-8.
    correct_bias : bool
        Correct the bias of the moving averages. Default True.
    eta : float, optional
        Schedule multiplier of the paper. Default None.
    cautious : bool
        Update only elements whose step has the sign of the gradient. Default False.
    cautious_decay : bool
        Decay only weights that the step does not move away from 0. Default False.
    formula : str
        'mxnet', or 'torch', which supports neither `eta` nor ``correct_bias=False``. Default
        'mxnet'. With 'torch' the defaults are torch's: `epsilon` 1e-8, `wd` 0.01.
    amsgrad : bool
        Divide by the root of the maximum of :math:`v` so far. Default False.
    grams : bool
        Step against the gradient by the size of AdamW's step; not with `cautious`, which would have
        no effect. Default False.
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
    >>> import fastopt
    >>> updater = fastopt.Updater(fastopt.AdamW(lr=0.1, wd=0.01))
    >>> weight = np.ones(2)
    >>> updater.step(np.array([1.0, -5.0]), weight)
    >>> weight.round(4)
    array([0.8997, 1.0997])

    With the formula and defaults of torch:

    >>> updater = fastopt.Updater(
    ...     fastopt.AdamW(lr=0.1, weight_decay=0.1, formula="torch")
    ... )
    >>> weight = np.ones(2)
    >>> updater.step(np.array([1.0, -5.0]), weight)
    >>> weight.round(4)
    array([0.89, 1.09])
    """

    stable_ratio = staticmethod(biased_ratio)
    stable_ratio_fields = ("var_bias",)
    epsilon: float = arg(default=1e-06, torch=1e-08)
    correct_bias: bool = arg(default=True, check=FLAG)
    eta: float | None = arg(default=None, check=OrNone(Real()))
    formula: Formula = arg(default="mxnet", check=FORMULA, kw_only=True, new=True)
    amsgrad: bool = arg(default=False, check=FLAG, kw_only=True, new=True)
    grams: bool = arg(default=False, check=FLAG, kw_only=True, new=True)
    wd: float = arg(default=0.0, kw_only=True, torch=0.01)
    stable: bool = arg(default=False, check=FLAG, kw_only=True, new=True)

    @property
    def base_rule(self) -> Rule:
        """Rule of the selected formula."""
        return DECOUPLED[self.formula][self.amsgrad]

    @property
    def decay_term(self) -> Callable[..., Any]:
        """See :class:`~fastopt.optimizer.Optimizer`."""
        return eta_times_decay if self.formula == "torch" else rate_times_decay

    def check_together(self) -> None:
        """See :meth:`Optimizer.check_together <fastopt.optimizer.Optimizer.check_together>`."""
        super().check_together()
        if self.formula == "torch" and not (self.correct_bias and self.eta is None):
            raise ValueError("formula='torch' needs correct_bias=True and eta=None")
        if self.grams and self.rule_variant.cautious:
            raise ValueError(
                "grams=True steps against every gradient, so cautious has no effect: "
                "use one of them"
            )

    @corrected(corrected_rate, *CORRECTED, when=lambda self: self.eta is None and self.correct_bias)
    def hyper(self, t: int, lr: float, wd: float) -> dict[str, float]:
        """See :meth:`Optimizer.hyper <fastopt.optimizer.Optimizer.hyper>`."""
        if self.formula == "torch":
            return {"corrects_epsilon": 1.0, "eta": lr, "shrink": 1 - lr * wd}
        fields = {"eta": 1.0} if self.eta is None else {"lr": self.eta, "eta": lr}
        return {**fields, "corrects_epsilon": 0.0}

    def decay(self, t: int, lr: float, wd: float) -> float:
        """See :meth:`Optimizer.decay <fastopt.optimizer.Optimizer.decay>`."""
        if self.skips():
            return 0.0
        return (lr if self.formula == "torch" else self.hyper(t, lr, wd).get("lr", lr)) * wd

    def skips(self) -> bool:
        """See :meth:`Optimizer.skips <fastopt.optimizer.Optimizer.skips>`."""
        return not math.isfinite(self.rescale_grad) or self.rescale_grad == 0
