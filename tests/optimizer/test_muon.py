"""Muon: which weights it updates, its fallback, files of torch, and QK-Clip."""

import re

import numpy as np
import pytest

import fastopt
from fastopt.checkpoint import CheckpointError, from_torch_state_dict, to_torch_state_dict
from fastopt.optimizer import AdaMuon, Muon, NorMuon, clip_attention
from helpers.cases import exhaustive
from helpers.matrix_rules import drawn, single, trained
from helpers.refusals import check_refused
from helpers.resuming import WAYS, resumed

F32 = np.float32


@pytest.mark.parametrize("kind", [Muon, NorMuon, AdaMuon])
@pytest.mark.parametrize(("parts", "sizes"), [(3, (2, 2, 2)), ((1, 3, 2), (1, 3, 2))], ids=str)
def test_split_weights_move_like_their_parts(parts, sizes, kind, rng):
    weight, gradients = single(rng, (6, 4))
    names = {0: "qkv.weight", 1: "key.weight"}
    made = kind(lr=0.1, wd=0.1, split={"key": 5, "qkv": parts}, param_idx2name=names)
    _, got = trained(made, weight, gradients)
    ends = np.cumsum(sizes)
    for end, size in zip(ends, sizes, strict=True):
        rows = slice(end - size, end)
        _, part = trained(kind(lr=0.1, wd=0.1), weight[rows], [g[rows] for g in gradients])
        np.testing.assert_array_equal(got[rows], part)


@pytest.mark.parametrize("how", ["dimensions", "name", "parameter", "index"])
def test_the_fallback_updates_like_an_updater_of_its_own(how, rng):
    shape = (5,) if how == "dimensions" else (3, 5)
    weight, gradients = single(rng, shape)
    index, common = "head" if how == "index" else 0, {}
    if how == "name":
        common["param_idx2name"] = {0: "lm_head.weight"}
    elif how == "parameter":
        common["param_dict"] = {0: fastopt.Parameter("head_weight", shape=shape)}
    patterns = None if how == "dimensions" else ["head"]
    made = Muon(lr=0.5, fallback=fastopt.AdamW(lr=0.1, wd=0.3), fallback_for=patterns, **common)
    updater, got = trained(made, weight, gradients, index)
    alone, expected = trained(fastopt.AdamW(lr=0.1, wd=0.3, **common), weight, gradients, index)
    np.testing.assert_array_equal(got, expected)
    np.testing.assert_equal(updater.states[index], alone.states[index])
    assert updater.optimizer.num_update == 4


def test_a_pattern_that_matches_no_name_warns_once(rng):
    weights, gradients = drawn(rng, (4, 6), (5,))
    names = {0: "hidden.weight", 1: "hidden.bias"}
    made = Muon(fallback="sgd", fallback_for="emebd", split={"qkv": 3}, param_idx2name=names)
    updater = fastopt.Updater(made)
    with pytest.warns(UserWarning, match="has no effect: it matches none of") as caught:
        updater([0, 1], gradients[0], weights)
    assert [str(each.message).partition(" has")[0] for each in caught] == [
        "fallback_for: 'emebd'",
        "split: 'qkv'",
    ]
    updater([0, 1], gradients[1], weights)


def test_row_sparse_gradients_are_for_the_fallback(rng):
    weight, values = rng.normal(size=(5, 3)).astype(F32), rng.normal(size=(2, 3)).astype(F32)
    made = Muon(fallback=fastopt.SGD(lr=0.1), fallback_for="embed", param_idx2name={0: "embed"})
    gradients = [(values, np.array([1, 3]))] * 3
    _, got = trained(made, weight, gradients)
    np.testing.assert_array_equal(got, trained(fastopt.SGD(lr=0.1), weight, gradients)[1])


def test_a_half_precision_copy_is_written_too(rng):
    weights, gradients = drawn(rng, (4, 6), (5,))
    updater, copies = fastopt.Updater(Muon(lr=0.1, fallback="sgd")), []
    for index, weight in enumerate(weights):
        copies.append(weight.astype(np.float16))
        updater.set_copy(index, copies[-1])
    for grads in gradients:
        updater([0, 1], [g.astype(np.float16) for g in grads], weights)
        np.testing.assert_equal(copies, [weight.astype(np.float16) for weight in weights])


@pytest.mark.parametrize("way", WAYS)
def test_the_arguments_of_a_fallback_are_saved(way, rng, tmp_path):
    weights, (grads, *_) = drawn(rng, (4, 6), (5,))
    old, present = (
        fastopt.Updater(Muon(fallback=fastopt.AdamW(**own), fallback_for="1", split={"0": 2}))
        for own in ({"lr": 0.25, "beta1": 0.5}, {})
    )
    object_before = present.optimizer.fallback
    old([0, 1], grads, weights)
    made = resumed(way, old, present, tmp_path).optimizer
    assert (made.fallback.lr, made.fallback.beta1, made.split) == (0.25, 0.5, (("0", 2),))
    assert made.fallback is object_before or way in ("get_states", "pickle")


def test_a_schedule_of_the_fallback_that_cannot_be_saved_is_the_present_one(rng, tmp_path):
    weights, gradients = drawn(rng, (4, 6), (5,))
    old, new = (
        fastopt.Updater(Muon(lr=0.1, fallback=fastopt.SGD(lr=lambda t, rate=rate: rate)))
        for rate in (0.5, 0.25)
    )
    old([0, 1], gradients[0], weights)
    with pytest.warns(UserWarning, match="schedule is not of a registered class"):
        made = resumed("save", old, new, tmp_path).optimizer
    assert (made.fallback.learning_rate, made.lr) == (0.25, 0.1)


@pytest.mark.parametrize("adjust", ["original", *exhaustive("match_rms_adamw", None)])
@pytest.mark.parametrize("nesterov", [True, *exhaustive(False)])
def test_it_resumes_a_run_of_torch(adjust, nesterov, rng, monkeypatch):
    torch = pytest.importorskip("torch")
    monkeypatch.setattr(torch.Tensor, "bfloat16", torch.Tensor.clone)
    weight, gradients = single(rng)
    parameter = torch.nn.Parameter(torch.tensor(weight))
    options = {"lr": 0.1, "momentum": 0.7, "nesterov": nesterov, "adjust_lr_fn": adjust}
    theirs = torch.optim.Muon([parameter], weight_decay=0.2, eps=1e-6, **options)
    updater, own = fastopt.Updater(Muon()), weight.copy()
    for step, grad in enumerate(gradients):
        parameter.grad = torch.tensor(grad)
        theirs.step()
        if step > 1:
            updater(0, grad, own)
        elif step == 1:
            own = parameter.detach().numpy().copy()
            from_torch_state_dict(updater, theirs.state_dict())
    np.testing.assert_allclose(own, parameter.detach().numpy(), rtol=1e-5, atol=1e-6)
    made, back = updater.optimizer, to_torch_state_dict(updater)
    assert (made.momentum, made.nesterov, made.eps, made.wd) == (0.7, nesterov, 1e-6, 0.2)
    assert (made.coefficients, made.steps) == ("quintic", 5)
    (group,) = back["param_groups"]
    assert group.items() >= {**options, "adjust_lr_fn": adjust or "original", "ns_steps": 5}.items()
    mom, expected = back["state"][0]["momentum_buffer"], theirs.state[parameter]["momentum_buffer"]
    np.testing.assert_allclose(mom, expected.numpy(), rtol=1e-5, atol=1e-7)
    back["state"] = {0: {"momentum_buffer": torch.tensor(mom)}}
    torch.optim.Muon([parameter], lr=0.1).load_state_dict(back)


def test_settings_that_torch_lacks_are_refused(rng):
    weight, gradients = single(rng)
    updater, _ = trained(Muon(), weight, gradients)
    with pytest.raises(ValueError, match=re.escape("Muon")):
        to_torch_state_dict(updater)
    group = {"lr": 0.1, "momentum": 0.9, "weight_decay": 0, "eps": 1e-7, "nesterov": True}
    group |= {"ns_coefficients": (2, -1.5, 0.5), "ns_steps": 5, "adjust_lr_fn": None, "params": [0]}
    with pytest.raises(CheckpointError, match=r"cannot have .*ns_coefficients"):
        from_torch_state_dict(updater, {"state": {}, "param_groups": [group]})


def test_it_shows_what_is_not_the_default(rng):
    assert repr(Muon()) == "Muon(learning_rate=0.001)"
    shown = repr(Muon(lr=0.1, steps=6, fallback=fastopt.AdamW(lr=0.2), fallback_for="head"))
    own = "steps=6, fallback=AdamW(learning_rate=0.2), fallback_for=('head',)"
    assert shown == f"Muon(learning_rate=0.1, {own})"


def logits(query, key, inputs, heads):
    """The largest logit of each head of `query`, which may share those of `key`."""
    of_head = len(query) // heads
    q = (inputs @ query.T).reshape(len(inputs), heads, of_head)
    k = (inputs @ key.T).reshape(len(inputs), -1, of_head)
    k = np.repeat(k, heads // k.shape[1], axis=1)
    return np.abs(np.einsum("ihd,jhd->hij", q, k)).max(axis=(1, 2))


@pytest.mark.parametrize("keys", [4, 2, 1])
@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_no_logit_exceeds_the_limit(keys, share, dtype, rng):
    inputs = rng.normal(size=(7, 5))
    query, key = (rng.normal(size=(3 * heads, 5)).astype(dtype) for heads in (4, keys))
    query[:3] *= 10
    before, first = logits(query, key, inputs, 4), (query.copy(), key.copy())
    limit = float(np.sort(before)[1])
    clip_attention(query, key, before, limit, share)
    after = logits(query, key, inputs, 4)
    np.testing.assert_allclose(after.max(), limit, rtol=1e-5)
    assert share < 1 or (key == first[1]).all()
    assert (np.abs(query) <= np.abs(first[0])).all()
    if keys == 4:  # each head has its own key
        np.testing.assert_allclose(after, np.minimum(before, limit), rtol=1e-5)
        same = np.repeat(before <= limit, 3)
        np.testing.assert_array_equal((query[same], key[same]), [each[same] for each in first])


WRONG = {
    "largest=[1.0] * 5": "ValueError: cannot be divided among 5 heads",
    "largest=[-1.0]": "ValueError: largest must have",
    "largest=[]": "ValueError: largest must have",
    "limit=0.0": "ValueError: limit",
    "share=2.0": "ValueError: share",
    "query=np.ones((4, 2), 'f2')": "TypeError: query: weight must have dtype float32",
    "key=np.ones((3, 2))": "ValueError: 3 of key cannot be divided",
    "key=[1.0]": "TypeError: must be a NumPy array",
}


@pytest.mark.parametrize("argument", WRONG)
def test_wrong_arguments_of_clip_attention_are_refused_and_nothing_changes(argument):
    given = {"query": np.ones((4, 2)), "key": np.ones((4, 2)), "largest": [200.0, 1.0]}
    names = {"np": np, "clip_attention": clip_attention, "given": given}
    check_refused(f"clip_attention(**(given | dict({argument})))", WRONG[argument], names)
    assert (given["query"] == 1).all()
    assert (given["key"] == 1).all()
