"""Slices of tensors are updated as the whole: what ranks that share a tensor out rely on."""

import numpy as np
import pytest

from fastopt import optimizer
from fastopt._engine.validate import leaves
from fastopt.distributed import ShardedUpdater, run_threads
from helpers.tensor_lists import normal

SHAPE, CUT = (40, 6), 17
"""Shape of a tensor, and the row where it is cut."""

DRAWING = {
    "noise": ("sgld", {}, "float32"),
    "weight": ("adam", {"rounding": "stochastic"}, "bfloat16"),
    "state": ("adam", {"state_dtype": "bfloat16"}, "float32"),
    "rows": ("groupadagrad", {"state_dtype": "bfloat16", "rounding": "stochastic"}, "float16"),
}


@pytest.mark.slow("exhaustive")
@pytest.mark.parametrize("kind", DRAWING)
def test_slices_draw_the_numbers_of_the_whole_tensor(kind, bfloat16):
    name, arguments, dtype = DRAWING[kind]
    whole, weights = normal(0, SHAPE, dtype), normal(0, SHAPE, dtype)
    lower, apart = weights[CUT:], weights[CUT:].copy()
    updaters = [optimizer.get_updater(optimizer.create(name, **arguments)) for _ in range(4)]
    updaters[2].parameters.of(0).offset = CUT * SHAPE[1]
    for step in range(3):
        grad = normal(step + 1, SHAPE, dtype)
        updaters[0](0, grad, whole)
        updaters[1](0, grad[:CUT], weights[:CUT])
        updaters[2](0, grad[CUT:], lower)
        updaters[3](0, grad[CUT:], apart)
    assert weights.tobytes() == whole.tobytes()
    assert [a.tobytes() for a in leaves(updaters[3].states[0])] + [apart.tobytes()] != [
        a.tobytes() for a in leaves(updaters[2].states[0])
    ] + [lower.tobytes()]


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
