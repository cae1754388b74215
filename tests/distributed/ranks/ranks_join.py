"""Checks of errors on one rank that users catch, and of unequal numbers of batches."""

import numpy as np
import pytest
from ranks_common import LAST, comm, exact, raised

from fastopt import optimizer
from fastopt.amp import LossScaler
from fastopt.distributed import ShardedUpdater
from helpers.tensor_lists import everything, frozen

SHAPES = {"a": (5, 2), "b": (7,)}


class Failing(optimizer.Optimizer):
    """Written in NumPy: fails for an index, on the rank that has its weight."""

    def update(self, index, weight, grad, state):
        self._update_count(index)
        if index == self.fails:
            raise LookupError("code of the user's")
        weight -= self._get_lr(index) * grad


def check_an_error_in_an_update_in_python_is_one_of_all():
    """Weights stay equal on all ranks, and the next call works."""
    for options in ({}, {"loss_scaler": LossScaler(2.0)}, {"clip_global_norm": 1e9}):
        made = Failing(learning_rate=1.0)
        made.fails = None
        updater = ShardedUpdater(made, comm, **options)
        weights, ones = [np.zeros(8, np.float32) for _ in "ab"], [np.ones(8, np.float32)] * 2
        updater([0, 1], ones, weights)
        made.fails = 1
        with pytest.raises((LookupError, RuntimeError), match="code of the user's"):
            updater([0, 1], ones, weights)
        assert len(set(comm.allgather(str(frozen(weights))))) == 1
        made.fails, before = None, np.copy(weights)
        updater([0, 1], ones, weights)
        assert (np.array(weights) < before).all()


def check_an_error_of_one_rank_before_the_launch_is_one_of_all():
    """Of a schedule, of memory for a state, or that cannot be told; and all go on."""

    class Odd(float):
        def __str__(self):
            raise LookupError("cannot be told")

    class Large(optimizer.SGD):
        def create_state(self, index, weight):
            if index == 5 and LAST:
                raise MemoryError("no room for state")
            return super().create_state(index, weight)

    def rate(number):
        if LAST and number == 2 and fails:
            raise LookupError("no rate")
        return 1.0

    last = f"rank {comm.size - 1}: "
    for options in ({}, {"loss_scaler": LossScaler(2.0)}, {"clip_global_norm": 1.0}):
        updater = ShardedUpdater(Large(momentum=0.5, lr_scheduler=rate), comm, **options)
        weight, grad, fails = np.zeros(8, np.float32), np.ones(8, np.float32), True
        updater(0, grad, weight)
        before = everything(updater.shard, [weight])
        with raised(MemoryError, "no room for state"):
            updater(5, grad, np.zeros(8, np.float32))
        with raised(RuntimeError, last + "no rate"):
            updater(0, grad, weight)
        fails, updater.optimizer.odd = False, Odd(1) if LAST else 1.0
        with raised(RuntimeError, last + "cannot be told"):
            updater(0, grad, weight)
        del updater.optimizer.odd
        assert everything(updater.shard, [weight]) == before
        updater(0, grad, weight)


def check_windows_of_ranks_with_fewer_batches_are_completed():
    """Their open sums are part of the update."""
    sgd, weight = optimizer.SGD(learning_rate=1.0), np.zeros(4)
    sharded = ShardedUpdater(sgd, comm, accumulate=2)
    with sharded.join():
        for _ in range(3 if LAST else 4):
            sharded(0, np.ones(4), weight)
    np.testing.assert_array_equal(weight, -(4 * comm.size - 1) / 2 if comm.size > 1 else -1.0)


def check_ranks_may_have_unequal_numbers_of_batches():
    """Those that have no more take part with gradients that are zero."""
    for options in ({}, {"clip_global_norm": 1e9}):
        ours, theirs = ([np.zeros(s, np.float32) for s in SHAPES.values()] for _ in range(2))
        sharded = ShardedUpdater(optimizer.Adam(learning_rate=0.1), comm, **options)
        alone = optimizer.Updater(optimizer.Adam(learning_rate=0.1), **options)
        numbers = [2 + 2 * rank for rank in range(comm.size)]
        for epoch in range(2):

            def slopes(step, rank, epoch=epoch):
                return [exact(9 * epoch + 5 * step + rank, s, np.float32) for s in SHAPES.values()]

            with sharded.join():
                for step in range(numbers[comm.rank]):
                    sharded([*SHAPES], slopes(step, comm.rank), ours)
            for step in range(max(numbers)):
                parts = [slopes(step, rank) for rank in range(comm.size) if step < numbers[rank]]
                sums = [sum(each[1:], each[0]) for each in zip(*parts, strict=True)]
                alone([*SHAPES], sums, theirs)
        for one, other in zip(ours, theirs, strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-5 if options else 0)
        counts = sharded.optimizer._index_update_count
        assert dict(counts) == dict(alone.optimizer._index_update_count)


def check_rows_of_ranks_that_have_no_more_batches():
    updater, weight = ShardedUpdater(optimizer.SGD(learning_rate=1.0), comm), np.zeros((6, 2))
    with updater.join():
        for step in range(1 + comm.rank):
            updater("w", (np.ones((1, 2)), np.array([step])), weight)
    assert (weight[:, 0] == [-max(comm.size - step, 0) for step in range(6)]).all()


def check_an_error_of_one_rank_inside_join_is_an_error_of_all():
    """It must not take part with the gradients of its next call."""
    if comm.size == 1:
        return
    updater, weight = ShardedUpdater(optimizer.SGD(), comm.Dup()), np.zeros(4, np.float32)
    updater(0, weight.copy(), weight)
    with raised((LookupError, RuntimeError), "bad record"):  # noqa: SIM117
        with updater.join():
            if LAST:
                raise LookupError("bad record")
            updater(0, weight.copy(), weight)
    with raised(RuntimeError, "no longer in step"):
        updater(0, weight.copy(), weight)


def check_any_rank_may_stop_all():
    updater = ShardedUpdater(optimizer.SGD(), comm)
    flags = LAST, False, np.bool_(True)
    assert [*map(updater.any, flags)] == [True, False, True]
    with raised(TypeError, "flag must be True or False, got 1"):
        updater.any(1 if LAST else True)
    if comm.size > 1:
        with raised(ValueError, "ranks disagree: for call", "(any)", "(update)"):
            updater.any(True) if LAST else updater(0, np.ones(2), np.ones(2))
    assert not updater.any(False)


def check_what_join_cannot_do_is_an_error():
    updater, weight = ShardedUpdater(optimizer.SGD(), comm), np.zeros(4, np.float32)
    if comm.size == 1:
        return
    with raised(ValueError, "join() ends here, before the first update"):  # noqa: SIM117
        with updater.join():
            if LAST:
                updater(0, weight.copy(), weight)
    with updater.join():
        pass  # nobody has work
    updater(0, weight.copy(), weight)
    with raised(ValueError, "ranks disagree", "index 1"):  # noqa: SIM117
        with updater.join():
            if LAST:
                updater(1, weight.copy(), np.zeros(4, np.float32))
    updater(0, weight.copy(), weight)
