"""Records with the settings of updaters: groups, clips, loss scale, averages, accumulation."""

from types import SimpleNamespace

import numpy as np
import pytest

import fastopt
from fastopt import optimizer
from fastopt._kernels.numpy_abi import readable
from fastopt.amp import LossScaler
from fastopt.sparse import RowSparse
from helpers.tensor_lists import everything, normal

pytestmark = [
    pytest.mark.skipif(not readable(), reason="records are read by compiled code"),
    pytest.mark.usefixtures("unrecorded"),
]

SHAPES = [(3, 4), (5,), (3, 4), (2, 3, 2), (1,)]


SETTINGS = {
    "clip": lambda: {"clip_global_norm": 0.5},
    "scaler": lambda: {"loss_scaler": LossScaler(init_scale=8.0, growth_interval=2)},
    "scaler and clip": lambda: {"loss_scaler": LossScaler(), "clip_global_norm": 0.5},
    "accumulate": lambda: {"accumulate": 2},
    "clip_adaptive": lambda: {"clip_adaptive": 0.1},
}


@pytest.mark.parametrize("setting", ["clip", "scaler"])
def test_a_call_that_is_skipped_changes_nothing_but_the_loss_scale(setting):
    asked = []
    made = optimizer.Adam(lr_scheduler=lambda update: asked.append(update) or 0.1)
    updater, weights = fastopt.Updater(made, **SETTINGS[setting]()), [np.ones(3) for _ in range(3)]
    updater([0, 1], [np.ones(3), np.ones(3)], weights[:2])
    before, calls = everything(updater, weights)[:3], len(asked)
    bad = np.array([1.0, np.inf, 1.0])
    for _ in range(3):
        updater([0, 1], [np.ones(3), bad], weights[:2])
        assert updater.info.skipped
        assert updater.info.non_finite == ("1",)
        updater([1, 2], [np.ones(3), bad], weights[1:])  # the second has no state yet
        assert updater.info.non_finite == ("2",)
        updater(0, bad, weights[0])
        updater(0, np.array([1.0, 1.0, np.nan]), weights[0])
    assert everything(updater, weights)[:3] == before
    assert len(asked) == calls
    updater([0, 1], [np.ones(3), np.ones(3)], weights[:2])
    assert updater.info.stepped
    assert len(asked) == calls + 1


def test_attributes_of_groups_are_followed():
    """Those of the updater's optimizer, and of the optimizer of a group."""
    ends = []
    for fresh in (False, True):
        made, other = optimizer.Adam(wd=0.1), optimizer.SGD(lr=0.5, momentum=0.9)
        groups = {"^0$": {"lr": 0.5}, "^1$": {"optimizer": other}}
        updater, weights = fastopt.Updater(made, groups=groups), [np.ones(3) for _ in range(3)]
        for step in range(12):
            made.wd, other.lr = 0.1 * (step // 2), 0.5 / (1 + step // 3)
            if step == 4:
                made.rescale_grad = 0.5
            if step == 6:
                made.beta1 = 0.5
            if step == 8:
                made.set_lr_mult({0: 0.5, 1: 2.0})
            if step == 10:
                other.momentum = 0.5
            if fresh:
                updater.states = updater.states
            updater([0, 1, 2], [np.ones(3)] * 3, weights)
        ends.append(everything(updater, weights))
        assert not hasattr(updater.parameters, "unrecorded")
    assert ends[0] == ends[1]


@pytest.mark.parametrize("setting", ["clip", "scaler", "accumulate"])
def test_a_schedule_may_change_attributes_while_gradients_are_scaled(setting):
    ends = []
    for inside in (False, True):
        made = optimizer.SGD(wd=0.0)

        def scheduled(update, made=made, inside=inside):
            if inside:
                made.wd = 0.1 * update
            return 0.1

        made.lr_scheduler = scheduled
        updater, weight = fastopt.Updater(made, **SETTINGS[setting]()), np.ones(3)
        for _ in range(6):
            if not inside:
                made.wd = 0.1 * (1 + made.num_update)
            updater(0, np.full(3, 5.0), weight)
        ends.append(weight.tobytes())
    assert ends[0] == ends[1]


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


def test_multipliers_of_parameters_are_read_in_every_call():
    parameters = {k: SimpleNamespace(lr_mult=1.0, wd_mult=1.0) for k in range(2)}
    updater = fastopt.Updater(optimizer.SGD(lr=1.0, param_dict=parameters))
    weights, total = [np.zeros(1), np.zeros(1)], 0.0
    for step in range(30):
        parameters[0].lr_mult = 1.0 + step
        total += 1.0 + step
        updater([0, 1], [np.ones(1), np.ones(1)], weights)
    np.testing.assert_array_equal(weights, [[-total], [-30]])
    assert not hasattr(updater.parameters, "unrecorded")
    assert len(updater.records.shared) <= 3


def test_a_multiplier_may_change_attributes_of_the_optimizer():
    decays, expected = [0.0, 0.0, 0.5, 0.5, 0.25], 1.0

    class Parameter:
        wd_mult = 1.0

        @property
        def lr_mult(self):
            made.wd = decay
            return 1.0

    made = optimizer.SGD(lr=1.0, param_dict={0: Parameter()})
    updater, weight = fastopt.Updater(made), np.ones(1)
    for decay in decays:
        updater(0, np.zeros(1), weight)
        expected *= 1 - decay
        assert weight == expected


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


class Unscaled(optimizer.Optimizer):
    """Its rule has no rescale_grad, so that the gradients themselves are scaled."""

    @fastopt.rule(hyper=("lr",))
    def rule(weight, grad, state, h):
        return weight - h.lr * grad, ()


class UnscaledInNumPy(optimizer.Optimizer):
    """The same in NumPy, whose gradients Python scales."""

    def update(self, index, weight, grad, state):
        self._update_count(index)
        weight -= self._get_lr(index) * grad


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "float64", "float16"])
@pytest.mark.parametrize("setting", ["scaler and clip", "accumulate", "clip_adaptive"])
def test_gradients_of_rules_without_rescale_grad_are_scaled(setting, dtype):
    ends = []
    for kind in (Unscaled, UnscaledInNumPy):
        updater = fastopt.Updater(
            kind(learning_rate=0.1, multi_precision=True), **SETTINGS[setting]()
        )
        weights = [normal(9, shape, dtype) for shape in SHAPES]
        for step in range(6):
            grads = [normal(step + k, shape, dtype) for k, shape in enumerate(SHAPES)]
            updater([*range(len(SHAPES))], grads, weights)
        ends.append(weights)
    for found, expected in zip(*ends, strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-3 if dtype == "float16" else 1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("setting", ["plain", "clip", "scaler", "clip_adaptive", "accumulate"])
@pytest.mark.parametrize(
    "scheduled_by", [None, lambda update: 0.1 / update], ids=["rate", "schedule"]
)
def test_frozen_parameters_of_a_list_are_left_out(setting, scheduled_by):
    """Whatever their gradients, with the bits of lists without them, and without Python."""
    ends, settings = [], SETTINGS.get(setting, dict)
    for frozen in (True, False):
        groups = {"^[14]$": {"frozen": True}, "0": {"wd": 0.5}} if frozen else {"0": {"wd": 0.5}}
        made = optimizer.Prodigy(lr_scheduler=scheduled_by)
        updater = fastopt.Updater(made, groups=groups, **settings())
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
        ends.append(everything(updater, weights)[:4])
    assert ends[0] == ends[1]


def test_frozen_parameters_are_left_out_in_compiled_code(monkeypatch):
    updater = fastopt.Updater(optimizer.SGD(lr=1.0), groups={"a": {"frozen": True}})
    weights = {"a": np.ones(2), "b": np.ones(2)}

    def call():
        updater(["a", "b"], [None, np.ones(2)], [weights["a"].copy(), weights["b"]])

    for _ in range(2):
        call()
    monkeypatch.setattr(fastopt.Updater, "_check_call", None)
    call()
    np.testing.assert_array_equal(weights["b"], [-2, -2])
    monkeypatch.undo()
    updater("a", np.ones(2), weights["a"])
    assert not updater.info.stepped
    updater.groups = None
    updater("a", np.ones(2), weights["a"])
    np.testing.assert_array_equal(weights["a"], [0, 0])
