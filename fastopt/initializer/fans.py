"""Initializers whose scale depends on the number of inputs and outputs of a layer."""

import math
from collections.abc import Callable
from typing import ClassVar, TypeVar

from fastopt.arguments import choice, flag, number
from fastopt.initializer import draws
from fastopt.initializer.arrays import Array
from fastopt.initializer.base import InitDesc, Initializer, alias, register
from fastopt.initializer.draws import Seed


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

    _samplers: ClassVar[dict[str, draws.Sampler]] = {
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
        rng: draws.Seed = None,
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

    def __init__(
        self, factor_type: str = "avg", slope: float = 0.25, *, rng: draws.Seed = None
    ) -> None:
        self.slope = number("slope", slope)
        super().__init__("gaussian", factor_type, 2 / (1 + self.slope**2), rng=rng)
        self._kwargs = {"factor_type": factor_type, "slope": self.slope}


GAINS = {
    "lecun": (1, "in", 'LeCun et al., "Efficient BackProp" (1998)'),
    "he": (2, "in", 'He et al., "Delving Deep into Rectifiers" (arXiv:1502.01852)'),
    "glorot": (1, "avg", """Glorot and Bengio, "Understanding the difficulty of training deep
    feedforward neural networks" (2010)"""),
}  # fmt: skip
"""Variance of a weight times n, the n of :class:`Xavier`, and the source."""

DOCUMENTATION = r"""{first}

    {source}.

    Parameters
    ----------{truncated}
    rng
        See :class:`Xavier`, also for errors and :math:`n_\mathrm{{in}}`.

    Examples
    --------
    >>> import numpy as np
    >>> from fastopt import initializer
    >>> weight = np.empty((200, 100))
    >>> initializer.{name}(rng=0)(initializer.InitDesc("fc_weight"), weight)
    >>> bool({least} < weight.std() < {most})
    True
    """


class _Fan(Xavier):
    """Weights with variance `gain` / n."""

    gain: ClassVar[float]
    fan: ClassVar[str]
    truncation = ""
    """Documentation of the argument `truncated`."""


Class = TypeVar("Class", bound=type[_Fan])


def _of(author: str) -> Callable[[Class], Class]:
    """Return a decorator that sets gain, n and documentation, and registers the class."""

    def enter(klass: Class) -> Class:
        klass.gain, klass.fan, source = GAINS[author]
        deviation = (klass.gain / {"in": 100, "avg": 150}[klass.fan]) ** 0.5
        klass.__doc__ = DOCUMENTATION.format(
            first=klass.__doc__,
            source=source,
            truncated=klass.truncation,
            name=klass.__name__,
            least=f"{0.98 * deviation:.4f}",
            most=f"{1.02 * deviation:.4f}",
        )
        kind = klass.__name__.lower().removeprefix(author)
        return alias(f"{author}_{kind}")(register(klass))

    return enter


class _FanUniform(_Fan):
    def __init__(self, *, rng: Seed = None) -> None:
        super().__init__("uniform", self.fan, 3 * self.gain, rng=rng)
        self._kwargs = {}


class _FanNormal(_Fan):
    truncation = """
    truncated : bool, default True
        Truncate the distribution, see `rnd_type` of :class:`Xavier`."""

    def __init__(self, truncated: bool = True, *, rng: Seed = None) -> None:
        rnd_type = "truncated" if flag("truncated", truncated) else "gaussian"
        super().__init__(rnd_type, self.fan, self.gain, rng=rng)
        self._kwargs = {"truncated": bool(truncated)}


@_of("lecun")
class LecunUniform(_FanUniform):
    r"""Draw weights uniformly from :math:`[-s, s)`, :math:`s = \sqrt{3 / n_\mathrm{in}}`."""


@_of("lecun")
class LecunNormal(_FanNormal):
    r"""Draw normal weights with standard deviation :math:`\sqrt{1 / n_\mathrm{in}}`."""


@_of("he")
class HeUniform(_FanUniform):
    r"""Draw weights uniformly from :math:`[-s, s)`, :math:`s = \sqrt{6 / n_\mathrm{in}}`."""


@_of("he")
class HeNormal(_FanNormal):
    r"""Draw normal weights with standard deviation :math:`\sqrt{2 / n_\mathrm{in}}`."""


@_of("glorot")
class GlorotUniform(_FanUniform):
    r"""Draw weights uniformly, :math:`|w| < \sqrt{6 / (n_\mathrm{in} + n_\mathrm{out})}`."""


@_of("glorot")
class GlorotNormal(_FanNormal):
    r"""Draw normal weights, :math:`\sigma = \sqrt{2 / (n_\mathrm{in} + n_\mathrm{out})}`."""
