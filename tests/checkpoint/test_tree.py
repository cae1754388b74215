"""State as bytes: equal trees come back, foreign things are refused, nothing is pickled."""

import json

import numpy as np
import pytest
import safetensors.numpy
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from fastopt import checkpoint, optimizer, sparse
from helpers.trees import assert_same

leaves = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text()
    | hnp.arrays(
        st.sampled_from([np.float32, np.float64, np.float16, np.int64, np.uint16]),
        hnp.array_shapes(min_dims=0, min_side=0),
    )
)
trees = st.recursive(
    leaves,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(st.integers() | st.text(), inner, max_size=3)
    ),
    max_leaves=8,
)


@pytest.mark.slow
@given(trees)
def test_a_tree_comes_back_with_types_and_nesting(tree):
    assert_same(checkpoint.loads(checkpoint.dumps(tree)), tree)


def layouts():
    """A large array in all layouts of memory, of several pieces, and small ones of all dtypes."""
    array = np.arange(600_000.0).reshape(3, 200, 1000)
    unaligned = np.zeros(array.nbytes + 1, np.uint8)[1:].view(np.float64).reshape(array.shape)
    unaligned[...] = array
    views = (array.T, array[::2, ::-1], np.asfortranarray(array), np.swapaxes(array, 0, 1))
    views += np.broadcast_to(array[0], array.shape), unaligned, array.astype(">f4")
    kinds = "float16", "complex64", "bool", "uint64", "int8"
    return [*views, *(np.ones(3, kind) for kind in kinds), np.zeros((0, 2)), np.array(2, "f2")]


@pytest.mark.parametrize("view", layouts(), ids=lambda view: f"{view.strides}-{view.dtype}")
def test_arrays_of_any_layout_come_back_and_other_readers_see_them(view):
    blob = checkpoint.dumps(view)
    (seen,), own = safetensors.numpy.load(blob).values(), checkpoint.loads(blob)
    assert own.flags.f_contiguous == view.flags.f_contiguous
    assert own.flags.aligned
    assert own.flags.owndata
    for got in (own, seen):
        assert got.dtype == view.dtype.newbyteorder("=")
        np.testing.assert_array_equal(got, view)


NUMBERS = [0, 1, -0.0, 0.1, 5e-324, np.inf, np.nan]
SCALARS = [np.dtype(name).type(n) for name in ("f2", "f4", "f8") for n in NUMBERS]
SCALARS += [np.dtype(name).type(n) for name in ("i8", "u1", "?") for n in NUMBERS[:2]]


@pytest.mark.parametrize("value", NUMBERS + SCALARS, ids=lambda n: f"{type(n).__name__}-{n}")
def test_numbers_come_back_exactly_with_their_type(value):
    got = checkpoint.loads(checkpoint.dumps(value))
    assert type(got) is type(value)
    assert np.array(got).tobytes() == np.array(value).tobytes()


def test_the_text_is_strict_json():
    tree = {"\ud800é": -np.inf, "nan": np.nan, "__metadata__": 10**300, "fastopt": np.ones(0)}
    blob = checkpoint.dumps(tree)
    json.loads(json.loads(blob[8:])["__metadata__"]["fastopt"], parse_constant=pytest.fail)
    np.testing.assert_equal(checkpoint.loads(blob), tree)


def test_row_sparse_arrays_come_back():
    value = sparse.RowSparse(np.ones((2, 3), np.float32), np.array([4, 1], np.int32), (5, 3))
    got = checkpoint.loads(checkpoint.dumps({"sums": [value]}))["sums"][0]
    assert type(got) is sparse.RowSparse
    assert_same([got.values, got.indices, got.shape], [value.values, value.indices, value.shape])


@pytest.mark.parametrize(
    ("value", "words"),
    [(value, "") for value in (object(), {1.5: 0}, [lambda: 0], {0: {1}}, 1j, b"bytes")]
    + [(optimizer.get_updater("sgd"), "Updater: save its state_dict")],
)
def test_foreign_things_are_refused_with_their_place(value, words):
    with pytest.raises(TypeError, match=rf"^here\['there'\].*{words}"):
        checkpoint.dumps({"here": {"there": value}})


def test_nothing_is_pickled():
    updater = optimizer.get_updater(optimizer.Adam())
    updater(0, np.ones(3), np.ones(3))
    blob = updater.get_states(dump_optimizer=True)
    assert blob[8:9] == b"{"
    assert b"fastopt.optimizer" not in blob


def test_any_bytes_will_do_but_nothing_else():
    blob = checkpoint.dumps([1])
    assert checkpoint.loads(bytearray(blob)) == checkpoint.loads(memoryview(blob)) == [1]
    with pytest.raises(checkpoint.CheckpointError, match="must be bytes, got str"):
        checkpoint.loads("path")


def test_an_unregistered_class_is_taken_from_the_present_optimizer():
    class Mine(optimizer.SGD):
        pass

    blob = optimizer.get_updater(Mine(momentum=0.5)).get_states(dump_optimizer=True)
    restored = optimizer.get_updater(Mine())
    restored.set_states(blob)
    assert (type(restored.optimizer), restored.optimizer.momentum) == (Mine, 0.5)
    with pytest.raises(checkpoint.CheckpointError, match="Mine is not registered"):
        optimizer.get_updater(optimizer.SGD()).set_states(blob)


@pytest.mark.parametrize(
    "changes", [{"states": 3}, {"optimizer": 3}, {"more": None}, {"optimizer": ...}]
)
def test_trees_that_are_no_states_change_nothing(changes):
    updater = optimizer.get_updater(optimizer.SGD())
    before, tree = dict(vars(updater)), {"states": {}, "optimizer": None, **changes}
    tree = {name: part for name, part in tree.items() if part is not ...}
    with pytest.raises(checkpoint.CheckpointError, match="not the states of an updater"):
        updater.set_states(checkpoint.dumps(tree))
    assert vars(updater) == before
