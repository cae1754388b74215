"""Optimizers of matrices: steps of other packages and of authors' code, and papers' formulas."""

import json
import math

import numpy as np
import pytest

from fastopt import optimizer
from fastopt.optimizer.kron import balanced
from helpers.matrix_rules import check_recorded, drawn, single, trained
from helpers.paths import GOLDEN

F32, F64 = np.float32, np.float64


def named(case):
    return "x".join(map(str, case["shape"])) or "number"


FILES = {name: json.loads((GOLDEN / f"{name}.json").read_text()) for name in (
    "matrices", "soap", "shampoo", "normuon", "packages",
)}  # fmt: skip
LISTS = {"muon": "matrices", "adafactor": "matrices", "sm3": "matrices"}
LISTS |= {name: name for name in ("soap", "shampoo", "normuon", "packages")}
"""Files by the name of the optimizer."""
CASES = [
    {"name": name, **case, "data": case.get("data") or FILES[file]["data"][named(case)]}
    for name, file in LISTS.items()
    for case in FILES[file][name if name in ("adafactor", "sm3") else "cases"]
]
MORE = {"scion": {"coefficients": "quintic"}}
MORE["normuon"] = {"adjust": "original", "coefficients": "quintic"}
EXACT = dict.fromkeys(("muon", "sm3", "soap", "shampoo"), 1e-11) | {"normuon": 2e-6}
"""Relative errors in float64; that of the other packages, some in float32, is 1e-8."""


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case['name']}-{named(case)}")
@pytest.mark.parametrize("dtype", [F32, pytest.param(F64, marks=pytest.mark.slow)])
def test_each_step_is_that_of_the_package(case, dtype):
    name = case["name"]
    made = optimizer.create(name, **MORE.get(name, {}), **case["arguments"])
    if case.get("drawn"):
        drawn = iter(np.array(case["drawn"], dtype))
        vars(made)["noise" if name == "kron" else "basis"] = lambda *_: next(drawn)
    rtol = 3e-5 if dtype is F32 else EXACT.get(name, 1e-8)
    check_recorded(made, case["data"], case["weights"], dtype, rtol)


def adamuon(weight, gradients, lr, wd):
    """arXiv:2507.11005, algorithm 1, with a bias of the momentum and the quintic polynomial."""
    mom = var = 0.0
    for grad in gradients:
        mom = 0.95 * mom + 0.05 * grad
        sign = np.sign(0.05 * grad + 0.95 * mom).reshape(len(weight), -1)
        o = optimizer.orthogonalize(sign, "quintic")
        var = 0.95 * var + 0.05 * o**2
        o = o / (np.sqrt(var) + 1e-10)
        step = 0.2 * math.sqrt(o.size) / np.linalg.norm(o) * o.reshape(weight.shape)
        weight = (1 - lr * wd) * weight - lr * step
        yield weight


@pytest.mark.slow
@pytest.mark.parametrize("shape", [(4, 6), (9, 2), (3, 4, 2)], ids=str)
def test_each_step_of_adamuon_is_that_of_the_paper(shape, rng):
    """Weights are decayed."""
    weight, gradients = single(rng, shape, steps=6, dtype=F64)
    expected = np.array(list(adamuon(weight, gradients, 0.05, 0.2)))
    made = optimizer.AdaMuon(lr=0.05, wd=0.2, coefficients="quintic")
    check_recorded(made, (weight, gradients), expected, F64, 1e-10)


def test_projections_are_leading_singular_vectors_or_drawn_by_seed_and_step(rng):
    """Vectors point where those before them did."""
    matrix, before = rng.normal(size=(6, 4)), np.zeros((4, 2))
    found = optimizer.GaLore(rank=2).basis(matrix, before, 1)
    leading = np.linalg.svd(matrix)[2][:2]
    np.testing.assert_allclose(np.abs(leading @ found), np.eye(2), atol=1e-12)
    np.testing.assert_array_equal(optimizer.GaLore().basis(matrix, -found, 2), -found)
    drawn = np.random.Generator(np.random.Philox(key=[5, 3])).standard_normal((4, 2))
    made = optimizer.APOLLO(rank=2, seed=5)
    np.testing.assert_array_equal(made.basis(matrix, before, 3), drawn / math.sqrt(2))
    updater, _ = trained(optimizer.APOLLO(rank=5), matrix, [matrix])
    assert [array.shape for array in updater.states[0][:3]] == [(6, 4), (6, 4), (4, 4)]


def test_factors_are_balanced_with_the_same_product(rng):
    factors = [rng.normal(size=(3, 3)), 100 * rng.normal(size=4)]
    found = balanced(factors)
    np.testing.assert_allclose(*[np.abs(factor).max() for factor in found])
    np.testing.assert_allclose(*[np.multiply.outer(*each) for each in (found, factors)])


@pytest.mark.parametrize("case", FILES["soap"]["goes_on"], ids=named)
def test_soap_resumes_from_the_state_of_the_authors_code(case):
    updater = optimizer.get_updater(optimizer.SOAP(**case["arguments"]))
    weight = np.array(case["weights"][3])
    updater.states[0] = tuple(np.array(array, F64) for array in case["state"])
    gradients = FILES["soap"]["data"][named(case)][1]
    for grad, expected in zip(gradients[4:], case["weights"][4:], strict=True):
        updater(0, np.array(grad), weight)
        np.testing.assert_allclose(weight, expected, 1e-11, 1e-11 * np.abs(expected).max())


@pytest.mark.parametrize("name", ["sm3", "adafactor"])
def test_the_state_has_one_number_for_each_row_and_column(name, rng):
    """And momentum has all of them."""
    weights, (grads, *_) = drawn(rng, (4, 6), (2, 3, 5), (7,), ())
    updater = optimizer.get_updater(optimizer.create(name, momentum=0) if name == "sm3" else name)
    updater([0, 1, 2, 3], grads, weights)
    shapes = [[array.shape for array in updater.states[k]] for k in (0, 1)]
    assert shapes == [[(4,), (6,)], [(2,), (3,), (5,)] if name == "sm3" else [(2, 3), (2, 5)]]
    assert [updater.states[k].shape for k in (2, 3)] == [(7,), ()]


STATES = {
    "muon": (lambda state: state.T, r"state 'mom' must have shape \(4, 6\)"),
    "sm3": (lambda state: state[::-1], r"state 'axis 0' must have shape \(4,\), got \(4, 6\)"),
    "soap": (lambda state: state[:5], r"SOAP needs 7 state arrays \('mean', .*\), got 5"),
    "shampoo": (lambda state: (*state[:2], *state[:1:-1]), r"state 'factor 0' must have shape"),
}


@pytest.mark.parametrize("name", STATES)
def test_a_state_that_does_not_fit_is_refused(name, rng):
    weight, gradients = single(rng)
    updater, got = trained(optimizer.create(name), weight, gradients[:2])
    spoil, words = STATES[name]
    updater.states[0], before = spoil(updater.states[0]), got.copy()
    with pytest.raises(ValueError, match=f"index 0: {words}"):
        updater(0, gradients[2], got)
    np.testing.assert_array_equal(got, before)
    assert updater.optimizer.num_update == 2


@pytest.mark.parametrize("name", ["q_proj", "mlp"])
def test_the_rows_of_a_head_share_a_second_moment(name, rng):
    weight, (grad, *_) = single(rng, (6, 4), dtype=F64)
    made = optimizer.AdamMini(heads={"q_proj": 2}, param_idx2name={0: name, 1: "q_proj"})
    updater = optimizer.get_updater(made)
    updater(0, grad, weight)
    blocks = grad.reshape((2, 12) if name == "q_proj" else (6, 4))
    squares = np.repeat(np.mean(blocks**2, axis=1), 6 // len(blocks))
    np.testing.assert_allclose(updater.states[0][1].ravel(), 0.001 * squares, rtol=1e-12)


def test_a_constrained_step_stays_in_the_ball(rng):
    """Whatever the gradients are, as a convex combination of the weight and a point of it."""
    weight, gradients = single(rng, (5, 4), steps=40, dtype=F64)
    made = optimizer.Scion(0.3, radius=2.0, wd=1, norms={"": ("sign", 2.0)})
    updater = optimizer.get_updater(made)
    for grad in gradients:
        updater(0, grad, weight)
    assert np.abs(weight).max() <= 2.0 / 4 * (1 + 1e-6)


def test_preconditioners_are_updated_at_the_rate_of_the_step():
    made = optimizer.Kron()
    assert [made.probability(t) for t in (1, 501)] == [1.0, 1.0]
    assert made.probability(2501) == pytest.approx(math.exp(-2))
    assert made.probability(10**5) == 0.03
    made = optimizer.Kron(precondition_probability=0.4)
    updater, weight, counts = optimizer.get_updater(made), np.ones((2, 3)), []
    for _ in range(302):
        updater(0, np.ones((2, 3)), weight)
        counts.append(int(updater.states[0][1][1]))
    assert counts[:7] == [0, 0, 1, 1, 1, 2, 2]
    assert counts[-1] == 100


@pytest.mark.parametrize(
    ("diagonal", "whole"),
    [(None, "11 11"), ("one_diag", "10 10"), ("smart_one_diag", "10 11"), ("all_diag", "00 00")],
)
def test_diagonal_factors(diagonal, whole):
    made = optimizer.Kron(diagonal=diagonal, max_precond_dim=5)
    found = {shape: made.triangular(shape) for shape in ((3, 4), (4, 4), (2, 1), (2, 6), (3,))}
    assert [found[3, 4], found[4, 4]] == [[*map(int, each)] for each in whole.split()]
    assert found[2, 1][1] == found[2, 6][1] == found[3,][0] == 0


UNFIT = {
    "0: 6 rows .* among 4 heads": (optimizer.AdamMini(heads={".": 4}), (6, 2)),
    "'sign' needs weights of two or more": (optimizer.Scion(norms={".": ("sign", 1)}), (3,)),
    "0: 3 rows of shape .* cannot be split": (optimizer.Scion(split={".": (2, 2)}), (3, 2)),
    r"6 rows of shape \(6, 2\) cannot be split into 4": (optimizer.Muon(split={".": 4}), (6, 2)),
}


@pytest.mark.parametrize("words", UNFIT)
def test_weights_that_do_not_fit_are_refused(words):
    made, shape = UNFIT[words]
    updater, weight = optimizer.get_updater(made), np.ones(shape)
    with pytest.raises(ValueError, match=words):
        updater(0, np.ones(shape), weight)
    np.testing.assert_array_equal(weight, 1)
    assert updater.optimizer.num_update == 0
