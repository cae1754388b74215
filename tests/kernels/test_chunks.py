"""Chunks of work, of which one has each element, and slices of tensors that ranks share out."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastopt import optimizer
from fastopt._kernels.chunks import chunks_of
from fastopt.distributed import ShardedUpdater, run_threads
from helpers.tensor_lists import normal

ITEMS = st.tuples(st.integers(0, 50_000), st.sampled_from([1, 1, 1, 0, 3, 64, 1000]))


def covered(chunks, tensors):
    """Whether every item of every tensor is in one chunk."""
    for tensor, (items, _) in enumerate(tensors):
        own = sorted((start, size) for t, start, size in chunks.tolist() if t == tensor and size)
        ends = np.cumsum([0] + [size for _, size in own]).tolist()
        if [start for start, _ in own] != ends[:-1] or ends[-1] != items:
            return False
    return True


@given(tensors=st.lists(ITEMS, min_size=1, max_size=6), size=st.sampled_from([1, 100, 32_768]))
def test_chunks_cover_everything_once(tensors, size):
    tensors = [(items if size > 1 else items % 100, width) for items, width in tensors]
    chunks, total = chunks_of(*tensors, size=size)
    assert covered(chunks, tensors)
    assert all(n * tensors[k][1] <= max(size, tensors[k][1]) for k, _, n in chunks.tolist())
    assert total == sum(items * width for items, width in tensors)


@pytest.mark.slow
def test_sums_of_slices_are_combined_before_a_pass_ends():
    """And elements are updated once, in parts that threads share."""
    start, grad = normal(0, (90_001,), "float32"), normal(1, (90_001,), "float32")
    whole = start.copy()
    for made in (optimizer.LAMB(), optimizer.Adam()):
        optimizer.get_updater(made)(0, grad, whole)

    def program(comm):
        weight = start.copy()
        for made in (optimizer.LAMB(), optimizer.Adam()):
            updater = ShardedUpdater(made, comm, bucket_bytes=100_000)
            updater(0, grad if comm.rank else 0 * grad, weight)
        return weight

    for weight in run_threads(2, program):
        np.testing.assert_allclose(weight, whole, rtol=1e-6)
