"""The plan of a call whose tensors belong to several optimizers.

Tests: ``tests/optimizer/test_groups.py``.
"""

from collections.abc import Sequence
from operator import itemgetter
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fastopt._engine.plan import Plan
from fastopt._engine.step_sums import SummedPlan
from fastopt._interrupts import uninterrupted
from fastopt._kernels.layout import DONE

__all__ = ["Joint"]


class Joint:
    """Plans of several optimizers in one call, checked together and then launched together.

    It has the interface of :class:`~fastopt._engine.plan.Plan`. Nothing is written before all
    parts fit, and a failure rolls all of them back.

    Parameters
    ----------
    groups : fastopt._engine.groups.Groups
        The groups of the updater.
    calls : sequence of (index, weight, gradient, state)
        The tensors of the call.
    single : bool
        Whether the call passes one index instead of lists.
    parts : sequence of (Plan, sequence of int)
        Plans, and the positions of their tensors in the call.
    key : hashable
        Key under which the planner keeps it.
    averaging : AveragingStep or None
        Weight averaging of the step.
    in_order : bool
        Whether each tensor must be updated before the next.
    """

    def __init__(
        self,
        groups: Any,
        calls: Sequence[tuple[Any, Any, Any, Any]],
        single: bool,
        parts: Sequence[tuple[Plan, Sequence[int]]],
        key: Any,
        averaging: Any = None,
        in_order: bool = False,
    ) -> None:
        self.groups, self.optimizer = groups, groups.main
        self.averaging = averaging
        self.generation = groups.generation()
        self.indices = [index for index, *_ in calls]
        self.weights = [weight for _, weight, *_ in calls]
        self.length = 0 if single else len(calls)
        self.plans = [plan for plan, _ in parts]
        self.summed = [plan for plan in self.plans if isinstance(plan, SummedPlan)]
        self.places = [list(places) for _, places in parts]
        self.takes = [
            itemgetter(*own) if len(own) > 1 else itemgetter(slice(own[0], own[0] + 1))
            for own in self.places
        ]
        self.only = self.plans[0] if len(parts) == 1 else None
        self.in_order = in_order or any(plan.in_order for plan in self.plans)
        self.scaled = [plan.optimizer.folds for plan in self.plans]
        self.folds = all(self.scaled) and not self.in_order
        self.kept = all(plan.kept for plan in self.plans) and not in_order
        self.key = key
        self.version = -1

    @property
    def settled(self) -> bool:
        """Whether no step computes hyper-parameters in Python."""
        return all(plan.settled for plan in self.plans)

    @property
    def done(self) -> bool:
        """Whether the step has updated the tensors of all parts; see :attr:`Plan.done`."""
        return all(plan.done for plan in self.plans)

    @done.setter
    def done(self, value: bool) -> None:
        for plan in self.plans:
            plan.done = value

    @property
    def filled(self) -> tuple[Any, ...]:
        """Optimizer version of the hyper-parameters; empty if an optimizer has changed since."""
        filled = all(plan.filled[:1] == (plan.optimizer.version,) for plan in self.plans)
        return (self.optimizer.version,) if filled else ()

    @property
    def counts(self) -> NDArray[Any]:
        """Array of the update counts, which all parts share."""
        return self.plans[0].counts

    @property
    def slots(self) -> NDArray[np.int64]:
        """Positions of the update counts, concatenated over the parts."""
        return np.concatenate([plan.slots for plan in self.plans])

    def is_uneven(self) -> bool:
        """Whether a schedule is evaluated at several counts, so that the list order matters."""
        if self.only is not None or not any(p.optimizer.lr_scheduler for p in self.plans):
            return False
        counts, start = self.optimizer._index_update_count, self.optimizer.begin_num_update
        return len({counts.get(index, start) for index in self.indices}) > 1

    def fits(self, index: Any, grad: Any, weight: Any) -> bool:
        """Enter a call's gradients into the tables; return whether the plan fits the call."""
        if self.generation != self.groups.generation():
            return False
        if self.only is not None:
            return self.only.fits(index, grad, weight)
        if self.is_uneven():
            return False
        for values in (index, grad, weight):
            if type(values) not in (list, tuple) or len(values) != self.length:
                return False
        return all(
            plan.fits(take(index), take(grad), take(weight))
            for plan, take in zip(self.plans, self.takes, strict=True)
        )

    def call_again(self, index: Any, grad: Any, weight: Any) -> bool:
        """Update by the shortest path if the plan fits the call, else return False."""
        only = self.only
        if only is not None and self.version == self.optimizer.version:
            return only.call_again(index, grad, weight)
        if not self.fits(index, grad, weight):
            return False
        self.step()
        return True

    def step(self, factor: float = 1.0) -> None:
        """Update with gradients times `factor`, after :meth:`fits` has entered the arrays."""
        stays = self.kept and not (self.groups.planner.measures or self.optimizer.unchecked)
        if self.only is not None:
            self.only.step(factor)
        else:
            with uninterrupted:
                self._step(factor)
        self.version = self.optimizer.version if stays else -1

    def _step(self, factor: float) -> None:
        """Count the step and compute the hyper-parameters of all parts, then launch them."""
        counts, largest = self.optimizer._index_update_count, self.optimizer.num_update
        new = [[i for i in dict.fromkeys(plan.indices) if i not in counts] for plan in self.plans]
        tables: list[Any] = []
        before: list[Any] = []
        begun: list[Any] = []
        try:
            begun.extend((plan, plan.begin(self.indices)) for plan in self.summed)
            for plan in self.plans:  # a new index may reallocate the array of counts
                if plan.counts_version != plan.optimizer.version:
                    plan._find_slots()
            before.extend(map(_before, self.plans))
            for plan, scaled in zip(self.plans, self.scaled, strict=True):
                tables += plan.count(factor if scaled else 1.0)
            if tables:
                self.plans[0].planner.launch(tables, self.indices[0])
        except BaseException:
            if not (tables and tables[-1].done):
                self._roll_back(before, new, largest)
                for plan, changed in reversed(begun):
                    plan.optimizer.step_sums.put_back(changed)
            raise
        for plan in self.plans:
            plan.new = []
        for plan in self.summed:
            plan.collect()

    def _roll_back(self, before: Sequence[Any], new: Sequence[Any], largest: int) -> None:
        with uninterrupted:
            for plan, own in reversed(list(zip(self.plans, before, strict=False))):
                plan._roll_back(own)
            for plan, indices in zip(self.plans, new, strict=True):
                plan.new = list(indices)
                plan._forget_new(largest)
                plan.release()

    def release(self) -> None:
        """Release the gradients, for a call that ends without a launch."""
        for plan in self.plans:
            plan.release()

    def squares(self) -> NDArray[np.float64]:
        """Return the sum of squares of each gradient; non-finite elements propagate."""
        totals = np.zeros(len(self.indices))
        for plan, places in zip(self.plans, self.places, strict=True):
            totals[places] = plan.squares()
        return totals


def _before(plan: Plan) -> tuple[Any, ...]:
    """Save what a step of a plan changes, apart from weights and states."""
    for table in plan.tables:
        table.table[0, DONE] = 0
    if plan.counts_version != plan.optimizer.version:
        plan._find_slots()
    carried = plan.carried[plan.carried_slots] if plan.hyper.carries else None
    return plan.counts.item(0), plan.counts[plan.slots], carried, *plan._before()
