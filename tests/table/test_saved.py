"""Files of an EmbeddingTable: it goes on from them, and refuses what is not whole."""

import copy
from functools import cache
from types import FunctionType

import numpy as np
import pytest

import fastopt
from fastopt import checkpoint
from fastopt.checkpoint import CheckpointError
from helpers.embedding_machine import contents


def first(ids):
    return np.ones((len(ids), 2))


def trained(**kwargs):
    """A table with some of everything in it."""
    adam = fastopt.AdamW(learning_rate=0.1, wd=0.5, sparse_decay="catch_up")
    kwargs = {"min_count": 2, "half_life": 3.0, "capacity": 50, "name": "users", **kwargs}
    table = fastopt.EmbeddingTable(2, adam, **kwargs)
    for some in ([1, 2, 3, 1, 2, 3], [9, 8, 9], [1, 4]):
        table.lookup(some)
        table.update(some, np.ones((len(some), 2), np.float32))
    table.evict(keep=[1, 3, 9, 77])
    return table


def stepped(table):
    """What comes out of it later."""
    for some in ([4, 5, 6], [1, 5, 6, 3], [4, 1, 10**15, 10**15]):
        table.lookup(some)
        table.update(some, np.full((len(some), 2), 0.5, np.float32))
    table.evict(unused_for=2)
    table.flush()
    return contents(table)


def test_a_table_resumes_from_its_file(tmp_path):
    table = trained()
    table.save(tmp_path / "file")
    expected = repr(table), stepped(table)
    for optimizer in (None, type(table.optimizer).__name__):
        loaded = fastopt.EmbeddingTable.load(tmp_path / "file", optimizer)
        assert (repr(loaded), stepped(loaded)) == expected


def test_tables_that_share_an_optimizer_share_its_settings_again(tmp_path):
    ones, present = np.ones((2, 2), np.float32), fastopt.AdamW(learning_rate=0.7)
    adam = fastopt.AdamW(learning_rate=0.1, wd=0.5, sparse_decay="catch_up")
    tables = [fastopt.EmbeddingTable(2, adam, init="ones", name=name) for name in "ab"]
    for table in tables:
        table.update([1, 2], ones)
    for table in tables:
        table.save(tmp_path / table.name)
    loaded = [fastopt.EmbeddingTable.load(tmp_path / name, optimizer=present) for name in "ab"]
    assert loaded[0].optimizer is present
    for table in loaded:
        assert (table.optimizer.learning_rate, table.optimizer.num_update) == (0.1, 1)
    adam.learning_rate = present.learning_rate = 0.2
    for table in (*tables, *loaded):
        table.update([2, 3], ones)
        table.flush()
        np.testing.assert_array_equal(table.weight, tables[0].weight)


def test_a_function_of_first_values_is_passed_again(tmp_path):
    table = trained(init=first)
    table.save(tmp_path / "file")
    with pytest.raises(CheckpointError, match="its first values came from a function"):
        fastopt.EmbeddingTable.load(tmp_path / "file")
    loaded = fastopt.EmbeddingTable.load(tmp_path / "file", init=first)
    assert stepped(loaded) == stepped(table)
    assert stepped(copy.deepcopy(loaded)) == stepped(loaded)


@cache
def described():
    return trained()._described()


def records(saved, **changes):
    """Records of rows, some of which are others."""
    parts = dict(zip(("ids", "counts", "last"), saved["ids"], strict=True))
    parts |= {name: np.array(value, parts[name].dtype) for name, value in changes.items()}
    return tuple(parts.values())


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("embedding_table", 9, "format must be 1, got 9"),
        ("name", 3, "'name' is of type int"),
        ("name", "items", "does not count the updates of 'items'"),
        ("dim", 3, "weight must be an array of float32 of shape"),
        ("dim", 0, "dim must be at least 1"),
        ("dim", True, "'dim' is of type bool"),
        ("dtype", "int32", "dtype must be of real numbers"),
        ("dtype", "object", "unknown dtype"),
        ("init", "__import__('os')", "not the checkpoint of a table"),
        ("init", None, "its first values came from a function"),
        ("init", "xavier", "init must be uniform"),
        ("seed", -1, "seed must be at least 0"),
        ("capacity", 3, "it has 4 rows for a capacity of 3"),
        ("capacity", 2**40, "capacity must be at most"),
        ("min_count", 1, "ids wait for a row if min_count is more than 1 only"),
        ("half_life", 0.0, "half_life must be more than 0"),
        ("half_life", None, "count must be an array of uint32"),
        ("id_dtype", "float64", "id_dtype must be int64 or uint64"),
        ("step", -1, "step must be at least 0"),
        ("step", 1, "has a last use after step 1"),
        ("ids", lambda saved: records(saved, ids=[1, 0, 1, 9]), "has an id twice"),
        ("ids", lambda saved: records(saved, counts=[1, 0, np.nan, 1]), "has a count that none is"),
        ("ids", lambda saved: saved["ids"][:2], "'ids' must be three arrays"),
        ("ids", lambda saved: (np.array(3), *saved["ids"][1:]), "id must be an array"),
        ("waiting", lambda saved: records(saved, ids=[1, 0, 1, 9]), "has an id twice"),
        ("weight", lambda saved: saved["weight"][:3], "weight must be"),
        ("weight", lambda saved: saved["weight"].astype("f8"), "weight must be"),
        ("state", [], "optimizer creates states"),
        ("state", [3, 4], "'state' must hold arrays"),
        ("state", lambda saved: [*map(np.float64, saved["state"])], "optimizer creates states"),
        ("state", lambda saved: [a[:2] for a in saved["state"]], "it has 4 rows, and 2 of a state"),
        ("decay", None, "must have the deferred decay"),
        ("decay", lambda saved: (saved["decay"][0][:1], 0.0), "decay must be"),
        ("decay", lambda saved: (saved["decay"][0], "a"), "decay must be a number"),
        ("decay", lambda saved: (saved["decay"][0] * np.inf, 0.0), "'decay' must be finite"),
        ("optimizer", fastopt.RMSProp(), "RMSProp with lazy_update=False"),
        ("optimizer", 3, "'optimizer' is of type int"),
        ("more", 3, r"which EmbeddingTable\.save"),
    ],
)
@pytest.mark.filterwarnings("ignore:invalid value")
def test_a_hostile_file_is_refused(field, value, words, tmp_path):
    target, saved = tmp_path / "hostile", described()
    value = value(saved) if isinstance(value, FunctionType) else value
    target.write_bytes(checkpoint.dumps({**saved, field: value}))
    with pytest.raises(CheckpointError, match=words):
        fastopt.EmbeddingTable.load(target)


def test_a_file_of_something_else_is_refused(tmp_path):
    target = tmp_path / "file"
    fastopt.Updater("adam").save(target)
    with pytest.raises(CheckpointError, match=r"which EmbeddingTable\.save"):
        fastopt.EmbeddingTable.load(target)
    whole = checkpoint.dumps(described())
    target.write_bytes(whole)
    with pytest.raises(CheckpointError, match="it was saved with AdamW, optimizer is SGD"):
        fastopt.EmbeddingTable.load(target, optimizer=fastopt.SGD())
    target.write_bytes(whole[:-1])
    with pytest.raises(CheckpointError, match="file: the tensors need"):
        fastopt.EmbeddingTable.load(target)
    with pytest.raises(OSError, match="missing"):
        fastopt.EmbeddingTable.load(tmp_path / "missing")
