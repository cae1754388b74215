"""Plans of a step on many ranks, made on one: their memory, that of buckets, copies and sums."""

import functools
import itertools
import tracemalloc
from types import SimpleNamespace

import numpy as np
import pytest

from fastopt._kernels import copying
from fastopt._kernels.layout import bfloat16
from fastopt.checkpoint.restore.shards import line_bytes, placed
from fastopt.distributed import plan
from fastopt.distributed.job import Layers, standing
from fastopt.distributed.transport import Layered, Transport, default_buckets
from helpers.cases import exhaustive

RESNET, LARGE = [(159, 1000)] * 161, [(10_000, 1000)] * 100
"""Shapes with as many elements and tensors as ResNet-50, and 1e9 elements."""
LIMIT = 64_000_000


def room(ranks, per_node, shapes, form):
    """Bytes of buckets, beside those of the state: of the first rank, and its share of a node's."""
    weights = [np.zeros(shape, np.float32) for shape in shapes]
    where = placed(((k, w.shape, "float32", form) for k, w in enumerate(weights)), ranks)
    count, several = ranks // per_node, per_node > 1
    limit, depth = default_buckets(*((count, per_node) if several else (ranks,)))
    made = plan.Plan([*where], weights, where, 0, ranks, limit, {}, depth=depth)
    everyone = SimpleNamespace(rank=0, size=ranks, comm=None)
    moves, shared = Transport(everyone), 0
    if several:
        node = SimpleNamespace(comm=None, size=per_node, rank=0)
        members = np.arange(ranks).reshape(-1, per_node).tolist()
        layers = Layers(node, *standing(members, 0), per_node)
        layered = Layered(everyone, layers)
        (gradients, returned), slots = layered._needed(made)
        shared = slots * (per_node * gradients + returned) // per_node
        moves = layered if count > 1 else moves
    own = max(moves._room(bucket.summed) for bucket in made.buckets)
    return own * 3 * min(depth, len(made.buckets)) + shared


@pytest.mark.parametrize("per_node", [1, 8, 64])
@pytest.mark.parametrize("ranks", [64, 1024, 16_384])
@pytest.mark.parametrize("shapes", [RESNET, *exhaustive(LARGE)], ids=len)
@pytest.mark.parametrize("form", ["flat", "whole", *exhaustive("rows")])
def test_buckets_take_at_most_64_mb(ranks, shapes, per_node, form):
    most = 4 / 3 * LIMIT if form == "rows" else LIMIT  # long rows are not cut
    assert room(ranks, per_node, shapes, form) < most


def test_small_jobs_have_buckets_of_4_mib():
    for ranks in (1, 2, 4, 16, 40):
        assert default_buckets(ranks)[0] == max(4 << 20, ranks << 18)
        assert default_buckets(1, max(ranks, 2)) == (4 << 20, 2)


RANKS, RANK = 1024, 500


def planned(weights):
    form = ((k, w.shape, w.dtype.name, "flat") for k, w in enumerate(weights))
    indices, found = [*range(len(weights))], placed(form, RANKS)
    return plan.Plan(indices, weights, found, RANK, RANKS, line_bytes(RANKS), {})


def test_a_plan_for_many_ranks_is_small():
    """At most 2 MB for 2.5e8 elements, besides buckets and gradients."""
    weights = [np.zeros(2_500_000, np.float32) for _ in range(100)]
    planned(weights)
    tracemalloc.start()
    found = planned(weights)
    held, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    held -= sum(group.grads.nbytes for group in found.groups)
    assert held < 2e6, held
    assert len(found.buckets) == 4


def test_threads_copy_the_same_bytes():
    """Runs of any length at any offset, within the caches and past them."""
    rng = np.random.default_rng(0)
    for dtype, most in (("float32", copying.STREAM_FROM // 2), ("uint16", plan.COMPILED_FROM[0])):
        size = np.dtype(dtype).itemsize
        lengths = [0, 1, 7, 33, 1000, copying.CHUNK // size + 5, most // size, most // size + 3]
        arrays = [rng.integers(0, 60_000, n + 9).astype(dtype) for n in lengths]
        starts = rng.integers(0, 9, len(lengths))
        ends = np.cumsum(lengths)
        runs = np.column_stack([np.arange(len(lengths)), starts, starts + lengths, ends - lengths])
        packed = np.zeros(ends[-1] + 3, dtype)
        assert plan._copied(arrays, runs, packed[1:-2], back=False)
        expected = [array[n : n + k] for array, n, k in zip(arrays, starts, lengths, strict=True)]
        assert np.array_equal(packed[1:-2], np.concatenate(expected))
        assert not packed[[0, -2, -1]].any()
        others = [np.zeros_like(array) for array in arrays]
        assert plan._copied(others, runs, packed[1:-2], back=True)
        for other, array, n, k in zip(others, arrays, starts, lengths, strict=True):
            assert np.array_equal(other, [0] * n + [*array[n : n + k]] + [0] * (9 - n))
    assert not plan._copied(arrays, runs, packed.astype("float64")[1:-2], back=False)


def test_threads_sum_in_the_order_of_the_ranks():
    """Bits are those of one addition after the other, in the dtype of the arithmetic."""
    rng = np.random.default_rng(0)
    wires = ("float32", "float64", "float16", bfloat16())
    sizes = ((2, 3), (3, 0), (5, 2 * copying.PART + 7))
    for wire, (ranks, size), large in itertools.product(wires, sizes, (False, True)):
        real = np.float64 if wire == "float64" else np.float32
        parts = rng.normal(0, 100, (ranks, size)).astype(wire)
        own, received = parts[1].copy(), parts.copy()
        received[1] = 0  # as nothing was received from this rank
        total = np.full(size, np.nan, real)
        at = np.array([[part.ctypes.data for part in received]])
        at[0, 1] = own.ctypes.data
        plan.add_up(at, [size], received.dtype, total, large)
        assert total.tobytes() == functools.reduce(np.add, parts.astype(real)).tobytes()
