"""How the tensors of a call are cut, packed into buckets and put together again."""

from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate, zip_longest
from typing import Any

import numpy as np

from fastopt.kernels.layout import real_of
from fastopt.mpi.placement import Placement
from fastopt.optimizer.base import Array, Index

__all__ = ["Bucket", "Group", "Part", "Plan", "flat"]

Part = tuple[int, int, int]
"""Place of a tensor in the list of the call, first element, and the one after the last."""


def flat(array: Any) -> Any:
    """The elements in C order, to be sliced and assigned to: a view where that is possible."""
    array = np.asarray(array)
    return array.reshape(-1) if array.flags.carray else array.flat


class Bucket:
    """Parts of the shares of all ranks that travel together.

    Parameters
    ----------
    group : Group
        What it is of.
    parts : sequence of list of Part
        What it holds of each rank's share.
    first : int
        Place of its first element in the share of this rank.
    """

    def __init__(self, group: "Group", parts: Sequence[list[Part]], first: int) -> None:
        self.group = group
        self.parts = parts
        self.counts = [sum(last - first for _, first, last in own) for own in parts]
        self.starts = [0, *accumulate(self.counts)]
        self.first = first

    def own(self, rank: int) -> tuple[int, int]:
        """Where it begins and ends in the share of this rank."""
        return self.first, self.first + self.counts[rank]


class Group:
    """The tensors of one dtype: the share of this rank, with its gradients, and the buckets.

    Parameters
    ----------
    dtype : numpy.dtype
        Dtype of the weights; gradients are summed in that of the arithmetic.
    places : list of int
        Which tensors of the call they are.
    """

    def __init__(self, dtype: Any, places: list[int]) -> None:
        self.dtype = np.dtype(dtype)
        self.real = np.dtype(real_of(self.dtype))
        self.places = places
        self.grads = np.empty(0, self.real)

    def cut(self, placements: Sequence[Placement], rank: int, ranks: int, limit: int) -> None:
        """Make the buckets, of at most so many bytes of gradients each, and the own share."""
        shares: list[list[Part]] = [[] for _ in range(ranks)]
        for place in self.places:
            for owner, first, last in placements[place].owners(ranks):
                shares[owner].append((place, first, last))
        self.share = shares[rank]
        step = max(limit // (ranks * self.real.itemsize), 1)
        windows = zip_longest(*(_windows(parts, step) for parts in shares), fillvalue=[])
        self.buckets = [Bucket(self, parts, k * step) for k, parts in enumerate(windows)]
        self.grads = np.empty(sum(last - first for _, first, last in self.share), self.real)


def _windows(parts: Sequence[Part], step: int) -> Iterator[list[Part]]:
    """Cut parts that follow each other every `step` elements."""
    window: list[Part] = []
    room = step
    for place, first, last in parts:
        while last - first >= room:
            window.append((place, first, first + room))
            yield window
            window, first, room = [], first + room, step
        if first < last:
            window.append((place, first, last))
            room -= last - first
    if window:
        yield window


class Plan:
    """A list call on all ranks: slices of weights, gradients for them, and buckets.

    Parameters
    ----------
    indices : list of int or str
        The parameters, each once.
    weights : list of numpy.ndarray
        Their weights.
    placements : mapping
        Placement of each index.
    rank, ranks : int
        This rank, and the number of ranks.
    limit : int
        Bytes of gradients in a bucket.
    """

    def __init__(
        self,
        indices: list[Index],
        weights: list[Array],
        placements: Mapping[Index, Placement],
        rank: int,
        ranks: int,
        limit: int,
    ) -> None:
        self.indices, self.weights = indices, weights
        self.placements = [placements[index] for index in indices]
        self._seen = [_identity(weight) for weight in weights]
        self.flats = [flat(weight) for weight in weights]
        self.copied = {k for k, each in enumerate(self.flats) if not isinstance(each, np.ndarray)}
        by_dtype: dict[Any, list[int]] = {}
        for place, weight in enumerate(weights):
            by_dtype.setdefault(weight.dtype, []).append(place)
        self.groups = [Group(dtype, places) for dtype, places in by_dtype.items()]
        self.slices: list[Array] = [np.empty(0)] * len(weights)
        self.grads: list[Array] = [np.empty(0)] * len(weights)
        for group in self.groups:
            group.cut(self.placements, rank, ranks, limit)
            self._enter(group, rank)
        self.buckets = [bucket for group in self.groups for bucket in group.buckets]
        self.work: tuple[Any, ...] = ()  # what the exchange remembers of the last call
        self._spare: list[Array] = []
        self._room = max([b.starts[-1] * b.group.real.itemsize for b in self.buckets], default=0)

    def _enter(self, group: Group, rank: int) -> None:
        """Make the slices of this rank, and gradients for them."""
        position = 0
        for place in group.places:
            placement = self.placements[place]
            (first, last), shape = placement.part(rank), placement.slice_shape(rank)
            self.slices[place] = self.flats[place][first:last].reshape(shape)
            end = position + last - first
            self.grads[place] = group.grads[position:end].reshape(shape)
            position = end

    def holds(self, indices: list[Index], weights: list[Any]) -> bool:
        """Whether it was made for these indices and weights, which are where they were."""
        return (
            indices == self.indices
            and all(a is b for a, b in zip(weights, self.weights, strict=True))
            and [_identity(weight) for weight in weights] == self._seen
        )

    def borrow(self, bucket: Bucket, dtype: Any) -> Array:
        """Memory for a bucket of numbers of this dtype, until it is given back."""
        memory = self._spare.pop() if self._spare else np.empty(self._room, np.uint8)
        return memory[: bucket.starts[-1] * dtype.itemsize].view(dtype)

    def give_back(self, memory: Array) -> None:
        """Let memory be borrowed again."""
        base: Any = memory.base
        self._spare.append(base)

    def refresh(self, rank: int) -> None:
        """Copy slices again of weights that are not contiguous, of which there are no views."""
        for place in self.copied:
            first, last = self.placements[place].part(rank)
            own = self.slices[place]
            own[...] = self.flats[place][first:last].reshape(own.shape)


def _identity(weight: Array) -> tuple[Any, ...]:
    header = weight.__array_interface__
    return header["data"][0], header["strides"], weight.shape, weight.dtype
