"""Lists of tensors: the bits of one call after the other, and all or nothing."""

from types import SimpleNamespace

import numpy as np
import pytest

from fastopt import lr_scheduler, optimizer
from fastopt.sparse import RowSparse
from helpers.cases import CASES, OF_STEPS, kept
from helpers.tensor_lists import Tensor, as_list, everything, frozen, one_by_one, tensors_of

ALIKE = [case for case in CASES if case.name not in OF_STEPS]
"""Optimizers that update a tensor whatever the others are."""
every_case = pytest.mark.parametrize("case", kept(CASES, "adam"), ids=str)
NAMES = {0: "conv_weight", 2: "norm_gamma", 4: "empty", 8: "table_weight", 14: "fc_bias"}


def worlds(make, tensors):
    """Two updaters with the same weights; the first is called with lists."""
    for way in (as_list, one_by_one):
        weights = {index: tensor.make(k) for k, (index, tensor) in enumerate(tensors.items())}
        yield way, make(), weights


def train(way, updater, weights, tensors, steps, change=lambda step: None, seed=0):
    """Steps with fresh gradients; between them some parameters are updated alone."""
    for step in range(steps):
        change(step)
        grads = [t.slope(100 * (step + seed) + k) for k, t in enumerate(tensors.values())]
        way(updater, tensors, grads, weights.values())
        if step == 1:
            alone = list(tensors)[1:4]
            updater(alone[0], grads[1], weights[alone[0]])
            one_by_one(updater, alone, grads[1:4], [weights[index] for index in alone])


@pytest.mark.parametrize("case", kept(ALIKE, "adam"), ids=str)
def test_lists_have_the_bits_of_single_calls(case):
    """For mixed tensors, multipliers of every origin that change, a schedule, unequal counts."""

    def outcome(way, updater, weights):
        made, tensors = updater.optimizer, tensors_of(case)

        def change(step):
            if step == 2:
                made.lr_mult["fc_weight"] = 0.3
                made.wd_mult["conv_weight"] = 0.7
                made.param_dict[10].lr_mult = np.float32(0.1)
            if step == 3:
                made.set_lr_mult({0: 0.9, 2: np.float32(0.3)})
                made.rescale_grad = 0.7

        train(way, updater, weights, tensors, 5, change)
        return everything(updater, weights)

    def make():
        schedule = lr_scheduler.FactorScheduler(step=2, factor=0.7)
        objects = {index: SimpleNamespace(lr_mult=0.5, wd_mult=2.0) for index in (8, 10)}
        arguments = {"wd": case.wd, "multi_precision": True, "clip_gradient": 1.5}
        arguments |= {"param_idx2name": NAMES, "param_dict": objects, "lr_scheduler": schedule}
        updater = case.updater(**arguments)
        updater.optimizer.set_lr_mult({"table_weight": 0.2, 5: 1.5})
        return updater

    first, second = (outcome(*world) for world in worlds(make, tensors_of(case)))
    assert first == second


@pytest.mark.further
def test_products_and_corrections_advance_in_the_order_of_the_list(rng):
    weights, grads = rng.normal(size=(2, 3, 4))
    for name in ("nadam", "lars"):
        results = []
        for order in ([0, 1, 2], [2, 0, 1]):
            updater = optimizer.get_updater(
                optimizer.create(name, learning_rate=0.1, lr_scheduler=lambda n: 0.1 / n)
            )
            own = [weight.copy() for weight in weights]
            updater(2, grads[2], own[2])
            for _ in range(2):
                as_list(updater, order, [grads[k] for k in order], [own[k] for k in order])
            results.append(frozen(own))
        assert results[0] != results[1], name


def readonly(array):
    array.flags.writeable = False
    return array


BAD = {
    "gradient of another shape": (lambda t: Tensor((9, 9), t.dtype).slope(0), None),
    "gradient of another dtype": (lambda t: np.ones(t.shape, "i4"), None),
    "no gradient": (lambda t: None, None),
    "rows out of range": (lambda t: (np.ones((1, *t.shape[1:]), "f4"), np.array([10**6])), None),
    "read-only weight": (None, lambda w: readonly(w.copy())),
    "weight that is its gradient": ("weight", None),
    "rate that is no number": (None, float("nan")),
}


@pytest.mark.further
@pytest.mark.parametrize("place", [0, 5, -1])
@pytest.mark.parametrize("bad", BAD)
@every_case
def test_one_bad_entry_changes_nothing_anywhere(case, bad, place):
    tensors = {i: t for i, t in tensors_of(case).items() if t.dtype == "float32"}
    gradient, weight = BAD[bad]
    at = list(tensors)[place]
    if (tensors[at].shape == () and bad == "rows out of range") or (
        case.name == "test" and bad == "rate that is no number"
    ):
        pytest.skip("not wrong there")
    schedule = lr_scheduler.FactorScheduler(step=2, factor=0.7)
    updater = case.updater(wd=case.wd, lr_scheduler=schedule)
    weights = {index: tensor.make(k) for k, (index, tensor) in enumerate(tensors.items())}
    for step in range(3):
        grads = {i: t.slope(99 * step + k) for k, (i, t) in enumerate(tensors.items())}
        given = dict(weights)
        if gradient:
            grads[at] = weights[at] if gradient == "weight" else gradient(tensors[at])
        elif callable(weight):
            given[at] = weight(weights[at])
        else:
            updater.optimizer.lr_mult[at] = weight
        before = everything(updater, weights)
        for _ in range(2):
            with pytest.raises((TypeError, ValueError), match=f"index {at!r}"):
                as_list(updater, tensors, grads.values(), given.values())
            assert everything(updater, weights) == before
        updater.optimizer.lr_mult.pop(at, None)
        train(as_list, updater, weights, tensors, 1, seed=step)


@pytest.mark.parametrize("seen", [False, True], ids=["first", "later"])
def test_what_is_no_list_is_refused_clearly(seen):
    weights, grads = [np.ones(3), np.ones(3)], [np.ones(3), np.ones(3)]
    updater = optimizer.get_updater(optimizer.Adam())
    if seen:
        updater([0, 1], grads, weights)
    before = everything(updater, weights)
    for wrong in ((g for g in grads), np.ones((2, 3)), dict(enumerate(grads)), grads[:1], None):
        with pytest.raises(TypeError, match="list of as many gradients"):
            updater([0, 1], wrong, weights)
        words = "a call takes" if wrong is None else "list of as many weights"
        with pytest.raises(TypeError, match=words):
            updater([0, 1], grads, wrong)
    for wrong in ((i for i in (0, 1)), np.arange(2), {0, 1}, None):
        with pytest.raises(TypeError, match="index must be"):
            updater(wrong, grads, weights)
    for wrong in ([0, np.arange(2)], [0, None], [0, [1]]):
        with pytest.raises(TypeError, match="index must be"):
            updater(wrong, grads, weights)
    assert everything(updater, weights) == before


def test_tuples_are_lists_and_an_empty_list_is_nothing():
    first, second = np.ones((2, 2, 3))
    tuples, lists = (optimizer.get_updater(optimizer.Adam()) for _ in range(2))
    grads = np.ones(3), np.ones(3)
    for _ in range(2):
        tuples((0, 1), grads, tuple(first))
        lists([0, 1], list(grads), list(second))
    assert everything(tuples, first) == everything(lists, second)
    before = everything(lists, second)
    lists([], [], [])
    assert everything(lists, second) == before


def test_rows_that_a_list_adds_up_are_those_of_a_dense_gradient(rng):
    values, indices = rng.normal(size=(5, 2)), np.array([3, 0, 3, 3, 0])
    rows = RowSparse(values, indices, (4, 2))
    made = [optimizer.get_updater(optimizer.Adam(lazy_update=False)) for _ in range(2)]
    first, second = np.ones((2, 2, 4, 2))
    for _ in range(2):
        made[0]([0, 1], [rows, rows.to_dense()], list(first))
        made[1]([0, 1], [rows.to_dense(), rows], list(second))
    np.testing.assert_array_equal(first, second)


HALF, FORTRAN = Tensor((4, 3), "float16"), Tensor((4, 3), weight="fortran")
ROWS = Tensor((4, 3), gradient="rows")
FORMS = {
    "of two dtypes": (HALF, [HALF, Tensor((4, 3), "float16", gradient="single")]),
    "of two dtypes, without dimensions": (
        Tensor((), "float16"),
        [Tensor((), "float16"), Tensor((), "float16", gradient="single")],
    ),
    "dense and row-sparse": (FORTRAN, [FORTRAN, ROWS]),
}
"""Weights, and the forms of gradients for one of them in one list."""


@pytest.mark.parametrize("form", FORMS)
def test_an_index_may_come_twice_with_gradients_of_different_forms(form):
    tensor, forms = FORMS[form]
    results = []
    for way in (as_list, one_by_one):
        updater = optimizer.get_updater(optimizer.SGD(lr=0.1, momentum=0.9, multi_precision=True))
        weights = [tensor.make(0), tensor.make(1)]
        for step in range(3):
            grads = [forms[0].slope(step), forms[0].slope(step + 3), forms[1].slope(step + 6)]
            way(updater, [0, 1, 0], grads, [*weights, weights[0]])
        results.append(everything(updater, weights))
    assert results[0] == results[1]


def test_an_index_that_comes_twice_counts_in_no_joint_step():
    """Whatever the forms of its gradients; nothing changes."""
    updater = optimizer.get_updater(optimizer.Prodigy(multi_precision=True))
    weight = HALF.make(0)
    grads = [HALF.slope(1), HALF.slope(2).astype(np.float32)]
    before = everything(updater, [weight])
    with pytest.raises(ValueError, match="updates an index once in each list"):
        updater(["a", "a"], grads, [weight, weight])
    assert everything(updater, [weight]) == before


def test_a_list_with_an_index_twice_that_fails_restores_copies_too():
    def schedule(update):
        if update == 3:
            raise RuntimeError("no rate")
        return 0.1

    updater = optimizer.get_updater(optimizer.SGD(momentum=0.9, lr_scheduler=schedule))
    weight, copy = FORTRAN.make(0), np.zeros((4, 3), np.float16, order="F")
    updater.set_copy(0, copy)
    updater(0, FORTRAN.slope(1), weight)
    before = everything(updater, [weight, copy])
    with pytest.raises(RuntimeError, match="no rate"):
        updater([0, 0], [FORTRAN.slope(2), ROWS.slope(3)], [weight, weight])
    assert everything(updater, [weight, copy]) == before
