"""Weight decay of rows that lazy updates do not touch: sparse_decay and flush."""

import copy
import math
import signal

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import fastopt
from fastopt import optimizer
from fastopt._engine.validate import leaves
from fastopt._kernels import cpu
from helpers.cases import CASES, LIGHT, OF_STEPS, Case, marks_of, sampled
from helpers.row_sparse import listing, problems, same_bits
from helpers.users import Doubled

WD = 0.3


DECOUPLED_NAMES = {
    *("adagrad", "adadelta", "adamw", "adabelief", "radam", "lion", "nadamw", "ademamix"),
    *("adopt", "adamatan2", "adan", "laprop", "mars", "stablespam"),
}
CAUTIOUS = {"cautious_decay", "stable"}
"""Forms whose decay depends on the gradient."""
COUPLED = [
    case
    for case in CASES
    if (case.name not in DECOUPLED_NAMES and case.kwargs != {"momentum": 0.0})
    or str(case) == "adagrad-formula=torch"
]
DECOUPLED = [case for case in CASES if case not in COUPLED and CAUTIOUS.isdisjoint(case.kwargs)]
DECOUPLED.append(Case("signum", {"momentum": 0.0, "wd_lh": 0.2}))
DECAYING = [
    case
    for case in CASES
    if case.name not in ("test", "groupadagrad", *OF_STEPS) and CAUTIOUS.isdisjoint(case.kwargs)
]
DECAYING.append(Case("signum", {"wd_lh": 0.2}))

decoupled = pytest.mark.parametrize("case", sampled(DECOUPLED), ids=str)
coupled = pytest.mark.parametrize("case", sampled(COUPLED), ids=str)
decaying = pytest.mark.parametrize("case", sampled(DECAYING, LIGHT), ids=str)


def share(case, t, lr, wd):
    """Share of a row that decay takes in step `t`, by the formulas of the docstrings."""
    if case.name == "adadelta":
        return wd
    if case.name == "signum":
        return lr * (wd + case.kwargs.get("wd_lh", 0))
    if case.name == "adamw" and "eta" in case.kwargs:
        return case.kwargs["eta"] * wd
    if case.name == "adopt" and t == 1:
        return 0.0
    if case.name == "adan" and case.kwargs.get("proximal", True):
        return lr * wd / (1 + lr * wd)
    torch = case.kwargs.get("formula") == "torch"
    if case.name == "adamw" and case.kwargs.get("correct_bias", True) and not torch:
        return lr * math.sqrt(1 - 0.999**t) / (1 - 0.9**t) * wd
    if case.kwargs.get("batch_scale") == 2:
        return 2 * lr * wd if t % 2 == 0 else 0  # after the warm-up the rate is doubled
    return lr * wd


class Oracle:
    """Weight in float64 where every row decays in every step.

    Listed rows follow the rule, by lazy updates without further decay; NumPy shrinks the others.
    """

    def __init__(self, case, weight, rate, **kwargs):
        self.case, self.rate, self.t = case, rate, 0
        self.weight = weight.astype(np.float64)
        self.rule = case.updater(wd=WD, lazy_update=True, lr_scheduler=rate, **kwargs)

    def __call__(self, grad, lr_mult=1.0):
        self.t += 1
        listed = getattr(grad, "indices", np.arange(len(self.weight)))
        others = np.setdiff1d(np.arange(len(self.weight)), listed)
        self.weight[others] *= 1 - share(self.case, self.t, lr_mult * self.rate(self.t), WD)
        self.rule.optimizer.set_lr_mult({0: lr_mult})
        self.rule(0, grad.astype(np.float64), self.weight)


def wavy(n):
    """A rate that is different in every step, up and down."""
    return 0.05 * (1 + math.sin(3 * n))


@decoupled
@settings(max_examples=8)
@given(problem=problems(steps=6), data=st.data())
def test_pending_decay_is_applied_under_any_schedule(case, problem, data):
    """Also with multipliers, dense gradients in between, and flushes before the last."""
    made = case.updater(wd=WD, sparse_decay="catch_up", lr_scheduler=wavy)
    oracle, weight = Oracle(case, problem.weight, wavy), problem.weight.copy()
    for grad in problem.grads:
        lr_mult = data.draw(st.sampled_from([1.0, 0.5, 0.0]))
        grad = grad.to_dense() if data.draw(st.integers(0, 4)) == 0 else grad
        made.optimizer.set_lr_mult({0: lr_mult})
        made(0, grad, weight)
        oracle(grad, lr_mult)
        if data.draw(st.integers(0, 3)) == 0:
            made.flush(0)
            agree(weight, oracle.weight)
    made.flush(0)
    agree(weight, oracle.weight)
    for state, expected in zip(leaves(made.states[0]), leaves(oracle.rule.states[0]), strict=True):
        agree(state, expected)


def agree(actual, expected):
    rough = actual.dtype != np.float64
    np.testing.assert_allclose(actual, expected, *((1e-4, 1e-5) if rough else (1e-9, 1e-12)))


@decoupled
def test_only_indexed_rows_are_written_before_a_flush(case, rng):
    updater = case.updater(wd=WD, sparse_decay="catch_up")
    weight = rng.normal(size=(9, 4))
    if case.name == "adopt":  # its first update only measures
        updater(0, rng.normal(size=(9, 4)), weight)
    for rows in ([0, 3, 8], [3, 5], []):
        before = weight.copy()
        updater(0, (rng.normal(size=(len(rows), 4)), np.array(rows, np.int64)), weight)
        np.testing.assert_array_equal(np.flatnonzero((weight != before).any(axis=1)), rows)
    updater.flush(0)
    assert (weight != before).all()
    once = weight.copy()
    updater.flush(0)
    same_bits(weight, once)


@pytest.mark.slow
@decaying
def test_dense_decay_reaches_all_rows_in_every_step(case, rng):
    updater, weight = case.updater(wd=WD, sparse_decay="dense"), rng.normal(size=(9, 4))
    for t in range(1, 7):
        updater.optimizer.set_learning_rate(wavy(t))
        grad = listing(rng, (9, 4), np.float64, 3 * (t % 3))
        spared = np.setdiff1d(np.arange(9), grad.indices)
        if "batch_scale" in case.kwargs:
            spared = spared[spared > 7]  # earlier ones may wait in the sum
            grad = grad.retain([row for row in grad.indices if row < 8])
        before = weight.copy()
        updater(0, grad, weight)
        expected = before[spared] * (1 - share(case, t, wavy(t), WD))
        np.testing.assert_allclose(weight[spared], expected, rtol=1e-12)
        after = weight.copy()
        updater.flush(0)  # nothing is pending
        same_bits(weight, after)


@coupled
def test_catching_up_is_refused_where_decay_goes_through_the_gradient(case):
    words = "sparse_decay='catch_up' needs (decoupled decay|Signum without momentum)"
    with pytest.raises(ValueError, match=words):
        case.make(sparse_decay="catch_up")


def test_arguments_that_do_not_fit_are_refused():
    for how in ("catch_up", "dense"):
        with pytest.raises(ValueError, match="needs lazy updates, got lazy_update=False"):
            optimizer.AdaGrad(sparse_decay=how, lazy_update=False)
        assert optimizer.AdamW(sparse_decay=how).lazy_update
    with pytest.raises(ValueError, match="sparse_decay must be"):
        optimizer.AdaGrad(sparse_decay="lazy")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "how"),
    [
        pytest.param(case, how, marks=() if str(case) in LIGHT else marks_of(case))
        for cases, how in ((DECAYING, "dense"), (DECOUPLED, "catch_up"))
        for case in cases
        if case.name != "adan"  # whose share is below 1 at any rate
    ],
    ids=str,
)
def test_a_decay_that_would_take_all_is_refused_and_changes_nothing(case, how, rng):
    updater, weight = case.updater(wd=WD, sparse_decay=how), rng.normal(size=(9, 4))
    for _ in range(case.kwargs.get("batch_scale", 1) + 1):
        updater(0, listing(rng, (9, 4), np.float64, 4), weight)
    updater.optimizer.set_learning_rate(10.0)
    updater.optimizer.set_wd_mult({0: 10.0})
    for call in (lambda g: updater(0, g, weight), lambda g: updater([0], [g], [weight])):
        before = copy.deepcopy((weight, updater.states))
        attributes = repr(updater.optimizer.__getstate__())
        with pytest.raises(ValueError, match=f"index 0: sparse_decay='{how}' needs rate times"):
            call(listing(rng, (9, 4), np.float64, 4))
        np.testing.assert_equal((weight, updater.states), before)
        assert repr(updater.optimizer.__getstate__()) == attributes


@pytest.mark.slow
@pytest.mark.parametrize("how", ["catch_up", "dense"])
@pytest.mark.parametrize("rescale", [math.inf, math.nan, 0.0])
def test_steps_that_adamw_skips_decay_nothing(how, rescale, rng):
    made = optimizer.AdamW(learning_rate=0.1, wd=WD, sparse_decay=how)
    updater, weight = optimizer.get_updater(made), rng.normal(size=(6, 2))
    for row in (1, 2):
        updater(0, (rng.normal(size=(1, 2)), np.array([row])), weight)
    updater.flush(0)
    before = copy.deepcopy((weight, leaves(updater.states[0])))
    made.rescale_grad = rescale
    updater(0, (rng.normal(size=(1, 2)), np.array([3])), weight)
    updater.flush(0)
    np.testing.assert_equal((weight, leaves(updater.states[0])), before)
    assert made.num_update == 3


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "how"),
    [("test", "dense"), ("groupadagrad", "dense"), ("lion", "dense"), ("lion", "catch_up")],
)
def test_an_optimizer_without_decay_decays_no_row(name, how):
    made = optimizer.create(name, sparse_decay=how, wd=0.0)
    updater, weight = optimizer.get_updater(made), np.ones((6, 2))
    updater(0, (np.ones((1, 2)), np.array([2])), weight)
    updater.flush(0)
    np.testing.assert_array_equal(np.flatnonzero(weight[:, 0] != 1), [2])


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
    updater.flush()
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


@pytest.mark.parametrize("how", ["catch_up", "dense"])
def test_decay_that_rows_lack_is_not_lost_where_sparse_decay_changes(how):
    updater, weight = fastopt.Updater(optimizer.AdaGrad(wd=WD, sparse_decay=how)), np.ones((4, 2))
    updater.step({"t": (np.ones((1, 2)), [0])}, {"t": weight})
    updater.optimizer.sparse_decay = "touched"
    if how == "catch_up":  # a step with dense decay leaves none
        with pytest.raises(ValueError, match=r"index 't': rows lack the decay of steps .* assign"):
            updater.flush("t")
        updater.optimizer.sparse_decay = how
        updater.flush("t")
        updater.optimizer.sparse_decay = "touched"
    before = weight.copy()
    updater.flush("t")
    same_bits(weight, before)


@pytest.mark.parametrize("how", ["catch_up", "dense"])
def test_decay_is_deferred_at_rates_that_a_class_computes(how, rng):
    given = {"wd": WD, "lazy_update": True, "sparse_decay": how}
    ours = fastopt.Updater(Doubled(optimizer.AdamW)(learning_rate=0.05, **given))
    theirs = fastopt.Updater(optimizer.AdamW(learning_rate=0.1, **given))
    weights = [np.ones((5, 2)) for _ in "ab"]
    for step in range(4):
        grad = rng.normal(size=(1, 2)), np.array([step])
        for updater, weight in zip((ours, theirs), weights, strict=True):
            updater(0, grad, weight)
    for updater in (ours, theirs):
        updater.flush(0)
    np.testing.assert_array_equal(*weights)
