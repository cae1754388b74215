"""Branches for Windows and macOS, in processes without what these systems lack.

What Python, NumPy and numba do on these systems is not tested.
"""

import pytest

WITHOUT = {
    "linux": (),
    "win32": (
        *("os.register_at_fork", "os.fork", "os.O_DIRECTORY", "os.O_CLOEXEC", "os.getloadavg"),
        *("os.sched_getaffinity", "os.posix_fallocate", "os.SEEK_HOLE", "mmap.MAP_*"),
        *("mmap.MADV_*", "mmap.PROT_*", "mmap.mmap.madvise", "fcntl", "termios", "resource"),
    ),
    "darwin": (
        *("os.sched_getaffinity", "os.posix_fallocate", "mmap.MADV_*HUGEPAGE"),
        *("mmap.MADV_POPULATE_*", "mmap.MAP_NORESERVE"),
    ),
}

PATCH = """
import ctypes, fnmatch, importlib, mmap, os, sys, multiprocessing, multiprocessing.spawn
import numba, numpy as np, tempfile, termios, logging, subprocess, threading

system, *names = sys.argv[1:]

class Mapping(mmap.mmap):
    if system == "win32":
        madvise = property(doc="raises AttributeError")
    else:
        def madvise(self, option, *span):
            assert option != getattr(mmap, "MADV_HUGEPAGE", None)
            return super().madvise(option, *span)

for name in names:
    module, _, pattern = name.partition(".")
    if not pattern:
        sys.modules[module] = None
    elif pattern != "mmap.madvise":
        owner = importlib.import_module(module)
        for each in fnmatch.filter(dir(owner), pattern):
            delattr(owner, each)
mmap.mmap = Mapping
load = ctypes.CDLL

def library(name, *args, **kwargs):
    if name is None and system == "win32":
        raise TypeError("bad argument type for built-in operation")
    return load(name, *args, **kwargs)

ctypes.CDLL = library
sys.platform = system
"""

PROGRAM = """
import fastopt
from fastopt import info
from fastopt._kernels import pages
from fastopt.checkpoint import CheckpointError

pages.NORESERVE["darwin"] = 0x4000  # the flag of this system

updater = fastopt.Updater(fastopt.Adam(lr=0.5))
weights = [np.ones((300, 300)), np.ones(3)]
for _ in range(2):
    updater([0, 1], [np.ones_like(weight) for weight in weights], weights)
    updater(0, (np.ones((2, 300)), np.array([3, 1])), weights[0])
for _ in range(2):
    updater.save("run.safetensors")
again = fastopt.Updater(fastopt.Adam(lr=0.5))
again.load("run.safetensors")
assert again.get_states() == updater.get_states()

table = fastopt.EmbeddingTable(8, fastopt.SGD(lr=1.0), init="zeros", capacity=10_000)
table.update([7, -1, 7], np.ones((3, 8), np.float32))
assert table.lookup([7, -1])[:, 0].tolist() == [-2, -1]
table.save("table.safetensors")
try:
    kept = fastopt.EmbeddingTable(8, fastopt.SGD(lr=1.0), init="zeros", path="kept")
except OSError as error:
    assert system == "win32" and "needs the mmap of a POSIX system" in str(error), error
else:
    assert system != "win32"
    kept.update(range(5000), np.ones((5000, 8), np.float32))
    kept.flush()
    kept.update([1], np.ones((1, 8), np.float32))
    kept.prefetch([1, 2])
    kept.flush()
    kept.close()
    opened = fastopt.EmbeddingTable.open("kept")
    assert opened.lookup([0, 1])[:, 0].tolist() == [-1, -2]
    opened.close()
sys.platform = "linux"  # for the standard library, which describes the processor
assert "fastopt" in info.report()
print(*(float(weight.sum()).hex() for weight in weights))
"""


@pytest.mark.slow("exhaustive")
def test_updates_files_and_tables_need_nothing_that_a_system_lacks(run_python, tmp_path):
    printed = {}
    for system in WITHOUT:
        (tmp_path / system).mkdir()
        printed[system] = run_python(
            PATCH + PROGRAM, system, *WITHOUT[system], cwd=tmp_path / system
        )
    assert len(set(printed.values())) == 1
    assert printed["linux"].count("0x") == 2
