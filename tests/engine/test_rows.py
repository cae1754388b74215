"""What row-sparse updates promise, for every form in cases.py and bit for bit."""

import warnings

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fastopt import optimizer
from fastopt._engine.validate import leaves
from fastopt.sparse import RowSparse
from helpers.cases import CASES, LIGHT, exhaustive, sampled
from helpers.row_sparse import ARGUMENTS, all_rows, eighths, problems, same_bits, with_rows

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
    results = []
    for listed in (grad, grad.coalesce()):
        updater = optimizer.get_updater(optimizer.create(name, lazy_update=lazy))
        weight = np.ones((height, 3), dtype)
        updater(0, listed, weight)
        results.append((weight, *leaves(updater.states[0])))
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
    if "batch_scale" in case.kwargs:
        assert case.kwargs["batch_scale"] == len(first) == len(last)
    before = problem.run(updater, first)
    before = tuple(array.copy() for array in with_rows(before))
    after = with_rows((before[0].copy(), *leaves(updater.states[0])))
    for grad in last:
        updater(0, grad, after[0])
    listed = np.concatenate([grad.indices for grad in last])
    spared = np.setdiff1d(np.arange(len(problem.weight)), listed)
    same_bits(tuple(array[spared] for array in after), tuple(array[spared] for array in before))


@pytest.mark.slow
@every_case
def test_a_gradient_without_rows_is_counted_but_changes_nothing_under_lazy_updates(case, rng):
    updater, weight = made(case, True), rng.normal(size=case.shape)
    nothing = RowSparse(np.empty((0, 5)), [], case.shape)
    for _ in range(2):
        updater(0, rng.normal(size=case.shape), weight)
    arrays = with_rows((weight, *leaves(updater.states[0])))
    before = tuple(array.copy() for array in arrays)
    for _ in range(2):
        updater(0, nothing, weight)
    same_bits(arrays, before)
    counts = updater.optimizer._index_update_count.get(0, 0), updater.optimizer.num_update
    assert counts == ((0, 0) if case.name == "test" else (4, 4))


@every_case
def test_a_first_gradient_without_rows_makes_the_state(case):
    updater, weight = made(case, True), np.ones(case.shape)
    updater(0, RowSparse(np.empty((0, 5)), [], case.shape), weight)
    assert (weight == 1).all()
    fresh = case.make().create_state(0, np.ones(case.shape))
    same_bits(leaves(updater.states[0]), leaves(fresh))


LAZY = {"sgd", "ccsgd", "adam", "adagrad", "ftrl", "groupadagrad", "lars", "lbsgd"}


@pytest.mark.parametrize("name", sorted(optimizer.opt_registry))
def test_updates_are_lazy_by_default_where_mxnet_is(name):
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "ccSGD is deprecated")
        by_default = optimizer.create(name).lazy_update
        chosen = [optimizer.create(name, lazy_update=lazy).lazy_update for lazy in (True, False)]
    assert by_default == (name in LAZY)
    assert chosen == [True, False]
