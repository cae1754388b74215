"""AdamAtan2: Adam without epsilon, invariant to the scale of the gradients."""

import math
from typing import Any

from fastopt.arguments import Real, alias, arg
from fastopt.kernels.rule import Hyper, Scalar, State, Step, rule, scalar
from fastopt.kernels.scalars import moments, rescaled
from fastopt.optimizer.families import MOMENTS, CautiousFamily, mean_and_var
from fastopt.optimizer.optimizer import corrected, register

FIELDS = tuple(field for field in MOMENTS if field != "epsilon")

LOW, HIGH = 0.66, 1 + math.sqrt(2)
"""Bounds of the ranges of y / x in the argument reduction of the arctangent."""

P0, P1, P2 = -8.750608600031904122785e-1, -1.615753718733365076637e1, -7.500855792314704667340e1
P3, P4 = -1.228866684490136173410e2, -6.485021904942025371773e1
Q0, Q1, Q2 = 2.485846490142306297962e1, 1.650270098316988542046e2, 4.328810604912902668951e2
Q3, Q4 = 4.853903996359136964868e2, 1.945506571482613964425e2
"""Coefficients of the arctangent in the Cephes library."""


@scalar
def angle(y: Scalar, x: Scalar) -> Scalar:
    """Return ``math.atan2(y, x)`` for x >= 0, in a form that compilers can vectorize."""
    real, size = type(y), abs(y)
    top, bottom, first = size, x, real(0)
    if size > real(HIGH) * x:
        top, bottom, first = -x, size, real(math.pi / 2)
    elif size > real(LOW) * x:
        top, bottom, first = size - x, size + x, real(math.pi / 4)
    if bottom == real(0):
        bottom = real(1)
    r = top / bottom
    z = r * r
    over = (((real(P0) * z + real(P1)) * z + real(P2)) * z + real(P3)) * z + real(P4)
    under = ((((z + real(Q0)) * z + real(Q1)) * z + real(Q2)) * z + real(Q3)) * z + real(Q4)
    found = first + (r + r * (z * over / under))
    return -found if y < real(0) else found


@rule(
    state=("mean", "var"),
    signed=("mean",),
    nonnegative=("var",),
    hyper=(*FIELDS, "mean_scale", "var_scale", "scale"),
)
def adam_atan2(weight: Scalar, grad: Scalar, state: State, h: Hyper) -> Step:
    """Arctangent of the ratio of the moments, with decoupled decay."""
    mean, var = moments(rescaled(grad, h), state, h)
    step = h.scale * angle(mean * h.mean_scale, math.sqrt(var * h.var_scale))
    return weight - h.lr * (step + h.wd * weight), (mean, var)


def mean_and_angle(t: Scalar, h: Hyper, carried: Any) -> None:
    """Compute the bias corrections of both moments; the second also includes b squared."""
    mean_and_var(t, h, carried)
    h.var_scale = h.var_scale * h.b * h.b


@register
class AdamAtan2(CautiousFamily):
    r"""AdamAtan2: Adam with an arctangent instead of a division, so that no epsilon is needed.

    .. math::
        h &= \mathrm{clip}(r g) \\
        m &\leftarrow \beta_1 m + (1 - \beta_1) h, \qquad
        v \leftarrow \beta_2 v + (1 - \beta_2) h^2 \\
        w &\leftarrow w - \eta \left( a\, \mathrm{atan2} \left( \frac{m}{1 - \beta_1^t},\;
            b \sqrt{\frac{v}{1 - \beta_2^t}} \right) + \lambda w \right)

    The step does not depend on the scale of the gradients, and is at most :math:`\eta a \pi / 2`
    without decay. Source: Everett et al., "Scaling Exponents Across Parameterizations and
    Optimizers", arXiv:2407.05872.

    State: the tuple :math:`(m, v)` of arrays in the weight's shape.

    Parameters
    ----------
    learning_rate : float or callable, optional
        Default 0.001; None uses the scheduler's ``base_lr``. The package adam-atan2-pytorch has
        1e-4.
    beta1, beta2 : float
        Decay rates of :math:`m` and :math:`v`, at least 0 and below 1. Defaults 0.9, 0.999;
        the package has a `beta2` of 0.99.
    a, b : float
        :math:`a` and :math:`b`, at least 0. Defaults 1.27, which turns a ratio of 1 into a step of
        nearly 1, and 1.
    cautious, cautious_decay : bool
        See :class:`~fastopt.optimizer.AdamW`. Default False.
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
    >>> updater = optimizer.get_updater(optimizer.AdamAtan2(learning_rate=0.1))
    >>> weight = np.ones(2, np.float32)
    >>> updater(0, np.array([1.0, -5.0], np.float32), weight)
    >>> print(weight.round(4))
    [0.9003 1.0997]
    """

    epsilon: float = arg(default=0.0, init=False)
    eps: float = alias("epsilon", default=0.0, kw_only=True, init=False)
    a: float = arg(default=1.27, check=Real(least=0))
    b: float = arg(default=1.0, check=Real(least=0))

    plain = adam_atan2

    @corrected(mean_and_angle, "b")
    def hyper(self, t: int, lr: float, wd: float) -> dict[str, float]:
        """See :meth:`Optimizer.hyper <fastopt.optimizer.Optimizer.hyper>`."""
        fields = super().hyper(t, lr, wd)
        return {**fields, "mean_scale": 1.0, "var_scale": 1.0, "scale": self.a, "b": self.b}
