"""Rprop: resilient backpropagation, which uses only the signs of gradients."""

from collections.abc import Mapping

from fastopt.arguments import Real, arg
from fastopt.kernels.rule import Hyper, Scalar, State, Step, rule
from fastopt.kernels.scalars import COMMON, decayed, same_sign, sign
from fastopt.optimizer.optimizer import Optimizer, constant, register
from fastopt.optimizer.rates import RateAttribute


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
    >>> from fastopt import optimizer
    >>> updater = optimizer.get_updater(optimizer.Rprop(learning_rate=0.1))
    >>> weight = np.ones(2, np.float32)
    >>> for _ in range(2):
    ...     updater(0, np.array([1.0, -5.0], np.float32), weight)
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

    @constant
    def hyper(self, t: int, lr: float, wd: float) -> Mapping[str, float]:
        """See :meth:`Optimizer.hyper <fastopt.optimizer.Optimizer.hyper>`."""
        return {
            "eta_minus": self.eta_minus,
            "eta_plus": self.eta_plus,
            "least_step": self.least_step,
            "largest_step": self.largest_step,
        }
