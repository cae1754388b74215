"""What row-sparse updates promise, for every form in cases.py, bit for bit, in any precision."""

import warnings

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fastopt import optimizer
from fastopt._engine.validate import leaves
from fastopt.sparse import RowSparse
from helpers.cases import CASES, LIGHT, exhaustive, sampled
from helpers.row_sparse import (
    ARGUMENTS,
    Problem,
    all_rows,
    eighths,
    listing,
    problems,
    same_bits,
    with_rows,
)
from helpers.users import InNumPy

every_case = pytest.mark.parametrize("case", sampled(CASES, LIGHT), ids=str)
few = settings(max_examples=12)


def made(case, lazy):
    return case.updater(wd=case.wd, lazy_update=lazy, **ARGUMENTS)


@pytest.mark.slow
@every_case
@few
@given(data=st.data())
def test_a_lazy_update_of_all_rows_is_the_dense_one(case, data):
    problem = data.draw(problems(case))
    dense = [grad.to_dense() for grad in problem.grads]
    listed = problem.run(made(case, True), [all_rows(grad) for grad in dense])
    same_bits(listed, problem.run(made(case, True), dense))


@pytest.mark.slow
@every_case
@few
@given(data=st.data())
def test_a_standard_update_is_dense_with_zeros_in_rows_that_are_not_listed(case, data):
    problem = data.draw(problems(case))
    dense = [grad.to_dense() for grad in problem.grads]
    same_bits(problem.run(made(case, False)), problem.run(made(case, False), dense))


@pytest.mark.slow
@every_case
@few
@given(data=st.data(), lazy=st.booleans())
def test_order_and_repetition_of_rows_do_not_matter_where_sums_are_exact(case, data, lazy):
    problem = data.draw(problems(case))
    rng = np.random.default_rng(0)
    summed = [grad.coalesce() for grad in problem.grads]
    split = [shuffled(rng, halved(rng, grad)) for grad in summed]
    expected = problem.run(made(case, lazy), summed)
    same_bits(problem.run(made(case, lazy)), expected)
    same_bits(problem.run(made(case, lazy), split), expected)


def halved(rng, grad):
    """The same gradient, with every row listed twice."""
    part = eighths(rng, grad.values.shape, grad.dtype)
    values = np.concatenate([part, grad.values - part])
    return RowSparse(values, np.tile(grad.indices, 2), grad.shape)


def shuffled(rng, grad):
    order = rng.permutation(len(grad.indices))
    return RowSparse(grad.values[order], grad.indices[order], grad.shape)


@pytest.mark.slow
@pytest.mark.parametrize("height", [40, 2048, 2049, 70_000, 3_000_000])
@pytest.mark.parametrize("dtype", [np.float32, *exhaustive(np.float64)])
@pytest.mark.parametrize(
    ("name", "lazy"), [("adam", True), ("adam", False), ("groupadagrad", True)]
)
def test_repeated_rows_are_added_up_in_the_order_of_the_list(name, lazy, dtype, height, rng):
    """As coalesce() does, for rows of any number of digits and rounding sums."""
    rows = np.concatenate([rng.integers(0, height, 500), rng.integers(height - 20, height, 500)])
    values = rng.normal(size=(1000, 3)).astype(dtype)
    grad = RowSparse(values, rng.permutation(np.append(rows, rows))[:1000], (height, 3))
    problem = Problem(np.ones((height, 3), dtype), [])
    results = [
        problem.run(updater(name, lazy_update=lazy), [listed]) for listed in (grad, grad.coalesce())
    ]
    same_bits(*results)
    assert len(grad.coalesce().indices) < 1000


@pytest.mark.slow
@every_case
@few
@given(data=st.data())
def test_rows_without_gradient_keep_weight_and_state_under_lazy_updates(case, data):
    problem = data.draw(problems(case, steps=4))
    if problem.weight.size == 0:
        return
    first, last = problem.grads[:2], problem.grads[2:]
    first[0] = all_rows(first[0].to_dense())  # so that no state is zero
    updater = made(case, True)
    before = tuple(array.copy() for array in with_rows(problem.run(updater, first)))
    after = with_rows((before[0].copy(), *leaves(updater.states[0])))
    for grad in last:
        updater(0, grad, after[0])
    listed = np.concatenate([grad.indices for grad in last])
    spared = np.setdiff1d(np.arange(len(problem.weight)), listed)
    same_bits(tuple(array[spared] for array in after), tuple(array[spared] for array in before))


@every_case
def test_a_first_gradient_without_rows_is_counted_and_makes_the_state(case):
    updater, weight = made(case, True), np.ones(case.shape)
    updater(0, RowSparse(np.empty((0, 5)), [], case.shape), weight)
    assert (weight == 1).all()
    same_bits(leaves(updater.states[0]), leaves(case.make().create_state(0, weight)))
    assert updater.optimizer.num_update == (case.name != "test")


LAZY = {"sgd", "ccsgd", "adam", "adagrad", "ftrl", "groupadagrad", "lars", "lbsgd"}


@pytest.mark.parametrize("name", sorted(optimizer.opt_registry))
def test_updates_are_lazy_by_default_where_mxnet_is(name):
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "ccSGD is deprecated")
        by_default = optimizer.create(name).lazy_update
        chosen = [optimizer.create(name, lazy_update=lazy).lazy_update for lazy in (True, False)]
    assert by_default == (name in LAZY)
    assert chosen == [True, False]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_strides_that_are_assigned_to_a_weight_with_spaced_rows_are_those_of_the_next_update():
    base, grad = np.zeros((8, 6), np.float32), (np.ones((2, 2), np.float32), [1, 3])
    made, weight = updater("sgd", lazy_update=True), base[:4, :2]
    for _ in range(3):
        made("w", grad, weight)
    base[...] = 0
    weight.strides = 48, 4  # every second row
    made("w", grad, weight)
    np.testing.assert_array_equal(np.flatnonzero(base.any(axis=1)), [2, 6])


def test_a_subclass_in_numpy_gets_a_dense_gradient(rng):
    grad = listing(rng, (6, 2), np.float64, 9)
    made, weight = optimizer.get_updater(InNumPy(learning_rate=0.5)), np.ones((6, 2))
    made(0, (grad.values, grad.indices), weight)
    np.testing.assert_array_equal(weight, 1 - 0.5 * grad.to_dense())


def test_values_whose_dtype_was_changed_are_taken_for_what_they_are():
    made = updater("sgd", multi_precision=True)
    weight, grad = np.ones((5, 2), np.float16), RowSparse(np.ones((2, 2), "f4"), [1, 3], (5, 2))
    made(0, grad, weight)
    grad.values = np.full((2, 2), 2, np.float16)
    made(0, grad, weight)
    np.testing.assert_allclose(weight[:, 0], [1, 0.7, 1, 0.7, 1], rtol=1e-3)


def test_values_in_a_state_are_read_before_it_is_written():
    """The state may serve as a gradient, as a copy of it would."""
    ends = []
    for form in (np.asarray, np.copy):
        made, weight = updater("sgd", momentum=0.9), np.ones((5, 2))
        made(0, (np.ones((2, 2)), [1, 3]), weight)
        made(0, (form(made.states[0][1:3]), [3, 1]), weight)
        ends.append(weight)
    same_bits(*ends)


def updater(name, **kwargs):
    return optimizer.get_updater(optimizer.create(name, learning_rate=0.1, **kwargs))


@pytest.mark.slow("exhaustive")
def test_rounding_does_not_depend_on_the_form_of_the_gradient(rng, bfloat16):
    """The draws belong to elements of the table, not to the order of the rows."""
    weight = rng.normal(size=(50, 7)).astype(bfloat16)
    other = weight.copy()
    lists, dense = (
        updater("adam", rounding="stochastic", state_dtype="bfloat16") for _ in range(2)
    )
    for _ in range(3):
        grad = eighths(rng, weight.shape, np.float32)
        order = rng.permutation(50)
        lists(0, (grad[order], order), weight)
        dense(0, grad, other)
    same_bits((weight, *leaves(lists.states[0])), (other, *leaves(dense.states[0])))
