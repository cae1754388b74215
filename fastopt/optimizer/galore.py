"""GaLore: Adam in the space of the largest singular vectors of the gradient."""

from typing import Any

import numpy as np

from fastopt.arguments import arg
from fastopt.optimizer.lowrank import LowRank
from fastopt.optimizer.optimizer import Array, register


@register
class GaLore(LowRank):
    r"""GaLore: Adam in the space of the largest singular vectors of the gradient.

    .. math::
        h &= \mathrm{clip}(r g), \qquad y = h P \\
        m &\leftarrow \beta_1 m + (1 - \beta_1) y, \qquad
        v \leftarrow \beta_2 v + (1 - \beta_2) y^2 \\
        w &\leftarrow (1 - \eta \lambda) \left( w - \eta \alpha
            \frac{\sqrt{1 - \beta_2^t}}{1 - \beta_1^t} \,
            \frac{m}{\sqrt{v} + \epsilon} P^T \right)

    for a matrix with at least as many rows as columns; another one is transposed. Every
    `update_interval` updates, and in the first one, P becomes the `rank` right singular vectors of
    h with the largest singular values; m and v remain. The sign of a vector, which is arbitrary, is
    that of its product with the one before. Weights with more than two dimensions are
    reshaped to matrices of the first axis by all others.

    Source: Zhao et al., "GaLore: Memory-Efficient LLM Training by Gradient Low-Rank Projection",
    arXiv:2403.03507, with the code of the authors.

    Weights with fewer dimensions need a `fallback`; without one they raise an error. The
    decomposition uses NumPy in the weight's precision. A gradient that is not finite makes the
    weight NaN.

    State: the tuple of the arrays m and v, of shape (longer side, rank), and P, of shape (shorter
    side, rank), where a rank above the shorter side becomes that.

    Parameters
    ----------
    learning_rate : float or callable, optional
        Default 0.001; None uses the scheduler's ``base_lr``.
    rank : int
        Rank of the projection, at least 1. Default 128.
    update_interval : int
        Updates from one projection to the next, at least 1. Default 200.
    scale : float
        :math:`\alpha`, at least 0. Default 0.25.
    beta1, beta2 : float
        Decay rates of m and v, at least 0 and below 1. Defaults 0.9, 0.999.
    epsilon : float
        :math:`\epsilon`, at least 0. Default 1e-6.
    fallback : Optimizer or str, optional
        Optimizer of weights with fewer than two dimensions, and of those in `fallback_for`, see
        :class:`~fastopt.optimizer.Muon`. Default None: such weights raise an error.
    fallback_for : str or sequence of str, optional
        Regular expressions for the names of weights that the fallback updates.
    cautious, cautious_decay : bool
        See :class:`~fastopt.optimizer.AdamW`, for the weights that the fallback does not update.
        Default False.
    **common
        Arguments of :class:`~fastopt.optimizer.Optimizer`; `state_dtype` must be None.

    Raises
    ------
    ValueError, TypeError
        Like :class:`~fastopt.optimizer.Muon`.

    Examples
    --------
    >>> import numpy as np
    >>> from fastopt import optimizer
    >>> updater = optimizer.get_updater(optimizer.GaLore(learning_rate=0.1, rank=1, scale=1.0))
    >>> weight = np.zeros((3, 2))
    >>> updater(0, np.array([[3.0, 0.0], [-1.0, 0.0], [0.0, 0.1]]), weight)
    >>> weight.round(3) + 0
    array([[-0.1,  0. ],
           [ 0.1,  0. ],
           [ 0. ,  0. ]])
    >>> [array.shape for array in updater.states[0]]
    [(3, 1), (3, 1), (2, 1)]
    """

    scale: float = arg(default=0.25)

    def basis(self, matrix: Array, before: Array, t: int) -> Array:
        """See :meth:`LowRank.basis`."""
        if not np.isfinite(matrix).all():
            return np.full_like(before, np.nan)
        found = np.linalg.svd(matrix, full_matrices=False)[2][: before.shape[1]].T
        turned = np.einsum("ij,ij->j", found, before) < 0
        return np.where(turned, -found, found)

    def lifted(self, matrix: Array, low: Array, step: Array, state: Any) -> Array:
        """See :meth:`LowRank.lifted`."""
        result: Array = step @ state["basis"].T
        result *= result.dtype.type(self.scale)
        return result
