"""Headers of Python's and NumPy's objects, as compiled code reads them."""

import numpy as np
import pytest

from fastopt import optimizer
from fastopt._engine.records import blank_memory
from fastopt._engine.templates import TEMPLATES
from fastopt._kernels import cpu_calls, numpy_abi
from fastopt._kernels.numpy_abi import (
    C_ORDER,
    FITS,
    NO_GIL,
    TYPES,
    admit,
    guard,
    readable,
    unreadable,
    warn_of_layouts,
)
from helpers.cases import exhaustive
from helpers.headers import reheader
from helpers.tensor_lists import everything


class Call:
    """Weights and gradients of a call, with what its kernel compares them with."""

    def __init__(self, count=3):
        self.weights = [np.zeros(4) for _ in range(count)]
        self.grads = [np.ones(4) for _ in range(count)]
        self.indices = [*range(count - 1), "last"]
        self.prepare()

    def prepare(self):
        pairs = list(zip(self.weights, self.grads, strict=True))
        self.guards = np.stack([guard(pair, 1, C_ORDER) for pair in pairs])
        addresses = [[array.ctypes.data for array in pair] for pair in pairs]
        self.table = np.array(addresses, np.uint64)
        begins = self.table[:, 0]
        self.written = np.sort(np.stack([begins, begins + np.uint64(32)]), axis=1)
        self.ids = np.array([id(weight) for weight in self.weights], np.uint64)

    def admits(self, indices, grads, weights, kernel=None):
        objects = indices, grads, weights
        arguments = self.table, self.guards, self.written, self.ids, TYPES
        return int((kernel or cpu_calls.admit())(*arguments, id(objects)))


@pytest.fixture(params=["compiled", "python"])
def kernel(request):
    """The check as it is compiled, and in Python."""
    return cpu_calls.admit() if request.param == "compiled" else admit


def test_headers_can_be_read_here():
    assert readable()


@pytest.mark.parametrize("first", [list, tuple])
@pytest.mark.parametrize("second", [list, tuple])
def test_lists_and_tuples_fit(kernel, first, second):
    call = Call()
    arguments = first(call.indices), second(call.grads), first(call.weights)
    assert call.admits(*arguments, kernel) == FITS


def test_addresses_of_new_gradients_are_entered(kernel):
    call = Call()
    grads = [np.ones(4) for _ in call.grads]
    assert call.admits(call.indices, grads, call.weights, kernel) == FITS
    assert call.table[:, -1].tolist() == [grad.ctypes.data for grad in grads]


def wrong_gradients(call):
    """Arrays that do not fit in the place of the second gradient."""
    strided = np.ones((4, 2))[:, 0]
    unaligned = np.zeros(33, np.uint8)[1:].view(np.float64)
    own = type("Own", (np.ndarray,), {})
    return {
        "dtype": np.ones(4, np.int64),
        "byte order": np.ones(4, ">f8"),
        "smaller dtype": np.ones(4, np.float32),
        "length": np.ones(5),
        "dimensions": np.ones((2, 2)),
        "no dimension": np.array(1.0),
        "strides": strided,
        "alignment": unaligned,
        "subclass": np.ones(4).view(own),
        "scalar": np.float64(1),
        "None": None,
        "list": [1.0] * 4,
        "number": 1.0,
        "type": np.ndarray,
        "a weight": call.weights[0],
        "part of a weight": call.weights[2][:],
    }


@pytest.mark.parametrize("kind", wrong_gradients(Call()))
def test_a_gradient_that_does_not_fit(kernel, kind):
    call = Call()
    grads = list(call.grads)
    grads[1] = wrong_gradients(call)[kind]
    assert call.admits(call.indices, grads, call.weights, kernel) == -2
    assert call.admits(call.indices, call.grads, call.weights, kernel) == FITS


def test_a_gradient_that_reaches_into_a_weight(kernel):
    """Its first address is in front of the weight."""
    memory = np.zeros(40)
    call = Call(1)
    call.weights = [memory[8:12]]
    call.prepare()
    lists = ([memory[k : k + 4]] for k in range(3, 14))
    outcomes = [call.admits([0], grads, call.weights, kernel) for grads in lists]
    assert outcomes == [FITS] * 2 + [-1] * 7 + [FITS] * 2


@pytest.mark.parametrize("value", [True, 1.0, np.int64(1), b"a", None, np.zeros(1)])
def test_an_index_that_is_no_int_or_str(kernel, value):
    call = Call()
    call.indices[1] = value
    assert call.admits(call.indices, call.grads, call.weights, kernel) == -2


def test_lists_of_other_lengths_and_types(kernel):
    call = Call()
    fitting = call.indices, call.grads, call.weights

    class Lazy(list):
        """A list that might make its items as they are asked for."""

    for place in range(3):
        given = fitting[place]
        for wrong in (given[:-1], [*given, given[0]], [], (), Lazy(given), None, 3, "abc"):
            arguments = [*fitting]
            arguments[place] = wrong
            assert call.admits(*arguments, kernel) < 0
    assert call.admits(*fitting, kernel) == FITS


def test_a_weight_that_is_another_object(kernel):
    call = Call()
    weights = [*call.weights]
    weights[2] = weights[2].copy()
    assert call.admits(call.indices, call.grads, weights, kernel) == -3
    assert call.admits(call.indices, call.grads, call.weights[::-1], kernel) == -1


def test_a_weight_that_has_changed_in_place(kernel):
    call = Call()
    weight = call.weights[1]
    weight.flags.writeable = False
    assert call.admits(call.indices, call.grads, call.weights, kernel) == -2
    weight.flags.writeable = True
    reheader(weight, shape=(2, 2))
    assert call.admits(call.indices, call.grads, call.weights, kernel) == -2
    reheader(weight, shape=4)
    assert call.admits(call.indices, call.grads, call.weights, kernel) == FITS
    weight.resize(400_000, refcheck=False)  # moves
    assert call.admits(call.indices, call.grads, call.weights, kernel) == -2


SIZE = 70_000


def train(name, steps=4):
    updater = optimizer.Updater(optimizer.create(name, learning_rate=0.1))
    weights = [np.ones((3, 2)), np.ones((SIZE, 1), np.float32)]
    for step in range(steps):
        grads = [np.full_like(weight, 1 + step) for weight in weights]
        updater([0, "b"], grads, weights)
        updater(0, grads[0], weights[0])
        with pytest.raises(ValueError, match="share memory"):
            updater(0, weights[0], weights[0])
    return everything(updater, weights), updater._records.kept


@pytest.fixture
def asked_again():
    """Headers are compared again, now and after the test."""
    forget()
    yield
    forget()


def forget():
    """Forget what depends on whether headers are read."""
    for cached in (unreadable, warn_of_layouts, blank_memory):
        cached.cache_clear()
    TEMPLATES.clear()


def without_a_gil(monkeypatch):
    monkeypatch.setattr("sys._is_gil_enabled", lambda: False, raising=False)


def of_another_layout(monkeypatch):
    monkeypatch.setattr(numpy_abi, "_reads_arrays", lambda: False)


@pytest.mark.further
@pytest.mark.parametrize("change", [without_a_gil, of_another_layout])
@pytest.mark.parametrize("name", ["adam", *exhaustive("sgd", "lamb", "groupadagrad", "nadam")])
@pytest.mark.filterwarnings("ignore:the object layouts of")
def test_headers_that_python_writes_serve_where_those_of_objects_must_not_be_read(
    name, change, asked_again, monkeypatch
):
    expected, records = train(name)
    assert records
    forget()
    change(monkeypatch)
    bits, records = train(name)
    assert records
    assert bits == expected


def test_unknown_layouts_are_warned_of_once(asked_again, monkeypatch):
    of_another_layout(monkeypatch)
    with pytest.warns(UserWarning, match=f"Python .* with NumPy {np.__version__} are not known"):
        optimizer.Updater("sgd")
    optimizer.Updater("sgd")  # warnings are errors in tests


def test_a_missing_gil_is_no_reason_to_warn(asked_again, monkeypatch):
    without_a_gil(monkeypatch)
    optimizer.Updater("sgd")
    assert unreadable() == NO_GIL


def test_an_error_while_headers_are_read_counts_as_a_difference(asked_again, monkeypatch):
    def fail():
        raise OSError

    monkeypatch.setattr(numpy_abi, "_reads_sequences", fail)
    assert not readable()
