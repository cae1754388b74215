"""ASGD: gradient descent with a decaying learning rate and averaged weights."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fastopt.arguments import Real, TableOf, arg, kept
from fastopt.kernels.rule import Hyper, Scalar, State, Step, rule
from fastopt.kernels.scalars import COMMON, decayed
from fastopt.optimizer.optimizer import Array, Index, Optimizer, PerIndex, corrected, register
from fastopt.optimizer.rates import RateAttribute


@rule(state=("ax",), hyper=(*COMMON, "shrink", "share"))
def asgd(weight: Scalar, grad: Scalar, state: State, h: Hyper) -> Step:
    """Gradient descent, and an average that moves towards the new weight."""
    weight = h.shrink * weight - h.lr * decayed(weight, grad, h)
    ax = state[0] + h.share * (weight - state[0])
    return weight, (weight if h.share == type(weight)(1) else ax,)


def scheduled(t: Scalar, h: Hyper, carried: Any) -> None:
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
    >>> from fastopt import optimizer
    >>> updater = optimizer.get_updater(optimizer.ASGD(learning_rate=0.1, lambd=0.0, t0=1))
    >>> weight = np.ones(2, np.float32)
    >>> for _ in range(4):
    ...     updater(0, np.array([1.0, -5.0], np.float32), weight)
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

    @property
    def carried(self) -> PerIndex:
        """Learning rates of the last updates."""
        return self._last_rates

    def carried_slots(self, indices: Sequence[Index]) -> NDArray[np.int64]:
        """See :meth:`Optimizer.carried_slots`; negative before the first update."""
        return self._last_rates.slots(indices, -1.0)

    @corrected(scheduled, "lambd", "alpha", "t0", carries=True)
    def hyper(self, t: int, lr: float, wd: float) -> Mapping[str, float]:
        """See :meth:`Optimizer.hyper <fastopt.optimizer.Optimizer.hyper>`."""
        return {
            "shrink": 1.0,
            "share": 1.0,
            "lambd": self.lambd,
            "alpha": self.alpha,
            "t0": self.t0,
        }

    def evaluated(self, weight: Array, state: Sequence[Array]) -> Array:
        """See :meth:`Optimizer.evaluated <fastopt.optimizer.Optimizer.evaluated>`."""
        return state[0]
