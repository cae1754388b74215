"""Gradient accumulation: one update with the mean of the gradients of several calls."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastopt import RowSparse, optimizer
from fastopt.checkpoint import CheckpointError
from helpers.row_sparse import listing
from helpers.tensor_lists import as_list, one_by_one


def adam(**kwargs):
    return optimizer.Updater(optimizer.Adam(learning_rate=0.1, wd=0.01), **kwargs)


@pytest.mark.slow
@given(
    every=st.integers(1, 7),
    shape=st.sampled_from([(), (1,), (0,), (5,), (3, 4), (70_000,)]),
    seed=st.integers(0, 1000),
)
def test_the_sum_is_that_of_numpy_in_the_order_of_the_calls(every, shape, seed):
    rng = np.random.default_rng(seed)
    weight = np.asarray(rng.normal(size=shape), np.float32)
    made = optimizer.Updater(optimizer.Test(rescale_grad=1.0), accumulate=every)
    for _ in range(2):
        before, total = weight.copy(), np.zeros(shape, np.float32)
        for k in range(every):
            np.testing.assert_array_equal(weight, before)
            grad = np.asarray(rng.normal(size=shape), np.float32)
            total = total + grad
            made(0, grad, weight)
            assert made.info.stepped == (k == every - 1)
            assert not made.info.skipped
        np.testing.assert_array_equal(weight, before + np.float32(1 / every) * total)


def test_counts_and_schedules_advance_with_updates():
    asked = []
    made = optimizer.SGD(lr_scheduler=lambda update: asked.append(update) or 0.1)
    updater, weight = optimizer.Updater(made, accumulate=3), np.ones(2, np.float32)
    for _ in range(6):
        updater(0, np.ones(2, np.float32), weight)
    assert made.num_update == 2
    assert sorted(set(asked)) == [1, 2]


@pytest.mark.slow
@given(order=st.lists(st.booleans(), min_size=2, max_size=5), seed=st.integers(0, 99))
def test_dense_and_row_sparse_gradients_mix(order, seed):
    rng, weight, total = np.random.default_rng(seed), np.ones((6, 2), np.float32), 0.0
    made = optimizer.Updater(optimizer.Test(), accumulate=len(order))
    for sparse in order:
        grad = listing(rng, (6, 2), np.float32, 3)
        total += grad.to_dense()
        made(0, grad if sparse else grad.to_dense(), weight)
    np.testing.assert_allclose(weight, 1 + total / len(order), rtol=1e-5)


def test_a_checkpoint_with_another_accumulate_warns_or_is_refused(tmp_path):
    made, weight = adam(accumulate=2), np.ones(2)
    for path, calls in (("between", 3), ("closed", 1)):
        for _ in range(calls):
            made(0, np.ones(2), weight)
        made.save(tmp_path / path)
    for new in (adam(), adam(accumulate=3)):
        with pytest.raises(CheckpointError, match="saved between two updates of accumulate=2"):
            new.load(tmp_path / "between")
        with pytest.warns(UserWarning, match=f"accumulate=2, .* keeps accumulate={new.accumulate}"):
            new.load(tmp_path / "closed")
        assert new.optimizer.num_update == 2
    same = adam(accumulate=2)
    same.load(tmp_path / "closed")
    assert same.optimizer.num_update == 2


@pytest.mark.parametrize("damage", [
    {"every": 0}, {"calls": {0: 2}}, {"calls": {}}, {"sums": {0: "a"}},
    {"sums": {0: np.ones(2, np.int64)}}, {"sums": 3}, {"calls": {5: 1}},
])  # fmt: skip
def test_damaged_sums_are_refused(damage):
    made, new = adam(accumulate=2), adam(accumulate=2)
    made(0, np.ones(2), np.ones(2))
    saved = made.states_dict()
    saved["accumulation"] |= damage
    with pytest.raises(CheckpointError):
        new.load_states_dict(saved)
    assert not new.states_dict()["accumulation"]["calls"]


def test_the_number_of_calls_changes_between_windows_alone():
    made, weight = adam(accumulate=2), np.ones(2)
    made(0, np.ones(2), weight)
    with pytest.raises(ValueError, match=r"cannot change while gradients of \[0\] wait"):
        made.accumulate = 3
    made(0, np.ones(2), weight)
    made.accumulate = 1
    made(0, np.ones(2), weight)
    assert made.optimizer.num_update == 2


@pytest.mark.parametrize("grad", [np.ones((4, 2)), RowSparse(np.ones((2, 2)), [3, 1], (4, 2))])
@pytest.mark.parametrize("way", [as_list, one_by_one])
def test_a_window_whose_last_call_fails_is_as_before(way, grad):
    fails = []
    schedule = lambda update: 1 / fails[0] if fails else 0.1  # noqa: E731
    updaters = [
        optimizer.Updater(optimizer.SGD(momentum=0.9, lr_scheduler=schedule), accumulate=2)
        for _ in range(2)
    ]
    weights = [np.ones((4, 2)), np.ones((4, 2))]
    for k in range(6):
        for fails[:] in [[0]] * 2 * (k % 2):
            with pytest.raises(ZeroDivisionError):
                way(updaters[0], [0], [grad], weights[:1])
        fails.clear()
        for updater, weight in zip(updaters, weights, strict=True):
            way(updater, [0], [grad], [weight])
        calls = [updater.states_dict()["accumulation"]["calls"] for updater in updaters]
        assert calls[0] == calls[1]
        np.testing.assert_array_equal(*weights)
