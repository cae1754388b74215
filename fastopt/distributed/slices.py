"""Slices of weights on this rank, gathered into whole weights, also with their averages."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any

import numpy as np

from fastopt._engine.mixed_precision import round_into
from fastopt._engine.validate import check_index
from fastopt._interrupts import uninterrupted
from fastopt._updater.averaged import leading
from fastopt.checkpoint.restore.placement import Placement
from fastopt.distributed.collectives import gathered_together
from fastopt.distributed.plan import flat
from fastopt.distributed.ranks import Ranks
from fastopt.optimizer.optimizer import Array, Index

NOTHING: Mapping[Index, Placement] = MappingProxyType({})


class Slices:
    """Slices of some weights on this rank, from which the whole weights are gathered.

    Parameters
    ----------
    sharded : ShardedUpdater
        The updater.
    weights : mapping of index to numpy.ndarray
        The weights, with the same indices on all ranks.
    own : mapping of index to numpy.ndarray, optional
        Slices of this rank. Default: those of the weights.
    placements : mapping of index to Placement, optional
        Placements of weights that the updater has not updated.
    """

    def __init__(
        self,
        sharded: Any,
        weights: Mapping[Index, Array],
        own: Mapping[Index, Array] | None = None,
        placements: Mapping[Index, Placement] = NOTHING,
    ) -> None:
        self.ranks: Ranks = sharded._ranks
        self.limit: int = sharded.bucket_bytes
        self.weights = dict(weights)
        self.copies = {i: sharded._copies[i] for i in weights if i in sharded._copies}
        if own is None:
            known = {**sharded.placements, **placements}
            cuts = ((i, known[i], flat(weight)) for i, weight in weights.items())
            own = {i: place.slice_of(each, sharded.rank) for i, place, each in cuts}
        self.own = {index: np.asarray(each, order="C") for index, each in own.items()}

    def gather(self) -> None:
        """Write the slices of all ranks to the weights and their copies; collective."""
        for group in _batches(self.weights, self.limit):
            flats = [self.own[index].reshape(-1) for index in group]
            elements, _ = gathered_together(self.ranks, flats)
            for index, each in zip(group, elements, strict=True):
                weight = self.weights[index]
                weight[...] = each.reshape(weight.shape)
        for index, copy in self.copies.items():
            round_into(copy, self.weights[index])

    @contextmanager
    def averaged(self, shard: Any) -> Iterator[None]:
        """Context in which the weights hold their averages; they are restored without messages."""
        arrays = [*self.weights.values(), *self.copies.values()]
        known = shard._averages.arrays if shard._averages is not None else leading(shard)
        given = {index: own for index, own in self.own.items() if index in known}
        with shard.averaged(given):
            before = [array.copy() for array in arrays]
            try:
                self.gather()
                yield
            finally:
                with uninterrupted:
                    for array, values in zip(arrays, before, strict=True):
                        array[...] = values


def by_index(weights: Mapping[Any, Array] | None) -> dict[Index, Array]:
    """Arrays by checked index."""
    return {check_index(index): array for index, array in (weights or {}).items()}


def _batches(arrays: Mapping[Index, Array], limit: int) -> Iterator[list[Index]]:
    """Indices of arrays in order, in groups of at least `limit` bytes."""
    group: list[Index] = []
    for index in arrays:
        group.append(index)
        if sum(arrays[each].nbytes for each in group) >= limit:
            yield group
            group = []
    if group:
        yield group
