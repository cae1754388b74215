"""Calls of an EmbeddingTable from functions and signal handlers that run inside of its calls."""

import os
import pickle
import signal
import threading
import time

import numpy as np
import pytest

import fastopt
from fastopt import checkpoint

ONES = np.ones((2, 2), np.float32)


def plain(**kwargs):
    return fastopt.EmbeddingTable(2, fastopt.SGD(learning_rate=1.0), **kwargs)


def contents(table):
    return checkpoint.dumps(table._described())


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
    asked = []

    def init(ids):
        if asked:
            CHANGES[name](table)
        return np.ones((len(ids), 2))

    def keep(ids):
        CHANGES[name](table)
        return np.ones(len(ids), bool)

    table = plain(init=init, min_count=1)
    table.lookup([1, 2, 3])
    before = contents(table)
    asked.append(True)
    call = {"init": lambda: table.lookup([1, 9]), "keep": lambda: table.evict(keep=keep)}
    with pytest.raises(RuntimeError, match="cannot be changed by a function that it calls"):
        call[function]()
    assert contents(table) == before
    asked.clear()
    assert table.lookup([9]).tolist() == [[1, 1]]


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
    table, outcomes = plain(init="zeros", path=path), []

    def flush(*_):
        try:
            table.flush()
            outcomes.append(True)
        except RuntimeError:
            outcomes.append(False)

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


@pytest.mark.skipif(os.name != "posix", reason="needs mmap of POSIX")
def test_calls_that_wait_while_the_table_is_closed_raise(tmp_path):
    path, errors = tmp_path / "table", []
    table = plain(init="zeros", path=path)

    def call(function):
        try:
            function()
        except ValueError as error:
            errors.append(str(error))

    waiting = [lambda: table.update([1, 2], 7 * ONES), table.flush, table.close, table.ids]
    with table.lock:
        threads = [threading.Thread(target=call, args=(function,)) for function in waiting]
        for thread in threads:
            thread.start()
        time.sleep(0.2)  # until they wait; if they come later, they raise as well
        table.close()
        other = fastopt.EmbeddingTable.open(path)
        other.update([3, 4], ONES)
        other.flush()
    for thread in threads:
        thread.join()
    assert errors == ["table 'embedding' is closed"] * 3  # a second close has no effect
    assert other.ids().tolist() == [3, 4]
    other._directory.close()
    with fastopt.EmbeddingTable.open(path, verify=True) as again:
        assert again.ids().tolist() == [3, 4]
        assert (again.lookup([3, 4], create=False) == -1).all()


def failing(monkeypatch, name, when):
    """Let a function of NumPy raise MemoryError for some arguments."""
    real = getattr(np, name)

    def function(*args, **kwargs):
        if when(*args):
            raise MemoryError
        return real(*args, **kwargs)

    monkeypatch.setattr(np, name, function)


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
            failing(patched, *FAILURES[failure])
            with pytest.raises(MemoryError):
                call()
        assert contents(table) == before
    table.lookup(ids)
    assert (table.lookup(ids)[89:] == 1).all()
