"""NorMuon and AdaMuon: the authors' steps, the papers' formulas, and what updaters promise."""

import json
import math

import numpy as np
import pytest

from fastopt.optimizer import AdaMuon, NorMuon
from helpers.matrix_rules import check_recorded, single, trained
from helpers.paths import GOLDEN

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
