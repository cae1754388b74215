"""What row-sparse updates promise, for every form in cases.py, and what they refuse."""

import copy
import warnings

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fastopt import optimizer
from fastopt._engine.validate import leaves
from fastopt._kernels.strided import proportion
from fastopt.sparse import RowSparse
from fastopt.table import EmbeddingTable
from helpers.cases import CASES, LIGHT, exhaustive, sampled
from helpers.row_sparse import ARGUMENTS, Problem, all_rows, listing, problems, same_bits
from helpers.tensor_lists import frozen
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
    part = (rng.integers(-32, 33, grad.values.shape) / 8).astype(grad.dtype)
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
    before = [array.copy() for array in problem.run(updater, first) if array.ndim]
    after = [before[0].copy(), *(array for array in leaves(updater.states[0]) if array.ndim)]
    for grad in last:
        updater(0, grad, after[0])
    listed = np.concatenate([grad.indices for grad in last])
    spared = np.setdiff1d(np.arange(len(problem.weight)), listed)
    same_bits([array[spared] for array in after], [array[spared] for array in before])


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


TABLE = np.ones((5, 2))
BAD = {
    "values of integers": (np.ones((1, 2), int), [1], TypeError, "must .*float.*, got int64"),
    "other columns": (np.ones((1, 3)), [1], ValueError, r"shape \(1, 2\) for 1 indices.*\(1, 3\)"),
    "index too large": (np.ones((2, 2)), [1, 5], ValueError, "below 5, got 5"),
    "fewer values": (np.ones((1, 2)), [1, 3], ValueError, "shape .2, 2. for 2 indices.*got .1, 2."),
    "negative index": (np.ones((2, 2)), [-1, 1], ValueError, "at least 0 .* got -1"),
    "index beyond int64": (np.ones((1, 2)), [2**63], ValueError, "got 9223372036854775808"),
    "indices of floats": (np.ones((1, 2)), [1.0], TypeError, "integers, got float64"),
    "values in the weight": (TABLE[1:2], [1], ValueError, "weight and gradient share memory"),
}


@pytest.mark.parametrize("part", ["values", "indices"])
def test_a_row_sparse_gradient_without_arrays_is_refused_by_name(part):
    grad = RowSparse(np.ones((1, 2)), [1], (5, 2))
    setattr(grad, part, None)
    with pytest.raises(TypeError, match=r"index 't': the values .* must be arrays, got None"):
        updater("adam")("t", grad, TABLE)


def spoilt(values, indices):
    """A gradient that was spoilt after it was made."""
    grad = RowSparse(np.ones((2, 2)), np.array([1, 3]), (5, 2))
    grad.values, grad.indices = values, indices
    return grad


@pytest.mark.parametrize("form", [lambda *pair: pair, spoilt], ids=["pair", "spoilt"])
@pytest.mark.parametrize("accumulates", [False, True], ids=["", "accumulates"])
@pytest.mark.parametrize("seen", [False, True], ids=["first", "later"])
@pytest.mark.parametrize("case", BAD.values(), ids=BAD.keys())
def test_what_does_not_fit_is_refused_by_name_and_changes_nothing(case, seen, accumulates, form):
    values, indices, error, words = case
    kwargs = {"batch_scale": 2} if accumulates else {}
    made = updater("lbsgd" if accumulates else "adam", param_idx2name={0: "table"}, **kwargs)
    if seen:
        made(0, (np.ones((1, 2)), np.array([3])), TABLE)
    before = frozen((TABLE, dict(made.states))), repr(made.optimizer.__getstate__())
    grad = form(values, np.array(indices))
    for call in ((0, grad, TABLE), ([1, 0], [np.ones(3), grad], [np.ones(3), TABLE])):
        with pytest.raises(error, match=words) as raised:
            made(*call)
        assert "index 0 (table)" in str(raised.value)
        after = frozen((TABLE, dict(made.states))), repr(made.optimizer.__getstate__())
        assert after == before


def repeated(count, dtype=np.int8):
    """A gradient of `count` equal rows, in the memory of one."""
    return np.broadcast_to(np.float32(1), (count, 2)), np.broadcast_to(dtype(1), (count,))


@pytest.mark.parametrize("count", [2**45, 2**57, 2**58, 2**59])
@pytest.mark.parametrize(
    "settings", [{}, {"clip_global_norm": 1.0}, {"clip_adaptive": 0.1}], ids=str
)
def test_rows_whose_bytes_would_overflow_do_not_fit_into_memory(count, settings):
    """Their indices are not read either, which would never end."""
    updater = optimizer.Updater(optimizer.SGD(lr=0.1), **settings)
    weights, some = list(np.ones((3, 5, 2), np.float32)), RowSparse(np.ones((1, 2)), [1], (5, 2))
    for number in range(3):  # without a record, and with one
        before = copy.deepcopy((weights, updater.optimizer._index_update_count))
        for call in ((0, repeated(count), weights[0]), ([0, 1, 2], [repeated(count)] * 3, weights)):
            with pytest.raises(MemoryError, match=f"index 0: indices do not .* {count} integers"):
                updater(*call)
        np.testing.assert_equal((weights, updater.optimizer._index_update_count), before)
        updater([0, 1, 2], [some] * 3, weights)
        assert updater.optimizer.num_update == number + 1


@pytest.mark.parametrize("dtype", [np.int64, np.uint8, np.uint64])
def test_ids_of_a_table_that_do_not_fit_into_memory_are_not_read(dtype):
    table = EmbeddingTable(2, optimizer.SGD(lr=0.1))
    table.lookup([1])
    with pytest.raises(MemoryError):
        table.lookup(repeated(2**50, dtype)[1])


@pytest.mark.parametrize("settings", [{}, {"clip_adaptive": 0.1}], ids=str)
@pytest.mark.parametrize("rows", [[2**56, 1, 2**56], [], None], ids=["mixed", "none", "dense"])
def test_a_weight_of_any_height_without_elements_is_updated(rows, settings):
    updater = optimizer.Updater(optimizer.SGD(lr=0.1), **settings)
    weight = np.zeros((2**57, 0))
    grad = weight if rows is None else RowSparse(np.zeros((len(rows), 0)), rows, weight.shape)
    for _ in range(3):
        updater(0, grad, weight)
    assert updater.optimizer.num_update == 3


def test_shares_of_more_elements_than_fit_into_four_bytes():
    size = 2**34 + 3
    quarters = [k * size // 4 for k in range(4)]
    assert [proportion(k, size, size) for k in quarters] == quarters
    assert proportion(3 * 2**40, 2**42, 2**33) == 3 * 2**31
