"""Arrays of any form have the bits of those that kernels read as they lie, or nothing changes."""

from functools import partial

import numpy as np
import pytest

import fastopt
from fastopt import optimizer
from fastopt._engine.validate import leaves
from fastopt.amp import LossScaler
from fastopt.sparse import RowSparse
from helpers.cases import FIRST, exhaustive
from helpers.tensor_lists import everything, laid, normal

pytestmark = pytest.mark.further

SHAPE = (6, 4)


def unaligned(array):
    """The same numbers at an odd address."""
    memory = np.zeros(array.nbytes + 1, np.uint8)[1:]
    moved = memory.view(array.dtype).reshape(array.shape)
    moved[...] = array
    return moved


def each(form, state):
    """A state whose arrays have another form."""
    if isinstance(state, tuple):
        return tuple(each(form, part) for part in state)
    return form(state) if state is not None and state.ndim else state


STATES = {
    "strided": partial(each, partial(laid, layout="strided")),
    "in Fortran order": partial(each, partial(laid, layout="fortran")),
    "in a list": list,
    "unaligned": partial(each, unaligned),
}


def in_fields(array):
    """The same numbers as a field of records of 6 or 9 bytes, so that strides are odd."""
    records = np.zeros(array.shape, [("x", array.dtype), ("y", "u1")])
    records["x"] = array
    return records["x"]


class Labelled(np.ndarray):
    """An array of a class of its own."""


WEIGHTS = {
    "unaligned": unaligned,
    "fields of records": in_fields,
    "of a subclass": lambda array: array.copy().view(Labelled),
}
SETTINGS = {
    "plain": dict,
    "scaler and clip": lambda: {"loss_scaler": LossScaler(init_scale=8.0), "clip_global_norm": 0.5},
    "clip_adaptive": lambda: {"clip_adaptive": 0.1},
    "EMA": lambda: {"average": fastopt.EMA(decay=0.5)},
    "SWA": lambda: {"average": fastopt.SWA(start=1, every=2)},
    "Lookahead": lambda: {"average": fastopt.Lookahead(k=2)},
    "accumulate": lambda: {"accumulate": 2},
    "groups": lambda: {"groups": {"1": {"wd": 0.5, "lr": 0.02}}},
}
NAMES = ["adam", *exhaustive("prodigy", "lamb", "nadam", "adan", "rmsprop")]


def trained(name, settings, weight=None, state=None, rows=False, optimizer_is=None):
    """All that steps of two tensors change, of which the first has other forms."""
    made = optimizer_is or FIRST[name].make(wd=FIRST[name].wd)
    try:
        updater = fastopt.Updater(made, **settings)
    except (TypeError, ValueError) as error:
        pytest.skip(f"refused: {error}")
    weights = [normal(k, SHAPE, "float32") for k in range(2)]
    weights[0] = weights[0] if weight is None else weight(weights[0])
    for step in range(5):
        grads = [normal(2 + step + k, SHAPE, "float32") for k in range(2)]
        if rows:
            grads[0] = RowSparse(grads[0][:3], np.array([4, 0, 4]), SHAPE)
        grads[0] = grads[0].reshape(weights[0].shape) if not rows else grads[0]
        updater([0, 1], grads, weights)
        if state is not None and 0 in updater.states:
            updater.states[0] = state(updater.states[0])
    averages = [np.ascontiguousarray(array).tobytes() for array in updater.averages.values()]
    flat = [np.ascontiguousarray(each).tobytes() for each in weights]
    arrays = [leaves(updater.states[index]) for index in (0, 1)]
    states = [np.ascontiguousarray(array).tobytes() for own in arrays for array in own]
    return flat, states, averages, dict(made._index_update_count), made.num_update


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("form", STATES)
@pytest.mark.parametrize("name", NAMES)
def test_states_of_any_form_have_the_same_bits(name, form, setting, unrecorded):
    expected = trained(name, SETTINGS[setting]())
    unrecorded.clear()
    assert trained(name, SETTINGS[setting](), state=STATES[form]) == expected
    assert [0, 1] in unrecorded


@pytest.mark.parametrize("setting", [each for each in SETTINGS if each != "clip_adaptive"])
@pytest.mark.parametrize("form", WEIGHTS)
@pytest.mark.parametrize("name", NAMES)
def test_weights_of_any_form_have_the_same_bits(name, form, setting):
    expected = trained(name, SETTINGS[setting]())
    assert trained(name, SETTINGS[setting](), weight=WEIGHTS[form]) == expected


@pytest.mark.parametrize("lazy", [True, False], ids=["lazy", "standard"])
@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("layout", ["fortran", "strided"])
@pytest.mark.parametrize("name", ["adam", *exhaustive("lamb", "prodigy", "adagrad", "sgld")])
def test_rows_of_weights_in_any_order_have_the_same_bits(name, layout, setting, lazy):
    made = [FIRST[name].make(wd=FIRST[name].wd, lazy_update=lazy) for _ in range(2)]
    expected = trained(name, SETTINGS[setting](), rows=True, optimizer_is=made[0])
    weight = partial(laid, layout=layout)
    found = trained(name, SETTINGS[setting](), weight, rows=True, optimizer_is=made[1])
    assert found == expected


@pytest.mark.parametrize("name", ["sgd", "adam", "adagrad", "groupadagrad"])
def test_rows_of_a_table_that_is_interleaved_with_its_state_have_records(name, unrecorded):
    """As a table on disk is; other gradients of it are updated too."""
    ends = []
    for interleaved in (False, True):
        made = optimizer.create(name, learning_rate=0.1, lazy_update=True)
        updater, weight = fastopt.Updater(made), normal(0, (9, 4), "float32")
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


LEFT = []
"""Whether the learning rates of the next tensors can be computed, from the end."""


class Halting(optimizer.Adam):
    """Raises after some tensors of a list."""

    def _get_lr(self, index):
        if LEFT and not LEFT.pop():
            raise RuntimeError("no learning rate")
        return super()._get_lr(index)


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("seen", [False, True], ids=["first", "later"])
def test_a_failed_call_changes_nothing(setting, seen):
    made = Halting(learning_rate=0.1)
    updater = fastopt.Updater(made, **SETTINGS[setting]())
    weights = [unaligned(normal(k, SHAPE, "float32")) for k in range(3)]
    grads = [normal(3 + k, SHAPE, "float32") for k in range(3)]
    for _ in range(3 if seen else 1):  # with accumulate=2, the next call updates
        if seen or setting == "accumulate":
            updater([0, 1, 2], grads, weights)
    before, LEFT[:] = everything(updater, weights), [False, True, True]
    with pytest.raises(RuntimeError, match="no learning rate"):
        updater([0, 1, 2], grads, weights)
    assert everything(updater, weights) == before


def test_weights_that_overlap_are_updated_in_list_order():
    """Also copies of them, which kernels read."""
    ends = []
    for listed in (True, False):
        updater, memory = fastopt.Updater(optimizer.Adam()), unaligned(normal(0, (9, 4), "float32"))
        weights, grads = [memory[k : k + 6] for k in (0, 2, 1)], np.ones((3, 6, 4), np.float32)
        for _ in range(4):
            if listed:
                updater([0, 1, 2], list(grads), weights)
            else:
                for k in range(3):
                    updater(k, grads[k], weights[k])
        ends.append(everything(updater, [memory]))
    assert ends[0] == ends[1]


@pytest.mark.parametrize("setting", ["EMA", "SWA", "Lookahead"])
@pytest.mark.parametrize("indices", [[0, 0], [0, 1]], ids=["one index", "two indices"])
def test_rows_of_one_weight_are_averaged_in_list_order(indices, setting):
    ends = []
    for form in (np.copy, unaligned):
        made = optimizer.SGD(learning_rate=0.5, lazy_update=True)
        updater = fastopt.Updater(made, **SETTINGS[setting]())
        weight = form(normal(0, SHAPE, "float32"))
        for _ in range(5):
            grads = [RowSparse(normal(row, (1, 4), "float32"), [row], SHAPE) for row in (1, 2)]
            updater(indices, grads, [weight, weight])
        ends.append(everything(updater, [weight]))
    assert ends[0] == ends[1]


@pytest.mark.parametrize("scheduled", [False, True], ids=["rate", "schedule"])
def test_a_list_of_complete_and_incomplete_sums_has_the_bits_of_single_calls(scheduled):
    """LBSGD sums the gradients of several calls."""
    ends = []
    for summed in (True, False):
        made = optimizer.LBSGD(learning_rate=0.1, momentum=0.9, batch_scale=2, warmup_epochs=0)
        if scheduled:
            made.lr_scheduler = lambda update: 0.1 / (1 + update)
        updater, weights = fastopt.Updater(made), [normal(k, SHAPE, "float32") for k in range(2)]
        for step in range(6):
            grads = [normal(2 + step + k, SHAPE, "float32") for k in range(2)]
            if summed and step:
                updater([0, 1], grads, weights)
            else:
                for k in range(2):
                    updater(k, grads[k], weights[k])
            if step == 2:
                updater(1, grads[1], weights[1])
        ends.append(everything(updater, weights)[:3])
    assert ends[0] == ends[1]
