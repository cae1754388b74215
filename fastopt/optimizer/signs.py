"""Steps along signs: signSGD, Signum, Lion and Rprop."""

from collections.abc import Mapping

from fastopt.arguments import FLAG, Real, alias, arg
from fastopt.kernels.rule import Hyper, Scalar, State, Step, rule
from fastopt.kernels.scalars import COMMON, decayed, rescaled, same_sign, sign
from fastopt.kernels.variants import Traits, shrunk_by
from fastopt.optimizer.families import MOMENTS, DecoupledFamily, MomentumFamily
from fastopt.optimizer.optimizer import Optimizer, RateAttribute, constant, register


@rule(hyper=("lr", "shrink", "direction"))
def signsgd(weight: Scalar, grad: Scalar, state: State, h: Hyper) -> Step:
    """Step along the sign of the gradient, with decoupled decay."""
    return h.shrink * weight - h.lr * h.direction * sign(grad), ()


@rule(state=("mom",), signed=("mom",), hyper=(*COMMON, "momentum", "one_minus_momentum", "shrink"))
def signum(weight: Scalar, grad: Scalar, state: State, h: Hyper) -> Step:
    """Step along the sign of the momentum, which averages negative gradients."""
    mom = h.momentum * state[0] - h.one_minus_momentum * decayed(weight, grad, h)
    return h.shrink * weight + h.lr * sign(mom), (mom,)


@register
class Signum(MomentumFamily):
    r"""Signum: steps along the sign of the momentum; signSGD without momentum.

    .. math::
        m &\leftarrow \mu m - (1 - \mu) (\mathrm{clip}(r g) + \lambda w) \\
        w &\leftarrow (1 - \eta \delta) w + \eta\, \mathrm{sign}(m)

    with :math:`\delta` = `wd_lh`. Without momentum
    :math:`w \leftarrow (1 - \eta (\lambda + \delta)) w - \eta\, \mathrm{sign}(g)`, where neither
    ``rescale_grad`` nor ``clip_gradient`` has an effect.

    Source: Bernstein et al., "signSGD: Compressed Optimisation for Non-Convex Problems",
    arXiv:1802.04434. With `wd_lh` it is Tiger (Su, 2023) with one learning rate; the author's code
    multiplies it by the root mean square of each weight, and by 0.5 for biases, which do not decay.

    State: the array :math:`m`, in the weight's shape; None without momentum.

    Parameters
    ----------
    learning_rate : float or callable, optional
        Default 0.01; None uses the scheduler's ``base_lr``.
    momentum : float
        Momentum :math:`\mu`. Default 0.9.
    wd_lh : float
        Decoupled weight decay :math:`\delta`, at least 0. Default 0.
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
    >>> updater = fastopt.Updater(fastopt.Signum(lr=0.1))
    >>> weight = np.ones(3)
    >>> updater.step(np.array([3.0, 0.0, -0.1]), weight)
    >>> weight
    array([0.9, 1. , 1.1])
    """

    forms = (signsgd, signum)
    decoupled = True
    corrects_decay = False
    learning_rate: RateAttribute = arg(default=0.01)
    momentum: float = arg(default=0.9)
    cautious: bool = arg(default=False, check=FLAG, kw_only=True, new=True)
    wd_lh: float = arg(default=0.0, check=Real(least=0))
    rule_traits = Traits(decayed, shrunk_by, from_zero=False)

    def check_together(self) -> None:
        """See :meth:`Optimizer.check_together <fastopt.optimizer.Optimizer.check_together>`."""
        super().check_together()
        if self.momentum and self.sparse_decay == "catch_up":
            raise ValueError("sparse_decay='catch_up' needs Signum without momentum")

    @constant
    def hyper(self, t: int, lr: float, wd: float) -> Mapping[str, float]:
        """See :meth:`Optimizer.hyper <fastopt.optimizer.Optimizer.hyper>`."""
        return {"shrink": 1 - lr * (self.wd_lh if self.momentum else self.wd_lh + wd)}

    def decay(self, t: int, lr: float, wd: float) -> float:
        """See :meth:`Optimizer.decay <fastopt.optimizer.Optimizer.decay>`."""
        return lr * (self.wd_lh + wd)


@rule(state=("mom",), signed=("mom",), hyper=tuple(f for f in MOMENTS if f != "epsilon"))
def lion(weight: Scalar, grad: Scalar, state: State, h: Hyper) -> Step:
    """Step along the sign of one average; another average is the state."""
    (mom,) = state
    grad = rescaled(grad, h)
    step = sign(h.beta1 * mom + h.one_minus_beta1 * grad) + h.wd * weight
    return weight - h.lr * step, (h.beta2 * mom + h.one_minus_beta2 * grad,)


@register
class Lion(DecoupledFamily):
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
    >>> import fastopt
    >>> updater = fastopt.Updater(fastopt.Lion(lr=0.1))
    >>> weight = np.ones(3)
    >>> updater.step(np.array([1.0, 0.0, -5.0]), weight)
    >>> weight
    array([0.9, 1. , 1.1])
    """

    base_rule = lion

    epsilon: float = arg(default=0.0, init=False)
    eps: float = alias("epsilon", default=0.0, kw_only=True, init=False)
    learning_rate: RateAttribute = arg(default=0.0001)
    beta2: float = arg(default=0.99)


@rule(
    state=("previous", "size"),
    hyper=(*COMMON, "eta_minus", "eta_plus", "least_step", "largest_step"),
)
def rprop(weight: Scalar, grad: Scalar, state: State, h: Hyper) -> Step:
    """Step whose size grows while the sign stays; at a sign change it shrinks without a step."""
    previous, size = state
    zero = type(weight)(0)
    grad = decayed(weight, grad, h)
    if size == zero:
        size = h.lr
    if same_sign(grad, previous):
        size = size * h.eta_plus
    elif same_sign(grad, -previous):
        size = size * h.eta_minus
        grad = grad * zero
    if size < h.least_step:
        size = h.least_step
    if size > h.largest_step:
        size = h.largest_step
    return weight - size * sign(grad), (grad, size)


@register
class Rprop(Optimizer):
    r"""Rprop: steps along the sign of the gradient, with a step size for each element.

    .. math::
        h &= \mathrm{clip}(r g) + \lambda w \\
        s &\leftarrow \min(u, \max(l, s f)), \qquad f = \begin{cases}
            \eta_+ & h p > 0 \\ \eta_- & h p < 0 \\ 1 & h p = 0 \end{cases} \\
        h &\leftarrow 0 \text{ where } h p < 0 \\
        w &\leftarrow w - s\, \mathrm{sign}(h), \qquad p \leftarrow h

    Rprop is meant for full-batch gradients, since the signs of small batches are noisy. :math:`s`
    is initialized with the learning rate, which has no effect afterwards. This is torch.optim.Rprop
    with its pairs `etas` and `step_sizes` as two arguments each.

    Source: Riedmiller and Braun, "A direct adaptive method for faster backpropagation learning: the
    RPROP algorithm", IEEE International Conference on Neural Networks 1993.

    State: the tuple :math:`(p, s)` of arrays in the weight's shape; :math:`s = 0` means that an
    element is not initialized yet.

    Parameters
    ----------
    learning_rate : float or callable, optional
        Initial value of :math:`s`. Default 0.01; None uses the scheduler's ``base_lr``.
    eta_minus, eta_plus : float
        :math:`\eta_-`, at least 0, and :math:`\eta_+`, at least 1. Defaults 0.5, 1.2.
    least_step, largest_step : float
        :math:`l` and :math:`u`, at least 0. Defaults 1e-6, 50.
    **common
        Arguments of :class:`~fastopt.optimizer.Optimizer`.

    Raises
    ------
    ValueError
        An argument is NaN or out of range, or `least_step` is above `largest_step`.

    Examples
    --------
    >>> import numpy as np
    >>> import fastopt
    >>> updater = fastopt.Updater(fastopt.Rprop(lr=0.1))
    >>> weight = np.ones(2, np.float32)
    >>> for _ in range(2):
    ...     updater.step(np.array([1.0, -5.0], np.float32), weight)
    >>> print(weight.round(4))
    [0.78 1.22]
    """

    rule = rprop
    learning_rate: RateAttribute = arg(default=0.01)
    eta_minus: float = arg(default=0.5, check=Real(least=0))
    eta_plus: float = arg(default=1.2, check=Real(least=1))
    least_step: float = arg(default=1e-06, check=Real(least=0))
    largest_step: float = arg(default=50.0, check=Real(least=0))

    def check_together(self) -> None:
        """See :meth:`Optimizer.check_together <fastopt.optimizer.Optimizer.check_together>`."""
        super().check_together()
        if self.least_step > self.largest_step:
            raise ValueError(
                f"least_step must be at most largest_step={self.largest_step}, "
                f"got {self.least_step}"
            )
