"""Rules with state of elements and state of rows: ``fastopt.rule(row_state=...)``."""

import numpy as np
import pytest

import fastopt
from fastopt._engine.validate import leaves
from fastopt.kernels.rule import rule
from fastopt.sparse import RowSparse
from helpers.cases import exhaustive, slow
from helpers.row_rules import RowAdam, row_adam, row_adam_formula

SHAPE = (7, 37)
RNG = np.random.default_rng(0)
START = RNG.normal(size=SHAPE)
DENSE = list(RNG.normal(size=(3, *SHAPE)))
ROWS = [[3, 6, 0], [6, 2, 6, 3, 6], [], [5]]
"""Rows of gradients, some of them repeated."""
SPARSE = [RowSparse(RNG.normal(size=(len(rows), SHAPE[1])), rows, SHAPE) for rows in ROWS]


def expected(grads):
    """The weight, the means and the row's squares after these gradients, in float64."""
    weight, mean, var = START.copy(), np.zeros(SHAPE), np.zeros((SHAPE[0], 1))
    for grad in grads:
        whole = isinstance(grad, np.ndarray)
        given = grad if whole else grad.coalesce()
        rows = slice(None) if whole else given.indices
        own = [array[rows] for array in (weight, mean, var)]
        row_adam_formula(own[0], given if whole else given.values, *own[1:])
        for array, values in zip((weight, mean, var), own, strict=True):
            array[rows] = values
    return weight, mean, var


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
    dtype, made, tolerance = precision
    updater = fastopt.Updater(RowAdam(learning_rate=0.1, lazy_update=True, **made))
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
    updater.states["w"] = (mean, mean.copy())
    with pytest.raises(ValueError, match=r"state 'var' must have shape \(7, 1\), got \(7, 37\)"):
        updater("w", DENSE[0], START.copy())
    updater.states["w"] = (var, var.copy())
    with pytest.raises(ValueError, match=r"state 'mean' must have shape \(7, 37\), got \(7, 1\)"):
        updater("w", DENSE[0], START.copy())


def test_a_table_keeps_both_with_each_row():
    table = fastopt.EmbeddingTable(
        SHAPE[1], RowAdam(learning_rate=0.1), init="zeros", dtype="float64"
    )
    ids = np.array([70, 5, -3])
    weight, mean, var = np.zeros((3, SHAPE[1])), np.zeros((3, SHAPE[1])), np.zeros((3, 1))
    table.lookup(ids)
    for rows in ([0, 1, 2], [2, 0], [1]):
        grad = RNG.normal(size=(len(rows), SHAPE[1]))
        table.update(ids[rows], grad)
        own = [array[rows] for array in (weight, mean, var)]
        row_adam_formula(own[0], grad, *own[1:])
        weight[rows], mean[rows], var[rows] = own
    np.testing.assert_allclose(table.lookup(ids), weight, rtol=1e-12)


def test_only_indexed_rows_change_whatever_lazy_update_is():
    updater = fastopt.Updater(RowAdam(learning_rate=0.1, lazy_update=False))
    weight = START.copy()
    updater("w", DENSE[0], weight)
    before = [array.copy() for array in (weight, *updater.states["w"])]
    updater("w", SPARSE[0], weight)
    for array, old in zip((weight, *updater.states["w"]), before, strict=True):
        changed = np.flatnonzero((array != old).any(axis=1))
        assert changed.tolist() == sorted(ROWS[0])


FORMS = {"state": ("a", "b"), "hyper": ("lr",)}


def test_without_names_all_state_is_of_rows():
    term = lambda grad, h: grad  # noqa: E731
    same = lambda weight, grad, state, h, mean: (weight, state)  # noqa: E731
    declared, none = (rule(**FORMS, row=term, **own)(same) for own in ({}, {"row_state": ()}))
    assert declared.shapes((4, 3)) == (("a", (4, 1)), ("b", (4, 1)))
    assert none.shapes((4, 3)) == (("a", (4, 3)), ("b", (4, 3)))
    assert row_adam.shapes((4, 3)) == (("mean", (4, 3)), ("var", (4, 1)))
    assert len({each.digest for each in (declared, none)}) == 2
