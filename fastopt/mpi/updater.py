"""The sharded updater: data-parallel training with state that exists once over all ranks."""

import zlib
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from fastopt.amp import LossScaler
from fastopt.arguments import count
from fastopt.mpi.agreement import Facts, attempt
from fastopt.mpi.exchange import Exchange
from fastopt.mpi.placement import Form, Placement, placed
from fastopt.mpi.plan import Plan, flat
from fastopt.mpi.sharded import Sharded
from fastopt.optimizer import Optimizer
from fastopt.optimizer.base import Array, Index
from fastopt.optimizer.border import check, check_index, check_like, label
from fastopt.optimizer.planning import round_into
from fastopt.sparse import HALVES, RowSparse

__all__ = ["ShardedUpdater"]

BUCKET = 1 << 22
"""Bytes of gradients that travel together, unless the user says otherwise."""


class ShardedUpdater(Sharded):
    r"""Updater for data-parallel training on many processes, each of which keeps a share of state.

    All ranks have all weights, and gradients of their own part of a batch. In a call

    .. math::
        g &= \textstyle\sum_r g_r \\
        (w_r, s_r) &\leftarrow \mathrm{update}(w_r, g_{(r)}, s_r)

    the gradients of all ranks are summed, each rank updates its slices :math:`w_r` of the weights
    with its share :math:`s_r` of the state, and all ranks receive the new weights. Sums are those
    of the arithmetic: float32 for weights of half precision. To divide by a batch, `rescale_grad`
    of the optimizer is one over the number of examples on all ranks together.

    Tensors of one dtype are laid out in a line that is cut into equal shares, one for each rank;
    GroupAdaGrad's are cut between rows, and an optimizer with an ``update()`` in NumPy has whole
    tensors, each on one rank. Gradients travel in buckets: while one is summed, another is packed
    and a third updated, unless all must be there first, as for the norms of LARS, LAMB and LANS,
    `clip_global_norm` or `loss_scaler`.

    Source: Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter
    Models", SC 2020, arXiv:1910.02054, stage 1.

    Parameters
    ----------
    optimizer : Optimizer
        Decides how to update; the same on all ranks.
    comm : mpi4py.MPI.Comm
        The ranks; all of them make the updater, and call it, together.
    loss_scaler : fastopt.amp.LossScaler, optional
        See :class:`~fastopt.optimizer.Updater`; all ranks skip a step or none does.
    clip_global_norm : float, optional
        Largest norm of the gradients, which have been summed.
    bucket_bytes : int
        Bytes of gradients in a bucket. Default 4 MiB.

    Attributes
    ----------
    info : fastopt.amp.StepInfo
        What the last call did, the same on all ranks.
    states : dict
        State of this rank's slice of each parameter.
    seconds : dict
        Time that the last call spent on ``packing``, ``communication`` and ``update``.

    Raises
    ------
    TypeError, ValueError
        An argument is not what it must be.

    Examples
    --------
    On one rank; ``mpiexec -n 4`` shares the work among four.

    >>> import numpy as np
    >>> from mpi4py import MPI
    >>> from fastopt import optimizer
    >>> from fastopt.mpi import ShardedUpdater
    >>> updater = ShardedUpdater(optimizer.SGD(learning_rate=0.1), MPI.COMM_WORLD)
    >>> weight = np.ones(3, np.float32)
    >>> updater(0, np.full(3, 2, np.float32), weight)
    >>> weight
    array([0.8, 0.8, 0.8], dtype=float32)
    """

    def __init__(
        self,
        optimizer: Optimizer,
        comm: Any,
        loss_scaler: LossScaler | None = None,
        clip_global_norm: float | None = None,
        bucket_bytes: int = BUCKET,
    ) -> None:
        self.bucket_bytes = count("bucket_bytes", bucket_bytes)
        super().__init__(optimizer, comm, loss_scaler, clip_global_norm)
        self.seconds: dict[str, float] = {}
        self._plan: Plan | None = None
        self._copies: dict[Index, Array] = {}
        self._masters: dict[Index, Array] = {}

    def __call__(self, index: Any, grad: Any, weight: Any) -> None:
        """Update weights with the sums of all ranks' gradients.

        Parameters
        ----------
        index : int, str or bytes, or a list of them
            The parameters, the same on all ranks.
        grad : numpy.ndarray, or a list of them
            Gradients of this rank; they are not changed.
        weight : numpy.ndarray, or a list of them
            The weights, equal on all ranks. Changed in place.

        Raises
        ------
        TypeError, ValueError
            The arguments do not fit together on some rank, or differ between ranks, or an index
            comes twice. All ranks raise it, and no weight, state or count changes.
        """
        with self.optimizer.lock:
            found, error = attempt(self._planned, index, grad, weight)
            self._agree("update", self._facts(found[0], found[2]) if found else {}, error)
            plan, grads, new = found
            exchange = Exchange(self.shard.sums, plan, grads)
            if new:
                self._compile(
                    (i, place, w.dtype, False)
                    for i, w, place in zip(plan.indices, plan.weights, plan.placements, strict=True)
                    if i in new
                )
            self._exchange(exchange, plan, new)

    def _exchange(self, exchange: Exchange, plan: Plan, new: dict[Index, Placement]) -> None:
        """Update the slices of this rank, and all weights with those of the others."""
        optimizer = self.optimizer
        for index, placement in zip(plan.indices, plan.placements, strict=True):
            optimizer.offsets[index] = first = placement.cut(self.rank)
            if index in self._masters and index not in self.states:
                given = flat(self._masters[index])[first : placement.cut(self.rank + 1)]
                shape = placement.slice_shape(self.rank)
                optimizer.masters_given[index] = given.reshape(shape)
        plan.refresh(self.rank)
        with self._launching(exchange.launch, exchange.receive):
            try:
                if not optimizer.plain:  # it may launch what has gradients of its own
                    exchange.receive()
                self.shard(plan.indices, plan.grads, plan.slices)
            except BaseException:
                exchange.receive()
                raise
        exchange.receive()
        self.placements.update(new)
        if self.info.stepped:
            exchange.finish()
            self._follow(plan)
        self.seconds = exchange.seconds
        self._plan = plan

    def _follow(self, plan: Plan) -> None:
        """Round the copies of weights, and forget masters that have been taken over."""
        for index, weight in zip(plan.indices, plan.weights, strict=True):
            self._masters.pop(index, None)
            if index in self._copies:
                round_into(self._copies[index], weight)

    # Plans

    def _planned(
        self, index: Any, grad: Any, weight: Any
    ) -> tuple[Plan, list[Any], dict[Index, Placement]]:
        """Plan, flat gradients, and placements of indices that are new."""
        if isinstance(index, (list, tuple)):
            indices = [check_index(each) for each in index]
            grads, weights = _lists(len(indices), grad, weight)
        else:
            indices, grads, weights = [check_index(index)], [grad], [weight]
        for i, gradient, w in zip(indices, grads, weights, strict=True):
            self._check(i, gradient, w)
        plan, new = self._plan, dict[Index, Placement]()
        if plan is None or not plan.holds(indices, weights):
            _check_apart(indices, weights, self.optimizer.idx2name)
            new = self._placed(indices, weights)
            known = self.placements | new
            plan = Plan(indices, weights, known, self.rank, self.ranks, self.bucket_bytes)
        return plan, [flat(gradient) for gradient in grads], new

    def _check(self, index: Index, grad: Any, weight: Any) -> None:
        """Raise TypeError or ValueError if a tensor is not what it must be."""
        words, copy = label(index, self.optimizer.idx2name), self._copies.get(index)
        if isinstance(check(words, weight, grad, copy), RowSparse):
            raise TypeError(
                f"{words}: gradients must be dense; tables whose gradients list rows are for "
                "ShardedTable"
            )
        if copy is not None:
            self.optimizer._check_copy(words, weight, copy)
        placement = self.placements.get(index)
        if placement and (placement.shape, placement.dtype) != (weight.shape, weight.dtype.name):
            raise ValueError(
                f"{words}: state is kept for shape {placement.shape} and {placement.dtype}, got a "
                f"weight of shape {weight.shape} and {weight.dtype}"
            )

    def _placed(self, indices: Sequence[Index], weights: Sequence[Array]) -> dict[Index, Placement]:
        """Placements of the indices that have none."""
        new = [(i, w) for i, w in zip(indices, weights, strict=True) if i not in self.placements]
        return placed(((i, w.shape, w.dtype.name, self._form(i)) for i, w in new), self.ranks)

    def _form(self, index: Index) -> Form:
        if not self.optimizer.native:
            return "whole"
        rule = self.optimizer._rule_of(index)
        return "rows" if rule and rule.row else "flat"

    def _facts(self, plan: Plan, new: dict[Index, Placement]) -> Facts:
        """What a call must have in common on all ranks."""
        names, facts = self.optimizer.idx2name, {"tensors": str(len(plan.indices))}
        for k, (index, placement) in enumerate(zip(plan.indices, plan.placements, strict=True)):
            words = f"{label(index, names)} of shape {placement.shape} and {placement.dtype}"
            if index in new:
                words += f" with values of CRC32 {_crc(plan.weights[k])}"
            facts[f"tensor {k}"] = words
        return {**facts, "bucket_bytes": str(self.bucket_bytes)}

    # Masters and copies

    def set_master(self, index: Any, array: Array) -> None:
        """Give the float32 master of a half-precision weight its values, on all ranks.

        Takes the whole array on each rank; see :meth:`fastopt.optimizer.Updater.set_master`.
        """
        index = check_index(index)
        placement = self.placements.get(index)
        if placement is None or index not in self.states:
            words = label(index, self.optimizer.idx2name)
            check_like(words, "master", array, ("float32",), np.shape(array), written=False)
            if not self.optimizer.multi_precision:
                raise ValueError(f"{words}: a master needs an optimizer with multi_precision=True")
            self._masters[index] = array.copy()
            return
        if array.shape != placement.shape:
            words = label(index, self.optimizer.idx2name)
            raise ValueError(
                f"{words}: master must have shape {placement.shape}, got {array.shape}"
            )
        first, last = placement.part(self.rank)
        own = flat(array)[first:last].reshape(placement.slice_shape(self.rank))
        self.shard.set_master(index, own)

    def set_copy(self, index: Any, array: Array | None) -> None:
        """Keep a half-precision copy of a float32 weight on this rank: each update writes it too.

        See :meth:`fastopt.optimizer.Updater.set_copy`.
        """
        index = check_index(index)
        if array is None:
            self._copies.pop(index, None)
            return
        words = label(index, self.optimizer.idx2name)
        check_like(words, "copy", array, HALVES, np.shape(array))
        self._copies[index] = array


def _lists(number: int, grads: Any, weights: Any) -> tuple[list[Any], list[Any]]:
    for role, given in (("gradients", grads), ("weights", weights)):
        if not isinstance(given, (list, tuple)) or len(given) != number:
            raise TypeError(f"a list of {number} indices needs a list of as many {role}")
    return list(grads), list(weights)


def _check_apart(indices: Sequence[Index], weights: Sequence[Array], names: dict[Any, str]) -> None:
    """Raise ValueError if an index comes twice or two weights share memory."""
    seen: set[Index] = set()
    for index in indices:
        if index in seen:
            raise ValueError(f"{label(index, names)} comes twice in the list")
        seen.add(index)
    bounds = sorted((*np.lib.array_utils.byte_bounds(w), k) for k, w in enumerate(weights))
    for (_, end, k), (begin, _, other) in pairwise(bounds):
        if begin < end and np.shares_memory(weights[k], weights[other]):
            raise ValueError(f"{label(indices[other], names)} shares memory with {indices[k]!r}")


def _crc(weight: Array) -> int:
    return zlib.crc32(np.ascontiguousarray(weight).reshape(-1).view(np.uint8).data)
