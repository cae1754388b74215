"""Schedule-Free SGD."""

from fastopt.arguments import Real, arg
from fastopt.kernels.rule import Hyper, Scalar, State, Step, rule
from fastopt.kernels.scalars import decayed
from fastopt.optimizer.optimizer import register
from fastopt.optimizer.rates import RateAttribute
from fastopt.optimizer.schedulefree import FREE, ScheduleFreeFamily, interpolated


@rule(state=("lead",), hyper=FREE)
def schedulefree_sgd(weight: Scalar, grad: Scalar, state: State, h: Hyper) -> Step:
    """Step of the fast weight along the gradient with decay."""
    weight, lead = interpolated(weight, decayed(weight, grad, h), state[0], h)
    return weight, (lead,)


@register
class ScheduleFreeSGD(ScheduleFreeFamily):
    r"""Schedule-Free SGD: needs neither a learning rate schedule nor the number of steps.

    .. math::
        z &\leftarrow z - \eta_t (\mathrm{clip}(r g) + \lambda w) \\
        x &\leftarrow (1 - c_t) x + c_t z, \qquad w = \mu x + (1 - \mu) z

    Gradients are computed at :math:`w`, the weight. Inside ``with updater.averaged():`` the weights
    hold :math:`x`, for evaluation. For :math:`\eta_t`, :math:`c_t` and the other arguments see
    :class:`~fastopt.optimizer.ScheduleFreeAdamW`. This is SGDScheduleFree of the package
    schedulefree.

    Source: Defazio et al., "The Road Less Scheduled", arXiv:2405.15682.

    State: the array :math:`z - w`, in the weight's shape.

    Parameters
    ----------
    learning_rate : float or callable, optional
        Default 1; None uses the scheduler's ``base_lr``.
    momentum : float
        :math:`\mu`, at least 0.01 and below 1. Default 0.9.
    warmup_steps : int
        Number of updates with a linearly increasing learning rate, at least 0. Default 0.
    r, weight_lr_power : float
        Exponents of the update number and of the learning rate in the averaging weights, at least
        0. Defaults 0, 2.
    average_rate : float, optional
        Constant :math:`c_t`, above 0 and at most 1. Default None.
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
    >>> updater = optimizer.get_updater(optimizer.ScheduleFreeSGD(learning_rate=0.1))
    >>> weight = np.ones(2, np.float32)
    >>> for _ in range(3):
    ...     updater(0, np.array([1.0, -5.0], np.float32), weight)
    >>> with updater.averaged():
    ...     print(weight.round(4))
    [0.8 2. ]
    """

    rule = schedulefree_sgd
    learning_rate: RateAttribute = arg(default=1.0)
    momentum: float = arg(default=0.9, check=Real(least=0.01, below=1))
    positional = (
        *("learning_rate", "momentum", "warmup_steps", "r", "weight_lr_power", "average_rate"),
    )

    @property
    def inner(self) -> float:
        """Interpolation factor of the average in the weights at which gradients are computed."""
        return self.momentum
