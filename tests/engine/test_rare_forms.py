"""Arrays of any form have the bits of those that kernels read as they lie, or nothing changes."""

import numpy as np
import pytest

import fastopt
from fastopt import optimizer
from fastopt._engine.validate import leaves
from fastopt.sparse import RowSparse
from helpers.plans import unaligned
from helpers.tensor_lists import everything, normal

pytestmark = pytest.mark.slow

SHAPE = (6, 4)
AVERAGES = fastopt.EMA(decay=0.5), fastopt.SWA(start=1, every=2), fastopt.Lookahead(k=2)


@pytest.mark.parametrize("name", ["sgd", "adam", "adagrad", "groupadagrad"])
def test_rows_of_a_table_that_is_interleaved_with_its_state_have_records(name, unrecorded):
    """As a table on disk is; other gradients of it are updated too."""
    ends = []
    for interleaved in (False, True):
        made = optimizer.create(name, learning_rate=0.1, lazy_update=True)
        updater, weight = fastopt.Updater(made), normal(0, (9, 4), "float32")
        state, memory = made.create_state(0, weight), np.zeros((9, 16), np.float32)
        if interleaved:
            columns = iter((memory[:, :4], memory[:, 4:8], memory[:, 8:12]))
            weight, *parts = [copied(array, columns) for array in (weight, *leaves(state))]
            state = (tuple(parts) if isinstance(state, tuple) else parts[0]) if parts else None
        updater.states[0], updater.states_synced[0] = state, True
        for step in range(5):
            values, rows = normal(1 + step, (3, 4), "float32"), [8 - step, 0, 2]
            updater(0, (values, rows), weight[:])
        assert updater.records.record_of(0).layout.pitched == interleaved
        assert not unrecorded
        updater(0, normal(9, (9, 4), "float32"), weight)
        assert bool(unrecorded) == (interleaved and state is not None)
        ends.append([np.ascontiguousarray(array).tobytes() for array in (weight, *leaves(state))])
        unrecorded.clear()
    assert ends[0] == ends[1]


def copied(array, columns):
    """The same numbers in some columns of a table."""
    target = next(columns)[:, : array.shape[1]]
    target[...] = array
    return target


@pytest.mark.parametrize("average", AVERAGES, ids=str)
def test_rows_of_one_weight_under_two_indices_are_averaged_in_list_order(average):
    ends = []
    for form in (np.copy, unaligned):
        made = optimizer.SGD(learning_rate=0.5, lazy_update=True)
        updater = fastopt.Updater(made, average=average)
        weight = form(normal(0, SHAPE, "float32"))
        for _ in range(5):
            grads = [RowSparse(normal(row, (1, 4), "float32"), [row], SHAPE) for row in (1, 2)]
            updater([0, 1], grads, [weight, weight])
        ends.append(everything(updater, [weight]))
    assert ends[0] == ends[1]
