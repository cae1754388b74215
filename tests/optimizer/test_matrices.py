"""What every optimizer of matrices promises, also one of the user, and orthogonalization."""

from functools import partial

import numpy as np
import pytest

import fastopt
from fastopt import optimizer
from fastopt._engine.eigenbases import eigenbasis, inverse_root, iterated
from helpers.cases import OF_MATRICES, exhaustive
from helpers.matrix_rules import F32, FORMS, drawn, single, trained
from helpers.plans import LAYOUTS
from helpers.refusals import check_refused
from helpers.resuming import resumed
from helpers.tensor_lists import everything

VECTORS = "adafactor", "adammini", "came", "kron", "scion", "sm3"
"""Optimizers that update vectors too."""
LOCAL = "apollo", "galore", "sm3", "sm3 without momentum", "adammini"
"""Forms in which a NaN stays in rows or columns."""
every_form = pytest.mark.parametrize("form", FORMS)


def test_every_optimizer_of_matrices_is_in_the_table():
    assert {name.split()[0] for name in FORMS} == {*OF_MATRICES}


@pytest.mark.parametrize("form", ["muon", "normuon", "adamuon", "galore", "apollo"])
def test_a_weight_of_a_convolution_is_a_matrix_of_its_first_axis_by_the_others(form, rng):
    weight, gradients = single(rng, (4, 3, 2, 2))
    make = partial(FORMS[form], lr=0.1)
    _, flat = trained(make(), weight.reshape(4, 12), [g.reshape(4, 12) for g in gradients])
    _, got = trained(make(), weight, gradients)
    np.testing.assert_array_equal(got.reshape(4, 12), flat)


@pytest.mark.parametrize("layout", ["Fortran order", "strided", *exhaustive("reversed")])
@pytest.mark.parametrize("shape", [(4, 6), (3, 2, 2)], ids=str)
@every_form
def test_any_layout_gives_the_same_weights(form, shape, layout, rng):
    weight, gradients = single(rng, shape)
    laid, make = LAYOUTS[layout], partial(FORMS[form], lr=0.1)
    updater, got = fastopt.Updater(make()), laid(weight)
    for grad in gradients:
        updater(0, laid(grad), got)
    _, expected = trained(make(), weight, gradients)
    if form.startswith("sm3"):
        np.testing.assert_array_equal(got, expected)
    else:
        np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("shape", [(0, 3), (3, 0), (1, 1), (3, 2), (2, 0, 3), (4,), ()], ids=str)
@every_form
def test_empty_weights_and_zero_gradients_are_updated_without_a_warning(form, shape):
    updater, weight = fastopt.Updater(FORMS[form](lr=0.1, fallback="adamw")), np.ones(shape, F32)
    for size in (0, 0, 1, 1):
        updater(0, np.full(shape, size, F32), weight)
        assert np.isfinite(weight).all()
        if not size:
            np.testing.assert_array_equal(weight, 1)
    assert updater.optimizer.num_update == 4


@pytest.mark.parametrize("step", [0, 2])
@every_form
def test_a_gradient_that_is_not_finite_spoils_its_weight_alone_without_a_warning(form, step, rng):
    weights, gradients = drawn(rng, (4, 6), (3, 2), steps=5)
    gradients[step][0][1, 2] = np.nan
    updater = fastopt.Updater(FORMS[form](lr=0.1))
    for grads in gradients:
        updater([0, 1], grads, weights)
    assert np.isnan(weights[0]).all() or (form in LOCAL and np.isnan(weights[0][1, 2]))
    assert np.isfinite(weights[1]).all()


@pytest.mark.parametrize("bad", ["vector", "rows"])
@pytest.mark.parametrize("name", OF_MATRICES)
def test_what_it_cannot_update_is_refused(name, bad):
    if bad == "vector" and name in VECTORS:
        return
    updater, weight = fastopt.Updater(name), np.ones((3, 2) if bad == "rows" else 3, F32)
    grad, words = (weight[:1].copy(), np.array([1])), "takes dense gradients"
    if bad == "vector":
        grad = weight.copy()
        words = "index 0: .* updates weights of two or more dimensions, got .*; pass fallback="
    with pytest.raises((TypeError, ValueError), match=words):
        updater(0, grad, weight)
    np.testing.assert_array_equal(weight, 1)
    assert updater.optimizer.num_update == 0


BAD = [
    ("soap", {"shampoo_beta": 1.0}, ValueError, "shampoo_beta must be"),
    ("soap", {"precondition_frequency": 0}, ValueError, "must be at least 1"),
    ("shampoo", {"root_epsilon": 0.0}, ValueError, "root_epsilon must be"),
    ("shampoo", {"start_step": 0}, ValueError, "start_step must be"),
    ("adafactor", {"decay_rate": -1}, ValueError, "decay_rate must be a finite number, at least"),
    ("adafactor", {"clip_threshold": 0}, ValueError, "clip_threshold must be a finite number"),
    ("adafactor", {"eps1": "small"}, TypeError, "eps1 must be a number"),
    ("sm3", {"momentum": 1}, ValueError, "momentum must be a finite number, at least 0"),
    ("came", {"beta3": 1}, ValueError, "beta3 must be a finite number"),
    ("galore", {"rank": 0}, ValueError, "rank must be at least 1"),
    ("apollo", {"scale_by": "row"}, ValueError, "scale_by must be"),
    ("adammini", {"heads": {"q": 0}}, ValueError, r"heads\['q'\] must be"),
    ("adammini", {"heads": ["q"]}, TypeError, "heads must map regular expressions"),
    ("adammini", {"heads": {"(": 2}}, ValueError, "is not a regular expression"),
    ("scion", {"norms": {"q": "sign"}}, TypeError, "such as {'head': "),
    ("scion", {"norms": {"q": ("L1", 1)}}, ValueError, r"norms\['q'\] must be"),
    ("scion", {"adjust": "none"}, ValueError, "adjust must be"),
    ("muon", {"fallback": "sgd", "fallback_for": "("}, ValueError, "is not a regular expression"),
    ("muon", {"fallback": "adamx"}, ValueError, "Cannot find optimizer 'adamx'"),
    ("muon", {"fallback": "muon"}, TypeError, "must be an optimizer with a rule, got Muon"),
    ("muon", {"fallback": "lbsgd"}, TypeError, "cannot be LBSGD, which adds up gradients"),
    ("muon", {"split": {"qkv": 0}}, ValueError, r"split\['qkv'\] must be at least 1"),
    ("muon", {"split": {"q": (2, "3")}}, TypeError, r"split\['q'\]\[1\] must be an integer"),
    ("muon", {"split": 3}, TypeError, "split must map regular expressions to parts"),
    ("muon", {"coefficients": (1, 2)}, ValueError, "coefficients must be 3 numbers"),
    ("muon", {"maximize": True, "fallback": optimizer.AdamW()}, ValueError, "that of the fallback"),
    *((name, {"fallback_for": "x"}, ValueError, "needs a fallback") for name in OF_MATRICES),
    *((name, {"master": "split"}, ValueError, "'split'|'float32'") for name in OF_MATRICES),
    *((name, {"state_dtype": "int8"}, ValueError, "state_dtype") for name in OF_MATRICES),
]


@pytest.mark.parametrize(("name", "arguments", "error", "words"), BAD)
def test_wrong_arguments_are_refused(name, arguments, error, words):
    with pytest.raises(error, match=words):
        optimizer.create(name, **arguments)


def only(dtype, function, asked):
    """A function of ``np.linalg`` that fails for all dtypes but one."""
    compute = getattr(np.linalg, function)

    def decompose(matrix):
        asked.append(matrix.dtype.name)
        if matrix.dtype.name != dtype:
            raise np.linalg.LinAlgError("did not converge")
        return compute(matrix)

    return decompose


@pytest.mark.parametrize(("name", "function"), [("soap", "qr"), ("shampoo", "eigh")])
def test_a_decomposition_that_fails_changes_nothing(name, function, rng, monkeypatch):
    weight, gradients = single(rng)
    make = partial(optimizer.create, name, lr=0.1, precondition_frequency=1)
    updater, got = trained(make(), weight, gradients[:2])
    before = everything(updater, got)
    with monkeypatch.context() as patch:
        patch.setattr(np.linalg, function, only(None, function, []))
        with pytest.raises(np.linalg.LinAlgError):
            updater(0, gradients[2], got)
    assert everything(updater, got) == before
    updater(0, gradients[2], got)
    np.testing.assert_array_equal(got, trained(make(), weight, gradients[:3])[1])


@pytest.mark.parametrize(
    ("compute", "function"),
    [
        (lambda: inverse_root(np.diag(np.array([16, 1], F32)), 4, 1e-12), "eigh"),
        (lambda: eigenbasis(np.diag(np.array([1, 3, 2], F32))), "eigh"),
        (lambda: iterated(np.diag(np.array([3, 2, 1], F32)), np.eye(3, dtype=F32))[0], "qr"),
    ],
    ids=["root", "basis", "iteration"],
)
def test_what_fails_in_float32_is_computed_in_float64(compute, function, monkeypatch):
    expected, asked = compute(), []
    monkeypatch.setattr(np.linalg, function, only("float64", function, asked))
    found = compute()
    assert asked == ["float32", "float64"]
    assert found.dtype == F32 or function == "qr"
    np.testing.assert_allclose(np.abs(found), np.abs(expected), atol=1e-6)


class Momentum(optimizer.MatrixOptimizer):
    """Heavy ball with a bias correction, which assigns slots and overwrites the gradient."""

    def slots(self, shape):
        return {"mom": shape, "old": shape}

    def direction(self, t, grad, state):
        state["mom"], state["old"] = 0.9 * state["mom"] + 0.1 * grad, state["mom"]
        grad[...] = state["mom"] / (1 - 0.9**t)
        return grad


def test_the_base_counts_rescales_clips_and_decays_at_the_rate_of_each_step(rng):
    weight, gradients = single(rng, (4, 3), dtype=np.float64)
    arguments = {"wd": 0.2, "rescale_grad": 0.5, "clip_gradient": 0.4, "begin_num_update": 50}
    made = Momentum(lambda t: 0.2 / (t - 50), **arguments)
    made.set_lr_mult({0: 0.5})
    made.set_wd_mult({0: 3.0})
    updater, after = trained(made, weight, gradients)
    mom = 0.0
    for t, grad in enumerate(gradients, 1):
        old, mom = mom, 0.9 * mom + 0.1 * np.clip(0.5 * grad, -0.4, 0.4)
        weight = (1 - 0.1 / t * 0.6) * weight - 0.1 / t * mom / (1 - 0.9**t)
    np.testing.assert_allclose(after, weight, rtol=1e-12)
    np.testing.assert_allclose(updater.states[0], (mom, old), rtol=1e-12)


def test_without_slots_there_is_no_state():
    class Descent(optimizer.MatrixOptimizer):
        def direction(self, t, grad, state):
            assert not state
            return grad

    updater, weight = trained(Descent(0.5), np.ones((2, 2)), [np.ones((2, 2))])
    np.testing.assert_array_equal(weight, np.full((2, 2), 0.5))
    assert updater.states[0] is None


@pytest.mark.parametrize("wrong", [["mom"], {"mom": 3}, None], ids=str)
def test_slots_that_are_no_shapes_by_name_are_refused(wrong):
    class Wrong(Momentum):
        def slots(self, shape):
            return wrong

    with pytest.raises(TypeError, match=r"Wrong.slots\(\) must return a dict .* such as {'mom'"):
        trained(Wrong(0.1), np.ones((2, 2)), [np.ones((2, 2))])


def test_a_direction_or_a_slot_that_does_not_fit_changes_no_weight_no_state_and_no_count():
    def assigned(**slots):
        return lambda grad, state: state.update(slots) or grad

    wrong = {
        r"return an array of shape \(2, 3\), got \(1, 3\)": lambda grad, state: grad[:1],
        r"return an array of shape \(2, 3\), got None": lambda grad, state: None,
        "return an array of real numbers, got complex128": lambda grad, state: grad * 1j,
        r"assign to 'mom' an array of shape \(2, 3\), got \(\)": assigned(mom=1.0),
        r"keep the slots \['mom', 'old'\], got \['mom', 'old', 'var'\]": assigned(
            var=np.ones((2, 3))
        ),
    }
    for expected, compute in wrong.items():

        class Wrong(Momentum):
            def direction(self, t, grad, state, compute=compute):
                return compute(grad, state)

        updater, weight = fastopt.Updater(Wrong()), np.ones((2, 3))
        with pytest.raises((TypeError, ValueError), match=rf"Wrong.direction\(\) must {expected}"):
            updater(0, np.ones((2, 3)), weight)
        assert weight.min() == 1
        assert all(not np.any(state) for state in updater.states.values())
        assert updater.optimizer.num_update == 0


def test_a_class_without_a_direction_says_so():
    with pytest.raises(NotImplementedError, match="needs a method direction"):
        trained(optimizer.MatrixOptimizer(), np.ones((2, 3)), [np.ones((2, 3))])


def test_orthogonalize_returns_the_nearest_matrix_with_orthonormal_rows_or_columns(rng):
    for shape in ((5, 12), (12, 5), (3, 4, 9)):
        matrix = rng.normal(size=shape)
        kept = matrix.copy()
        left, _, right = np.linalg.svd(matrix, full_matrices=False)
        np.testing.assert_allclose(optimizer.orthogonalize(matrix), left @ right, atol=0.02)
        np.testing.assert_array_equal(matrix, kept)
    assert optimizer.orthogonalize([[2, 0], [0, 1]]).dtype == np.float32
    assert optimizer.orthogonalize(np.ones((0, 3))).shape == (0, 3)


OF_ORTHOGONALIZE = {
    "[1.0]": r"ValueError: matrix must have two or three dimensions, got shape \(1,\)",
    "[[1j]]": "TypeError: matrix must have real numbers, got complex128",
    "[['1']]": "TypeError: matrix must have real numbers, got <U1",
    "[[1.0]], 'cubic'": "ValueError: coefficients must be one of",
    "[[1.0]], 'polar', 0": "ValueError: steps must be at least 1",
}


@pytest.mark.parametrize("arguments", OF_ORTHOGONALIZE)
def test_orthogonalize_checks_its_arguments(arguments):
    check_refused(f"optimizer.orthogonalize({arguments})", OF_ORTHOGONALIZE[arguments], globals())


def test_coefficients_of_one_polynomial_are_those_of_its_name_and_are_saved(tmp_path):
    found, grad = [], np.arange(6, dtype=np.float32).reshape(3, 2)
    for coefficients in ("quintic", (3.4445, -4.7750, 2.0315)):
        updater, weight = trained(fastopt.Muon(lr=0.1, coefficients=coefficients), grad, [grad])
        updater = resumed("save", updater, fastopt.Updater("muon"), tmp_path)
        assert updater.optimizer.coefficients == coefficients
        found.append(weight)
    np.testing.assert_array_equal(*found)
