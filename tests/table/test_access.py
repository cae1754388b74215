"""Calls of an EmbeddingTable from threads, and from functions and handlers inside of its calls."""

import os
import pickle
import signal
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import numpy as np
import pytest

import fastopt
from helpers.embedding_machine import contents

posix = pytest.mark.skipif(os.name != "posix", reason="needs mmap of POSIX")
ONES = np.ones((2, 2), np.float32)


def plain(**kwargs):
    return fastopt.EmbeddingTable(2, fastopt.SGD(learning_rate=1.0), **kwargs)


CHANGES = {
    "lookup": lambda t: t.lookup([5]),
    "rows": lambda t: t.rows([5], create=True),
    "update": lambda t: t.update([1, 5], ONES),
    "evict": lambda t: t.evict(keep=[]),
    "flush": lambda t: t.flush(),
    "update of several": lambda t: fastopt.table.update({"t": t}, {"t": [1, 5]}, {"t": ONES}),
}
READS = {
    "lookup": lambda t: t.lookup([1], create=False),
    "rows": lambda t: t.rows([1]),
    "ids": lambda t: t.ids(),
    "in": lambda t: 1 in t,
    "counts": lambda t: t.counts(),
    "last_used": lambda t: t.last_used(),
    "to_arrays": lambda t: t.to_arrays(),
    "prefetch": lambda t: t.prefetch([1]),
    "save": lambda t: t.save(os.devnull + "/no file"),
    "pickle": lambda t: pickle.dumps(t),
}


@pytest.mark.parametrize("name", CHANGES)
@pytest.mark.parametrize("function", ["init", "keep"])
def test_a_function_that_a_table_calls_cannot_change_it(function, name):
    def changes(ids):
        CHANGES[name](table)

    table = plain(init=lambda ids: changes(ids) if 9 in ids else np.ones((len(ids), 2)))
    table.lookup([1, 2, 3])
    before = contents(table)
    call = {"init": lambda: table.lookup([1, 9]), "keep": lambda: table.evict(keep=changes)}
    with pytest.raises(RuntimeError, match="cannot be changed by a function that it calls"):
        call[function]()
    assert contents(table) == before
    assert table.lookup([8]).tolist() == [[1, 1]]


def test_a_function_that_a_table_calls_can_read_it():
    """Rows can start with the values of others, and those that are close to others can stay."""

    def init(ids):
        assert 9 not in table
        return table.lookup(ids // 10, create=False) + 1

    table = plain(init=init)
    assert table.lookup([7]).tolist() == [[1, 1]]
    table.update([70, 71, 70], np.ones((3, 2), np.float32))
    assert table.lookup([7, 70, 71]).tolist() == [[1, 1], [0, 0], [1, 1]]
    assert table.evict(keep=lambda ids: table.lookup(ids, create=False)[:, 0] > 0).tolist() == [70]


def update_several(table, ids, grads):
    fastopt.table.update({"t": table}, {"t": ids}, {"t": grads})


@pytest.mark.parametrize("update", [fastopt.EmbeddingTable.update, update_several])
@pytest.mark.parametrize("name", [*READS, *(f"{name}()" for name in CHANGES)])
def test_nothing_sees_a_part_of_an_update(name, update):
    """A schedule runs in the middle of an update, like a signal handler."""
    call, seen = (READS | {f"{key}()": value for key, value in CHANGES.items()})[name], []

    def schedule(number):
        if number > 1:
            with pytest.raises(RuntimeError, match=r"is inside an update .* should set a flag"):
                call(table)
            seen.append(number)
        return 1.0

    table = fastopt.EmbeddingTable(2, fastopt.SGD(lr_scheduler=schedule), init="zeros")
    for step in (1, 2):
        update(table, [1, 5 + step], ONES)
    assert seen
    assert table.lookup([1, 6, 7]).tolist() == [[-2, -2], [-1, -1], [-1, -1]]
    assert table.step == 2


@pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="needs timers of POSIX")
def test_files_never_have_a_part_of_an_update(tmp_path):
    """A handler flushes wherever the signal arrives, and each flush is of a whole update."""
    path, ids = tmp_path / "table", np.arange(300)
    ones = np.ones((300, 2), np.float32)
    table = plain(init="zeros", path=path)

    def flush(*_):
        with suppress(RuntimeError):
            table.flush()

    before = signal.signal(signal.SIGALRM, flush)
    try:
        for step in range(150):
            signal.setitimer(signal.ITIMER_REAL, 1e-5 + 2e-6 * step)
            table.update(ids, ones)
            signal.setitimer(signal.ITIMER_REAL, 0)
    finally:
        signal.signal(signal.SIGALRM, before)
    assert (table.lookup(ids) == -150).all()
    table._directory.close()
    with fastopt.EmbeddingTable.open(path, verify=True) as again:
        assert again.step == again.optimizer._index_update_count["embedding"]
        assert (again.lookup(ids, create=False) == -again.step).all()


@posix
def test_calls_that_wait_while_the_table_is_closed_raise(tmp_path):
    path = tmp_path / "table"
    table = plain(init="zeros", path=path)
    waiting = [lambda: table.update([1, 2], 7 * ONES), table.flush, table.ids, table.close]
    with ThreadPoolExecutor(4) as pool, table.lock:
        calls = [pool.submit(function) for function in waiting]
        time.sleep(0.2)  # until they wait; if they come later, they raise as well
        table.close()
        other = fastopt.EmbeddingTable.open(path)
        other.update([3, 4], ONES)
        other.flush()
    errors = [str(call.exception()) for call in calls]
    assert errors == ["table 'embedding' is closed"] * 3 + ["None"]  # for a second close
    other._directory.close()
    with fastopt.EmbeddingTable.open(path, verify=True) as again:
        assert again.ids().tolist() == [3, 4]
        assert (again.lookup([3, 4], create=False) == -1).all()


FAILURES = {
    "slots": ("zeros", lambda shape, dtype=None: dtype is np.uint32),
    "absent": ("flatnonzero", lambda array: True),
    "result": ("full", lambda shape, value: True),
    "values": ("empty", lambda shape, dtype=None: isinstance(shape, tuple) and len(shape) == 2),
}


@pytest.mark.parametrize("failure", FAILURES)
@pytest.mark.parametrize("min_count", [1, 2])
def test_without_memory_a_call_changes_nothing(min_count, failure, monkeypatch):
    """When the slots of the hash table grow, or an array of the call cannot be allocated."""
    name, fails = FAILURES[failure]
    real = getattr(np, name)

    def function(*args, **kwargs):
        if fails(*args):
            raise MemoryError
        return real(*args, **kwargs)

    table = plain(init="ones", min_count=min_count)
    table.lookup(np.arange(800))
    table.lookup(np.arange(0, 800, 2))
    table.update(np.arange(10), np.ones((10, 2), np.float32))
    before, ids = contents(table), np.concatenate([np.arange(1, 90), np.arange(800, 900)])
    calls = [lambda: table.lookup(ids), lambda: table.rows(ids, create=True)]
    if min_count == 1:
        calls.append(lambda: table.update(ids, np.ones((len(ids), 2), np.float32)))
    for call in calls:
        with monkeypatch.context() as patched:
            patched.setattr(np, name, function)
            with pytest.raises(MemoryError):
                call()
        assert contents(table) == before
    table.lookup(ids)
    assert (table.lookup(ids)[89:] == 1).all()


# Threads

STEPS, WIDE = 40, 16
STAYS, GOES, READ = np.arange(200), np.arange(10**6, 10**6 + 200), np.arange(2**40, 2**40 + 50)
"""Ids that are always there, that are evicted again and again, and that readers create."""


def together(writers, readers):
    """Run functions in threads; readers repeat theirs until all writers have ended."""
    stop, before = threading.Event(), sys.getswitchinterval()

    def repeat(read):
        read()
        while not stop.is_set():
            read()

    sys.setswitchinterval(1e-6)  # threads take turns as often as they can
    with ThreadPoolExecutor(len(writers) + len(readers)) as pool:
        reading = [pool.submit(repeat, read) for read in readers]
        writing = [pool.submit(write) for write in writers]
        try:
            for future in writing:
                future.result(300)
        finally:
            stop.set()
            sys.setswitchinterval(before)
        for future in reading:
            future.result(300)


@pytest.mark.parametrize("place", ["memory", pytest.param("files", marks=posix)])
def test_a_call_sees_all_of_another_or_nothing(place, tmp_path):
    sgd = fastopt.SGD(learning_rate=1.0, lazy_update=True)
    path = {"path": tmp_path / "table", "buffer_bytes": 1 << 15} if place == "files" else {}
    table = fastopt.EmbeddingTable(WIDE, sgd, init="ones", **path)
    table.lookup(STAYS)
    ones = np.ones((len(STAYS), WIDE), np.float32)
    last = [1.0]

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

    def look_up():
        values = np.unique(table.lookup(STAYS, create=False))
        assert len(values) == 1
        assert values[0] <= last[-1]
        last.append(values[0])
        values = np.unique(table.lookup(GOES, create=False))
        assert values.tolist() in ([0], [1], [-3])  # no row, a new one, an updated one

    def create():
        assert np.unique(table.lookup(READ)).tolist() == [1]

    def export():
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
    assert len(np.unique(table.counts(READ))) == 1
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

    def read():
        found = fastopt.table.lookup(tables, ids, create=False)
        assert len(np.unique([*found.values()])) == 1

    together([update, update], [read] * 3)
    assert all((t.lookup(STAYS) == 1.0 - 2 * STEPS).all() for t in tables.values())
