"""Muon: steps of torch and optax, which weights it updates, and what updaters promise."""

import copy
import json
import math
import re

import numpy as np
import pytest

import fastopt
from fastopt._engine.newton_schulz import COEFFICIENTS, NewtonSchulz
from fastopt.amp import LossScaler
from fastopt.checkpoint import CheckpointError, from_torch_state_dict, to_torch_state_dict
from fastopt.demo.perceptron import Perceptron, train
from fastopt.lr_scheduler import FactorScheduler
from fastopt.optimizer import Muon
from helpers.cases import exhaustive
from helpers.matrix_rules import check_recorded, drawn, single, trained
from helpers.paths import GOLDEN
from helpers.resuming import WAYS, resumed

RECORDED = json.loads((GOLDEN / "matrices.json").read_text())
CASES = RECORDED["cases"]
ids = [
    f"{case['library']}-{case['shape'][0]}x{case['shape'][1]}-{k}" for k, case in enumerate(CASES)
]
every_case = pytest.mark.parametrize("case", CASES, ids=ids)
F32 = np.float32


def orthogonal(matrix, steps=5):
    """Optimal polynomials of singular values between 0.0025 and 1 times a bound."""
    left, values, right = np.linalg.svd(matrix.astype(np.float64), full_matrices=False)
    values = values / (1.01 * np.linalg.norm(values, 8))
    for a, b, c in COEFFICIENTS["polar"].polynomials[:steps]:
        values = a * values + b * values**3 + c * values**5
    return left * values @ right


def stepped(weight, gradients, lr=0.001, momentum=0.95, nesterov=True, wd=0.0, rates=None):
    """Weights after each step in float64, with the scale of Moonlight."""
    weight, mom = weight.astype(np.float64), 0.0
    for step, grad in enumerate(gradients):
        grad = grad.astype(np.float64)
        rate = lr if rates is None else rates[step]
        mom = momentum * mom + (1 - momentum) * grad
        direction = (1 - momentum) * grad + momentum * mom if nesterov else mom
        scale = 0.2 * math.sqrt(max(weight.shape))
        weight = (1 - rate * wd) * weight - rate * scale * orthogonal(direction)
        yield weight


# The steps of others


def test_the_file_names_its_packages_and_has_both_libraries():
    assert {*RECORDED["packages"]} == {"torch", "optax", "jax"}
    assert {case["library"] for case in CASES} == {"torch", "optax"}
    assert {case["arguments"]["coefficients"] for case in CASES} == {"polar_express", "quintic"}


@every_case
@pytest.mark.parametrize(
    ("dtype", "rtol"),
    [(F32, 3e-5), pytest.param(np.float64, 1e-11, marks=pytest.mark.slow("exhaustive"))],
)
def test_each_step_is_that_of_the_library(case, dtype, rtol):
    data = RECORDED["data"]["x".join(map(str, case["shape"]))]
    check_recorded(Muon(**case["arguments"]), data, case["weights"], dtype, rtol)


@pytest.mark.slow("exhaustive")
@pytest.mark.parametrize("case", [case for case in CASES if "options" in case], ids=[*"012345678"])
def test_each_step_is_that_of_the_installed_torch(case, monkeypatch):
    torch = pytest.importorskip("torch")
    monkeypatch.setattr(torch.Tensor, "bfloat16", torch.Tensor.clone)
    start, gradients = RECORDED["data"]["x".join(map(str, case["shape"]))]
    parameter = torch.nn.Parameter(torch.tensor(start, dtype=torch.float32))
    theirs = torch.optim.Muon([parameter], **case["options"])
    updater, weight = fastopt.Updater(Muon(**case["arguments"])), np.array(start, F32)
    for grad in gradients:
        updater(0, np.array(grad, F32), weight)
        parameter.grad = torch.tensor(grad, dtype=torch.float32)
        theirs.step()
        np.testing.assert_allclose(weight, parameter.detach().numpy(), rtol=3e-5, atol=3e-5)


@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize("shape", [(4, 6), (7, 2), (3, 3)])
def test_it_agrees_with_the_formula_in_float64(shape, nesterov, rng):
    weight, gradients = single(rng, shape)
    arguments = {"lr": 0.1, "momentum": 0.8, "nesterov": nesterov, "wd": 0.3}
    updater, got = fastopt.Updater(Muon(**arguments)), weight.copy()
    for grad, expected in zip(gradients, stepped(weight, gradients, **arguments), strict=True):
        updater(0, grad, got)
        np.testing.assert_allclose(got, expected, rtol=2e-5, atol=2e-5)


def test_it_moves_a_weight_by_an_orthogonal_matrix(rng):
    weight, gradients = single(rng, (16, 9), 1)
    _, got = trained(Muon(lr=1.0, adjust="original"), weight, gradients)
    moved = (got - weight) / math.sqrt(16 / 9)
    np.testing.assert_allclose(moved.T @ moved, np.eye(9), atol=0.05)


# What the base class promises


def test_schedules_and_multipliers_set_the_rate_of_each_step(rng):
    weight, gradients = single(rng)
    schedule = FactorScheduler(2, 0.5, base_lr=0.4)
    made = Muon(copy.deepcopy(schedule), wd=0.2, param_idx2name={0: "a_weight"})
    made.set_lr_mult({"a_weight": 0.5})
    made.set_wd_mult({0: 3.0})
    _, got = trained(made, weight, gradients)
    rates = [0.5 * schedule(t) for t in range(1, 5)]
    assert len(set(rates)) > 1
    *_, expected = stepped(weight, gradients, wd=0.6, rates=rates)
    np.testing.assert_allclose(got, expected, rtol=2e-5, atol=2e-5)


def test_a_loss_scale_and_a_bound_of_the_norm_measure_all_gradients(rng):
    weights, gradients = drawn(rng, (4, 6), (5,), steps=3)
    scaler = LossScaler(init_scale=8.0)
    made = [Muon(lr=0.1, fallback="sgd") for _ in range(2)]
    scaled = fastopt.Updater(made[0], loss_scaler=scaler, clip_global_norm=1.0)
    plain, others = fastopt.Updater(made[1]), copy.deepcopy(weights)
    for grads in gradients:
        norm = math.sqrt(sum(float(np.sum(g.astype(float) ** 2)) for g in grads))
        scaled([0, 1], [g * F32(8) for g in grads], weights)
        assert scaled.info.global_norm == pytest.approx(norm)
        plain([0, 1], [g * F32(1 / norm) for g in grads], others)
    for weight, other in zip(weights, others, strict=True):
        np.testing.assert_allclose(weight, other, rtol=1e-5, atol=1e-6)
    before = copy.deepcopy((weights, scaled.states))
    scaled([0, 1], [np.full((4, 6), np.inf, F32), gradients[0][1]], weights)
    assert scaled.info.skipped
    np.testing.assert_equal((weights, dict(scaled.states)), before)


def test_maximize_is_the_step_of_the_opposite_gradient(rng):
    weights, gradients = drawn(rng, (4, 6), (5,))
    results = []
    for maximize, sign in ((True, 1), (False, -1)):
        made = Muon(lr=0.1, wd=0.1, maximize=maximize, fallback="sgd")
        updater, own = fastopt.Updater(made), copy.deepcopy(weights)
        for grads in gradients:
            updater([0, 1], [sign * g for g in grads], own)
        results.append(own)
    np.testing.assert_equal(*results)
    with pytest.raises(ValueError, match="maximize is True, that of the fallback False"):
        Muon(maximize=True, fallback=fastopt.AdamW())


def test_a_weight_of_a_convolution_is_a_matrix_of_its_first_axis_by_the_others(rng):
    weight, gradients = single(rng, (4, 3, 2, 2))
    _, got = trained(Muon(lr=0.1), weight, gradients)
    _, flat = trained(Muon(lr=0.1), weight.reshape(4, 12), [g.reshape(4, 12) for g in gradients])
    np.testing.assert_array_equal(got.reshape(4, 12), flat)


@pytest.mark.parametrize(("parts", "sizes"), [(3, (2, 2, 2)), ((1, 3, 2), (1, 3, 2))], ids=str)
def test_split_weights_move_like_their_parts(parts, sizes, rng):
    weight, gradients = single(rng, (6, 4))
    names = {0: "qkv.weight", 1: "key.weight"}
    made = Muon(lr=0.1, wd=0.1, split={"key": 5, "qkv": parts}, param_idx2name=names)
    _, got = trained(made, weight, gradients)
    ends = np.cumsum(sizes)
    for end, size in zip(ends, sizes, strict=True):
        rows = slice(end - size, end)
        _, part = trained(Muon(lr=0.1, wd=0.1), weight[rows], [g[rows] for g in gradients])
        np.testing.assert_array_equal(got[rows], part)


# Which weights


def test_other_weights_are_errors_that_say_what_to_pass(rng):
    updater = fastopt.Updater(Muon(param_idx2name={3: "b_bias"}))
    weights, grads = (
        [np.ones((2, 2), F32), np.ones(4, F32)],
        [np.ones((2, 2), F32), np.ones(4, F32)],
    )
    words = r"index 3 \(b_bias\): Muon .* two or more dimensions, got shape \(4,\); pass fallback="
    for index, grad, weight in ((3, grads[1], weights[1]), ([1, 3], grads, weights)):
        with pytest.raises(ValueError, match=words):
            updater(index, grad, weight)
    assert not updater.states
    assert not updater.optimizer._index_update_count
    np.testing.assert_equal(weights, grads)


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


def test_a_fallback_by_name_has_the_rate_schedule_and_decay(rng):
    weight, gradients = single(rng, (5,))
    arguments = {"lr_scheduler": lambda t: 0.1 / t, "wd": 0.3, "clip_gradient": 0.5}
    made = Muon(fallback="adamw", **arguments)
    _, got = trained(made, weight, gradients)
    _, expected = trained(fastopt.AdamW(**arguments), weight, gradients)
    np.testing.assert_array_equal(got, expected)


def test_changes_of_the_rate_reach_every_part(rng):
    weights, gradients = drawn(rng, (4, 6), (5,))
    updater = fastopt.Updater(Muon(lr=0.5, fallback="sgd"))
    updater([0, 1], gradients[0], weights)
    before = copy.deepcopy(weights)
    updater.optimizer.set_learning_rate(0.0)
    updater([0, 1], gradients[1], weights)
    np.testing.assert_equal(weights, before)
    updater.optimizer.learning_rate = 0.5
    updater.optimizer.set_lr_mult({0: 0.0, 1: 2.0})
    updater([0, 1], gradients[2], weights)
    np.testing.assert_array_equal(weights[0], before[0])
    np.testing.assert_allclose(weights[1], before[1] - gradients[2][1], rtol=1e-6)


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
    weight = rng.normal(size=(5, 3)).astype(F32)
    rows = rng.normal(size=(2, 3)).astype(F32), np.array([1, 3])
    made = Muon(fallback=fastopt.SGD(lr=0.1), fallback_for="embed", param_idx2name={0: "embed"})
    updater, got, expected = fastopt.Updater(made), weight.copy(), weight.copy()
    alone = fastopt.Updater(fastopt.SGD(lr=0.1))
    for _ in range(3):
        updater(0, rows, got)
        alone(0, rows, expected)
    np.testing.assert_array_equal(got, expected)
    np.testing.assert_array_equal(got[[0, 2, 4]], weight[[0, 2, 4]])
    updater = fastopt.Updater(Muon())
    with pytest.raises(
        TypeError, match="index 7: Muon takes dense gradients of matrices, got a row"
    ):
        updater(7, rows, weight)
    assert not updater.states


BAD = {
    "pattern": (
        {"fallback": "sgd", "fallback_for": "("},
        ValueError,
        "is not a regular expression",
    ),
    "no fallback": ({"fallback_for": "head"}, ValueError, "fallback_for needs a fallback"),
    "unknown": ({"fallback": "adamx"}, ValueError, "Cannot find optimizer 'adamx'"),
    "itself": ({"fallback": "muon"}, TypeError, "must be an optimizer with a rule, got Muon"),
    "sums": ({"fallback": "lbsgd"}, TypeError, "cannot be LBSGD, which adds up gradients"),
    "split": ({"split": {"qkv": 0}}, ValueError, r"split\['qkv'\] must be at least 1"),
    "sizes": ({"split": {"qkv": (2, "3")}}, TypeError, r"split\['qkv'\]\[1\] must be an integer"),
    "not a table": ({"split": 3}, TypeError, "split must map regular expressions to parts"),
    "masters": ({"master": "split"}, ValueError, "master must be 'float32'"),
    "coefficients": ({"coefficients": "cubic"}, ValueError, "must be one of"),
}


@pytest.mark.parametrize("name", BAD)
def test_wrong_arguments_are_refused(name):
    arguments, error, words = BAD[name]
    with pytest.raises(error, match=words):
        Muon(**arguments)


def test_parts_that_do_not_add_up_change_nothing(rng):
    weights, gradients = drawn(rng, (4, 6), (6, 4))
    updater = fastopt.Updater(Muon(lr=0.1))
    updater([0, 1], gradients[0], weights)
    updater.optimizer.split = {"1": 4}
    before = copy.deepcopy((weights, dict(updater.states)))
    with pytest.raises(ValueError, match=r"6 rows of shape \(6, 4\) cannot be split into 4"):
        updater([0, 1], gradients[1], weights)
    np.testing.assert_equal((weights, dict(updater.states)), before)


def test_memory_is_allocated_before_anything_changes(rng, monkeypatch):
    weight, (grad, *_) = single(rng)
    updater = fastopt.Updater(Muon())

    def full(*args):
        raise MemoryError

    monkeypatch.setattr(NewtonSchulz, "reserve", full)
    with pytest.raises(MemoryError):
        updater(0, grad, weight)
    assert not updater.optimizer._index_update_count


# Precision


def test_a_half_precision_copy_is_written_too(rng):
    weights, gradients = drawn(rng, (4, 6), (5,))
    updater, copies = fastopt.Updater(Muon(lr=0.1, fallback="sgd")), []
    for index, weight in enumerate(weights):
        copies.append(weight.astype(np.float16))
        updater.set_copy(index, copies[-1])
    for grads in gradients:
        updater([0, 1], [g.astype(np.float16) for g in grads], weights)
        np.testing.assert_equal(copies, [weight.astype(np.float16) for weight in weights])


@pytest.mark.slow("exhaustive")
def test_without_masters_there_is_a_warning_or_stochastic_rounding(rng):
    weight, gradients = single(rng, dtype=np.float16)
    with pytest.warns(UserWarning, match="float16 weights without masters"):
        trained(Muon(lr=0.1), weight, gradients)
    _, got = trained(Muon(lr=0.1, rounding="stochastic"), weight, gradients)
    *_, expected = stepped(weight, gradients, lr=0.1)
    np.testing.assert_allclose(got, expected, atol=0.02)


# Checkpoints


@pytest.mark.parametrize("way", WAYS)
def test_the_arguments_of_a_fallback_are_saved(way, rng, tmp_path):
    weights, gradients = drawn(rng, (4, 6), (5,))

    def make(**arguments):
        return fastopt.Updater(
            Muon(fallback=fastopt.AdamW(**arguments), fallback_for="1", split={"0": 2})
        )

    old, present = make(lr=0.25, beta1=0.5), make()
    object_before = present.optimizer.fallback
    old([0, 1], gradients[0], weights)
    new, others = resumed(way, old, present, tmp_path), copy.deepcopy(weights)
    assert (new.optimizer.fallback.lr, new.optimizer.fallback.beta1) == (0.25, 0.5)
    assert new.optimizer.split == (("0", 2),)
    if way in ("save", "dict"):
        assert new.optimizer.fallback is object_before
    for grads in gradients[1:]:
        old([0, 1], grads, weights)
        new([0, 1], grads, others)
    np.testing.assert_equal(weights, others)


def test_a_schedule_of_the_fallback_that_cannot_be_saved_is_the_present_one(rng, tmp_path):
    weights, gradients = drawn(rng, (4, 6), (5,))

    def make(rate):
        return fastopt.Updater(Muon(lr=0.1, fallback=fastopt.SGD(lr=lambda t: rate)))

    old, new = make(0.5), make(0.25)
    old([0, 1], gradients[0], weights)
    old.save(tmp_path / "state")
    with pytest.warns(UserWarning, match="schedule is not of a registered class"):
        new.load(tmp_path / "state")
    assert new.optimizer.fallback.learning_rate == 0.25
    assert new.optimizer.lr == 0.1


def test_a_state_of_the_wrong_shape_is_refused(rng):
    weight, (grad, *_) = single(rng)
    updater = fastopt.Updater(Muon())
    updater(0, grad, weight)
    updater.states[0] = np.zeros((6, 4), F32)
    with pytest.raises(ValueError, match=r"index 0: state 'mom' must have shape \(4, 6\)"):
        updater(0, grad, weight)
    assert updater.optimizer.num_update == 1


@pytest.mark.parametrize("adjust", ["original", *exhaustive("match_rms_adamw", None)])
@pytest.mark.parametrize("nesterov", [True, *exhaustive(False)])
def test_it_resumes_a_run_of_torch(adjust, nesterov, rng, monkeypatch):
    torch = pytest.importorskip("torch")
    monkeypatch.setattr(torch.Tensor, "bfloat16", torch.Tensor.clone)
    weight, gradients = single(rng)
    parameter = torch.nn.Parameter(torch.tensor(weight))
    options = {"lr": 0.1, "momentum": 0.7, "nesterov": nesterov, "adjust_lr_fn": adjust}
    theirs = torch.optim.Muon([parameter], weight_decay=0.2, eps=1e-6, **options)
    for grad in gradients[:2]:
        parameter.grad = torch.tensor(grad)
        theirs.step()
    updater, own = fastopt.Updater(Muon()), parameter.detach().numpy().copy()
    from_torch_state_dict(updater, theirs.state_dict())
    made = updater.optimizer
    assert (made.momentum, made.nesterov, made.eps, made.wd) == (0.7, nesterov, 1e-6, 0.2)
    assert (made.coefficients, made.steps) == ("quintic", 5)
    for grad in gradients[2:]:
        parameter.grad = torch.tensor(grad)
        theirs.step()
        updater(0, grad, own)
        np.testing.assert_allclose(own, parameter.detach().numpy(), rtol=1e-5, atol=1e-6)
    back = to_torch_state_dict(updater)
    (group,) = back["param_groups"]
    assert group["adjust_lr_fn"] == (adjust or "original")
    assert (group["momentum"], group["nesterov"], group["ns_steps"]) == (0.7, nesterov, 5)
    torch.optim.Muon([parameter], lr=0.1).load_state_dict(
        {**back, "state": {0: {"momentum_buffer": torch.tensor(updater.states[0])}}}
    )
    np.testing.assert_allclose(
        back["state"][0]["momentum_buffer"],
        theirs.state[parameter]["momentum_buffer"].numpy(),
        rtol=1e-5,
        atol=1e-7,
    )


def test_settings_that_torch_lacks_are_refused(rng):
    weight, gradients = single(rng)
    updater, _ = trained(Muon(), weight, gradients)
    with pytest.raises(ValueError, match=re.escape("Muon")):
        to_torch_state_dict(updater)
    group = {"lr": 0.1, "momentum": 0.9, "weight_decay": 0, "eps": 1e-7, "nesterov": True}
    group |= {"ns_coefficients": (2, -1.5, 0.5), "ns_steps": 5, "adjust_lr_fn": None, "params": [0]}
    with pytest.raises(CheckpointError, match=r"cannot have .*ns_coefficients"):
        from_torch_state_dict(updater, {"state": {}, "param_groups": [group]})


# Beside other features


@pytest.mark.slow("exhaustive")
def test_accumulated_gradients_give_the_step_of_their_mean(rng):
    weights, gradients = drawn(rng, (4, 6), (5,))
    summed = fastopt.Updater(Muon(lr=0.1, fallback="adamw"), accumulate=2)
    plain, others = fastopt.Updater(Muon(lr=0.1, fallback="adamw")), copy.deepcopy(weights)
    for first, second in (gradients[:2], gradients[2:]):
        summed([0, 1], first, weights)
        summed([0, 1], second, weights)
        plain([0, 1], [(a + b) / 2 for a, b in zip(first, second, strict=True)], others)
    for weight, other in zip(weights, others, strict=True):
        np.testing.assert_allclose(weight, other, rtol=1e-5, atol=1e-6)


def test_steps_of_many_vectors_are_counted():
    updater, indices = fastopt.Updater(Muon(lr=0.1, fallback="adamw")), list(range(40))
    weights = [np.zeros(3, F32) for _ in indices]
    for _ in range(3):
        for index in indices[:20]:
            updater(index, np.ones(3, F32), weights[index])
        updater(indices[20:], [np.ones(3, F32)] * 20, weights[20:])
    assert {*updater.optimizer._index_update_count.values()} == {3}
    assert np.ptp(weights) == 0


def test_its_weights_are_not_averaged():
    with pytest.raises(TypeError, match=r"Muon overrides update\(\)"):
        fastopt.Updater(Muon(), average=fastopt.EMA())


def test_it_shows_what_is_not_the_default(rng):
    assert repr(Muon()) == "Muon(learning_rate=0.001)"
    shown = repr(Muon(lr=0.1, steps=6, fallback=fastopt.AdamW(lr=0.2), fallback_for="head"))
    assert shown == (
        "Muon(learning_rate=0.1, steps=6, fallback=AdamW(learning_rate=0.2), "
        "fallback_for=('head',))"
    )


def test_direct_updates_and_copies_resume_identically(rng):
    weight, gradients = single(rng)
    updater, expected = trained(Muon(lr=0.1), weight, gradients[:2])
    made, own = Muon(lr=0.1), weight.copy()
    state = made.create_state(0, own)
    for grad in gradients[:2]:
        made.update(0, own, grad, state)
    np.testing.assert_array_equal(own, expected)
    for clone in (copy.deepcopy(made), made):
        result, mom = own.copy(), state.copy()
        for grad in gradients[2:]:
            clone.update(0, result, grad, mom)
        others = expected.copy()
        again = copy.deepcopy(updater)
        for grad in gradients[2:]:
            again(0, grad, others)
        np.testing.assert_array_equal(result, others)


@pytest.mark.slow("exhaustive")
def test_it_reads_digits_in_fewer_steps_than_adamw():
    images, digits = pytest.importorskip("sklearn.datasets").load_digits(return_X_y=True)
    images, losses = images.astype(F32) / F32(16), []
    adamw = fastopt.AdamW(lr=0.01, formula="torch", wd=0.0)
    for made in (Muon(lr=0.01, fallback=adamw, fallback_for="output"), copy.deepcopy(adamw)):
        rng = np.random.default_rng(0)
        model = Perceptron("float32", rng, (128, 128))
        trainer = fastopt.Trainer(model.params, made)
        batches = [rng.integers(0, len(digits), 32) for _ in range(150)]
        for _ in train(model, trainer.step, ((images[own], digits[own]) for own in batches)):
            pass
        losses.append(model.backward(images, digits))
    assert losses[0] < 0.8 * losses[1]
