"""Records: any form of a call runs in compiled code, with the bits of the plain form."""

import gc
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from threading import Barrier
from types import SimpleNamespace

import numpy as np
import pytest

import fastopt
from fastopt import optimizer
from fastopt._engine import templates
from fastopt._engine.validate import leaves
from fastopt._kernels.chunks import PARALLEL_FROM
from fastopt._kernels.record_words import AXES
from helpers.cases import CASES, slow
from helpers.plans import IN_PYTHON, LAYOUTS, each
from helpers.settings import settings_of
from helpers.tensor_lists import as_list, everything, normal, one_by_one
from helpers.written_headers import in_compiled_code

pytestmark = [in_compiled_code, pytest.mark.usefixtures("unrecorded")]


FORMS = {name: form for name, form in LAYOUTS.items() if name not in IN_PYTHON}
FORMS["last axes swapped"] = lambda array: (
    array if array.ndim < 2 else np.array(array.swapaxes(-1, -2), order="C").swapaxes(-1, -2)
)


def served(updater):
    """Assert that records served all calls."""
    assert not hasattr(updater.parameters, "unrecorded")
    assert updater.records.slots
    assert updater.info.slow.calls == 0


@pytest.mark.parametrize("axes", [1, 2, 3, 5, 6, 7, 9, 32, AXES])
@pytest.mark.parametrize("layout", FORMS)
@pytest.mark.parametrize("array", ["grads", "weights"])
@pytest.mark.parametrize("clip", [None, 0.1], ids=["plain", "clip_adaptive"])
def test_arrays_have_any_number_of_axes(clip, array, layout, axes):
    """Of lengths 2, 3, 2, 3 and ones, so that no two orders of the elements are the same."""
    lengths = (2, 3, 2, 3, *[1] * max(axes - 6, 0), 2, 2)
    shape, ends = lengths[-axes:], []
    for form in (np.array, FORMS[layout]):
        updater = optimizer.Updater(optimizer.Adam(), clip_adaptive=clip)
        own = {"grads": np.array, "weights": np.array, array: form}
        weights = [own["weights"](normal(k, shape, "float32")) for k in range(2)]
        for step in range(3):
            grads = [own["grads"](normal(2 + step + k, shape, "float32")) for k in range(2)]
            updater([0, 1], grads, weights)
        served(updater)
        ends.append([np.ascontiguousarray(each).tobytes() for each in weights])
    assert ends[0] == ends[1]


@pytest.mark.parametrize("given", [np.float16, np.float32, np.float64, float])
@pytest.mark.parametrize("shape", [(), (1,), (1, 1)], ids=str)
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_a_number_is_a_gradient_of_one_element(given, shape, dtype):
    weights = [np.ones(shape, dtype), np.ones(shape, dtype)]
    updaters = [optimizer.Updater(optimizer.Adam()) for _ in weights]
    grads = given(0.5), np.full(shape, 0.5)
    for way in (as_list, one_by_one) * 3:
        for updater, weight, grad in zip(updaters, weights, grads, strict=True):
            way(updater, ["w"], [grad], [weight])
    assert weights[0] == weights[1]
    served(updaters[0])


def test_the_weight_of_the_last_call_alone_is_kept_alive():
    updater = optimizer.Updater(optimizer.SGD(momentum=0.9))
    weights = [np.ones(3) for _ in range(4)]
    for weight in weights:
        updater(0, np.ones(3), weight)
    watches = [weakref.ref(weight) for weight in weights]
    gc.disable()
    try:
        del weights, weight
        assert [watch() is None for watch in watches] == [True, True, True, False]
        with pytest.raises(ValueError, match="shape"):
            updater(0, np.ones(2), np.ones(2))
        assert watches[-1]() is not None
    finally:
        gc.enable()


@pytest.mark.parametrize(
    "index", [np.int64(3), np.int32(3), np.uint8(3), b"3", np.str_("a")], ids=repr
)
def test_indices_of_other_types_are_those_of_python(index):
    updater, weight = optimizer.Updater(optimizer.SGD(learning_rate=1.0)), np.zeros(2)
    for _ in range(3):
        updater(index, np.ones(2), weight)
        updater([index], [np.ones(2)], [weight])
    key = index.decode() if isinstance(index, bytes) else index
    assert [*updater.states] == [*updater.optimizer._index_update_count] == [key]
    assert {*map(type, updater.states)} <= {int, str}
    np.testing.assert_array_equal(weight, [-6, -6])
    served(updater)


@pytest.mark.parametrize("size", [3, PARALLEL_FROM])
def test_states_may_be_assigned_by_another_thread(size):
    """Records are dropped while a call runs without the GIL."""
    updater, weights = optimizer.Updater(optimizer.SGD(momentum=0.5)), [np.ones(size) for _ in "ab"]
    ended = threading.Event()

    def assign():
        while not ended.wait(1e-5):
            updater.states = dict(updater.states)

    thread = threading.Thread(target=assign)
    updater([0, 1], [np.ones(size), np.ones(size)], weights)  # states that lack one forget counts
    thread.start()
    try:
        for _ in range(59):
            updater([0, 1], [np.ones(size), np.ones(size)], weights)
    finally:
        ended.set()
        thread.join()
    assert updater.optimizer._index_update_count == {0: 60, 1: 60}
    assert np.isfinite(weights).all()


def test_indices_that_a_schedule_spoils_are_checked_again():
    updater, weight, rows = optimizer.Updater(optimizer.SGD()), np.ones((9, 2)), np.array([1, 3])
    grad = np.ones((2, 2)), rows
    updater(0, grad, weight)

    def schedule(update):
        rows[1] = 9
        return 0.1

    updater.optimizer.lr_scheduler = schedule
    before = weight.copy()
    with pytest.raises(ValueError, match="index 0: indices must be at least 0 and below 9, got 9"):
        updater(0, grad, weight)
    np.testing.assert_array_equal(weight, before)
    assert updater.optimizer.num_update == updater.optimizer._index_update_count[0] == 1


@pytest.mark.slow
@pytest.mark.parametrize("name", ["sgd", "adam", "adagrad", "groupadagrad"])
def test_a_table_may_be_interleaved_with_its_state(name):
    """As one on disk; its rows need no Python, and other gradients of it are updated too."""
    ends = []
    for interleaved in (False, True):
        made = optimizer.create(name, learning_rate=0.1, lazy_update=True)
        updater, weight = optimizer.Updater(made), normal(0, (9, 4), "float32")
        updater(0, (weight[:0], []), weight)
        if interleaved:
            columns = iter(np.zeros((9, 4, 4), np.float32).swapaxes(0, 1))
            weight = copied(columns, weight)
            updater.states[0] = each(partial(copied, columns), updater.states[0])
        for step in range(5):
            updater(0, (normal(1 + step, (3, 4), "float32"), [8 - step, 0, 2]), weight[:])
        assert updater.info.slow.calls <= interleaved  # the first call with these states
        updater(0, normal(9, (9, 4), "float32"), weight)
        ends.append(everything(updater, [weight]))
    assert ends[0] == ends[1]


def copied(columns, array):
    """The same numbers in the next columns of a table."""
    target = next(columns)[:, : array.shape[1]]
    target[...] = array
    return target


SHAPES = [(3, 4), (5,), (3, 4), (2, 3, 2), (1,)]


@pytest.mark.parametrize("setting", [None, "clip_global_norm", "loss_scaler", "accumulate"])
def test_a_schedule_may_change_attributes_and_states(setting):
    ends = []
    for inside in (False, True):
        made = optimizer.SGD(momentum=0.5)
        updater, weight = fastopt.Updater(made, **settings_of(setting)), np.ones(3)

        def schedule(update, updater=updater, inside=inside):
            if inside:
                updater.states = dict(updater.states)
                updater.optimizer.wd = 0.1 * ((update - 1) // 2)
            return 0.1

        made.lr_scheduler = schedule
        for _ in range(6):
            if not inside:
                made.wd = 0.1 * (made.num_update // 2)
            updater(0, np.full(3, 5.0), weight)
        ends.append((weight.tobytes(), made.num_update))
    assert ends[0] == ends[1]


@pytest.mark.parametrize("way", [as_list, one_by_one])
def test_multipliers_of_parameters_are_read_in_every_call(way):
    parameters = {k: SimpleNamespace(lr_mult=1.0, wd_mult=1.0) for k in range(2)}
    updater = fastopt.Updater(optimizer.SGD(lr=1.0, param_dict=parameters))
    weights, total = [np.zeros(1), np.zeros(1)], 0.0
    for step in range(30):
        if step == 20:
            updater.optimizer.param_dict[0] = SimpleNamespace(wd_mult=1.0)
        updater.optimizer.param_dict[0].lr_mult = 1.0 + step
        total += 1.0 + step
        way(updater, [0, 1], [np.ones(1), np.ones(1)], weights)
    np.testing.assert_array_equal(weights, [[-total], [-30]])


def test_hyper_may_depend_on_the_count_of_each_tensor():
    class Slowing(optimizer.SGD):
        def hyper(self, t, lr, wd):
            return {"momentum": 0.0, "lr": lr / t}

    updater, weights = fastopt.Updater(Slowing(lr=1.0)), [np.zeros(1), np.zeros(1)]
    for _ in range(3):
        updater(0, np.ones(1), weights[0])
    for _ in range(2):
        updater([0, 1], [np.ones(1), np.ones(1)], weights)  # the counts differ
    np.testing.assert_allclose(weights, [[-sum(1 / t for t in range(1, 6))], [-1.5]], rtol=1e-15)
    updater(1, np.ones(1), weights[1])
    assert weights[1] == -(1 + 1 / 2 + 1 / 3)


def test_an_index_that_occurs_twice_is_measured_twice_and_accumulated_once():
    updater, weight = fastopt.Updater(optimizer.SGD(lr=1.0), clip_global_norm=1.0), np.zeros(1)
    for step in range(1, 4):
        updater([0, 0], [np.ones(1), np.ones(1)], [weight, weight])
        np.testing.assert_allclose(weight, -step * 2**0.5, rtol=1e-15)
    updater = fastopt.Updater(optimizer.SGD(lr=1.0), accumulate=2)
    for _ in range(3):
        updater(0, np.ones(1), weight)
        with pytest.raises(ValueError, match="takes an index once"):
            updater([0, 0], [np.ones(1), np.ones(1)], [weight, weight])


@pytest.mark.parametrize(
    "setting", [None, *slow("clip_global_norm", "loss_scaler", "clip_adaptive", "accumulate")]
)
@pytest.mark.parametrize("rate", [0.1, lambda update: 0.1 / update], ids=["rate", "schedule"])
def test_frozen_parameters_of_a_list_are_left_out(setting, rate):
    """Whatever their gradients, with the bits of lists without them, and without Python."""
    ends, order = [], [[4, 0, 1, 2, 3], [3, 1, 0]]
    for frozen in ([1, 4], []):
        groups = {**{f"^{k}$": {"frozen": True} for k in frozen}, "0": {"wd": 0.5}}
        updater = fastopt.Updater(
            optimizer.Prodigy(learning_rate=rate), groups=groups, **settings_of(setting)
        )
        weights = [normal(9, shape, "float32") for shape in SHAPES]
        for step in range(8):
            indices = [k for k in order[step % 2] if frozen or k not in (1, 4)]
            grads = [None if k == 4 else normal(step + k, SHAPES[k], "float32") for k in indices]
            updater(indices, grads, [weights[k] for k in indices])
        assert updater.info.slow.calls <= (setting == "accumulate")
        ends.append(everything(updater, weights)[:4])
    assert ends[0] == ends[1]


class ByIndex(optimizer.LARS):
    """Rules that differ between parameters, and a number that each one carries."""

    def rule_for(self, index):
        return super().rule_for("weight" if index % 2 else "bias")


@pytest.mark.parametrize("kind", [optimizer.LARS, ByIndex, optimizer.Nadam, optimizer.ASGD])
def test_many_parameters_may_come_at_once(kind, rng):
    """Numbers of parameters that move, as there are more of them, drop no record of the call."""
    together, alone = (fastopt.Updater(kind(learning_rate=0.1)) for _ in range(2))
    weights = [rng.normal(size=(2, 3)) for _ in range(40)]
    others = [weight.copy() for weight in weights]
    for count in (9, 5, 40, 40):
        indices = list(range(count))
        together(indices, [weight.copy() for weight in weights[:count]], weights[:count])
        for index in indices:
            alone(index, others[index].copy(), others[index])
    for one, other in zip(weights, others, strict=True):
        np.testing.assert_array_equal(one, other)


class OfWeight(optimizer.Adam):
    """States that are not zeros."""

    def create_state(self, index, weight):
        mean, var = super().create_state(index, weight)
        return mean, var + abs(weight)


def test_states_of_users_are_created_one_by_one():
    weights = [np.full((3, 4), k, np.float32) for k in range(4)]
    updater = optimizer.Updater(OfWeight(learning_rate=0.0))
    updater(list(range(4)), [np.zeros((3, 4), np.float32)] * 4, weights)
    for k in range(4):
        np.testing.assert_array_equal(updater.states[k][1], weights[k] * np.float32(0.999))


@pytest.mark.parametrize("case", CASES, ids=str)
def test_no_state_of_an_optimizer_that_starts_at_zero_is_anything_else(case):
    made = case.make()
    if made.starts_at_zero:
        weight = normal(0, case.shape, "float32")
        state = made.create_state_multi_precision(0, weight)
        assert not any(array.any() for array in leaves(state))


def test_loops_that_two_threads_look_up_at_once_are_the_same_array(monkeypatch):
    """Records have its address, so that it must stay."""
    both = Barrier(2)

    def compiled(loops):
        both.wait(10)
        return np.zeros(8, np.int64)

    monkeypatch.setattr(templates, "LOOPS", {})
    monkeypatch.setattr(templates, "_compiled", compiled)
    loops = templates.Loops(None, None, False, False)
    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(lambda _: loops.addresses, range(2))
    assert first is second is loops.addresses
