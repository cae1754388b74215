"""Checks of what a step takes on 1,024 ranks: counts, on one rank with a communicator of none."""

import tracemalloc

import numpy as np
from ranks_common import comm

from fastopt._kernels import copying
from fastopt._kernels.layout import bfloat16
from fastopt.checkpoint.restore.shards import line_bytes, placed
from fastopt.distributed import plan as plans
from fastopt.distributed.plan import Plan

RANKS, RANK = 1024, 500


def planned(weights, limit=None):
    form = ((k, w.shape, w.dtype.name, "flat") for k, w in enumerate(weights))
    found, indices = placed(form, RANKS), [*range(len(weights))]
    return Plan(indices, weights, found, RANK, RANKS, limit or line_bytes(RANKS), {})


def check_a_plan_for_many_ranks_is_small():
    """At most 2 MB for 2.5e8 elements, besides buckets and gradients."""
    if comm.rank:
        return
    weights = [np.zeros(2_500_000, np.float32) for _ in range(100)]
    planned(weights)
    tracemalloc.start()
    plan = planned(weights)
    held, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    held -= sum(group.grads.nbytes for group in plan.groups)
    assert held < 2e6, held
    assert len(plan.buckets) == 4


def check_threads_copy_the_same_bytes():
    """Runs of any length at any offset, within the caches and past them."""
    if comm.rank:
        return
    rng = np.random.default_rng(0)
    for dtype, most in (("float32", copying.STREAM_FROM // 2), ("uint16", plans.COMPILED_FROM[0])):
        size = np.dtype(dtype).itemsize
        lengths = [0, 1, 7, 33, 1000, copying.CHUNK // size + 5, most // size, most // size + 3]
        arrays = [rng.integers(0, 60_000, n + 9).astype(dtype) for n in lengths]
        starts = rng.integers(0, 9, len(lengths))
        ends = np.cumsum(lengths)
        runs = np.column_stack([np.arange(len(lengths)), starts, starts + lengths, ends - lengths])
        packed = np.zeros(ends[-1] + 3, dtype)
        assert plans._copied(arrays, runs, packed[1:-2], back=False)
        expected = [array[n : n + k] for array, n, k in zip(arrays, starts, lengths, strict=True)]
        assert np.array_equal(packed[1:-2], np.concatenate(expected))
        assert not packed[[0, -2, -1]].any()
        others = [np.zeros_like(array) for array in arrays]
        assert plans._copied(others, runs, packed[1:-2], back=True)
        for other, array, n, k in zip(others, arrays, starts, lengths, strict=True):
            assert np.array_equal(other[n : n + k], array[n : n + k])
            assert not other[:n].any()
            assert not other[n + k :].any()
    assert not plans._copied(arrays, runs, packed.astype("float64")[1:-2], back=False)


def check_threads_sum_in_the_order_of_the_ranks():
    """Bits are those of one addition after the other, in the dtype of the arithmetic."""
    if comm.rank:
        return
    rng = np.random.default_rng(0)
    for wire, real in (
        ("float32", "float32"),
        ("float64", "float64"),
        ("float16", "float32"),
        (bfloat16(), "float32"),
    ):
        for ranks, size in ((2, 3), (3, 0), (5, 2 * copying.PART + 7)):
            parts = rng.normal(0, 100, (ranks, size)).astype(wire)
            expected = parts[0].astype(real)
            for part in parts[1:]:
                expected += part.astype(real)
            own, received = parts[1].copy(), parts.copy()
            received[1] = 0  # as nothing was received from this rank
            for large in (False, True):
                total = np.full(size, np.nan, real)
                at = np.array([[part.ctypes.data for part in received]])
                at[0, 1] = own.ctypes.data
                plans.add_up(at, [size], received.dtype, total, large)
                assert total.tobytes() == expected.tobytes()
