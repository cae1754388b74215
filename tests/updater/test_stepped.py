"""`info.stepped` says whether a call updated a weight; None is no structure of gradients."""

import numpy as np
import pytest

import fastopt
from fastopt import optimizer
from fastopt.amp import LossScaler
from fastopt.distributed import ShardedUpdater, run_threads
from helpers.settings import UPDATERS, settings_of

NOTHING = {
    "lists": lambda updater, weights: updater([], [], []),
    "views": lambda updater, weights: updater({}.keys(), {}.values(), {}.values()),
    "all None": lambda updater, weights: updater.step(dict.fromkeys(weights), weights),
    "all frozen": lambda updater, weights: updater(["ice"], [weights["ice"]], [weights["ice"]]),
    "one frozen": lambda updater, weights: updater("ice", weights["ice"], weights["ice"]),
}


def weights_of():
    return {"ice": np.ones(2), "head": np.ones(3)}


@pytest.mark.parametrize("name", [None, *UPDATERS])
def test_a_call_that_updates_nothing_has_not_stepped(name):
    settings = settings_of(name) if name else {}
    updater = fastopt.Updater(fastopt.SGD(lr=0.1), groups={"ice": {"frozen": True}}, **settings)
    weights, every = weights_of(), settings.get("accumulate", 1)
    for turn in range(3):  # a first call, and repeated ones
        for call in range(every):
            updater.step({"ice": None, "head": np.ones(3)}, weights)
            assert updater.info.stepped == (call == every - 1)
        for name, nothing in NOTHING.items():
            nothing(updater, weights)
            assert not updater.info.stepped, name
            assert not updater.info.skipped
        assert updater.optimizer.num_update == turn + 1
    if updater.loss_scaler:
        assert updater.loss_scaler.good_steps == 3


def test_updates_that_are_only_counted_or_summed_have_not_stepped():
    lbsgd, adamw = optimizer.LBSGD(batch_scale=2), optimizer.AdamW()
    summing, counting = fastopt.Updater(lbsgd), fastopt.Updater(adamw, clip_global_norm=None)
    weight = np.ones(2)
    for turn in range(4):
        summing(0, np.ones(2), weight)
        assert summing.info.stepped == (turn % 2 == 1)
        adamw.rescale_grad = (1.0, 0.0, np.inf, np.nan)[turn]  # it skips such a step
        for _ in range(2):
            before = weight.copy()
            counting(0, np.ones(2), weight)
            assert counting.info.stepped == (weight != before).any() == (turn == 0)


def test_a_call_of_ranks_that_updates_nothing_has_not_stepped():
    def program(comm):
        groups, scaler = {"ice": {"frozen": True}}, LossScaler(1.0, growth_interval=100)
        updater = ShardedUpdater(fastopt.SGD(lr=0.1), comm, scaler, groups=groups, accumulate=2)
        weights, found = weights_of(), []
        for grads in ({"ice": None, "head": np.ones(3)}, dict.fromkeys(weights)) * 2:
            updater.step(grads, weights)
            found.append(updater.info.stepped)
        with pytest.raises(TypeError, match="got None"):
            updater.step(None, weights)
        return [*found, scaler.good_steps]

    assert run_threads(2, program) == [[False, False, True, False, 1]] * 2


@pytest.mark.parametrize("weights", [weights_of(), np.ones(3), [], [np.ones(2)]], ids=str)
def test_none_in_place_of_all_gradients_is_refused(weights):
    updater, (init, update) = fastopt.Updater(fastopt.SGD()), fastopt.functional(fastopt.SGD())
    pure = lambda grads, params: update(grads, init(params), params)  # noqa: E731
    for call in (updater.step, updater.updated, pure) * 2:
        with pytest.raises(TypeError, match=r"gradients must be nested .* got None"):
            call(None, weights)
    assert not updater.states
    assert not updater.info.stepped
