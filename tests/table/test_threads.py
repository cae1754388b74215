"""Threads that read an EmbeddingTable while others update, grow and evict it."""

import os
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

import fastopt
import fastopt.table

STEPS, READERS = 40, 3
STAYS, GOES, READ = np.arange(200), np.arange(10**6, 10**6 + 200), np.arange(2**40, 2**40 + 50)
"""Ids that are always there, that are evicted again and again, and that readers create."""
WIDE = 16

files = pytest.param(
    "files", marks=pytest.mark.skipif(os.name != "posix", reason="needs mmap of POSIX")
)


@pytest.fixture(autouse=True)
def switching():
    """Let threads take turns as often as they can."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


def made(place, tmp_path, **more):
    sgd = fastopt.SGD(learning_rate=1.0, lazy_update=True)
    path = {"path": tmp_path / "table", "buffer_bytes": 1 << 15} if place == "files" else {}
    return fastopt.EmbeddingTable(WIDE, sgd, init="ones", **path, **more)


def together(writers, readers):
    """Run functions in threads; readers repeat theirs until all writers have ended."""
    stop = threading.Event()

    def repeat(read, number):
        calls = 0
        while not stop.is_set() or not calls:
            read(number)
            calls += 1
        return calls

    with ThreadPoolExecutor(len(writers) + READERS) as pool:
        reading = [pool.submit(repeat, readers[k % len(readers)], k) for k in range(READERS)]
        writing = [pool.submit(write) for write in writers]
        try:
            for future in writing:
                future.result(300)
        finally:
            stop.set()
        return [future.result(300) for future in reading]


@pytest.mark.parametrize("place", ["memory", files])
def test_a_call_sees_all_of_another_or_nothing(place, tmp_path):
    table = made(place, tmp_path)
    table.lookup(STAYS)
    ones = np.ones((len(STAYS), WIDE), np.float32)
    last, created = dict.fromkeys(range(READERS), 1.0), dict.fromkeys(range(READERS), 0)

    def update(base):
        for step in range(STEPS):
            new = np.arange(base + 100 * step, base + 100 * step + 100)
            table.update(np.concatenate([STAYS, new]), np.ones((300, WIDE), np.float32))
            if step % 10 == 0:
                table.flush()
                table.prefetch(new)

    def evict():
        for _ in range(STEPS):
            table.lookup(GOES)
            table.update(GOES, 4 * ones)
            gone = table.evict(keep=lambda ids: (ids < GOES[0]) | (ids > GOES[-1]))
            assert np.array_equal(gone, GOES)

    def look_up(number):
        values = np.unique(table.lookup(STAYS, create=False))
        assert len(values) == 1
        assert values[0] <= last[number]
        last[number] = values[0]
        values = np.unique(table.lookup(GOES, create=False))
        assert values.tolist() in ([0], [1], [-3])  # no row, a new one, an updated one

    def create(number):
        values = np.unique(table.lookup(READ))
        assert values.tolist() == [1]
        created[number] += 1

    def export(number):
        ids, weight = table.to_arrays()
        assert len(ids) == len(weight) == len(np.unique(ids))
        assert len(np.unique(weight[np.isin(ids, STAYS)])) == 1
        goes = np.isin(ids, GOES)
        assert goes.sum() in (0, len(GOES))
        assert len(np.unique(weight[goes])) <= 1
        assert np.array_equal(table.rows(STAYS), STAYS)

    together([lambda: update(10**9), lambda: update(10**10), evict], [look_up, create, export])
    assert table.step == 3 * STEPS
    assert len(table) == len(STAYS) + 200 * STEPS + len(READ)
    np.testing.assert_array_equal(table.lookup(STAYS, create=False), 1.0 - 2 * STEPS)
    assert (table.counts(READ) == sum(created.values())).all()
    if place == "files":
        ids, weight = table.to_arrays()
        table.close()
        with fastopt.EmbeddingTable.open(tmp_path / "table", verify=True) as again:
            assert np.array_equal(again.ids(), ids)
            assert np.array_equal(again.to_arrays()[1], weight)


def test_a_call_for_several_tables_sees_all_of_another_or_nothing():
    sgd = fastopt.SGD(learning_rate=1.0, lazy_update=True)
    tables = {
        name: fastopt.EmbeddingTable(WIDE, sgd, init="ones", name=name) for name in ("a", "b")
    }
    ids = dict.fromkeys(tables, STAYS)
    grads = {name: np.ones((len(STAYS), WIDE), np.float32) for name in tables}
    fastopt.table.lookup(tables, ids)

    def update():
        for _ in range(STEPS):
            fastopt.table.update(tables, ids, grads)

    def read(number):
        found = fastopt.table.lookup(tables, ids, create=False)
        assert len(np.unique([*found.values()])) == 1

    together([update, update], [read])
    assert all((t.lookup(STAYS) == 1.0 - 2 * STEPS).all() for t in tables.values())
