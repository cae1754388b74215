"""An EmbeddingTable in files: the same bits as one in memory, and whole after any crash."""

import contextlib
import errno
import os
import shutil
import subprocess
import sys
import tempfile
from itertools import count
from pathlib import Path

import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import initialize, rule

import fastopt
from fastopt import checkpoint
from fastopt.checkpoint import CheckpointError
from fastopt.table import directory
from fastopt.table.directory import BLOCK
from helpers.cases import kept
from helpers.embedding_machine import BATCHES, FORMS, INDEX, Tables, check_machine, first
from helpers.refusals import check_refused, each

pytestmark = pytest.mark.skipif(os.name != "posix", reason="needs mmap of POSIX")

KILLED = """
import os, shutil, sys
from itertools import count
import numpy as np
import fastopt
from fastopt import checkpoint
from helpers.embedding_machine import contents
from helpers.killing import killed_at

path, number = os.path.join(sys.argv[1], "table"), int(sys.argv[2])
calls = "fsync", "pwrite", "replace", "unlink", "ftruncate", "mkdir", "open"

def made(**kwargs):
    adam = fastopt.AdamW(learning_rate=0.1, wd=0.1, sparse_decay="catch_up")
    init = fastopt.initializer.Uniform(0.1, rng=0)
    return fastopt.EmbeddingTable(5, adam, init=init, half_life=3.0, **kwargs)

def step(table):
    rng = np.random.default_rng(table.step)
    ids = rng.integers(0, 400, 40)
    table.update(ids, rng.normal(size=(40, 5)).astype(np.float32))
    if table.step % 3 == 0:
        table.evict(unused_for=2)

def check(least):
    oracle = made()
    with fastopt.EmbeddingTable.open(path, verify=True) as table:
        assert table.step >= least, (table.step, least)
        while oracle.step < table.step:
            step(oracle)
        assert contents(table) == contents(oracle), table.step

def train(_):
    table = made(path=path, buffer_bytes=1 << (14 if left % 2 else 30))
    for _ in range(2):
        step(table)
        table.prefetch(np.arange(400))
        table.flush(decay=False)
        os.write(writes, b"1")

with made(path=path) as table:  # which compiles the kernels
    step(table)
shutil.rmtree(path)
opened = 0
for left in count(1, number):
    reads, writes = os.pipe()
    status = killed_at(left, train, *calls)
    os.close(writes)
    with os.fdopen(reads, "rb") as told:
        flushed = len(told.read())
    try:
        check(flushed)
        opened += 1
    except (FileNotFoundError, checkpoint.CheckpointError) as error:
        assert not (opened or flushed), error
        assert "not a table" in str(error) or not os.path.exists(path), error
        made(path=path).close()
        check(0)
    assert len(os.listdir(path)) <= 7, os.listdir(path)  # nothing is left over
    shutil.rmtree(path)
    if not status:
        break
print(left, opened)
"""


class InFiles(Tables):
    """The same calls on a table in files, which is opened again now and then."""

    @initialize(buffer=st.sampled_from([1, 1 << 30]))
    def begin(self, buffer):
        self.folder, self.buffer = tempfile.mkdtemp(), buffer
        self.start(path=Path(self.folder, "table"), buffer_bytes=buffer)

    @rule(how=st.sampled_from(["reopen", "flush", "write"]))
    def go_on_from_a_copy(self, how):
        flushes = self.table.flushes
        if how == "flush":
            self.table.flush()
            self.oracle.updater.flush(INDEX, self.oracle.weight)
        elif how == "write":
            self.table.flush(decay=False)
        else:
            self.table.close()
            path = Path(self.folder, "table")
            self.table = fastopt.EmbeddingTable.open(
                path, init=first, buffer_bytes=self.buffer, verify=True
            )
        assert self.table.flushes > flushes

    @rule(ids=BATCHES)
    def prefetch(self, ids):
        self.table.prefetch(np.array(ids, np.int64))

    def teardown(self):
        if hasattr(self, "table"):
            self.table.close()
            shutil.rmtree(self.folder)


IN_FILES = "adam", "8 bits", "catch_up", "rows", "rounding", "split", "noise"


@pytest.mark.slow
@pytest.mark.parametrize("form", kept(IN_FILES, "8 bits", "catch_up"))
def test_the_bits_are_those_of_a_table_in_memory(form):
    check_machine(InFiles, form, max_examples=8, stateful_step_count=12)


@pytest.mark.slow
@pytest.mark.parametrize("every", [23, pytest.param(1, marks=pytest.mark.slow("nightly"))])
def test_a_kill_at_any_system_call_leaves_a_whole_flush(every, tmp_path, run_python):
    steps, opened = map(int, run_python(KILLED, tmp_path, every).split())
    assert steps > 100
    assert opened > 0


@pytest.fixture
def table(tmp_path):
    """A table in files, flushed, of some pages of rows."""
    made = fastopt.EmbeddingTable(30, "adam", path=tmp_path / "table", capacity=1000)
    made.update(np.arange(200), np.ones((200, 30), np.float32))
    made.flush()
    return made


def contents(path):
    return {file.name: file.read_bytes() for file in path.iterdir()}


def test_lookups_and_updates_change_no_file_before_a_flush(table):
    before = contents(table.path)
    table.lookup(np.arange(10**6, 10**6 + 700))
    table.lookup([3, 1000, 1001])
    table.update([3, 1000, 2000], np.ones((3, 30), np.float32))
    table.evict(keep=[3])
    assert contents(table.path) == before
    table.flush()
    assert contents(table.path) != before


FULL_DISK = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.fixture
def full(monkeypatch):
    """Within it a function of the system fails after some calls, as with a full disk."""

    @contextlib.contextmanager
    def full(call, after=0, error=FULL_DISK):
        real, times = getattr(os, call), count()

        def function(*args):
            if next(times) >= after:
                raise error
            return real(*args)

        with monkeypatch.context() as patched:
            patched.setattr(os, call, function)
            with pytest.raises(type(error), match=r"No space left|^$"):
                yield

    return full


ONES = np.ones((9, 30), np.float32)


@pytest.mark.parametrize(("call", "calls"), [("pwrite", 4), ("fsync", 4), ("replace", 1)])
def test_a_full_disk_loses_nothing(call, calls, table, full):
    path = table.path
    for after in range(calls):
        table.update(np.arange(9), ONES)
        weight = table.weight.copy()
        with full(call, after):
            table.flush()
        np.testing.assert_array_equal(table.weight, weight)
    table.update([900], ONES[:1])
    table.flush()
    weight = table.weight.copy()
    table.close()
    with fastopt.EmbeddingTable.open(path, verify=True) as again:
        np.testing.assert_array_equal(again.weight, weight)
        assert again.flushes == table.flushes


def test_a_table_that_cannot_be_flushed_takes_no_more_than_its_buffer(table, full):
    table.buffer_bytes = 1
    table.update([1], ONES[:1])
    before = table.weight.copy(), table.step
    with full("fsync"):
        table.update([1], ONES[:1])
    np.testing.assert_array_equal(table.weight, before[0])
    assert table.step == before[1]


def damage(path, offset=100):
    data = bytearray(path.read_bytes())
    data[offset] ^= 1
    path.write_bytes(data)


def check_damaged(path, words):
    """The files are refused, and as they were."""
    before = contents(path)
    with pytest.raises(CheckpointError, match=words) as caught:
        fastopt.EmbeddingTable.open(path, verify=True)
    assert str(path) in str(caught.value)
    assert contents(path) == before


@pytest.mark.parametrize(
    ("harm", "words"),
    [
        (lambda p: (p / "table.safetensors").unlink(), "not a table, it has no table"),
        (lambda p: (p / "rows").unlink(), "rows or rows.sums is missing"),
        (lambda p: (p / "ids.sums").unlink(), "ids or ids.sums is missing"),
        (lambda p: os.truncate(p / "rows", BLOCK), "rows must have 73728 bytes or more, got 4096"),
        (lambda p: os.truncate(p / "ids", 10), "ids must have 4096 bytes or more, got 10"),
        (lambda p: damage(p / "ids"), "ids is damaged: the checksum of its block 0"),
        (lambda p: damage(p / "rows", 9000), "rows is damaged: the checksum of its block 2"),
        (lambda p: damage(p / "table.safetensors", 500), "table.safetensors.*(damaged|not a )"),
        (lambda p: (p / "table.safetensors").write_bytes(checkpoint.dumps([1])), "not the check"),
        (lambda p: (p / "log.safetensors").write_bytes(b"log"), "log.safetensors: not a safe"),
        (lambda p: (p / "log.safetensors").write_bytes(checkpoint.dumps(1)), "not the log of"),
    ],
)
def test_damaged_files_are_refused_and_left_alone(harm, words, table):
    table.close()
    harm(table.path)
    check_damaged(table.path, words)


def interrupt_a_flush(table, full):
    """Leave the files of a process that was killed once the log was on the disk."""
    with full("pwrite", error=KeyboardInterrupt()):
        table.flush()
    assert (table.path / "log.safetensors").exists()
    table._directory.close()


def abandon(path, **kwargs):
    """Open a table, and end without a flush; return its weight."""
    table = fastopt.EmbeddingTable.open(path, **kwargs)
    with pytest.raises(KeyError), table:
        raise KeyError
    return table.weight.copy()


@pytest.mark.parametrize("made", ["adam", FORMS["catch_up"]["make"]()])
def test_a_recovered_table_opens_again(made, tmp_path, full):
    """Also after recoveries that were interrupted."""
    path, ids = tmp_path / "table", np.arange(9)
    table = fastopt.EmbeddingTable(4, made, path=path)
    table.update(ids, np.ones((9, 4), np.float32))
    weight = table.weight.copy()
    interrupt_a_flush(table, full)
    for after in range(3):  # files
        with full("pwrite", after, KeyboardInterrupt()):
            fastopt.EmbeddingTable.open(path)
    for _ in range(2):
        np.testing.assert_array_equal(abandon(path, verify=True), weight)
    with fastopt.EmbeddingTable.open(path) as again:
        again.update(ids, np.ones((9, 4), np.float32))
    assert (abandon(path, verify=True) != weight).all()


FULL = """
import os, shutil, sys
import numpy as np
import fastopt

where, ids = sys.argv[1], np.arange(400)
table = fastopt.EmbeddingTable(64, fastopt.SGD(lazy_update=True), init="zeros", path=f"{where}/a")
table.lookup(ids)
table.flush()
shutil.copytree(f"{where}/a", f"{where}/b")
for size in (0, os.path.getsize(f"{where}/a/rows")):  # which leaves a hole for the zeros
    os.truncate(f"{where}/b/rows", size)

def fill():
    with open(f"{where}/fill", "wb", buffering=0) as file:
        while file.write(bytes(4096)):
            pass

def fail(call):
    try:
        call()
    except OSError as error:
        print(error.strerror)

fail(fill)
table.lookup(np.arange(1000, 3000))
table.update(ids, np.ones((400, 64), np.float32))
fail(table.flush)
fail(lambda: fastopt.EmbeddingTable.open(f"{where}/b").lookup(ids))
os.unlink(f"{where}/fill")
table.close()
fastopt.EmbeddingTable.open(f"{where}/b").close()
print(len(fastopt.EmbeddingTable.open(f"{where}/a", verify=True)))
"""


@pytest.mark.slow
@pytest.mark.skipif(
    sys.platform != "linux" or not shutil.which("mount"), reason="needs a tmpfs of its own"
)
def test_a_full_tmpfs_raises_and_the_table_remains_usable(tmp_path, run_python):
    """Access to a hole of a mapped file on a full tmpfs would end the process by SIGBUS."""
    made = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=6m", "tmpfs", tmp_path], capture_output=True
    )
    if made.returncode:
        pytest.skip("mounting needs privileges")
    try:
        words = run_python(FULL, tmp_path).splitlines()
    finally:
        subprocess.run(["umount", tmp_path], check=True)
    assert words == [os.strerror(errno.ENOSPC)] * 3 + ["2400"]


LINKED = ("rows", "rows.sums", "ids", "ids.sums", "table.safetensors", "log.safetensors")


@pytest.mark.parametrize("link", ["symlink_to", "hardlink_to", "dangling"])
@pytest.mark.parametrize("name", LINKED)
def test_links_are_refused_and_their_targets_left_alone(name, link, table, tmp_path):
    """A directory from someone else could have links to the user's files."""
    file, mine = table.path / name, tmp_path / "mine"
    table.close()
    mine.mkdir()
    (mine / "file").write_bytes(file.read_bytes() if file.exists() else b"mine")
    file.unlink(missing_ok=True)
    getattr(file, link if link != "dangling" else "symlink_to")(mine / "file")
    if link == "dangling":
        (mine / "file").unlink()
    before = contents(mine)
    with pytest.raises(CheckpointError, match=f"{name} must be a regular file, not a link"):
        fastopt.EmbeddingTable.open(table.path)
    assert contents(mine) == before


def test_a_log_is_applied_after_all_checks(table, full):
    table.update([1], ONES[:1])
    interrupt_a_flush(table, full)
    damage(table.path / "rows", 9000)
    check_damaged(table.path, "rows is damaged")


def test_a_log_with_a_distant_row_is_refused(table):
    """All blocks up to the row would be written."""
    path, described = table.path, table._description()
    changes = {name: file.changes() for name, file in table._directory.files.items()}
    record = table._directory.files["rows"].records[:1].copy()
    table.close()
    changes["rows"] = np.array([999]), record
    log = {"table": described, "changes": changes}
    (path / "log.safetensors").write_bytes(checkpoint.dumps(log))
    check_damaged(path, r"must have \d+ new rows of rows, some are missing")


def test_a_machine_with_larger_pages_opens_the_files_and_the_other_way_round(tmp_path, monkeypatch):
    """Pages have 4 KB on x86-64, 16 KB on Apple's processors and 64 KB on some ARM servers."""
    path, ids = tmp_path / "table", np.arange(500)
    sgd = fastopt.SGD(learning_rate=1.0, lazy_update=True)
    fastopt.EmbeddingTable(30, sgd, init="zeros", path=path).close()
    for step, size in enumerate((4096, 65536, 16384, 4096)):
        monkeypatch.setattr(directory, "PAGE", size)
        with fastopt.EmbeddingTable.open(path, verify=True) as table:
            assert (table.lookup(ids) == -step).all()
            table.lookup(ids + 10**6 * step)
            table.flush()
            table.update(ids, np.ones((500, 30), np.float32))


def test_a_new_directory_is_synced_into_its_parent(tmp_path, monkeypatch):
    synced = []
    monkeypatch.setattr(os, "fsync", lambda descriptor: synced.append(os.fstat(descriptor)))
    fastopt.EmbeddingTable(2, "adam", path=tmp_path / "table")
    assert any(os.path.samestat(status, os.stat(tmp_path)) for status in synced)


REFUSED = {
    "fastopt.EmbeddingTable(2, fastopt.LAMB(lazy_update=True), path=new)":
        "ValueError: reads the whole weight in each update",
    "fastopt.EmbeddingTable(2, fastopt.AdamW(sparse_decay='dense'), path=new)":
        "ValueError: sparse_decay='dense' writes to all rows",
    **each("fastopt.EmbeddingTable(2, 'adam', path={})", "FileExistsError: no empty",
           *(f"new / '{name}'" for name in ("file", "thesis.tmp", "rows", ".0123-0123.tmp"))),
    "fastopt.EmbeddingTable(2, 'adam', path=closed)": "FileExistsError: open.. opens it",
    "fastopt.EmbeddingTable.load(closed)":
        r"CheckpointError: is a directory; EmbeddingTable.open\(\)",
    "fastopt.EmbeddingTable.open(new / 'rows')": "CheckpointError: not a table",
    "fastopt.EmbeddingTable.open(new / 'nothing')": "FileNotFoundError: nothing",
    "fastopt.EmbeddingTable.open(table.path)":
        "CheckpointError: another process or table has it open",
    "table.weight.__setitem__(0, 1)": "ValueError: read-only",
}  # fmt: skip


def test_what_cannot_be_a_table_is_refused_and_left_alone(table, tmp_path):
    new, closed = tmp_path / "new", tmp_path / "closed"
    for name in ("thesis.tmp", "rows", ".0123-0123.tmp"):
        (new / name).mkdir(parents=True)
        (new / name / name).write_bytes(b"")
    (new / "file").write_bytes(b"1")
    fastopt.EmbeddingTable(2, "adam", path=closed).close()

    def held():
        return [*map(contents, (*folders, closed, table.path))], {*new.iterdir()}

    folders = [path for path in new.iterdir() if path.is_dir()]
    before = held()
    for code, error in REFUSED.items():
        check_refused(code, error, globals() | locals())
        assert held() == before


def test_a_forked_child_neither_flushes_nor_keeps_the_directory_locked(table):
    path, (reads, writes) = table.path, os.pipe()
    child = os.fork()
    if not child:
        os.close(writes)
        os.read(reads, 1)  # until the parent has opened it again
        try:
            table.flush()
        except OSError as error:
            os._exit(7 if "opened by another process" in str(error) else 1)
        os._exit(0)
    table.close()
    try:
        fastopt.EmbeddingTable.open(path).close()
    finally:
        os.close(writes)
        os.close(reads)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7


def test_a_directory_that_is_closed_cannot_be_flushed(table):
    before = contents(table.path)
    table.update([1], ONES[:1])
    table._directory.close()
    with pytest.raises(OSError, match="is closed, and another process may have it open"):
        table.flush()
    assert contents(table.path) == before


@pytest.mark.parametrize("own", [True, False])
@pytest.mark.parametrize("after", range(5))
def test_a_failed_creation_removes_what_it_made_and_nothing_else(own, after, tmp_path, full):
    path, adam = tmp_path / "table", fastopt.Adam()
    if not own:
        path.mkdir()
    with full("fsync", after):
        fastopt.EmbeddingTable(2, adam, path=path)
    assert [*tmp_path.rglob("*")] == ([] if own else [path])
    fastopt.EmbeddingTable(2, adam, path=path).close()


def test_on_windows_the_missing_function_is_named(monkeypatch, tmp_path):
    monkeypatch.delattr(directory.mmap, "MAP_PRIVATE")
    with pytest.raises(OSError, match="needs the mmap of a POSIX system"):
        fastopt.EmbeddingTable(2, "adam", path=tmp_path / "table")
