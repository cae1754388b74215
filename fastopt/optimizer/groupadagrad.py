"""GroupAdaGrad: AdaGrad with one accumulator for each row."""

import math
from collections.abc import Mapping
from typing import ClassVar

from fastopt.arguments import Real, Renamed, alias, arg
from fastopt.kernels.rule import Hyper, Scalar, State, Step, rule
from fastopt.kernels.scalars import rescaled
from fastopt.optimizer.optimizer import Optimizer, constant, register


def square(grad: Scalar, h: Hyper) -> Scalar:
    """Return the squared gradient."""
    grad = rescaled(grad, h)
    return grad * grad


@rule(
    state=("history",),
    hyper=("lr", "rescale_grad", "clip_gradient", "epsilon"),
    row=square,
)
def group_adagrad(weight: Scalar, grad: Scalar, state: State, h: Hyper, mean: Scalar) -> Step:
    """Gradient divided by the root of the row's sum of mean squares."""
    history = state[0] + mean
    rate = h.lr / math.sqrt(history + h.epsilon)  # the same for the whole row
    return weight - rate * rescaled(grad, h), (history,)


@register
class GroupAdaGrad(Optimizer):
    r"""AdaGrad with one accumulator for each row, for example for embeddings.

    .. math::
        h &= \mathrm{clip}(r g) \\
        H_i &\leftarrow H_i + \frac{1}{n} \sum_j h_{ij}^2 \\
        w_{ij} &\leftarrow w_{ij} - \eta \frac{h_{ij}}{\sqrt{H_i + \epsilon}}

    for two-dimensional weights without weight decay. Source: Duchi, Hazan and Singer, "Adaptive
    Subgradient Methods for Online Learning and Stochastic Optimization", JMLR 12 (2011), with
    rows as the coordinates.

    State: the array :math:`H` of shape (rows, 1).

    Parameters
    ----------
    eps : float
        :math:`\epsilon`, at least 0. Default 1e-5.
    **common
        Arguments of :class:`~fastopt.optimizer.Optimizer`.

    Raises
    ------
    ValueError
        An argument is NaN or out of range, or, at an update, the weight does not have two
        dimensions or its weight decay is not 0.

    Examples
    --------
    >>> import numpy as np
    >>> from fastopt import optimizer
    >>> updater = optimizer.get_updater(optimizer.GroupAdaGrad(learning_rate=0.1))
    >>> weight = np.ones((2, 2))
    >>> updater(0, np.array([[1.0, -1.0], [3.0, 4.0]]), weight)
    >>> weight.round(3)
    array([[0.9  , 1.1  ],
           [0.915, 0.887]])
    """

    rule = group_adagrad
    lazy_by_default = True
    float_stable_eps: ClassVar[float]
    eps: float = arg(default=1e-05, check=Renamed("eps", Real(least=0)), stored="float_stable_eps")
    epsilon: float = alias("eps", default=1e-8, kw_only=True)

    @constant
    def hyper(self, t: int, lr: float, wd: float) -> Mapping[str, float]:
        """See :meth:`Optimizer.hyper <fastopt.optimizer.Optimizer.hyper>`."""
        if wd != 0:
            raise ValueError(f"GroupAdaGrad has no weight decay, got {wd}")
        return {"epsilon": self.float_stable_eps}
