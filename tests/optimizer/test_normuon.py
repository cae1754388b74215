"""NorMuon and AdaMuon: the authors' steps, the papers' formulas, and what updaters promise."""

import json
import math

import numpy as np
import pytest

import fastopt
from fastopt.optimizer import AdaMuon, NorMuon
from helpers.matrix_rules import check_lists, check_recorded, drawn, single, trained
from helpers.paths import GOLDEN
from helpers.resuming import WAYS, resumed

CASES = json.loads((GOLDEN / "normuon.json").read_text())["cases"]
KINDS = {"normuon": NorMuon, "adamuon": AdaMuon}
every_kind = pytest.mark.parametrize("kind", KINDS.values(), ids=[*KINDS])
F32, F64 = np.float32, np.float64


@pytest.mark.parametrize("case", CASES, ids=["wide", "tall"])
@pytest.mark.parametrize("dtype", [F32, F64])
def test_each_step_is_that_of_the_authors(case, dtype):
    made = NorMuon(**case["arguments"], adjust="original", coefficients="quintic")
    check_recorded(made, case["data"], case["weights"], dtype, 3e-5 if dtype is F32 else 2e-6)


def orthogonal(matrix):
    left, values, right = np.linalg.svd(matrix, full_matrices=False)
    values = values / np.linalg.norm(values)
    for _ in range(5):
        values = 3.4445 * values - 4.7750 * values**3 + 2.0315 * values**5
    return left * values @ right


def stepped(kind, weight, gradients, lr, wd, mu=0.9, beta2=0.8):
    """arXiv:2510.05491, algorithm 1, and arXiv:2507.11005, algorithm 1, in float64."""
    mom = var = 0.0
    for grad in gradients:
        mom = mu * mom + (1 - mu) * grad
        ahead = (1 - mu) * grad + mu * mom
        o = orthogonal(ahead if kind is NorMuon else np.sign(ahead))
        square = np.mean(o**2, axis=1, keepdims=True) if kind is NorMuon else o**2
        var = beta2 * var + (1 - beta2) * square
        o = o / (np.sqrt(var) + 1e-10)
        scale = 0.2 * math.sqrt(o.size) / np.linalg.norm(o)
        weight = (1 - lr * wd) * weight - lr * scale * o
        yield weight


@every_kind
@pytest.mark.parametrize("shape", [(4, 6), (9, 2)], ids=str)
def test_each_step_is_that_of_the_paper(kind, shape, rng):
    weight, gradients = single(rng, shape, steps=6, dtype=F64)
    made = kind(0.1, 0.9, 0.8, wd=0.2, coefficients="quintic")
    expected = np.array(list(stepped(kind, weight, gradients, 0.1, 0.2)))
    check_recorded(made, (weight, gradients), expected, F64, 1e-10)


@every_kind
def test_lists_and_single_calls_agree_with_parts_layouts_and_a_fallback(kind, rng):
    names = {0: "qkv", 1: "conv", 2: "bias", 3: "fortran"}
    weights, gradients = drawn(rng, (6, 4), (3, 2, 2, 2), (5,), (4, 7))
    weights[3] = np.asfortranarray(weights[3])

    def make():
        return kind(0.1, fallback="adamw", split={"qkv": 3}, param_idx2name=names)

    updater = check_lists(make, [0, 1, 2, 3], weights, gradients)
    columns = 1 if kind is NorMuon else 8
    assert updater.states[1][1].shape == (3, columns)
    assert all(np.abs(updater.states[index][1]).min() > 0 for index in (0, 1, 3))


@every_kind
def test_parts_are_updated_as_matrices_of_their_own(kind, rng):
    weight, gradients = single(rng, (6, 4))
    made = kind(0.1, split={"qkv": (2, 4)}, param_idx2name={0: "qkv"})
    _, whole = trained(made, weight, gradients)
    for rows in (slice(0, 2), slice(2, 6)):
        _, part = trained(kind(0.1), weight[rows], [grad[rows] for grad in gradients])
        np.testing.assert_array_equal(whole[rows], part)


@every_kind
def test_conv_weights_in_any_order_are_matrices(kind, rng):
    weight, gradients = single(rng, (3, 2, 2, 2))
    _, expected = trained(kind(0.1), weight.reshape(3, 8), [g.reshape(3, 8) for g in gradients])
    for order in "CF":
        _, found = trained(kind(0.1), np.array(weight, order=order), gradients)
        np.testing.assert_array_equal(found.reshape(3, 8), expected)


@pytest.mark.parametrize("way", WAYS)
@every_kind
def test_a_resumed_run_has_the_same_bits(kind, way, rng, tmp_path):
    weight, gradients = single(rng, (4, 6), steps=6)
    updater, half = trained(kind(0.1, wd=0.1), weight, gradients[:3])
    again = resumed(way, updater, fastopt.Updater(kind(0.1, wd=0.1)), tmp_path)
    for each, after in ((updater, half), (again, half.copy())):
        for grad in gradients[3:]:
            each(0, grad, after)
        if each is updater:
            expected = after.copy()
    np.testing.assert_array_equal(after, expected)


def test_the_rows_of_steps_have_equal_size(rng):
    """Those of Muon do not, of a matrix with more rows than columns."""
    weight, gradients = single(rng, (30, 4), steps=1, dtype=F64)
    _, after = trained(NorMuon(1.0), weight, gradients)
    rows = np.linalg.norm(after - weight, axis=1)
    np.testing.assert_allclose(rows, 0.2 * math.sqrt(4), rtol=1e-4)


@every_kind
def test_state_is_not_rounded(kind):
    with pytest.raises(ValueError, match="computes with its state in NumPy"):
        kind(state_dtype="bfloat16")
