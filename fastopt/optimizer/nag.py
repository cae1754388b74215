"""Nesterov's accelerated gradient."""

from fastopt.arguments import FLAG, arg
from fastopt.kernels.rule import Hyper, Scalar, State, Step, rule
from fastopt.kernels.scalars import COMMON, decayed
from fastopt.optimizer.families import MomentumFamily
from fastopt.optimizer.optimizer import register
from fastopt.optimizer.sgd import sgd


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
    >>> from fastopt import optimizer
    >>> updater = optimizer.get_updater(optimizer.NAG(learning_rate=0.1, momentum=0.5))
    >>> weight = np.ones(2)
    >>> updater(0, np.ones(2), weight)
    >>> weight
    array([0.85, 0.85])
    """

    cautious: bool = arg(default=False, check=FLAG, kw_only=True, new=True)
    forms = (sgd, nag)
