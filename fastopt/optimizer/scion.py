"""Scion: steps of fixed size in a norm of each layer."""

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np

from fastopt.arguments import Choice, Real, Stored, arg, brief
from fastopt.optimizer.matrices import Shape, pattern
from fastopt.optimizer.muon import Muon, Orthogonal
from fastopt.optimizer.optimizer import Array, Index, register
from fastopt.optimizer.rates import RateAttribute

FLOOR = 1e-8
"""Number of the authors that is added to norms."""

NORMS = "spectral", "sign", "rows", "rms"


class _Extreme(Orthogonal):
    """Directions: the point of a ball that is farthest along the momentum."""

    def write(
        self, main: "Scion", index: Index, weight: Array, direction: Array, grad: Array, state: Any
    ) -> bool:
        """See :meth:`Directions.write <fastopt.optimizer.matrices.Directions.write>`."""
        if not direction.size:
            return False
        self.average(main, index, direction, grad, state)
        norm, radius = main.ball(index, direction.shape)
        real, columns = direction.dtype.type, math.prod(direction.shape[1:])
        with np.errstate(all="ignore"):  # NaN and infinity propagate without a warning
            if norm == "spectral":
                radius /= math.sqrt(math.prod(direction.shape[2:]))
                for matrix in main.matrices(index, direction):
                    self.orthogonalize(main, matrix, radius * main.scale(*matrix.shape[-2:]))
            elif norm == "sign":
                np.sign(direction, out=direction)
                direction *= real(radius / columns)
            else:
                axes = None if norm == "rms" else tuple(range(1, direction.ndim))
                squares = np.square(direction, dtype=np.float64).mean(axes, keepdims=True)
                size = np.sqrt(squares) * (1 if norm == "rms" else columns) + FLOOR
                direction *= (radius / size).astype(direction.dtype)
        return True


def _check_norms(name: str, value: Any) -> tuple[tuple[str, tuple[str, float]], ...] | None:
    """Check pairs of a regular expression and a pair of a norm and a radius."""
    if value is None:
        return None
    pairs = tuple(value.items()) if isinstance(value, Mapping) else value
    if not isinstance(pairs, (tuple, list)) or not all(
        isinstance(pair, (tuple, list))
        and len(pair) == 2
        and isinstance(pair[1], (tuple, list))
        and len(pair[1]) == 2
        for pair in pairs
    ):
        raise TypeError(
            f"{name} must map regular expressions to pairs of a norm and a radius, such as "
            f"{{'head': ('sign', 3000)}}, got {brief(value)}"
        )
    kind, size = Choice(*NORMS), Real(least=0)
    checked = []
    for key, (norm, radius) in pairs:
        context = f"{name}[{key!r}]"
        checked.append((pattern(name, key), (kind(context, norm), size(context, radius))))
    return tuple(checked)


@register
class Scion(Muon):
    r"""Scion: steps of fixed size in a norm of each layer.

    .. math::
        h &= \mathrm{clip}(r g), \qquad m \leftarrow \mu m + (1 - \mu) h \\
        w &\leftarrow (1 - \eta \lambda) w - \eta \rho \, \mathrm{lmo}(m)

    The linear minimization oracle is the point of the unit ball of a norm that is farthest along m,
    for a weight of shape (n, c), or (n, c, k, l) with :math:`K = k l`:

    * ``"spectral"``: :math:`\sqrt{n / c} / K \cdot \mathrm{orth}(m)`, for hidden layers, see
      :class:`~fastopt.optimizer.Muon` for orth, `split`, and `adjust`;
    * ``"sign"``: :math:`\mathrm{sign}(m) / (c K)`, for the last layer, and for embeddings that it
      shares;
    * ``"rows"``: each row divided by :math:`\sqrt{c K}` times its Euclidean norm, for the last
      layer;
    * ``"rms"``: m divided by its root mean square, for vectors.

    ``wd=0`` is the unconstrained form of the paper. ``wd=1`` is the constrained one,
    :math:`w \leftarrow (1 - \eta) w - \eta \rho \, \mathrm{lmo}(m)`, which keeps each weight in a
    ball of radius :math:`\rho`.

    Source: Pethick et al., "Training Deep Learning Models with Norm-Constrained LMOs",
    arXiv:2502.07529, whose code has ``coefficients="quintic"``, rounds m to bfloat16, and names
    :math:`1 - \mu` the momentum.

    State: the array :math:`m`, in the weight's shape.

    Parameters
    ----------
    learning_rate : float or callable, optional
        Default 0.0002; None uses the scheduler's ``base_lr``.
    momentum : float
        Decay rate :math:`\mu`, at least 0 and below 1. Default 0.9.
    radius : float
        :math:`\rho` of the weights that `norms` does not select, at least 0: those with two or more
        dimensions have the norm ``"spectral"``, others ``"rms"``. Default 50.
    norms : dict of str to (str, float), optional
        Maps a regular expression for names of weights to a norm and its radius, for example
        ``{"head|embed": ("sign", 3000)}``. The first pattern that ``re.search`` finds in the name
        applies. Default None.
    nesterov, adjust
        See :class:`~fastopt.optimizer.Muon`. Defaults False and 'spectral'.
    **common
        Further arguments of :class:`~fastopt.optimizer.Muon`. Vectors need no fallback.

    Raises
    ------
    ValueError, TypeError
        Like :class:`~fastopt.optimizer.Muon`; also if a norm other than ``"rms"`` is selected for a
        weight with fewer than two dimensions.

    Examples
    --------
    >>> import numpy as np
    >>> from fastopt import optimizer
    >>> norms = {"head": ("sign", 4.0)}
    >>> names = {0: "hidden", 1: "head"}
    >>> made = optimizer.Scion(0.1, radius=1.0, norms=norms, param_idx2name=names)
    >>> updater = optimizer.get_updater(made)
    >>> weights = [np.zeros((2, 2)), np.zeros((1, 2))]
    >>> updater([0, 1], [np.array([[3.0, 0.0], [0.0, -1.0]]), np.array([[1.0, -5.0]])], weights)
    >>> weights[0].round(2) + 0
    array([[-0.1,  0. ],
           [ 0. ,  0.1]])
    >>> weights[1]
    array([[-0.2,  0.2]])

    The output layer with another norm, whose steps are signs:

    >>> made = optimizer.Scion(learning_rate=0.1, norms={"output": ("sign", 2.0)})
    >>> updater, weight = optimizer.get_updater(made), np.zeros((2, 2))
    >>> updater("output", np.array([[3.0, -1.0], [0.5, 2.0]]), weight)
    >>> weight.round(2)
    array([[-0.1,  0.1],
           [-0.1, -0.1]])
    """

    takes_vectors = True
    learning_rate: RateAttribute = arg(default=0.0002)
    momentum: float = arg(default=0.9)
    radius: float = arg(default=50.0, check=Real(least=0))
    norms: Stored[Any, Mapping[str, tuple[str, float]] | None] = arg(
        default=None, check=_check_norms
    )
    nesterov: bool = arg(default=False)
    adjust: Literal["rms", "original", "spectral"] = arg(default="spectral")
    positional = ("learning_rate", "momentum", "radius", "norms", "nesterov", "adjust")

    def directions(self) -> _Extreme:
        """See :meth:`MatrixFamily.directions`."""
        return _Extreme()

    def check_shape(self, index: Index, shape: Shape) -> None:
        """See :meth:`MatrixFamily.check_shape`."""
        norm, _ = self.ball(index, shape)
        if norm == "spectral":
            super().check_shape(index, shape)

    def patterns(self) -> Mapping[str, Sequence[str]]:
        """See :meth:`MatrixFamily.patterns`."""
        return {**super().patterns(), "norms": [each for each, _ in self.norms or ()]}

    def ball(self, index: Index, shape: Shape) -> tuple[str, float]:
        """Return the norm of a weight, and its radius."""
        usual = "spectral" if len(shape) > 1 else "rms", self.radius
        if not self.norms:
            return usual
        name = self.name_of(index)
        norm, radius = next((ball for each, ball in self.norms if re.search(each, name)), usual)
        if len(shape) < 2 and norm != "rms":
            raise ValueError(
                f"norms: {norm!r} needs weights of two or more dimensions, and {name!r} has shape "
                f"{shape}: select ('rms', radius) for it"
            )
        return norm, radius
