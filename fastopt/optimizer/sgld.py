"""SGLD: stochastic gradient Langevin dynamics."""

import math
from collections.abc import Mapping

from fastopt.kernels.rule import Hyper, Scalar, State, Step, rule
from fastopt.kernels.scalars import COMMON, decayed
from fastopt.optimizer.optimizer import Optimizer, constant, register


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
    >>> from fastopt import optimizer
    >>> updater = optimizer.get_updater(optimizer.SGLD(learning_rate=0.01, seed=1))
    >>> weight = np.zeros(10000)
    >>> updater(0, np.zeros(10000), weight)
    >>> bool(abs(weight.std() - 0.1) < 0.003)
    True
    """

    rule = sgld

    @constant
    def hyper(self, t: int, lr: float, wd: float) -> Mapping[str, float]:
        """See :meth:`Optimizer.hyper <fastopt.optimizer.Optimizer.hyper>`."""
        return {"lr": lr / 2, "spread": math.sqrt(lr)}
