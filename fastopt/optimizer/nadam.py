"""Nadam and NAdamW: Adam with Nesterov momentum."""

import math
from collections.abc import Callable, Collection
from typing import Any, ClassVar, Literal

from fastopt.arguments import FLAG, Choice, Descriptions, Real, TableOf, arg, kept
from fastopt.kernels.rule import Carried, Hyper, Rule, Scalar, scalar
from fastopt.kernels.scalars import clipped_decayed, decayed
from fastopt.kernels.variants import beside_decay
from fastopt.optimizer.families import (
    FORMULA,
    MOMENTS,
    AdamFamily,
    DecoupledFamily,
    Formula,
    moment_rules,
    scaled_ratio,
)
from fastopt.optimizer.optimizer import (
    Index,
    Optimizer,
    PerIndex,
    RateAttribute,
    corrected,
    register,
)

FIELDS = (*MOMENTS, "grad_scale", "mean_scale", "var_scale")


@scalar
def look_ahead(grad: Scalar, mean: Scalar, var: Scalar, h: Hyper) -> Scalar:
    """Return the step: gradient and look-ahead mean over the root of the second moment."""
    ahead = h.grad_scale * grad + h.mean_scale * mean
    return h.lr * ahead / (math.sqrt(var * h.var_scale) + h.epsilon)


@scalar
def descended(weight: Scalar, grad: Scalar, mean: Scalar, var: Scalar, h: Hyper) -> Scalar:
    """Step with decay in the gradient."""
    return weight - look_ahead(grad, mean, var, h)


@scalar
def after_decay(weight: Scalar, grad: Scalar, mean: Scalar, var: Scalar, h: Hyper) -> Scalar:
    """Decay, then step."""
    return weight - h.lr * h.wd * weight - look_ahead(grad, mean, var, h)


RULES = {
    "mxnet": moment_rules("nadam", clipped_decayed, descended, FIELDS),
    "torch": moment_rules("nadam_of_torch", decayed, descended, FIELDS),
    "decoupled": moment_rules("nadam_decoupled", beside_decay, after_decay, FIELDS),
}
"""Rules of each formula, and of both with decoupled decay, without and with AMSGrad."""


class Products(PerIndex):
    """Products of the momenta by index; the first number is shared by all parameters."""

    first = 1


@scalar
def momentum_at(t: Scalar, h: Hyper) -> Scalar:
    """Return the momentum of step `t`."""
    return h.beta1 * (1 - 0.5 * math.pow(0.96, t * h.schedule_decay))


def corrected_scales(t: Scalar, h: Hyper, carried: Carried) -> None:
    """Compute the scales of this step from the product of the momenta so far."""
    now, ahead = momentum_at(t, h), momentum_at(t + 1, h)
    carried[0] = carried[0] * now
    product = carried[0]
    h.grad_scale = (1 - now) / (1 - product)
    h.mean_scale = ahead / (1 - product * ahead)
    h.var_scale = 1 / (1 - h.beta2**t)


def shares_product(made: "Nadam") -> bool:
    """Whether all parameters share one product."""
    return not made.per_parameter and made.formula == "mxnet"


@register
class Nadam(AdamFamily):
    r"""Nadam: Adam with Nesterov momentum.

    .. math::
        h &= \mathrm{clip}(r g + \lambda w) \\
        a_t &= \beta_1 (1 - 0.96^{t s} / 2), \qquad P \leftarrow P a_t \\
        m &\leftarrow \beta_1 m + (1 - \beta_1) h, \qquad
        v \leftarrow \beta_2 v + (1 - \beta_2) h^2 \\
        w &\leftarrow w - \eta \left( \frac{(1 - a_t) h}{1 - P}
            + \frac{a_{t+1} m}{1 - P a_{t+1}} \right)
            \Big/ \left( \sqrt{\frac{v}{1 - \beta_2^t}} + \epsilon \right)

    with :math:`s` = `schedule_decay`. By default all parameters share one product :math:`P`
    (``m_schedule``), which changes with every update of any of them, so that results depend on the
    number and order of parameters; `per_parameter` keeps one product for each.

    ``formula="torch"`` uses the formula of torch.optim.NAdam: one product for each parameter, and
    :math:`h = \mathrm{clip}(r g) + \lambda w`.

    With `decouple`, :math:`h = \mathrm{clip}(r g)`, and :math:`\eta \lambda w` is subtracted from
    the weight, with both formulas: ``decoupled_weight_decay`` of torch.

    With `amsgrad`, :math:`p \leftarrow \max(p, v)` replaces :math:`v` under the root;
    torch.optim.NAdam has no such variant.

    Source: Dozat, "Incorporating Nesterov Momentum into Adam", ICLR 2016 workshop. AMSGrad: Reddi,
    Kale and Kumar, "On the Convergence of Adam and Beyond", ICLR 2018, arXiv:1904.09237.

    State: the tuple :math:`(m, v)` of arrays in the weight's shape, with `amsgrad`
    :math:`(m, v, p)`.

    Parameters
    ----------
    learning_rate : float or callable, optional
        Default 0.001, with torch's formula 0.002; None uses the scheduler's ``base_lr``.
    beta1, beta2 : float
        Decay rates of :math:`m` and :math:`v`, at least 0 and below 1. Defaults 0.9, 0.999.
    epsilon : float
        :math:`\epsilon`, at least 0. Default 1e-8.
    schedule_decay : float
        :math:`s`, at least 0. Default 0.004.
    per_parameter : bool
        Keep a product :math:`P` for each parameter. Default False; torch's formula always does.
    formula : str
        'mxnet' or 'torch', where `learning_rate` is by default 0.002. Default 'mxnet'.
    amsgrad : bool
        Divide by the root of the maximum of :math:`v` so far. Default False.
    decouple : bool
        Use decoupled weight decay. Default False.
    cautious : bool
        Update only elements whose step has the sign of the gradient including weight decay, unless
        that is decoupled, see :class:`~fastopt.optimizer.AdamW`. Default False.
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
    >>> updater = fastopt.Updater(fastopt.Nadam(lr=0.1))
    >>> weight = np.ones(2)
    >>> updater.step(np.array([1.0, -5.0]), weight)
    >>> weight.round(4)
    array([0.8944, 1.1056])

    With the formula and defaults of torch.optim.NAdam, with decoupled decay:

    >>> updater = fastopt.Updater(
    ...     fastopt.Nadam(lr=0.1, wd=0.01, formula="torch", decouple=True)
    ... )
    >>> weight = np.ones(2)
    >>> updater.step(np.array([1.0, -5.0]), weight)
    >>> weight.round(4)
    array([0.8934, 1.1046])
    """

    learning_rate: RateAttribute = arg(default=0.001, torch=0.002)
    schedule_decay: float = arg(default=0.004, check=Real(least=0))
    per_parameter: bool = arg(default=False, check=FLAG)
    formula: Formula = arg(default="mxnet", check=FORMULA, kw_only=True, new=True)
    amsgrad: bool = arg(default=False, check=FLAG, kw_only=True, new=True)
    decouple: bool = arg(default=False, check=FLAG, kw_only=True, new=True)
    cautious: bool = arg(default=False, check=FLAG, kw_only=True, new=True)
    stable: bool = arg(default=False, check=FLAG, kw_only=True, new=True)
    stable_ratio = staticmethod(scaled_ratio)
    carried_in, first_carried = "_m_schedules", 1.0
    _m_schedules: PerIndex = kept(factory=Products, check=TableOf(Real(least=0, most=1)))
    progress: ClassVar[Descriptions] = {"m_schedule": Real(least=0, most=1)}

    def _initialize(self, values: dict[str, Any]) -> None:
        super()._initialize(values)
        self.m_schedule = 1.0

    @property
    def averaged_gradient(self) -> Callable[..., Any]:
        """See :attr:`Optimizer.averaged_gradient`."""
        if self.decouple:
            return beside_decay
        return clipped_decayed if self.formula == "mxnet" else decayed

    @property
    def base_rule(self) -> Rule:
        """Rule of the selected formula."""
        return RULES["decoupled" if self.decouple else self.formula][self.amsgrad]

    decoupled = property(lambda self: bool(self.decouple))

    @property
    def m_schedule(self) -> float:
        """Product of the momenta so far, shared by all parameters."""
        return float(self._m_schedules.array[0])

    @m_schedule.setter
    def m_schedule(self, value: float) -> None:
        self._m_schedules.array[0] = value

    def restart(self, indices: Collection[Index]) -> None:
        """See :meth:`Optimizer.restart <fastopt.optimizer.Optimizer.restart>`."""
        super().restart(indices)
        if self.num_update == self.begin_num_update:
            self.m_schedule = 1.0

    hyper = corrected(corrected_scales, "schedule_decay", carries=True, shares=shares_product)(
        Optimizer.hyper
    )

    in_arrays = (*AdamFamily.in_arrays, "m_schedule")


@scalar
def with_decay(weight: Scalar, grad: Scalar, mean: Scalar, var: Scalar, h: Hyper) -> Scalar:
    """Step, with decay of the present weight."""
    return weight - (look_ahead(grad, mean, var, h) + h.lr * h.wd * weight)


DECOUPLED = moment_rules("nadamw", beside_decay, with_decay, FIELDS)
"""Rules without and with AMSGrad."""


def corrected_means(t: Scalar, h: Hyper, carried: Carried) -> None:
    """Compute the scales of the gradient and of both moments, including the bias corrections."""
    h.grad_scale = h.one_minus_beta1 / (1 - h.beta1**t)
    h.mean_scale = h.beta1 / (1 - h.beta1 ** (t + h.ahead))
    h.var_scale = 1 / (1 - h.beta2**t)


@register
class NAdamW(DecoupledFamily):
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
    cautious : bool
        Update only elements whose step has the sign of the gradient. Default False.
    cautious_decay : bool
        Decay only weights that the step does not move away from 0. Default False.
    correction : str
        Step whose bias correction is applied to :math:`m`: 'next' or 'present'. Default 'next'.
    amsgrad : bool
        Divide by the root of the maximum of :math:`v` so far. Default False.
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
    >>> updater = fastopt.Updater(fastopt.NAdamW(lr=0.1, wd=0.01))
    >>> weight = np.ones(2, np.float32)
    >>> updater.step(np.array([1.0, -5.0], np.float32), weight)
    >>> print(weight.round(4))
    [0.8516 1.1464]

    Elements whose step has another sign than their gradient are not updated:

    >>> updater = fastopt.Updater(fastopt.NAdamW(lr=0.1, cautious=True))
    >>> weight = np.ones(2)
    >>> for grad in ([1.0, 1.0], [1.0, -0.1]):
    ...     updater.step(np.array(grad), weight)
    >>> weight.round(4)
    array([0.6212, 0.8526])
    """

    stable_ratio = staticmethod(scaled_ratio)
    correction: Literal["next", "present"] = arg(
        default="next", check=Choice("next", "present"), kw_only=True
    )
    amsgrad: bool = arg(default=False, check=FLAG, kw_only=True)
    stable: bool = arg(default=False, check=FLAG, kw_only=True, new=True)

    @property
    def base_rule(self) -> Rule:
        """Rule without or with AMSGrad."""
        return DECOUPLED[self.amsgrad]

    @corrected(corrected_means, "ahead")
    def hyper(self, t: int, lr: float, wd: float) -> dict[str, float]:
        """See :meth:`Optimizer.hyper <fastopt.optimizer.Optimizer.hyper>`."""
        return {"ahead": float(self.correction == "next")}
