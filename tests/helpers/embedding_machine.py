"""Random calls of an EmbeddingTable, compared after each with loops over a dictionary of rows."""

import copy
import pickle
from collections import Counter

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from hypothesis.stateful import run_state_machine_as_test as run_machine

import fastopt
from fastopt import checkpoint, optimizer
from fastopt._engine.validate import leaves
from fastopt.lr_scheduler import FactorScheduler
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


def contents(table):
    """All of a table, as bytes."""
    described = table._described()
    made = described.pop("optimizer").__getstate__()
    return checkpoint.dumps([described, sorted(made.items())])


class Tables(RuleBasedStateMachine):
    make = staticmethod(lambda: optimizer.Adam(learning_rate=0.1))
    dtype, min_count, half_life = "float32", 1, None

    @initialize()
    def begin(self):
        self.start()

    def start(self, **kwargs):
        """Make a table, with more arguments, and its oracle."""
        counts = {"min_count": self.min_count, "half_life": self.half_life}
        self.table = fastopt.EmbeddingTable(
            DIM, self.make(), dtype=self.dtype, init=first, **counts, **kwargs
        )
        self.oracle = Oracle(self.make(), self.table.dtype, **counts)
        self.rng = np.random.default_rng(0)

    @rule(ids=BATCHES, create=st.booleans())
    def lookup(self, ids, create):
        if create:
            self.oracle.lookup(ids)
        got = self.table.lookup(np.array(ids, np.int64), create)
        expected = np.zeros((len(ids), DIM), self.table.dtype)
        for k, id in enumerate(ids):
            if id in self.oracle.row:
                expected[k] = self.oracle.weight[self.oracle.row[id]]
        np.testing.assert_array_equal(got, expected)

    @rule(ids=BATCHES, given=st.sampled_from([None, "f2", "f8", ">f4"]), listed=st.booleans())
    def update(self, ids, given, listed):
        """Gradients of any real dtype are converted as the updater does it."""
        grads = self.rng.normal(size=(len(ids), DIM)).astype(given or self.table.dtype)
        self.oracle.update(ids, grads)
        listed = listed and given == "f8" and ids
        self.table.update(np.array(ids, np.int64), grads.tolist() if listed else grads)

    @rule(
        unused_for=st.none() | st.integers(1, 3),
        count_below=st.none() | st.integers(0, 4),
        keep=st.none() | BATCHES,
        asked=st.booleans(),
    )
    def evict(self, unused_for, count_below, keep, asked):
        if self.min_count > 1:
            unused_for = None
        if unused_for is None and keep is None:
            count_below = count_below or 1
        given = keep
        if asked and keep is not None:
            given = lambda ids: np.isin(ids, np.array(keep, np.int64))  # noqa: E731
        expected = self.oracle.evict(unused_for, count_below, keep)
        assert self.table.evict(unused_for, count_below, given).tolist() == expected

    @rule(how=st.sampled_from(["deepcopy", "pickle", "flush"]))
    def go_on_from_a_copy(self, how):
        if how == "deepcopy":
            self.table = copy.deepcopy(self.table)
        elif how == "pickle":
            self.table = pickle.loads(pickle.dumps(self.table))
        else:
            self.table.flush()
            self.oracle.updater.flush(INDEX, self.oracle.weight)

    @invariant()
    def is_the_dictionary(self):
        table, oracle = self.table, self.oracle
        known = sorted(oracle.row, key=oracle.row.get)
        rows = np.array([oracle.row[id] for id in known], np.int64)
        ids, weight = table.to_arrays()
        assert list(table) == known == ids.tolist() == table.ids().tolist()
        assert len(table) == len(known)
        np.testing.assert_array_equal(weight, oracle.weight[rows])
        np.testing.assert_array_equal(table.rows(np.array(known, np.int64)), rows)
        np.testing.assert_array_equal(table.weight, oracle.weight[: oracle.high])
        pair = table._updater, oracle.updater
        state = zip(*(leaves([*updater.states.values()]) for updater in pair), strict=True)
        for own, expected in state:
            np.testing.assert_array_equal(own[rows], expected[rows])
        assert table.last_used().tolist() == [oracle.last[id] for id in known]
        assert [*table.counts([7]), *table.last_used([7])] == [0, -1]  # never given
        counts = [oracle.decayed(id) for id in known]
        np.testing.assert_allclose(table.counts(), counts, rtol=1e-5)
        assert table.step == oracle.step


def masters(**kwargs):
    return optimizer.SGD(learning_rate=0.1, momentum=0.5, multi_precision=True, **kwargs)


def lazy(make, **kwargs):
    return {"make": lambda: make(lazy_update=True, **kwargs)}


FORMS = {
    "adam": {},
    "8 bits": {"make": lambda: optimizer.Adam(lr=0.1, state_dtype="int8", state_min_size=1)},
    "min_count": {"min_count": 3},
    "half_life": {"half_life": 1.5},
    "masters": {"make": masters, "dtype": "float16"},
    "split": {"make": lambda: masters(master="split"), "dtype": "bfloat16"},
    "catch_up": {"make": lambda: optimizer.AdamW(lr=0.1, wd=0.5, sparse_decay="catch_up")},
    "dense": {"make": lambda: optimizer.SGD(learning_rate=0.1, wd=0.5, sparse_decay="dense")},
    "rows": {"make": lambda: optimizer.GroupAdaGrad(learning_rate=0.1), "min_count": 2},
    "norms": lazy(optimizer.LAMB, wd=0.1),
    "carried": lazy(optimizer.Nadam, wd=0.1),
    "schedule": {"make": lambda: optimizer.Adam(lr=FactorScheduler(2, factor=0.5, base_lr=0.5))},
    "free": lazy(optimizer.ScheduleFreeAdamW, learning_rate=0.1),
    "rounding": lazy(optimizer.SGD, rounding="stochastic") | {"dtype": "float16"},
    "noise": lazy(optimizer.SGLD),
}
"""Optimizers and settings of a table."""


def check_machine(kind, form, **few):
    """Run a machine with a form of a table."""
    if FORMS[form].get("dtype") == "bfloat16":
        pytest.importorskip("ml_dtypes")
    fields = {k: staticmethod(v) if callable(v) else v for k, v in FORMS[form].items()}
    run_machine(type("Machine", (kind,), fields), settings=settings(deadline=None, **few))
