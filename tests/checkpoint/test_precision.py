"""Checkpoints carry masters, remainders, compressed states, missed decay and the loss scale."""

import numpy as np
import pytest

from fastopt import optimizer

amp = pytest.importorskip("fastopt.amp")

MASTER = {"multi_precision": True}
CASES = [
    ("adam", MASTER, "float16", "dense"),
    ("adam", MASTER, "bfloat16", "rows"),
    ("adam", {**MASTER, "master": "split"}, "bfloat16", "dense"),
    ("adam", {"rounding": "stochastic"}, "bfloat16", "dense"),
    ("adam", {"state_dtype": "bfloat16"}, "float32", "dense"),
    ("adamw", {"sparse_decay": "catch_up", "wd": 0.1}, "float32", "rows"),
    ("sgd", {**MASTER, "momentum": 0.9}, "float16", "dense"),
    ("sgld", MASTER, "float16", "dense"),
    ("lbsgd", {**MASTER, "momentum": 0.9, "batch_scale": 2}, "float16", "dense"),
    ("lbsgd", {"batch_scale": 2}, "float32", "rows"),
]


def dtype_of(name):
    if name != "bfloat16":
        return np.dtype(name)
    return np.dtype(pytest.importorskip("ml_dtypes").bfloat16)


def train(updater, weights, steps, kind):
    for step in steps:
        rng = np.random.default_rng(step)
        for index, weight in weights.items():
            if kind == "rows":
                values = rng.normal(size=(5, weight.shape[1])).astype(weight.dtype)
                gradient = values, rng.integers(0, len(weight), 5)
            else:
                gradient = rng.normal(size=weight.shape).astype(weight.dtype)
            updater(index, gradient, weight)


@pytest.mark.parametrize(
    ("name", "kwargs", "dtype", "kind"),
    [*CASES[:2], *(pytest.param(*case, marks=pytest.mark.exhaustive) for case in CASES[2:])],
)
def test_the_next_steps_are_the_same_bits(name, kwargs, dtype, kind, tmp_path):
    def fresh(**more):
        made = optimizer.create(name, **{"learning_rate": 0.05, **kwargs, **more})
        return optimizer.get_updater(made)

    old, new = fresh(seed=3), fresh()
    weights = {0: np.ones((40, 6), dtype_of(dtype)), "fc": np.ones((30, 4), dtype_of(dtype))}
    train(old, weights, range(3), kind)
    old.save(tmp_path / "file")
    others = {index: weight.copy() for index, weight in weights.items()}
    train(old, weights, range(3, 6), kind)
    new.load(tmp_path / "file")
    train(new, others, range(3, 6), kind)
    for index, weight in weights.items():
        assert others[index].tobytes() == weight.tobytes()


def test_the_loss_scale_goes_on(tmp_path):
    old, new = (optimizer.get_updater(optimizer.SGD()) for _ in range(2))
    old.loss_scaler = amp.LossScaler(1024, growth_interval=3)
    for overflow in (True, False, False):
        old.loss_scaler.update(overflow)
    new.loss_scaler = amp.LossScaler()
    old.save(tmp_path / "file")
    new.load(tmp_path / "file")
    assert new.loss_scaler.state_dict() == old.loss_scaler.state_dict()
    new.loss_scaler.update(False)
    assert new.loss_scaler.scale == 1024


def test_copies_that_the_updater_keeps_fresh_stay_bound(tmp_path):
    old, new = (optimizer.get_updater(optimizer.SGD(learning_rate=0.5)) for _ in range(2))
    weight = np.ones(3, np.float32)
    old(0, np.ones(3, np.float32), weight)
    old.save(tmp_path / "file")
    copy = weight.astype(np.float16)
    new.set_copy(0, copy)
    new.load(tmp_path / "file")
    new(0, np.ones(3, np.float32), weight)
    np.testing.assert_array_equal(copy, np.zeros(3))
