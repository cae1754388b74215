"""The base class of all schedules and their registry."""

import inspect
import math
import numbers
import warnings
from collections.abc import Callable, Iterable, Mapping
from copy import copy
from itertools import pairwise
from typing import Any, ClassVar, TypeVar

from fastopt.arguments import Choice, Descriptions, Integer, Real, count
from fastopt.checked import Checked
from fastopt.notices import warn_user

__all__ = ["LRScheduler", "Schedule", "rebased", "register", "scheduler_registry"]

Schedule = Callable[[int], float]
"""From the number of updates so far to a learning rate."""

Class = TypeVar("Class", bound="type[LRScheduler]")

scheduler_registry: dict[str, type["LRScheduler"]] = {}


def register(klass: Class) -> Class:
    """Enter a class into ``scheduler_registry`` under its name, as a decorator.

    Parameters
    ----------
    klass : type
        Subclass of :class:`LRScheduler`. A class of the same name is replaced with a warning.

    Raises
    ------
    TypeError
        `klass` is not a subclass of :class:`LRScheduler`.

    Examples
    --------
    >>> from fastopt.lr_scheduler import LRScheduler, register, scheduler_registry
    >>> @register
    ... class InverseRootScheduler(LRScheduler):
    ...     def _rate(self, num_update):
    ...         return self.base_lr / max(num_update, 1) ** 0.5
    >>> scheduler_registry["InverseRootScheduler"](base_lr=0.2)(4)
    0.1
    """
    if not (isinstance(klass, type) and issubclass(klass, LRScheduler)):
        raise TypeError(f"only subclasses of LRScheduler can be registered, got {klass!r}")
    old = scheduler_registry.get(klass.__name__)
    if old is not None:
        warnings.warn(f"{klass!r} replaces {old!r} in scheduler_registry", stacklevel=2)
    scheduler_registry[klass.__name__] = klass
    return klass


class LRScheduler(Checked):
    r"""Base class of all schedules: a warm-up, then the rate that a subclass defines.

    A subclass writes ``_rate(num_update)``, called from update `warmup_steps` on. Before, a linear
    warm-up has the rate

    .. math:: \mathrm{warmup\_begin\_lr} + (\mathrm{base\_lr} - \mathrm{warmup\_begin\_lr})
        \frac{n}{\mathrm{warmup\_steps}}

    An optimizer with another learning rate works with a shallow copy of the schedule, whose
    ``base_lr`` is that rate. Schedules with a `factor` multiply it; the others, and warm-up, keep
    the `base_lr` they were made with.

    Parameters
    ----------
    base_lr : float, default 0.01
        Rate at the end of warm-up, 0 or more.
    warmup_steps : int, default 0
        Number of warm-up updates.
    warmup_begin_lr : float, default 0
        Rate at update 0 of a warm-up, from 0 to `base_lr`.
    warmup_mode : {'linear', 'constant'}
        Rise to `base_lr`, or wait at `warmup_begin_lr`.

    Raises
    ------
    TypeError
        An argument of any schedule is not a number, or not an integer where updates are counted.
    ValueError
        An argument of any schedule is out of range, NaN or infinite; a call's number is negative.

    Examples
    --------
    >>> from fastopt.lr_scheduler import FactorScheduler
    >>> schedule = FactorScheduler(step=100, base_lr=0.5, warmup_steps=2)
    >>> [schedule(n) for n in range(4)]
    [0.0, 0.25, 0.5, 0.5]
    """

    arguments: ClassVar[Descriptions] = {
        "base_lr": Real(least=0),  # optimizers assign it
        "warmup_final_lr": Real(least=0),
        "warmup_steps": Integer(least=0),
        "warmup_begin_lr": Real(least=0),
        "warmup_mode": Choice("linear", "constant"),
    }

    argument_names: ClassVar[Mapping[str, tuple[str, ...]]] = {
        **dict.fromkeys(("T_max", "total_steps", "total_iters", "decay_steps"), ("max_update",)),
        **dict.fromkeys(
            ("eta_min", "alpha", "end_value", "end_lr", "end_learning_rate"), ("final_lr",)
        ),
        **dict.fromkeys(
            ("lr", "learning_rate", "initial_learning_rate", "init_value"), ("base_lr",)
        ),
        **dict.fromkeys(("max_lr", "peak_value"), ("base_lr",)),
        **dict.fromkeys(("gamma", "decay_rate"), ("factor",)),
        **dict.fromkeys(("step_size", "milestones", "transition_steps"), ("step",)),
        **dict.fromkeys(("T_0", "first_decay_steps"), ("period",)),
        **dict.fromkeys(("T_mult", "t_mul"), ("period_mult",)),
        "power": ("pwr",),
        "min_lr": ("stop_factor_lr", "final_lr"),
        "threshold": ("min_delta",),
        "warmup": ("warmup_steps",),
        "num_warmup_steps": ("warmup_steps",),
        "warmup_iters": ("warmup_steps",),
        "schedulers": ("schedules",),
    }
    argument_advice: ClassVar[Mapping[str, str]] = {
        "optimizer": "a schedule needs no optimizer: fastopt.Adam(lr=schedule) takes it",
        "last_epoch": "updates are counted by the optimizer, from its begin_num_update",
    }
    elsewhere: ClassVar[Mapping[str, str]] = {
        "step": "updates are counted by the optimizer, which calls the schedule; only a "
        "PlateauScheduler has step(metric)",
        **dict.fromkeys(
            ("get_last_lr", "get_lr"),
            "the present rate is optimizer.learning_rate; schedule(n) is that of update n",
        ),
        "state_dict": "updater.save() saves the schedule together with the states",
        "load_state_dict": "updater.load() restores the schedule together with the states",
    }

    base_lr: float

    keeps_base_lr: ClassVar[bool] = False
    """Whether rates follow the constructor's `base_lr` even if the attribute changes."""

    def __init__(
        self,
        base_lr: float = 0.01,
        warmup_steps: int = 0,
        warmup_begin_lr: float = 0,
        warmup_mode: str = "linear",
    ) -> None:
        self.base_lr = base_lr
        self.warmup_final_lr = self.base_lr
        self.warmup_steps = warmup_steps
        self.warmup_begin_lr = warmup_begin_lr
        self.warmup_mode = warmup_mode
        self.check_together()

    def check_together(self) -> None:
        """Raise ValueError unless the arguments fit together."""
        if self.warmup_begin_lr > self.warmup_final_lr:
            raise ValueError(
                f"warmup_begin_lr must be at most base_lr={self.warmup_final_lr}, "
                f"got {self.warmup_begin_lr}"
            )

    def __call__(self, num_update: int) -> float:
        """Return the rate at update `num_update`."""
        if type(num_update) is not int and not _is_number(num_update):
            raise TypeError(f"num_update must be a number of updates, got {num_update!r}")
        if num_update < self.warmup_steps or num_update < 0:
            return float(self.get_warmup_lr(num_update))
        return float(self._rate(num_update))

    def get_warmup_lr(self, num_update: int) -> float:
        """Return the rate of warm-up, or that at its end if it is over.

        Parameters
        ----------
        num_update : int
            Number of updates so far, at least 0.

        Raises
        ------
        ValueError
            It is negative.
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


def rebased(schedule: Any, rate: float, optimizer: type) -> Any:
    """Return a shallow copy of a schedule, for an optimizer with another rate than its `base_lr`.

    Warns where the difference is not what was asked for. A value that is the default of its
    argument does not count as given.
    """
    own, kind = schedule.base_lr, type(schedule)
    twin = copy(schedule)
    if twin is not schedule:  # a function is its own copy
        twin.base_lr = rate
    words = f"learning_rate={rate} of {optimizer.__name__}"
    if twin is schedule or getattr(schedule, "keeps_base_lr", False):
        if rate != _default(optimizer, "learning_rate"):
            warn_user(
                f"{words} has no effect: {kind.__name__} keeps its base_lr={own}; set base_lr of "
                "the schedule"
            )
    elif getattr(schedule, "warmup_steps", 0):
        warn_user(
            f"{words} replaces base_lr={own} of {kind.__name__} after warm-up, which still ends at "
            f"{own}; give both the same value, or learning_rate=None"
        )
    elif own != _default(kind, "base_lr"):
        warn_user(
            f"{words} replaces base_lr={own} of {kind.__name__}; learning_rate=None keeps base_lr"
        )
    return twin


def _default(klass: type, argument: str) -> Any:
    """Default of an argument of a constructor, in the first class that names it."""
    for base in klass.__mro__:
        parameters = inspect.signature(base.__init__).parameters  # type: ignore[misc]
        if argument in parameters:
            return parameters[argument].default
    return None


def _is_number(value: Any) -> bool:
    return isinstance(value, numbers.Real) and value == value


def between(first: float, second: float, share: float) -> float:
    """Number at a share of the way from `first` to `second`."""
    return first + (second - first) * share


def half_cosine(done: float) -> float:
    """Half a cosine, from 1 to 0."""
    return (1 + math.cos(math.pi * done)) / 2


def listed(name: str, values: Iterable[Any]) -> list[Any]:
    """Return `values` as a list, else raise TypeError."""
    if not isinstance(values, Iterable):
        raise TypeError(f"{name} must be a list, got {values!r}")
    return list(values)


def increasing(name: str, values: Iterable[Any]) -> list[int]:
    """Return `values` as a list of positive integers, each larger than the last."""
    counts = [count(f"{name}[{i}]", value) for i, value in enumerate(listed(name, values))]
    if any(second <= first for first, second in pairwise(counts)):
        raise ValueError(f"{name} must be strictly increasing, got {counts}")
    return counts
