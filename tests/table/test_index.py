"""How an EmbeddingTable finds rows, what they start with, and where they lie."""

import copy
import sys

import numpy as np
import pytest

import fastopt
from fastopt import initializer


def plain(dim=2, **kwargs):
    return fastopt.EmbeddingTable(dim, fastopt.SGD(learning_rate=1.0), **kwargs)


@pytest.mark.slow
def test_rows_take_24_bytes_besides_weight_and_state():
    table = plain(init="zeros")
    index = table._index
    for count in range(2_000, 60_000, 500):
        table.lookup(np.arange(count) * 7919)
        assert index.slots.nbytes + 16 * index.high <= 24 * count
    table.evict(keep=table.ids()[::2])
    table.lookup(-np.arange(1, 29_000))
    assert index.slots.nbytes + 16 * index.high <= 24 * index.high


def test_ids_come_and_go_without_an_end_to_the_slots():
    """Slots of rows that are gone are used again or dropped."""
    table = plain(init="zeros")
    for turn in range(60):
        ids = np.arange(turn * 300, turn * 300 + 700)
        rows = table.rows(ids, create=True)
        np.testing.assert_array_equal(np.sort(rows), np.arange(700))
        np.testing.assert_array_equal(table.rows(ids), rows)
        table.evict(keep=ids[300:])
        assert (table.rows(ids[:300]) == -1).all()
    assert len(table) == 400
    assert table._index.slots.nbytes <= 8 * 700


@pytest.mark.slow
def test_a_row_never_moves():
    table = plain(capacity=200_000)
    table.update([5], np.ones((1, 2), np.float32))
    early = table.weight
    address, value = early.ctypes.data, early.copy()
    table.lookup(np.arange(1000, 100_000))
    assert table.weight.ctypes.data == address
    np.testing.assert_array_equal(early, value)
    table.update([5], np.ones((1, 2), np.float32))
    np.testing.assert_array_equal(early, value - 1)


def test_ids_keep_shape_sign_and_size():
    table = plain()
    ids = np.array([[2**63 - 1, -1], [-(2**63), 0]])
    assert table.lookup(ids).shape == (2, 2, 2)
    assert table.lookup(-1).shape == (2,)
    assert table.lookup([]).shape == (0, 2)
    assert list(table) == ids.ravel().tolist()
    assert table.ids().dtype == table.id_dtype == np.int64
    np.testing.assert_array_equal(table.rows(np.array([0, -1], np.int32)), [3, 1])
    large = copy.deepcopy(plain())
    large.lookup(np.array([2**64 - 1, 1], np.uint64))
    assert list(large) == list(copy.deepcopy(large)) == [2**64 - 1, 1]
    assert large.id_dtype == np.uint64
    assert 2**64 - 1 in large
    assert -1 not in large
    assert large.rows([1]) == [1]


def test_first_values_depend_on_seed_and_id_alone():
    ids = np.random.default_rng(0).integers(-(2**63), 2**63 - 1, 500)
    at_once = plain(64, init=initializer.Uniform(0.5, rng=7))
    values = at_once.lookup(ids)
    single = plain(64, init=initializer.Uniform(0.5, rng=7))
    for some in np.array_split(ids[::-1], 7):
        single.lookup(some)
    np.testing.assert_array_equal(single.lookup(ids), values)
    single.update(ids, np.ones((500, 64), np.float32))
    single.evict(keep=[])
    np.testing.assert_array_equal(single.lookup(ids), values)
    other = plain(64, init=initializer.Uniform(0.5, rng=8)).lookup(ids)
    assert abs(np.corrcoef(other.ravel(), values.ravel())[0, 1]) < 0.02


@pytest.mark.parametrize(
    ("init", "deviation", "kurtosis"),
    [
        (initializer.Uniform(0.5, rng=7), 0.5 / np.sqrt(3), 1.8),
        (initializer.Normal(2.0, rng=0), 2, 3),
    ],
)
def test_first_values_have_the_distribution_of_the_initializer(init, deviation, kurtosis):
    values = plain(64, init=init).lookup(np.arange(1000)).astype(float)
    assert values.std() == pytest.approx(deviation, rel=0.02)
    assert abs(values.mean()) < 0.015 * deviation
    assert (values**4).mean() / values.var() ** 2 == pytest.approx(kurtosis, abs=0.1)
    assert (plain(init=initializer.Constant(0.5)).lookup([9]) == 0.5).all()


def test_ids_that_wait_for_a_row_are_forgotten_with_time():
    table = plain(min_count=2)
    table.lookup([1])
    table.update([1], np.ones((1, 2), np.float32))
    assert table.evict(unused_for=1).tolist() == []
    table.lookup([1])
    assert len(table) == 0
    table.lookup([1])
    assert 1 in table


LIMITED = """
import resource, sys
import fastopt
resource.setrlimit(resource.RLIMIT_AS, (1 << 34, 1 << 34))
table = fastopt.EmbeddingTable(64, "adam")
print(table.capacity)
table.lookup([1, 2])
try:
    fastopt.EmbeddingTable(64, "adam", capacity=1 << 26)
except MemoryError as error:
    print(error)
"""

on_linux = pytest.mark.skipif(sys.platform != "linux", reason="limits and /proc of Linux")


@on_linux
@pytest.mark.slow("exhaustive")
def test_without_address_space_a_table_reserves_less_or_says_so(run_python):
    rows, error = run_python(LIMITED).splitlines()
    assert 1 << 20 <= int(rows) < 1 << 25
    assert "capacity of 67108864 rows: cannot reserve" in error


RESIDENT = """
import mmap, sys
import numpy as np
import fastopt

def resident():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * mmap.PAGESIZE

ids, updated = np.arange(100_000) * 2**40, int(sys.argv[1])
grads = np.ones((updated, 64), np.float32)

def use(table):
    table.rows(ids, create=True)
    yield resident()
    table.update(ids[:updated], grads)
    yield resident()

list(use(fastopt.EmbeddingTable(64, "adam")))  # compiles, and starts threads
before = resident()
for present in use(fastopt.EmbeddingTable(64, "adam")):
    print((present - before) / (len(ids) * 64 * 4))
"""


@pytest.mark.slow
@on_linux
@pytest.mark.parametrize(
    ("updated", "most"),
    [(200, 2), pytest.param(100_000, 3.8, marks=pytest.mark.slow("exhaustive"))],
)
def test_memory_is_that_of_the_rows_in_use(updated, most, run_python):
    """State takes none before the first update of a row; what a call needed stays with malloc."""
    weight, all_of_it = map(float, run_python(RESIDENT, updated).split())
    assert 1 < weight < 1.6
    assert all_of_it < most
