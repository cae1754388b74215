"""What optimizers with moving averages of the gradient and its square have in common."""

from typing import Any

from fastopt.arguments import number
from fastopt.kernels.scalars import COMMON
from fastopt.optimizer.base import Optimizer

__all__ = ["MOMENTS", "MomentOptimizer"]

MOMENTS = (*COMMON, "beta1", "one_minus_beta1", "beta2", "one_minus_beta2", "epsilon")
"""Fields that :meth:`MomentOptimizer.hyper` and the base class fill."""


class MomentOptimizer(Optimizer):
    """Abstract base of optimizers with the arguments `beta1`, `beta2` and `epsilon`.

    Parameters
    ----------
    learning_rate : float, optional
        Default 0.001; None keeps a scheduler's own rate.
    beta1, beta2 : float
        Decay rates of the moving averages, at least 0 and below 1. Defaults 0.9, 0.999.
    epsilon : float
        Small number that keeps divisions finite, at least 0. Default 1e-8.
    **kwargs
        Arguments of :class:`~fastopt.optimizer.Optimizer`.

    Raises
    ------
    ValueError
        An argument is NaN or out of range.
    """

    def __init__(
        self,
        learning_rate: float | None = 0.001,
        beta1: float = 0.9,
        beta2: float = 0.999,
        epsilon: float = 1e-8,
        **kwargs: Any,
    ) -> None:
        super().__init__(learning_rate=learning_rate, **kwargs)
        self.beta1 = number("beta1", beta1, least=0, below=1)
        self.beta2 = number("beta2", beta2, least=0, below=1)
        self.epsilon = number("epsilon", epsilon, least=0)

    def hyper(self, t: int, lr: float, wd: float) -> dict[str, float]:
        """See :meth:`Optimizer.hyper <fastopt.optimizer.Optimizer.hyper>`."""
        return {
            "beta1": self.beta1,
            "one_minus_beta1": 1 - self.beta1,
            "beta2": self.beta2,
            "one_minus_beta2": 1 - self.beta2,
            "epsilon": self.epsilon,
        }

    def corrections(self, t: int) -> tuple[float, float]:
        """``1 - beta1**t`` and ``1 - beta2**t``: what the averages of `t` terms add up to."""
        return 1 - self.beta1**t, 1 - self.beta2**t
