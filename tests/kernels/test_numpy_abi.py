"""Headers of Python's and NumPy's objects, as compiled code reads them."""

import numpy as np
import pytest

from fastopt import optimizer
from fastopt._engine.records import blank_memory
from fastopt._engine.templates import TEMPLATES
from fastopt._kernels import numpy_abi
from fastopt._kernels.numpy_abi import (
    NO_GIL,
    readable,
    unreadable,
    warn_of_layouts,
)
from helpers.cases import exhaustive
from helpers.tensor_lists import everything
from helpers.written_headers import in_compiled_code

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
    return everything(updater, weights), updater.records.known()


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


@pytest.mark.slow
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


@in_compiled_code
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
