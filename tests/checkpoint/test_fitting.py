"""What a checkpoint restores fits together, or is refused whole, whoever wrote it."""

import copy
from contextlib import nullcontext
from functools import partial

import numpy as np
import pytest

from fastopt import optimizer
from fastopt.checkpoint import CheckpointError, dumps
from helpers.tensor_lists import everything

SHAPE = (6, 2)


def rows_of(*indices):
    return np.ones((len(indices), 2), np.float32), np.array(indices)


def trained(name, grad=None, dtype=np.float32, **kwargs):
    """Updater with one parameter."""
    updater = optimizer.get_updater(optimizer.create(name, learning_rate=0.1, **kwargs))
    weight = np.ones(SHAPE, dtype)
    for _ in range(3):
        updater(0, np.ones(SHAPE, dtype) if grad is None else grad, weight)
    return updater


def decayed():
    return trained("adamw", rows_of(1, 4), wd=0.5, sparse_decay="catch_up")


def summed(grad=None):
    return trained("lbsgd", grad, batch_scale=4, momentum=0.9)


def half():
    return trained("sgd", dtype=np.float16, momentum=0.9, multi_precision=True)


def put(*path):
    """Function that puts a value into the tree of a checkpoint."""

    def change(tree, value):
        for key in path[:-1]:
            tree = tree[key]
        tree[path[-1]] = value

    return change


def soap(dtype=np.float32, **kwargs):
    return trained("soap", np.ones(SHAPE, dtype), dtype, **kwargs)


def put_steps(tree, value):
    """Replace the number of steps in the state of SOAP, which may be a pair with its master."""
    master, state = None, tree["states"][0]
    if len(state) == 2:
        master, state = state
    state = (*state[:2], np.full_like(state[2], value), *state[3:])
    tree["states"][0] = state if master is None else (master, state)


PAID = put("attributes", "row_decay", 0)
SUM = put("attributes", "cumgrads", 0)
TOTAL = put("attributes", "cumgrads", 0, "cum_grad")
STATE = put("states", 0)
F32 = np.ones(SHAPE, np.float32)

ADAM = partial(trained, "adam")
COUNT = put("attributes", "_index_update_count", 0)
WRONG = {
    "decay of another dtype": (decayed, PAID, (np.zeros(6, np.int8), 0.0), "dtype float64, got"),
    "decay in float32": (decayed, PAID, (np.zeros(6, np.float32), 0.0), "dtype float64, got"),
    "decay without columns": (decayed, PAID, (np.zeros((6, 0)), 0.0), "one dimension, got shape"),
    "decay of fewer rows": (decayed, PAID, (np.zeros(5), 0.0), r"its rows \(5,\)"),
    "decay of NaN": (decayed, PAID, (np.full(6, np.nan), 0.0), r"row_decay\[0\]\[0\] must be fi"),
    "decay without end": (decayed, PAID, (np.zeros(6), np.inf), r"row_decay\[0\]\[1\] must be a f"),
    "decay that is none": (decayed, PAID, None, r"row_decay\[0\] must be a pair"),
    "decay as a list": (decayed, PAID, ([0.0] * 6, 0.0), r"row_decay\[0\]\[0\] must be an array"),
    "sum of another shape": (summed, TOTAL, np.ones((7, 2), np.float32), "the sum of its gradie"),
    "sum of another dtype": (summed, TOTAL, np.ones(SHAPE, np.int8), "float32 or float64, got"),
    "sum of a number": (summed, TOTAL, 1.0, "must be an array, got 1.0"),
    "sum of other rows": (summed, TOTAL, rows_of(6), "the sum of its gradients has rows"),
    "sum of negative rows": (summed, TOTAL, rows_of(-1), "indices must be at least 0"),
    "sum of wide rows": (summed, TOTAL, (np.ones((1, 3), np.float32), np.array([0])), "has rows"),
    "sum of rows without numbers": (summed, TOTAL, (F32, np.array([0])), "values must have shape"),
    "sum of a triple": (summed, TOTAL, (F32, F32, F32), "must be a pair"),
    "sum without calls": (summed, SUM, {"cum_grad": None}, "must have cum_grad and num_cums"),
    "sum with a half call": (summed, SUM, {"cum_grad": None, "num_cums": 0.5}, "must be an integ"),
    "sums as a list": (summed, put("attributes", "cumgrads"), [1], "cumgrads must be a table"),
    "too few slots": (ADAM, STATE, (F32,), "must have 2 arrays for rule adam"),
    "no slots": (ADAM, STATE, None, "must have 2 arrays for rule adam, got 0"),
    "a number": (ADAM, STATE, (F32, 1.0), "must hold arrays"),
    "a text": (ADAM, STATE, (F32, "x"), "holds something of type str"),
    "slots of other shapes": (ADAM, STATE, (F32, F32[:5]), "shape"),
    "slots of integers": (ADAM, STATE, (F32 > 0, F32 > 0), "dtype"),
    "a master of integers": (half, STATE, (F32, F32.astype("i8")), "dtype"),
    "a master of another shape": (half, STATE, (F32, F32[:5]), "shape"),
    "masters to come": (half, put("attributes", "masters_given"), {1: F32 > 0}, "float32, got bo"),
    **{
        f"{value} steps of SOAP": (soap, put_steps, value, "state of index 0: state 'steps' must")
        for value in (-1, 0.5, 2**25, 3e38, np.inf, np.nan)
    },
    "steps of SOAP with a master": (partial(soap, np.float16, multi_precision=True), put_steps, -1,
        "from 0 to 16777216, got -1"),
    "a count below 0": (ADAM, COUNT, -1,
        r"Adam: _index_update_count\[0\] must be at least 0, got -1"),
    "half an update": (ADAM, put("attributes", "num_update"), 0.5,
        "Adam: num_update must be an integer"),
    "an index": (half, put("parameters", 0), 0.5, "an index must be an integer or a string"),
    "a bool as an index": (half, put("parameters", 0), True, "an index must be an integer or a"),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG.values(), ids=WRONG.keys())
def test_what_does_not_fit_is_refused_and_nothing_changes(case):
    """Also as bytes, where the change can be made in the updater that is saved."""
    make, change, value, words = case
    updater = make()
    before, tree = everything(updater, None), updater.states_dict()
    change(tree, value)
    with pytest.raises(CheckpointError, match=words):
        updater.load_states_dict(tree)
    assert everything(updater, None) == before
    if change in (STATE, PAID, SUM, TOTAL, put_steps):
        change({"attributes": vars(updater.optimizer), "states": updater.states}, value)
        fresh = optimizer.get_updater(optimizer.SGD())
        before = everything(fresh, None)
        with pytest.raises(CheckpointError, match=words):
            fresh.set_states(dumps({"states": updater.states, "optimizer": updater.optimizer}))
        assert type(fresh.optimizer) is optimizer.SGD
        assert everything(fresh, None) == before


@pytest.mark.parametrize(("names", "words"), [("ac", r"of \['c'\], .* of \['b'\]"), ("abc", "")])
def test_a_weight_with_another_name_than_in_the_checkpoint_is_reported_once(names, words):
    old, new = (optimizer.Updater("adam") for _ in range(2))
    weights, others = [{name: np.ones(3) for name in text} for text in ("ab", names)]
    old.step(copy.deepcopy(weights), weights)
    new.load_state_dict(old.state_dict())
    with pytest.warns(UserWarning, match=words) if words else nullcontext():
        new.step(copy.deepcopy(others), others)
    new.step(copy.deepcopy(others), others)
