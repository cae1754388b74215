"""RMSProp whose second moment does not start at 0, as in TensorFlow 1."""

import numpy as np
import pytest

import fastopt
from fastopt.optimizer import RMSProp

FORMS = {
    "plain": {},
    "momentum": {"momentum": 0.9},
    "centered": {"centered": True},
    "of torch": {"formula": "torch", "gamma1": 0.9, "momentum": 0.9},
}
STATES = {
    "exact": {},
    "bfloat16": {"state_dtype": "bfloat16"},
    "8 bits": {"state_dtype": "int8", "state_min_size": 1},
}


def make(form, **options):
    return fastopt.Updater(RMSProp(0.01, initial_accumulator_value=1.0, **FORMS[form], **options))


@pytest.mark.parametrize("form", FORMS)
def test_the_first_step_starts_with_the_initial_second_moment(form):
    updater, weight = make(form, epsilon=0.001), np.zeros(2)
    grad = np.array([0.1, -3.0])
    updater(0, grad, weight)
    var = 0.9 + 0.1 * grad**2 - (0.01 * grad**2 if form == "centered" else 0)
    root = np.sqrt(var) + 0.001 if form == "of torch" else np.sqrt(var + 0.001)
    np.testing.assert_allclose(weight, -0.01 * grad / root, rtol=1e-12)


@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize("form", ["momentum", "centered"])
def test_the_second_moment_alone_starts_above_zero_in_any_precision(form, state):
    if state == "bfloat16":
        pytest.importorskip("ml_dtypes")
    if (form, state) == ("centered", "8 bits"):
        with pytest.raises(ValueError, match="8 bits would freeze sums"):
            make(form, **STATES[state])(0, np.zeros((2, 3)), np.zeros((2, 3)))
        return
    updater = make(form, **STATES[state])
    updater(0, np.zeros((2, 3)), np.zeros((2, 3)))
    first, *others = updater.state_as(0)
    np.testing.assert_allclose(first, 0.9, rtol=0.01)
    assert not any(array.any() for array in others)
