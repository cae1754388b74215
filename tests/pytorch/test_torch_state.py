"""State dicts of fastopt.torch: snapshots, from which any later run continues."""

import copy

import numpy as np
import pytest
import torch
from torch.nn import Parameter

import fastopt
import fastopt.torch

KINDS = [
    ("Adam", {}),
    ("SGD", {"momentum": 0.9}),
    ("NAdam", {}),
    ("Adam", {"average": fastopt.EMA(0.5)}),
    ("AdamW", {"multi_precision": True}),
    ("AdamW", {"state_dtype": "int8", "state_min_size": 1}),
    ("Lion", {}),
    ("Adam", {"lr": torch.tensor(0.1)}),
]


def trained(name, **options):
    """A parameter, its optimizer, and a step with a gradient of this value."""
    half = bool(options.get("multi_precision"))
    param = Parameter(torch.ones(2, 3, dtype=torch.bfloat16 if half else torch.float32))
    opt = getattr(fastopt.torch, name)([param], **{"lr": 0.1, **options})

    def step(value):
        param.grad = torch.full_like(param, value)
        opt.step()

    step(1.0)
    return param, opt, step


@pytest.mark.parametrize(("name", "options"), KINDS)
def test_a_state_dict_is_a_snapshot_to_which_a_run_can_return(name, options):
    param, opt, step = trained(name, **copy.deepcopy(options))
    state, before = opt.state_dict(), param.detach().clone()
    step(-2.0)
    expected = param.detach().clone()
    if isinstance(opt.param_groups[0]["lr"], torch.Tensor):
        opt.param_groups[0]["lr"].fill_(9.0)
    step(5.0)
    param.data.copy_(before)
    opt.load_state_dict(state)
    step(-2.0)
    assert torch.equal(param.detach(), expected)


def test_a_state_dict_is_of_complete_steps():
    _, opt, _ = trained("Adam")
    with (
        opt.updaters[0].lock,
        pytest.raises(RuntimeError, match=r"state_dict\(\) inside"),
    ):
        opt.state_dict()


def test_hooks_see_the_state_dict_and_may_replace_it():
    _, opt, _ = trained("SGD", momentum=0.9)
    seen = []
    opt.register_state_dict_pre_hook(lambda self: seen.append(self))
    opt.register_state_dict_post_hook(lambda self, found: {**found, "own": 1})
    opt.register_state_dict_post_hook(lambda self, found: found.update(more=2))
    found = opt.state_dict()
    assert seen == [opt]
    assert (found["own"], found["more"]) == (1, 2)
    found["state"][0]["momentum_buffer"].zero_()
    assert opt.updaters[0].states[0].any()


def test_numbers_of_parameters_are_those_of_torch():
    """Also with a parameter that a group has twice, and in options that a user adds."""
    found = []
    for library in (torch.optim, fastopt.torch):
        first, second, third = (Parameter(torch.ones(1)) for _ in range(3))
        with pytest.warns(match="duplicate"):
            opt = library.SGD(
                [{"params": [first, first], "mine": {"a": [1]}}, {"params": [second]}]
            )
        opt.add_param_group({"params": [third]})
        found.append(
            [(group["params"], group.get("mine")) for group in opt.state_dict()["param_groups"]]
        )
    assert found[0] == found[1]


@pytest.mark.parametrize("name", ["SGD", "Lion", "ScheduleFreeSGD"])
def test_clips_are_those_of_the_optimizer_that_loads(name):
    """States of earlier versions may have the factor of a clip over several groups."""
    params = [Parameter(torch.ones(2)) for _ in range(2)]
    groups = [{"params": [param]} for param in params]
    clips = {"clip_global_norm": 1e-3, "clip_adaptive": 0.1, "clip_adaptive_eps": 0.5}
    kind = getattr(fastopt.torch, name)
    first = kind([{**group} for group in groups], lr=0.1, **clips)
    for param in params:
        param.grad = torch.tensor([1.0, -2.0])
    first.step()
    state = first.state_dict()
    for whole in state["state"].get("fastopt", ()):
        assert whole["attributes"]["rescale_grad"] == 1
        whole["attributes"]["rescale_grad"] = 1e-3
    second = kind([{**group} for group in groups], lr=0.1)
    second.updaters[1].optimizer.rescale_grad = 0.5
    second.load_state_dict(state)
    copied = copy.deepcopy(second)
    for opt in (second, copied):
        assert [updater.optimizer.rescale_grad for updater in opt.updaters] == [1.0, 0.5]
        assert [updater.clip_adaptive for updater in opt.updaters] == [None, None]
    alone = kind([params[0]], lr=0.1, **clips)
    alone.load_state_dict(kind([params[0]], lr=0.1).state_dict())
    updater = alone.updaters[0]
    assert {name: getattr(updater, name) for name in clips} == clips


def test_a_reset_keeps_the_clip_over_all_groups():
    params = [Parameter(torch.zeros(1)) for _ in range(2)]
    opt = fastopt.torch.SGD([{"params": [p]} for p in params], lr=1.0, clip_global_norm=1.0)
    opt.state = {}
    assert [updater.clip_global_norm for updater in opt.updaters] == [None, None]


def test_sparse_adam_continues_an_earlier_state_with_the_formula_of_torch():
    _, opt, _ = trained("SparseAdam", average=fastopt.EMA(0.5))
    state = opt.state_dict()
    state["state"]["fastopt"][0]["attributes"]["formula"] = "torch"
    opt.load_state_dict(state)
    assert opt.updaters[0].optimizer.formula == "mxnet"


NOT_STEPS = [float("nan"), float("inf"), 0.5, -1, torch.tensor(torch.nan), torch.ones(2)]


def damaged(**changes):
    def change(state):
        state["state"][0].update(changes)

    return change


def of_group(**changes):
    def change(state):
        state["param_groups"][0].update(changes)

    return change


DAMAGES = [
    *(
        (f"state of weight: step must be a whole .*got {str(step)[:3]}", damaged(step=step))
        for step in NOT_STEPS
    ),
    ("state of weight: exp_avg must have shape .2, 3., got .4,.", damaged(exp_avg=torch.ones(4))),
    ("state of weight: exp_avg_sq must", damaged(exp_avg_sq=torch.ones(1))),
    ("state of weight lacks .'exp_avg'", damaged(exp_avg=None)),
    ("state of weight: exp_avg must be a tensor, got 5", damaged(exp_avg=5)),
    ("mu_product must be a finite number", damaged(mu_product=torch.tensor(torch.nan))),
    ("betas must be 2 numbers, got .0.9, 0.9, 0.9.", of_group(betas=(0.9, 0.9, 0.9))),
    (
        "param_names of parameter group 0 must be a list of 1 names, .* got .'a', 'b'.",
        of_group(param_names=["a", "b"]),
    ),
    ("param_names of parameter group 0 must .* got 5", of_group(param_names=5)),
    ("param_names of parameter group 0 must .* got 'w'", of_group(param_names="w")),
]


@pytest.mark.parametrize(("match", "damage"), DAMAGES)
def test_a_state_dict_that_does_not_fit_is_explained(match, damage):
    param = Parameter(torch.ones(2, 3))
    opt = fastopt.torch.NAdam([("weight", param)], lr=0.1)
    param.grad = torch.ones(2, 3)
    opt.step()
    before, state = opt.state_dict(), opt.state_dict()
    damage(state)
    with pytest.raises((TypeError, ValueError), match=match):
        opt.load_state_dict(state)
    after = opt.state_dict()
    assert after["param_groups"] == before["param_groups"]
    torch.testing.assert_close(after["state"], before["state"])
    opt.step()


def test_states_of_fewer_groups_are_refused():
    _, opt, _ = trained("Lion")
    state = opt.state_dict()
    state["state"]["fastopt"] = []
    with pytest.raises(ValueError, match="the state has 0 groups, and param_groups 1"):
        opt.load_state_dict(state)


def test_a_state_may_be_negated_lazily():
    _, opt, _ = trained("SGD", momentum=0.5)
    state = opt.state_dict()
    state["state"][0]["momentum_buffer"] = torch._neg_view(torch.ones(2, 3))
    opt.load_state_dict(state)
    assert np.array_equal(opt.updaters[0].states[0], -np.ones((2, 3)))
