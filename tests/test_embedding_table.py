"""An EmbeddingTable against a dictionary of rows and a plain Updater."""

import copy
import pickle

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    rule,
    run_state_machine_as_test,
)

import fastopt
from fastopt import optimizer
from fastopt.engine.validate import leaves
from fastopt.sparse import RowSparse

DIM, HEIGHT = 3, 1024
"""Columns, and rows of the oracle's weight: those that a small table shows its updater."""

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
        self.min_count, self.half_life, self.step, self.high = min_count, half_life, 0, 0

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
        if self.half_life is None:
            return self.count[id]
        return self.count[id] * 0.5 ** ((self.step - self.last[id]) / self.half_life)

    def lookup(self, ids):
        appeared = {id: ids.count(id) for id in ids}
        for id, times in appeared.items():
            if id not in self.row:
                before = self.waiting.get(id, 0)
                if before + times < self.min_count:
                    self.waiting[id] = before + times
                    continue
                self.waiting.pop(id, None)
                self.begin(id)
                self.count[id] = before
            self.count[id] = self.decayed(id) + times
            self.last[id] = self.step

    def update(self, ids, grads):
        if self.min_count == 1:
            for id in ids:
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
        if unused_for is None and count_below is not None:
            self.waiting = {i: n for i, n in self.waiting.items() if n >= count_below}
        elif unused_for is not None:
            self.waiting = {}  # not compared by these tests after such an eviction
        return gone


class Tables(RuleBasedStateMachine):
    make = staticmethod(lambda: optimizer.Adam(learning_rate=0.1))
    dtype, min_count, half_life = "float32", 1, None

    @initialize()
    def begin(self):
        self.table = fastopt.EmbeddingTable(
            DIM,
            self.make(),
            dtype=self.dtype,
            init=first,
            min_count=self.min_count,
            half_life=self.half_life,
        )
        dtype = self.table.dtype
        self.oracle = Oracle(self.make(), dtype, self.min_count, self.half_life)
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

    @rule(ids=BATCHES)
    def update(self, ids):
        grads = self.rng.normal(size=(len(ids), DIM)).astype(self.table.dtype)
        self.oracle.update(ids, grads)
        self.table.update(np.array(ids, np.int64), grads)

    @rule(
        unused_for=st.none() | st.integers(1, 3),
        count_below=st.none() | st.integers(0, 4),
        keep=st.none() | BATCHES,
        asked=st.booleans(),
    )
    def evict(self, unused_for, count_below, keep, asked):
        if unused_for is None and count_below is None and keep is None:
            return
        if self.min_count > 1:
            unused_for, count_below = None, count_below or 1
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
        assert list(table) == known == table.ids().tolist()
        assert len(table) == len(known)
        np.testing.assert_array_equal(table.rows(np.array(known, np.int64)), rows)
        np.testing.assert_array_equal(table.weight, oracle.weight[: oracle.high])
        state = zip(leaves(table._updater.states[table.name]), _state(oracle), strict=True)
        for own, expected in state:
            np.testing.assert_array_equal(own[rows], expected[rows])
        assert table.last_used().tolist() == [oracle.last[id] for id in known]
        counts = [oracle.decayed(id) for id in known]
        np.testing.assert_allclose(table.counts(), counts, rtol=1e-5)
        assert table.step == oracle.step


def _state(oracle):
    return leaves(oracle.updater.states[INDEX])


def masters(**kwargs):
    return optimizer.SGD(learning_rate=0.1, momentum=0.5, multi_precision=True, **kwargs)


FORMS = {
    "adam": {},
    "min_count": {"min_count": 3},
    "half_life": {"half_life": 1.5},
    "masters": {"make": masters, "dtype": "float16"},
    "split": {"make": lambda: masters(master="split"), "dtype": "bfloat16"},
    "float64": {"dtype": "float64"},
    "catch_up": {
        "make": lambda: optimizer.AdamW(learning_rate=0.1, wd=0.5, sparse_decay="catch_up")
    },
    "dense": {"make": lambda: optimizer.SGD(learning_rate=0.1, wd=0.5, sparse_decay="dense")},
    "rows": {"make": lambda: optimizer.GroupAdaGrad(learning_rate=0.1)},
    "previous": {"make": lambda: optimizer.DCASGD(momentum=0.5, wd=0.1, lazy_update=True)},
    "norms": {"make": lambda: optimizer.LAMB(wd=0.1, lazy_update=True)},
    "carried": {"make": lambda: optimizer.Nadam(wd=0.1, lazy_update=True)},
    "steps": {"make": lambda: optimizer.Rprop(lazy_update=True)},
    "schedule": {
        "make": lambda: optimizer.Adam(
            lr=fastopt.lr_scheduler.FactorScheduler(step=2, factor=0.5, base_lr=0.5)
        )
    },
    "free": {"make": lambda: optimizer.ScheduleFreeAdamW(learning_rate=0.1, lazy_update=True)},
}
DEFAULT = ("adam", "min_count")


@pytest.mark.parametrize(
    "form",
    [
        name if name in DEFAULT else pytest.param(name, marks=pytest.mark.exhaustive)
        for name in FORMS
    ],
)
def test_a_table_is_a_dictionary_of_rows_and_an_updater(form):
    fields = {
        name: staticmethod(value) if callable(value) else value
        for name, value in FORMS[form].items()
    }
    if form == "split":
        pytest.importorskip("ml_dtypes")
    machine = type(f"Tables_{form}", (Tables,), fields)
    few = settings(max_examples=12, stateful_step_count=15, deadline=None, derandomize=True)
    run_state_machine_as_test(machine, settings=few)
