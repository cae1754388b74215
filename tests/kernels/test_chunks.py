"""Chunks of work: each element in one of them, equal shares, the same bits for any threads."""

import numba
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastopt import optimizer
from fastopt._kernels import chunks as tables
from fastopt._kernels import table
from fastopt._kernels.chunks import LINE, PARALLEL_FROM, balanced, chunks_of
from fastopt._kernels.threads import use_threads
from helpers.cases import exhaustive

ITEMS = st.tuples(st.integers(0, 50_000), st.sampled_from([1, 1, 1, 0, 3, 64, 1000]))


def covered(chunks, tensors):
    """Whether every item of every tensor is in one chunk."""
    for tensor, (items, _) in enumerate(tensors):
        own = sorted((start, size) for t, start, size in chunks.tolist() if t == tensor and size)
        ends = np.cumsum([0] + [size for _, size in own]).tolist()
        if [start for start, _ in own] != ends[:-1] or ends[-1] != items:
            return False
    return True


def shares(chunks, tensors, threads):
    """Elements of each thread, which takes equal numbers of chunks."""
    widths = np.array([width for _, width in tensors])
    work = chunks[:, 2] * widths[chunks[:, 0]]
    assert len(work) % threads == 0
    return work.reshape(threads, -1).sum(axis=1)


@given(tensors=st.lists(ITEMS, min_size=1, max_size=6), size=st.sampled_from([1, 100, 32_768]))
def test_chunks_cover_everything_once(tensors, size):
    tensors = [(items if size > 1 else items % 100, width) for items, width in tensors]
    chunks, total = chunks_of(*tensors, size=size)
    assert covered(chunks, tensors)
    assert total == sum(items * width for items, width in tensors)


@given(
    tensors=st.lists(ITEMS, min_size=1, max_size=6), threads=st.sampled_from([1, 2, 3, 5, 8, 64])
)
def test_balanced_chunks_cover_everything_once_in_equal_shares(tensors, threads):
    total = sum(items * width for items, width in tensors)
    if total < PARALLEL_FROM:
        return
    chunks, found = tables._balanced(tuple(tensors), threads)
    assert found == total
    assert covered(chunks, tensors)
    own = shares(chunks, tensors, threads)
    unit = (1 + len(tensors)) * LINE * max(width for _, width in tensors)
    assert own.max() <= total / threads + unit


@pytest.mark.parametrize("size", [65_536, 70_000, 100_000, 1_000_000, 1_000_003])
@pytest.mark.parametrize("threads", [2, 3, 4, 7])
def test_shares_of_one_tensor_are_equal(size, threads):
    own = shares(tables._balanced(((size, 1),), threads)[0], [(size, 1)], threads)
    assert own.max() - size / threads <= 2 * LINE


def test_small_tensors_are_not_divided_among_threads():
    assert balanced((1000, 1))[0].tolist() == [[0, 0, 1000]]


def ends(name, threads):
    """Bits of weights after some steps."""
    rng = np.random.default_rng(0)
    with use_threads(min(threads, numba.config.NUMBA_NUM_THREADS)):
        updater = optimizer.Updater(optimizer.create(name, learning_rate=0.1))
        weights = [rng.normal(size=shape) for shape in ((301, 257), (70_001, 1), (5, 3))]
        for _ in range(3):
            updater([0, 1, 2], [rng.normal(size=w.shape) for w in weights], weights)
    return [weight.tobytes() for weight in weights]


@pytest.mark.parametrize("name", ["adam", *exhaustive("lamb", "groupadagrad", "sgld")])
def test_results_have_the_same_bits_for_any_division(name, monkeypatch):
    """Divisions for more threads than this machine has, too."""
    expected = ends(name, 1)
    for threads in (2, 3, 5):
        tables._balanced.cache_clear()
        monkeypatch.setattr(
            table, "balanced", lambda *tensors, n=threads: tables._balanced(tensors, n)
        )
        assert ends(name, threads) == expected
