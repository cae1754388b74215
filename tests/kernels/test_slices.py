"""Slices of tensors are updated as the whole: what ranks that share a tensor out rely on."""

import numpy as np
import pytest

from fastopt import optimizer
from fastopt.distributed import ShardedUpdater, run_threads
from helpers.tensor_lists import normal


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
