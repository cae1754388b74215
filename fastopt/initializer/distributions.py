"""Random initializers whose scale does not depend on the weight's shape."""

from functools import partial
from typing import ClassVar

import numpy as np

from fastopt.arguments import choice, number
from fastopt.initializer import draws
from fastopt.initializer.arrays import Array, drawable
from fastopt.initializer.base import InitDesc, Initializer, alias, register


@register
class Uniform(Initializer):
    """Draw weights uniformly from ``[-scale, scale)``.

    Parameters
    ----------
    scale : float, 0 or more, default 0.07
    rng
        See :class:`Initializer`, also for errors.

    Examples
    --------
    >>> import numpy as np
    >>> from fastopt import initializer
    >>> weight = np.empty(1000)
    >>> initializer.Uniform(0.1, rng=0)(initializer.InitDesc("fc_weight"), weight)
    >>> bool(0.09 < abs(weight).max() <= 0.1)
    True
    """

    def __init__(self, scale: float = 0.07, *, rng: draws.Seed = None) -> None:
        self.scale = number("scale", scale, least=0)
        super().__init__(rng=rng, scale=self.scale)

    def _init_weight(self, desc: InitDesc, arr: Array) -> None:
        self._draw(desc, arr, draws.uniform, self.scale)


@register
class Normal(Initializer):
    """Draw weights from a normal distribution with mean 0.

    Parameters
    ----------
    sigma : float, 0 or more, default 0.01
        Standard deviation.
    rng
        See :class:`Initializer`, also for errors.

    Examples
    --------
    >>> import numpy as np
    >>> from fastopt import initializer
    >>> weight = np.empty(1000)
    >>> initializer.Normal(0.5, rng=0)(initializer.InitDesc("fc_weight"), weight)
    >>> bool(0.45 < weight.std() < 0.55)
    True
    """

    def __init__(self, sigma: float = 0.01, *, rng: draws.Seed = None) -> None:
        self.sigma = number("sigma", sigma, least=0)
        super().__init__(rng=rng, sigma=self.sigma)

    def _init_weight(self, desc: InitDesc, arr: Array) -> None:
        self._draw(desc, arr, draws.normal, self.sigma)


@register
@alias("truncated_normal")
class TruncatedNormal(Initializer):
    """Draw weights from a truncated normal distribution with mean 0.

    Parameters
    ----------
    sigma : float, 0 or more, default 0.01
        Standard deviation before truncation. The truncated distribution has a smaller one:
        0.88 `sigma` with the default `bound`.
    bound : float, 1 or more, default 2
        Values with magnitude above ``bound * sigma`` are drawn again.
    rng
        See :class:`Initializer`, also for errors.

    Examples
    --------
    >>> import numpy as np
    >>> from fastopt import initializer
    >>> weight = np.empty(1000)
    >>> initializer.TruncatedNormal(0.5, rng=0)(initializer.InitDesc("fc_weight"), weight)
    >>> bool(0.9 < abs(weight).max() <= 1)
    True
    """

    def __init__(self, sigma: float = 0.01, bound: float = 2, *, rng: draws.Seed = None) -> None:
        self.sigma = number("sigma", sigma, least=0)
        self.bound = number("bound", bound, least=1)
        super().__init__(rng=rng, sigma=self.sigma, bound=self.bound)

    def _init_weight(self, desc: InitDesc, arr: Array) -> None:
        self._draw(desc, arr, partial(draws.truncated, bound=self.bound), self.sigma)


@register
class Orthogonal(Initializer):
    r"""Make the rows or columns of a weight orthogonal and of length `scale`.

    The weight is reshaped to a matrix with ``len(weight)`` rows:

    .. math:: w = \mathrm{scale} \cdot U \text{ or } \mathrm{scale} \cdot V^\top,
        \quad U S V^\top = \text{a random matrix}

    whichever has the shape of the matrix (Saxe et al., arXiv:1312.6120).

    Parameters
    ----------
    scale : float, 0 or more, default 1.414
    rand_type : {'uniform', 'normal'}
        Distribution of the random matrix.
    rng
        See :class:`Initializer`, also for errors.

    Raises
    ------
    ValueError
        The weight has fewer than two dimensions.

    Examples
    --------
    >>> import numpy as np
    >>> from fastopt import initializer
    >>> weight = np.empty((3, 5))
    >>> initializer.Orthogonal(scale=2, rng=0)(initializer.InitDesc("fc_weight"), weight)
    >>> np.allclose(weight @ weight.T, 4 * np.eye(3))
    True
    """

    _samplers: ClassVar[dict[str, draws.Sampler]] = {
        "uniform": draws.uniform,
        "normal": draws.normal,
    }

    def __init__(
        self, scale: float = 1.414, rand_type: str = "uniform", *, rng: draws.Seed = None
    ) -> None:
        self.scale = number("scale", scale, least=0)
        self.rand_type = choice("rand_type", rand_type, *self._samplers)
        super().__init__(rng=rng, scale=self.scale, rand_type=rand_type)

    def _init_weight(self, desc: InitDesc, arr: Array) -> None:
        if arr.ndim < 2:
            raise ValueError(f"{desc}: Orthogonal needs two dimensions, got shape {arr.shape}")
        matrix = np.empty((len(arr), arr[:1].size), drawable(desc, arr))
        draws.fill(matrix, self.rng, self._samplers[self.rand_type], matrix.dtype)
        left, _, right = np.linalg.svd(matrix, full_matrices=False)
        factor = left if left.shape == matrix.shape else right
        arr[...] = self.scale * factor.reshape(arr.shape)
