"""Mappings from index to number whose values are stored in one array."""

from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from typing import Any
from weakref import ref

import numpy as np
from numpy.typing import NDArray

Index = int | str


class PerIndex(MutableMapping[Index, Any]):
    """Mapping from index to number, stored in one array that kernels can read and write.

    When the position of an index changes or the array grows, :attr:`array` is replaced by a new
    object, and :meth:`add_owner` says who is called before that.

    Parameters
    ----------
    values : mapping of int or str to number, optional
        Initial values.

    Examples
    --------
    >>> from fastopt.optimizer import PerIndex
    >>> rates = PerIndex({"bias": 0.5})
    >>> rates[0] = 0.25
    >>> rates
    {'bias': 0.5, 0: 0.25}
    """

    array: NDArray[Any]
    dtype: Any = np.float64
    first = 0
    """Positions before this one belong to no index."""

    def __init__(self, values: Mapping[Index, Any] | None = None) -> None:
        self._owners: list[Any] = []
        self._slots: dict[Index, int] = {}
        self.array = np.zeros(8, self.dtype)
        if values:
            self.update(values)

    def add_owner(self, owner: object) -> None:
        """Call ``owner._changed()`` before the array is replaced, while the owner lives."""
        alive = [reference for reference in self._owners if reference() is not None]
        if all(reference() is not owner for reference in alive):
            alive.append(ref(owner))
        self._owners = alive

    def slots(self, indices: Sequence[Index], start: float) -> NDArray[np.int64]:
        """Return positions in :attr:`array`; indices without a number are set to `start`."""
        slots = self._slots
        new = [index for index in indices if index not in slots]
        if new:
            self._add(dict.fromkeys(new), start)
        return self.positions(indices)

    def slot(self, index: Index, start: float) -> int:
        """Return the position of an index, which is set to `start` if it has no number."""
        if index not in self._slots:
            self._add({index: None}, start)
        return self._slots[index]

    def positions(self, indices: Sequence[Index]) -> NDArray[np.int64]:
        """Return positions in :attr:`array` of indices that have numbers."""
        slots = self._slots
        return np.array([slots[index] for index in indices], np.int64)

    def _add(self, new: Mapping[Index, None], value: float) -> None:
        """Add indices with a value."""
        begin = self.first + len(self._slots)
        end = begin + len(new)
        if end > len(self.array):
            more = max(end, 2 * len(self.array)) - len(self.array)
            self._replace(np.concatenate([self.array, np.zeros(more, self.dtype)]))
        self.array[begin:end] = value
        self._slots.update(zip(new, range(begin, end), strict=True))

    def get(self, index: Index, default: object = None) -> Any:
        """Return the number of `index`, or `default` if it has none."""
        slot = self._slots.get(index)
        return default if slot is None else self.array.item(slot)

    def __getitem__(self, index: Index) -> Any:
        return self.array.item(self._slots[index])

    def __setitem__(self, index: Index, value: float) -> None:
        slot = self._slots.get(index)
        if slot is None:
            self._add({index: None}, value)
        else:
            self.array[slot] = value

    def __delitem__(self, index: Index) -> None:
        slot = self._slots.pop(index)
        last = self.first + len(self._slots)
        self._replace(self.array.copy())
        if slot != last:
            moved = next(index for index, other in self._slots.items() if other == last)
            self._slots[moved] = slot
            self.array[slot] = self.array[last]

    def clear(self) -> None:
        """Remove all numbers."""
        self._slots.clear()
        self._replace(self.array.copy())

    def _replace(self, array: NDArray[Any]) -> None:
        for reference in self._owners:  # before, as an exception may come between
            owner = reference()
            if owner is not None:
                owner._changed()
        self.array = array

    def __iter__(self) -> Iterator[Index]:
        return iter(self._slots)

    def __len__(self) -> int:
        return len(self._slots)

    def __repr__(self) -> str:
        return repr(dict(self))

    def copy(self) -> "PerIndex":
        """Return a copy."""
        return type(self)(self)

    def __deepcopy__(self, memo: dict[int, Any]) -> "PerIndex":
        return type(self)(self)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (dict(self),)


class Counts(PerIndex):
    """Update count of each index, and the largest of all.

    Parameters
    ----------
    values : mapping of int or str to int, optional
        Initial counts.

    Attributes
    ----------
    ahead : list of DeviceSteps
        Steps whose counts are on a device, ahead of these.
    graphs : list of DeviceSteps
        Steps that graphs repeat, as often as they are launched.
    counted : numpy.ndarray
        The counts without those steps.
    """

    dtype = np.int64
    first = 1

    def __init__(self, values: Mapping[Index, Any] | None = None) -> None:
        self.ahead: list[Any] = []
        self.graphs: list[Any] = []
        super().__init__(values)

    @property
    def array(self) -> NDArray[Any]:
        """The counts, after steps that a device has counted have been counted here too."""
        if self.ahead or self.graphs:
            self.settle()
        return self.counted

    @array.setter
    def array(self, value: NDArray[Any]) -> None:
        self.counted = value

    def settle(self) -> None:
        """Wait for the steps that a device has counted; see :class:`DeviceSteps`."""
        while self.ahead:
            self.ahead.pop().settle()
        for steps in self.graphs:
            steps.follow_graphs()

    @property
    def largest(self) -> int:
        """The largest update count so far, which is passed to schedules."""
        if self.ahead or self.graphs:
            self.settle()
        return int(self.counted.item(0))

    @largest.setter
    def largest(self, value: int) -> None:
        self.array[0] = value
