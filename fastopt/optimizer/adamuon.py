"""AdaMuon: Muon with a second moment for each element of the orthogonalized direction."""

import math
from collections.abc import Mapping

import numpy as np

from fastopt.optimizer.matrices import Shape
from fastopt.optimizer.normuon import NorMuon
from fastopt.optimizer.optimizer import Array, register


@register
class AdaMuon(NorMuon):
    r"""AdaMuon: Muon of signs, with a second moment for each element.

    .. math::
        h &= \mathrm{clip}(r g), \qquad m \leftarrow \mu m + (1 - \mu) h, \qquad
        d = (1 - \mu) h + \mu m, \qquad O = \mathrm{orth}(\mathrm{sign}(d)) \\
        v &\leftarrow \beta_2 v + (1 - \beta_2) O^2, \qquad
        \hat O = \frac{O}{\sqrt{v} + 10^{-10}} \\
        w &\leftarrow (1 - \eta \lambda) w - \eta s \frac{\hat O}{\|\hat O\|}

    with :math:`s = 0.2 \sqrt{m n}` for a matrix of m rows and n columns, so that learning rates of
    AdamW can be used; ``adjust="original"`` is that of :class:`~fastopt.optimizer.NorMuon`. See
    :class:`~fastopt.optimizer.Muon` for orth, `split` and the weights of the fallback.

    Source: Si, Zhang and Shen, "AdaMuon: Adaptive Muon Optimizer", arXiv:2507.11005. The authors'
    code has ``coefficients="quintic"`` and one number for :math:`\mu` and :math:`\beta_2`, adds
    1e-8 to roots and norms, and rounds d to bfloat16.

    State: the tuple :math:`(m, v)` of an array in the weight's shape and one of shape (rows, size
    of a row).

    Parameters
    ----------
    learning_rate : float or callable, optional
        Default 0.001; None uses the scheduler's ``base_lr``.
    momentum : float
        Decay rate :math:`\mu`, at least 0 and below 1. Default 0.95.
    beta2 : float
        Decay rate of :math:`v`, at least 0 and below 1. Default 0.95.
    **common
        Further arguments of :class:`~fastopt.optimizer.Muon`, with its defaults.

    Raises
    ------
    ValueError, TypeError
        Like :class:`~fastopt.optimizer.Muon`.

    Examples
    --------
    >>> import numpy as np
    >>> from fastopt import optimizer
    >>> updater = optimizer.get_updater(optimizer.AdaMuon(learning_rate=0.1, fallback="adamw"))
    >>> weight = np.zeros((2, 2))
    >>> updater(0, np.array([[3.0, 1.0], [0.5, -1.0]]), weight)
    >>> weight.round(3) + 0
    array([[-0.02, -0.02],
           [-0.02,  0.02]])
    """

    def slots(self, shape: Shape) -> Mapping[str, Shape]:
        """See :meth:`MatrixFamily.slots`."""
        return {"mom": shape, "var": (shape[0], math.prod(shape[1:]))}

    def prepare(self, matrix: Array) -> None:
        """See :meth:`NorMuon.prepare`."""
        np.sign(matrix, out=matrix)

    def squares(self, matrix: Array) -> Array:
        """See :meth:`NorMuon.squares`."""
        return np.asarray(np.square(matrix))
