"""States and state dicts of fastopt.torch, from which any later run continues."""

import copy
import pickle

import numpy as np
import pytest
import torch
from torch.nn import Parameter
from torch.utils._pytree import tree_map

import fastopt
import fastopt.torch
from helpers.torch_runs import check_like_torch, saved

KINDS = [
    ("SGD", {"momentum": 0.9}),
    ("NAdam", {}),
    ("Adam", {"average": fastopt.EMA(0.5)}),
    ("AdamW", {"multi_precision": True}),
    ("AdamW", {"state_dtype": "int8", "state_min_size": 1}),
    ("AdamW", {"state_dtype": "bfloat16"}),
    ("AdamW", {"rounding": "stochastic"}),
    ("Lion", {}),
    ("Prodigy", {}),
    ("Adam", {"lr": torch.tensor(0.1)}),
]


def trained(name, **options):
    """A parameter with a name, its optimizer, and a step with a gradient of this value."""
    half = not {"multi_precision", "rounding"}.isdisjoint(options)
    shape = (2, 16 if options.get("state_dtype") == "int8" else 3)
    param = Parameter(torch.ones(shape, dtype=torch.bfloat16 if half else torch.float32))
    opt = getattr(fastopt.torch, name)([("weight", param)], **{"lr": 0.1, **options})

    def step(value):
        param.grad = torch.full_like(param, value)
        opt.step()

    step(1.0)
    return param, opt, step


@pytest.mark.parametrize(("name", "options"), KINDS)
def test_a_run_can_return_to_a_copy_of_a_state_dict_and_copies_of_it_go_on(name, options):
    param, opt, step = trained(name, **copy.deepcopy(options))
    assert list(opt.state) == [param]
    assert all(isinstance(value, torch.Tensor) for value in opt.state[param].values())
    state, before = copy.deepcopy(opt.state_dict()), param.detach().clone()
    runs = [copy.deepcopy((param, opt)), pickle.loads(pickle.dumps((param, opt)))]
    other = Parameter(before.clone())
    fresh = type(opt)([other], **{name: options[name] for name in options if name != "lr"})
    fresh.load_state_dict(saved(opt))
    step(-2.0)
    expected = param.detach().clone()
    if isinstance(opt.param_groups[0]["lr"], torch.Tensor):
        opt.param_groups[0]["lr"].fill_(9.0)
    step(5.0)
    param.data.copy_(before)
    opt.load_state_dict(state)
    for again, of in (*runs, (other, fresh), (param, opt)):
        again.grad = torch.full_like(again, -2.0)
        of.step()
        assert torch.equal(again, expected)
        assert {*of.param_groups[0]} - {"param_names"} == {*opt.param_groups[0]} - {"param_names"}


def moved(opt, p):
    """The usual lines after a load."""
    for state in opt.state.values():
        for name, value in state.items():
            state[name] = value.to("cpu", copy=True)


def cast_and_back(opt, p):
    p.data = p.data.double()
    p.grad = None
    opt.step()
    p.data = p.data.float()


def slow(opt, p):
    """As timm's Lookahead does."""
    slow = opt.state[p].setdefault("slow", p.detach().clone())
    slow.add_(p.detach() - slow, alpha=0.5)
    p.data.copy_(slow)


def put(name, change):
    """Put into the state what a function of the present tensor returns."""
    return lambda opt, p: opt.state[p].update({name: change(opt.state[p][name])})


def set_options(*changes):
    """Changes of the options of a group, in turn."""
    return lambda opt, p: opt.param_groups[0].update(
        changes[int(opt.state[p]["step"]) % len(changes)]
    )


def halve(opt, p):
    """Put tensors among the options, and change them in place."""
    group = opt.param_groups[0]
    if not isinstance(group["lr"], torch.Tensor):
        group.update(lr=torch.tensor(0.1), betas=(torch.tensor(0.8), 0.9))
    for number in (group["lr"], group["betas"][0]):
        number.mul_(0.5)


def toggle(opt, p):
    """Buffers wait while the momentum is 0, and may come later."""
    for group in opt.param_groups:
        group["momentum"] = 0.0 if group["momentum"] else 0.5


def swap(opt, p):
    first, second = opt.param_groups
    first["params"], second["params"] = second["params"], first["params"]


def repeat(opt, p):
    opt.param_groups += opt.param_groups[:1]
    assert [group["params"] for group in opt.state_dict()["param_groups"]][::2] == [[0, 1]] * 2


def own_keys(opt, p):
    opt.state[p]["mine"] = opt.state["mine"] = {"slow": 1}


WRITES = {
    "zeroed": lambda opt, p: opt.state[p]["exp_avg"].zero_(),
    "replaced": put("exp_avg_sq", lambda x: torch.full_like(x, 0.5)),
    "lazily negated": put("exp_avg", lambda x: torch._neg_view(-x)),
    "strided": put("exp_avg", lambda x: torch.arange(12.0).view(4, 3).T[:3, :3]),
    "counted": lambda opt, p: opt.state[p]["step"].add_(10),
    "count replaced": put("step", lambda x: torch.tensor(0.0)),
    "other memory": lambda opt, p: setattr(
        opt.state[p]["exp_avg"], "data", torch.full_like(p, 0.25)
    ),
    "cleared": lambda opt, p: opt.state[p].clear(),
    "removed": lambda opt, p: opt.state.pop(p),
    "emptied": lambda opt, p: setattr(opt, "state", type(opt.state)(dict)),
    "assigned": lambda opt, p: opt.state.update(
        {p: {name: value.clone() for name, value in opt.state[p].items()}}
    ),
    "own keys": own_keys,
    "moved": moved,
    "cast and back": cast_and_back,
    "other memory of the parameter": lambda opt, p: setattr(p, "data", p.data.clone()),
    "slow": slow,
}
SURGERY = {
    "reversed": lambda opt, p: opt.param_groups.reverse(),
    "appended": lambda opt, p: opt.param_groups[0]["params"].append(
        opt.param_groups[1]["params"].pop()
    ),
    "swapped": swap,
    "merged": lambda opt, p: opt.param_groups[0]["params"].extend(opt.param_groups.pop()["params"]),
    "removed": lambda opt, p: opt.param_groups.pop(1) if opt.param_groups[1:] else None,
    "replaced": lambda opt, p: opt.param_groups.insert(0, {**opt.param_groups.pop(0), "lr": 0.5}),
    "repeated": repeat,
    "new": lambda opt, p: opt.param_groups.append(
        {**opt.param_groups[0], "params": [Parameter(torch.randn(3))]}
    ),
}
OPTIONS = [
    [{"amsgrad": False}],
    [{"decoupled_weight_decay": True}],
    [{"maximize": True}, {"maximize": False}],
    [{"lr": -0.1}, {"lr": 0.1, "weight_decay": -0.5}],
    [{"betas": (torch.tensor(0.5), 0.9), "eps": torch.tensor(0.1)}, {"betas": (0.1, 0.2)}],
]
SGD, AMSGRAD = {"momentum": 0.9, "dampening": 0.5}, {"amsgrad": True, "weight_decay": 0.1}
BUFFERS = [
    *(("SGD", more) for more in ({"dampening": 0.5}, SGD, {"momentum": 0.9, "nesterov": True})),
    *(("RMSprop", {"momentum": 0.9, "centered": centered}) for centered in (False, True)),
]
CHANGES = [
    *(("Adam", {"amsgrad": own}, write) for write in WRITES.values() for own in (False, True)),
    *(("Adam", {}, put("exp_avg", view)) for view in (torch.t, torch.fliplr)),
    *(("Adam", AMSGRAD, set_options(*changes)) for changes in OPTIONS),
    *(
        (name, options, change)
        for change in SURGERY.values()
        for name, options in (("SGD", SGD), ("Adam", {}), ("NAdam", {}))
    ),
    ("SGD", SGD, slow),
    ("Adam", {}, halve),
    *((name, options, toggle) for name, options in BUFFERS),
]
"""Optimizers, and what a program changes: the state, options, or groups with their parameters."""


@pytest.mark.parametrize(("name", "options", "change"), CHANGES)
def test_what_a_program_changes_is_what_the_next_step_uses(name, options, change):
    def run(library):
        torch.manual_seed(1)
        params = [Parameter(torch.randn(3, 3)) for _ in range(4)]
        groups = [{"params": params[:2]}, {"params": params[2:], "lr": 0.2}]
        opt = getattr(library, name)(groups, lr=0.1, **options)
        for step in range(5):
            torch.manual_seed(step)
            for group in opt.param_groups:
                for param in group["params"]:
                    param.grad = torch.randn(param.shape)
            opt.step()
            if step in (0, 2):
                change(opt, params[1])
        return [*params, *(dict(opt.state[param]) for param in params)]

    check_like_torch(run, check_dtype=False)


def test_hooks_see_the_state_dict_and_may_replace_it():
    _, opt, _ = trained("SGD", momentum=0.9)
    seen = []
    opt.register_state_dict_pre_hook(lambda self: seen.append(self))
    opt.register_state_dict_post_hook(lambda self, found: {**found, "own": 1})
    opt.register_state_dict_post_hook(lambda self, found: found.update(more=2))
    found = opt.state_dict()
    assert seen == [opt]
    assert (found["own"], found["more"]) == (1, 2)


def test_a_state_dict_refers_to_the_state_and_copies_of_it_do_not():
    param, opt, _ = trained("Adam")
    entry = opt.state_dict()["state"][0]
    assert entry is opt.state[param]
    tensors = lambda entry: tree_map(torch.clone, entry)  # noqa: E731
    for copied in (copy.copy, copy.deepcopy, type(entry), tensors):
        made = copied(entry)
        torch.testing.assert_close(dict(made), dict(entry))
        del made["exp_avg"]
        assert "exp_avg" in entry


@pytest.mark.parametrize(
    ("name", "slots"),
    [("ASGD", ["last_rate", "ax"]), ("Lion", ["mom"]), ("Adafactor", ["rows", "columns"])],
)
def test_names_are_those_of_torch_or_else_of_the_rule(name, slots):
    param, opt, _ = trained(name)
    assert [*opt.state[param]] == ["step", *slots]


def test_numbers_of_parameters_are_those_of_torch():
    """Also with a parameter that a group has twice, and in options that a user adds."""
    found = []
    for library in (torch.optim, fastopt.torch):
        first, second, third = (Parameter(torch.ones(1)) for _ in range(3))
        with pytest.warns(match="duplicate"):
            opt = library.SGD([{"params": [first, first], "mine": {"a": 1}}, {"params": [second]}])
        opt.add_param_group({"params": [third]})
        groups = opt.state_dict()["param_groups"]
        found.append([(group["params"], group.get("mine")) for group in groups])
    assert found[0] == found[1]


@pytest.mark.parametrize("name", ["SGD", "Lion", "ScheduleFreeSGD"])
def test_clips_are_those_of_the_optimizer_that_loads(name):
    params = [Parameter(torch.ones(2)) for _ in range(2)]
    groups = [{"params": [param]} for param in params]
    clips = {"clip_global_norm": 1e-3, "clip_adaptive": 0.1, "clip_adaptive_eps": 0.5}
    kind = getattr(fastopt.torch, name)
    first, second = (kind([{**group} for group in groups], lr=0.1, **more) for more in (clips, {}))
    for param in params:
        param.grad = torch.tensor([1.0, -2.0])
    first.step()
    second.load_state_dict(first.state_dict())
    for opt in (second, copy.deepcopy(second)):
        assert [updater.clip_adaptive for updater in opt.updaters] == [None, None]
    alone = kind([params[0]], lr=0.1, **clips)
    alone.load_state_dict(kind([params[0]], lr=0.1).state_dict())
    assert {name: getattr(alone.updaters[0], name) for name in clips} == clips


def earlier(opt):
    """The state dict of version 0.1, if torch has no form for its states."""
    moved = lambda x: torch.from_numpy(x.copy()) if isinstance(x, np.ndarray) else x  # noqa: E731
    states = [tree_map(moved, updater.state_dict()) for updater in opt.updaters]
    for whole in states:
        whole["attributes"]["rescale_grad"] = 1e-3  # as a clip over several groups left it
    return {**copy.deepcopy(opt.state_dict()), "state": {"fastopt": states}}


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("Lion", {}),
        ("ScheduleFreeAdamW", {}),
        ("Prodigy", {"lr": 1.0}),
        ("SparseAdam", {"average": fastopt.EMA(0.5)}),
        ("AdamW", {"state_dtype": "int8", "state_min_size": 1}),
    ],
)
def test_states_of_version_0_1_continue(name, options):
    param, opt, step = trained(name, **copy.deepcopy(options))
    step(-2.0)
    state, before = earlier(opt), param.detach().clone()
    if name == "SparseAdam":
        state["state"]["fastopt"][0]["attributes"]["formula"] = "torch"  # as it had then
    step(0.5)
    expected = param.detach().clone()
    again, other, step = trained(name, **copy.deepcopy(options))
    again.data.copy_(before)
    other.load_state_dict(state)
    assert other.updaters[0].optimizer.rescale_grad == 1
    step(0.5)
    assert torch.equal(again, expected)
    assert other.state_dict()["state"][0].keys() == opt.state_dict()["state"][0].keys()


NOT_STEPS = [float("nan"), float("inf"), 0.5, -1, torch.tensor(torch.nan), torch.ones(2)]
ENTRIES = [
    *(("step must be a whole number", {"step": step}) for step in NOT_STEPS),
    ("exp_avg must have shape .2, 3., got .4,.", {"exp_avg": torch.ones(4)}),
    ("exp_avg must have dtype", {"exp_avg": torch.ones(2, 3).int()}),
    ("lacks .'exp_avg'", {"exp_avg": None}),
    ("exp_avg_sq must be a tensor, got 1", {"exp_avg_sq": 1}),
    ("mu_product must be a finite number", {"mu_product": torch.tensor(torch.nan)}),
]
"""Entries of a state that are none, and words of the error."""


@pytest.mark.parametrize(("words", "entry"), ENTRIES)
def test_a_state_that_is_no_state_is_explained_in_the_next_step(words, entry):
    param, opt, _ = trained("NAdam")
    before = param.detach().clone()
    opt.state[param].update(entry)
    for _ in range(2):
        with pytest.raises(ValueError, match=f"state of weight.* {words}|weight: {words}"):
            opt.step()
        assert torch.equal(param, before)


def test_a_state_dict_of_torchs_adam_decouples_the_decay_of_adamw_as_in_torch():
    _, opt, _ = trained("AdamW")
    opt.load_state_dict(torch.optim.Adam(opt.param_groups[0]["params"]).state_dict())
    assert opt.param_groups[0]["decoupled_weight_decay"]


DAMAGES = [
    *((words, lambda state, entry=entry: state["state"][0].update(entry))
      for words, entry in ENTRIES),
    ("of another optimizer than NAdam: its groups lack betas, eps; load it with",
     lambda state: [state["param_groups"][0].pop(name) for name in ("betas", "eps")]),
    ("parameter group", lambda state: state["param_groups"].append({"params": []})),
    ("state of weight lacks",
     lambda state: state.update(state=trained("Lion")[1].state_dict()["state"])),
    ("betas must be 2 numbers, got .0.9, 0.9, 0.9.",
     lambda state: state["param_groups"][0].update(betas=(0.9, 0.9, 0.9))),
    ("the state has 0 groups, and param_groups 1",
     lambda state: state.update(state={"fastopt": []})),
]  # fmt: skip


@pytest.mark.parametrize(("match", "damage"), DAMAGES)
def test_a_state_dict_that_does_not_fit_is_explained(match, damage):
    _, opt, _ = trained("NAdam")
    before, state = (copy.deepcopy(opt.state_dict()) for _ in range(2))
    damage(state)
    with pytest.raises((TypeError, ValueError), match=match):
        opt.load_state_dict(state)
    after = opt.state_dict()
    assert after["param_groups"] == before["param_groups"]
    torch.testing.assert_close(after["state"], before["state"])
    opt.step()
