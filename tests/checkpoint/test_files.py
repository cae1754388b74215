"""A file is replaced whole or not at all, whatever happens to the process or the disk."""

import errno
import os
import re
import stat
from contextlib import nullcontext

import numpy as np
import pytest

from fastopt import optimizer
from fastopt.checkpoint import CheckpointError, dumps, loads, write_atomically
from fastopt.checkpoint.format import container, files
from helpers.memory import at_most

posix = pytest.mark.skipif(os.name != "posix", reason="needs POSIX processes")

STEPS = """
import sys
from itertools import count
from pathlib import Path
from fastopt.checkpoint import write_atomically
from helpers.killing import killed_at

path = Path(sys.argv[1], "file")

def write(passed):
    def chunks():
        for part in (b"n", b"e", b"w"):
            yield part
            passed()

    write_atomically(path, chunks())

for step in count(1):
    path.write_bytes(b"old")
    status = killed_at(step, write, "fsync", "replace", "open")
    print(path.read_text())
    if not status:
        break
"""


@pytest.mark.slow
@posix
def test_at_every_step_the_old_or_the_new_file_is_there(tmp_path, run_python):
    seen = run_python(STEPS, tmp_path).split()
    assert seen == sorted(seen, reverse=True)
    assert set(seen) == {"old", "new"}
    assert len(seen) > 8


def interrupted():
    yield b"new"
    raise KeyboardInterrupt


@pytest.mark.parametrize(
    ("chunks", "error", "words"),
    [
        ([b"new"], OSError, "No space left on device.*file"),
        (interrupted(), KeyboardInterrupt, None),
        *(
            (new, TypeError, "must be a list of bytes")
            for new in (b"new", bytearray(b"new"), "new")
        ),
    ],
)
def test_a_write_that_fails_leaves_the_old_file(chunks, error, words, tmp_path, monkeypatch):
    def full(descriptor):
        raise OSError(errno.ENOSPC, "No space left on device")

    path = tmp_path / "file"
    path.write_bytes(b"old")
    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(error, match=words):
        write_atomically(path, chunks)
    assert path.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["file"]


@posix
@pytest.mark.parametrize("number", [errno.EINVAL, errno.ENOTSUP, errno.EBADF, errno.EIO])
def test_a_directory_without_sync_is_no_error_but_one_whose_sync_fails(
    number, tmp_path, monkeypatch
):
    def fsync(descriptor):
        if stat.S_ISDIR(os.fstat(descriptor).st_mode):
            raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "fsync", fsync)
    fails = pytest.raises(OSError, match=r"Input/output error.*file")
    with fails if number == errno.EIO else nullcontext():
        write_atomically(tmp_path / "file", [b"new"])
    assert (tmp_path / "file").read_bytes() == b"new"
    assert os.listdir(tmp_path) == ["file"]


@posix
def test_what_is_no_file_is_refused(tmp_path):
    (tmp_path / "file").write_bytes(b"old")
    (tmp_path / "link").symlink_to("link")
    cases = {
        tmp_path: IsADirectoryError,
        tmp_path / "missing" / "file": FileNotFoundError,
        tmp_path / "file" / "file": NotADirectoryError,
        os.devnull: OSError,
        tmp_path / "link": OSError,
    }
    updater = optimizer.get_updater(optimizer.SGD())
    for path, kind in cases.items():
        with pytest.raises(kind, match=re.escape(str(path))) as caught:
            updater.save(path)
    assert caught.value.errno == errno.ELOOP
    assert (tmp_path / "link").is_symlink()
    assert sorted(os.listdir(tmp_path)) == ["file", "link"]
    with pytest.raises(FileNotFoundError, match="missing"):
        updater.load(tmp_path / "missing")


@posix
def test_links_and_permissions_stay(tmp_path):
    path, link = tmp_path / "file", tmp_path / "link"
    write_atomically(path, [b"old"])
    mask = os.umask(0)
    os.umask(mask)
    assert stat.S_IMODE(path.stat().st_mode) == 0o666 & ~mask
    path.chmod(0o640)
    link.symlink_to("file")
    write_atomically(str(link), [b"n", memoryview(b"ew")])
    assert link.is_symlink()
    assert path.read_bytes() == b"new"
    assert stat.S_IMODE(path.stat().st_mode) == 0o640


def test_a_load_needs_no_second_copy_of_the_arrays(tmp_path):
    old, new = (optimizer.get_updater(optimizer.Adam()) for _ in range(2))
    old.states = {
        index: (np.ones((2000, 1000)), np.asfortranarray(np.ones((2000, 1000))))
        for index in range(3)
    }
    size = 6 * 16_000_000
    with at_most(0.1 * size):
        old.save(tmp_path / "file")
    with at_most(1.1 * size):
        new.load(tmp_path / "file")


@posix
def test_temporary_files_of_the_living_and_of_others_stay(tmp_path):
    path, seen = tmp_path / ("x" * 255), []  # as long as the disk allows

    def slow():
        yield b"one"
        (temporary,) = set(tmp_path.iterdir()) - {path, tmp_path / "other"}
        write_atomically(path, [b"another writer"])  # must not remove what is being written
        write_atomically(tmp_path / "other", [b"of another file"])
        seen.append(temporary.exists())
        yield b"two"

    write_atomically(path, slow())
    assert (seen, path.read_bytes()) == ([True], b"onetwo")
    assert {*tmp_path.iterdir()} == {path, tmp_path / "other"}


@posix
def test_leftovers_are_removed_for_the_same_path_alone(tmp_path):
    def killed():
        yield b"begun"
        os._exit(0)

    path, other, part = (tmp_path / name for name in ("file", "other", "file.part"))
    for target, of in ((path, None), (other, None), (part, path)):
        child = os.fork()
        if not child:
            files.write_part(target, of, killed())
        os.waitpid(child, 0)
    assert len(list(tmp_path.iterdir())) == 3
    strange = tmp_path / sorted(os.listdir(tmp_path))[0].replace(".tmp", "x.tmp")
    strange.symlink_to(tmp_path)
    write_atomically(part, [b"of another family"])
    assert len(list(tmp_path.iterdir())) == 5
    write_atomically(path, [b"whole"])
    assert {path, part, strange} < set(tmp_path.iterdir())
    assert len(list(tmp_path.iterdir())) == 4
    write_atomically(other, [b"whole"])
    assert {path, other, part, strange} == set(tmp_path.iterdir())


@posix
def test_leftovers_stay_where_files_cannot_be_locked(tmp_path, monkeypatch):
    import fcntl

    def fails(*_):
        raise OSError(errno.ENOLCK, "no locks")

    monkeypatch.setattr(fcntl, "flock", fails)
    path = tmp_path / "file"
    write_atomically(path, [b"one"])
    left = tmp_path / f"{files._prefix('file')}0.tmp"
    left.write_bytes(b"maybe of a living process")
    write_atomically(path, [b"two"])
    assert path.read_bytes() == b"two"
    assert left.exists()


def test_headers_are_as_large_as_their_tensors_justify(tmp_path, monkeypatch):
    monkeypatch.setattr(container, "HEADER_BASE", 100_000)
    empty = np.empty(0)
    many = {str(k): empty for k in range(1000)}  # each tensor justifies a share
    assert len(dumps(many)) > 100_000
    assert loads(dumps(many)).keys() == many.keys()
    with pytest.raises(CheckpointError, match=r"header of .* bytes is too large for 0 tensors"):
        dumps(["x" * 100] * 1000)
    for head in (b'{"a": [' + b"[]," * 100_000 + b"[]]}", b"[" * 200_000):
        words = "is too large for 0 tensors, the limit is 1"
        with at_most(3_000_000), pytest.raises(CheckpointError, match=words):
            loads(len(head).to_bytes(8, "little") + head)
