"""NorMuon: Muon with a second moment for each row of the orthogonalized direction."""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from fastopt.arguments import Real, arg
from fastopt.optimizer.matrices import Shape
from fastopt.optimizer.muon import Muon, Orthogonal
from fastopt.optimizer.optimizer import Array, Index, register

FLOOR = 1e-10
"""Number of the authors that is added to roots and norms."""


class Normalized(Orthogonal):
    """Directions: the orthogonalized momentum, divided by the root of its second moment."""

    def write(
        self, main: Any, index: Index, weight: Array, direction: Array, grad: Array, state: Any
    ) -> bool:
        """See :meth:`Directions.write <fastopt.optimizer.matrices.Directions.write>`."""
        if not direction.size:
            return False
        mom, var = state
        self.average(main, index, direction, grad, mom)
        parts = zip(main.matrices(index, direction), main.matrices(index, var), strict=True)
        with np.errstate(all="ignore"):  # NaN and infinity propagate without a warning
            for matrix, average in parts:
                main.prepare(matrix)
                self.orthogonalize(main, matrix)
                before = norm(matrix)
                average *= main.beta2
                average += (1 - main.beta2) * main.squares(matrix)
                matrix /= np.sqrt(average) + FLOOR
                matrix *= main.length(*matrix.shape[-2:], before) / (norm(matrix) + FLOOR)
        return True


def norm(matrix: Array) -> Array:
    """Return the Frobenius norm of one or several matrices."""
    squares = np.einsum("...ij,...ij->...", matrix, matrix)
    return np.asarray(np.sqrt(squares))[..., np.newaxis, np.newaxis]


@register
class NorMuon(Muon):
    r"""NorMuon: Muon whose rows have steps of equal size.

    .. math::
        h &= \mathrm{clip}(r g), \qquad m \leftarrow \mu m + (1 - \mu) h, \qquad
        d = (1 - \mu) h + \mu m, \qquad O = \mathrm{orth}(d) \\
        v_i &\leftarrow \beta_2 v_i + (1 - \beta_2) \frac{1}{n} \sum_j O_{ij}^2, \qquad
        \hat O_{ij} = \frac{O_{ij}}{\sqrt{v_i} + 10^{-10}} \\
        w &\leftarrow (1 - \eta \lambda) w - \eta s \frac{\hat O}{\|\hat O\|}

    The rows of an orthogonalized matrix with more rows than columns differ in length, so that some
    neurons move faster than others; the second moment of each row removes this. :math:`s` is
    :math:`0.2 \sqrt{m n}` for a matrix of m rows and n columns with ``adjust="rms"``, as in the
    paper, and :math:`\|O\| \sqrt{\max(1, m / n)}` with ``adjust="original"``, as in the authors'
    code. See :class:`~fastopt.optimizer.Muon` for orth, `split` and the weights of the fallback.

    Source: Li et al., "NorMuon: Making Muon more efficient and scalable", arXiv:2510.05491. The
    authors' code has the arguments ``adjust="original", coefficients="quintic"`` for matrices, and
    rounds d to bfloat16. Weights with more dimensions are matrices of the first axis by all others,
    like in pytorch_optimizer; the authors' code orthogonalizes and normalizes each matrix of the
    last two axes.

    State: the tuple :math:`(m, v)` of an array in the weight's shape and one of shape (rows, 1).

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
    >>> updater = optimizer.get_updater(optimizer.NorMuon(learning_rate=0.1, fallback="adamw"))
    >>> weight = np.zeros((3, 2))
    >>> updater(0, np.array([[3.0, 0.0], [0.0, -1.0], [0.0, 0.1]]), weight)
    >>> weight.round(3) + 0
    array([[-0.028,  0.   ],
           [ 0.   ,  0.028],
           [ 0.   , -0.028]])
    """

    rounds_state = False
    beta2: float = arg(default=0.95, check=Real(least=0, below=1))
    positional = ("learning_rate", "momentum", "beta2")

    def directions(self) -> Normalized:
        """See :meth:`MatrixFamily.directions`."""
        return Normalized()

    def slots(self, shape: Shape) -> Mapping[str, Shape]:
        """See :meth:`MatrixFamily.slots`."""
        return {"mom": shape, "var": (shape[0], 1)}

    def prepare(self, matrix: Array) -> None:
        """Change a direction in place before it is orthogonalized."""

    def squares(self, matrix: Array) -> Array:
        """Return the squares that the second moments of an orthogonalized matrix average."""
        sums = np.einsum("...ij,...ij->...i", matrix, matrix)
        return np.asarray(sums / matrix.shape[-1])[..., np.newaxis]

    def length(self, rows: int, columns: int, before: Array) -> Any:
        """Return the norm of the step of a matrix, whose norm was `before` when orthogonalized."""
        if self.adjust == "rms":
            return 0.2 * math.sqrt(rows * columns)
        return before * self.scale(rows, columns)
