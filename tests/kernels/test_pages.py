"""The state of a large table takes memory only where rows have been updated."""

import sys

import pytest

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc/self/statm")

STEP = """
import mmap, sys
import numpy as np
from fastopt import optimizer

def resident():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * mmap.PAGESIZE

name, how, listed = sys.argv[1:]
height, width = 500_000, 64
rows = np.arange(height // 100)
if listed == "random":
    rows = np.sort(np.random.default_rng(0).choice(height, len(rows), replace=False))
values = np.ones((len(rows), width), np.float32)
updater = optimizer.get_updater(optimizer.create(name, sparse_decay=how))
small = np.ones((len(rows), width), np.float32)
updater("small", (values, np.arange(len(rows))), small)  # compiles, and starts threads
weight = np.ones((height, width), np.float32)
before = resident()
for _ in range(3):
    updater("large", (values, rows), weight)
state = updater.states["large"]
size = sum(array.nbytes for array in (state if isinstance(state, tuple) else [state]))
print((resident() - before) / size, size / weight.nbytes)
"""


def share(run_python, *args):
    resident, slots = map(float, run_python(STEP, *args).split())
    assert slots >= 1
    return resident


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "how"),
    [("adam", "touched"), pytest.param("adamw", "catch_up", marks=pytest.mark.slow("exhaustive"))],
)
def test_one_row_in_a_hundred_takes_its_pages_alone(name, how, run_python):
    """A page of 4 KB has 16 rows: rows at random need a page each, rows in order share them."""
    assert share(run_python, name, how, "random") <= 0.2
    assert share(run_python, name, how, "first") <= 0.05
