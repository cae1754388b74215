"""Stochastic gradient descent, also with averages, for delayed gradients, and with noise."""

import math
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

from fastopt.arguments import FLAG, Real, TableOf, arg, kept
from fastopt.kernels.rule import Carried, Hyper, Rule, Scalar, State, Step, rule, scalar
from fastopt.kernels.scalars import COMMON, decayed, rescaled
from fastopt.optimizer.families import FORMULA, Formula, MomentumFamily
from fastopt.optimizer.optimizer import (
    Array,
    Index,
    Optimizer,
    PerIndex,
    RateAttribute,
    constant,
    corrected,
    register,
)


@rule(hyper=COMMON)
def sgd(weight: Scalar, grad: Scalar, state: State, h: Hyper) -> Step:
    """Gradient descent."""
    return weight - h.lr * decayed(weight, grad, h), ()


@rule(state=("mom",), signed=("mom",), hyper=(*COMMON, "momentum"))
def sgd_momentum(weight: Scalar, grad: Scalar, state: State, h: Hyper) -> Step:
    """Gradient descent with momentum, which includes the learning rate."""
    mom = h.momentum * state[0] - h.lr * decayed(weight, grad, h)
    return weight + mom, (mom,)


@rule(state=("mom",), signed=("mom",), hyper=(*COMMON, "momentum", "one_minus_dampening"))
def sgd_momentum_of_torch(weight: Scalar, grad: Scalar, state: State, h: Hyper) -> Step:
    """Gradient descent with momentum, which excludes the learning rate."""
    mom = h.momentum * state[0] + h.one_minus_dampening * decayed(weight, grad, h)
    return weight - h.lr * mom, (mom,)


@rule(state=("mom",), signed=("mom",), hyper=(*COMMON, "momentum"))
def sgdw_momentum(weight: Scalar, grad: Scalar, state: State, h: Hyper) -> Step:
    """Gradient descent with momentum, which includes the learning rate, and decoupled decay."""
    mom = h.momentum * state[0] - h.lr * rescaled(grad, h)
    return weight - h.lr * h.wd * weight + mom, (mom,)


@rule(state=("mom",), signed=("mom",), hyper=(*COMMON, "momentum", "one_minus_dampening"))
def sgdw_momentum_of_torch(weight: Scalar, grad: Scalar, state: State, h: Hyper) -> Step:
    """Gradient descent with momentum, which excludes the learning rate, and decoupled decay."""
    mom = h.momentum * state[0] + h.one_minus_dampening * rescaled(grad, h)
    return weight - h.lr * h.wd * weight - h.lr * mom, (mom,)


FORMS = {
    ("mxnet", False): sgd_momentum,
    ("mxnet", True): sgdw_momentum,
    ("torch", False): sgd_momentum_of_torch,
    ("torch", True): sgdw_momentum_of_torch,
}
"""Rule with momentum of each formula, with coupled and decoupled decay."""


def first_undamped(t: Scalar, h: Hyper, carried: Carried) -> None:
    """Start the buffer with the whole gradient."""
    if t == 1:
        h.one_minus_dampening = 1.0


@register
class SGD(MomentumFamily):
    r"""Stochastic gradient descent with momentum.

    .. math::
        h &= \mathrm{clip}(r g) + \lambda w \\
        m &\leftarrow \mu m - \eta h \\
        w &\leftarrow w + m

    with rescale factor :math:`r`, learning rate :math:`\eta`, weight decay :math:`\lambda` and
    momentum :math:`\mu`; without momentum :math:`w \leftarrow w - \eta h`.

    ``formula="torch"`` uses the formula of torch.optim.SGD, whose buffer does not include the
    learning rate. The two differ after a change of the learning rate: here the steps of the past
    keep the rate that they were taken with, in torch they take the new one.

    .. math::
        m \leftarrow \mu m + (1 - \tau) h, \qquad w \leftarrow w - \eta m

    with :math:`\tau` = `dampening`, which the first update of a parameter does not apply:
    :math:`m = h`. With `decouple` (SGDW), decay is decoupled from the momentum:
    :math:`h = \mathrm{clip}(r g)`, and :math:`\eta \lambda w` is subtracted from the weight.

    Sources: Polyak, "Some methods of speeding up the convergence of iteration methods" (1964);
    `decouple`: Loshchilov and Hutter, "Decoupled Weight Decay Regularization", arXiv:1711.05101,
    algorithm 1.

    State: None, or with momentum the array :math:`m`, in the weight's shape.

    Parameters
    ----------
    momentum : float
        Momentum :math:`\mu`. Default 0.
    lazy_update : bool, optional
        Update only the indexed rows of row-sparse gradients. Default True.
    formula : str
        'mxnet' or 'torch', where `learning_rate` is by default 0.001 instead of 0.01. Default
        'mxnet'.
    cautious : bool
        Update only elements whose step has the sign of the gradient including weight decay, see
        :class:`~fastopt.optimizer.AdamW`. Default False.
    dampening : float
        :math:`\tau`, from 0 to 1; needs ``formula="torch"``. Default 0.
    decouple : bool
        Use decoupled weight decay. Default False.
    **common
        Arguments of :class:`~fastopt.optimizer.Optimizer`.

    Raises
    ------
    ValueError
        An argument is NaN or out of range, or `dampening` is given without torch's formula.

    Examples
    --------
    >>> import numpy as np
    >>> import fastopt
    >>> updater = fastopt.Updater(fastopt.SGD(lr=0.1, momentum=0.9))
    >>> weight = np.ones(2)
    >>> for _ in range(2):
    ...     updater.step(np.ones(2), weight)
    >>> weight
    array([0.71, 0.71])

    With the buffer of torch, which dampening keeps smaller:

    >>> updater = fastopt.Updater(
    ...     fastopt.SGD(lr=0.1, momentum=0.9, formula="torch", dampening=0.5)
    ... )
    >>> weight = np.ones(2)
    >>> for _ in range(2):
    ...     updater.step(np.ones(2), weight)
    >>> weight.round(6)
    array([0.76, 0.76])
    """

    lazy_by_default = master_last = True
    formula: Formula = arg(default="mxnet", check=FORMULA, kw_only=True, new=True)
    cautious: bool = arg(default=False, check=FLAG, kw_only=True, new=True)
    dampening: float = arg(default=0.0, check=Real(least=0, most=1), kw_only=True, new=True)
    decouple: bool = arg(default=False, check=FLAG, kw_only=True, new=True)
    learning_rate: RateAttribute = arg(default=None, kw_only=True, torch=0.001)
    positional = ("momentum", "lazy_update")

    def check_together(self) -> None:
        """See :meth:`Optimizer.check_together <fastopt.optimizer.Optimizer.check_together>`."""
        super().check_together()
        if self.dampening and self.formula != "torch":
            raise ValueError(f"dampening={self.dampening} needs formula='torch'")

    @property
    def forms(self) -> tuple[Rule, Rule]:  # type: ignore[override]
        """Rules without and with momentum; without it both kinds of decay are the same."""
        return sgd, FORMS[self.formula, self.decouple]

    decoupled = property(lambda self: bool(self.decouple))

    hyper = corrected(first_undamped, "one_minus_dampening", when=lambda made: made.dampening != 0)(
        Optimizer.hyper
    )


@register
class ccSGD(SGD):
    """Deprecated alias of :class:`SGD`.

    Parameters
    ----------
    momentum, lazy_update, formula, cautious, dampening, decouple
        See :class:`SGD`.
    **common
        Arguments of :class:`~fastopt.optimizer.Optimizer`.

    Examples
    --------
    >>> import pytest
    >>> from fastopt import optimizer
    >>> with pytest.warns(DeprecationWarning, match="use SGD"):
    ...     _ = optimizer.create("ccsgd", momentum=0.9)
    """

    def _initialize(self, values: dict[str, Any]) -> None:
        warnings.warn("ccSGD is deprecated, use SGD", DeprecationWarning, stacklevel=4)
        super()._initialize(values)


@rule(state=("mom",), signed=("mom",), hyper=(*COMMON, "momentum"))
def nag(weight: Scalar, grad: Scalar, state: State, h: Hyper) -> Step:
    """Nesterov momentum; the buffer does not include the learning rate."""
    (mom,) = state
    grad = decayed(weight, grad, h)
    mom = h.momentum * mom + grad
    return weight - h.lr * (grad + h.momentum * mom), (mom,)


@register
class NAG(MomentumFamily):
    r"""NAG: Nesterov's accelerated gradient.

    .. math::
        h &= \mathrm{clip}(r g) + \lambda w \\
        m &\leftarrow \mu m + h \\
        w &\leftarrow w - \eta (h + \mu m)

    Without momentum this is gradient descent. Sources: Nesterov, "A method of solving a convex
    programming problem with convergence rate O(1/k^2)" (1983); Sutskever et al., "On the
    importance of initialization and momentum in deep learning" (2013).

    State: None, or with momentum the array :math:`m`, in the weight's shape.

    Parameters
    ----------
    momentum : float
        Momentum :math:`\mu`. Default 0.
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
    >>> import fastopt
    >>> updater = fastopt.Updater(fastopt.NAG(lr=0.1, momentum=0.5))
    >>> weight = np.ones(2)
    >>> updater.step(np.ones(2), weight)
    >>> weight
    array([0.85, 0.85])
    """

    cautious: bool = arg(default=False, check=FLAG, kw_only=True, new=True)
    forms = (sgd, nag)


@rule(state=("ax",), hyper=(*COMMON, "shrink", "share"))
def asgd(weight: Scalar, grad: Scalar, state: State, h: Hyper) -> Step:
    """Gradient descent, and an average that moves towards the new weight."""
    weight = h.shrink * weight - h.lr * decayed(weight, grad, h)
    ax = state[0] + h.share * (weight - state[0])
    return weight, (weight if h.share == type(weight)(1) else ax,)


def falling(t: Scalar, h: Hyper, carried: Carried) -> None:
    """Compute the learning rate of this step, and the averaging rate."""
    past, rate = t - 1, carried[0]
    carried[0] = h.lr
    if rate < 0:  # the first update
        rate = h.lr
    h.lr = rate / (1 + h.lambd * rate * past) ** h.alpha
    h.shrink = 1 - h.lambd * h.lr
    h.share = 1 / max(1.0, past - h.t0)


@register
class ASGD(Optimizer):
    r"""ASGD: gradient descent whose weights are averaged.

    .. math::
        \eta_t &= \eta' / (1 + \lambda_0 \eta' (t - 1))^\alpha \\
        w &\leftarrow (1 - \lambda_0 \eta_t) w - \eta_t (\mathrm{clip}(r g) + \lambda w) \\
        a &\leftarrow a + (w - a) / \max(1, t - 1 - t_0)

    with :math:`\lambda_0` = `lambd`, and :math:`\eta'` the learning rate of the parameter's update
    before, or the present one at its first update. So does torch.optim.ASGD, which computes
    :math:`\eta_t` at the end of the step before: a schedule acts one step late. Inside
    ``with updater.averaged():`` the weights hold the averages :math:`a`, which equal the weights
    until step :math:`t_0`.

    Source: Polyak and Juditsky, "Acceleration of stochastic approximation by averaging", SIAM
    Journal on Control and Optimization 30(4), 1992.

    State: the array :math:`a`, in the weight's shape.

    Parameters
    ----------
    learning_rate : float or callable, optional
        Default 0.01; None uses the scheduler's ``base_lr``.
    lambd : float
        :math:`\lambda_0`, at least 0. Default 1e-4.
    alpha : float
        :math:`\alpha`, at least 0. Default 0.75.
    t0 : float
        :math:`t_0`, at least 0. Default 1e6.
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
    >>> updater = fastopt.Updater(fastopt.ASGD(lr=0.1, lambd=0.0, t0=1))
    >>> weight = np.ones(2, np.float32)
    >>> for _ in range(4):
    ...     updater.step(np.array([1.0, -5.0], np.float32), weight)
    >>> with updater.averaged():
    ...     print(weight.round(4))
    [0.65 2.75]
    """

    rule = asgd
    learning_rate: RateAttribute = arg(default=0.01)
    lambd: float = arg(default=0.0001, check=Real(least=0))
    alpha: float = arg(default=0.75, check=Real(least=0))
    t0: float = arg(default=1000000.0, check=Real(least=0))
    _last_rates: PerIndex = kept(factory=PerIndex, check=TableOf(Real(least=-1)), new=True)

    carried_in, first_carried = "_last_rates", -1.0
    hyper = corrected(falling, "lambd", "alpha", "t0", carries=True)(Optimizer.hyper)

    def evaluated(self, weight: Array, state: Sequence[Array]) -> Array:
        """See :meth:`Optimizer.evaluated <fastopt.optimizer.Optimizer.evaluated>`."""
        return state[0]


@rule(hyper=(*COMMON, "spread"), noise=True)
def sgld(weight: Scalar, grad: Scalar, state: State, h: Hyper, noise: Scalar) -> Step:
    """Half a step of gradient descent plus Gaussian noise."""
    return weight - h.lr * decayed(weight, grad, h) + h.spread * noise, ()


@register
class SGLD(Optimizer):
    r"""SGLD: stochastic gradient Langevin dynamics, which samples from the posterior.

    .. math::
        w \leftarrow w - \frac{\eta}{2} (\mathrm{clip}(r g) + \lambda w)
            + \mathcal{N}(0, \eta)

    The noise depends only on the seed, the index, the step and the position of the element: equal
    calls give equal weights for any number of threads. It has float32 precision (maximum magnitude
    6.8), even for float64 weights.

    Source: Welling and Teh, "Bayesian Learning via Stochastic Gradient Langevin Dynamics",
    ICML 2011; Patterson and Teh, NIPS 2013.

    State: None.

    Parameters
    ----------
    **common
        Arguments of :class:`~fastopt.optimizer.Optimizer`, `seed` among them.

    Examples
    --------
    >>> import numpy as np
    >>> import fastopt
    >>> updater = fastopt.Updater(fastopt.SGLD(lr=0.01, seed=1))
    >>> weight = np.zeros(10000)
    >>> updater.step(np.zeros(10000), weight)
    >>> bool(abs(weight.std() - 0.1) < 0.003)
    True
    """

    rule = sgld

    @constant
    def hyper(self, t: int, lr: float, wd: float) -> Mapping[str, float]:
        """See :meth:`Optimizer.hyper <fastopt.optimizer.Optimizer.hyper>`."""
        return {"lr": lr / 2, "spread": math.sqrt(lr)}


@rule(state=("copy",), hyper=("rescale_grad",))
def test(weight: Scalar, grad: Scalar, state: State, h: Hyper) -> Step:
    """Add the gradient and keep a copy."""
    weight = weight + h.rescale_grad * grad
    return weight, (weight,)


@register
class Test(Optimizer):
    r"""Test optimizer that adds the gradient: :math:`w \leftarrow w + r g`.

    It has no learning rate, weight decay or clipping, and does not count updates. State: a copy of
    the weight after the update.

    Parameters
    ----------
    **common
        Arguments of :class:`~fastopt.optimizer.Optimizer`.

    Examples
    --------
    >>> import numpy as np
    >>> import fastopt
    >>> updater = fastopt.Updater(fastopt.Test())
    >>> weight = np.ones(2)
    >>> updater.step(np.array([1.0, -5.0]), weight)
    >>> weight
    array([ 2., -4.])
    """

    rule = test
    __test__ = False  # not a test case

    def _update_count(self, index: Index) -> None:
        """Updates are not counted."""


@scalar
def compensated(weight: Scalar, grad: Scalar, previous: Scalar, h: Hyper) -> Scalar:
    """Return the gradient with decay and the compensation for the change since `previous`."""
    grad = rescaled(grad, h)
    return grad + h.wd * weight + h.lamda * grad * grad * (weight - previous)


@rule(state=("previous",), hyper=(*COMMON, "lamda"))
def dcasgd(weight: Scalar, grad: Scalar, state: State, h: Hyper) -> Step:
    """Delay-compensated gradient descent."""
    return weight - h.lr * compensated(weight, grad, state[0], h), (weight,)


@rule(state=("mom", "previous"), hyper=(*COMMON, "lamda", "momentum"))
def dcasgd_momentum(weight: Scalar, grad: Scalar, state: State, h: Hyper) -> Step:
    """Delay-compensated gradient descent with momentum."""
    mom, previous = state
    mom = h.momentum * mom - h.lr * compensated(weight, grad, previous, h)
    return weight + mom, (mom, weight)


@register
class DCASGD(MomentumFamily):
    r"""DCASGD: gradient descent with compensation for the delay of asynchronous gradients.

    .. math::
        h &= \mathrm{clip}(r g) \\
        m &\leftarrow \mu m - \eta (h + \lambda w + \lambda_c h^2 (w - p)) \\
        p &\leftarrow w, \qquad w \leftarrow w + m

    with :math:`\lambda_c` = `lamda` and :math:`p` the weight before the previous step.

    Source: Zheng et al., "Asynchronous Stochastic Gradient Descent with Delay Compensation",
    arXiv:1609.08326.

    State: the tuple :math:`(m, p)` of arrays in the weight's shape; :math:`m` is None
    without momentum, and :math:`p` starts as a copy of the weight.

    Parameters
    ----------
    momentum : float
        Momentum :math:`\mu`. Default 0.
    lamda : float
        Strength of the compensation. Default 0.04.
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
    >>> updater = fastopt.Updater(fastopt.DCASGD(lr=0.1))
    >>> weight = np.ones(2)
    >>> updater.step(np.ones(2), weight)
    >>> weight
    array([0.9, 0.9])
    """

    forms = (dcasgd, dcasgd_momentum)
    lamda: float = arg(default=0.04, check=Real())

    copied = ("previous",)

    def create_state(self, index: Index, weight: Array) -> Any:
        """Create the momentum buffer (None without momentum) and a copy of the weight."""
        state = super().create_state(index, weight)
        return state if self.momentum else (None, state)
