"""Calls on the slices of a rank, stage by stage, with what the ranks do together between them.

Reason: ranks agree on hyper-parameters as kernels read them, before anything changes; elements are
updated while other buckets are sent.

Tests: ``tests/mpi/test_jobs.py``, ``tests/distributed/test_together.py``.
"""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import reduce
from operator import add
from typing import Any, cast

import numpy as np

from fastopt._engine.backend import Backend
from fastopt._engine.contract import OptimizerLike
from fastopt._engine.owner import RecordsLike
from fastopt._engine.parameters import Call
from fastopt._engine.validate import label
from fastopt._kernels import front, stages
from fastopt._kernels import record_words as w
from fastopt._kernels.cpu_calls import limit_norm
from fastopt._kernels.numpy_abi import address_of
from fastopt._kernels.threads import may_run_parallel, thread_count, turn
from fastopt.distributed.agreement import Gate, Numbers, added, of_all
from fastopt.distributed.exchange import Exchange
from fastopt.distributed.ranks import Ranks
from fastopt.optimizer.optimizer import Array


def compile_stages() -> None:
    """Compile what every call of slices needs."""
    front.enter(), front.spread(), stages.stage(), stages.share()


class Stages:
    """Function that enters a call on the records of a rank's slices, like the front.

    Between the stages of the call the ranks agree, and combine norms and sums of whole tensors.

    Parameters
    ----------
    backend : RankBackend
        What the ranks do together.
    records : Records
        Records of the slices.
    check : callable
        The front, which only admits calls here.
    """

    def __init__(
        self, backend: "RankBackend", records: RecordsLike, check: Callable[..., int]
    ) -> None:
        self.backend, self.records = backend, records
        self.words, self.indices = records.words, list[Any]()
        self._check = check
        self._stage: Callable[..., int] = stages.stage()

    def __call__(self, context: int, index: Any, grad: object, weight: object) -> int:
        """Update the tensors of a call; return a status, see :mod:`fastopt._kernels.front`."""
        words, records, gate = self.words, self.records, self.backend.gate
        words[w.CHECKS] = 1
        try:
            status = self._check(context, index, grad, weight)
        finally:
            words[w.CHECKS] = 0
        if status < 0:
            return status
        self.indices = [*index] if type(index) in (list, tuple) else [index]
        asks = words[w.ASKING] and not self._do(stages.IS_ASKED)
        measures = bool(words[w.MEASURE])
        if asks and not measures:
            return w.ASKS
        self._use_threads()
        if (measures or records.mode.clips) and not gate.added:
            self.backend.receive()
        if records.mode.clips or words[w.LISTED]:
            self._do(stages.CLIP)
        if measures and not words[w.ASKED]:
            self._measure()
            if not np.isfinite(records.norm[w.GLOBAL_NORM]):
                return w.SKIPPED
        if asks:
            return w.ASKS
        gate.launch(self._hyper)
        self._commit(self.backend.exchange)
        return status

    def _use_threads(self) -> None:
        """Enter how many threads share the work of the call."""
        threads = thread_count() if self.words[w.LARGE] and may_run_parallel() else 1
        if threads > 1:
            self.words[w.SPREAD] = front.spread()
        self.words[w.THREADS], self.words[w.UPDATE_SHARE] = threads, stages.share()

    def _do(
        self, stage: int, step: int = 0, at: Array | None = None, width: int = 0, slices: int = 0
    ) -> int:
        """See :func:`fastopt._kernels.stages.stage_call`."""
        place = 0 if at is None else address_of(at)
        arguments = self.records.context, stage, len(self.indices), step, place, width, slices
        with turn() if self.words[w.THREADS] > 1 else nullcontext():
            return self._stage(*arguments)

    def _measure(self) -> None:
        """Compute the norm of all gradients of all ranks, and the factor of the gradients."""
        sums, norm = np.zeros(len(self.indices)), self.records.norm
        self._do(stages.MEASURE, 0, sums)
        limit_norm(reduce(add, added(self.backend.ranks, sums).tolist(), 0.0), norm)
        norm[w.FACTOR] *= norm[w.SHARE]

    def _hyper(self) -> Numbers:
        """Hyper-parameters of each tensor, for comparison between ranks."""
        records, count = self.records, len(self.indices)
        rows = records.tensors[: count * w.TENSOR].reshape(count, w.TENSOR)[:, w.T_HYPER].tolist()
        known = {row.address: row for row in (*records.shared.values(), *records.rows.values())}
        used = list(dict.fromkeys(rows))
        values = [known[address].values[1 : 1 + len(known[address].names)] for address in used]
        numbers = {address: number for number, address in enumerate(used)}

        def describe() -> dict[str, str]:
            names = self.records.parameters.optimizer.idx2name
            return {
                f"{name} of {label(index, names)}": str(value)
                for index, row in zip(self.indices, rows, strict=True)
                for name, value in zip(known[row].names, values[numbers[row]].tolist(), strict=True)
            }

        return Numbers([np.array([numbers[row] for row in rows]), *values], describe)

    # Stages of the update

    def _commit(self, exchange: Exchange | None) -> None:
        """Update the tensors, bucket by bucket if elements do not depend on each other."""
        if exchange is not None:
            exchange.resume()
            if exchange.is_waiting and self._is_elementwise():
                self._start()
                for parts in exchange.parts():
                    if len(parts):
                        self._do(stages.PARTS, len(parts), parts)
                return
            exchange.receive()
        self._start()
        self._reduce()
        self._do(stages.UPDATE)

    def _is_elementwise(self) -> bool:
        """Whether elements can be updated in any portions; the same on all ranks."""
        if self.records.mode.defers:
            return False
        layouts = self.records.layouts(self.indices)
        return not any(one.rule.passes or one.rule.row or one.coded for one in layouts)

    def _start(self) -> None:
        """Count the step of each tensor."""
        self.words[w.DONE] = 1
        self._do(stages.START)
        self.words[w.ASKED] = self.words[w.EACH] = self.words[w.EXPECTED] = 0

    def _reduce(self) -> None:
        """Complete the reductions of all tensors, with the sums of all slices."""
        ranks = self.backend.ranks
        rules = {layout.rule for layout in self.records.layouts(self.indices)}
        width = max((sum for rule in rules for sum in rule.sums), default=0)
        for step in range(max((len(rule.passes) for rule in rules), default=0)):
            sums = np.zeros((len(self.indices), width))
            self._do(stages.REDUCE, step, sums, width)
            largest = any(step < len(r.passes) and r.passes[step].largest for r in rules)
            every = of_all(ranks, sums) if largest else added(ranks, sums)[None]
            self._do(stages.COMPLETE, step, every, width, len(every))


class RankBackend(Backend):
    """Backend of an updater whose tensors are the slices of one rank.

    Parameters
    ----------
    ranks : Ranks
        The ranks.

    Attributes
    ----------
    gate : Gate
        Agreement of the ranks on the current call.
    exchange : Exchange or None
        The gradients of the current call, if they may be on their way.
    """

    gate: Gate
    exchange: Exchange | None = None

    def __init__(self, ranks: Ranks) -> None:
        self.ranks = ranks

    def entry(self, records: object, front: Callable[..., int]) -> Callable[..., int]:
        """See :class:`Backend`."""
        alone = self.ranks.size == 1
        return front if alone else Stages(self, cast(RecordsLike, records), front)

    def check(self, optimizers: Sequence[OptimizerLike]) -> None:
        """Raise TypeError if an optimizer of groups computes with whole weights."""
        for optimizer in optimizers:
            if not optimizer.native:
                kind = type(optimizer).__name__
                raise TypeError(
                    f"groups: {kind} overrides update(), and groups on ranks need optimizers with "
                    f"a rule: use a separate ShardedUpdater for the weights of {kind}"
                )

    def receive(self) -> None:
        """Agree, before sums over all ranks, and wait for the sums of the gradients."""
        self.gate.add()
        if self.exchange is not None:
            self.exchange.receive()

    def added(self, sums: Array) -> Array:
        """See :class:`Backend`."""
        return added(self.ranks, sums)

    def owned(self, optimizer: OptimizerLike, calls: Sequence[Call]) -> Sequence[Call]:
        """Count all updates, and return those of tensors that this rank owns."""
        if self.ranks.size > 1:  # ranks compare counts, which have the order of the call on each
            counts, indices = optimizer._index_update_count, [call[0] for call in calls]
            counts.slots(indices, optimizer.begin_num_update)
        for index, weight, *_ in calls:
            if not weight.size:
                optimizer._update_count(index)
        return [call for call in calls if call[1].size]
