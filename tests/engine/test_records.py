"""Records: any form of a call runs in compiled code, with the bits of the plain form."""

import gc
import threading
import weakref

import numpy as np
import pytest
import scipy.sparse

from fastopt import optimizer
from fastopt._engine.validate import leaves
from fastopt._kernels.chunks import PARALLEL_FROM
from fastopt._kernels.record_words import AXES
from helpers.plans import IN_PYTHON, LAYOUTS
from helpers.tensor_lists import everything, normal
from helpers.written_headers import in_compiled_code, read_in_python

pytestmark = [
    in_compiled_code,
    pytest.mark.usefixtures("unrecorded"),
]


FORMS = {name: form for name, form in LAYOUTS.items() if name not in IN_PYTHON}
FORMS["last axes swapped"] = lambda array: (
    array if array.ndim < 2 else np.array(array.swapaxes(-1, -2), order="C").swapaxes(-1, -2)
)


def served(updater):
    """Assert that records served all calls."""
    assert not hasattr(updater.parameters, "unrecorded")
    assert updater.records.slots


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
        assert updater.info.slow.calls == 0
        ends.append([np.ascontiguousarray(each).tobytes() for each in weights])
    assert ends[0] == ends[1]


@pytest.mark.parametrize("given", [np.float16, np.float32, np.float64, float])
@pytest.mark.parametrize("shape", [(), (1,), (1, 1)], ids=str)
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_a_number_is_a_gradient_of_one_element(given, shape, dtype):
    weights = [np.ones(shape, dtype), np.ones(shape, dtype)]
    updaters = [optimizer.Updater(optimizer.Adam()) for _ in weights]
    for _ in range(3):
        updaters[0](["w"], [given(0.5)], [weights[0]])
        updaters[0]("w", given(0.25), weights[0])
        updaters[1]("w", np.full(shape, 0.5, dtype), weights[1])
        updaters[1]("w", np.full(shape, 0.25, dtype), weights[1])
    assert weights[0] == weights[1]
    served(updaters[0])


@pytest.mark.parametrize("value", [1, True, 1j, np.int32(1), "1"], ids=repr)
def test_numbers_that_are_not_real_floats_are_refused(value):
    updater, weight = optimizer.Updater(optimizer.SGD()), np.ones(1)
    for _ in range(3):
        updater(0, 0.5, weight)
        before = weight.copy()
        with pytest.raises(TypeError, match="index 0: gradient must"):
            updater(0, value, weight)
        assert weight == before
        assert updater.optimizer.num_update == updater.optimizer._index_update_count[0]


def test_the_weight_of_the_last_call_alone_is_kept_alive():
    updater = optimizer.Updater(optimizer.SGD(momentum=0.9))
    weights = [np.ones(3) for _ in range(4)]
    for weight in weights:
        updater(0, np.ones(3), weight)
    watches = [weakref.ref(weight) for weight in weights]
    last = weights[-1]
    gc.disable()
    try:
        del weights, weight
        assert [watch() is None for watch in watches] == [True, True, True, False]
        del last
        assert watches[-1]() is not None
        with pytest.raises(ValueError, match="shape"):
            updater(0, np.ones(2), np.ones(2))
        assert watches[-1]() is not None
    finally:
        gc.enable()


def test_a_gradient_between_the_elements_of_its_weight_is_read():
    memory = np.zeros((6, 2))
    weight, grad = memory[:, 0], memory[:, 1]
    grad[...] = 1
    updater = optimizer.Updater(optimizer.SGD(learning_rate=0.5))
    for _ in range(4):
        updater(0, grad, weight)
    np.testing.assert_array_equal(weight, np.full(6, -2.0))
    np.testing.assert_array_equal(grad, np.ones(6))


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
    assert updater.info.slow.calls == 0
    served(updater)


def test_a_failed_call_leaves_no_rate_behind():
    rate = [1.0]
    updater, weight = optimizer.Updater(optimizer.SGD(lr_scheduler=lambda _: rate[0])), np.zeros(1)
    updater(0, np.ones(1), weight)
    with pytest.raises(TypeError, match="index must be an int"):
        updater(0.0, np.ones(1), weight)
    rate[0] = 3.0
    updater([0], [np.ones(1)], [weight])
    np.testing.assert_array_equal(weight, [-4.0])


@pytest.mark.parametrize("listed", [False, True])
def test_a_failed_call_counts_nothing_if_its_schedule_adds_counts(listed):
    made = optimizer.SGD(momentum=0.9)
    updater, weight, fails = optimizer.Updater(made), np.zeros(1), []

    def schedule(update):
        if fails:
            made._index_update_count.update(dict.fromkeys(range(1, 100), 0))
            raise RuntimeError("no rate")
        return 1.0

    made.lr_scheduler = schedule
    updater([0], [np.ones(1)], [weight])
    updater(0, np.ones(1), weight)
    fails.append(True)
    with pytest.raises(RuntimeError, match="no rate"):
        updater(*(([0], [np.ones(1)], [weight]) if listed else (0, np.ones(1), weight)))
    assert (made.num_update, made._index_update_count[0]) == (2, 2)


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


@pytest.mark.parametrize("kind", ["csr_array", "coo_matrix"])
def test_arrays_of_scipy_have_records(kind):
    """Their rows with stored entries become a RowSparse in each call."""
    ends = []
    for on_records in (True, False):
        updater, weight = optimizer.Updater(optimizer.Adam()), np.ones((9, 4), np.float32)
        updater = updater if on_records else read_in_python(updater)
        for step in range(3):
            dense = np.zeros((9, 4), np.float32)
            dense[[step, 3, step + 4]] = step + 1.0
            updater(0, getattr(scipy.sparse, kind)(dense), weight)
        ends.append(everything(updater, [weight]))
    assert ends[0] == ends[1]


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
def test_rows_of_a_table_that_is_interleaved_with_its_state_have_records(name, unrecorded):
    """As a table on disk is; other gradients of it are updated too."""
    ends = []
    for interleaved in (False, True):
        made = optimizer.create(name, learning_rate=0.1, lazy_update=True)
        updater, weight = optimizer.Updater(made), normal(0, (9, 4), "float32")
        state, memory = made.create_state(0, weight), np.zeros((9, 16), np.float32)
        if interleaved:
            columns = iter((memory[:, :4], memory[:, 4:8], memory[:, 8:12]))
            weight, *parts = [copied(array, columns) for array in (weight, *leaves(state))]
            state = (tuple(parts) if isinstance(state, tuple) else parts[0]) if parts else None
        updater.states[0], updater.states_synced[0] = state, True
        for step in range(5):
            values, rows = normal(1 + step, (3, 4), "float32"), [8 - step, 0, 2]
            updater(0, (values, rows), weight[:])
        assert updater.records.record_of(0).layout.pitched == interleaved
        assert not unrecorded
        updater(0, normal(9, (9, 4), "float32"), weight)
        assert bool(unrecorded) == (interleaved and state is not None)
        ends.append([np.ascontiguousarray(array).tobytes() for array in (weight, *leaves(state))])
        unrecorded.clear()
    assert ends[0] == ends[1]


def copied(array, columns):
    """The same numbers in some columns of a table."""
    target = next(columns)[:, : array.shape[1]]
    target[...] = array
    return target
