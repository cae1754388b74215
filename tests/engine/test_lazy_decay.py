"""Weight decay of rows that lazy updates do not touch: sparse_decay and flush."""

import math
import signal
from functools import partial

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import fastopt
from fastopt import RowSparse, optimizer
from fastopt._engine.validate import leaves
from fastopt._kernels import cpu
from helpers.cases import CASES, LIGHT, OF_STEPS, Case, marks_of, sampled
from helpers.row_sparse import listing, problems, same_bits
from helpers.tensor_lists import as_list, everything, frozen, one_by_one

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
    if case.name not in ("test", "groupadagrad", "lbsgd", *OF_STEPS)
    and CAUTIOUS.isdisjoint(case.kwargs)
]
DECAYING.append(Case("signum", {"wd_lh": 0.2}))

HOW = [
    pytest.param(case, how, marks=() if str(case) in LIGHT else marks_of(case))
    for cases, how in ((DECAYING, "dense"), (DECOUPLED, "catch_up"))
    for case in cases
]
every_way = pytest.mark.parametrize(("case", "how"), HOW, ids=str)


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
    return lr * wd


class Oracle:
    """Weight in float64 where every row decays in every step.

    Listed rows follow the rule, by lazy updates without further decay; NumPy shrinks the others.
    """

    def __init__(self, case, weight, rate):
        self.case, self.rate, self.t = case, rate, 0
        self.weight = weight.astype(np.float64)
        self.rule = case.updater(wd=WD, lazy_update=True, lr_scheduler=rate)

    def __call__(self, grad, lr_mult):
        self.t += 1
        every = np.arange(len(self.weight))
        others = np.setdiff1d(every, getattr(grad, "indices", every))
        self.rule.optimizer.set_lr_mult({0: lr_mult})
        self.rule(0, grad.astype(np.float64), self.weight)
        self.weight[others] *= 1 - share(self.case, self.t, lr_mult * self.rate(self.t), WD)


def wavy(n):
    """A rate that is different in every step, up and down."""
    return 0.05 * (1 + math.sin(3 * n))


@every_way
@settings(max_examples=8)
@given(data=st.data())
def test_every_row_decays_in_every_step_under_any_schedule(case, how, data):
    """Also with multipliers, dense gradients in between, and flushes before the last."""
    problem = data.draw(problems(case, steps=6))
    made = case.updater(wd=WD, sparse_decay=how, lr_scheduler=wavy)
    oracle, weight = Oracle(case, problem.weight, wavy), problem.weight.copy()
    for grad in problem.grads:
        lr_mult = data.draw(st.sampled_from([1.0, 0.5, 0.0]))
        grad = grad.to_dense() if data.draw(st.integers(0, 4)) == 0 else grad
        made.optimizer.set_lr_mult({0: lr_mult})
        before = weight.copy()
        made(0, grad, weight)
        oracle(grad, lr_mult)
        if how == "catch_up" and isinstance(grad, RowSparse):
            spared = np.setdiff1d(np.arange(len(weight)), grad.indices)
            same_bits(weight[spared], before[spared])
        if how == "catch_up" and data.draw(st.integers(0, 3)) == 0:
            made.flush(0)
            agree(weight, oracle.weight)
    for _ in range(2 if how == "catch_up" else 0):  # the second has no effect
        made.flush(0)
    agree(weight, oracle.weight)
    for state, expected in zip(leaves(made.states[0]), leaves(oracle.rule.states[0]), strict=True):
        agree(state, expected)


def agree(actual, expected):
    rough = actual.dtype != np.float64
    np.testing.assert_allclose(actual, expected, *((1e-4, 1e-5) if rough else (1e-9, 1e-12)))


@pytest.mark.parametrize("case", sampled(COUPLED), ids=str)
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
@every_way
def test_a_decay_that_would_take_all_is_refused_and_changes_nothing(case, how, rng):
    if case.name == "adan":
        pytest.skip("its share is below 1 at any rate")
    updater, weight = case.updater(wd=WD, sparse_decay=how), rng.normal(size=(9, 4))
    grad = listing(rng, (9, 4), np.float64, 4)
    for _ in range(2):
        updater(0, grad, weight)
    updater.optimizer.set_learning_rate(10.0)
    updater.optimizer.set_wd_mult({0: 10.0})
    before = everything(updater, weight)
    for way in (as_list, one_by_one):
        with pytest.raises(ValueError, match=f"index 0: sparse_decay='{how}' needs rate times"):
            way(updater, [0], [grad], [weight])
        assert everything(updater, weight) == before


@pytest.mark.slow
@pytest.mark.parametrize("how", ["catch_up", "dense"])
@pytest.mark.parametrize("rescale", [math.inf, math.nan, 0.0])
def test_steps_that_adamw_skips_decay_nothing(how, rescale):
    made = optimizer.AdamW(learning_rate=0.1, wd=WD, sparse_decay=how)
    updater, weight, ends = fastopt.Updater(made), np.ones((6, 2)), []
    for made.rescale_grad in (1.0, rescale):
        updater(0, (np.ones((1, 2)), [1]), weight)
        updater.flush(0)
        ends.append(frozen((weight, leaves(updater.states[0]))))
    assert ends[0] == ends[1]
    assert made.num_update == 2


ROW = np.ones((1, 2)), [1]


def catching_up(name="adagrad", **kwargs):
    made = optimizer.create(name, wd=WD, sparse_decay="catch_up", **kwargs)
    return optimizer.get_updater(made)


@pytest.mark.slow
@pytest.mark.parametrize("groups", [None, {"table": {"wd": 0.5}}], ids=["", "groups"])
def test_flush_knows_the_last_weight_after_another_one_was_flushed(groups):
    updater = fastopt.Updater(catching_up().optimizer, groups=groups)
    first, second = np.ones((2, 3, 2), np.float32)
    updater("table", ROW, first)
    updater.flush("table", second)
    updater("table", ROW, first)
    before = second.copy()
    updater.flush()
    assert (first < 1).all()
    assert (second == before).all()
    updater("table", ROW, first)
    updater.flush({"table": second})
    assert not (second == before).all()


def test_a_group_that_defers_decay_is_lazy():
    own, weights = {"sparse_decay": "catch_up"}, []
    for kwargs, groups in ((own, None), ({}, {"t": own})):
        updater = fastopt.Updater(optimizer.AdamW(wd=WD, **kwargs), groups=groups)
        updater.step({"t": ROW}, {"t": (weight := np.ones((4, 2)))})
        weights.append(weight)
    same_bits(*weights)


@pytest.mark.usefixtures("ctrl_c")
def test_ctrl_c_waits_until_a_weight_that_is_not_contiguous_is_flushed(monkeypatch):
    updater, weight = catching_up(learning_rate=0.1), np.ones((8, 2))[::2]
    updater(0, ROW, weight)
    kernel = cpu.flush_decay

    def interrupted(*args):
        signal.raise_signal(signal.SIGINT)
        return kernel(*args)

    monkeypatch.setattr(cpu, "flush_decay", interrupted)
    with pytest.raises(KeyboardInterrupt):
        updater.flush(0)
    np.testing.assert_allclose(weight[[0, 2, 3]], 1 - 0.1 * WD)


def test_flush_refuses_a_weight_that_it_does_not_know_or_that_does_not_fit():
    updater, weight, longer = catching_up("signum", momentum=0.0), np.ones((4, 2)), np.ones((5, 2))
    with pytest.raises(ValueError, match="index 'table': flush needs the weight"):
        updater.flush("table")
    with pytest.raises(ValueError, match="'tables' is of no parameter; those so far are none"):
        updater.flush("tables", weight)
    updater("table", ROW, weight)
    for refused in (
        partial(updater.flush, "table", longer),
        partial(updater, "table", ROW, longer),
    ):
        words = r"index 'table': decay is kept for rows of shape \(4,\).* has 5"
        with pytest.raises(ValueError, match=words):
            refused()
    assert (longer == 1).all()


@pytest.mark.parametrize("how", ["catch_up", "dense"])
def test_decay_that_rows_lack_is_not_lost_where_sparse_decay_changes(how):
    updater, weight = fastopt.Updater(optimizer.AdaGrad(wd=WD, sparse_decay=how)), np.ones((4, 2))
    updater("t", ROW, weight)
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
