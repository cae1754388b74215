"""States that MXNet wrote are read without MXNet, and an updater goes on from them."""

import itertools
import json
import pickle
import struct
from contextlib import suppress

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from fastopt import lr_scheduler, optimizer
from fastopt.checkpoint import CheckpointError, Skipped, load_mxnet_states
from helpers.memory import at_most
from helpers.mxnet_pickles import CODES, dense, pickled, row_sparse, shape_bytes
from helpers.paths import GOLDEN

FOLDER = GOLDEN / "mxnet_states"
SAMPLES = sorted(FOLDER.glob("*.states"))
F32 = np.arange(6, dtype=np.float32).reshape(2, 3)


def nested(description, arrays):
    """State that the description of a sample tells of."""
    if description["t"] == "array":
        return arrays[description["k"]]
    if description["t"] == "tuple":
        return tuple(nested(part, arrays) for part in description["v"])
    return None


@pytest.mark.parametrize("path", SAMPLES, ids=lambda path: path.stem)
def test_real_files_give_the_arrays_that_mxnet_had(path):
    assert len(SAMPLES) >= 6
    arrays = np.load(path.with_suffix(".npz"))
    told = json.loads(path.with_suffix(".json").read_text())
    expected = {int(index): nested(part, arrays) for index, part in told.items()}
    for source in (path, str(path), path.read_bytes()):
        states = load_mxnet_states(source)
        np.testing.assert_equal(dict(states), expected)
        assert states.optimizer == ("Adam" if "dump" in path.stem else None)


@given(
    hnp.arrays(st.sampled_from(list(CODES)), hnp.array_shapes(min_dims=1, min_side=0)),
    st.integers(0, 5),
)
def test_arrays_of_all_dtypes_and_pickles_of_all_protocols_are_read(array, protocol):
    states = load_mxnet_states(pickled({3: (dense(array), None), "fc": None}, None, protocol))
    assert list(states) == [3, "fc"]
    got = states[3][0]
    assert (got.dtype, got.shape, got.flags.writeable) == (array.dtype, array.shape, True)
    np.testing.assert_array_equal(got, array)


@given(st.data(), st.integers(1, 9))
def test_row_sparse_arrays_come_dense(data, height):
    rows = data.draw(st.lists(st.integers(0, height - 1), unique=True))
    values = np.random.default_rng(0).normal(size=(len(rows), 2, 3)).astype(np.float32)
    got = load_mxnet_states(pickled({0: row_sparse((height, 2, 3), rows, values)}))[0]
    expected = np.zeros((height, 2, 3), np.float32)
    expected[rows] = values
    np.testing.assert_array_equal(got, expected)


HEAD = struct.pack("<Ii", 0xF993FAC9, 0)
DEVICE = struct.pack("<ii", 1, 0)


def of_shape(shape, dtype):
    return HEAD + shape_bytes(shape) + DEVICE + struct.pack("<i", dtype)


HOSTILE = {
    "nothing": (b"", "needs 4 bytes where 0 are left"),
    "other magic": (b"\xc7" + dense(F32)[1:], "must start with 0xf993fac9"),
    "unknown storage": (struct.pack("<Ii", 0xF993FAC9, 2), "storage type 2"),
    "no dimensions": (HEAD + struct.pack("<i", -1), "-1 dimensions"),
    "many dimensions": (HEAD + struct.pack("<I", 2**31 - 1), "2147483647 dimensions"),
    "negative dimension": (HEAD + shape_bytes((3, -2)), r"shape \(3, -2\)"),
    "overflow": (of_shape((2**62, 2**62), 0), "needs 850705917302346158658436518579420528"),
    "absurd size": (of_shape((2**40,), 0), "needs 4398046511104 bytes where 0 are left"),
    "unknown dtype": (of_shape((3,), 12), "dtype 12"),
    "truncated": (dense(F32)[:-1], "where 23 are left"),
    "too long": (dense(F32) + b"\0", "1 bytes too many"),
    "absurd height": (row_sparse((2**60, 3), [], F32[:0]), "would take 13835058055282163712 bytes"),
    "row beyond": (row_sparse((2, 3), [0, 2], F32), "from 0 to 1"),
    "negative row": (row_sparse((2, 3), [0, -1], F32), "from 0 to 1"),
    "row twice": (row_sparse((2, 3), [1, 1], F32), "distinct"),
    "fewer rows": (row_sparse((2, 3), [1], F32), "do not belong"),
    "other width": (row_sparse((2, 2), [0, 1], F32), "do not belong"),
}


def test_row_sparse_arrays_may_take_what_is_allowed_and_no_more():
    table = row_sparse((2**18, 16), [3], np.ones((1, 16), np.float32))  # 16 MiB
    states = dict.fromkeys(range(4), table)
    assert load_mxnet_states(pickled(states))[3][3].all()
    more = pickled({**states, 4: table})
    updater = sgd(momentum=0.9)
    for load, most in itertools.product((load_mxnet_states, updater.load_mxnet), (None, 2**26)):
        with pytest.raises(CheckpointError, match="max_bytes sets another limit"):
            load(more, most)
    updater.load_mxnet(more, max_bytes=5 * 2**24)
    assert updater.states[4].shape == (2**18, 16)
    with pytest.raises(ValueError, match="max_bytes must be at least 0"):
        load_mxnet_states(more, -1)


class Call:
    def __init__(self, *reduced):
        self.reduced = reduced

    def __reduce__(self):
        return self.reduced


def deep(depth):
    state = None
    for _ in range(depth):
        state = (state, state)
    return state


ARRAY = b"}K\x00cmxnet.ndarray.ndarray\nNDArray\n(tR}Vhandle\nc"
FOREIGN = {
    "a function": (pickle.dumps({0: Call(print, ("hello",))}), "refers to builtins.print"),
    "eval": (pickle.dumps({0: Call(eval, ("1",))}, 2), "refers to __builtin__.eval"),
    "attribute of a class": (
        b"\x80\x04}K\x00\x8c\x0fmxnet.optimizer\x8c\x08os.sys.x\x93s.",
        "refers to mxnet.optimizer.os.sys.x",
    ),
    "bytes as state": (pickle.dumps({0: b"x"}), "it holds bytes"),
    "another encoding":
        (ARRAY + b"_codecs\nencode\n(Vx\nVrot13\ntRsbs.", r"it encodes as \['rot13'\]"),
    "a size for bytes":
        (ARRAY + b"builtins\nbytearray\n(J\xff\xff\xff\x7ftRsbs.", "int where"),
    "an optimizer as state":
        (b"}K\x00cmxnet.optimizer\nSGD\n(tRs.", "instance of mxnet.optimizer.SGD"),
    "a text": (pickle.dumps({0: "x"}), "type str"),
    "a set": (pickle.dumps({0: {1}}), "EMPTY_SET"),
    "a persistent id": (b"}K\x00Px\ns.", "PERSID"),
    "a list": (pickle.dumps([1]), "list where"),
    "three parts": (pickle.dumps((1, 2, 3)), "3 parts"),
    "a tuple as index": (pickle.dumps({(1, 2): None}), "tuple where"),
    "no pickle": (b"hello", "it has a OBJ instruction"),
    "nothing": (b"", "not a file of MXNet"),
    "more after its end": (pickle.dumps({0: None}) + b".", "something follows"),
    "an absurd length": (b"\x80\x04\x8e" + b"\xff" * 8 + b".", "not a file of MXNet"),
    "an absurd place in memory": (b"\x80\x04}r\xff\xff\xff\xff.", "one of them as 4294967295"),
    "exponential growth": (pickle.dumps({0: deep(60)}), "too often"),
    "a list in itself": (b"\x80\x04}K\x00]\x94h\x00as.", "too often|recursion"),
    **{f"an array: {name}": (pickled({0: blob}), words) for name, (blob, words) in HOSTILE.items()},
}  # fmt: skip


@pytest.mark.parametrize("case", FOREIGN.values(), ids=FOREIGN.keys())
def test_whatever_else_a_pickle_asks_for_is_refused(case, capsys):
    data, words = case
    with at_most(1_000_000), pytest.raises(CheckpointError, match=words):
        load_mxnet_states(data)
    assert capsys.readouterr().out == ""


def test_one_array_may_not_stand_for_thousands():
    blob = dense(np.zeros(100_000))
    data = pickled({0: blob})
    end = data.rindex(b"b")
    reference = data[:end] + b"b\x94" + b"s"
    many = b"".join(b"M" + struct.pack("<H", n) + b"h\x06s" for n in range(1, 2000))
    assert len(reference + many) < 2 * len(blob)
    with at_most(10 * len(blob)), suppress(CheckpointError):
        load_mxnet_states(reference + many + b".")


@pytest.mark.slow
@settings(max_examples=800)
@given(st.sampled_from(SAMPLES), st.data())
def test_damaged_files_are_read_or_refused(path, data):
    damaged = bytearray(path.read_bytes())
    for _ in range(data.draw(st.integers(1, 3))):
        start = data.draw(st.integers(0, len(damaged) - 1))
        end = start + data.draw(st.integers(0, 9))
        damaged[start:end] = data.draw(st.binary(max_size=9))
    with at_most(2_000_000), suppress(CheckpointError):
        load_mxnet_states(damaged)


# An updater

MOM = np.arange(1, 4, dtype=np.float32)


def sgd(**kwargs):
    return optimizer.get_updater(optimizer.SGD(**kwargs))


def test_adam_resumes_from_an_mxnet_checkpoint():
    """The sample holds three steps on gradients of ones with Adam's defaults."""
    expected, weight = optimizer.get_updater(optimizer.Adam()), np.ones((2, 3), np.float32)
    for _ in range(3):
        expected(0, np.ones((2, 3), np.float32), weight)
    got, other = optimizer.get_updater(optimizer.Adam(beta1=0.5)), weight.copy()
    assert got.load_mxnet(FOLDER / "1.3.1_adamdump.states") == Skipped([], [])
    made = got.optimizer
    assert (made.beta1, made.num_update, made._index_update_count) == (0.9, 3, {0: 3})
    assert made.lr_scheduler is None
    np.testing.assert_allclose(got.states[0][0], expected.states[0][0], rtol=1e-6)
    for updater, target in ((expected, weight), (got, other)):
        updater(0, np.ones((2, 3), np.float32), target)
    np.testing.assert_allclose(other, weight, rtol=1e-6)
    assert got.states_synced == {0: True}


def test_states_alone_leave_the_optimizer_as_it_is():
    """And any schedule, without a warning."""
    updater = sgd(momentum=0.5, lr_scheduler=lambda n: 0.25)
    updater.load_mxnet((FOLDER / "1.3.1_sgd.states").read_bytes())
    made = updater.optimizer
    assert (made.momentum, made.learning_rate, made._index_update_count) == (0.5, 0.25, {})
    weight = np.zeros((2, 3), np.float32)
    updater(0, np.zeros((2, 3), np.float32), weight)
    np.testing.assert_allclose(weight, 0.5 * -0.271, rtol=1e-6)


def test_names_are_followed():
    data = pickled(
        {0: dense(MOM), 1: dense(MOM[:2])},
        {"idx2name": {0: "a_weight", 1: "b_weight"}, "_index_update_count": {0: 7, 1: 5}},
    )
    updater = sgd(momentum=0.9, param_idx2name={0: "b_weight", 1: "a_weight"})
    updater.load_mxnet(data)
    assert [state.size for _, state in sorted(updater.states.items())] == [2, 3]
    assert updater.optimizer._index_update_count == {1: 7, 0: 5}
    with pytest.raises(CheckpointError, match=r"has \['a_weight'\]"):
        sgd(param_idx2name={0: "b_weight"}).load_mxnet(data)


def test_a_schedule_of_mxnet_is_not_loaded():
    data = pickled({0: dense(MOM)}, {"lr_scheduler": "schedule", "lr": 0.5, "momentum": 0.75})
    updater = sgd(lr_scheduler=lr_scheduler.FactorScheduler(3, 0.5, base_lr=0.25))
    with pytest.warns(UserWarning, match="the present one is kept") as record:
        updater.load_mxnet(data)
    assert record[0].filename == __file__
    assert (updater.optimizer.learning_rate, updater.optimizer.momentum) == (0.25, 0.75)


@pytest.mark.parametrize(
    "data",
    [pickled({0: dense(MOM)}, {"class": "Adam"}), b"", b"N."],
    ids=["class", "empty", "None"],
)
def test_what_does_not_fit_changes_nothing(data, tmp_path):
    """The error has the name of the file."""
    updater, path = sgd(momentum=0.9), tmp_path / "file"
    with pytest.raises(FileNotFoundError):
        updater.load_mxnet(path)
    path.write_bytes(data)
    words = f"saved with Adam|{path}.*(not a file|NoneType where)"
    with pytest.raises(CheckpointError, match=words):
        updater.load_mxnet(path)
    assert updater.states == {}


@pytest.mark.parametrize(
    ("total", "momentum", "scale", "expected"),
    [(dense(MOM), None, 3, MOM), (0, dense(MOM), 2, 0 * MOM), (0, None, 1, None)],
    ids=["begun", "not begun", "never"],
)
def test_sums_of_gradients_are_loaded(total, momentum, scale, expected):
    updater, sums = optimizer.get_updater("lbsgd"), {0: {"cum_grad": total, "num_cums": 4}}
    told = {"class": "LBSGD", "momentum": 0.9 if momentum else 0.0, "cumgrads": sums}
    if total == 0 and momentum is None:
        with pytest.raises(CheckpointError, match="index 0: a sum of gradients of unknown shape"):
            updater.load_mxnet(pickled({0: None}, {**told, "batch_scale": 2}))
    updater.load_mxnet(pickled({0: momentum}, {**told, "batch_scale": scale}))
    entry = updater.optimizer.cumgrads[0]
    assert entry["num_cums"] == 4
    np.testing.assert_equal(entry["cum_grad"], expected)
