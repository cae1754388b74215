"""What row-sparse updates promise, for every form in cases.py, bit for bit, in any precision."""

import copy
import warnings

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fastopt import optimizer
from fastopt._engine.validate import leaves
from fastopt.sparse import RowSparse
from helpers.cases import CASES, LIGHT, exhaustive, sampled
from helpers.row_sparse import ARGUMENTS, all_rows, eighths, listing, problems, same_bits, with_rows
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


def test_strides_that_are_assigned_to_a_weight_with_spaced_rows_are_those_of_the_next_update():
    made = optimizer.Updater(optimizer.SGD(learning_rate=1.0, lazy_update=True))
    base = np.zeros((8, 6), np.float32)
    weight = base[:4, :2]
    grad = np.ones((2, 2), np.float32), np.array([1, 3])
    for _ in range(3):
        made("w", grad, weight)
    base[...] = 0
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
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
    weight = np.ones((5, 2), np.float16)
    grad = RowSparse(np.ones((2, 2), np.float32), np.array([1, 3]), (5, 2))
    made(0, grad, weight)
    grad.values = np.full((2, 2), 2, np.float16)
    made(0, grad, weight)
    np.testing.assert_allclose(weight[:, 0], [1, 0.7, 1, 0.7, 1], rtol=1e-3)


def test_values_in_a_state_are_read_before_it_is_written():
    """The state may serve as a gradient, as a copy of it would."""
    made, other = updater("sgd", momentum=0.9), updater("sgd", momentum=0.9)
    weight, same = np.ones((5, 2)), np.ones((5, 2))
    for one, table in ((made, weight), (other, same)):
        one(0, (np.ones((2, 2)), np.array([1, 3])), table)
    made(0, (made.states[0][1:3], np.array([3, 1])), weight)
    other(0, (other.states[0][1:3].copy(), np.array([3, 1])), same)
    same_bits(weight, same)


def updater(name, **kwargs):
    return optimizer.get_updater(optimizer.create(name, learning_rate=0.1, **kwargs))


@pytest.mark.slow
def test_rows_without_gradient_keep_masters_copies_and_low_bits(half, rng):
    grad = listing(rng, (9, 5), half, 4)
    spared = np.setdiff1d(np.arange(9), grad.indices)
    for master in ["float32", "split"][: 1 + (half != np.float16)]:
        made = updater("adam", multi_precision=True, master=master)
        weight = rng.normal(size=(9, 5)).astype(half)
        made.set_master(0, weight.astype(np.float32) + np.float32(2**-20))
        made(0, RowSparse(grad.values[:0], [], (9, 5)), weight)
        before = copy.deepcopy((weight, *leaves(made.states[0])))
        made(0, grad, weight)
        after = (weight, *leaves(made.states[0]))
        same_bits(tuple(a[spared] for a in after), tuple(a[spared] for a in before))
        assert not np.array_equal(weight[grad.indices], before[0][grad.indices])
    made, weight = updater("adam"), rng.normal(size=(9, 5)).astype(np.float32)
    beside = np.full((9, 5), 7, half)
    made.set_copy(0, beside)
    made(0, grad.astype(np.float32), weight)
    np.testing.assert_array_equal(beside[grad.indices], weight.astype(half)[grad.indices])
    assert (beside[spared] == 7).all()


@pytest.mark.slow("exhaustive")
@pytest.mark.parametrize("kwargs", [{}, {"state_dtype": "bfloat16"}], ids=["weight", "state"])
def test_rounding_does_not_depend_on_the_form_of_the_gradient(kwargs, rng, bfloat16):
    """The draws belong to elements of the table, not to the order of the rows."""
    weight = rng.normal(size=(50, 7)).astype(bfloat16)
    other = weight.copy()
    lists, dense = (updater("adam", rounding="stochastic", **kwargs) for _ in range(2))
    for _ in range(3):
        grad = eighths(rng, weight.shape, np.float32)
        order = rng.permutation(50)
        lists(0, (grad[order], order), weight)
        dense(0, grad, other)
    same_bits((weight, *leaves(lists.states[0])), (other, *leaves(dense.states[0])))
