"""Initializers that draw random numbers, at a fixed scale or at one that suits the layer."""

import math
from functools import partial
from typing import ClassVar

import numpy as np

from fastopt.arguments import choice, flag, number
from fastopt.initializer import draws
from fastopt.initializer.base import Array, InitDesc, Initializer, alias, drawable, register
from fastopt.initializer.draws import Sampler, Seed


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

    def __init__(self, scale: float = 0.07, *, rng: Seed = None) -> None:
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

    def __init__(self, sigma: float = 0.01, *, rng: Seed = None) -> None:
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

    def __init__(self, sigma: float = 0.01, bound: float = 2, *, rng: Seed = None) -> None:
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

    _samplers: ClassVar[dict[str, Sampler]] = {"uniform": draws.uniform, "normal": draws.normal}

    def __init__(
        self, scale: float = 1.414, rand_type: str = "uniform", *, rng: Seed = None
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


@register
class Xavier(Initializer):
    r"""Draw weights at a scale that preserves the scale of activations and gradients.

    .. math:: s = \sqrt{\mathrm{magnitude} / n}, \quad
        n_\mathrm{in} = \mathrm{shape}_1 k, \quad n_\mathrm{out} = \mathrm{shape}_0 k, \quad
        k = \prod_{i \ge 2} \mathrm{shape}_i

    The weights are drawn uniformly from :math:`[-s, s)`, or from a normal distribution with
    standard deviation :math:`s`. Glorot and Bengio, "Understanding the difficulty of training deep
    feedforward neural networks" (2010); their formula is the default.

    Parameters
    ----------
    rnd_type : {'uniform', 'gaussian', 'truncated'}
        Distribution. 'truncated' is a normal distribution truncated at twice its standard
        deviation and scaled so that the standard deviation after truncation is :math:`s`.
    factor_type : {'avg', 'in', 'out'}
        Value of :math:`n`: mean of the numbers of inputs and outputs, or one of them.
    magnitude : float, 0 or more, default 3
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
    >>> weight = np.empty((200, 100))
    >>> initializer.Xavier(rng=0)(initializer.InitDesc("fc_weight"), weight)
    >>> bool(0.14 < abs(weight).max() <= (6 / 300) ** 0.5)
    True
    """

    _samplers: ClassVar[dict[str, Sampler]] = {
        "uniform": draws.uniform,
        "gaussian": draws.normal,
        "truncated": draws.standard_truncated,
    }

    def __init__(
        self,
        rnd_type: str = "uniform",
        factor_type: str = "avg",
        magnitude: float = 3,
        *,
        rng: Seed = None,
    ) -> None:
        self.rnd_type = choice("rnd_type", rnd_type, *self._samplers)
        self.factor_type = choice("factor_type", factor_type, "avg", "in", "out")
        self.magnitude = number("magnitude", magnitude, least=0)
        super().__init__(
            rng=rng, rnd_type=rnd_type, factor_type=factor_type, magnitude=self.magnitude
        )

    def _init_weight(self, desc: InitDesc, arr: Array) -> None:
        if arr.ndim < 2:
            raise ValueError(
                f"{desc}: {type(self).__name__} needs two dimensions, got shape {arr.shape}"
            )
        kernel = math.prod(arr.shape[2:])
        fan_in, fan_out = arr.shape[1] * kernel, arr.shape[0] * kernel
        fans = {"avg": (fan_in + fan_out) / 2, "in": fan_in, "out": fan_out}
        fan = max(fans[self.factor_type], 1)  # below 1 only for empty arrays
        scale = math.sqrt(self.magnitude / fan)
        self._draw(desc, arr, self._samplers[self.rnd_type], scale)


@register
class MSRAPrelu(Xavier):
    r"""Draw normal weights at a scale suited to layers followed by (P)ReLU activations.

    .. math:: w \sim N(0, \sigma^2), \quad \sigma^2 = \frac{2}{(1 + \mathrm{slope}^2) n}

    with :math:`n` as in :class:`Xavier` (arXiv:1502.01852).

    Parameters
    ----------
    factor_type : {'avg', 'in', 'out'}
        Value of :math:`n`, see :class:`Xavier`. The paper uses 'in'.
    slope : float, default 0.25
        Initial slope of the activation for negative inputs.
    rng
        See :class:`Xavier`, also for errors.

    Examples
    --------
    >>> import numpy as np
    >>> from fastopt import initializer
    >>> weight = np.empty((200, 200))
    >>> initializer.MSRAPrelu(slope=0, rng=0)(initializer.InitDesc("fc_weight"), weight)
    >>> bool(0.099 < weight.std() < 0.101)
    True
    """

    def __init__(self, factor_type: str = "avg", slope: float = 0.25, *, rng: Seed = None) -> None:
        self.slope = number("slope", slope)
        super().__init__("gaussian", factor_type, 2 / (1 + self.slope**2), rng=rng)
        self._kwargs = {"factor_type": factor_type, "slope": self.slope}


class _Fan(Xavier):
    gain: ClassVar[float]
    """Variance of a weight times n."""
    fan: ClassVar[str]


class _FanUniform(_Fan):
    def __init__(self, *, rng: Seed = None) -> None:
        super().__init__("uniform", self.fan, 3 * self.gain, rng=rng)
        self._kwargs = {}


class _FanNormal(_Fan):
    def __init__(self, truncated: bool = True, *, rng: Seed = None) -> None:
        rnd_type = "truncated" if flag("truncated", truncated) else "gaussian"
        super().__init__(rnd_type, self.fan, self.gain, rng=rng)
        self._kwargs = {"truncated": bool(truncated)}


@register
@alias("lecun_uniform")
class LecunUniform(_FanUniform):
    r"""Draw weights uniformly from :math:`[-s, s)`, :math:`s = \sqrt{3 / n_\mathrm{in}}`.

    LeCun et al., "Efficient BackProp" (1998).

    Parameters
    ----------
    rng
        See :class:`Xavier`, also for errors and :math:`n_\mathrm{in}`.

    Examples
    --------
    >>> import numpy as np
    >>> from fastopt import initializer
    >>> weight = np.empty((200, 100))
    >>> initializer.LecunUniform(rng=0)(initializer.InitDesc("fc_weight"), weight)
    >>> bool(0.0980 < weight.std() < 0.1020)
    True
    """

    gain, fan = 1, "in"


@register
@alias("lecun_normal")
class LecunNormal(_FanNormal):
    r"""Draw normal weights with standard deviation :math:`\sqrt{1 / n_\mathrm{in}}`.

    LeCun et al., "Efficient BackProp" (1998).

    Parameters
    ----------
    truncated : bool, default True
        Truncate the distribution, see `rnd_type` of :class:`Xavier`.
    rng
        See :class:`Xavier`, also for errors and :math:`n_\mathrm{in}`.

    Examples
    --------
    >>> import numpy as np
    >>> from fastopt import initializer
    >>> weight = np.empty((200, 100))
    >>> initializer.LecunNormal(rng=0)(initializer.InitDesc("fc_weight"), weight)
    >>> bool(0.0980 < weight.std() < 0.1020)
    True
    """

    gain, fan = 1, "in"


@register
@alias("he_uniform")
class HeUniform(_FanUniform):
    r"""Draw weights uniformly from :math:`[-s, s)`, :math:`s = \sqrt{6 / n_\mathrm{in}}`.

    He et al., "Delving Deep into Rectifiers" (arXiv:1502.01852).

    Parameters
    ----------
    rng
        See :class:`Xavier`, also for errors and :math:`n_\mathrm{in}`.

    Examples
    --------
    >>> import numpy as np
    >>> from fastopt import initializer
    >>> weight = np.empty((200, 100))
    >>> initializer.HeUniform(rng=0)(initializer.InitDesc("fc_weight"), weight)
    >>> bool(0.1386 < weight.std() < 0.1442)
    True
    """

    gain, fan = 2, "in"


@register
@alias("he_normal")
class HeNormal(_FanNormal):
    r"""Draw normal weights with standard deviation :math:`\sqrt{2 / n_\mathrm{in}}`.

    He et al., "Delving Deep into Rectifiers" (arXiv:1502.01852).

    Parameters
    ----------
    truncated : bool, default True
        Truncate the distribution, see `rnd_type` of :class:`Xavier`.
    rng
        See :class:`Xavier`, also for errors and :math:`n_\mathrm{in}`.

    Examples
    --------
    >>> import numpy as np
    >>> from fastopt import initializer
    >>> weight = np.empty((200, 100))
    >>> initializer.HeNormal(rng=0)(initializer.InitDesc("fc_weight"), weight)
    >>> bool(0.1386 < weight.std() < 0.1442)
    True
    """

    gain, fan = 2, "in"


@register
@alias("glorot_uniform")
class GlorotUniform(_FanUniform):
    r"""Draw weights uniformly, :math:`|w| < \sqrt{6 / (n_\mathrm{in} + n_\mathrm{out})}`.

    Glorot and Bengio, "Understanding the difficulty of training deep feedforward neural networks"
    (2010).

    Parameters
    ----------
    rng
        See :class:`Xavier`, also for errors and :math:`n_\mathrm{in}`.

    Examples
    --------
    >>> import numpy as np
    >>> from fastopt import initializer
    >>> weight = np.empty((200, 100))
    >>> initializer.GlorotUniform(rng=0)(initializer.InitDesc("fc_weight"), weight)
    >>> bool(0.0800 < weight.std() < 0.0833)
    True
    """

    gain, fan = 1, "avg"


@register
@alias("glorot_normal")
class GlorotNormal(_FanNormal):
    r"""Draw normal weights, :math:`\sigma = \sqrt{2 / (n_\mathrm{in} + n_\mathrm{out})}`.

    Glorot and Bengio, "Understanding the difficulty of training deep feedforward neural networks"
    (2010).

    Parameters
    ----------
    truncated : bool, default True
        Truncate the distribution, see `rnd_type` of :class:`Xavier`.
    rng
        See :class:`Xavier`, also for errors and :math:`n_\mathrm{in}`.

    Examples
    --------
    >>> import numpy as np
    >>> from fastopt import initializer
    >>> weight = np.empty((200, 100))
    >>> initializer.GlorotNormal(rng=0)(initializer.InitDesc("fc_weight"), weight)
    >>> bool(0.0800 < weight.std() < 0.0833)
    True
    """

    gain, fan = 1, "avg"
