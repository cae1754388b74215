"""Optimizers of one's own for matrices: what the base class does, and orthogonalization."""

import numpy as np
import pytest

import fastopt
from fastopt import optimizer
from helpers.matrix_rules import single, trained
from helpers.refusals import check_refused
from helpers.resuming import resumed


class Momentum(optimizer.MatrixOptimizer):
    """Heavy ball, with a bias correction."""

    def slots(self, shape):
        return {"mom": shape}

    def direction(self, t, grad, state):
        state["mom"] += 0.1 * (grad - state["mom"])
        return state["mom"] / (1 - 0.9**t)


def test_the_base_counts_rescales_clips_and_decays_at_the_rate_of_each_step(rng):
    weight, gradients = single(rng, (4, 3), dtype=np.float64)
    made = Momentum(lambda t: 0.2 / t, wd=0.2, rescale_grad=0.5, clip_gradient=0.4)
    made.set_lr_mult({0: 0.5})
    made.set_wd_mult({0: 3.0})
    _, after = trained(made, weight, gradients)
    mom = 0.0
    for t, grad in enumerate(gradients, 1):
        mom = 0.9 * mom + 0.1 * np.clip(0.5 * grad, -0.4, 0.4)
        weight = (1 - 0.1 / t * 0.6) * weight - 0.1 / t * mom / (1 - 0.9**t)
    np.testing.assert_allclose(after, weight, rtol=1e-12)


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


def test_slots_may_be_assigned(rng):
    class Swapped(optimizer.MatrixOptimizer):
        def slots(self, shape):
            return {"one": shape, "two": shape}

        def direction(self, t, grad, state):
            state["one"], state["two"] = state["two"], 0.9 * state["one"] + 0.1 * grad
            grad[...] = 0
            return state["one"]

    weight, gradients = single(rng, (4, 3), dtype=np.float64)
    updater, after = trained(Swapped(0.1), weight, gradients)
    one = two = 0.0
    for grad in gradients:
        one, two = two, 0.9 * one + 0.1 * grad
        weight = weight - 0.1 * one
    np.testing.assert_allclose(after, weight, rtol=1e-12)
    np.testing.assert_allclose(updater.states[0], (one, two), rtol=1e-12)


def test_a_direction_or_a_slot_that_does_not_fit_changes_no_weight_no_state_and_no_count():
    def assigned(**slots):
        return lambda grad, state: state.update(slots) or grad

    wrong = {
        r"return an array of shape \(2, 3\), got \(1, 3\)": lambda grad, state: grad[:1],
        r"return an array of shape \(2, 3\), got None": lambda grad, state: None,
        "return an array of real numbers, got complex128": lambda grad, state: grad * 1j,
        r"assign to 'mom' an array of shape \(2, 3\), got \(\)": assigned(mom=1.0),
        r"keep the slots \['mom'\], got \['mom', 'var'\]": assigned(var=np.ones((2, 3))),
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


WRONG = {
    "[1.0]": r"ValueError: matrix must have two or three dimensions, got shape \(1,\)",
    "[[1j]]": "TypeError: matrix must have real numbers, got complex128",
    "[['1']]": "TypeError: matrix must have real numbers, got <U1",
    "[[1.0]], 'cubic'": "ValueError: coefficients must be one of",
    "[[1.0]], 'polar', 0": "ValueError: steps must be at least 1",
}


@pytest.mark.parametrize("arguments", WRONG)
def test_orthogonalize_checks_its_arguments(arguments):
    check_refused(f"optimizer.orthogonalize({arguments})", WRONG[arguments], globals())


def test_coefficients_of_one_polynomial_are_those_of_its_name_and_are_saved(tmp_path):
    found, grad = [], np.arange(6, dtype=np.float32).reshape(3, 2)
    for coefficients in ("quintic", (3.4445, -4.7750, 2.0315)):
        updater, weight = trained(fastopt.Muon(lr=0.1, coefficients=coefficients), grad, [grad])
        updater = resumed("save", updater, fastopt.Updater("muon"), tmp_path)
        assert updater.optimizer.coefficients == coefficients
        found.append(weight)
    np.testing.assert_array_equal(*found)
