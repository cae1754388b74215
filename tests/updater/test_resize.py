"""Updater.resize: rows that are added, pruned or permuted keep what belongs to them."""

import numpy as np
import pytest

import fastopt
from fastopt import EMA
from fastopt._engine.validate import leaves
from helpers.refusals import check_refused
from helpers.tensor_lists import frozen

KINDS = {
    "sgd": (fastopt.SGD, {"momentum": 0.9}),
    "adam": (fastopt.Adam, {}),
    "rows": (fastopt.GroupAdaGrad, {}),
    "amsgrad": (fastopt.AdamW, {"amsgrad": True, "wd": 0.1}),
    "noise": (fastopt.Adam, {"state_dtype": "bfloat16"}),
    "masters": (fastopt.SGD, {"momentum": 0.9, "multi_precision": True}),
    "codes": (fastopt.Adam, {"state_dtype": "int8", "state_min_size": 1}),
}


def made(name, **settings):
    kind, arguments = KINDS[name]
    return fastopt.Updater(kind(learning_rate=0.1, **arguments), **settings)


def dtype_of(name):
    return np.float16 if name == "masters" else np.float64


def trained(updater, weight, rng, steps=3):
    for _ in range(steps):
        updater("w", rng.normal(size=weight.shape).astype(weight.dtype), weight)
    return weight


@pytest.mark.parametrize("name", [name for name in KINDS if name != "noise"])
@pytest.mark.parametrize("average", [None, EMA(0.9)], ids=["alone", "averaged"])
def test_pruned_rows_leave_the_others_as_they_were(name, average, rng):
    """A weight from which rows were removed has the later steps of its rows."""
    average = None if name == "rows" else average
    whole, pruned, keep = made(name, average=average), made(name, average=average), [3, 0, 4]
    weight, *grads = rng.normal(size=(7, 5, 130)).astype(dtype_of(name))
    own = weight.copy()
    for grad in grads[:3]:
        whole("w", grad, weight)
        pruned("w", grad, own)
    own = np.ascontiguousarray(own[keep])
    pruned.resize("w", own, keep)
    for grad in grads[3:]:
        whole("w", grad, weight)
        pruned("w", np.ascontiguousarray(grad[keep]), own)
    np.testing.assert_array_equal(own, weight[keep])
    if average is not None:
        np.testing.assert_array_equal(pruned.averages["w"], whole.averages["w"][keep])


@pytest.mark.parametrize("name", KINDS)
def test_new_rows_begin_with_the_state_of_a_new_parameter(name, rng):
    updater = made(name, average=None if name == "rows" else EMA(0.9))
    weight = trained(updater, rng.normal(size=(3, 130)).astype(dtype_of(name)), rng)
    before, old = leaves(updater.states["w"]), updater.averages.get("w")
    weight = np.vstack([weight, np.full((2, 130), 7.0, weight.dtype)])
    updater.resize("w", weight, [0, 1, 2, -1, -1])
    after = leaves(updater.states["w"])
    fresh = leaves(updater.optimizer.create_state_multi_precision("w", weight))
    for one, was, new in zip(after, before, fresh, strict=True):
        np.testing.assert_array_equal(one[:3], was)
        np.testing.assert_array_equal(one[3:], new[3:])
    if old is not None:
        np.testing.assert_array_equal(updater.averages["w"], np.vstack([old, weight[3:]]))
    trained(updater, weight, rng)


def test_decay_that_a_row_lacks_goes_with_it():
    ends = []
    for rows in ([0, 1, 2], [2, 0, -1]):
        adamw = fastopt.AdamW(learning_rate=0.1, wd=0.5, sparse_decay="catch_up")
        updater, weight = fastopt.Updater(adamw), np.ones((3, 2))
        for row in (0, 1):
            updater("w", (np.ones((1, 2)), [row]), weight)
        weight = np.vstack([weight, np.ones((1, 2))])[rows]
        updater.resize("w", weight, rows)
        updater.flush("w")
        ends.append(weight)
    np.testing.assert_array_equal(ends[1], np.vstack([ends[0][[2, 0]], np.ones((1, 2))]))


def copied():
    (updater := made("adam")).set_copy("w", np.ones((3, 2), np.float16))
    return updater


def stepped(updater, dtype="f4"):
    updater("w", *np.ones((2, 3, 2), dtype))
    return updater


def averaged():
    return stepped(made("adam", average=EMA(0.9)))


REFUSED = [
    (averaged, (2, 2), [0], "ValueError: got 1 for shape"),
    (averaged, (2, 2), [0, 5], "ValueError: rows up to 5"),
    (averaged, (2, 2), [0, -2], "ValueError: at least -1, got -2"),
    (averaged, (2, 2), [0.5, 1.0], "TypeError: list of row numbers"),
    (averaged, (2, 2), [True, False], "TypeError: flatnonzero"),
    (averaged, (2, 2), [[0, 1], [2, 0]], "TypeError: list of row numbers"),
    (averaged, (1, 4), [0], "ValueError: cannot be those of one of shape"),
    (lambda: stepped(fastopt.Updater(fastopt.Muon())), (3, 2), [2, 1, 0],
     "TypeError: state of Muon is not one by rows"),
    (lambda: stepped(fastopt.Updater(fastopt.SGD(), accumulate=2)), (1, 2), [0],
     r"ValueError: call finish\(\)"),
    (copied, (1, 2), [0], "ValueError: its copy has another shape"),
    (lambda: stepped(made("adam"), "f8"), (2, 2), [0, 1], "TypeError: must have dtype float64"),
]  # fmt: skip


@pytest.mark.parametrize(("make", "shape", "rows", "error"), REFUSED)
def test_what_cannot_be_resized_is_refused_and_changes_nothing(make, shape, rows, error):
    updater = make()
    before = frozen(dict(updater.states))
    names = {"resize": updater.resize, "weight": np.ones(shape, "f4"), "rows": rows}
    check_refused("resize('w', weight, rows)", error, names)
    assert frozen(dict(updater.states)) == before


def test_a_parameter_without_state_stays_one():
    updater = made("adam")
    updater.resize("w", np.ones((2, 2)), [0, 1])
    assert "w" not in updater.states
    updater("net.w", np.ones((2, 2)), np.ones((2, 2)))
    with pytest.raises(ValueError, match=r"'w' has no state to resize; .* are \['net.w'\]"):
        updater.resize("w", np.ones((2, 2)), [0, 1])
