"""Memory of the buckets of large jobs: those of one rank are planned, without arrays."""

import tracemalloc
from types import SimpleNamespace

import numpy as np
import pytest

from fastopt.checkpoint.restore.shards import placed
from fastopt.distributed.exchange import Exchange
from fastopt.distributed.job import Layers, standing
from fastopt.distributed.plan import Plan
from fastopt.distributed.transport import Layered, Transport, default_buckets
from helpers.cases import exhaustive

RESNET, LARGE = [(159, 1000)] * 161, [(10_000, 1000)] * 100
"""Shapes with as many elements and tensors as ResNet-50, and 1e9 elements."""
LIMIT = 64_000_000


def room(ranks, per_node, shapes, form):
    """Bytes of buckets, beside those of the state: of the first rank, and its share of a node's."""
    weights = [np.zeros(shape, np.float32) for shape in shapes]
    where = placed(((k, w.shape, "float32", form) for k, w in enumerate(weights)), ranks)
    nodes, several = ranks // per_node, per_node > 1
    limit, depth = default_buckets(*((nodes, per_node) if several else (ranks,)))
    plan = Plan([*where], weights, where, 0, ranks, limit, {}, depth=depth)
    everyone = SimpleNamespace(rank=0, size=ranks, comm=None)
    transport, shared = Transport(everyone), 0
    if several:
        node = SimpleNamespace(comm=None, size=per_node, rank=0)
        members = np.arange(ranks).reshape(-1, per_node).tolist()
        layers = Layers(node, *standing(members, 0), per_node)
        layered = Layered(everyone, layers)
        (gradients, returned), slots = layered._needed(plan)
        shared = slots * (per_node * gradients + returned) // per_node
        transport = layered if nodes > 1 else transport
    own = max(transport._room(bucket.summed) for bucket in plan.buckets)
    return own * 3 * min(depth, len(plan.buckets)) + shared


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


class Nobody:
    """Stands for all other ranks, whose operations end at once."""

    def __init__(self, rank, size):
        self.comm, self.rank, self.size, self.waits = self, rank, size, 0

    def all_to_all(self, *arguments):
        return SimpleNamespace(Test=lambda: True)

    all_gather = all_to_all

    def wait(self, request):
        while not request.Test():
            pass


def test_a_rank_that_owns_a_tensor_has_no_other_memory_for_its_sums():
    weight = np.zeros((22, 1_000_000), np.float32)
    where, (limit, depth) = placed([(0, weight.shape, "float32", "whole")], 64), default_buckets(64)
    ((owner, *_),) = where[0].owners(64)
    plan = Plan([0], [weight], where, owner, 64, limit, {}, depth=depth)
    ranks = Nobody(owner, 64)

    def step():
        transport = Transport(ranks)
        transport.reserve(plan)
        exchange = Exchange(ranks, plan, lambda plan: transport)
        exchange.grads = [weight.reshape(-1)]
        exchange.receive()
        exchange.finish()

    step()  # compiles
    tracemalloc.start()
    step()
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < LIMIT
