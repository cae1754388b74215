"""Signum and signSGD: steps along the sign of the momentum or of the gradient."""

from collections.abc import Mapping

from fastopt.arguments import FLAG, Real, arg
from fastopt.kernels.rule import Hyper, Scalar, State, Step, rule
from fastopt.kernels.scalars import COMMON, decayed, sign
from fastopt.kernels.variants import Traits, shrunk_by
from fastopt.optimizer.families import MomentumFamily
from fastopt.optimizer.optimizer import constant, register
from fastopt.optimizer.rates import RateAttribute


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
    >>> from fastopt import optimizer
    >>> updater = optimizer.get_updater(optimizer.Signum(learning_rate=0.1))
    >>> weight = np.ones(3)
    >>> updater(0, np.array([3.0, 0.0, -0.1]), weight)
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

    @property
    def traits(self) -> Traits:
        """See :attr:`~fastopt.optimizer.families.Varied.traits`."""
        return Traits(decayed, shrunk_by, from_zero=False)

    def check_together(self) -> None:
        """See :meth:`Optimizer.check_together <fastopt.optimizer.Optimizer.check_together>`."""
        super().check_together()
        if self.momentum and self.sparse_decay == "catch_up":
            raise ValueError("sparse_decay='catch_up' needs Signum without momentum")

    @constant
    def hyper(self, t: int, lr: float, wd: float) -> Mapping[str, float]:
        """See :meth:`Optimizer.hyper <fastopt.optimizer.Optimizer.hyper>`."""
        return {
            "momentum": self.momentum,
            "one_minus_momentum": 1 - self.momentum,
            "shrink": 1 - lr * (self.wd_lh if self.momentum else self.wd_lh + wd),
        }

    def decay(self, t: int, lr: float, wd: float) -> float:
        """See :meth:`Optimizer.decay <fastopt.optimizer.Optimizer.decay>`."""
        return lr * (self.wd_lh + wd)
