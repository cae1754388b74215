"""Records with the settings of updaters: groups, clips, loss scale, averages, accumulation."""

from types import SimpleNamespace

import numpy as np
import pytest

import fastopt
from fastopt import optimizer
from fastopt.sparse import RowSparse
from helpers.cases import slow
from helpers.plans import unaligned
from helpers.settings import settings_of
from helpers.tensor_lists import as_list, everything, normal, one_by_one
from helpers.written_headers import in_compiled_code

pytestmark = [
    in_compiled_code,
    pytest.mark.usefixtures("unrecorded"),
]

SHAPES = [(3, 4), (5,), (3, 4), (2, 3, 2), (1,)]


class Setting:
    """A parameter whose multiplier changes the decay when it is read."""

    wd_mult = 1.0

    def __init__(self, change):
        self.change = change

    @property
    def lr_mult(self):
        self.change()
        return 1.0


@pytest.mark.parametrize("by", ["schedule", "multiplier"])
@pytest.mark.parametrize("setting", [None, "clip_global_norm", "loss_scaler", "accumulate"])
def test_what_is_asked_for_a_rate_may_change_attributes_and_states(setting, by):
    ends = []
    for inside in (False, True):
        made = optimizer.SGD(wd=0.0, momentum=0.5)
        updater, weight = fastopt.Updater(made, **settings_of(setting)), np.ones(3)

        def change(updater=updater, inside=inside):
            if inside:
                updater.states = dict(updater.states)
                updater.optimizer.wd = 0.1 * (updater.optimizer._index_update_count.get(0, 0) // 2)

        if by == "schedule":
            made.lr_scheduler = lambda update, change=change: change() or 0.1
        else:
            made.param_dict = {0: Setting(change)}
        for _ in range(6):
            if not inside:
                made.wd = 0.1 * (made.num_update // 2)
            updater(0, np.full(3, 5.0), weight)
        ends.append((weight.tobytes(), made.num_update))
    assert ends[0] == ends[1]


@pytest.mark.parametrize("way", [as_list, one_by_one])
def test_multipliers_of_parameters_are_read_in_every_call(way):
    parameters = {k: SimpleNamespace(lr_mult=1.0, wd_mult=1.0) for k in range(2)}
    updater = fastopt.Updater(optimizer.SGD(lr=1.0, param_dict=parameters))
    weights, total = [np.zeros(1), np.zeros(1)], 0.0
    for step in range(30):
        if step == 20:
            updater.optimizer.param_dict[0] = SimpleNamespace(wd_mult=1.0)
        updater.optimizer.param_dict[0].lr_mult = 1.0 + step
        total += 1.0 + step
        way(updater, [0, 1], [np.ones(1), np.ones(1)], weights)
    np.testing.assert_array_equal(weights, [[-total], [-30]])
    assert not hasattr(updater.parameters, "unrecorded")
    assert len(updater.records.shared) <= 3


@pytest.mark.slow
@pytest.mark.parametrize("calls", ["dr", "drd", "ddrrd", "drdr", "drrdr"])
def test_averages_replace_the_last_weight_of_dense_and_of_row_sparse_calls(calls):
    """Whether records serve them or not."""
    updater = fastopt.Updater(optimizer.SGD(lr=1.0), average=fastopt.EMA(decay=0.5))
    weights = {"d": np.ones((3, 2)), "r": np.ones((3, 2))}
    grads = {"d": np.ones((3, 2)), "r": RowSparse(np.ones((1, 2)), np.array([1]), (3, 2))}
    for call in calls:
        updater(0, grads[call], weights[call])
    before = {call: weight.copy() for call, weight in weights.items()}
    with updater.averaged():
        changed = [call for call, weight in weights.items() if np.any(weight != before[call])]
    assert changed == [calls[-1]]


def test_hyper_may_depend_on_the_count_of_each_tensor():
    class Slowing(optimizer.SGD):
        def hyper(self, t, lr, wd):
            return {"momentum": 0.0, "lr": lr / t}

    updater, weights = fastopt.Updater(Slowing(lr=1.0)), [np.zeros(1), np.zeros(1)]
    for _ in range(3):
        updater(0, np.ones(1), weights[0])
    for _ in range(2):
        updater([0, 1], [np.ones(1), np.ones(1)], weights)  # the counts differ
    np.testing.assert_allclose(weights, [[-sum(1 / t for t in range(1, 6))], [-1.5]], rtol=1e-15)
    updater(1, np.ones(1), weights[1])
    assert weights[1] == -(1 + 1 / 2 + 1 / 3)


def test_an_index_that_occurs_twice_is_measured_twice_and_accumulated_once():
    updater, weight = fastopt.Updater(optimizer.SGD(lr=1.0), clip_global_norm=1.0), np.zeros(1)
    for step in range(1, 4):
        updater([0, 0], [np.ones(1), np.ones(1)], [weight, weight])
        np.testing.assert_allclose(weight, -step * 2**0.5, rtol=1e-15)
    updater = fastopt.Updater(optimizer.SGD(lr=1.0), accumulate=2)
    for _ in range(3):
        updater(0, np.ones(1), weight)
        with pytest.raises(ValueError, match="takes an index once"):
            updater([0, 0], [np.ones(1), np.ones(1)], [weight, weight])


@pytest.mark.parametrize(
    "setting", [None, *slow("clip_global_norm", "loss_scaler", "clip_adaptive", "accumulate")]
)
@pytest.mark.parametrize(
    "scheduled_by", [None, lambda update: 0.1 / update], ids=["rate", "schedule"]
)
def test_frozen_parameters_of_a_list_are_left_out(setting, scheduled_by):
    """Whatever their gradients, with the bits of lists without them, and without Python."""
    ends = []
    for frozen in (True, False):
        groups = {"^[14]$": {"frozen": True}, "0": {"wd": 0.5}} if frozen else {"0": {"wd": 0.5}}
        made = optimizer.Prodigy(lr_scheduler=scheduled_by)
        updater = fastopt.Updater(made, groups=groups, **settings_of(setting))
        weights = [normal(9, shape, "float32") for shape in SHAPES]
        before = [weights[k].copy() for k in (1, 4)]
        for step in range(8):
            indices = [[4, 0, 1, 2, 3], [3, 1, 0]][step % 2]
            grads = [normal(step + k, SHAPES[k], "float32") for k in indices]
            grads = [None if k == 4 else grad for k, grad in zip(indices, grads, strict=True)]
            if not frozen:
                chosen = [place for place, k in enumerate(indices) if k not in (1, 4)]
                indices, grads = [[values[p] for p in chosen] for values in (indices, grads)]
            updater(indices, grads, [weights[k] for k in indices])
        assert [weights[k].tobytes() for k in (1, 4)] == [each.tobytes() for each in before]
        assert sorted(updater.states) == [0, 2, 3]
        assert updater.info.slow.calls <= (setting == "accumulate")
        ends.append(everything(updater, weights)[:4])
    assert ends[0] == ends[1]


@pytest.mark.slow
@pytest.mark.parametrize("setting", ["EMA", "SWA", "Lookahead"])
def test_rows_of_one_weight_under_two_indices_are_averaged_in_list_order(setting):
    ends = []
    for form in (np.copy, unaligned):
        made = optimizer.SGD(learning_rate=0.5, lazy_update=True)
        updater = fastopt.Updater(made, **settings_of(setting))
        weight = form(normal(0, (6, 4), "float32"))
        for _ in range(5):
            grads = [RowSparse(normal(row, (1, 4), "float32"), [row], (6, 4)) for row in (1, 2)]
            updater([0, 1], grads, [weight, weight])
        ends.append(everything(updater, [weight]))
    assert ends[0] == ends[1]
