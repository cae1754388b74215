"""LeCun, He and Glorot initializers under their usual names."""

from collections.abc import Callable
from typing import ClassVar, TypeVar

from fastopt.arguments import flag
from fastopt.initializer.draws import Seed
from fastopt.initializer.fans import Xavier
from fastopt.initializer.registry import alias, register

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

TRUNCATED = """
    truncated : bool, default True
        Truncate the distribution, see `rnd_type` of :class:`Xavier`."""


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
    truncation = TRUNCATED

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
