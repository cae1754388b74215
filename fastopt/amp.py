"""Mixed precision: loss scaling, which keeps small gradients from underflowing to zero."""

from collections.abc import Callable, Mapping
from typing import Any, ClassVar, NamedTuple

import numpy as np

from fastopt._advice import Advice, no_attribute
from fastopt._notices import warn_user
from fastopt.arguments import (
    FLAG,
    Checked,
    Descriptions,
    Integer,
    Real,
    brief,
    count,
    flag,
    number,
)

__all__ = ["LossScaler", "SlowCalls", "StepInfo"]


def __getattr__(name: str) -> Any:
    raise no_attribute(f"module {__name__!r}", name, __all__, Advice("PACKAGE"))


_LEAST, _MOST = 2.0**-126, 2.0**126  # the scale and its inverse are normal float32 numbers
_STUCK = 100  # overflows in a row at the least scale, of which it warns


class SlowCalls(NamedTuple):
    """Calls that were not served by compiled code, although their parameters were known.

    They cost some 20 us more. :doc:`What a call costs </call-costs>` lists the reasons, among them
    gradients in another byte order and objects that only look like arrays.

    Parameters
    ----------
    calls : int
        How many there were.
    first : tuple of (index, str)
        Index and reason of the first ten.

    Examples
    --------
    >>> import numpy as np
    >>> import fastopt
    >>> updater, weight = fastopt.Updater(fastopt.SGD()), np.ones(2)
    >>> for _ in range(3):
    ...     updater.step({"w": weight.astype(">f8")}, {"w": weight})
    >>> updater.info.slow.calls, updater.info.slow.first[0]
    (2, ('w', 'its gradient has dtype >f8'))
    """

    calls: int = 0
    first: tuple[tuple[Any, str], ...] = ()


class StepInfo(NamedTuple):
    """Outcome of the last call of an updater.

    Parameters
    ----------
    stepped : bool
        Whether a weight was updated. False also for a call without gradients, with those of frozen
        groups alone, or that only adds to sums of gradients.
    skipped : bool
        Whether the update was skipped because a gradient, or the norm of all gradients, was not
        finite; with a loss scaler or `clip_global_norm`.
    global_norm : float or None
        Euclidean norm of all gradients of the call, concatenated; None if it was not computed.
    non_finite : tuple of str
        Names of the parameters with non-finite gradients, if the update was skipped.
    d : float or None
        Distance estimate that :class:`~fastopt.optimizer.Prodigy` used in this update.
    slow : SlowCalls
        Calls of the updater so far that took the slow path through Python, see
        :doc:`what a call costs </call-costs>`.

    Examples
    --------
    >>> from fastopt.amp import StepInfo
    >>> StepInfo(stepped=False, skipped=True, non_finite=("fc_weight",)).non_finite
    ('fc_weight',)
    """

    stepped: bool
    skipped: bool
    global_norm: float | None = None
    non_finite: tuple[str, ...] = ()
    d: float | None = None
    slow: SlowCalls = SlowCalls()


class LossScaler(Checked):
    r"""Loss scale that adapts to the range of float16.

    Gradients below 3e-8 underflow to zero in float16. Multiplying the loss by a large scale
    multiplies its gradients by the same factor; an updater with this scaler divides them by it
    again. After `growth_interval` consecutive steps without overflow

    .. math:: \mathrm{scale} \leftarrow \min(\mathrm{growth\_factor} \cdot \mathrm{scale},
        \mathrm{max\_scale})

    and after each overflow

    .. math:: \mathrm{scale} \leftarrow \max(\mathrm{backoff\_factor} \cdot \mathrm{scale},
        \mathrm{min\_scale})

    Parameters
    ----------
    init_scale : float, default 65536
        Initial scale. A power of 2 is exact: scaling does not round the gradients.
    growth_factor : float, at least 1, default 2
    backoff_factor : float, from 0 to below 1, default 0.5
    growth_interval : int, at least 1, default 2000
    dynamic : bool, default True
        If False, the scale is static: overflow does not change it.
    min_scale : float, from 2**-126, default 1
    max_scale : float, to 2**126, default 2**24
        Bounds of the scale.

    Raises
    ------
    TypeError, ValueError
        An argument has the wrong type or is out of range, or `init_scale` is not between
        `min_scale` and `max_scale`.

    References
    ----------
    Micikevicius et al., 2018, "Mixed precision training", https://arxiv.org/abs/1710.03740.
    The argument names follow ``torch.amp.GradScaler``.

    Examples
    --------
    >>> from fastopt.amp import LossScaler
    >>> scaler = LossScaler(init_scale=1024, growth_interval=2)
    >>> scaler.scale_loss(0.25)
    256.0
    >>> for overflow in (True, False, False):
    ...     scaler.update(overflow)
    ...     print(scaler.scale)
    512.0
    512.0
    1024.0

    A static scale:

    >>> scaler = LossScaler(128, dynamic=False)
    >>> scaler.update(overflow=True)
    >>> scaler.scale
    128.0
    """

    arguments: ClassVar[Descriptions] = {
        "growth_factor": Real(least=1),
        "backoff_factor": Real(least=0, below=1),
        "growth_interval": Integer(most=None),
        "dynamic": FLAG,
        **dict.fromkeys(("min_scale", "max_scale"), Real(least=_LEAST, most=_MOST)),
    }
    attribute_advice: ClassVar[Mapping[str, str]] = Advice("SCALER_ATTRIBUTES")
    _stuck = 0  # overflows in a row at the least scale; of the class, for earlier pickles

    def __init__(
        self,
        init_scale: float = 65536.0,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        dynamic: bool = True,
        min_scale: float = 1.0,
        max_scale: float = 2.0**24,
    ) -> None:
        self.growth_factor, self.backoff_factor = growth_factor, backoff_factor
        self.growth_interval, self.dynamic = growth_interval, dynamic
        self.min_scale, self.max_scale = min_scale, max_scale
        number("max_scale", max_scale, least=self.min_scale)
        self._scale = self._within("init_scale", init_scale)
        self._good_steps = 0
        self._awaited: Callable[[], None] | None = None

    def check_together(self) -> None:
        """Raise ValueError unless the scale is within its bounds."""
        if not self.min_scale <= self.scale <= self.max_scale:
            raise ValueError(
                f"scale must be from min_scale={self.min_scale} to max_scale={self.max_scale}, got "
                f"{self.scale}: assign scale first"
            )

    @property
    def scale(self) -> float:
        """Factor of the loss; may be set to a number between `min_scale` and `max_scale`."""
        self._settle()
        return self._scale

    @scale.setter
    def scale(self, value: float) -> None:
        self._settle()
        self._scale = self._within("scale", value)

    def _settle(self) -> None:
        """Wait for the outcomes of steps on a device, which adapt the scale."""
        if self._awaited is not None:
            awaited, self._awaited = self._awaited, None
            awaited()

    def __getstate__(self) -> dict[str, Any]:
        self._settle()
        return vars(self)

    @property
    def good_steps(self) -> int:
        """Consecutive steps without overflow; reset to 0 when the scale grows."""
        self._settle()
        return self._good_steps

    def scale_loss(self, loss: Any) -> Any:
        """Return `loss` times the scale.

        Parameters
        ----------
        loss : float or array
            NumPy float16 and bfloat16 are converted to float32, since the product may overflow
            float16.

        Raises
        ------
        TypeError
            `loss` cannot be multiplied by a number.

        Examples
        --------
        >>> import numpy as np
        >>> from fastopt.amp import LossScaler
        >>> LossScaler().scale_loss(np.float16(2))
        np.float32(131072.0)
        """
        if isinstance(loss, (np.ndarray, np.generic)) and loss.dtype.itemsize == 2:
            loss = loss.astype(np.float32)
        try:
            return loss * self.scale
        except TypeError as error:
            raise TypeError(f"loss must be a number or an array, got {brief(loss)}") from error

    def update(self, overflow: bool) -> None:
        """Adapt the scale after a step; an updater with this scaler calls it automatically.

        It warns of 100 overflows in a row at `min_scale`, which no smaller scale can end.

        Parameters
        ----------
        overflow : bool
            Whether a gradient was infinite or NaN, so that the step was skipped.

        Raises
        ------
        TypeError
            `overflow` is not a bool.
        """
        if type(overflow) is not bool:
            overflow = flag("overflow", overflow)
        self._settle()
        if not self.dynamic:
            return
        self._good_steps = 0 if overflow else self._good_steps + 1
        self._stuck = self._stuck + 1 if overflow and self._scale == self.min_scale else 0
        if overflow:
            self._scale = max(self._scale * self.backoff_factor, self.min_scale)
        elif self._good_steps >= self.growth_interval:
            self._scale = min(self._scale * self.growth_factor, self.max_scale)
            self._good_steps = 0
        if self._stuck == _STUCK:
            warn_user(
                f"{_STUCK} steps in a row overflowed at the least loss scale, {self.min_scale:g}, "
                "and were skipped: the loss or the model is not finite; updater.info.non_finite "
                "names the parameters"
            )

    def state_dict(self) -> dict[str, float]:
        """Return the scale, the settings and the count of good steps, for a checkpoint.

        Examples
        --------
        >>> from fastopt.amp import LossScaler
        >>> trained = LossScaler()
        >>> trained.update(overflow=True)
        >>> resumed = LossScaler()
        >>> resumed.load_state_dict(trained.state_dict())
        >>> resumed.scale
        32768.0
        """
        settings = {name: value for name, value in vars(self).items() if name[0] != "_"}
        return {"scale": self.scale, "good_steps": self._good_steps, **settings}

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        """Restore the state returned by :meth:`state_dict`; on an error nothing changes.

        Parameters
        ----------
        state : mapping

        Raises
        ------
        TypeError
            `state` is not a mapping, or a value has the wrong type.
        ValueError
            A name is missing or unknown, or a value is out of range.
        """
        if not isinstance(state, Mapping):
            raise TypeError(f"state must be a mapping, got {state!r}")
        names = self.state_dict().keys()
        if state.keys() != names:
            raise ValueError(
                f"state must have the names {sorted(names)}, got {sorted(map(str, state))}"
            )
        settings: dict[str, Any] = dict(state)
        scale, good_steps = settings.pop("scale"), settings.pop("good_steps")
        loaded = LossScaler(settings["min_scale"], **settings)
        loaded.scale = scale
        loaded._good_steps = count("good_steps", good_steps, least=0)
        self._settle()
        vars(self).update(vars(loaded))

    def __repr__(self) -> str:
        parts = ", ".join(f"{name}={value!r}" for name, value in self.state_dict().items())
        return f"{type(self).__name__}({parts})"

    def _within(self, name: str, value: float) -> float:
        return number(name, value, least=self.min_scale, most=self.max_scale)
