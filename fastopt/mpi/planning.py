"""Planning of a list call: validation of its arguments, and facts that ranks compare."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from fastopt._engine.mixed_precision import check_copy
from fastopt._engine.overlap import Addresses, Ranges, addresses, bounds
from fastopt._engine.validate import as_lists, check, check_index, label
from fastopt.amp import LossScaler
from fastopt.checkpoint.placement import Form, Placement, line_bytes, placed
from fastopt.mpi.agreement import Fact, Facts, Numbers
from fastopt.mpi.checksum import checksums
from fastopt.mpi.guards import comparer
from fastopt.mpi.job import leader_first
from fastopt.mpi.packing import copier
from fastopt.mpi.plan import Plan, flat
from fastopt.mpi.resumable import Resumable
from fastopt.optimizer import Optimizer
from fastopt.optimizer.optimizer import Array, Index
from fastopt.sparse import RowSparse

__all__ = ["Planning"]


class Planning(Resumable):
    """Abstract base of :class:`~fastopt.mpi.ShardedUpdater`, which documents the arguments."""

    def __init__(
        self,
        optimizer: Optimizer,
        comm: Any,
        loss_scaler: LossScaler | None,
        clip_global_norm: float | None,
        bucket_bytes: int | None,
        timeout: float | None,
        check_every: int,
        wire: Any,
        overlap: bool,
    ) -> None:
        super().__init__(optimizer, comm, loss_scaler, clip_global_norm, timeout)
        self.wire, self.overlap = wire, overlap
        self.bucket_bytes = bucket_bytes or line_bytes(self.ranks)
        self.check_every = check_every
        self._plan: Plan | None = None
        self._given: Addresses | None = None
        """Addresses of the gradients of the current call, if they fit the plan as they are."""
        self._turns: dict[Index, int] = {}
        self._unsure: set[Index] = set()
        self._copies: dict[Index, Array] = {}
        leader_first(self._node, lambda: (addresses([]), copier(), comparer()))

    def _planned(
        self, index: Any, grad: Any, weight: Any
    ) -> tuple[Plan, list[Any], dict[Index, Placement]]:
        """Return the plan, gradients, and placements of new indices.

        Gradients are flat unless they fit the plan.
        """
        plan, new = self._plan, dict[Index, Placement]()
        if isinstance(index, (list, tuple)):
            index, grads, weights = as_lists(index, grad, weight)
            if plan is not None and plan.has(index):
                indices = plan.indices
            else:
                indices = [check_index(each) for each in index]
        else:
            indices, grads, weights = [check_index(index)], [grad], [weight]
        self._given = None
        if plan is not None and indices == plan.indices and not self._copies:
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
            _check_apart(indices, weights, self.optimizer.idx2name)
            new = self._placed(indices, weights, listed)
            places, limit = self.placements | new, self.bucket_bytes
            shape = self.rank, self.ranks, limit
            plan = Plan(indices, weights, places, *shape, listed, self.wire, self.overlap)
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
        words, copy = label(index, self.optimizer.idx2name), self._copies.get(index)
        _check_numpy(words, "weight", weight)
        grad = check(words, weight, grad, copy)
        _check_numpy(words, "gradient", grad.values if isinstance(grad, RowSparse) else grad)
        if isinstance(grad, RowSparse) and not self.optimizer.native:
            grad = self.optimizer.dense_gradient(index, weight, grad)
            grad = grad.to_dense() if isinstance(grad, RowSparse) else grad
        if copy is not None:
            check_copy(words, weight, copy)
        placement = self.placements.get(index)
        if placement and (placement.shape, placement.dtype) != (weight.shape, weight.dtype.name):
            raise ValueError(
                f"{words}: state is kept for shape {placement.shape} and {placement.dtype}, got a "
                f"weight of shape {weight.shape} and {weight.dtype}"
            )
        if placement and placement.form == "flat" and isinstance(grad, RowSparse):
            raise TypeError(
                f"{words}: the state was sharded by element, as the first gradient was dense; pass "
                "a row-sparse gradient first if later ones can be row-sparse"
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
        coded = self._is_coded(shape)
        if not self.optimizer.native or (coded and len(shape) < 2):
            return "whole"
        rule = self.optimizer.rule_for(index)
        return "rows" if listed or coded or (rule and rule.row) else "flat"

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
                words = f"{label(index, names)} of shape {placement.shape} and {placement.dtype}"
                listed = plan.listed.get(k)
                rows = f", with a gradient that lists rows of {listed}" if listed else ""
                compared[f"tensor {k}"] = words + rows
            plan.facts = Facts(compared)
        facts: list[Fact] = [plan.facts, self._values(plan, new)]
        if not self.optimizer.native:
            facts.append(self._fingerprint.rates(plan.indices))
        return facts

    def _values(self, plan: Plan, new: dict[Index, Placement]) -> Numbers:
        """Checksums of new and loaded weights, and of a fraction of the other weights."""
        unsure = new.keys() | self._unsure
        indices = plan.indices if unsure else []
        parts = [(k, 0, plan.sizes[k]) for k, i in enumerate(indices) if i in unsure]
        if self.check_every:
            windows = plan.windows(self.check_every)
            turn = self._turns.get(plan.indices[0], 0) % self.check_every if windows else 0
            parts += windows[turn] if turn < len(windows) else []
        sums = [checksums(plan.flats[k][first:last]) for k, first, last in parts]

        def in_words() -> dict[str, str]:
            names = self.optimizer.idx2name
            return {
                f"checksum of values {first} to {last} of {label(plan.indices[k], names)}": hex(
                    Numbers([found], dict).digest
                )
                for (k, first, last), found in zip(parts, sums, strict=True)
            }

        return Numbers(sums, in_words)


def _check_numpy(words: str, role: str, array: Any) -> None:
    """Raise TypeError for arrays of other libraries, such as those on CUDA devices."""
    if not isinstance(array, (np.ndarray, np.generic)):
        kind = type(array).__name__
        raise TypeError(f"{words}: {role} must be a NumPy array with fastopt.mpi, got {kind}")


def _fits(grad: Any, weight: Array) -> bool:
    """Whether a gradient certainly matches a known weight."""
    return type(grad) is np.ndarray and grad.dtype is weight.dtype and grad.shape == weight.shape


def _check_apart(indices: Sequence[Index], weights: Sequence[Array], names: dict[Any, str]) -> None:
    """Raise ValueError if an index is repeated or two weights share memory."""
    seen: set[Index] = set()
    for index in indices:
        if index in seen:
            raise ValueError(f"{label(index, names)} is in the list twice")
        seen.add(index)
    for k, other in Ranges(*bounds(weights)).overlapping():
        if np.shares_memory(weights[k], weights[other]):
            raise ValueError(f"{label(indices[other], names)} shares memory with {indices[k]!r}")
