"""LeCun, He and Glorot initializers under their usual names."""

from typing import ClassVar

from fastopt.arguments import flag
from fastopt.initializer.draws import Seed
from fastopt.initializer.fans import Xavier
from fastopt.initializer.registry import alias, register

__all__ = [
    "GlorotNormal",
    "GlorotUniform",
    "HeNormal",
    "HeUniform",
    "LecunNormal",
    "LecunUniform",
]


class _Fan(Xavier):
    """Weights with variance `gain` / n."""

    gain: ClassVar[float]
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
    >>> bool(0.16 < abs(weight).max() <= (3 / 100) ** 0.5)
    True
    """

    gain, fan = 1, "in"


@register
@alias("lecun_normal")
class LecunNormal(_FanNormal):
    r"""Draw normal weights with standard deviation :math:`\sqrt{1 / n_\mathrm{in}}`.

    LeCun et al., "Efficient BackProp" (1998); for self-normalizing networks arXiv:1706.02515.

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
    >>> bool(0.098 < weight.std() < 0.102)
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
    >>> bool(0.24 < abs(weight).max() <= (6 / 100) ** 0.5)
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
    >>> bool(0.139 < weight.std() < 0.144)
    True
    """

    gain, fan = 2, "in"


@register
@alias("glorot_uniform")
class GlorotUniform(_FanUniform):
    r"""Draw weights uniformly, :math:`s = \sqrt{6 / (n_\mathrm{in} + n_\mathrm{out})}`.

    The range is :math:`[-s, s)`. Glorot and Bengio, "Understanding the difficulty of training deep
    feedforward neural networks" (2010).

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
    >>> bool(0.14 < abs(weight).max() <= (6 / 300) ** 0.5)
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
    >>> bool(0.08 < weight.std() < 0.083)
    True
    """

    gain, fan = 1, "avg"
