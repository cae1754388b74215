"""The base class of all schedules and their registry."""

import math
import warnings
from collections.abc import Iterable
from itertools import pairwise
from numbers import Real
from typing import Any, TypeVar

from fastopt.arguments import choice, count, number

__all__ = ["LRScheduler", "register", "scheduler_registry"]

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


class LRScheduler:
    r"""Base class of all schedules: a warm-up, then the rate that a subclass defines.

    A subclass writes ``_rate(num_update)``, called from update `warmup_steps` on. Before, a linear
    warm-up has the rate

    .. math:: \mathrm{warmup\_begin\_lr} + (\mathrm{base\_lr} - \mathrm{warmup\_begin\_lr})
        \frac{n}{\mathrm{warmup\_steps}}

    An optimizer with a learning rate of its own assigns it to ``base_lr``. Schedules with a
    `factor` multiply that value; the others, and warm-up, keep the `base_lr` they were made with.

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

    base_lr: float

    def __init__(
        self,
        base_lr: float = 0.01,
        warmup_steps: int = 0,
        warmup_begin_lr: float = 0,
        warmup_mode: str = "linear",
    ) -> None:
        self.base_lr = base_lr
        self.warmup_final_lr = self.base_lr
        self.warmup_steps = count("warmup_steps", warmup_steps, least=0)
        self.warmup_begin_lr = number("warmup_begin_lr", warmup_begin_lr, least=0)
        self.warmup_mode = choice("warmup_mode", warmup_mode, "linear", "constant")
        if self.warmup_begin_lr > self.base_lr:
            raise ValueError(
                f"warmup_begin_lr must be at most base_lr={base_lr}, got {warmup_begin_lr}"
            )

    def __setattr__(self, name: str, value: Any) -> None:
        # Optimizers assign base_lr: the same check as for the argument, and a plain float.
        super().__setattr__(name, number(name, value, least=0) if name == "base_lr" else value)

    def __call__(self, num_update: int) -> float:
        """Return the rate at update `num_update`."""
        if not isinstance(num_update, Real) or num_update != num_update:
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
