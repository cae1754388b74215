"""Gradients that are summed within nodes first, on threads as ranks of several nodes."""

import errno
import functools
import gc
import os
import random
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from fastopt import optimizer
from fastopt.amp import LossScaler
from fastopt.distributed import (
    ShardedUpdater,
    agreement,
    exchange,
    flat_like,
    run_threads,
    transport,
)
from fastopt.distributed.ranks import Ranks
from helpers.cases import slow
from helpers.ranks import NodeWorld
from helpers.tensor_lists import dtype_of

SHAPES = [(40, 7), (1,), (0, 3), (), (257,), (3, 5)]
INDICES = [*range(len(SHAPES))]
STEPS = 3


def nodes(*sizes, kind=NodeWorld):
    """Class of communicators with so many ranks on the nodes."""
    return type("Nodes", (kind,), {"sizes": sizes})


def normal(rank, step, dtype, shapes=SHAPES):
    rng = np.random.default_rng([rank, step])
    return [np.asarray(rng.normal(size=shape)).astype(dtype) for shape in shapes]


def in_turn(arrays):
    """Sum of arrays, one after the other."""
    return functools.reduce(np.add, arrays)


class Whole(optimizer.Optimizer):
    """Optimizer whose tensors are not split."""

    def update(self, index, weight, grad, state):
        self._update_count(index)
        weight -= (0.01 * grad).astype(weight.dtype)


RULES = {"sgd": lambda: optimizer.SGD(momentum=0.9, multi_precision=True), "whole": Whole}


def expected(ranks, kind, dtype, wire=None, rule="sgd", skips=(), shapes=SHAPES, steps=STEPS):
    """Weights after some steps of one process with the sums of nodes, each rounded to `wire`."""
    real = np.result_type(dtype, "float32")
    weights = normal(99, 0, dtype, shapes)
    updater = optimizer.get_updater(RULES[rule]())
    for step in (step for step in range(steps) if step not in skips):
        every = [normal(rank, step, dtype, shapes) for rank in range(ranks)]
        grads = []
        for parts in zip(*every, strict=True):
            parts = [part.astype(real) for part in parts]
            sums = [in_turn(parts[first:last]) for first, last in kind.nodes(ranks)]
            if wire is not None and len(sums) > 1:
                sums = [each.astype(dtype_of(wire)).astype(real) for each in sums]
            grads.append(in_turn(sums))
        updater([*range(len(shapes))], grads, weights)
    return [weight.tobytes() for weight in weights]


def trained(comm, dtype, flat=False, rule="sgd", skips=(), shapes=SHAPES, steps=STEPS, **options):
    """Weights after some steps on ranks, and the updater; rank 1 has NaNs in those it skips."""
    make = flat_like if flat else lambda arrays: [np.empty_like(array) for array in arrays]
    first, indices = normal(99, 0, dtype, shapes), [*range(len(shapes))]
    weights, grads = make(first), make(first)
    for weight, value in zip(weights, first, strict=True):
        weight[...] = value
    scaler = LossScaler(init_scale=1.0, dynamic=False) if skips else None
    updater = ShardedUpdater(RULES[rule](), comm, scaler, **{"bucket_bytes": 256, **options})
    order = np.random.default_rng(comm.rank).permutation(indices).tolist()
    for step in range(steps):
        for grad, value in zip(grads, normal(comm.rank, step, dtype, shapes), strict=True):
            grad[...] = value
        if step in skips and comm.rank == 1:
            grads[-1][...] = np.nan
        for index in order if options.get("overlap") else ():
            updater.begin(index, grads[index])
        updater(indices, grads, weights)
        assert updater.info.skipped == (step in skips)
    return [weight.tobytes() for weight in weights], updater


def check_sums(layout, dtype="float32", by_node=True, kind=NodeWorld, **options):
    """All ranks have the weights of sums of nodes in order, or of ranks in order."""
    ranks, kind = layout[0], nodes(*layout[1:], kind=kind)

    def program(comm):
        found, updater = trained(comm, dtype, **options)
        assert updater.hierarchical == by_node
        return found

    names = {"wire", "rule", "skips", "shapes", "steps"}
    own = {name: options[name] for name in names & {*options}}
    sums = expected(ranks, kind if by_node else nodes(1), dtype, **own)
    assert run_threads(ranks, program, kind) == [sums] * ranks


LAYOUTS = [(4, 2), (6, 3), (6, 2), (3, 3), (7, 4), (3, 2), (7, 1, 4, 2), (8, 3, 1, 4)]
"""Ranks, and numbers of ranks on nodes."""


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("dtype", ["float32", "float64", "float16"])
@pytest.mark.parametrize("wire", [None, "float16", "bfloat16"])
@pytest.mark.parametrize("flat", [False, True], ids=["apart", "flat"])
def test_sums_are_those_of_nodes_in_order(layout, dtype, wire, flat):
    check_sums(layout, dtype, flat=flat, wire=wire)


@pytest.mark.parametrize("wire", [None, *slow("float16", "bfloat16")])
@pytest.mark.parametrize("layout", [(4, 2), (2, 2), (3, 1)], ids=str)
def test_ranks_that_cannot_share_memory_sum_in_rank_order(layout, wire, monkeypatch):
    """Or need not, or have one rank on each node."""
    check_sums(layout, by_node=False, hierarchical=False, flat=True)
    if layout != (3, 1):
        monkeypatch.delattr(os, "memfd_create")
    check_sums(layout, by_node=False, wire=wire)


@pytest.mark.parametrize("layout", [(3, 1), (3, 3), (4, 2), (5, 1, 4)], ids=str)
@pytest.mark.parametrize("overlap", [False, True])
def test_tensors_of_one_rank_are_summed_by_all(layout, overlap):
    received = []

    class Counted(NodeWorld):
        def all_to_all(self, source, there, target, here):
            if sum(here[0]) > 1000:
                received.append(sum(n for k, n in enumerate(here[0]) if k != self.rank))
            return super().all_to_all(source, there, target, here)

    shapes = [(300, 100), (7,), (70_000,), (2, 3), (40_000,)]
    by_node = layout != (3, 1)
    options = {"rule": "whole", "shapes": shapes, "overlap": overlap, "bucket_bytes": 100_000}
    check_sums(layout, by_node=by_node, kind=Counted, **options)
    assert max(received) <= 200_000  # a share of up to two thirds of a bucket, from two ranks


@pytest.mark.slow
@pytest.mark.parametrize("overlap", [False, True])
def test_slow_ranks_read_what_was_packed_for_them(overlap, monkeypatch):
    """Memory is used again by later buckets and steps, also after a step that was skipped."""
    rng = random.Random(0)

    def late(work):
        def work_late(*arguments):
            time.sleep(rng.choice([0, 0, 0, 0.01]))
            return work(*arguments)

        return work_late

    monkeypatch.setattr(transport, "add_up", late(transport.add_up))
    monkeypatch.setattr(exchange, "unpack", late(exchange.unpack))
    check_sums((4, 2), skips=(1, 4, 7), overlap=overlap, steps=9)


@pytest.fixture
def full(monkeypatch):
    """Event while there is no memory to share."""
    event, reserve = threading.Event(), os.posix_fallocate

    def reserve_unless_full(*arguments):
        if event.is_set():
            raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))
        reserve(*arguments)

    monkeypatch.setattr(os, "posix_fallocate", reserve_unless_full)
    return event


def test_one_node_without_memory_for_buckets_sends_them(full):
    def program(comm):
        ShardedUpdater(optimizer.SGD(), comm)
        comm.Barrier()
        full.set()
        return trained(comm, "float32")[0]

    assert run_threads(2, program, NodeWorld) == [expected(2, NodeWorld, "float32")] * 2


def test_nodes_without_memory_for_buckets_raise_an_error_and_go_on(full):
    def program(comm):
        updater = ShardedUpdater(optimizer.SGD(learning_rate=1.0), comm)
        weight, grad = np.zeros(3, np.float32), np.ones(3, np.float32)
        comm.Barrier()
        full.set()
        with pytest.raises(OSError, match=r"^rank 0: \d+ bytes for the ranks of a node: Cannot"):
            updater(0, grad, weight)
        assert not weight.any()
        assert not updater.states
        comm.Barrier()
        full.clear()
        comm.Barrier()
        updater(0, grad, weight)
        return weight.tolist()

    assert run_threads(4, program, NodeWorld) == [[-4.0] * 3] * 4


def test_bytes_and_messages_between_nodes_are_those_of_the_model():
    """See docs/scaling.md: each node sends sums and weights once, between equal ranks."""
    sent = []

    class Counted(NodeWorld):
        sizes = (3,)

        def all_to_all(self, source, there, target, here):
            node = self.rank // 3
            to_others = [n for k, n in enumerate(there[0]) if n and k // 3 != node]
            sent.append((node, self.rank, to_others))
            assert sum(map(bool, there[0])) == len(to_others)  # none within the node
            return super().all_to_all(source, there, target, here)

    ranks, nodes, size, buckets = 9, 3, 9 * 70, 5

    def program(comm):
        updater = ShardedUpdater(optimizer.SGD(), comm, bucket_bytes=9 * 4 * 14)
        for _ in range(2):
            comm.Barrier()
            sent.clear()
            comm.Barrier()
            updater(0, np.ones(size, np.float32), np.zeros(size, np.float32))

    run_threads(ranks, program, Counted)
    for rank in range(ranks):
        assert sum(len(n) for _, k, n in sent if k == rank) == 2 * (nodes - 1) * buckets
    for node in range(nodes):
        total = sum(sum(n) for k, _, n in sent if k == node)
        assert total == 2 * 4 * size * (nodes - 1) / nodes


def test_norms_of_many_ranks_are_summed_in_shares_with_the_same_bits(monkeypatch):
    own = [np.random.default_rng(rank).normal(size=(7, 3)) * 1e9**rank for rank in range(4)]
    for limit in (0, agreement.APART_FROM):
        monkeypatch.setattr(agreement, "APART_FROM", limit)
        found = run_threads(4, lambda comm: agreement.added(Ranks(comm), own[comm.rank]))
        assert [each.tobytes() for each in found] == [in_turn([0.0, *own]).tobytes()] * 4


def test_shared_memory_is_freed():
    def mapped():
        gc.collect()
        return Path("/proc/self/maps").read_text("utf-8").count("memfd:fastopt")

    before = mapped()

    def program(comm):
        found = trained(comm, "float32")
        comm.Barrier()
        assert mapped() > before
        comm.Barrier()
        return bool(found)

    assert all(run_threads(2, program, NodeWorld))
    assert mapped() == before
