"""Nested structures: a step is the list call on the leaves, whatever the containers."""

import copy
import warnings
from collections import OrderedDict, defaultdict, namedtuple
from dataclasses import dataclass
from types import MappingProxyType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fastopt import functional, optimizer
from fastopt._structure import KEPT, Structures, named
from fastopt.sparse import RowSparse
from helpers.refusals import check_refused

Layer = namedtuple("Layer", ["weight", "bias"])


@dataclass
class Net:
    hidden: Any
    out: Any


class Slots:
    __slots__ = ("w",)

    def __init__(self):
        self.w = np.ones(2)


class Copies(dict):
    """Returns another copy of an array each time, like what ``np.load`` returns for a file."""

    def __getitem__(self, key):
        return super().__getitem__(key).copy()


def adam(**kwargs):
    return optimizer.Updater(optimizer.Adam(learning_rate=0.1, **kwargs))


def ones(*shape):
    return np.ones(shape or 2)


NAMES = st.text("abcdefgh", min_size=1, max_size=3)


def containers(children):
    return st.one_of(
        st.dictionaries(NAMES, children, max_size=3),
        st.dictionaries(st.integers(0, 9), children, max_size=2).map(OrderedDict),
        st.lists(children, max_size=3),
        st.lists(children, max_size=3).map(tuple),
        st.tuples(children, children).map(lambda pair: Layer(*pair)),
        st.tuples(children, children).map(lambda pair: Net(*pair)),
    )


TREES = st.recursive(st.integers(1, 4).map(np.zeros), containers, max_leaves=8)
"""Structures of arrays."""


@settings(max_examples=60, deadline=None)
@given(TREES, st.integers(0, 2**31))
def test_a_step_is_the_list_call_on_the_leaves(weights, seed):
    """And `updated` returns what a step writes, and changes nothing."""
    rng = np.random.default_rng(seed)
    weights, nested, listed, other = copy.deepcopy(weights), adam(), adam(), adam()
    flat, now = dict(named("", copy.deepcopy(weights))), copy.deepcopy(weights)
    for _ in range(3):
        grads, before = copy.deepcopy((weights, dict(named("", now))))
        given = [leaf for _, leaf in named("", grads)]
        for leaf in given:
            leaf[...] = rng.normal(size=leaf.shape)
        nested.step(grads, weights)
        listed([*flat], given, [*flat.values()])
        after = other.updated(grads, now)
        np.testing.assert_equal(dict(named("", now)), before)
        assert type(after) is type(now)
        now = after
    for found in (weights, now):
        np.testing.assert_equal(dict(named("", found)), flat)
    for updater in (nested, other):
        assert updater.optimizer._index_update_count == listed.optimizer._index_update_count


@pytest.mark.parametrize(("weights", "grads"), [
    ({"weight": ones(), "bias": ones()}, Layer(ones(), 2 * ones())),
    (Layer(ones(), ones()), OrderedDict(bias=2 * ones(), weight=ones())),
    (Net(ones(), ones()), {"out": 2 * ones(), "hidden": ones()}),
    ([ones(), ones()], (ones(), 2 * ones())),
    ((ones(), ones()), {0: ones(), "1": 2 * ones()}),
    ({"a": ones(), "b": {"c": ones()}}, defaultdict(list, b={"c": 2 * ones()}, a=ones())),
])  # fmt: skip
def test_containers_of_other_types_fit_by_their_names(weights, grads):
    updater = optimizer.Updater(optimizer.SGD(learning_rate=1.0))
    for _ in range(2):
        updater.step(grads, weights)
    assert [leaf.tolist() for _, leaf in named("", weights)] == [[-1, -1], [-3, -3]]


def test_row_sparse_gradients_are_leaves():
    table, head = np.zeros((5, 2)), np.zeros(2)
    updater = optimizer.Updater(optimizer.SGD(learning_rate=1.0))
    rows = np.ones((2, 2)), np.array([1, 3])
    for grad in (rows, RowSparse(*rows, (5, 2)), list(rows)):
        updater.step({"table": grad, "head": ones()}, {"table": table, "head": head})
    assert table.sum(axis=1).tolist() == [0, -6, 0, -6, 0]
    # Where the weights have a pair, a pair of gradients is not row-sparse.
    updater.step({"table": (ones(), ones())}, {"table": (table[0], head)})
    assert table[0].tolist() == [-1, -1]


def test_none_leaves_a_weight_or_a_whole_container_alone():
    updater, weights = adam(), {"a": {"b": ones(), "c": [ones()]}, "d": ones(), "e": None}
    for grads in ({"a": None, "d": ones(), "e": None}, {"a": None, "d": None, "e": None}) * 2:
        updater.step(grads, weights)
    assert list(updater.states) == ["d"]
    assert updater.optimizer._index_update_count == {"d": 2}
    assert weights["a"]["b"].tolist() == [1, 1]


WEIGHTS = {"a": {"w": ones(), "b": ones()}, "c": [ones()]}
HOLDS_ITSELF: dict = {}
HOLDS_ITSELF["a"] = HOLDS_ITSELF

X = ones()
A, C = {"w": X, "b": X}, [X]
B = {"a": ones()}
MISTAKES = {
    "missing": ({"a": {"w": X}, "c": C}, WEIGHTS, ValueError, "'a.b' has no gradient"),
    "misnamed": ({"a": {"w": X, "bias": X}, "c": C}, WEIGHTS, ValueError,
        "weight 'a.b' has no gradient, and gradient 'a.bias' no weight"),
    "additional": ({"a": {**A, "x": X}, "c": C}, WEIGHTS, ValueError, "'a.x' has no weight"),
    "an array for a container": ({"a": X, "c": C}, WEIGHTS, TypeError,
        "gradients at 'a' must be nested like the weights, which have a dict of 2 there, got ndar"),
    "an array for all": (X, WEIGHTS, TypeError, "gradients must be nested .* got ndarray"),
    "a container for an array": ({"a": {"w": {"x": X}, "b": X}, "c": C}, WEIGHTS, TypeError,
        "index 'a.w': gradient must be .* got dict"),
    "another shape": ({"a": {"w": X, "b": ones(2, 1)}, "c": C}, WEIGHTS, ValueError,
        r"index 'a.b': gradient must have shape .*reshape\(\(2,\)\)"),
    "one path twice": ({"a.b": X, "a": {"b": X}}, None, ValueError, "two weights have the path 'a"),
    "a weight that is None": ({"a": X}, {"a": None}, ValueError, "'a' has no weight"),
    "a tuple": ({("a", 1): X}, None, TypeError, r"keys must be .* \('a', 1\): join it, 'a.1'"),
    "a generator": (iter(C), [ones()], TypeError, "got list_iterator: make a list of it"),
    "an object with arrays": (SimpleNamespace(w=X), None, TypeError,
        "weights must be arrays, or dicts, .* got SimpleNamespace: pass a dict of its arrays"),
    "slots with arrays": ([Slots()], None, TypeError, "weights at '0' .* got Slots: pass a"),
    "a key that is True": ({"a": {True: X}}, None, TypeError, "keys at 'a'"),
    "a list of numbers": ([1.0], None, TypeError, "the array: weight .* got a list of numbers"),
    "a number":
        ({"a": 1.0}, {"a": 2.0}, TypeError, r"'a': .* got float, .* store np.array\(x\), or"),
    "a mapping that returns copies": ({"a": X}, Copies({"a": ones()}), TypeError,
        r"index 'a': Copies returns another copy .* keep dict\(x\)"),
    "a set of numbers": ({1.0}, None, TypeError, r"the array: .* a set of .* np.array\(x\)"),
    "a set with a gradient": ({"a": X}, {"a": {1.0}}, TypeError, "'a': .* a set of numbers"),
    "names": ({"a"}, None, TypeError, "weights must be arrays, or dicts, .* got set: pass arrays"),
    "a gradient that is a string": ({"a": "relu"}, B, TypeError, "gradient must be"),
    "a container in itself": (HOLDS_ITSELF, None, ValueError, "holds itself"),
    "integers": ({"a": np.ones(2, int)}, B, TypeError, r"astype\('float64'\)"),
    "a mask": ({"a": np.ma.array(X, mask=[0, 1])}, B, TypeError, r"filled\(0\)"),
    "a default dictionary, which gets no items":
        (defaultdict(ones, a=X), {"a": X, "b": ones()}, ValueError, "'b' has no gradient"),
}  # fmt: skip
"""Gradients and weights, or None where both are the same."""


@pytest.mark.parametrize("seen", [False, True], ids=["first", "later"])
@pytest.mark.parametrize("case", MISTAKES.values(), ids=MISTAKES)
def test_mistakes_name_the_path_and_change_nothing(case, seen):
    grads, weights, error, words = case
    updater = adam()
    if seen:
        updater.step({"a": {"w": ones(), "b": ones()}, "c": [ones()]}, copy.deepcopy(WEIGHTS))
        updater.step(copy.deepcopy(WEIGHTS), WEIGHTS)
    keys = [*grads] if isinstance(grads, dict) else None
    before = copy.deepcopy((WEIGHTS, updater.states, updater.optimizer.__getstate__()))
    with pytest.raises(error, match=words):
        updater.step(grads, grads if weights is None else weights)
    after = WEIGHTS, updater.states, updater.optimizer.__getstate__()
    np.testing.assert_equal(after, before)
    assert keys is None or [*grads] == keys


CHANGES = [
    lambda w, g: (w.update(d=ones()), g.update(d=ones())),
    lambda w, g: (w.pop("a"), g.pop("a")),
    lambda w, g: (w["a"].pop("w"), g["a"].pop("w")),
    lambda w, g: (w["c"].append(ones()), g["c"].append(ones())),
    lambda w, g: (w.update(a=[ones()]), g.update(a=[ones()])),
    lambda w, g: (w["a"].update(w=[ones()]), g["a"].update(w=[ones()])),
    lambda w, g: (w["e"].update(x=ones()), g["e"].update(x=ones())),
]


@pytest.mark.parametrize("change", CHANGES)
def test_a_known_structure_that_has_changed_is_read_again(change):
    updater = adam()
    weights = {"a": {"w": ones(), "b": ones()}, "c": [ones()], "e": {}}
    grads = copy.deepcopy(weights)
    updater.step(grads, weights)
    for container, missing in (grads, "weight"), (grads["e"], "weight"), (weights, "gradient"):
        container["x"] = ones()
        with pytest.raises(ValueError, match=f"x' has no {missing}"):
            updater.step(grads, weights)
        del container["x"]
    change(weights, grads)
    before = copy.deepcopy(weights)
    updater.step(grads, weights)
    for (path, old), (_, new) in zip(named("", before), named("", weights), strict=True):
        assert path in updater.states
        assert (new < old).all()


def test_missing_gradients_are_skipped():
    updater, weights = adam(), {"a": {"b": ones(), "c": ones()}, "d": [ones(), ones()], "e": ones()}
    every = copy.deepcopy(weights)
    for grads in ({"a": {"c": ones()}, "d": [ones()]}, {"e": ones()}) * 2:
        updater.step(grads, weights, missing="skip")
        with pytest.raises(ValueError, match=r'has no gradient; pass None .* missing="skip"'):
            updater.step(grads, weights)
    assert updater.optimizer._index_update_count == {"a.c": 2, "d.0": 2, "e": 2}
    assert weights["a"]["b"].tolist() == weights["d"][1].tolist() == [1, 1]
    updater.step(every, weights, missing="skip")
    assert updater.optimizer._index_update_count["a.b"] == 1
    flat = {"p": ones(), "q": ones(), "r": ones()}
    updater.step({"p": ones(), "q": ones()}, flat, missing="skip")
    for wrong, known in (({"a": {"x": ones()}}, weights), ({"p": ones(), "x": ones()}, flat)):
        with pytest.raises(ValueError, match=r"x' has no weight"):
            updater.step(wrong, known, missing="skip")
    updater.groups = {"^r$": {"wd": 0.1}}
    for _ in range(3):
        updater.step({"p": ones()}, flat, missing="skip")  # no warning that nothing is called r


@dataclass
class Configured:
    weight: np.ndarray
    activation: str = "relu"
    bias: np.ndarray | None = None
    function: object = np.tanh
    flag: bool = True


@pytest.mark.parametrize(
    "grads", [Configured(ones()), {"weight": ones()}, {"weight": ones(), "activation": b"x"}]
)
def test_leaves_that_are_not_arrays_are_left_alone(grads):
    updater, model = optimizer.Updater(optimizer.SGD(learning_rate=1.0)), Configured(ones())
    updater.step(grads, model)
    again = updater.updated(grads, model)
    assert (model.weight.tolist(), again.weight.tolist()) == ([0, 0], [-1, -1])
    for each in (model, again):
        assert {**vars(each), "weight": None} == vars(Configured(None))
    model.activation = ones()
    with pytest.raises((TypeError, ValueError), match="activation"):
        updater.step(grads, model)


# Arguments in the wrong order


@pytest.mark.parametrize(("from_start", "first"), [(True, 1.0), (True, 0.0), (False, 1.0)])
def test_swapped_arguments_warn_once(from_start, first, recwarn):
    warnings.simplefilter("always")
    updater, params, other = adam(), {"a": first * ones()}, {"a": 2 * ones()}
    if not from_start:
        updater.step(other, params)
    for k in range(8):
        updater.step(params, {"a": (2 + k) * ones()} if from_start else other)
    (warning,) = recwarn
    words = "is the same unchanged array" if from_start else "is an array that was updated as wei"
    assert f"arguments swapped? gradient 'a' {words}" in str(warning.message)
    assert warning.filename == __file__


def test_weights_that_share_a_name_warn_once(recwarn):
    updater, weights = adam(), [ones() for _ in range(3)]
    for k in range(9):
        updater.step((k + 1) * ones(), weights[k % 3])
    (warning,) = recwarn
    assert "several arrays are updated in turns as weight ''" in str(warning.message)


def test_buffers_of_gradients_and_copies_of_weights_do_not_warn():
    updater, weights, buffer = adam(), {"a": ones()}, {"a": ones()}
    for k in [*range(5), *[5] * 5]:
        buffer["a"][:] = k + 1
        weights = copy.deepcopy(weights)
        updater.step(buffer, weights)
    for _ in range(5):
        updater.step(buffer, weights)
        weights = updater.updated(buffer, weights)
        weights = updater.updated(weights, weights)


# New arrays


def test_updated_takes_immutable_arrays_and_mappings():
    read_only = ones()
    read_only.flags.writeable = False
    updater = optimizer.Updater(optimizer.SGD(learning_rate=1.0))
    assert updater.updated([ones()], [read_only])[0].tolist() == [0, 0]
    assert updater.updated(ones(), memoryview(read_only)).tolist() == [0, 0]
    weights = MappingProxyType(Copies({"a": ones()}))
    updated = updater.updated({"a": ones()}, weights)
    assert type(updated) is dict
    assert updated["a"].tolist() == [0, 0]


@pytest.mark.parametrize("shape", [(), (1,), (1, 1)])
def test_a_number_is_a_gradient_of_a_weight_with_one_element(shape):
    weight, updater = np.ones(shape), optimizer.Updater(optimizer.SGD(learning_rate=1.0))
    for number in (0.5, np.float64(-2), np.float32(0.25)):
        updater.step({"x": number}, {"x": weight})
    assert weight == 2.25


def test_updated_scalars_are_scalars_again():
    """Arrays without dimensions decay to scalars in the arithmetic of a program."""
    weights = {"a": 2.0, "b": [np.float64(3), np.float32(4)], "c": {"d": 1.0}}
    grads = {"a": 1.0, "b": [np.float64(1), np.float32(1)], "c": {"d": None}}
    updater = optimizer.Updater(optimizer.SGD(learning_rate=0.5))
    after = updater.updated(grads, weights)
    assert after == {"a": 1.5, "b": [2.5, 3.5], "c": {"d": 1.0}}
    assert [type(after["a"]), *map(type, after["b"])] == [float, np.float64, np.float32]
    assert type(after["c"]["d"]) is float
    assert updater.updated(1.0, 2.0) == 1.5
    init, update = functional(optimizer.SGD(learning_rate=0.5))
    params, _ = update({"a": 1.0}, init({"a": 2.0}), {"a": 2.0})
    assert (params, type(params["a"])) == ({"a": 1.5}, float)


def test_few_structures_are_kept():
    """And one of containers that are new each time."""
    for kept, name in (1, "a"), (KEPT, "a{}"):
        structures = Structures()
        for weights in [{name.format(k): ones(), "b": [ones()]} for k in range(3 * KEPT)]:
            structures.flatten(weights, weights)
        assert len(structures._known) == kept


# Views of dictionaries in the place of lists


def test_views_of_dictionaries_are_lists():
    weights, grads = {"a": ones(2), "b": ones(3)}, {"a": ones(2), "b": ones(3)}
    updater = optimizer.Updater(optimizer.SGD(learning_rate=1.0))
    for _ in range(3):
        updater(weights.keys(), grads.values(), weights.values())
        updater(["a", "b"], grads.values(), list(weights.values()))
        updater(range(2), tuple(grads.values()), weights.values())
    assert weights["a"].tolist() == [-8, -8]
    assert updater.optimizer._index_update_count == {"a": 6, "b": 6, 0: 3, 1: 3}


D = {"a": ones(), "b": ones()}
NOT_LISTS = {
    "updater(D, D.values(), D.values())": r"TypeError: got dict; updater.step\(grads, weights\)",
    "updater(D.keys(), D, D.values())": r"TypeError: gradients, got dict; updater.step\(",
    "updater(D.keys(), [ones()], D.values())": "TypeError: 2 indices needs .* gradients, got 1",
    "updater(set(D), D.values(), D.values())": "TypeError: index must be an int, .* got set",
    "updater([0, 1], np.ones((2, 2)), D.values())": "TypeError: gradients, got ndarray",
    "updater.step(D, D, missing='no')": "ValueError: missing must be one of",
}


@pytest.mark.parametrize("code", NOT_LISTS)
def test_dictionaries_and_arrays_are_not_lists(code):
    check_refused(code, NOT_LISTS[code], {**globals(), "updater": adam()})
