"""Checks of sharded tables, on any number of ranks."""

import itertools

import numpy as np
import pytest
from ranks_common import LAST, all_refused, comm, state_bytes, told

from fastopt import RowSparse, optimizer
from fastopt.distributed import ShardedTable, ShardedTables, agreement
from fastopt.distributed.job import private
from helpers.tensor_lists import dtype_of, everything, frozen, normal

FORMS = [
    *((name, {}) for name in ("adam", "ftrl", "groupadagrad", "lars", "lamb")),
    ("nag", {}),  # not lazy: all rows are updated
    ("sgd", {"momentum": 0.9}),
    ("adamw", {"sparse_decay": "catch_up", "wd": 0.1}),
    ("adam", {"multi_precision": True}, "float16", "float16"),
    ("adam", {"multi_precision": True}, "float16", "float32"),
    ("adam", {"rounding": "stochastic"}, "bfloat16", "bfloat16"),
    ("adam", {}, "float64", "float64"),
    ("adam", {}, "float32", "float64"),
    ("adam", {"state_dtype": "int8", "state_min_size": 1}),
]
"""Optimizers, and dtypes of rows and gradients that are not float32."""


def lists(rng, shape, dtype="float32"):
    """For each rank, values and row numbers, some of them repeated; one rank lists none."""
    made = []
    for rank in range(comm.size):
        number = 0 if rank == 1 or not shape[0] else int(rng.integers(1, 30))
        values = rng.normal(size=(number, *shape[1:])).astype(dtype_of(dtype))
        made.append((values, rng.integers(0, max(shape[0], 1), number)))
    return made


def together(parts, shape):
    """The lists of all ranks, with the rows of each summed unless that would round."""
    lists = [RowSparse(*part, shape) for part in parts]
    lists = [part if part.dtype.itemsize == 2 else part.coalesce() for part in lists]
    pairs = [(part.values, part.indices) for part in lists]
    values, rows = (np.concatenate(column) for column in zip(*pairs, strict=True))
    return RowSparse(values, rows, shape)


def check_tables_are_updated_as_one():
    """The bits of one updater that is given all lists; also with fewer rows than ranks."""
    for owners, rows, form in itertools.product(("block", "hash"), (101, 3, 1, 0), FORMS):
        (name, arguments, *dtypes), shape = form, (rows, 3, 1) if form[0] == "nag" else (rows, 3)
        if owners == "hash" and "rounding" in arguments:
            continue  # random bits are those of a row's place
        dtype, slopes = dtypes or ("float32", "float32")
        rng, whole = np.random.default_rng(rows), normal(1, shape, dtype)
        values = whole if owners == "block" else lambda rows, w=whole: w[rows]
        kind = {"values": values, "owners": owners, "dtype": dtype_of(dtype)}
        table = ShardedTable(shape, optimizer.create(name, **arguments), comm, **kind)
        alone = optimizer.get_updater(optimizer.create(name, **arguments))
        for _ in range(3):
            parts = lists(rng, shape, slopes)
            mine = parts[comm.rank]
            table.push(mine if owners == "block" else RowSparse(*mine, shape))
            alone(0, together(parts, shape), whole)
            mine = np.random.default_rng(comm.rank)
            ids = mine.integers(0, rows, 9 + comm.rank) if rows else np.zeros(0, int)
            same(table.pull(ids), whole[ids], form)
        if "sparse_decay" in arguments and rows:
            table.flush()
            alone.flush(0, whole)
        same(table.weight, whole[table.rows], form)


def same(ours, theirs, form):
    """Rows have the same bits, unless norms are summed in another order."""
    if form[0] in ("lars", "lamb"):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5)
    else:
        assert frozen(ours) == frozen(theirs), form


def check_operations_do_not_grow_with_tables():
    found = set()
    for number in (1, 6):
        shapes = {k: (12, 1 + k) for k in range(number)}
        tables = ShardedTables(shapes, optimizer.Adam(), comm)
        rows = np.array([comm.rank, 7])
        for _ in range(2):
            before = tables._ranks.waits
            tables.pull(dict.fromkeys(shapes, rows))
            tables.push({k: (np.ones((2, w), np.float32), rows) for k, (_, w) in shapes.items()})
        found.add(tables._ranks.waits - before)
    assert len(found) == 1
    assert max(found) <= 8


def check_work_is_spread():
    """Each rank has its share of rows and state; hashing spreads what is used together."""
    table = ShardedTable((10_000, 8), optimizer.Adam(), comm, owners="hash")
    table.push((np.ones((1, 8), np.float32), np.array([comm.rank])))
    assert abs(len(table.rows) - 10_000 / comm.size) <= comm.size
    assert state_bytes(table.states) == 2 * len(table.rows) * 8 * 4
    for stride in (1, 2, 16):
        owners = table.owners.of(np.arange(0, 3200, stride))
        counts = np.bincount(owners, minlength=comm.size)
        assert counts.max() <= 1.2 * len(owners) / comm.size + 2


def check_clip_and_overflow_are_agreed():
    made = optimizer.SGD(learning_rate=1.0)
    table = ShardedTable((20, 1), made, comm, clip_global_norm=1.0)
    table.push((np.full((1, 1), 3, np.float32), np.array([comm.rank])))
    np.testing.assert_allclose(table.info.global_norm, 3 * comm.size**0.5)
    np.testing.assert_allclose(table.pull([0]), -1 / comm.size**0.5, rtol=1e-6)
    before = everything(table.shard, [table.weight])
    table.push((np.full((1, 1), np.nan if LAST else 1, np.float32), np.array([0])))
    assert table.info.skipped
    assert everything(table.shard, [table.weight]) == before


REFUSED = {
    "table.push((good[0], np.array([9])) if LAST else good)": "ValueError: below 9, got 9",
    "table.pull([-1] if LAST else [1])": "ValueError: below 9, got -1",
    "table.push((good[0].astype('i8'), good[1]) if LAST else good)":
        "TypeError: values must be float16, bfloat16, float32, .*got int64",
    "table.push(np.ones((9, 2), 'f'))": "TypeError: gradient must be a RowSparse",
    "ShardedTable((9, 2), 'adam', comm, values=np.zeros((8, 2)))":
        r"ValueError: values must have shape \(9, 2\), got \(8, 2\)",
    "ShardedTable((9, 2), 'adam', comm, owners='mine')": "ValueError: owners must be",
    "ShardedTable(9, 'adam', comm)": "TypeError: shape must be",
    "tables.push({'a': good, 'b': (np.ones(1, 'f'), np.array([7 if LAST else 1]))})":
        "ValueError: below 7, got 7",
    "tables.pull({'a': [1], 'd': [1]})": "ValueError: there is no such table",
    "tables.push({})": "ValueError: expected one table or more, got none",
    "tables.pull([1])": "TypeError: expected a mapping of tables' indices, got list",
}  # fmt: skip


def check_calls_that_fail_change_nothing():
    table = ShardedTable((9, 2), optimizer.Adam(), comm, values=normal(0, (9, 2), "float32"))
    good = np.ones((1, 2), np.float32), np.array([3])
    table.push(good)
    tables = ShardedTables({"a": (9, 2), "b": (7,)}, optimizer.Adam(), comm)
    tables.push({"a": good})

    def held():
        weights = [table.weight], [*tables.weights.values()]
        return [*map(everything, (table.shard, tables.shard), weights)]

    all_refused(REFUSED, held, globals() | locals())
    if comm.size > 1:
        with told("for the gradient of index 'b'"):
            tables.push({"a": good} if LAST else {"b": (good[0][0, :1], np.array([2]))})
    assert frozen(table.pull([])) == ("float32", (0, 2), b"")


def check_what_is_gathered_beyond_the_largest_count_comes_in_parts():
    arrays = [normal(comm.rank, (50 + comm.rank, 3), "float32"), np.arange(comm.rank * 4)]
    ranks = private(comm).ranks
    expected, counts = agreement.gathered_together(ranks, arrays)
    before = ranks.waits
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(agreement, "MOST", 7)
        found, again = agreement.gathered_together(ranks, arrays)
    assert ranks.waits - before > 2
    assert frozen(found) == frozen(expected)
    assert frozen(again) == frozen(counts)


def check_several_tables_are_updated_as_one_list():
    """Whether gradients are of the rows pulled before, on all ranks, on some, or on none."""
    shapes = {"a": (40, 3), "b": (7, 2), "none": (0, 2), "c": (25,)}
    whole = {i: normal(k, s, "float32") for k, (i, s) in enumerate(shapes.items())}
    tables = ShardedTables(
        shapes,
        optimizer.Adam(learning_rate=0.1),
        comm,
        values={i: w if i == "a" else lambda rows, w=w: w[rows] for i, w in whole.items()},
        owners="hash",
    )
    alone = optimizer.get_updater(optimizer.Adam(learning_rate=0.1))
    for step, (chosen, pulling) in enumerate(
        [("ab", ()), ("ab", range(9)), ([*shapes], [0]), ("cb", [1, 3]), ([*shapes], range(9))]
    ):
        rng, order = np.random.default_rng(step), [i for i in tables.weights if i in chosen]
        every = {index: lists(rng, shapes[index]) for index in order}
        mine = {index: parts[comm.rank] for index, parts in every.items()}
        some = slice(None if comm.rank in pulling else 3)
        ids = {index: rows[some] for index, (_, rows) in mine.items()}
        expected = {index: whole[index][rows] for index, rows in ids.items()}
        assert frozen(dict(tables.pull(ids))) == frozen(expected)
        tables.push(mine)
        sums = [together(every[index], shapes[index]) for index in order]
        alone(order, sums, [whole[index] for index in order])
        for index, weight in tables.weights.items():
            assert frozen(weight) == frozen(whole[index][tables.owned(index)]), (step, index)
