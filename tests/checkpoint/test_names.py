"""Parameters are found by name where names are known, else by index."""

import numpy as np
import pytest

from fastopt import optimizer
from fastopt.checkpoint import CheckpointError, Skipped
from fastopt.checkpoint.restore.parameters import keys_of

SIZES = {"a_weight": 2, "b_bias": 3, "c_weight": 4}


def updater_of(names, klass=optimizer.Adam, **kwargs):
    """Updater of parameters with these names, which are numbered in order."""
    return optimizer.get_updater(klass(param_idx2name=dict(enumerate(names)), **kwargs))


def train(updater, weights, steps=1):
    """Update named weights."""
    index_of = {name: index for index, name in updater.optimizer.idx2name.items()}
    for _ in range(steps):
        for name, weight in weights.items():
            updater(index_of.get(name, name), np.arange(1.0, 1 + len(weight)), weight)


def weights_of(names):
    return {name: np.ones(SIZES[name]) for name in names}


def through_file(old, new, path, **kwargs):
    old.save(path / "file")
    return new.load(path / "file", **kwargs)


@pytest.mark.parametrize("names", [["fc1"], ["fc1", "fc2"]])
def test_weights_of_other_names_than_those_of_the_file_warn(names, tmp_path):
    old, new = optimizer.Updater("adam"), optimizer.Updater("adam")
    grads = {name: np.ones(2) for name in names}
    old.step(grads, {name: np.ones(2) for name in names})
    through_file(old, new, tmp_path)
    other = {f"my_{name}": np.ones(2) for name in names}
    with pytest.warns(UserWarning, match=r"starts states of \['my_fc1'.* loaded of \['fc1'"):
        new.step({name: np.ones(2) for name in other}, other)


@pytest.mark.slow("exhaustive")
@pytest.mark.parametrize(
    ("klass", "kwargs"),
    [
        (optimizer.Adam, {"wd": 0.1}),
        (optimizer.LBSGD, {"batch_scale": 3, "momentum": 0.9, "learning_rate": 0.1}),
        (optimizer.LARS, {"momentum": 0.9}),
        (optimizer.Nadam, {"per_parameter": True}),
    ],
)
def test_parameters_in_another_order_keep_their_state(klass, kwargs, tmp_path):
    old, new = updater_of(SIZES, klass, **kwargs), updater_of(reversed(SIZES), klass)
    old.optimizer.set_lr_mult({0: 0.5, "b_bias": 2.0})
    weights = weights_of(SIZES)
    train(old, weights, 2)
    train(old, {"a_weight": weights["a_weight"]})
    assert through_file(old, new, tmp_path) == Skipped([], [])
    assert new.optimizer._index_update_count == {2: 3, 1: 2, 0: 2}
    assert new.optimizer.idx2name == {0: "c_weight", 1: "b_bias", 2: "a_weight"}
    assert new.optimizer.lr_mult == {2: 0.5, "b_bias": 2.0}
    others = {name: weight.copy() for name, weight in weights.items()}
    train(old, weights, 2)
    train(new, others, 2)
    np.testing.assert_equal(others, weights)


def test_names_of_live_parameters_count_too(tmp_path):
    class Parameter:
        lr_mult = wd_mult = 1.0

        def __init__(self, name):
            self.name = name

    def updater(names):
        live = {index: Parameter(name) for index, name in enumerate(names)}
        return optimizer.get_updater(optimizer.Adam(param_dict=live))

    old, new = updater("ab"), updater("ba")
    old(0, np.ones(2), np.ones(2))
    through_file(old, new, tmp_path)
    assert list(new.states) == [1]


def test_missing_and_extra_parameters_are_listed(tmp_path):
    old, new = updater_of(["a_weight", "b_bias"]), updater_of(["b_bias", "c_weight"])
    train(old, weights_of(["a_weight", "b_bias"]))
    with pytest.raises(CheckpointError, match=r"lacks \['c_weight'\] and has \['a_weight'\]"):
        through_file(old, new, tmp_path)
    assert new.states == {}


def test_without_strict_the_common_parameters_are_loaded(tmp_path):
    old = updater_of(["a_weight", "b_bias"], wd=0.5)
    new = updater_of(["b_bias", "c_weight"])
    old.optimizer.set_lr_mult({"a_weight": 3.0, "b_bias": 2.0})
    new.optimizer.set_lr_mult({1: 7.0})
    train(old, weights_of(["a_weight", "b_bias"]), 2)
    train(new, weights_of(["b_bias", "c_weight"]))
    skipped = through_file(old, new, tmp_path, strict=False)
    assert skipped == Skipped(missing=["c_weight"], extra=["a_weight"])
    made = new.optimizer
    assert list(new.states) == [0]
    assert (made.wd, made.num_update, made._index_update_count) == (0.5, 2, {0: 2})
    assert made.lr_mult == {"b_bias": 2.0, 1: 7.0}
    assert made.idx2name == {0: "b_bias", 1: "c_weight"}
    np.testing.assert_array_equal(new.states[0][0], old.states[1][0])


def test_a_parameter_that_was_never_updated_is_not_missing(tmp_path):
    old, new = updater_of(SIZES), updater_of(SIZES)
    train(old, weights_of(["a_weight"]))
    assert through_file(old, new, tmp_path) == Skipped([], [])
    assert list(new.states) == [0]


def test_names_that_one_side_does_not_know_do_not_count(tmp_path):
    named, bare = updater_of(["a_weight"]), updater_of([])
    train(named, weights_of(["a_weight"]))
    through_file(named, bare, tmp_path)
    assert bare.optimizer.idx2name == {0: "a_weight"}
    bare = updater_of([])
    bare(0, np.ones(2), np.ones(2))
    assert through_file(bare, named, tmp_path) == Skipped([], [])
    assert named.optimizer.idx2name == {0: "a_weight"}


def test_integers_and_texts_are_different_indices(tmp_path):
    old, new = updater_of([]), updater_of([])
    old(0, np.ones(2), np.ones(2))
    with pytest.warns(UserWarning, match="a state of '0', and 0 has another"):
        old("0", np.ones(3), np.ones(3))
    through_file(old, new, tmp_path)
    assert [(index, len(state[0])) for index, state in new.states.items()] == [(0, 2), ("0", 3)]


def test_a_name_that_several_parameters_have_is_no_key():
    assert keys_of({0: "a", 1: "a", 2: "b", 3: None}, [4]) == {0: 0, 1: 1, "b": 2, 3: 3, 4: 4}
    assert keys_of({0: "a", "a": None}, []) == {0: 0, "a": "a"}
    assert keys_of({"a": "a"}, ["a"]) == {"a": "a"}
