"""Base classes of optimizers whose hyper-parameters depend on sums over all tensors of a step."""

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from fastopt._engine.validate import label
from fastopt.arguments import Real, TableOf, arg, brief, kept
from fastopt.optimizer.families import AdamFamily
from fastopt.optimizer.optimizer import Index, Optimizer, RateAttribute

ANY = Real(infinite=True, nan=True)


FACTORS = ("beta1", "beta2", "beta3", "shrink", "epsilon", "floor")
"""Hyper-parameters that are 1 in a step that changes nothing; all others are 0."""


def _check_share(name: str, value: object) -> tuple[float, ...]:
    """Check the terms of a parameter in the sums of the current step."""
    if not isinstance(value, tuple):
        raise TypeError(f"{name} must be a tuple of numbers, got {brief(value)}")
    return tuple(ANY(f"{name}[{k}]", item) for k, item in enumerate(value))


class JointSums(Optimizer):
    """Abstract base of optimizers that compute numbers from sums over all tensors of a step.

    The terms of a tensor are the numbers that its rule keeps, see ``kept`` of
    :func:`fastopt.rule`. After each step the method :meth:`advance` gets their sums over the
    tensors, and changes :attr:`estimate`, which ``hyper()`` reads in the next step.

    A step ends when a parameter that is already part of it is updated again: a call with a list is
    a step, and so are single calls for each parameter, with bitwise equal results. A list must not
    contain an index twice.

    Parameters
    ----------
    *args, **kwargs
        Arguments of :class:`~fastopt.optimizer.Optimizer`.

    Attributes
    ----------
    estimate : dict of str to float
        Numbers computed from the sums, empty at first; they are saved in checkpoints. ``"d"`` is
        also ``updater.info.d``.

    Examples
    --------
    Steps along the gradient divided by the root mean square of all gradients of the last step:

    >>> import numpy as np
    >>> import fastopt
    >>> from fastopt import optimizer
    >>> def square(weight, grad, state, h):
    ...     return grad * grad, type(weight)(1)
    >>> def terms(sums, h, kept):
    ...     return sums[0], sums[1]
    >>> @fastopt.rule(hyper=("lr",), passes=[(square, terms)], kept=("square", "size"))
    ... def descent(weight, grad, state, h):
    ...     return weight - h.lr * grad, ()
    >>> class Normalized(optimizer.JointSums):
    ...     rule = descent
    ...
    ...     def advance(self, sums):
    ...         self.estimate["d"] = (sums[0] / sums[1]) ** 0.5
    ...
    ...     def hyper(self, t, lr, wd):
    ...         return {"lr": lr / self.estimate.get("d", 1.0)}
    >>> updater = fastopt.Updater(Normalized(lr=1.0))
    >>> weights = [np.zeros(1), np.zeros(3)]
    >>> for _ in range(2):
    ...     updater.step([np.full(1, 4.0), np.zeros(3)], weights)
    >>> weights[0]  # -4 - 4 / 2
    array([-6.])
    """

    estimate: dict[str, float] = kept(factory=dict, check=TableOf(ANY))
    shares: dict[Index, tuple[float, ...]] = kept(factory=dict, check=TableOf(_check_share))

    def advance(self, sums: Sequence[float]) -> None:
        """Change :attr:`estimate` after a step.

        Parameters
        ----------
        sums : sequence of float
            Sum of each number that the rule keeps, over the tensors of the step.
        """
        raise NotImplementedError(f"{type(self).__name__} needs a method advance(sums)")

    @property
    def first_estimate(self) -> dict[str, float]:
        """Numbers from which :attr:`estimate` starts, as far as they are known before a step."""
        return {}

    @property
    def d(self) -> float | None:
        """The number ``"d"`` of :attr:`estimate`, None without one."""
        return self.estimate.get("d")

    @property
    def step_sums(self) -> "JointSums":
        """See :attr:`Optimizer.step_sums`."""
        return self

    def begin(self, indices: Sequence[Index]) -> Any:
        """Start a new step and advance if an index is already in the current step."""
        if self.shares.keys().isdisjoint(indices):
            return None
        before = dict(self.estimate), dict(self.shares)
        shares = list(self.shares.values())
        self.shares.clear()
        try:
            self.advance([sum(parts) for parts in zip(*shares, strict=True)])
        except BaseException:
            self.put_back(before)
            raise
        return before

    def put_back(self, before: Any) -> None:
        """Undo the changes of :meth:`begin`."""
        if before is not None:
            self.estimate.clear()
            self.shares.clear()
            self.estimate.update(before[0])
            self.shares.update(before[1])

    def add(self, indices: Sequence[Index], numbers: Sequence[Sequence[float]]) -> None:
        """Record the terms of tensors in the sums of a step."""
        self.shares.update(zip(indices, map(tuple, numbers), strict=True))

    def restart(self, indices: Collection[Index]) -> None:
        """See :meth:`Optimizer.restart <fastopt.optimizer.Optimizer.restart>`."""
        super().restart(indices)
        if self.num_update == self.begin_num_update:
            self.estimate, self.shares = {}, {}


@dataclass(frozen=True)
class EstimateOf:
    """A saved estimate: empty, or the numbers of :attr:`first`, of which ``"d"`` is above 0."""

    first: Mapping[str, float]
    """What the numbers are before the first step, as multiples of ``d0``."""

    def __call__(self, name: str, value: object) -> dict[str, float]:
        """Return the checked value."""
        table, names = TableOf(ANY)(name, value), tuple(self.first)
        if table and (tuple(table) != names or not table["d"] > 0):
            raise ValueError(f"{name} must have {names} with d above 0, got {brief(value)}")
        return table


class DistanceFamily(JointSums, AdamFamily):
    """Abstract base of optimizers that estimate the distance to a solution.

    Parameters
    ----------
    learning_rate : float or callable, optional
        Factor of the estimate; None uses the scheduler's ``base_lr``.
    beta1, beta2, epsilon : float
        See :class:`~fastopt.optimizer.Adam`.
    d0 : float
        Initial estimate, at least 1e-30.
    growth_rate : float
        Maximum factor by which the estimate grows in a step, at least 1.
    **common
        Arguments of :class:`~fastopt.optimizer.Optimizer`.

    Raises
    ------
    ValueError
        An argument is NaN or out of range.
    """

    same_in_groups: ClassVar[tuple[str, ...]] = (
        *("learning_rate", "lr_scheduler", "beta1", "beta2", "d0", "growth_rate"),
    )
    learning_rate: RateAttribute = arg(default=1.0)
    d0: float = arg(default=1e-6, check=Real(least=1e-30))
    growth_rate: float = arg(default=math.inf, check=Real(least=1, infinite=True))

    def check_together(self) -> None:
        """See :meth:`Optimizer.check_together <fastopt.optimizer.Optimizer.check_together>`."""
        super().check_together()
        name = type(self).__name__
        if self.state_dtype is not None:
            raise ValueError(
                f"{name} measures how far weights are from their start, which rounded state "
                "cannot hold: state_dtype must be None"
            )
        if self.sparse_decay != "touched":
            raise ValueError(
                f"the rate of {name} is not known beforehand: sparse_decay must be 'touched', "
                f"got {self.sparse_decay!r}"
            )

    def multiplier(self, index: Index, table: Mapping[Any, float], attribute: str) -> float:
        """See :meth:`Optimizer.multiplier`; learning rate multipliers must be 0 or 1."""
        value = super().multiplier(index, table, attribute)
        if attribute == "lr_mult" and value not in (0, 1):
            raise ValueError(
                f"{label(index, self.idx2name)}: {type(self).__name__} estimates one learning rate "
                f"for all parameters: lr_mult must be 0 or 1, got {value}"
            )
        return value

    @property
    def sum_decay(self) -> float:
        """Decay rate of the sums."""
        beta3: float | None = vars(self).get("beta3")
        return math.sqrt(self.beta2) if beta3 is None else beta3

    def rest(self) -> dict[str, float]:
        """Return hyper-parameters of a step that changes nothing."""
        fields = {*self.rule.hyper} - {"rescale_grad", "clip_gradient"}
        return {name: float(name in FACTORS) for name in fields}

    @property
    def first_estimate(self) -> dict[str, float]:
        """See :attr:`JointSums.first_estimate`."""
        check = type(self).declared["estimate"].check
        first = check.first if isinstance(check, EstimateOf) else {}
        return {name: factor * self.d0 for name, factor in first.items()}

    @property
    def d(self) -> float:
        """Estimate of the distance in the current step."""
        return self.estimate.get("d", self.d0)
