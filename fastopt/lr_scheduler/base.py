"""The base class and the registry of the schedules."""

import inspect
import numbers
import warnings
from collections.abc import Callable, Mapping
from copy import copy
from itertools import zip_longest
from typing import Any, ClassVar, TypeVar

import numpy as np

from fastopt._advice import Advice
from fastopt._notices import warn_user
from fastopt.arguments import Checked, Choice, Descriptions, Integer, Real

Schedule = Callable[[int], float]
"""A function from the number of updates so far to a learning rate."""

Class = TypeVar("Class", bound="type[LRScheduler]")

scheduler_registry: dict[str, type["LRScheduler"]] = {}


def register(klass: Class) -> Class:
    """Register a class in ``scheduler_registry`` under its name; usable as a decorator.

    Parameters
    ----------
    klass : type
        Subclass of :class:`LRScheduler`. It replaces a class of the same name, with a warning.

    Raises
    ------
    TypeError
        `klass` is not a subclass of :class:`LRScheduler`.

    Examples
    --------
    >>> from fastopt.lr_scheduler import LRScheduler, register, scheduler_registry
    >>> @register
    ... class InverseTimeScheduler(LRScheduler):
    ...     def _rate(self, num_update):
    ...         return self.base_lr / (1 + num_update)
    >>> scheduler_registry["InverseTimeScheduler"](base_lr=0.2)(4)
    0.04
    """
    if not (isinstance(klass, type) and issubclass(klass, LRScheduler)):
        raise TypeError(f"only subclasses of LRScheduler can be registered, got {klass!r}")
    old = scheduler_registry.get(klass.__name__)
    if old is not None:
        warnings.warn(f"{klass!r} replaces {old!r} in scheduler_registry", stacklevel=2)
    scheduler_registry[klass.__name__] = klass
    return klass


class LRScheduler(Checked):
    r"""Base class of all schedules: a warm-up, followed by the rate that a subclass defines.

    A subclass implements ``_rate(num_update)``, which is called from update `warmup_steps` on.
    Before that, the learning rate of a linear warm-up is

    .. math:: \mathrm{warmup\_begin\_lr} + (\mathrm{base\_lr} - \mathrm{warmup\_begin\_lr})
        \frac{n}{\mathrm{warmup\_steps}}

    An optimizer with a different `learning_rate` uses a shallow copy of the schedule with
    ``base_lr`` set to that rate. Schedules with a `factor` multiply this value; other schedules,
    and the warm-up, keep the `base_lr` passed to the constructor.

    Parameters
    ----------
    base_lr : float, default 0.01
        Learning rate at the end of warm-up, at least 0.
    warmup_steps : int, default 0
        Number of warm-up updates.
    warmup_begin_lr : float, default 0
        Learning rate at update 0 of the warm-up, from 0 to `base_lr`.
    warmup_mode : {'linear', 'constant'}
        Increase linearly to `base_lr`, or stay at `warmup_begin_lr`.

    Raises
    ------
    TypeError
        An argument is not a number, or a number of updates is not an integer.
    ValueError
        An argument is out of range, NaN or infinite; or, in a call, `num_update` is negative.

    Examples
    --------
    >>> from fastopt.lr_scheduler import FactorScheduler
    >>> schedule = FactorScheduler(step=100, base_lr=0.5, warmup_steps=2)
    >>> [schedule(n) for n in range(4)]
    [0.0, 0.25, 0.5, 0.5]
    """

    arguments: ClassVar[Descriptions] = {
        "base_lr": Real(least=0),  # optimizers assign this attribute
        "warmup_final_lr": Real(least=0),
        "warmup_steps": Integer(least=0),
        "warmup_begin_lr": Real(least=0),
        "warmup_mode": Choice("linear", "constant"),
    }

    argument_names: ClassVar[Mapping[str, tuple[str, ...]]] = Advice("SCHEDULE_NAMES")
    argument_advice: ClassVar[Mapping[str, str]] = Advice("SCHEDULE_ARGUMENTS")
    attribute_advice: ClassVar[Mapping[str, str]] = Advice("SCHEDULE_ATTRIBUTES")

    base_lr: float

    keeps_base_lr: ClassVar[bool] = False
    """Whether the rates depend on the constructor's `base_lr`, even if the attribute changes."""

    def __init__(
        self,
        base_lr: float = 0.01,
        warmup_steps: int = 0,
        warmup_begin_lr: float = 0,
        warmup_mode: str = "linear",
    ) -> None:
        self.base_lr = base_lr
        self.warmup_steps = warmup_steps
        self.warmup_begin_lr = warmup_begin_lr
        self.warmup_mode = warmup_mode
        self.__post_init__()

    def __post_init__(self) -> None:
        self.warmup_final_lr = self.base_lr
        self.check_together()

    def check_together(self) -> None:
        """Raise ValueError unless the arguments are consistent."""
        if self.warmup_begin_lr > self.warmup_final_lr:
            raise ValueError(
                f"warmup_begin_lr must be at most base_lr={self.warmup_final_lr}, "
                f"got {self.warmup_begin_lr}"
            )

    def __call__(self, num_update: int) -> float:
        """Return the learning rate at update `num_update`."""
        if type(num_update) is not int and not _is_number(num_update):
            raise TypeError(f"num_update must be a number of updates, got {num_update!r}")
        if num_update < self.warmup_steps or num_update < 0:
            return float(self.get_warmup_lr(num_update))
        return float(self._rate(num_update))

    def get_warmup_lr(self, num_update: int) -> float:
        """Return the warm-up learning rate, or its final value after the warm-up.

        Parameters
        ----------
        num_update : int
            Number of updates so far, at least 0.

        Raises
        ------
        ValueError
            `num_update` is negative.
        """
        if num_update < 0:
            raise ValueError(f"num_update must be at least 0, got {num_update}")
        if num_update >= self.warmup_steps:
            return self.warmup_final_lr
        if self.warmup_mode == "constant":
            return self.warmup_begin_lr
        done = num_update / self.warmup_steps
        return between(self.warmup_begin_lr, self.warmup_final_lr, done)

    def __repr__(self) -> str:
        attributes = ", ".join(f"{name}={value!r}" for name, value in vars(self).items())
        return f"{type(self).__name__}({attributes})"

    def _rate(self, num_update: int) -> float:
        raise NotImplementedError(f"{type(self).__name__} must define _rate(num_update)")


def rebased(schedule: Any, rate: float, optimizer: type, explicit: bool) -> Any:
    """Return a shallow copy of a schedule for an optimizer whose rate differs from its `base_lr`.

    Warns if both values were set, or if the optimizer's rate has no or partial effect. A value that
    equals the default of its argument counts as not set, unless the rate is known as `explicit`.
    """
    base_lr, kind = schedule.base_lr, type(schedule)
    twin = copy(schedule)
    if twin is not schedule:  # copy() of a function returns the function itself
        twin.base_lr = rate
    assigned = f"learning_rate={rate} of {optimizer.__name__}"
    if twin is schedule or getattr(schedule, "keeps_base_lr", False):
        if explicit or rate != _default(optimizer, "learning_rate"):
            warn_user(
                f"{assigned} has no effect: {kind.__name__} keeps its base_lr={base_lr}; set "
                "base_lr of the schedule"
            )
    elif getattr(schedule, "warmup_steps", 0):
        warn_user(
            f"{assigned} replaces base_lr={base_lr} of {kind.__name__} after warm-up, which "
            f"still ends at {base_lr}; give both the same value, or learning_rate=None"
        )
    elif base_lr != _default(kind, "base_lr"):
        warn_user(
            f"{assigned} replaces base_lr={base_lr} of {kind.__name__}; "
            "learning_rate=None keeps base_lr"
        )
    return twin


def restored(present: Any, saved: Any) -> Any:
    """Restore a schedule, or a part of one, in `present`, which the user and copies may hold.

    Returns
    -------
    object
        `present` with the values of `saved`, if both are schedules of the same class, dicts, lists,
        or arrays of the same shape and dtype; otherwise `saved`.
    """
    if present is saved or type(present) is not type(saved):
        return saved
    if isinstance(saved, LRScheduler):
        restored(vars(present), vars(saved))
    elif isinstance(saved, dict):
        present.update({name: restored(present.get(name), saved[name]) for name in saved})
        for name in present.keys() - saved.keys():
            del present[name]
    elif isinstance(saved, list):
        present[:] = [restored(*pair) for pair in zip_longest(present, saved)][: len(saved)]
    elif type(saved) is tuple:
        return tuple(restored(*pair) for pair in zip_longest(present, saved))[: len(saved)]
    elif type(saved) is np.ndarray and _is_like(present, saved):
        present[...] = saved
    else:
        return saved
    return present


def _is_like(present: np.ndarray[Any, Any], saved: np.ndarray[Any, Any]) -> bool:
    """Whether an array can have the values of another one."""
    same = (present.shape, present.dtype) == (saved.shape, saved.dtype)
    return same and bool(present.flags.writeable)


def _default(klass: type, argument: str) -> Any:
    """Return the default of a constructor argument."""
    parameter = inspect.signature(klass).parameters.get(argument)
    return None if parameter is None else parameter.default


def _is_number(value: object) -> bool:
    return isinstance(value, numbers.Real) and value == value


def between(first: float, second: float, share: float) -> float:
    """Interpolate linearly between `first` (share 0) and `second` (share 1)."""
    return first + (second - first) * share
