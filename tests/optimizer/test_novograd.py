"""Numbers that a rule keeps once for each tensor: NovoGrad's second moment."""

import math

import numpy as np
import pytest

import fastopt
from fastopt.checkpoint import CheckpointError
from fastopt.optimizer import NovoGrad
from helpers.matrix_rules import drawn, trained

F32 = np.float32


@pytest.mark.slow
@pytest.mark.parametrize("shape", [(1,), (4, 3)])
def test_a_state_with_another_shape_is_refused(shape, rng):
    (weight,), ((grad,), *_) = drawn(rng, (4, 3))
    updater, got = trained(NovoGrad(), weight, [grad])
    good = updater.states[0]
    updater.states[0] = good[0], np.zeros(shape, F32)
    with pytest.raises(ValueError, match=r"state 'var' must have shape \(\), got"):
        updater(0, grad, got)
    saved = updater.state_dict()
    with pytest.raises(CheckpointError, match="must have one number for the tensor"):
        fastopt.Updater(NovoGrad()).load_state_dict(saved)
    with pytest.raises(ValueError, match=r"needs 2 state arrays \('mom', 'var'\), got 1"):
        NovoGrad().update(0, got, grad, good[:1])


@pytest.mark.slow("exhaustive")
@pytest.mark.parametrize("lazy", [False, True])
def test_the_norm_of_indexed_rows_is_that_of_the_whole_gradient(lazy, rng):
    (weight,), _ = drawn(rng, (6, 3), dtype=np.float64)
    rows = [np.array(own) for own in ([1, 4], [4, 0, 4], [2])]
    values = [rng.normal(size=(len(own), 3)) for own in rows]
    updater, got = fastopt.Updater(NovoGrad(lr=0.1, wd=0.2, lazy_update=lazy)), weight.copy()
    dense = []
    for own, value in zip(rows, values, strict=True):
        updater(0, (value, own), got)
        dense.append(np.zeros_like(weight))
        np.add.at(dense[-1], own, value)
    expected, var, mom = weight.copy(), None, np.zeros_like(weight)
    for own, grad in zip(rows, dense, strict=True):
        square = np.sum(grad**2)
        var = square if var is None else 0.98 * var + 0.02 * square
        new = 0.95 * mom + grad / (math.sqrt(var) + 1e-8) + 0.2 * expected
        touched = np.isin(np.arange(6), own)[:, np.newaxis] if lazy else np.True_
        mom = np.where(touched, new, mom)
        expected = np.where(touched, expected - 0.1 * mom, expected)
    np.testing.assert_allclose(got, expected, rtol=1e-11)
    np.testing.assert_allclose(updater.states[0][1], var, rtol=1e-12)
