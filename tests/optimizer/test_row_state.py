"""Rules whose state is of elements, of rows (``fastopt.rule(row_state=...)``) or of a tensor."""

import numpy as np
import pytest

import fastopt
from fastopt._engine.validate import leaves
from fastopt.checkpoint import CheckpointError
from fastopt.kernels.rule import rule
from fastopt.optimizer import NovoGrad
from fastopt.sparse import RowSparse
from helpers.cases import exhaustive, slow
from helpers.matrix_rules import single, trained
from helpers.users import RowAdam, row_adam, row_adam_formula

SHAPE = (7, 37)
RNG = np.random.default_rng(0)
START = RNG.normal(size=SHAPE)
DENSE = list(RNG.normal(size=(3, *SHAPE)))
ROWS = [[3, 6, 0], [6, 2, 6, 3, 6], [], [5]]
"""Rows of gradients, some of them repeated."""
SPARSE = [RowSparse(RNG.normal(size=(len(rows), SHAPE[1])), rows, SHAPE) for rows in ROWS]


def expected(grads):
    """The weight, the means and the row's squares after these gradients, in float64."""
    exact = START.copy(), np.zeros(SHAPE), np.zeros((SHAPE[0], 1))
    for grad in grads:
        whole = isinstance(grad, np.ndarray)
        given = RowSparse(grad, np.arange(SHAPE[0]), SHAPE) if whole else grad.coalesce()
        own = [array[given.indices] for array in exact]
        row_adam_formula(own[0], given.values, *own[1:])
        for array, values in zip(exact, own, strict=True):
            array[given.indices] = values
    return exact


@pytest.mark.parametrize(
    "grads", [DENSE, SPARSE, [DENSE[0], *SPARSE]], ids=["dense", "rows", "both"]
)
@pytest.mark.parametrize(
    "precision",
    [
        ("float64", {}, 1e-13),
        *slow(("float16", {"multi_precision": True}, 0.05)),
        *exhaustive(
            ("float32", {}, 1e-5),
            ("float32", {"state_dtype": "bfloat16"}, 0.05),
            ("float16", {"rounding": "stochastic"}, 0.05),
        ),
    ],
)
def test_elements_and_rows_have_numbers_of_their_own(grads, precision):
    """Only indexed rows change, whatever lazy_update is."""
    dtype, made, tolerance = precision
    updater = fastopt.Updater(RowAdam(learning_rate=0.1, **made))
    weight = START.astype(dtype)
    for grad in grads:
        updater("w", grad.astype(dtype), weight)
    ours = (weight, *leaves(updater.state_as("w", "float64"))[-2:])  # a master is the first
    for array, exact in zip(ours, expected(grads), strict=True):
        assert array.shape == exact.shape
        np.testing.assert_allclose(array.astype(np.float64), exact, rtol=tolerance, atol=tolerance)


def test_a_state_of_another_shape_is_refused():
    updater = fastopt.Updater(RowAdam())
    updater("w", DENSE[0], START.copy())
    mean, var = updater.states["w"]
    updater.states["w"] = (var, mean)
    with pytest.raises(ValueError, match=r"state 'mean' must have shape \(7, 37\), got \(7, 1\)"):
        updater("w", DENSE[0], START.copy())


def test_a_table_keeps_both_with_each_row():
    made = RowAdam(learning_rate=0.1)
    table = fastopt.EmbeddingTable(SHAPE[1], made, init=lambda ids: START[ids % 7], dtype="float64")
    ids = np.array([70, 8, -5, 3, 4, 5, 6])
    table.lookup(ids)
    for grad in SPARSE:
        table.update(ids[grad.indices], grad.values)
    np.testing.assert_allclose(table.lookup(ids), expected(SPARSE)[0], rtol=1e-12)


FORMS = {"state": ("a", "b"), "hyper": ("lr",)}


def test_without_names_all_state_is_of_rows():
    term = lambda grad, h: grad  # noqa: E731
    same = lambda weight, grad, state, h, mean: (weight, state)  # noqa: E731
    declared, none = (rule(**FORMS, row=term, **own)(same) for own in ({}, {"row_state": ()}))
    assert declared.shapes((4, 3)) == (("a", (4, 1)), ("b", (4, 1)))
    assert none.shapes((4, 3)) == (("a", (4, 3)), ("b", (4, 3)))
    assert row_adam.shapes((4, 3)) == (("mean", (4, 3)), ("var", (4, 1)))
    assert len({each.digest for each in (declared, none)}) == 2


@pytest.mark.slow
@pytest.mark.parametrize("shape", [(1,), (4, 3)])
def test_novograd_refuses_a_state_with_another_shape(shape, rng):
    weight, gradients = single(rng, (4, 3), steps=1)
    updater, got = trained(NovoGrad(), weight, gradients)
    mom, _ = updater.states[0]
    updater.states[0] = mom, np.zeros(shape, np.float32)
    with pytest.raises(ValueError, match=r"state 'var' must have shape \(\), got"):
        updater(0, gradients[0], got)
    with pytest.raises(CheckpointError, match="must have one number for the tensor"):
        fastopt.Updater(NovoGrad()).load_state_dict(updater.state_dict())
    with pytest.raises(ValueError, match=r"needs 2 state arrays \('mom', 'var'\), got 1"):
        NovoGrad().update(0, got, gradients[0], (mom,))
