"""Checkpoints carry masters, remainders, compressed states, missed decay and the loss scale."""

import numpy as np
import pytest

from fastopt import optimizer

amp = pytest.importorskip("fastopt.amp")


def test_the_loss_scale_is_resumed(tmp_path):
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
