"""Start values of masters, and half-precision copies of float32 weights."""

import copy
import pickle

import numpy as np
import pytest

from fastopt import optimizer
from helpers.cases import exhaustive
from helpers.half_precision import bits, every_case, lively, master_of
from helpers.refusals import check_refused


def updater_of(name="adam", **kwargs):
    return optimizer.get_updater(optimizer.create(name, learning_rate=0.1, **kwargs))


@pytest.mark.parametrize("order", ["C", "F"])
@pytest.mark.parametrize("name", ["adam", *exhaustive("sgd", "dcasgd")])
def test_a_master_starts_from_unrounded_values(name, order, half, rng):
    start, gradient = rng.normal(size=(2, 5, 3)).astype(np.float32)
    mixed, single = updater_of(name, multi_precision=True), updater_of(name)
    start.flags.writeable = False
    mixed.set_master(0, start)
    weight, exact = start.astype(half, order), start.copy()
    for _ in range(2):
        mixed(0, gradient.astype(half), weight)
        single(0, gradient.astype(half).astype(np.float32), exact)
    master, _ = master_of(mixed)
    np.testing.assert_array_equal(bits(np.ascontiguousarray(master)), bits(exact))
    np.testing.assert_array_equal(weight, exact.astype(half))
    assert type(master) is np.ndarray
    assert master.flags[f"{order}_CONTIGUOUS"]


def failing(updater, half):
    updater.optimizer.lr_mult[0] = float("nan")
    with pytest.raises(ValueError, match="learning rate"):
        updater(0, np.zeros(3, half), np.ones(3, half))
    updater.optimizer.lr_mult.clear()
    return updater


BETWEEN = {
    "nothing": lambda updater, half: updater,
    "a failed update": failing,
    "a copy": lambda updater, half: copy.deepcopy(updater),
    "a pickle": lambda updater, half: pickle.loads(pickle.dumps(updater)),
}


@pytest.mark.parametrize("between", BETWEEN)
@pytest.mark.parametrize("restored", [False, True])
def test_an_initial_master_is_copied_and_released_after_its_first_use(between, restored, half):
    updater, start = updater_of("sgd", multi_precision=True), np.full(3, 0.1, np.float32)
    if restored:
        old = updater_of("sgd", multi_precision=True)
        old(0, np.ones(3, half), np.ones(3, half))
        updater.set_states(old.get_states())
    updater.set_master(0, start)
    start[:] = 7
    updater = BETWEEN[between](updater, half)
    updater(0, np.zeros(3, half), np.ones(3, half))
    np.testing.assert_array_equal(master_of(updater)[0], np.float32(0.1))
    updater.states.clear()
    updater(0, np.zeros(3, half), np.ones(3, half))
    np.testing.assert_array_equal(master_of(updater)[0], 1)


def test_a_master_can_be_set_between_updates(half, rng):
    updater, weight = updater_of(multi_precision=True), np.ones(4, half)
    updater(0, np.ones(4, half), weight)
    exact = rng.normal(size=4).astype(np.float32)
    updater.set_master(0, exact)
    updater.optimizer.set_learning_rate(0.0)
    updater(0, np.ones(4, half), weight)
    np.testing.assert_array_equal(master_of(updater)[0], exact)
    np.testing.assert_array_equal(weight, exact.astype(half))


F32 = np.ones(3, np.float32)


def test_a_master_of_another_shape_is_refused_at_the_first_update_and_later(half):
    updater, weight = updater_of(multi_precision=True), np.ones(4, half)
    updater.set_master(0, F32)
    with pytest.raises(ValueError, match=r"index 0: master must have shape \(4,\), got \(3,\)"):
        updater(0, np.ones(4, half), weight)
    assert updater.states == {}
    assert updater.optimizer.num_update == 0
    updater.set_master(0, np.ones(4, np.float32))
    updater(0, np.ones(4, half), weight)
    with pytest.raises(ValueError, match=r"master must have shape \(4,\), got \(3,\)"):
        updater.set_master(0, F32)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["adam", "ftrl", "rmsprop"])
def test_the_state_of_a_weight_without_a_master_is_not_taken_for_one(name):
    updater = optimizer.get_updater(optimizer.create(name, multi_precision=True))
    updater(0, F32, F32.copy())
    before = copy.deepcopy(updater.states)
    with pytest.raises(ValueError, match="missing master cannot be set"):
        updater.set_master(0, 7 * F32)
    np.testing.assert_equal(updater.states, before)


@pytest.mark.slow
@every_case
def test_a_copy_is_the_rounded_weight(case, half, rng):
    with_copy, alone = case.updater(**lively(case)), case.updater(**lively(case))
    weight = rng.normal(size=case.shape).astype(np.float32)
    other, rounded = weight.copy(), np.zeros(case.shape, half)
    with_copy.set_copy(0, rounded)
    for _ in range(4):
        gradient = rng.normal(size=case.shape).astype(half)
        with_copy(0, gradient, weight)
        alone(0, gradient.astype(np.float32), other)
        np.testing.assert_array_equal(bits(weight), bits(other))
        if case.kwargs.get("batch_scale", 1) == 1 or with_copy.optimizer.num_update % 2 == 0:
            np.testing.assert_array_equal(bits(rounded), bits(weight.astype(half)))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["strided", "fortran", "row-sparse"])
def test_a_copy_may_have_any_layout_and_gradients_may_be_row_sparse(kind, half, rng):
    updater, weight = updater_of(), rng.normal(size=(6, 4)).astype(np.float32)
    rounded = np.zeros((6, 8), half)[:, ::2]
    if kind == "fortran":
        rounded = np.zeros((6, 4), half, order="F")
    updater.set_copy("w", rounded)
    gradient = rng.normal(size=(6, 4)).astype(np.float32)
    given = (gradient[:2], np.array([5, 2])) if kind == "row-sparse" else gradient
    for _ in range(2):
        updater("w", given, weight)
    hit = [2, 5] if kind == "row-sparse" else slice(None)
    np.testing.assert_array_equal(rounded[hit], weight[hit].astype(half))
    if kind == "row-sparse":
        assert (rounded[[0, 1, 3, 4]] == 0).all()


def test_none_ends_a_copy_and_another_array_replaces_it(half):
    updater, weight = updater_of("sgd"), np.ones(3, np.float32)
    first, second = np.zeros(3, half), np.zeros(3, half)
    updater.set_copy(0, first)
    updater(0, F32, weight)
    updater.set_copy(0, second)
    updater(0, F32, weight)
    updater.set_copy(0, None)
    updater.set_copy(1, None)
    updater(0, F32, weight)
    for array, expected in ((first, 0.9), (second, 0.8), (weight, 0.7)):
        np.testing.assert_allclose(array.astype(float), expected, rtol=1e-2)


def test_a_numpy_update_is_followed_by_its_copy(half):
    class Plain(optimizer.Optimizer):
        def update(self, index, weight, grad, state):
            weight -= grad

    updater, weight, rounded = optimizer.get_updater(Plain()), np.ones(3, "f4"), np.zeros(3, half)
    updater.set_copy(0, rounded)
    updater(0, np.full(3, 0.25, half), weight)
    np.testing.assert_array_equal(weight, 0.75)
    np.testing.assert_array_equal(rounded, half.type(0.75))


MIXED = {"multi_precision": True}
LOCKED = np.ones(3, np.float16)
LOCKED.flags.writeable = False
REFUSED = [
    ("set_master", {}, F32, r"ValueError: index 0 \(fc\): a master needs .*multi_precision=True"),
    ("set_master", MIXED, [1.0], "TypeError: master must be a NumPy array, got list"),
    ("set_master", MIXED, np.ones(3), "TypeError: must have dtype float32, got float64"),
    ("set_copy", {}, [1.0], r"TypeError: index 0 \(fc\): copy must be a NumPy array, got list"),
    ("set_copy", {}, F32, "TypeError: copy must have dtype float16 or bfloat16, got float32"),
    ("set_copy", {}, LOCKED, "ValueError: copy is read-only"),
]


@pytest.mark.parametrize(("method", "arguments", "array", "error"), REFUSED)
def test_masters_and_copies_that_do_not_fit_are_refused(method, arguments, array, error):
    updater = updater_of(param_idx2name={0: "fc"}, **arguments)
    check_refused("give(0, array)", error, {"give": getattr(updater, method), "array": array})
    updater(0, F32, F32.copy())


def test_copies_that_do_not_fit_a_weight_are_refused(half):
    updater, weight = updater_of(), np.ones(3, np.float32)
    for given, rounded, error, words in (
        (weight, np.zeros(4, half), ValueError, r"copy must have shape \(3,\), got \(4,\)"),
        (weight, weight.view(half)[:3], ValueError, "share memory"),
        (np.ones(3), np.zeros(3, half), TypeError, "only a float32 weight has a copy, got float64"),
    ):
        updater.set_copy(0, rounded)
        with pytest.raises(error, match=words):
            updater(0, np.ones(3, given.dtype), given)
        assert (given == 1).all()
        assert (updater.states, updater.optimizer.num_update) == ({}, 0)
