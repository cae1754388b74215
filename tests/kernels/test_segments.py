"""Row-sparse gradients of known arrays are checked, sorted and entered by one kernel."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastopt import optimizer
from fastopt._engine.records import Records
from fastopt.sparse import RowSparse
from helpers.frames import LIST, frames
from helpers.written_headers import in_compiled_code

HEIGHT, WIDTH = 50, 3


def updater():
    return optimizer.get_updater(optimizer.Adam(lr=0.1))


def gradient(indices, seed=0):
    values = np.random.default_rng(seed).normal(size=(len(indices), WIDTH))
    return values, np.array(indices, np.int64)


@given(batches=st.lists(st.lists(st.integers(0, HEIGHT - 1), max_size=40), min_size=3, max_size=6))
def test_any_order_has_the_bits_of_sorted_rows(batches):
    """Batches grow and shrink, are empty, ascend or not, and repeat rows."""
    one, other = updater(), updater()
    weight, twin = np.zeros((HEIGHT, WIDTH)), np.zeros((HEIGHT, WIDTH))
    for k, indices in enumerate(batches):
        grad = gradient(indices, k)
        one("table", grad if k % 2 else RowSparse(*grad, weight.shape), weight)
        other("table", RowSparse(*grad, weight.shape).coalesce(), twin)
        np.testing.assert_array_equal(weight, twin)


@in_compiled_code
@pytest.mark.parametrize("names", [["table"], ["table", "bias"]], ids=str)
@pytest.mark.parametrize("make", [lambda *grad: grad[:2], RowSparse], ids=["tuple", "RowSparse"])
def test_warm_calls_prepare_nothing(names, make, monkeypatch):
    made, weights = updater(), [np.zeros((HEIGHT, WIDTH)), np.zeros(4)][: len(names)]

    def call(indices, dtype=np.int64):
        values, rows = gradient(indices)
        grads = [make(values, rows.astype(dtype), (HEIGHT, WIDTH)), np.ones(4)]
        entered.append(frames(lambda: made(names, grads[: len(names)], weights)))

    entered, prepared = [], []
    for _ in range(3):
        call([7, 3, 7, 12, 0])
    monkeypatch.setattr(Records, "take", lambda *args: prepared.append(args))
    for indices in ([9, 2, 2], [1, 2, 3], [], [4, 4, 4, 4]):
        call(indices)
    assert len(entered[-1]) <= LIST, entered
    call([5, 1, 5], np.int32)
    assert not prepared
