"""Slices of tensors are updated as the whole: what ranks that share a tensor out rely on."""

import numpy as np
import pytest

from fastopt import optimizer
from fastopt._engine.validate import leaves
from fastopt._kernels import table
from helpers.tensor_lists import normal

SHAPE, CUT = (40, 6), 17
"""Shape of a tensor, and the row where it is cut."""

DRAWING = {
    "noise": ("sgld", {}, "float32"),
    "weight": ("adam", {"rounding": "stochastic"}, "bfloat16"),
    "state": ("adam", {"state_dtype": "bfloat16"}, "float32"),
    "rows": ("groupadagrad", {"state_dtype": "bfloat16", "rounding": "stochastic"}, "float16"),
}


@pytest.mark.exhaustive
@pytest.mark.parametrize("kind", DRAWING)
def test_slices_draw_the_numbers_of_the_whole_tensor(kind, bfloat16):
    name, arguments, dtype = DRAWING[kind]
    whole, weights = normal(0, SHAPE, dtype), normal(0, SHAPE, dtype)
    lower, apart = weights[CUT:], weights[CUT:].copy()
    updaters = [optimizer.get_updater(optimizer.create(name, **arguments)) for _ in range(4)]
    updaters[2].planner.offsets[0] = CUT * SHAPE[1]
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


def test_sums_of_slices_are_combined_before_a_pass_ends():
    whole = normal(0, (90_000,), "float32")
    weights, grad = whole.copy(), normal(1, (90_000,), "float32")
    half = len(whole) // 2
    made = [optimizer.get_updater(optimizer.LAMB()) for _ in range(3)]
    made[0](0, grad, whole)
    totals = []

    def measure(chunks, sums, tensors, largest):
        assert not largest
        totals.append(sums.sum(axis=0, keepdims=True))
        return chunks, sums

    for k, updater in enumerate(made[1:]):
        part = slice(k * half, (k + 1) * half)
        updater.planner.launcher = lambda tables: table.launch(tables, measure)
        updater(0, grad[part], weights[part].copy())
    together = np.array([[0, 0, 1]]), sum(totals)
    for k, updater in enumerate(made[1:]):
        part = slice(k * half, (k + 1) * half)
        updater.optimizer._index_update_count.clear()
        for array in updater.states[0]:
            array[...] = 0
        updater.planner.launcher = lambda tables: table.launch(tables, lambda *_: together)
        updater(0, grad[part], weights[part])
    np.testing.assert_allclose(weights, whole, rtol=1e-6)
