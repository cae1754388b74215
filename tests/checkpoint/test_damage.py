"""Damaged and hostile files are refused with one kind of error, change nothing and cost nothing."""

import json
import zlib
from functools import cache

import numpy as np
import pytest

from fastopt import lr_scheduler, optimizer
from fastopt.checkpoint import CheckpointError, dumps, loads
from helpers.memory import at_most

FEW = 2_000_000
"""Bytes that reading a small file may take."""


def adam(**kwargs):
    return optimizer.get_updater(optimizer.Adam(**kwargs))


def trained():
    """Updater with some of everything in it."""
    schedule = lr_scheduler.FactorScheduler(2, 0.5, base_lr=0.1)
    names = {0: "a_weight", 1: "b_bias"}
    updater = adam(learning_rate=None, lr_scheduler=schedule, param_idx2name=names)
    for index in (0, 1, "top"):
        updater(index, np.ones((2, 3)), np.ones((2, 3)))
    updater.states["top"] = ((np.ones(2, np.float16), None), [np.float32(np.inf), {"a": 1}])
    return updater


@cache
def blob():
    return trained().get_states(dump_optimizer=True)


@pytest.fixture(scope="module")
def contents(tmp_path_factory):
    path = tmp_path_factory.mktemp("saved") / "file"
    trained().save(path)
    return path.read_bytes()


def parts(contents):
    """Header and data of a file."""
    end = 8 + int.from_bytes(contents[:8], "little")
    return json.loads(contents[8:end]), contents[end:]


def joined(header, data):
    head = json.dumps(header).encode()
    return len(head).to_bytes(8, "little") + head + data


def rewritten(contents, change):
    """File whose text is changed by a function, with the right checksum."""
    header, data = parts(contents)
    metadata = header["__metadata__"]
    document = json.loads(metadata["fastopt"])
    change(document)
    metadata["fastopt"] = json.dumps(document)
    metadata["crc32"] = str(zlib.crc32(metadata["fastopt"].encode()))
    return joined(header, data)


def refused(contents, match=None):
    with pytest.raises(CheckpointError, match=match):
        loads(contents)


def test_every_flipped_bit_and_every_other_length_is_detected():
    damaged = bytearray(blob())
    for position in range(len(blob())):
        for bit in (1 << (position % 8), 1 << ((position + 3) % 8)):
            damaged[position] ^= bit
            refused(damaged)
            damaged[position] ^= bit
    assert len(loads(damaged, optimizer.Adam())["states"]) == 3
    for size in range(len(blob())):
        refused(blob()[:size])
    refused(blob() + b"\0", "the file has")


def first(**changes):
    """A change of what is told of the first tensor."""
    return lambda document: next(iter(document["tensors"].values())).update(changes)


def tree(value):
    return lambda document: document.update(tree=value)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda document: document.update(format=3), "format must be 2, got 3"),
        (lambda document: document["tensors"].popitem(), "do not list the same tensors"),
        *((first(shape=shape), "the header says") for shape in ([3, 2], [-2, -3], [1] * 65)),
        (first(dtype="float128"), "unknown dtype"),
        (first(dtype="int64"), "the header says"),
        (first(crc32=1), r"'\]\[0\] is damaged"),
        (tree(None), "belong nowhere"),
        (tree({"array": "states['a_weight'][0]"}), "belong nowhere"),
        (tree({"list": [{"array": "states['a_weight'][0]"}] * 2}), "not a fastopt checkpoint"),
        (tree({"pickle": "x"}), "unknown kind of value: 'pickle'"),
        (tree({"schedule": "Cosine", "of": {"dict": []}}), "not registered"),
        (tree({"optimizer": "Nobody", "of": {"dict": []}}), "not a fastopt"),
    ],
)
def test_a_text_that_lies_is_refused_with_what_is_wrong(change, words, contents):
    with at_most(FEW):
        refused(rewritten(contents, change), words)


@pytest.mark.parametrize("length", [0, 7, 2**20, 2**31, 2**40, 2**63, 2**64 - 1])
def test_absurd_header_sizes_are_refused_without_memory(length, contents):
    with at_most(FEW):
        refused(length.to_bytes(8, "little") + contents[8:])
        for header in (b"[]", b"[" * 5000, b'{"a":' * 5000, b"\xff\xfe{}", b"1" * 5000):
            refused(len(header).to_bytes(8, "little") + header)
    refused(b"\x16\0\0\0\0\0\0\0" + b'{"a": null, "a": null}', "names something twice")


F64 = {"dtype": "F64", "shape": [6], "data_offsets": [0, 48]}


@pytest.mark.parametrize(
    ("entry", "words"),
    [
        ({**F64, "shape": [2**62, 2**62]}, "is not at"),
        ({**F64, "shape": [2**40], "data_offsets": [0, 2**43]}, "is not at"),
        ({**F64, "data_offsets": [48, 0]}, "is not at"),
        ({**F64, "data_offsets": [-48, 0]}, "is not at"),
        ({**F64, "data_offsets": "all"}, "not a safetensors file"),
        ({**F64, "shape": [-2, -3]}, "not a shape"),
        ({**F64, "shape": [1] * 65}, "not a shape"),
        ({**F64, "dtype": "Q8"}, "unknown dtype 'Q8'"),
        (None, "not a safetensors file"),
    ],
)
def test_absurd_sizes_of_arrays_are_refused_without_memory(entry, words, contents):
    header, data = parts(contents)
    header[next(key for key in header if key != "__metadata__")] = entry
    with at_most(FEW):
        refused(joined(header, data), words)


def test_files_of_another_kind_are_refused(tmp_path):
    from safetensors.numpy import save

    updater = adam()
    for contents in (b"", b"{}", save({"x": np.ones(2)}), blob(), dumps([1]), dumps({0: 1})):
        (tmp_path / "file").write_bytes(contents)
        with pytest.raises(CheckpointError, match=str(tmp_path / "file")):
            updater.load(tmp_path / "file")
    assert updater.states == {}
