"""What records hold follows every change, and a failed call leaves nothing behind."""

import numpy as np
import pytest

from fastopt import optimizer
from fastopt.amp import LossScaler
from helpers.tensor_lists import as_list, everything, one_by_one

WAYS = {"list": as_list, "single": one_by_one}
both_ways = pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)


def ones(count=2):
    return [np.ones(3) for _ in range(count)]


@both_ways
def test_states_made_for_a_skipped_step_are_those_that_are_kept(way):
    """The first steps of a loss scaler overflow as a rule, and are neither counted nor kept."""
    names = {0: "a_weight", 1: "b_weight"}
    made = optimizer.Adam(param_idx2name=names)
    updater, weights = optimizer.Updater(made, loss_scaler=LossScaler()), ones()
    for _ in range(3):
        way(updater, [0, 1], [np.full(3, np.inf)] * 2, weights)
        assert updater.states == {}
        assert updater.info.skipped
    for _ in range(2):
        way(updater, [0, 1], ones(), weights)
    assert updater.states.keys() == {0, 1}
    mean, _ = updater.states[1]
    np.testing.assert_allclose(mean, (1 - 0.9**2) / updater.loss_scaler.scale)


def test_a_failed_call_is_not_the_last_update():
    made = optimizer.AdamW(learning_rate=0.1, wd=0.5, sparse_decay="catch_up")
    updater, weight, other = optimizer.Updater(made), np.ones((2, 1)), np.ones((2, 1))
    updater(0, (np.ones((1, 1)), np.array([0])), weight)
    made.lr_mult[0] = -1.0
    with pytest.raises(ValueError, match="learning rate"):
        updater(0, (np.ones((1, 1)), np.array([0])), other)
    made.lr_mult[0] = 1.0
    updater.flush(0)
    assert weight[1, 0] < 1
    assert other[1, 0] == 1


@both_ways
def test_nadam_can_get_a_product_for_each_parameter_later(way):
    ends = []
    for warm in (True, False):
        made = optimizer.Nadam()
        updater, weights = optimizer.Updater(made), ones()
        for _ in range(3):
            way(updater, [0, 1], ones(), weights)
        made.per_parameter = True
        if not warm:
            updater.states = updater.states
        for _ in range(2):
            way(updater, [0, 1], ones(), weights)
        ends.append(everything(updater, weights))
    assert ends[0] == ends[1]


def test_counts_can_be_assigned():
    made = optimizer.Adam()
    updater, weight = optimizer.Updater(made), np.ones(3)
    for _ in range(3):
        updater(0, np.ones(3), weight)
    made._index_update_count = {0: 7}
    updater(0, np.ones(3), weight)
    assert made._index_update_count == {0: 8}
    assert made.num_update == 8
    for change in (
        lambda: setattr(made, "_index_update_count", {}),
        lambda: made._index_update_count.clear(),
    ):
        change()
        updater(0, np.ones(3), weight)
        assert made._index_update_count == {0: 1}
        assert made.num_update == 8


class Growing(optimizer.SGD):
    """A learning rate of its own."""

    asked = 0

    @property
    def learning_rate(self):
        type(self).asked += 1
        return float(self.asked)


def test_a_learning_rate_that_is_a_property_is_asked_in_every_step():
    updater, weight = optimizer.Updater(Growing(lr_scheduler=None)), np.zeros(1)
    for _ in range(4):
        before = Growing.asked
        updater(0, np.ones(1), weight)
        assert Growing.asked > before


@both_ways
@pytest.mark.parametrize("kind", [float, np.float64, np.float32, int, np.array])
def test_a_schedule_is_called_once_per_call(way, kind):
    """Also for a second parameter of one step, and whatever kind of number it returns."""
    asked = []

    def schedule(update):
        asked.append(update)
        return kind(len(asked))

    updater, weights = (
        optimizer.Updater(optimizer.SGD(lr_scheduler=schedule)),
        list(np.zeros((2, 3))),
    )
    for _ in range(3):
        way(updater, [0, 1], ones(), weights)
    calls = 2 if way is one_by_one else 1
    assert asked == [step for step in (1, 2, 3) for _ in range(calls)]
    assert [weight[0] for weight in weights] == ([-9, -12] if calls == 2 else [-6, -6])


def test_a_refused_list_of_lbsgd_updates_nothing():
    """The sum of the second has another shape; the first is due for an update."""
    updater = optimizer.Updater(optimizer.LBSGD(momentum=0.9, batch_scale=2, warmup_epochs=0))
    weights = ones()
    updater([0, 1], ones(), weights)
    before = everything(updater, weights)
    with pytest.raises(ValueError, match="index 1: the sum of gradients must have shape"):
        updater([0, 1], [np.ones(3), np.ones(5)], [weights[0], np.ones(5)])
    assert everything(updater, weights) == before
    updater([0, 1], ones(), weights)
    assert updater.optimizer._index_update_count == {0: 2, 1: 2}
