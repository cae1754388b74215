"""`finish` takes the step of an incomplete window; `info.stepped` says whether a call updated."""

from copy import deepcopy
from functools import partial, reduce
from operator import add

import numpy as np
import pytest

import fastopt
from fastopt import RowSparse, Trainer, optimizer
from fastopt.amp import LossScaler
from fastopt.distributed import ShardedUpdater, run_threads
from fastopt.lr_scheduler import FactorScheduler
from helpers.cases import exhaustive
from helpers.settings import UPDATERS, every_setting, settings_of
from helpers.tensor_lists import as_list, everything, frozen


def added(grads):
    """The sum of gradients, in single precision at least."""
    wide = [grad.astype(np.promote_types(grad.dtype, np.float32)) for grad in grads]
    return reduce(add, [grad.coalesce() if isinstance(grad, RowSparse) else grad for grad in wide])


@every_setting(lambda setting: not (setting.sums() or "accumulate" in setting.settings()))
def test_it_takes_the_step_of_the_mean(setting):
    """Of incomplete windows and whole ones, of which the first are cold."""
    several, once = setting.updater(), setting.updater()
    several.accumulate = 4
    weights, expected = setting.weights(), setting.weights()
    for turn, calls in enumerate([2, 4, 2, 2]):
        grads = [setting.gradients(weights, 4 * turn + k) for k in range(calls)]
        for each in grads:
            as_list(several, weights, each.values(), weights.values())
        if calls < 4:
            several.finish()
        once.optimizer.rescale_grad = 1 / calls
        sums = [added([each[name] for each in grads]) for name in weights]
        as_list(once, expected, sums, expected.values())
        assert frozen((weights, several.averages)) == frozen((expected, once.averages))
        assert several.info.non_finite == once.info.non_finite
        norms = [updater.info.global_norm or 0 for updater in (several, once)]
        assert norms[0] == pytest.approx(norms[1], rel=1e-7)
        assert several.optimizer.num_update == once.optimizer.num_update
    assert several.loss_scaler is None or vars(several.loss_scaler) == vars(once.loss_scaler)


def test_windows_of_different_lengths_are_one_update(rng):
    made = optimizer.Updater(optimizer.SGD(lr=1.0), accumulate=4, clip_global_norm=1.0)
    weights = {"a": np.zeros(1), "b": np.zeros(1)}
    for grads in ({"a": 3.0, "b": None}, {"a": 3.0, "b": 4.0}, {"a": 3.0, "b": None}):
        made.step({name: g and np.full(1, g) for name, g in grads.items()}, weights)
    made.finish()
    np.testing.assert_allclose([*weights.values()], [[-0.6], [-0.8]], rtol=1e-15)
    assert made.info.global_norm == pytest.approx(5)
    assert made.optimizer.num_update == 1


def test_weights_are_those_of_calls_that_only_added_to_them_beside_others():
    made = optimizer.Updater(optimizer.SGD(lr=1.0), accumulate=2)
    old, new = ({"a": np.zeros(1), "b": np.zeros(1)} for _ in range(2))
    for a, b, weights in ((1.0, 1.0, old), (1.0, 1.0, old), (1.0, None, new), (1.0, 1.0, new)):
        made.step({"a": np.full(1, a), "b": b and np.full(1, b)}, weights)
    made.finish()
    np.testing.assert_equal([*old.values(), *new.values()], np.full((4, 1), -1))


@pytest.mark.parametrize(("passed", "ends"), [(False, [-0.11, -0.1]), (True, [-0.11, -0.01])])
def test_a_resumed_window_ends_in_the_order_of_its_weights_or_else_of_its_gradients(passed, ends):
    """Which is that of the rates of a schedule."""
    rates = FactorScheduler(step=1, factor=0.1, base_lr=0.1)
    made, new = (optimizer.Updater(optimizer.SGD(lr=rates), accumulate=4) for _ in range(2))
    weights = {"a": np.zeros(1), "b": np.zeros(1)}
    for a, b in [(1, None)] * 4 + [(None, 1), (1, None)]:
        made.step({"a": a and np.ones(1), "b": b and np.ones(1)}, weights)
    with pytest.raises(ValueError, match=r"loss_scaler cannot change while gradients .* finish"):
        made.loss_scaler = LossScaler()
    new.load_states_dict(made.states_dict())
    for updater, arrays in ((made, weights), (new, {k: w.copy() for k, w in weights.items()})):
        updater.step({"a": np.ones(1), "b": np.ones(1)}, arrays)
        updater.finish(weight=arrays if passed else None)
        np.testing.assert_allclose([w.item() for w in arrays.values()], ends)


def test_chosen_parameters_and_nothing():
    made = optimizer.Updater(optimizer.SGD(lr=1.0), accumulate=2)
    weights = [np.zeros(1), np.zeros(1)]
    made.finish()
    for _ in range(2):
        made(["a", "b"], [np.ones(1), np.ones(1)], weights)
        made("b", np.ones(1), weights[1])
        for chosen, steps in ((["b"], False), ("a", True), (None, False)):
            made.finish(chosen)
            assert made.info.stepped == steps
    assert [weight.item() for weight in weights] == [-2, -2]
    made.accumulate = 3  # no gradient waits


def test_the_weight_of_the_last_call_is_updated():
    made = optimizer.Updater(optimizer.SGD(lr=1.0), accumulate=3)
    for call in (made, lambda _, grad, weight: made.updated({"w": grad}, {"w": weight})["w"]):
        for turn in range(3):
            for value in (0.0, 1.0):
                weight = np.zeros(1)  # another array in each call
                found = call("w", np.full(1, value), weight)
            made.finish()
            assert (weight if found is None else found) == -0.5, turn


def test_after_a_load_it_takes_the_weights():
    old, weight = optimizer.Updater(optimizer.Adam(), accumulate=3), np.ones(2, np.float32)
    for _ in range(2):
        old("w", np.ones(2, np.float32), weight)
    new, other = optimizer.Updater(optimizer.Adam(), accumulate=3), weight.copy()
    new.load_state_dict(old.state_dict())
    refused = [
        ((), ValueError, "index 'w': finish needs the weight, .* finish\\(index, weight\\)"),
        (("w", other[:1]), ValueError, r"'w': weight must have shape \(2,\), .*, got \(1,\)"),
        (("w", other.astype(int)), TypeError, "'w': weight must have dtype"),
        (("w", [other]), TypeError, "index 'w': weight must be"),
        ((None, other), TypeError, "weights nested as in step, got"),
        ((["w"], [other, other]), TypeError, "a list of 1 indices needs .* weights, got 2"),
    ]
    for arguments, kind, words in refused:
        with pytest.raises(kind, match=words):
            new.finish(*arguments)
    assert not new.info.stepped
    twin, nested = deepcopy(new), weight.copy()
    new.finish(["w"], [other])
    twin.finish(weight={"w": nested, "means": None})
    old.finish()
    np.testing.assert_array_equal([nested, other], [weight] * 2)


def test_a_failed_call_changes_nothing():
    made = optimizer.Updater(adam := optimizer.Adam(lr=0.1), accumulate=3)
    weights = [np.ones(2), np.ones(3)]
    for _ in range(4):
        made([0, 1], [np.ones(2), np.ones(3)], weights)
    before, adam.lr_scheduler = everything(made, weights), lambda t: np.nan
    with pytest.raises(ValueError, match="learning rate"):
        made.finish()
    adam.lr_scheduler = None
    assert everything(made, weights) == before
    made.finish()
    assert made.optimizer.num_update == 2


@pytest.mark.parametrize("settings", [{}, *exhaustive({"clip_global_norm": 0.5})], ids=str)
def test_ranks_take_the_step_of_one_process(settings):
    def program(comm=None):
        make = optimizer.Updater if comm is None else partial(ShardedUpdater, comm=comm)
        made = make(optimizer.Adam(lr=0.1), accumulate=4, **settings)
        weights = {"a": np.ones((3, 2)), "b": np.ones(5)}
        part = comm is None or comm.rank == 0
        for turn in range(2):
            for a, b in ((np.ones((3, 2)), None), (np.full((3, 2), turn), np.full(5, 3.0 * part))):
                made.step({"a": 1.0 * a * part, "b": b}, weights)
            for chosen, steps in (("b", True), (None, True), (None, False)):
                made.finish(chosen)
                assert steps or not made.info.stepped
        assert made.optimizer.num_update == 2
        return frozen(weights)

    assert run_threads(2, program) == [program()] * 2


def test_ranks_that_differ_change_nothing():
    def program(comm):
        made, weight = ShardedUpdater(optimizer.SGD(lr=1.0), comm, accumulate=4), np.zeros(1)
        made(["a", "b"], [np.ones(1)] * 2, [weight, np.zeros(1)])
        with pytest.raises(ValueError, match="ranks disagree"):
            made.finish("ab"[comm.rank])
        with pytest.raises(TypeError, match="rank 1: index must be"):
            made.finish(1.5 if comm.rank else None)
        assert weight == 0

    run_threads(2, program)


def test_a_trainer_passes_it_on_and_copies_the_weights():
    sgd, devices = optimizer.SGD(lr=1.0), [fastopt.cpu(0), fastopt.cpu(1)]
    weight = fastopt.Parameter("w", shape=(1,), init="zeros")
    weight.initialize(device=devices)
    trainer = Trainer([weight], sgd, comm=optimizer.Updater(sgd, accumulate=4))
    for _ in range(2):
        for device in devices:
            weight.set_grad(np.ones(1, np.float32), device)
        trainer.step(batch_size=2)
    trainer.finish()
    assert [weight.data(device).item() for device in devices] == [-1, -1]


# info.stepped; None is no structure of gradients

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
