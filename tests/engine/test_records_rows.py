"""Records: row-sparse gradients in any form have the bits of updates one by one."""

from concurrent.futures import ThreadPoolExecutor
from functools import partial
from threading import Barrier

import ml_dtypes
import numba
import numpy as np
import pytest
import scipy.sparse

import fastopt
from fastopt import optimizer
from fastopt._engine import templates
from fastopt._kernels.chunks import PARALLEL_FROM
from fastopt._kernels.numpy_abi import readable
from fastopt._kernels.threads import use_threads
from fastopt.amp import LossScaler
from fastopt.lr_scheduler import FactorScheduler
from fastopt.sparse import RowSparse
from helpers.cases import FIRST, LIGHT, OF_MATRICES, OF_STEPS, exhaustive, named
from helpers.tensor_lists import everything, normal
from helpers.written_headers import read_in_python

pytestmark = [
    pytest.mark.skipif(not readable(), reason="records are read by compiled code"),
    pytest.mark.usefixtures("unrecorded"),
]

UNSERVED = {"lbsgd", "test", *OF_MATRICES, *OF_STEPS}
NAMES = named([name for name in sorted(FIRST) if name not in UNSERVED], *LIGHT, "groupadagrad")


def rows_of(seed, height, count=6):
    """Row indices, some of them repeated."""
    return np.random.default_rng(seed).integers(0, height, count)


def wide(array):
    """The same numbers, not next to each other."""
    return np.repeat(array, 2, axis=-1)[..., ::2]


def backwards(array):
    return np.ascontiguousarray(array[::-1])[::-1]


def by_batch(values, rows, shape):
    """Two sequences of three rows."""
    return values.reshape(2, 3, *shape[1:]), rows.reshape(2, 3)


FORMS = {
    "RowSparse": RowSparse,
    "pair": lambda values, rows, shape: (values, rows),
    "list": lambda values, rows, shape: [values, rows],
    "list of ints": lambda values, rows, shape: (values, rows.tolist()),
    "list of NumPy integers": lambda values, rows, shape: (values, list(rows)),
    "batch": by_batch,
    "batch in Fortran order": lambda *of: tuple(map(np.asfortranarray, by_batch(*of))),
    "Fortran order": lambda values, rows, shape: (np.asfortranarray(values), rows),
    "strided": lambda values, rows, shape: (wide(values), wide(rows)),
    "backwards": lambda values, rows, shape: (backwards(values), backwards(rows)),
    "float64": lambda values, rows, shape: (values.astype(np.float64), rows),
    "read-only": lambda values, rows, shape: (np.broadcast_to(values, values.shape), rows),
}
FORMS |= {
    f"indices of {dtype}": lambda values, rows, shape, dtype=dtype: (values, rows.astype(dtype))
    for dtype in ("b", "B", "h", "H", "i", "I", "l", "L", "q", "Q")
}


def outcome(make, shape, form, on_records, steps=4, single=True):
    """All that steps with gradients of some form change, and the updater."""
    updater, weight = optimizer.Updater(make()), normal(0, shape, "float32")
    updater = updater if on_records else read_in_python(updater)
    for step in range(steps):
        rows = rows_of(step, shape[0])
        if step == 2:
            rows = np.sort(rows)
        if step == 3:  # each of them once, in any order
            rows = np.random.default_rng(step).permutation(shape[0])[:6]
        values = normal(step, (len(rows), *shape[1:]), "float32")
        grad = FORMS[form](values, rows, shape)
        updater(*((0, grad, weight) if single else ([0], [grad], (weight,))))
    return everything(updater, [weight]), updater


def served(updater):
    """Assert that records served all calls."""
    assert not hasattr(updater.parameters, "unrecorded")
    assert updater.records.slots


@pytest.mark.further
@pytest.mark.parametrize(
    ("shape", "lazy", "single"),
    [((9,), True, True), ((9, 4), True, False), ((9, 4), False, True), ((9, 2, 3), True, True)],
    ids=str,
)
@pytest.mark.parametrize("form", FORMS)
def test_any_form_of_a_gradient_has_the_bits_of_single_updates(form, shape, lazy, single):
    make = partial(optimizer.Adam, lazy_update=lazy, wd=0.01)
    expected, _ = outcome(make, shape, "RowSparse", False)
    found, updater = outcome(make, shape, form, True, single=single)
    assert found == expected
    served(updater)


@pytest.mark.parametrize("kind", ["csr_array", "coo_matrix"])
def test_arrays_of_scipy_have_records(kind):
    """Their rows with stored entries become a RowSparse in each call."""
    ends = []
    for on_records in (True, False):
        updater, weight = optimizer.Updater(optimizer.Adam()), np.ones((9, 4), np.float32)
        updater = updater if on_records else read_in_python(updater)
        for step in range(3):
            dense = np.zeros((9, 4), np.float32)
            dense[rows_of(step, 9)] = step + 1.0
            updater(0, getattr(scipy.sparse, kind)(dense), weight)
        ends.append(everything(updater, [weight]))
    assert ends[0] == ends[1]


@pytest.mark.further
@pytest.mark.parametrize("lazy", [True, False], ids=["lazy", "standard"])
@pytest.mark.parametrize("name", NAMES)
def test_every_optimizer_has_the_bits_of_single_updates(name, lazy):
    make = partial(FIRST[name].make, wd=FIRST[name].wd, lazy_update=lazy)
    ends = [outcome(make, (9, 5), "pair", on_records) for on_records in (True, False)]
    assert ends[0][0] == ends[1][0]
    served(ends[0][1])


def scheduled():
    return FactorScheduler(step=2, factor=0.5, base_lr=0.1)


SETTINGS = {
    "plain": dict,
    "clip": lambda: {"clip_global_norm": 0.5},
    "scaler and clip": lambda: {"loss_scaler": LossScaler(init_scale=8.0), "clip_global_norm": 2.0},
    "groups": lambda: {"groups": {"^[03]$": {"wd": 0.5, "lr": 0.02}, "4": {"lazy_update": True}}},
    "average": lambda: {"average": fastopt.EMA(decay=0.5)},
    "average of samples": lambda: {"average": fastopt.SWA(start=3, every=2)},
    "average that is followed": lambda: {"average": fastopt.Lookahead(k=2)},
    "accumulate": lambda: {"accumulate": 2},
    "clip_adaptive": lambda: {"clip_adaptive": 0.1},
    "schedule of a group": lambda: {"groups": {"^[03]$": {"lr_scheduler": scheduled()}}},
}
SHAPES = [(7, 3), (20,), (5, 3), (4, 2, 3), (7, 3)]


def story(make, settings, on_records, size=1, dtype="float32", watch=None):
    """Steps of several tables and dense tensors, in lists and alone."""
    updater = fastopt.Updater(make(), **settings())
    updater = updater if on_records else read_in_python(updater)
    shapes = [(size * shape[0], *shape[1:]) for shape in SHAPES]
    weights = [normal(9 + k, shape, dtype) for k, shape in enumerate(shapes)]
    for epoch in range(4):
        if epoch == 2 and watch is not None:
            watch()
        for step, indices in enumerate([[0, 1, 2, 3, 4], [3, 1], [4, 2], [0], [1]]):
            grads = []
            for k in indices:
                rows = rows_of(epoch + step + k, shapes[k][0], 6 * size)
                values = normal(epoch + step + k, (len(rows), *shapes[k][1:]), dtype)
                grad = (values, rows) if step % 2 else RowSparse(values, rows, shapes[k])
                grads.append(normal(step, shapes[k], dtype) if k == 2 else grad)
            if len(indices) == 1:
                updater(indices[0], grads[0], weights[indices[0]])
            else:
                updater(indices, grads, [weights[k] for k in indices])
    averages = {index: array.tobytes() for index, array in updater.averages.items()}
    return (everything(updater, weights), averages), updater


@pytest.mark.further
@pytest.mark.parametrize("setting", [each for each in SETTINGS if each != "accumulate"])
def test_no_call_needs_python_twice(setting, monkeypatch):
    def watch():
        def refused(*arguments):
            raise AssertionError("a call was checked in Python again")

        monkeypatch.setattr(fastopt.Updater, "_update", refused)

    story(optimizer.Adam, SETTINGS[setting], True, watch=watch)


@pytest.mark.further
@pytest.mark.parametrize("how", ["catch_up", "dense"])
@pytest.mark.parametrize("name", ["adamw", *exhaustive("adagrad", "lion", "signum")])
@pytest.mark.parametrize("shape", [(9, 4), (9,), (PARALLEL_FROM // 8, 9)], ids=str)
@pytest.mark.parametrize("schedule", [lambda: None, scheduled], ids=["rate", "schedule"])
@pytest.mark.parametrize("more_of", [None, 0, 1], ids=["", "first more often", "last more often"])
def test_deferred_decay_has_the_bits_of_single_updates(more_of, schedule, shape, name, how):
    """Also of dense gradients, which have all rows, after a flush, and with unequal counts."""
    more = {"momentum": 0.0} if name == "signum" else {}
    ends = []
    for on_records in (True, False):
        made = optimizer.create(name, learning_rate=0.1, wd=0.3, sparse_decay=how, **more)
        made.lr_scheduler = schedule()
        updater, weights = optimizer.Updater(made), [normal(k, shape, "float32") for k in range(2)]
        updater = updater if on_records else read_in_python(updater)
        for step in range(6):
            rows = rows_of(step, shape[0], shape[0] // 2)
            grads = [(normal(k, (len(rows), *shape[1:]), "float32"), rows) for k in range(2)]
            if step % 3 == 1:
                grads[1] = normal(step, shape, "float64")
            if step == 2 and more_of is not None:
                updater(more_of, grads[more_of], weights[more_of])
            if step % 2:
                updater([0, 1], grads, [each[:] for each in weights])
            else:
                updater(0, grads[0], weights[0])
                updater(1, grads[1], weights[1])
        before = everything(updater, weights)
        for index, weight in enumerate(weights):
            updater.flush(index, weight)
        ends.append((before, everything(updater, weights)))
        if on_records:
            served(updater)
    assert ends[0] == ends[1]


def test_a_decay_that_takes_all_changes_nothing():
    made = optimizer.AdaGrad(learning_rate=0.1, wd=0.1, sparse_decay="catch_up")
    updater, weights = optimizer.Updater(made), [np.ones((9, 4)), np.ones((9, 4))]
    grads = [(np.ones((2, 4)), [1, 8])] * 2
    updater([0, 1], grads, weights)
    made.learning_rate, before = 10.0, everything(updater, weights)[:2]
    kept = {index: (rows.copy(), total) for index, (rows, total) in made.row_decay.items()}
    with pytest.raises(ValueError, match="needs rate times decay below 1, got 1"):
        updater([0, 1], grads, weights)
    assert everything(updater, weights)[:2] == before
    np.testing.assert_equal(made.row_decay, kept)
    assert made.num_update == made._index_update_count[0] == made._index_update_count[1] == 1


PRECISIONS = {
    "masters of float16": ("float16", {"multi_precision": True}),
    "masters of bfloat16": ("bfloat16", {"multi_precision": True}),
    "split masters": ("bfloat16", {"multi_precision": True, "master": "split"}),
    "stochastic rounding": ("bfloat16", {"rounding": "stochastic", "seed": 3}),
    "bfloat16 state": ("float32", {"state_dtype": "bfloat16", "seed": 3}),
    "8-bit state": ("float32", {"state_dtype": "int8"}),
    "float64": ("float64", {}),
}


@pytest.mark.further
@pytest.mark.parametrize("given", ["own", *exhaustive("float32")])
@pytest.mark.parametrize("lazy", [True, *exhaustive(False)], ids=["lazy", "standard"])
@pytest.mark.parametrize("precision", PRECISIONS)
def test_precisions_have_the_bits_of_single_updates(precision, lazy, given):
    dtype, arguments = PRECISIONS[precision]
    kind = np.dtype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)
    ends = []
    for on_records in (True, False):
        updater = optimizer.Updater(optimizer.Adam(lazy_update=lazy, **arguments))
        updater = updater if on_records else read_in_python(updater)
        weight = normal(0, (9, 300), dtype)
        for step in range(4):
            rows = rows_of(step, 9)
            values = normal(step, (len(rows), 300), "float32").astype(kind)
            grad = values if given == "own" or step == 1 else values.astype(np.float32)
            updater(0, (grad, rows), weight)
        ends.append(everything(updater, [weight]))
    assert ends[0] == ends[1]


@pytest.mark.parametrize("clip", [None, 0.5])
@pytest.mark.parametrize("lazy", [True, False], ids=["lazy", "standard"])
def test_any_number_of_threads_gives_the_same_bits(lazy, clip):
    """Several tables in one call, large enough to be shared among threads."""
    height, count = (PARALLEL_FROM // 16, 4000) if lazy else (PARALLEL_FROM // 4, 50)
    ends = []
    for threads in range(1, min(numba.config.NUMBA_NUM_THREADS, 3) + 1):
        updater = fastopt.Updater(optimizer.Adam(lazy_update=lazy), clip_global_norm=clip)
        weights = [normal(k, (height, 8), "float32") for k in range(3)]
        with use_threads(threads):
            for step in range(2):
                grads = []
                for k in range(3):
                    rows = rows_of(step + k, height, count)
                    rows[: count // 2 * (k == 1)] = 5  # a row that is repeated often
                    grads.append((normal(k, (count, 8), "float32"), rows))
                updater([0, 1, 2], grads, weights)
        served(updater)
        ends.append(everything(updater, weights))
    assert all(end == ends[0] for end in ends)


BAD = {
    "too large": (lambda rows: rows + 9, "at least 0 and below 9, got"),
    "negative": (lambda rows: rows - 9, "at least 0 and below 9, got -"),
    "beyond int64": (lambda rows: rows.astype(np.uint64) + np.uint64(2**63), "got 92233720368547"),
    "int of Python": (lambda rows: [2**70, *rows[1:]], "."),
}


@pytest.mark.parametrize("bad", BAD)
def test_a_row_out_of_range_in_the_last_table_changes_nothing(bad):
    spoil, words = BAD[bad]
    updater = optimizer.Updater(optimizer.Adam())
    weights = [np.ones((9, 4)) for _ in range(3)]
    good = np.ones((2, 4)), np.array([1, 8])
    for _ in range(2):
        updater([0, 1, 2], [good] * 3, weights)
    before = everything(updater, weights)
    with pytest.raises((ValueError, TypeError, OverflowError), match=words):
        updater([0, 1, 2], [good, good, (good[0], spoil(good[1]))], weights)
    assert everything(updater, weights) == before
    updater([0, 1, 2], [good] * 3, weights)
    served(updater)


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


@pytest.mark.further
def test_a_table_may_have_dense_gradients_first_or_later():
    ends = []
    for on_records in (True, False):
        updater, weights = optimizer.Updater(optimizer.Adam()), [np.ones((9, 4)), np.ones((9, 4))]
        updater = updater if on_records else read_in_python(updater)
        for step in range(6):
            dense, rows = normal(step, (9, 4), "float64"), (np.ones((2, 4)), [step, 1])
            grads = [dense, rows] if step % 2 else [rows, dense]
            updater(["a", "b"], grads, weights)
            updater("a", rows, weights[0])
        ends.append(everything(updater, weights))
    assert ends[0] == ends[1]


@pytest.mark.parametrize("size", [6, PARALLEL_FROM])
def test_an_index_may_come_twice_and_values_may_be_another_weight(size):
    ends = []
    for way in ("list", "single"):
        updater = optimizer.Updater(optimizer.SGD(momentum=0.5, lazy_update=True))
        first, second = normal(0, (size, 2), "float32"), normal(1, (4, 2), "float32")
        rows = np.array([3, 1, 3, 0])
        for _ in range(3):
            calls = [(0, (second, rows), first), (1, first[:4], second), (0, (second, rows), first)]
            if way == "list":
                updater(*map(list, zip(*calls, strict=True)))
            else:
                for call in calls:
                    updater(*call)
        served(updater)
        ends.append((first.tobytes(), second.tobytes()))
    assert ends[0] == ends[1]


def test_a_skipped_step_names_the_table():
    updater = fastopt.Updater(
        optimizer.Adam(param_idx2name={1: "words"}), loss_scaler=LossScaler(init_scale=4.0)
    )
    weights, good = [np.ones((5, 2)), np.ones((5, 2))], (np.ones((1, 2)), [2])
    updater([0, 1], [good, good], weights)
    before = everything(updater, weights)[:3]
    updater([0, 1], [good, (np.full((1, 2), np.inf), [2])], weights)
    assert updater.info.skipped
    assert updater.info.non_finite == ("words",)
    assert everything(updater, weights)[:3] == before
    served(updater)


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
