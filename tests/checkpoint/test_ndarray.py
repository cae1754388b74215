"""MXNet's files of named arrays are read into parameters, and cost no more than they hold."""

import random
import struct
from contextlib import suppress

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastopt.checkpoint import CheckpointError
from fastopt.checkpoint.foreign.ndarray import list_from_bytes
from fastopt.initializer import Load
from fastopt.parameter import ParameterDict
from helpers.initializers import named
from helpers.memory import at_most
from helpers.mxnet_pickles import DTYPES, dense, legacy, named_list, row_sparse, shape_bytes

WEIGHT = np.arange(6, dtype=np.float32).reshape(3, 2)
BLOBS = {"arg:fc_weight": dense(WEIGHT), "aux:fc_mean": dense(np.ones(3))}


def written(path, blobs):
    path.write_bytes(named_list(blobs))
    return path


@given(st.lists(st.sampled_from(DTYPES), max_size=4), st.sampled_from([dense, legacy]))
def test_every_array_of_a_list_comes_back(dtypes, write):
    arrays = {f"é{k}": np.arange(k + 3, dtype=dtype) for k, dtype in enumerate(dtypes)}
    got = list_from_bytes(named_list({name: write(array) for name, array in arrays.items()}))
    assert list(got) == list(arrays)
    for name, array in arrays.items():
        assert got[name].dtype == array.dtype
        np.testing.assert_array_equal(got[name], array)


def test_all_kinds_of_arrays_stand_in_one_list():
    blobs = {"v0": legacy(WEIGHT, 0), "v1": legacy(WEIGHT), "v2": dense(WEIGHT)}
    blobs |= {"v3": dense(np.array(2.5), 0xF993FACA)}
    got = list_from_bytes(named_list({**blobs, "sparse": row_sparse((4, 2), [1, 3], WEIGHT[:2])}))
    for version in ("v0", "v1", "v2"):
        np.testing.assert_array_equal(got[version], WEIGHT)
    assert got["v3"] == 2.5
    np.testing.assert_array_equal(got["sparse"][[1, 3]], WEIGHT[:2])
    assert not got["sparse"][[0, 2]].any()


def test_load_initializes_from_such_a_file(tmp_path):
    init = Load(written(tmp_path / "net.params", BLOBS), default_init="zeros")
    np.testing.assert_array_equal(named(init, "fc_weight", (3, 2)), WEIGHT)
    assert named(init, "fc_mean", (3,)).tolist() == [1, 1, 1]
    assert not named(init, "other_weight", (3,)).any()


@pytest.mark.parametrize("name", ["net.params", "net-0001"])
def test_parameters_load_such_a_file_whatever_its_name(tmp_path, name):
    params = ParameterDict("fc_")
    params.get("weight", shape=(3, 2))
    params.get("mean", shape=3, dtype="float64")
    path = written(tmp_path / name, BLOBS)
    params.load(path)
    np.testing.assert_array_equal(params["fc_weight"].data(), WEIGHT)
    assert params["fc_mean"].data().tolist() == [1, 1, 1]
    params.get("bias", shape=3)
    with pytest.raises(ValueError, match=r"lacks \['fc_bias'\]"):
        params.load(path)
    params.load(path, allow_missing=True)


def test_a_safetensors_header_of_274_bytes_is_no_list(tmp_path):
    path = tmp_path / "file"
    params = ParameterDict()
    params.get("w", shape=2).initialize("ones")
    params.save(path)
    data = path.read_bytes()
    end = 8 + int.from_bytes(data[:8], "little")
    path.write_bytes((274).to_bytes(8, "little") + data[8:end].ljust(274) + data[end:])
    assert path.read_bytes()[:8] == LIST[:8]
    params.load(path)


LIST = named_list(BLOBS)
TWO = {"a": dense(WEIGHT), "b": dense(WEIGHT)}
HEAD, COUNT = LIST[:16], struct.pack("<Q", 2**60)
NO_SHAPE = struct.pack("<Ii", 0xF993FAC9, 0) + shape_bytes(())
HUGE = shape_bytes((2**60, 0, 2**60)) + struct.pack("<iii", 1, 0, 0)
ABSURD = r"array 0 of the list: an array cannot have shape \(1152921504606846976, 0, 11529"
EMPTY = struct.pack("<i", 6) + shape_bytes((0,))
BROKEN = {
    "nothing": (b"", "needs 16 bytes where 0 are left"),
    "other magic": (b"\x13" + LIST[1:], "does not start with the header of MXNet's"),
    "reserved": (LIST[:8] + b"\1" + LIST[9:], "does not start with the header of MXNet's"),
    "absurd count": (HEAD + COUNT, "array 0 of the list: an array needs 4 bytes where 0"),
    "no names":
        (HEAD + struct.pack("<QQ", 0, 0)[:8] + struct.pack("<Q", 2), "0 arrays has 2 names"),
    "absurd name": (LIST[: -(8 + len("aux:fc_mean"))] + COUNT, "needs 1152921504606846976 bytes"),
    "truncated": (LIST[:-1], "needs 11 bytes where 10 are left"),
    "too long": (LIST + b"\0", "1 bytes too many"),
    "empty array": (named_list({"a": NO_SHAPE}), "array 0 of the list: an array has no shape"),
    "no elements of an absurd shape":
        (named_list({"a": struct.pack("<Ii", 0xF993FAC9, 0) + HUGE}), ABSURD),
    "no rows of an absurd shape": (
        named_list({"a": struct.pack("<Ii", 0xF993FAC9, 1) + HUGE[:28] * 2 + HUGE[28:] + EMPTY}),
        ABSURD),
    "a name twice": (named_list(TWO)[:-1] + b"a", "has a name twice"),
    "no UTF-8": (named_list(TWO)[:-1] + b"\xff", "a name is not UTF-8"),
}  # fmt: skip


@pytest.mark.parametrize("case", BROKEN.values(), ids=BROKEN.keys())
def test_what_is_no_such_list_is_refused_without_memory(case, tmp_path):
    data, words = case
    path = tmp_path / "net.params"
    path.write_bytes(data)
    with at_most(1_000_000):
        with pytest.raises(CheckpointError, match=words):
            list_from_bytes(data)
        with pytest.raises(ValueError, match=r"param must be an intact file, got .*net"):
            Load(path)
    with pytest.raises(CheckpointError, match=r"net\.params"):
        ParameterDict().load(path)


def test_names_of_a_list_are_distinct_texts(tmp_path):
    path = written(tmp_path / "net.params", {"a": dense(WEIGHT), "arg:a": dense(WEIGHT)})
    with pytest.raises(CheckpointError, match="with and without 'arg:'"):
        ParameterDict().load(path)
    with pytest.raises(ValueError, match="param has 'a' twice"):
        Load(path)


@pytest.mark.parametrize("kind", ["npz", "params", "safetensors"])
def test_a_damaged_file_is_one_kind_of_error(tmp_path, kind):
    import safetensors.numpy

    path, draw = tmp_path / f"a.{kind}", random.Random(1)
    if kind == "npz":
        np.savez_compressed(path, a=WEIGHT, b=np.ones(3))
    elif kind == "params":
        written(path, BLOBS)
    else:
        safetensors.numpy.save_file({"a": WEIGHT, "b": np.ones(3)}, path)
    whole = path.read_bytes()
    for _ in range(400):
        data, size = bytearray(whole), len(whole)
        for _ in range(draw.choice([1, 2, 8])):
            data[draw.randrange(size)] ^= 1 << draw.randrange(8)
        path.write_bytes(data[: draw.choice([size, size, draw.randrange(size)])])
        with suppress(TypeError, ValueError):
            Load(path)


def test_an_npz_is_compressed_as_numpy_does_it(tmp_path):
    import zipfile

    np.savez(tmp_path / "a.npz", a=np.ones(3))
    with (
        zipfile.ZipFile(tmp_path / "a.npz") as old,
        zipfile.ZipFile(tmp_path / "b.npz", "w", zipfile.ZIP_LZMA) as new,
    ):
        new.writestr("a.npy", old.read("a.npy"))
    with pytest.raises(ValueError, match=r"a\.npy is compressed otherwise than NumPy does it"):
        Load(tmp_path / "b.npz")
    (tmp_path / "c.npz").write_bytes(b"\x93NUMPY no zip")
    with pytest.raises(ValueError, match="must be an intact file"):
        Load(tmp_path / "c.npz")
    with pytest.raises(FileNotFoundError):
        Load(tmp_path / "missing.npz")
