"""What a checkpoint of an updater holds, also by name, and what it is refused for."""

import json
import sys
from types import SimpleNamespace

import numpy as np
import pytest
from safetensors import safe_open

import fastopt
from fastopt import optimizer
from fastopt.amp import LossScaler
from fastopt.checkpoint import CheckpointError, Skipped
from fastopt.checkpoint.restore.parameters import keys_of
from helpers.tensor_lists import everything, frozen

ARRAY = np.arange(6, dtype=np.float32).reshape(2, 3)


class Mine(optimizer.Optimizer):
    """An optimizer in NumPy whose state is whatever is given."""

    def __init__(self, state=None, **kwargs):
        super().__init__(**kwargs)
        self.given = state

    def create_state(self, index, weight):
        return self.given

    def update(self, index, weight, grad, state):
        self._update_count(index)


def mine(state=None, **kwargs):
    return optimizer.get_updater(Mine(state, **kwargs))


def adam(*shapes, dtype=np.float32, **kwargs):
    """Updater of Adam that has updated one weight of each shape."""
    updater = optimizer.get_updater(optimizer.Adam(**kwargs))
    for index, shape in enumerate(shapes):
        updater(index, np.ones(shape, dtype), np.ones(shape, dtype))
    return updater


def through_file(old, new, path, **kwargs):
    old.save(path / "file")
    return new.load(path / "file", **kwargs)


def test_bfloat16_is_stored_as_its_bits_and_needs_its_package(tmp_path, bfloat16, monkeypatch):
    half = np.array([1.5, -2, np.inf, np.nan], bfloat16)
    old, new = mine((half, half[0])), mine()
    old(0, np.ones(2), np.ones(2))
    through_file(old, new, tmp_path)
    assert type(new.states[0][1]) is bfloat16.type
    assert frozen(new.states) == frozen(old.states)
    with safe_open(tmp_path / "file", "np") as file:
        assert file.get_tensor("states[0][0]").dtype == np.uint16
    monkeypatch.setitem(sys.modules, "ml_dtypes", None)
    new = mine()
    with pytest.raises(CheckpointError, match="bfloat16 needs the package ml_dtypes"):
        through_file(old, new, tmp_path)
    assert new.states == {}


OF_FC = r"state of index 3 \(fc_weight\)"


@pytest.mark.parametrize(
    ("state", "words"),
    [
        ("text", rf"{OF_FC} must be.*got str"),
        ((ARRAY, {"a": [object()]}), rf"{OF_FC}.* must be.*got object"),
        (np.ma.ones(2), rf"{OF_FC} must be.*got MaskedArray"),
        (1j, rf"{OF_FC} must be.*got complex"),
        *(([np.empty(1, dtype)], r"\[0\].* dtype") for dtype in ("c16", "O", "M8[s]", "U2", "g")),
    ],
)
def test_a_foreign_state_is_refused_with_its_index(state, words, tmp_path):
    updater = mine(state, param_idx2name={3: "fc_weight"})
    updater(3, np.ones(2), np.ones(2))
    (tmp_path / "file").write_bytes(b"old")
    with pytest.raises(TypeError, match=words):
        updater.save(tmp_path / "file")
    assert (tmp_path / "file").read_bytes() == b"old"


def test_the_optimizer_stays_the_same_object_with_its_live_parameters(tmp_path):
    live = {0: SimpleNamespace(lr_mult=0.5, wd_mult=0.5)}
    old, new = adam(3, learning_rate=0.5, beta1=0.7), adam(param_dict=live)
    made, lock = new.optimizer, new.optimizer.lock
    through_file(old, new, tmp_path)
    assert new.optimizer is made
    assert made.lock is lock
    assert made.param_dict == live
    assert made.__getstate__() == old.optimizer.__getstate__()


def test_the_file_says_what_it_holds(tmp_path):
    updater = adam(3, param_idx2name={0: "fc_weight"}, seed=5)
    updater.save(tmp_path / "file")
    with safe_open(tmp_path / "file", "np") as file:
        assert sorted(file.keys()) == ["states['fc_weight'][0]", "states['fc_weight'][1]"]
        text = file.metadata()["fastopt"]
    document = json.loads(text)
    assert document["format"] == 2
    for word in ("Adam", "fc_weight", "num_update", "_index_update_count", "seed", "float32"):
        assert f'"{word}"' in text
    assert all(isinstance(tensor["crc32"], int) for tensor in document["tensors"].values())


def test_another_callable_is_kept_with_a_warning(tmp_path):
    class FactorScheduler:  # not the registered one
        def __call__(self, num_update):
            return 0.25

    other = FactorScheduler()
    for own, rate in ({"lr_scheduler": other}, 0.25), ({"learning_rate": 0.3}, 0.3):
        new = adam(**own)
        with pytest.warns(UserWarning, match="the present one is kept") as record:
            through_file(adam(3, lr_scheduler=FactorScheduler()), new, tmp_path)
        assert record[0].filename == __file__
        assert new.optimizer.lr_scheduler is own.get("lr_scheduler")
        assert (new.optimizer.learning_rate, new.optimizer.num_update) == (rate, 1)


@pytest.mark.parametrize("scaled", [False, True])
def test_a_warning_that_is_an_error_or_a_bad_loss_scale_changes_nothing(scaled):
    old, new = adam(3, lr_scheduler=None if scaled else lambda n: 0.25), adam(3, beta1=0.5)
    state, new.loss_scaler = old.states_dict(), LossScaler(4.0)
    if scaled:
        state["loss_scaler"] = {**LossScaler(8.0).state_dict(), "scale": -1.0}
    before = everything(new, None)
    error, words = (CheckpointError, "scale must be") if scaled else (UserWarning, "kept")
    with pytest.raises(error, match=words):
        new.load_states_dict(state)
    assert everything(new, None) == before


def test_the_loss_scale_is_saved_with_the_updater(tmp_path):
    old, new = adam(3), adam()
    old.loss_scaler, new.loss_scaler = LossScaler(128.0), LossScaler()
    old.clip_global_norm, new.clip_global_norm = 2.5, None
    through_file(old, new, tmp_path)
    assert (new.loss_scaler.scale, new.clip_global_norm) == (128, 2.5)
    with pytest.warns(UserWarning, match="the updater has none"):
        through_file(old, adam(), tmp_path)
    new.optimizer.clip_gradient, new.optimizer.lr_scheduler = 1.0, lambda step: 0.1
    off = "without clip_global_norm and clip_gradient and lr_scheduler, and the load turns them off"
    with pytest.warns(UserWarning, match=off), pytest.warns(UserWarning, match="updater is kept"):
        through_file(adam(3), new, tmp_path)
    assert (new.loss_scaler.scale, new.clip_global_norm) == (128, None)


def test_copies_that_the_updater_keeps_fresh_stay_bound(tmp_path):
    old, new, weight, half = adam(3), adam(), np.ones(3, np.float32), np.zeros(3, np.float16)
    new.set_copy(0, half)
    through_file(old, new, tmp_path)
    new(0, np.ones(3, np.float32), weight)
    np.testing.assert_array_equal(half, weight.astype(np.float16))


REFUSED = {
    "another class": (lambda: optimizer.get_updater(optimizer.AdamW()), "saved with Adam, .*AdamW"),
    "another shape": (lambda: adam(2), r"state of index 0 has .*\(3,\).*where.*\(2,\)"),
    "another dtype": (lambda: adam(3, dtype=np.float64), "dtype float32, where the .*has.*float64"),
    "an index more": (lambda: adam(3, 2), r"lacks \[1\]"),
    "names": (lambda: adam(param_idx2name={0: "a", 1: "b"}), r"lacks \['b'\]"),
}


@pytest.mark.parametrize("case", REFUSED.values(), ids=REFUSED.keys())
def test_what_does_not_fit_is_refused_and_changes_nothing(case, tmp_path):
    make, words = case
    new = make()
    before = everything(new, None)
    with pytest.raises(CheckpointError, match=words) as raised:
        through_file(adam(3), new, tmp_path)
    assert str(tmp_path / "file") in str(raised.value)
    assert everything(new, None) == before


# Names

NAMES = "a_weight", "b_bias", "c_weight"


def named(names, *shapes, **kwargs):
    """Updater of Adam of parameters with these names, of which the first were updated."""
    return adam(*shapes, param_idx2name=dict(enumerate(names)), **kwargs)


def test_parameters_in_another_order_keep_their_state(tmp_path):
    """And their sums of gradients, counts and multipliers."""
    old, new = (
        fastopt.Updater(optimizer.LBSGD(param_idx2name=dict(enumerate(names)), **kwargs))
        for names, kwargs in ((NAMES, {"batch_scale": 3, "momentum": 0.9}), (NAMES[::-1], {}))
    )
    old.optimizer.set_lr_mult({0: 0.5, "b_bias": 2.0})
    weights = [np.ones(size) for size in (2, 3, 4)]

    def train(updater, order, weights):
        for k, weight in zip(order, weights, strict=True):
            updater(k, np.arange(1.0, 1 + len(weight)), weight)

    for order in ((0, 1, 2), (0, 1, 2), (0,)):
        train(old, order, weights[: len(order)])
    assert through_file(old, new, tmp_path) == Skipped([], [])
    assert new.optimizer._index_update_count == {2: 3, 1: 2, 0: 2}
    assert new.optimizer.idx2name == {0: "c_weight", 1: "b_bias", 2: "a_weight"}
    assert new.optimizer.lr_mult == {2: 0.5, "b_bias": 2.0}
    others = [weight.copy() for weight in weights]
    for _ in range(2):
        train(old, (0, 1, 2), weights)
        train(new, (2, 1, 0), others)
    np.testing.assert_equal(others, weights)


def test_names_of_live_parameters_count_too(tmp_path):
    live = [SimpleNamespace(name=name, lr_mult=1.0, wd_mult=1.0) for name in "ab"]
    old, new = (adam(param_dict=dict(enumerate(some))) for some in (live, live[::-1]))
    old(0, np.ones(2), np.ones(2))
    through_file(old, new, tmp_path)
    assert list(new.states) == [1]


def test_without_strict_the_common_parameters_are_loaded(tmp_path):
    old, new = named(NAMES[:2], 2, 3, wd=0.5), named(NAMES[1:], 3, 4)
    old.optimizer.set_lr_mult({"a_weight": 3.0, "b_bias": 2.0})
    new.optimizer.set_lr_mult({1: 7.0})
    with pytest.raises(CheckpointError, match=r"lacks \['c_weight'\] and has \['a_weight'\]"):
        through_file(old, new, tmp_path)
    assert list(new.states) == [0, 1]
    skipped = through_file(old, new, tmp_path, strict=False)
    assert skipped == Skipped(missing=["c_weight"], extra=["a_weight"])
    made = new.optimizer
    assert list(new.states) == [0]
    assert (made.wd, made.num_update, made._index_update_count) == (0.5, 1, {0: 1})
    assert made.lr_mult == {"b_bias": 2.0, 1: 7.0}
    assert made.idx2name == {0: "b_bias", 1: "c_weight"}
    np.testing.assert_array_equal(new.states[0][0], old.states[1][0])


def test_a_parameter_that_was_never_updated_is_not_missing(tmp_path):
    old, new = named(NAMES, 2), named(NAMES)
    assert through_file(old, new, tmp_path) == Skipped([], [])
    assert list(new.states) == [0]


def test_names_that_one_side_does_not_know_do_not_count(tmp_path):
    named, bare = adam(2, param_idx2name={0: "a_weight"}), adam()
    through_file(named, bare, tmp_path)
    assert bare.optimizer.idx2name == {0: "a_weight"}
    assert through_file(adam(2), named, tmp_path) == Skipped([], [])
    assert named.optimizer.idx2name == {0: "a_weight"}


def test_a_path_is_a_name_too(tmp_path):
    old, new = adam(), adam(param_idx2name={"head": "new"})
    old.step({"body": np.ones(2), "head": np.ones(3)}, {"body": np.ones(2), "head": np.ones(3)})
    assert through_file(old, new, tmp_path, strict=False) == Skipped(["new"], ["head"])
    assert [*new.states] == ["body"]


def test_integers_and_texts_are_different_indices(tmp_path):
    old, new = adam(2), adam()
    with pytest.warns(UserWarning, match="a state of '0', and 0 has another"):
        old("0", np.ones(3), np.ones(3))
    through_file(old, new, tmp_path)
    assert [(index, len(state[0])) for index, state in new.states.items()] == [(0, 2), ("0", 3)]


def test_a_name_that_several_parameters_have_is_no_key():
    assert keys_of({0: "a", 1: "a", 2: "b", 3: None}, [4]) == {0: 0, 1: 1, "b": 2, 3: 3, 4: 4}
    assert keys_of({0: "a", "a": None}, []) == {0: 0, "a": "a"}
    assert keys_of({"a": "a"}, ["a"]) == {"a": "a"}
