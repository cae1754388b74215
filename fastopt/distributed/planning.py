"""What ranks check and plan before a call of a sharded updater, and what they compare.

Tests: ``tests/distributed/``, ``tests/mpi/``.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from fastopt._engine.mixed_precision import check_copy
from fastopt._engine.overlap import Addresses, Ranges, bounds
from fastopt._engine.validate import as_lists, check, check_index, label
from fastopt.checkpoint.restore.placement import Form, Placement, placed
from fastopt.distributed.agreement import Fact, Facts, Numbers
from fastopt.distributed.plan import Plan, flat
from fastopt.distributed.resumable import Resumable
from fastopt.optimizer.optimizer import Array, Index
from fastopt.sparse import RowSparse

LISTS = 16
"""Maximum number of lists of several indices whose plans are kept."""


class Planning(Resumable):
    """Abstract base of :class:`~fastopt.distributed.ShardedUpdater`: the plans of its calls."""

    hierarchical: bool
    overlap: bool
    wire: Any
    check_every: int
    _given: Addresses | None
    """Addresses of the gradients of the current call, if they fit the plan as they are."""
    _last: Plan | None
    _turns: dict[Index, int]
    bucket_bytes: int
    _plan: Plan | None
    _plans: dict[tuple[Index, ...], Plan]
    _unsure: set[Index]
    """Parameters whose weights ranks compare in the next update."""
    _copies: dict[Index, Array]
    _latest: dict[Index, Array]
    """Weight of the last call of each parameter."""

    def _planned(
        self, index: Any, grad: Any, weight: Any
    ) -> tuple[Plan, list[Any], dict[Index, Placement]]:
        """Return the plan, gradients, and placements of new indices.

        Gradients are flat unless they fit the plan.
        """
        new = dict[Index, Placement]()
        if isinstance(index, (list, tuple)):
            index, grads, weights = as_lists(index, grad, weight)
        else:
            index, grads, weights = [index], [grad], [weight]
        plan = self._plan
        if plan is None or not plan.has(index):
            index = [check_index(each) for each in index]
            plan = self._plans.get(tuple(index))
        indices = index if plan is None else plan.indices
        self._given = None
        if plan is not None and not self._copies:
            self._given = plan.fit(indices, grads, weights)
            if self._given is not None:
                return plan, grads, new
        known = plan is not None and plan.is_for(indices, weights)
        quick = known and not self._copies
        grads = [
            grad if quick and _fits(grad, weight) else self._check(index, grad, weight)
            for index, grad, weight in zip(indices, grads, weights, strict=True)
        ]
        listed = {k: g.dtype.name for k, g in enumerate(grads) if isinstance(g, RowSparse)}
        if plan is None or not known or plan.listed != listed:
            check_apart(indices, weights, self.optimizer.idx2name)
            new = self._placed(indices, weights, listed)
            places, limit = self.placements | new, self.bucket_bytes
            shape = self.rank, self.ranks, limit
            wire = None if self.hierarchical else self.wire
            plan = Plan(indices, weights, places, *shape, listed, wire, self.overlap)
            for index in new.keys() & self.uncut.keys():
                self._cut(index, new[index])  # raises if it does not match
        values = [g.values if isinstance(g, RowSparse) else np.asarray(g) for g in grads]
        self._check_not_shared(plan, values)
        return plan, [g if k in listed else flat(g) for k, g in enumerate(grads)], new

    def _check_not_shared(self, plan: Plan, values: Sequence[Array]) -> None:
        """Raise ValueError if a gradient shares memory with a weight."""
        if shared := plan.shared(values):
            one, other = (label(plan.indices[k], self.optimizer.idx2name) for k in shared)
            raise ValueError(f"{one}: gradient shares memory with the weight of {other}")

    def _check(self, index: Index, grad: Any, weight: Any) -> Any:
        """Return the checked gradient; raise TypeError or ValueError for an invalid tensor."""
        context, copy = label(index, self.optimizer.idx2name), self._copies.get(index)
        check_numpy(context, "weight", weight)
        grad = check(context, weight, grad, copy)
        check_numpy(context, "gradient", grad.values if isinstance(grad, RowSparse) else grad)
        if isinstance(grad, RowSparse) and not self.optimizer.native:
            grad = self.optimizer.dense_gradient(index, weight, grad)
            grad = grad.to_dense() if isinstance(grad, RowSparse) else grad
        if copy is not None:
            check_copy(context, weight, copy)
        placement = self.placements.get(index)
        if placement and (placement.shape, placement.dtype) != (weight.shape, weight.dtype.name):
            raise ValueError(
                f"{context}: state is kept for shape {placement.shape} and {placement.dtype}, got "
                f"a weight of shape {weight.shape} and {weight.dtype}"
            )
        if isinstance(grad, RowSparse) and weight.ndim < 2 and self.shard.clip_adaptive is not None:
            raise TypeError(
                f"{context}: clip_adaptive needs a dense gradient of a weight of one dimension, "
                "which is one unit"
            )
        if placement and placement.form == "flat" and isinstance(grad, RowSparse):
            raise TypeError(
                f"{context}: the state was sharded by element, as the first gradient was dense; "
                "pass a row-sparse gradient first if later ones can be row-sparse"
            )
        return grad

    def _placed(
        self, indices: Sequence[Index], weights: Sequence[Array], listed: dict[int, str]
    ) -> dict[Index, Placement]:
        """Placements of the indices that do not have one yet."""
        new = (
            (index, weight.shape, weight.dtype.name, self._form(index, weight.shape, k in listed))
            for k, (index, weight) in enumerate(zip(indices, weights, strict=True))
            if index not in self.placements
        )
        return placed(new, self.ranks)

    def _form(self, index: Index, shape: tuple[int, ...], listed: bool) -> Form:
        coded, clips = self._is_coded(index, shape), self.shard.clip_adaptive is not None
        if clips and len(shape) < 2:
            return "whole"
        if not self.optimizer.native or (coded and len(shape) < 2):
            return "whole"
        rule = self.shard.of(index).rule_for(index)
        return "rows" if listed or coded or clips or (rule and rule.row) else "flat"

    def _facts(self, plan: Plan, new: dict[Index, Placement]) -> list[Fact]:
        """Facts about a call that all ranks must have in common, besides the optimizer."""
        if plan.facts is None:
            names = self.optimizer.idx2name
            wire = None if self.wire is None else self.wire.name
            compared = {
                "tensors": str(len(plan.indices)),
                "bucket_bytes": str(self.bucket_bytes),
                "wire": str(wire),
                "overlap": str(self.overlap),
            }
            for k, (index, placement) in enumerate(zip(plan.indices, plan.placements, strict=True)):
                description = (
                    f"{label(index, names)} of shape {placement.shape} and {placement.dtype}"
                )
                listed = plan.listed.get(k)
                rows = f", with a row-sparse gradient of {listed}" if listed else ""
                compared[f"tensor {k}"] = description + rows
            plan.facts = Facts(compared)
        facts: list[Fact] = [plan.facts, self._values(plan, new)]
        if self._unchecked:
            facts.append(Facts(self._unchecked))
        if not self.optimizer.native:
            facts.append(self._fingerprints[0].rates(plan.indices))
        return facts

    def _values(self, plan: Plan, new: dict[Index, Placement]) -> Numbers:
        """Checksums of new and loaded weights, and of a fraction of the other weights."""
        unsure = new.keys() | self._unsure
        indices = enumerate(plan.indices if unsure else ())
        spans = plan.whole([k for k, index in indices if index in unsure])
        windows = plan.windows(self.check_every) if self.check_every else []
        if windows:
            turn = self._turns.get(plan.indices[0], 0)
            spans = np.concatenate([spans, windows[turn % len(windows)]])
        sums = plan.checksums(spans)

        def in_words() -> dict[str, str]:
            names, pairs = self.optimizer.idx2name, zip(spans.tolist(), sums.tolist(), strict=True)
            return {
                f"checksum of values {first} to {last} of {label(plan.indices[k], names)}": hex(
                    found
                )
                for (k, first, last), found in pairs
            }

        return Numbers([sums], in_words)

    def _keep(self, plan: Plan) -> None:
        """Keep the plan of a call; drop the plan of the oldest list if there are too many."""
        if self._plans.get(plan.key) is not plan:
            lists = [key for key in self._plans if len(key) > 1 and key != plan.key]
            if len(lists) >= LISTS:
                del self._plans[lists[0]]
            self._plans[plan.key] = plan
        if plan is not self._plan:
            self._latest.update(zip(plan.indices, plan.weights, strict=True))
        self._plan = self._last = plan


def check_numpy(context: str, role: str, array: Any) -> None:
    """Raise TypeError for arrays of other libraries, such as those on CUDA devices."""
    if not isinstance(array, (np.ndarray, np.generic)):
        kind = type(array).__name__
        raise TypeError(f"{context}: {role} must be a NumPy array in a sharded updater, got {kind}")


def _fits(grad: Any, weight: Array) -> bool:
    """Whether a gradient certainly matches a known weight."""
    return type(grad) is np.ndarray and grad.dtype is weight.dtype and grad.shape == weight.shape


def check_apart(indices: Sequence[Index], weights: Sequence[Array], names: dict[Any, str]) -> None:
    """Raise ValueError if an index is repeated or two weights share memory."""
    seen: set[Index] = set()
    for index in indices:
        if index in seen:
            raise ValueError(f"{label(index, names)} is in the list twice")
        seen.add(index)
    for k, other in Ranges(*bounds(weights)).overlapping():
        if np.shares_memory(weights[k], weights[other]):
            raise ValueError(f"{label(indices[other], names)} shares memory with {indices[k]!r}")
