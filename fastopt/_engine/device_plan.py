"""The plan of a call whose arrays are on a CUDA device.

Tests: ``tests/kernels/test_cuda_driver.py``.
"""

from typing import TYPE_CHECKING, Any, cast

import numpy as np

from fastopt._engine.device_steps import DeviceSteps, Finish, Norm
from fastopt._engine.plan import Plan
from fastopt._interrupts import uninterrupted
from fastopt._kernels.layout import DONE
from fastopt._kernels.table import launch

if TYPE_CHECKING:
    from fastopt._kernels.cuda_table import CudaTable

__all__ = ["DevicePlan"]


class DevicePlan(Plan):
    """Plan with arrays on CUDA devices; see :class:`~fastopt._engine.plan.Plan`.

    If one table holds all arrays of a call, later calls take a short path: a compiled function
    counts the step and computes its hyper-parameters, and the kernels are launched without further
    checks.
    """

    def __init__(self, planner: Any, *arguments: Any) -> None:
        super().__init__(planner, *arguments)
        only = self.only = cast("CudaTable", self.tables[0])
        self.repeats = (
            len(self.tables) == 1
            and not self.in_order
            and not self.optimizer.per_index
            and planner.launcher is launch
            and not (only.layout.sparse or only.copied)
        )
        self.entry: Any = None
        self.context = np.empty(0, np.uint64)
        self.steps: DeviceSteps | None = None
        self.defers = DeviceSteps.supports(self)
        for table in self.tables:
            if table.device is not None:
                cast("CudaTable", table).capturable = self.defers and not table.alone

    @property
    def counts_there(self) -> bool:
        """Whether a step is counted on the device: in a graph, or beside one."""
        return self.captured or bool(self.steps and self.steps.kept)

    @property
    def captured(self) -> bool:
        """Whether the present step becomes part of a graph."""
        return self.defers and self.only.captured

    def deferred(self, norm: Norm | None = None, finish: Finish | None = None) -> bool:
        """Launch a step whose norm stays on the device; see :meth:`DeviceSteps.step`.

        Returns False, with nothing changed, if the host must know the norm first.
        """
        if not self.defers:
            return False
        if self.steps is None:
            self.steps = DeviceSteps(self)
        return self.steps.step(norm, finish)

    def step(self, factor: float = 1.0, shielded: bool = False) -> None:
        """See :meth:`Plan.step`."""
        if factor == 1 and self.counts_there and self.deferred():
            return
        if self.captured:
            self.only.driver.refuse_capture(self.only.stream_handle)
        if self.steps is not None:
            for table in self.tables:
                cast("CudaTable", table).forget_skip()
        super().step(factor, shielded)
        if self.repeats:
            self._repeat()

    def _repeat(self) -> None:
        """Let later calls take the short path, if no step computes in Python."""
        group, optimizer = self.groups[0], self.optimizer
        self.entry, self.context = group.entry, group.context
        static = self.kept and self.settled and not self.planner.measures
        self.version = optimizer.version if static else -1

    def call_again(self, index: Any, grad: Any, weight: Any) -> bool:
        """See :meth:`Plan.call_again`."""
        if self.version == self.optimizer.version:
            return self.quick_call((index, grad, weight))
        return super().call_again(index, grad, weight)

    def quick_call(self, objects: tuple[Any, Any, Any]) -> bool:
        """Update by the shortest path if the plan fits the call.

        No step may compute hyper-parameters in Python. If the plan does not fit, nothing changes
        and the result is False.
        """
        grads, table = objects[1], self.only
        if not self.length:
            grads = (grads,)
        elif type(grads) is not tuple or len(grads) != self.length:
            return False
        if not table.take_grads(grads, self.written):
            return False
        if self.counts_there:
            self.step()
            return True
        before, largest = self.counts[self.slots], self.counts.item(0)
        carried = self.carried[self.carried_slots] if self.hyper.carries else None
        with uninterrupted:
            table.table[0, DONE] = 0
            try:
                if self.entry(self.context, id(objects)) < 0:
                    return False
                table.run()
            except BaseException:
                if not table.done:
                    self.counts[self.slots], self.counts[0] = before, largest
                    if carried is not None:
                        self.carried[self.carried_slots] = carried
                raise
        return True
