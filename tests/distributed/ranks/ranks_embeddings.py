"""Checks of embedding tables by id over ranks, on any number of ranks."""

from functools import partial
from pathlib import Path

import numpy as np
from ranks_common import LAST, all_refused, comm, exact, of_last, raised

import fastopt
from fastopt import optimizer
from fastopt.checkpoint import CheckpointError
from fastopt.distributed import ShardedEmbeddingTable
from fastopt.distributed.embedding import owners_of
from helpers.embedding_machine import contents
from helpers.tensor_lists import frozen

KINDS = {
    "momentum": (partial(optimizer.SGD, momentum=0.9, lazy_update=True), {}),
    "adam": (optimizer.Adam, {}),
    "decay": (partial(optimizer.AdamW, sparse_decay="catch_up", wd=0.1), {"half_life": 3.0}),
    "half": (partial(optimizer.Adam, multi_precision=True), {"dtype": "bfloat16"}),
    "int8": (partial(optimizer.Adam, state_dtype="int8", state_min_size=1), {"dim": 128}),
    "rare": (partial(optimizer.AdaGrad, lazy_update=True), {"min_count": 3}),
}


def table_of(kind, **more):
    make, options = KINDS[kind]
    init = fastopt.initializer.Uniform(0.5, rng=np.random.default_rng(0))
    return fastopt.EmbeddingTable(
        **{"dim": 3, "optimizer": make(), "init": init, **options, **more}
    )


def batches(step, dim, parts):
    """Ids and gradients of a step, in so many parts; the second part is empty."""
    rng = np.random.default_rng(step)
    ids = rng.integers(0, 60, 24) * 0x123456789ABCDEF - 2**62
    grads = exact(step, (24, dim), "float32")
    cuts = np.sort(rng.integers(0, 25, parts - 1))
    if parts > 1:
        cuts[0] = cuts[min(1, parts - 2)]
    return [*zip(np.split(ids, cuts), np.split(grads, cuts), strict=True)]


def both(table, alone, step):
    """Update both tables, one with the part of this rank, the other with all."""
    parts = batches(step, 3, comm.size)
    table.update(*parts[comm.rank])
    alone.update(*joined(parts))


def ordered(tables):
    """Ids, rows, last uses and counts of tables, in the order of the ids."""
    ids, *columns = map(np.concatenate, zip(*tables, strict=True))
    return [column[np.argsort(ids)] for column in (ids, *columns)]


def columns(table):
    return *table.to_arrays(), table.last_used(), table.counts()


def same(table, alone, rtol=0.0):
    """Whether rows, counts and last uses are those of a table in one process."""
    ids, rows, used, counts = ordered(comm.allgather(columns(table.table)))
    other_ids, other_rows, other_used, other_counts = ordered([columns(alone)])
    assert frozen((ids, used)) == frozen((other_ids, other_used))
    np.testing.assert_allclose(rows, other_rows, rtol=rtol)
    np.testing.assert_allclose(counts, other_counts, rtol=1e-6)
    assert (owners_of(table.table.ids(), comm.size) == comm.rank).all()
    return True


def check_sums_over_all_rows_are_those_of_all_ranks(folder):
    """LAMB needs the norm of the whole table."""
    own, alone = (table_of("adam", optimizer=optimizer.LAMB(lazy_update=True)) for _ in "ab")
    table = ShardedEmbeddingTable(own, comm)
    for step in range(4):
        both(table, alone, step)
    assert same(table, alone, rtol=1e-5)


def check_all_draw_from_one_seed_other_values_and_noise(folder):
    """Every rank draws a seed of its own, and that of rank 0 is used."""
    own = fastopt.EmbeddingTable(2, optimizer.SGLD(lr=0.1, lazy_update=True), init="normal")
    table, ids = ShardedEmbeddingTable(own, comm), np.arange(40)
    rows = comm.allgather(table.lookup(ids))
    assert all(frozen(each) == frozen(rows[0]) for each in rows)
    table.update(ids, np.zeros((40, 2), np.float32))
    for drawn in (rows[0], table.lookup(ids) - rows[0]):
        assert len(np.unique(drawn)) > 60


def check_ids_have_one_dtype(folder):
    largest = 2**64 - 1
    table = ShardedEmbeddingTable(fastopt.EmbeddingTable(2, "adam"), comm)
    errors = {"table.lookup([0.5])": "TypeError: ids must be integers"}
    all_refused(errors, lambda: table.table._keys, {"table": table})
    table.lookup(np.array([largest] if LAST else [], np.uint64))
    assert np.concatenate(comm.allgather(table.table.ids())).tolist() == [largest]
    with raised(ValueError, "must fit into the table's uint64, got -1"):
        table.lookup(np.array([-1]))


REFUSED = {
    "table.lookup(['a'] if LAST else [1])": f"TypeError: {of_last}.*ids must be integers",
    "table.update([5], np.ones((1, 2 if LAST else 3), 'f'))":
        rf"ValueError: {of_last}.*grads must have shape \(1, 3\), got \(1, 2\)",
    "table.update(many, np.ones((len(many), 3), 'f'))":
        f"ValueError: {of_last}.*and capacity is 30",
    "ShardedEmbeddingTable(3, comm)": "TypeError: table must be an EmbeddingTable",
    "table.load('table', comm)": "TypeError: returns a new object: call it on the class",
}  # fmt: skip


def check_a_call_that_fails_changes_nothing(folder):
    table = ShardedEmbeddingTable(table_of("adam", capacity=30), comm)
    ids, grads = batches(0, 3, comm.size)[comm.rank]
    table.lookup(ids)
    table.update(ids, grads)
    many = np.arange(10**6, 10**6 + 40 * comm.size)
    many = many[(owners_of(many, comm.size) == comm.size - 1) & (comm.rank == 0)]
    before = contents(table.table)
    all_refused(REFUSED, lambda: contents(table.table), globals() | locals())
    if comm.size > 1:
        other = table_of("adam")
        other.lookup(np.arange(50))
        for wrong, *words in (
            (lambda: table.lookup([5], create=LAST), "ranks disagree: for create"),
            (lambda: ShardedEmbeddingTable(table_of("adam", dim=2 + LAST), comm), "for dim"),
            (lambda: ShardedEmbeddingTable(other, comm), "table 'embedding' has id ", "owns"),
        ):
            with raised(ValueError, *words):
                wrong()
        table.table.optimizer.lr = 0.5 if LAST else 0.001
        with raised(ValueError, "ranks disagree"):
            table.update([5], np.ones((1, 3), np.float32))
        table.table.optimizer.lr = 0.001
    assert contents(table.table) == before
    with raised(ValueError, of_last, "and capacity is 30"):
        table.lookup(many)
    table.update(ids, grads)


def joined(parts):
    return map(np.concatenate, zip(*parts, strict=True))


def check_tables_in_files_are_loaded_on_other_numbers_of_ranks(folder):
    """Those of fewer, as many, and more ranks; they go on in files, or in memory."""
    for kind, before in (("adam", 1), ("decay", comm.size), ("rare", comm.size + 2), ("half", 2)):
        olds = [Path(folder, f"old-{kind}-{comm.size}-{k}") for k in range(before)]
        alone = table_of(kind)
        tables = [table_of(kind, path=old) for old in olds] if comm.rank == 0 else []
        for step in range(4):
            ((ids, grads),) = batches(step, 3, 1)
            of = owners_of(ids, before)
            for table, own in ((alone, of >= 0), *((t, of == k) for k, t in enumerate(tables))):
                table.lookup(ids[own])
                table.update(ids[own], grads[own])
        for table in tables:
            table.close()
        comm.Barrier()
        new = Path(folder, f"new-{kind}-{comm.size}-{comm.rank}") if before != 2 else None
        table = ShardedEmbeddingTable.load(olds, comm, directory=new)
        assert same(table, alone), kind
        for step in range(4, 6):
            table.prefetch(batches(step, 3, comm.size)[comm.rank][0])
            both(table, alone, step)
        assert same(table, alone), kind
        if new is not None:
            assert table.table.path == new
            table.table.close()
            again = ShardedEmbeddingTable(fastopt.EmbeddingTable.open(new, verify=True), comm)
            assert same(again, alone), kind
            again.table.close()
        for wrong in (olds[1:], olds[::-1]) if before > 2 else ():
            with raised(CheckpointError, "it has ids of other ranks than rank ", "list the"):
                ShardedEmbeddingTable.load(wrong, comm)
    with raised(TypeError, of_last, "ids"):
        table.prefetch(ids.astype(float) if LAST else ids)
    empty = Path(folder, f"none-{comm.size}-{comm.rank}")
    with raised(ValueError, "number of directories must be at least 1, got 0"):
        ShardedEmbeddingTable.load([], comm, directory=empty)
    assert not empty.exists()


def check_tables_of_jobs_of_every_size_are_those_of_one_process(folder):
    """The first job saves after 3 of 6 steps, and the others continue as it does."""
    for kind in KINDS:
        path, one = Path(folder, f"table-{kind}"), Path(folder, f"one-{kind}-{comm.size}")
        known, alone = path.exists(), table_of(kind)
        comm.Barrier()
        if known:
            used = optimizer.Adam()
            table = ShardedEmbeddingTable.load(path, comm, used if kind == "adam" else None)
            assert kind != "adam" or table.optimizer is used
        else:
            table = ShardedEmbeddingTable(table_of(kind), comm)
        for step in range(6):
            if not known and step == 3:
                table.save(path)
            parts = batches(step, alone.dim, comm.size)
            every, every_grad = joined(parts)
            expected = alone.lookup(every)
            alone.update(every, every_grad)
            gone = alone.evict(unused_for=2, count_below=5) if step == 3 else every[:0]
            if known and step < 3:
                continue
            ids, grads = parts[comm.rank]
            first = sum(len(part) for part, _ in parts[: comm.rank])
            found = table.lookup(ids.reshape(1, -1))
            assert frozen(found[0]) == frozen(expected[first : first + len(ids)]), (kind, step)
            table.update(ids, grads)
            if step == 3:
                found = np.concatenate(comm.allgather(table.evict(unused_for=2, count_below=5)))
                assert frozen(np.sort(found)) == frozen(np.sort(gone)), kind
                assert len(gone), kind
            assert same(table, alone), (kind, step)
        before = contents(table.table)
        assert not table.lookup([1 - comm.rank], create=False).any()
        assert contents(table.table) == before
        for each in (table, alone):
            each.flush()
        assert same(table, alone), kind
        if comm.rank == 0:
            alone.save(one)
        comm.Barrier()
        assert same(ShardedEmbeddingTable.load(one, comm), alone), kind
    kept = ShardedEmbeddingTable.load(path, comm)
    with raised(CheckpointError, "not a checkpoint of ranks"):
        fastopt.distributed.ShardedUpdater(kept.optimizer, comm).load(path)
    with raised(CheckpointError, "it was saved with AdaGrad, optimizer is SGD"):
        ShardedEmbeddingTable.load(path, comm, fastopt.SGD(lazy_update=True))


def check_operations_of_a_call_are_few(folder):
    table = ShardedEmbeddingTable(table_of("adam"), comm)
    ids = np.arange(comm.rank, 30)
    update = partial(table.update, ids, np.ones((len(ids), 3), np.float32))
    for call, most in ((partial(table.lookup, ids), 5), (update, 4)):
        call()
        before = table._ranks.waits
        call()
        assert table._ranks.waits - before <= most
