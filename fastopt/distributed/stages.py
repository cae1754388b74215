"""Calls of a rank's slices on records, stage by stage, with what the ranks do together."""

from collections.abc import Callable
from contextlib import nullcontext
from functools import reduce
from operator import add
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fastopt._engine.reader import Reader
from fastopt._engine.validate import label
from fastopt._kernels import front, stages
from fastopt._kernels import record_words as w
from fastopt._kernels.cpu_calls import limit_norm
from fastopt._kernels.numpy_abi import address_of, readable
from fastopt._kernels.threads import may_run_parallel, thread_count, turn
from fastopt.distributed.agreement import Numbers
from fastopt.distributed.collectives import added, of_all
from fastopt.optimizer.optimizer import Array

Parts = NDArray[np.int64]
"""Parts of tensors, a row for each: position in the call, first element, number of elements."""


class Local:
    """Gradients that are complete before the update starts."""

    def receive(self) -> None:
        """Wait for the sums of the gradients."""

    def update(self, stages: "Stages") -> None:
        """Update the tensors of an admitted call."""
        stages.start()
        stages.reduce()
        stages.update()


LOCAL = Local()


def compile_stages() -> None:
    """Compile what every call of slices needs."""
    front.enter(), front.spread(), stages.stage(), stages.share()


class Stages:
    """Function that enters a call on the records of a rank's slices, like the front.

    Between the stages of the call the ranks agree, and combine norms and sums of whole tensors.

    Parameters
    ----------
    shard : Shard
        The updater of the slices.
    """

    def __init__(self, shard: Any) -> None:
        self.shard, self.records = shard, shard.records
        self.words, self.indices = self.records.words, list[Any]()
        self._check: Callable[..., int] = front.enter() if readable() else Reader(self.records)
        self._stage: Callable[..., None] = stages.stage()

    def __call__(self, context: int, index: Any, grad: Any, weight: Any) -> int:
        """Update the tensors of a call; return a status, see :mod:`fastopt._kernels.front`."""
        words, records, gate = self.words, self.records, self.shard.gate
        words[w.CHECKS] = 1
        try:
            status = self._check(context, index, grad, weight)
        finally:
            words[w.CHECKS] = 0
        if status < 0:
            return status
        self.indices = [*index] if type(index) in (list, tuple) else [index]
        asks, measures = words[w.ASKING] and not self._is_asked(), bool(words[w.MEASURE])
        if asks and not measures:
            return w.ASKS
        self._use_threads()
        if (measures or records.clips) and not gate.added:
            gate.add()
            self.shard.exchange.receive()
        if records.clips or words[w.LISTED]:
            self._do(stages.CLIP)
        if measures and not words[w.ASKED]:
            self._measure()
            if not np.isfinite(records.norm[w.GLOBAL_NORM]):
                return w.SKIPPED
        if asks:
            return w.ASKS
        gate.launch(self._hyper)
        self.shard.exchange.update(self)
        return status

    def _is_asked(self) -> bool:
        """Whether the hyper-parameters of the admitted call have been computed."""
        words = self.words
        number, expected = words[w.UPDATE_NUMBER], words[w.EXPECTED]
        foreseen = expected and expected == number and words[w.EXPECTED_TIME] == words[w.TIME]
        return bool(words[w.ASKED] or (foreseen and not words[w.UNEVEN]))

    def _use_threads(self) -> None:
        """Enter how many threads share the work of the call."""
        threads = thread_count() if self.words[w.LARGE] and may_run_parallel() else 1
        self.records.spread(threads > 1, lambda: (0, 0))
        self.words[w.THREADS], self.words[w.UPDATE_SHARE] = threads, stages.share()

    def _do(
        self, stage: int, step: int = 0, at: Array | None = None, width: int = 0, slices: int = 0
    ) -> None:
        """See :func:`fastopt._kernels.stages.stage_call`."""
        place = 0 if at is None else address_of(at)
        with turn() if self.words[w.THREADS] > 1 else nullcontext():
            self._stage(self.records.context, stage, len(self.indices), step, place, width, slices)

    def _measure(self) -> None:
        """Compute the norm of all gradients of all ranks, and the factor of the gradients."""
        sums, norm = np.zeros(len(self.indices)), self.records.norm
        self._do(stages.MEASURE, 0, sums)
        limit_norm(reduce(add, added(self.shard.ranks, sums).tolist(), 0.0), norm)
        norm[w.FACTOR] *= norm[w.SHARE]

    def _hyper(self) -> Numbers:
        """Hyper-parameters of each tensor, for comparison between ranks."""
        records, count = self.records, len(self.indices)
        rows = records.tensors[: count * w.TENSOR].reshape(count, w.TENSOR)[:, w.T_HYPER].tolist()
        known = {each.address: each for each in (*records.shared.values(), *records.rows.values())}
        used = list(dict.fromkeys(rows))
        values = [known[each].values[1 : 1 + len(known[each].names)] for each in used]
        numbers = {each: number for number, each in enumerate(used)}

        def describe() -> dict[str, str]:
            names = self.shard.optimizer.idx2name
            return {
                f"{name} of {label(index, names)}": str(value)
                for index, row in zip(self.indices, rows, strict=True)
                for name, value in zip(known[row].names, values[numbers[row]].tolist(), strict=True)
            }

        return Numbers([np.array([numbers[row] for row in rows]), *values], describe)

    # Stages of the update

    @property
    def is_elementwise(self) -> bool:
        """Whether elements can be updated in any portions; the same on all ranks."""
        own = ((each.rule, each.coded) for each in self.records.layouts(self.indices))
        return not (self.records.defers or any(r.passes or r.row or coded for r, coded in own))

    def start(self) -> None:
        """Count the step of each tensor."""
        self.words[w.DONE] = 1
        self._do(stages.START)
        self.words[w.ASKED] = self.words[w.EACH] = self.words[w.EXPECTED] = 0

    def reduce(self) -> None:
        """Complete the reductions of all tensors, with the sums of all slices."""
        rules = {each.rule for each in self.records.layouts(self.indices)}
        width = max((sum for rule in rules for sum in rule.sums), default=0)
        for step in range(max((len(rule.passes) for rule in rules), default=0)):
            own = np.zeros((len(self.indices), width))
            self._do(stages.REDUCE, step, own, width)
            largest = any(step < len(r.passes) and r.passes[step].largest for r in rules)
            every = of_all(self.shard.ranks, own) if largest else added(self.shard.ranks, own)[None]
            self._do(stages.COMPLETE, step, every, width, len(every))

    def update_parts(self, parts: Parts) -> None:
        """Update parts of the tensors."""
        if len(parts):
            self._do(stages.PARTS, len(parts), parts)

    def update(self) -> None:
        """Update all tensors."""
        self._do(stages.UPDATE)
