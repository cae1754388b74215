"""An EmbeddingTable as loops over a dictionary of rows."""

from collections import Counter

import numpy as np
from hypothesis import strategies as st

from fastopt import optimizer
from fastopt._engine.validate import leaves
from fastopt.sparse import RowSparse

DIM, HEIGHT = 16, 1024
"""Columns, as many as 8 bits need, and rows of the weight that a small table shows its updater."""

IDS = st.sampled_from([0, 1, -1, 2**63 - 1, -(2**63), *range(10**12, 10**12 + 9)])
BATCHES = st.lists(IDS, max_size=9)


def first(ids):
    """First values of rows, which every dtype has exactly."""
    return (ids[:, np.newaxis] % 7 + np.arange(DIM)) / 16


INDEX = "embedding"
"""The name of a table by default: random numbers depend on it."""


class Oracle:
    """The same table, as loops over a dictionary."""

    def __init__(self, made, dtype, min_count, half_life):
        self.updater = optimizer.get_updater(made)
        self.weight = np.zeros((HEIGHT, DIM), dtype)
        self.updater.states[INDEX] = made.create_state_multi_precision(INDEX, self.weight)
        self.updater.states_synced[INDEX] = True
        if made.sparse_decay != "touched":
            made.row_decay[INDEX] = np.zeros(HEIGHT), 0.0
        self.row, self.count, self.last, self.waiting = {}, {}, {}, {}
        self.min_count, self.half_life = min_count, half_life or np.inf
        self.step = self.high = 0

    def begin(self, id):
        """Give an id the lowest free row, and its first weight and state."""
        row = min(set(range(self.high + 1)) - set(self.row.values()))
        self.row[id], self.high = row, max(self.high, row + 1)
        self.count[id], self.last[id] = 0, self.step
        weight = self.weight[row : row + 1]
        weight[...] = first(np.array([id]))
        made = self.updater.optimizer
        state = leaves(made.create_state_multi_precision(INDEX, weight))
        for array, values in zip(leaves(self.updater.states[INDEX]), state, strict=True):
            array[row] = values[0]
        if INDEX in made.row_decay:
            made.row_decay[INDEX][0][row] = made.row_decay[INDEX][1]

    def decayed(self, id):
        """Count of an id now."""
        return self.count[id] * 0.5 ** ((self.step - self.last[id]) / self.half_life)

    def lookup(self, ids):
        for id, times in Counter(ids).items():
            if id not in self.row:
                before = self.waiting.get(id, 0)
                self.waiting[id] = before + times
                if before + times < self.min_count:
                    continue
                del self.waiting[id]
                self.begin(id)
                self.count[id] = before
            self.count[id] = self.decayed(id) + times
            self.last[id] = self.step

    def update(self, ids, grads):
        for id in ids if self.min_count == 1 else ():
            if id not in self.row:
                self.begin(id)
        used = [k for k, id in enumerate(ids) if id in self.row]
        rows = np.array([self.row[ids[k]] for k in used], np.int64)
        grad = RowSparse(grads[used], rows, (HEIGHT, DIM))
        self.updater(INDEX, grad, self.weight)
        self.step += 1
        for id in {ids[k] for k in used}:
            self.count[id], self.last[id] = self.decayed(id), self.step

    def evict(self, unused_for, count_below, keep):
        gone = [
            id
            for id in sorted(self.row, key=self.row.get)
            if (unused_for is None or self.step - self.last[id] >= unused_for)
            and (count_below is None or self.decayed(id) < count_below)
            and (keep is None or id not in keep)
        ]
        for id in gone:
            row = self.row.pop(id)
            self.weight[row] = 0
            for array in leaves(self.updater.states[INDEX]):
                array[row] = 0
        if unused_for is not None:
            self.waiting = {}  # not compared by these tests after such an eviction
        self.waiting = {i: n for i, n in self.waiting.items() if n >= (count_below or 0)}
        return gone
