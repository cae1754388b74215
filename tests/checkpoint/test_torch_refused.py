"""What torch's optimizers and ours cannot tell each other is refused."""

from types import SimpleNamespace

import numpy as np
import pytest

from fastopt import lr_scheduler, optimizer
from fastopt.checkpoint import CheckpointError, from_torch_state_dict, to_torch_state_dict

ADAM = {"eps": 1e-8, "betas": (0.9, 0.999)}
EPS = {"eps": 1e-8}
NESTEROV = {"momentum": 0.9, "nesterov": True}
REFUSED = [
    (optimizer.Adam, [{**ADAM, "amsgrad": 0.5}], r"cannot have \['amsgrad=0.5'\]"),
    (optimizer.Nadam, [{**EPS, "amsgrad": True, "momentum_decay": 0.1}], "amsgrad=True"),
    (optimizer.Adam, [{**ADAM, "decoupled_weight_decay": True}], "decoupled_weight_decay=True"),
    (optimizer.AdamW, [{**ADAM, "decoupled_weight_decay": False}], "decoupled_weight_decay=False"),
    (optimizer.Adam, [{**ADAM, "maximize": None}], "maximize must be True or False, got None"),
    (optimizer.Adam, [{**ADAM, "betas": (0.9,)}], "not the state_dict"),
    (optimizer.Adam, [{**ADAM, "lr": "high"}], "not the state_dict|lr"),
    (optimizer.Adam, [{**ADAM, "params": [0, 0]}], "a parameter comes twice"),
    (optimizer.Adam, [ADAM, {**ADAM, "params": [1], "eps": 1e-6}], "the groups differ in eps"),
    (optimizer.SGD, [{"momentum": 0.9, "nesterov": False, "dampening": 0.5}],
     r"cannot have \['dampening=0.5'\]"),
    (optimizer.SGD, [NESTEROV], "nesterov=True"),
    (optimizer.NAG, [{**NESTEROV, "nesterov": False}], "nesterov=False"),
    (optimizer.AdaGrad, [{**EPS, "lr_decay": -0.1}], "lr_decay"),
    (optimizer.AdaDelta, [{**EPS, "rho": 0.9, "lr": 0.5}], "lr=0.5"),
    (optimizer.SGD, [{}], r"its groups must have \['momentum'\]$"),
    (optimizer.Adam, [{**ADAM, "momentum_decay": 0.1}], "momentum_decay=0.1"),
    (optimizer.Adamax, [{**ADAM, "amsgrad": False}], "amsgrad=False"),
    (optimizer.Ftrl, [EPS], "Ftrl cannot continue a run of torch: torch has no Ftrl$"),
    (optimizer.Adam, [], "not the state_dict of an optimizer of torch"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("klass", "groups", "words"), REFUSED, ids=[f"{k.__name__}-{o}" for k, o, _ in REFUSED]
)
def test_options_without_a_counterpart_are_refused(klass, groups, words):
    groups = [{"lr": 1, "weight_decay": 0, "params": [0], **options} for options in groups]
    updater = optimizer.get_updater(klass())
    before = updater.optimizer.__getstate__()
    with pytest.raises(CheckpointError, match=words):
        from_torch_state_dict(updater, {"state": {}, "param_groups": groups})
    assert updater.optimizer.__getstate__() == before


@pytest.mark.parametrize("given", [None, [], {}, {"state": 3}])
def test_dicts_of_another_kind_are_refused(given):
    with pytest.raises(CheckpointError, match="not the state_dict of an optimizer of torch"):
        from_torch_state_dict(optimizer.get_updater(optimizer.Adam()), given)


@pytest.mark.parametrize("indices", [[1, 2], [], "a", 3])
def test_indices_that_are_not_as_many_as_the_parameters_are_refused(indices):
    updater = optimizer.get_updater(optimizer.Adam())
    updater(0, np.ones(2), np.ones(2))
    saved = to_torch_state_dict(updater)
    with pytest.raises(CheckpointError, match="indices must have length 1, one for each parameter"):
        from_torch_state_dict(optimizer.get_updater(optimizer.Adam()), saved, indices)


def adam_group(**options):
    return {"lr": 0.1, "weight_decay": 0, "betas": (0.9, 0.999), "eps": 1e-8, **options}


def test_multipliers_of_live_parameters_must_agree_with_the_groups():
    live = SimpleNamespace(lr_mult=1.0, wd_mult=1.0)
    groups = [adam_group(params=[0]), adam_group(params=[1], lr=0.2)]
    updater = optimizer.get_updater(optimizer.Adam(param_dict={0: live, 1: live}))
    with pytest.raises(CheckpointError, match=r"param_dict\[0\].lr_mult must be 0.5"):
        from_torch_state_dict(updater, {"state": {}, "param_groups": groups})


def test_a_schedule_stays(tmp_path):
    made = optimizer.Adam(lr_scheduler=lr_scheduler.FactorScheduler(9, 0.5))
    updater, schedule = optimizer.get_updater(made), made.lr_scheduler
    from_torch_state_dict(updater, {"state": {}, "param_groups": [adam_group(params=[0])]})
    assert updater.optimizer.lr_scheduler is schedule


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: optimizer.Ftrl(), "torch has no Ftrl"),
        (lambda: optimizer.AdamW(eta=0.5), "torch has no AdamW unless it has"),
        (lambda: optimizer.AdamW(correct_bias=False), "unless"),
        (lambda: optimizer.AdamW(cautious=True, stable=True), "no AdamW with cautious and stable"),
        (lambda: optimizer.SGD(momentum=0.9, cautious=True), "torch has no SGD with cautious"),
        (lambda: optimizer.Nadam(per_parameter=True, amsgrad=True), "unless"),
        (lambda: optimizer.RMSProp(clip_weights=1.0), "unless"),
        (
            lambda: optimizer.Nadam(),
            "unless it has {'formula': 'torch', .*} or .*'per_parameter': True, .*}",
        ),
        (lambda: optimizer.AdaGrad(wd=0.1), "wd must be 0, got 0.1"),
        (lambda: optimizer.AdaDelta(wd=0.1), "wd must be 0, got 0.1"),
    ],
)
def test_optimizers_without_a_counterpart_are_refused(make, words):
    updater = optimizer.get_updater(make())
    updater.states[0] = updater.optimizer.create_state(0, np.ones(2))
    with pytest.raises(ValueError, match=words):
        to_torch_state_dict(updater)


def test_states_that_torch_cannot_have_are_refused():
    updater = optimizer.get_updater(optimizer.SGD(momentum=0.9, learning_rate=0.0))
    updater(0, np.ones(2), np.ones(2))
    with pytest.raises(ValueError, match="index 0: the momentum cannot be divided by a rate of 0"):
        to_torch_state_dict(updater)
    updater.states[0] = (np.ones(2), np.ones(2))
    with pytest.raises(ValueError, match="the state has 2 arrays"):
        to_torch_state_dict(updater)


def test_texts_as_indices_need_an_order():
    updater = optimizer.get_updater(optimizer.Adam())
    for index in ("b", "a"):
        updater(index, np.ones(2), np.ones(2))
    with pytest.raises(ValueError, match=r"the order of index '[ab]' is not known"):
        to_torch_state_dict(updater)
    state = to_torch_state_dict(updater, ["a", "b", "c"])
    assert list(state["state"]) == [0, 1]
    assert state["param_groups"][0]["params"] == [0, 1, 2]
    new = optimizer.get_updater(optimizer.Adam())
    from_torch_state_dict(new, state, ["a", "b", "c"])
    assert set(new.states) == {"a", "b"}
