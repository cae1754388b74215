"""Counts of updates in one array, behind a dictionary's face."""

from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["Counts"]

Index = int | str


class Counts(MutableMapping[Index, int]):
    """Number of updates of each index: a mapping whose values are in one int64 array.

    Parameters
    ----------
    counts : mapping of int or str to int
        Counts to begin with.
    """

    def __init__(self, counts: Mapping[Index, int] | None = None) -> None:
        given = dict(counts or {})
        self._places: dict[Index, int] = {index: k for k, index in enumerate(given)}
        self._used = len(given)
        self.array: NDArray[np.int64] = np.array([*given.values()], np.int64)
        self.deletions = 0

    def places(self, indices: Sequence[Index], begin: int) -> NDArray[np.int64]:
        """Places in :attr:`array`, until an index is deleted; new indices begin with `begin`."""
        for index in indices:
            if index not in self._places:
                self[index] = begin
        return np.array([self._places[index] for index in indices], np.int64)

    def increment(self, index: Index, begin: int) -> int:
        """Count one update of `index`, which begins with `begin`, and return the count."""
        place = self._places.get(index)
        if place is None:
            self[index] = begin
            place = self._places[index]
        count = self.array.item(place) + 1
        self.array[place] = count
        return count

    def get(self, index: Index, default: Any = None) -> Any:
        """Return the count of `index`, or `default` if it has none."""
        place = self._places.get(index)
        return default if place is None else self.array.item(place)

    def __getitem__(self, index: Index) -> int:
        return self.array.item(self._places[index])

    def __setitem__(self, index: Index, count: int) -> None:
        place = self._places.get(index)
        if place is None:
            place, self._used = self._used, self._used + 1
            if place == len(self.array):
                self.array = np.resize(self.array, max(8, 2 * place))
            self._places[index] = place
        self.array[place] = count

    def __delitem__(self, index: Index) -> None:
        place = self._places.pop(index)
        self._used -= place == self._used - 1  # as of an update that failed, which was the first
        self.deletions += 1

    def clear(self) -> None:
        """Forget all counts."""
        self._places.clear()
        self._used = 0
        self.deletions += 1

    def __iter__(self) -> Iterator[Index]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)

    def __repr__(self) -> str:
        return repr(dict(self))

    def copy(self) -> "Counts":
        """Return a copy."""
        return Counts(self)

    def __deepcopy__(self, memo: Any) -> "Counts":
        return Counts(self)
