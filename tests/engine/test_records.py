"""Records: any form of a call runs in compiled code, with the bits of the plain form."""

import gc
import threading
import weakref
from functools import partial

import numpy as np
import pytest

from fastopt import optimizer
from fastopt._kernels.chunks import PARALLEL_FROM
from fastopt._kernels.record_words import AXES
from helpers.plans import IN_PYTHON, LAYOUTS, each
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
    for way in (as_list, one_by_one) * 3:
        for updater, weight, of in zip(
            updaters, weights, (given, partial(np.full, shape)), strict=True
        ):
            way(updater, ["w"], [of(0.5)], [weight])
    assert weights[0] == weights[1]
    served(updaters[0])


def test_the_weight_of_the_last_call_alone_is_kept_alive():
    updater, weights = (
        optimizer.Updater(optimizer.SGD(momentum=0.9)),
        [np.ones(3) for _ in range(4)],
    )
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
def test_rows_of_a_table_that_is_interleaved_with_its_state_have_records(name, unrecorded):
    """As a table on disk is; other gradients of it are updated too."""
    ends = []
    for interleaved in (False, True):
        made = optimizer.create(name, learning_rate=0.1, lazy_update=True)
        updater, weight = optimizer.Updater(made), normal(0, (9, 4), "float32")
        updater(0, (weight[:0], []), weight)
        if interleaved:
            columns = iter(np.zeros((9, 4, 4), np.float32).swapaxes(0, 1))
            weight, state = (
                each(partial(copied, columns), part) for part in (weight, updater.states[0])
            )
            updater.states[0] = state
        for step in range(5):
            values, rows = normal(1 + step, (3, 4), "float32"), [8 - step, 0, 2]
            updater(0, (values, rows), weight[:])
        assert not unrecorded
        updater(0, normal(9, (9, 4), "float32"), weight)
        assert bool(unrecorded) == (interleaved and updater.states[0] is not None)
        ends.append(everything(updater, [weight]))
        unrecorded.clear()
    assert ends[0] == ends[1]


def copied(columns, array):
    """The same numbers in the next columns of a table."""
    target = next(columns)[:, : array.shape[1]]
    target[...] = array
    return target
