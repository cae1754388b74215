"""Slow calls: what needed Python is counted, with index and reason, and reported once."""

import logging

import numpy as np
import pytest
from scipy import sparse

import fastopt
from fastopt import RowSparse, optimizer
from fastopt.amp import SlowCalls
from helpers.plans import Labelled
from helpers.users import InNumPy
from helpers.written_headers import in_compiled_code

pytestmark = in_compiled_code


def interleaved():
    both = np.ones((4, 2))
    return both[:, 0], both[:, 1]


TABLE = np.ones((3, 2))
CALLS = {
    "its gradient has dtype >f8": lambda: (np.ones(4, ">f8"), np.ones(4)),
    "interleaved in memory": interleaved,
    "its gradient has dtype >i8": lambda: ((np.ones((1, 2)), np.array([1], ">i8")), TABLE.copy()),
    "its weight is not in C order": lambda: ((np.ones((1, 2)), [1]), np.ones((3, 2), order="F")),
}
FAST = {
    "strided": lambda: (np.ones(8)[::2], np.ones(8)[::2]),
    "scalar": lambda: (np.float32(1), np.ones(())),
    "float64 for float32": lambda: (np.ones(4), np.ones(4, np.float32)),
    "rows": lambda: ((np.ones((1, 2)), [1]), np.ones((3, 2))),
    "rows of int32": lambda: ((np.ones((1, 2)), np.array([1], "i4")), np.ones((3, 2))),
    "RowSparse": lambda: (RowSparse(np.ones((2, 2)), np.array([1, 1]), (3, 2)), np.ones((3, 2))),
    "subclasses": lambda: (np.ones(4).view(Labelled), np.ones(4).view(Labelled)),
    "rows of scipy": lambda: (sparse.csr_array(np.eye(3)), np.ones((3, 3))),
    "rows of a subclass": lambda: ((np.ones((1, 2)).view(Labelled), [1]), np.ones((3, 2))),
}


def after(calls, count):
    """An updater after steps with such a call between others."""
    updater, plain = fastopt.Updater(optimizer.Adam()), np.ones(3)
    for _ in range(count):
        grad, weight = calls()
        updater("good", plain, plain.copy())
        updater(["x", "y"], [plain, grad], [plain.copy(), weight])
    return updater


@pytest.mark.parametrize("reason", CALLS)
def test_slow_calls_are_counted_with_index_and_reason(reason):
    slow = after(CALLS[reason], 15).info.slow
    assert slow.calls in (14, 15)  # of which the first may be a first call
    assert len(slow.first) == 10
    for index, why in slow.first[1:]:
        assert index == "y"
        assert reason in why


@pytest.mark.parametrize("form", FAST)
def test_calls_in_compiled_code_are_not_slow(form):
    updater, call = after(FAST[form], 5), FAST[form]()
    for _ in range(5):
        updater("w", *call)
    assert updater.info.slow == SlowCalls()


@pytest.mark.slow
def test_sums_of_rows_need_python_and_updates_in_numpy_are_not_slow():
    for made, slow in ((optimizer.Adam(), True), (InNumPy(), False)):
        updater, weight = fastopt.Updater(made, accumulate=3 if slow else 1), np.ones((3, 2))
        for _ in range(6):
            updater("w", (np.ones((1, 2)), [1]), weight)
        assert (updater.info.slow.calls >= 3) == slow
        assert all(
            "row-sparse" in why and "accumulate" in why for _, why in updater.info.slow.first
        )


@pytest.mark.parametrize("fast", [0, 3])
def test_ten_slow_calls_in_a_row_are_reported_once(fast, caplog):
    """Those between fast ones are not, and a call that fails does not count."""
    updater, weight = fastopt.Updater(optimizer.Adam()), np.ones(3)
    with caplog.at_level(logging.WARNING, "fastopt"):
        for step in range(40):
            updater("w", np.ones(3, ">f8"), weight)
            for _ in range(fast):
                updater("w", np.ones(3), weight)
            assert len(caplog.records) == (step >= 10 and not fast)
    words = "10 calls of an updater in a row needed Python, the last one for index 'w'"
    assert (words in caplog.text) == (not fast)
    slow = updater.info.slow
    assert slow.calls in (39, 40)
    with pytest.raises(ValueError, match="must have shape"):
        updater("w", np.ones(2), weight)
    assert updater.info.slow == slow
