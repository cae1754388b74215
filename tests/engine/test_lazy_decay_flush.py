"""Bringing rows up to date: flush, whatever the weight, and after states were restored."""

import copy
import signal

import numpy as np
import pytest

import fastopt
from fastopt import optimizer
from fastopt._kernels import cpu
from helpers.row_sparse import listing, same_bits

WD = 0.3


def catching_up(name="adagrad", **kwargs):
    if name == "signum":
        kwargs["momentum"] = 0.0
    made = optimizer.create(name, wd=WD, sparse_decay="catch_up", **kwargs)
    return optimizer.get_updater(made)


@pytest.mark.slow
@pytest.mark.parametrize("groups", [None, {"table": {"wd": 0.5}}], ids=["", "groups"])
def test_flush_knows_the_last_weight_after_another_one_was_flushed(groups):
    updater = fastopt.Updater(catching_up().optimizer, groups=groups)
    tables = [np.ones((3, 2), np.float32) for _ in range(2)]
    rows = np.ones((1, 2), np.float32), [1]
    updater("table", rows, tables[0])
    updater.flush("table", tables[1])
    updater("table", rows, tables[0])
    before = tables[1].copy()
    updater.flush("table")
    assert (tables[0] < 1).all()
    assert (tables[1] == before).all()


@pytest.mark.usefixtures("ctrl_c")
def test_ctrl_c_waits_until_a_weight_that_is_not_contiguous_is_flushed(monkeypatch):
    updater, weight = catching_up(learning_rate=0.1), np.ones((8, 3))[::2]
    updater(0, (np.ones((1, 3)), np.array([1])), weight)
    kernel = cpu.flush_decay

    def interrupted(*args):
        signal.raise_signal(signal.SIGINT)
        return kernel(*args)

    monkeypatch.setattr(cpu, "flush_decay", interrupted)
    with pytest.raises(KeyboardInterrupt):
        updater.flush(0)
    np.testing.assert_allclose(weight[[0, 2, 3]], 1 - 0.1 * WD)


@pytest.mark.slow
def test_a_copy_is_flushed_before_its_first_update():
    table = fastopt.EmbeddingTable(
        2, fastopt.AdamW(lr=0.1, wd=0.1, lazy_update=True, sparse_decay="catch_up")
    )
    other = copy.deepcopy(table)
    other.flush()
    for each in (table, other):
        each.update([], np.zeros((0, 2), np.float32))
        each.update([3], np.ones((1, 2), np.float32))
    np.testing.assert_array_equal(table.lookup([3]), other.lookup([3]))


def test_flush_refuses_a_weight_that_it_does_not_know_or_that_does_not_fit():
    updater, weight = catching_up("signum"), np.ones((4, 3))
    with pytest.raises(ValueError, match="index 'table': flush needs the weight"):
        updater.flush("table")
    updater("table", (np.ones((1, 3)), np.array([1])), weight)
    words = r"index 'table': decay is kept for rows of shape \(4,\).* has 5"
    longer = np.ones((5, 3))
    with pytest.raises(ValueError, match=words):
        updater.flush("table", longer)
    with pytest.raises(ValueError, match=words):
        updater("table", (np.ones((1, 3)), np.array([1])), longer)
    assert (longer == 1).all()


@pytest.mark.slow
@pytest.mark.parametrize("how", ["touched", "dense"])
def test_flush_changes_nothing_without_pending_decay(how, rng):
    made = optimizer.AdaGrad(learning_rate=0.1, wd=WD, sparse_decay=how)
    updater, weight = optimizer.get_updater(made), rng.normal(size=(4, 3))
    updater(0, listing(rng, (4, 3), np.float64, 2), weight)
    before = weight.copy()
    updater.flush(0)
    same_bits(weight, before)


class Doubled(optimizer.AdamW):
    """Its rates are asked for in Python."""

    def _get_lr(self, index):
        return 2 * super()._get_lr(index)


@pytest.mark.parametrize("how", ["catch_up", "dense"])
def test_decay_is_deferred_at_rates_that_a_class_computes(how, rng):
    given = {"wd": WD, "lazy_update": True, "sparse_decay": how}
    ours = fastopt.Updater(Doubled(learning_rate=0.05, **given))
    theirs = fastopt.Updater(optimizer.AdamW(learning_rate=0.1, **given))
    weights = [np.ones((5, 2)) for _ in "ab"]
    for step in range(4):
        grad = rng.normal(size=(1, 2)), np.array([step])
        for updater, weight in zip((ours, theirs), weights, strict=True):
            updater(0, grad, weight)
    for updater in (ours, theirs):
        updater.flush(0)
    np.testing.assert_array_equal(*weights)
