"""Headers of arrays that Python writes, for compiled code that must not read those of the objects.

The layouts of arrays and lists are known for the builds of Python and NumPy that
:func:`fastopt._kernels.numpy_abi.unreadable` accepts. For others, such as builds without a GIL, the
same words are written here from what the arrays report, and the same code reads them.

Tests: ``tests/kernels/test_numpy_abi.py``, ``tests/engine/test_records.py``.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fastopt._arrays import Gradient
from fastopt._engine.owner import RecordsLike
from fastopt._engine.validate import Array
from fastopt._kernels import front
from fastopt._kernels import record_words as w
from fastopt._kernels.numpy_abi import Written, readable
from fastopt.sparse import RowSparse, as_row_sparse, is_row_sparse

Words = NDArray[np.int64]


class Reader:
    """Function that enters a call like the front, whose arrays it reads in Python.

    Parameters
    ----------
    records : Records
        The records.
    """

    def __init__(self, records: RecordsLike) -> None:
        self.records, self._enter = records, front.enter_written()

    def __call__(self, context: int, index: Any, grad: Any, weight: Any) -> int:
        """Enter a call; return a status, see :mod:`fastopt._kernels.front`."""
        records, single = self.records, type(index) not in (list, tuple)
        lists: list[Sequence[Any]] = (
            [[index], [grad], [weight]] if single else [index, grad, weight]
        )
        if any(type(items) not in (list, tuple) for items in lists) or len({*map(len, lists)}) > 1:
            return w.REFUSED
        if len(lists[0]) > records.words[w.CAPACITY]:
            records.words[w.NEED] = len(lists[0])
            return w.NO_CAPACITY
        memory: list[Any] = []
        rows: list[list[int]] = [[], [], []]
        for key, grad, array in zip(*lists, strict=True):
            place = records.slots.get(key) if type(key) in (int, str) else 0
            if not place:
                return w.UNKNOWN if place is None else w.REFUSED
            record: Any = records.record_of(key)
            for item in () if record is None else record.alive:
                if type(item) is Written:
                    item.follow()
            headers = [self._gradient(grad, array, memory), self._header(array, memory)]
            if 0 in headers:
                return w.REFUSED
            for row, word in zip(rows, (place, *headers), strict=True):
                row.append(word)
        status: int = self._enter(context, *(self._list(row, w.LIST, memory) for row in rows))
        return status

    def _header(self, array: object, memory: list[Any]) -> int:
        """Return the address of the header of an array, 0 for other objects."""
        if type(array) is not np.ndarray:
            return 0
        written = Written(array)
        memory.append(written)
        return written.address

    def _gradient(self, grad: Gradient, weight: Array, memory: list[Any]) -> int:
        """Return the address of the header of a gradient, or of the pair of a row-sparse one."""
        if isinstance(grad, (float, np.floating)):
            return self._header(np.asarray(grad), memory)
        if is_row_sparse(grad):
            try:
                grad = as_row_sparse(grad, np.shape(weight))
            except (TypeError, ValueError, MemoryError):  # the checks report it
                return 0
        if type(grad) is not RowSparse:
            return self._header(grad, memory)
        if grad.shape != weight.shape:
            return 0
        parts = [self._header(part, memory) for part in (grad.values, grad.indices)]
        return 0 if 0 in parts else self._list(parts, w.LIST, memory)

    def _list(self, items: Sequence[int], kind: int, memory: list[Any]) -> int:
        """Return the address of the header of a list."""
        words = np.array([0] * w.ITEMS + [0, *items], np.int64)
        memory.append(words)
        words[w.TYPE], words[w.LENGTH] = self.records.words[kind], len(items)
        words[w.ITEMS] = words.ctypes.data + 8 * (w.ITEMS + 1)
        return int(words.ctypes.data)


def front_of(records: RecordsLike) -> Callable[..., int]:
    """Return the function that enters calls: the front, or one in Python if it reads no headers."""
    return front.enter() if readable() else Reader(records)
