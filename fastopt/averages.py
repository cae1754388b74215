"""Averages of the weights over the training steps: EMA, SWA and Lookahead."""

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, ClassVar

from fastopt._advice import Advice
from fastopt._kernels.averaging import averaged, averaged_alone, synced, synced_alone
from fastopt.arguments import Checked, brief, count, flag, number

__all__ = ["EMA", "SWA", "Lookahead"]


@dataclass(frozen=True)
class EMA(Checked):
    r"""Exponential moving average of the weights, computed in the same pass as the update.

    With :math:`w_t` the weight after update :math:`t` and :math:`a_0 = w_0`,

    .. math:: a_t = a_{t-1} + (1 - d_t) (w_t - a_{t-1})

    where :math:`d_t = d`, the `decay`. With `warmup`, :math:`d_t = \min(d, (1 + t) / (10 + t))`.
    With `bias_correction`, :math:`1 - d_t = (1 - d) / (1 - d^t)`: the mean of
    :math:`w_1, \ldots, w_t` with weights :math:`d^{t-1}, \ldots, d, 1`, without :math:`w_0`.

    Parameters
    ----------
    decay : float
        :math:`d`, at least 0 and below 1. Default 0.999.
    bias_correction : bool
        Leave the initial weights out of the average. Default False.
    warmup : bool
        Start with a smaller decay. Default False.

    Raises
    ------
    TypeError, ValueError
        An argument has the wrong type or is out of range, or `bias_correction` and `warmup` are
        both True.

    References
    ----------
    Polyak and Juditsky, 1992, "Acceleration of stochastic approximation by averaging", SIAM
    Journal on Control and Optimization 30(4). The warm-up follows
    ``tf.train.ExponentialMovingAverage(num_updates=...)``.

    Examples
    --------
    >>> import numpy as np
    >>> import fastopt
    >>> sgd = fastopt.SGD(lr=1.0)
    >>> updater = fastopt.Updater(sgd, average=fastopt.EMA(decay=0.5))
    >>> weight = np.zeros(1)
    >>> for _ in range(2):
    ...     updater.step({"w": np.array([-1.0])}, {"w": weight})
    >>> weight, updater.averages["w"]
    (array([2.]), array([1.25]))
    """

    decay: float = 0.999
    bias_correction: bool = False
    warmup: bool = False

    argument_names: ClassVar[Mapping[str, tuple[str, ...]]] = Advice("EMA_NAMES")

    def __post_init__(self) -> None:
        _set(self, "decay", number("decay", self.decay, least=0, below=1))
        _set(self, "bias_correction", flag("bias_correction", self.bias_correction))
        _set(self, "warmup", flag("warmup", self.warmup))
        if self.bias_correction and self.warmup:
            raise ValueError("bias_correction and warmup cannot both be True")

    alternates = False
    """Whether some steps do not change the average."""
    derive = staticmethod(averaged)
    alone = averaged_alone

    @property
    def constant(self) -> bool:
        """Whether the averaging rate is the same in all steps."""
        return not (self.bias_correction or self.warmup)

    def rate(self, t: int) -> float:
        """Return the averaging rate c of an update, ``a += c * (w - a)``.

        Parameters
        ----------
        t : int
            Number of updates of the parameter, including this one.
        """
        if self.bias_correction:
            return (1 - self.decay) / (1 - self.decay ** max(t, 1))
        if self.warmup:
            return 1 - min(self.decay, (1 + t) / (10 + t))
        return 1 - self.decay


@dataclass(frozen=True)
class SWA(Checked):
    r"""Stochastic weight averaging: the mean of the weights after every c-th update.

    With :math:`w_t` the weight after update :math:`t`, :math:`s` = `start` and
    :math:`c` = `every`, the average of the first :math:`n + 1` sampled weights is

    .. math:: a = \frac{1}{n + 1} \sum_{i=0}^{n} w_{s + i c}

    Before the first sample it is the initial weight. It is computed as a running mean,
    :math:`a \leftarrow a + (w - a) / (n + 1)`.

    Parameters
    ----------
    start : int
        First update whose weights are averaged, counted from 1. Default 1.
    every : int
        Number of updates between samples; 1 averages the weights of all updates. Default 1.

    Raises
    ------
    TypeError, ValueError
        An argument is not an integer of at least 1.

    References
    ----------
    Izmailov, Podoprikhin, Garipov, Vetrov and Wilson, 2018, "Averaging weights leads to wider
    optima and better generalization", arXiv:1803.05407.

    Examples
    --------
    >>> import numpy as np
    >>> import fastopt
    >>> sgd = fastopt.SGD(lr=1.0)
    >>> updater = fastopt.Updater(sgd, average=fastopt.SWA(start=2, every=2))
    >>> weight = np.zeros(1)
    >>> for _ in range(4):
    ...     updater.step({"w": np.array([-1.0])}, {"w": weight})
    >>> weight, updater.averages["w"]
    (array([4.]), array([3.]))
    """

    start: int = 1
    every: int = 1

    argument_names: ClassVar[Mapping[str, tuple[str, ...]]] = Advice("SWA_NAMES")

    def __post_init__(self) -> None:
        _set(self, "start", count("start", self.start))
        _set(self, "every", count("every", self.every))

    alternates = True
    constant = False
    derive = staticmethod(averaged)
    alone = averaged_alone

    def rate(self, t: int) -> float:
        """Return the averaging rate c of an update, ``a += c * (w - a)``.

        Parameters
        ----------
        t : int
            Number of updates of the parameter, including this one.
        """
        passed = t - self.start
        if passed < 0 or passed % self.every:
            return 0.0
        return 1 / (passed // self.every + 1)


@dataclass(frozen=True)
class Lookahead(Checked):
    r"""Lookahead: slow weights that follow the fast weights and periodically reset them.

    Every `k` updates, with :math:`w` the fast weight, which the optimizer updates, and :math:`a`
    the slow weight, which starts as a copy of it,

    .. math::
        a &\leftarrow a + \alpha (w - a) \\
        w &\leftarrow a

    Parameters
    ----------
    k : int
        Number of updates between synchronizations, at least 1. Default 5.
    alpha : float
        :math:`\alpha`, above 0 and at most 1. Default 0.5.

    Raises
    ------
    TypeError, ValueError
        An argument has the wrong type or is out of range.

    References
    ----------
    Zhang, Lucas, Hinton and Ba, 2019, "Lookahead optimizer: k steps forward, 1 step back",
    arXiv:1907.08610.

    Examples
    --------
    >>> import numpy as np
    >>> import fastopt
    >>> sgd = fastopt.SGD(lr=1.0)
    >>> updater = fastopt.Updater(sgd, average=fastopt.Lookahead(k=2, alpha=0.5))
    >>> weight = np.zeros(1)
    >>> for _ in range(3):
    ...     updater.step({"w": np.array([-1.0])}, {"w": weight})
    >>> weight, updater.averages["w"]
    (array([2.]), array([1.]))
    """

    k: int = 5
    alpha: float = 0.5

    argument_names: ClassVar[Mapping[str, tuple[str, ...]]] = Advice("LOOKAHEAD_NAMES")

    def __post_init__(self) -> None:
        _set(self, "k", count("k", self.k))
        _set(self, "alpha", number("alpha", self.alpha, least=0, most=1))
        if self.alpha == 0:
            raise ValueError("alpha must be above 0, got 0")

    alternates = True
    constant = False
    derive = staticmethod(synced)
    alone = synced_alone

    def rate(self, t: int) -> float:
        """Return the averaging rate c of an update, ``a += c * (w - a)``.

        Parameters
        ----------
        t : int
            Number of updates of the parameter, including this one.
        """
        return 0.0 if t % self.k else self.alpha


Average = EMA | SWA | Lookahead
"""Any of the averaging methods."""

_KINDS: dict[str, Callable[..., Average]] = {"EMA": EMA, "SWA": SWA, "Lookahead": Lookahead}


def _set(average: "Average", name: str, value: float) -> None:
    object.__setattr__(average, name, value)


def check_average(name: str, value: object) -> Average | None:
    """Return `value` if it is an average or None, else raise TypeError."""
    if value is None or isinstance(value, Average):
        return value
    one = "one " if isinstance(value, (list, tuple, dict)) else ""
    cure = "".join(f": call it, {name}()" for name, kind in _KINDS.items() if value is kind)
    got = brief(value) + cure
    raise TypeError(f"{name} must be {one or 'an '}EMA, SWA or Lookahead, got {got}")


def described(average: Average) -> dict[str, Any]:
    """Return the kind and arguments of an average, for a checkpoint."""
    return {"kind": type(average).__name__, **asdict(average)}


def rebuilt(description: Mapping[str, Any]) -> Average:
    """Return the average for the result of :func:`described`."""
    arguments = dict(description)
    return _KINDS[arguments.pop("kind")](**arguments)
