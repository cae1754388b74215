"""An updater goes on from states that MXNet wrote."""

import numpy as np
import pytest

from fastopt import lr_scheduler, optimizer
from fastopt.checkpoint import CheckpointError, Skipped
from helpers.mxnet_pickles import dense, pickled
from helpers.paths import GOLDEN

SAMPLES = GOLDEN / "mxnet_states"
MOM = np.arange(1, 4, dtype=np.float32)


def sgd(**kwargs):
    return optimizer.get_updater(optimizer.SGD(**kwargs))


def test_adam_resumes_from_an_mxnet_checkpoint():
    """The sample holds three steps on gradients of ones with Adam's defaults."""
    expected, weight = optimizer.get_updater(optimizer.Adam()), np.ones((2, 3), np.float32)
    for _ in range(3):
        expected(0, np.ones((2, 3), np.float32), weight)
    got, other = optimizer.get_updater(optimizer.Adam(beta1=0.5)), weight.copy()
    assert got.load_mxnet(SAMPLES / "1.3.1_adamdump.states") == Skipped([], [])
    made = got.optimizer
    assert (made.beta1, made.num_update, made._index_update_count) == (0.9, 3, {0: 3})
    np.testing.assert_allclose(got.states[0][0], expected.states[0][0], rtol=1e-6)
    for updater, target in ((expected, weight), (got, other)):
        updater(0, np.ones((2, 3), np.float32), target)
    np.testing.assert_allclose(other, weight, rtol=1e-6)
    assert got.states_synced == {0: True}


def test_states_alone_leave_the_optimizer_as_it_is():
    """And any schedule, without a warning."""
    updater = sgd(momentum=0.5, lr_scheduler=lambda n: 0.25)
    updater.load_mxnet((SAMPLES / "1.3.1_sgd.states").read_bytes())
    made = updater.optimizer
    assert (made.momentum, made.learning_rate, made._index_update_count) == (0.5, 0.25, {})
    weight = np.zeros((2, 3), np.float32)
    updater(0, np.zeros((2, 3), np.float32), weight)
    np.testing.assert_allclose(weight, 0.5 * -0.271, rtol=1e-6)


def test_names_are_followed():
    data = pickled(
        {0: dense(MOM), 1: dense(MOM[:2])},
        {"idx2name": {0: "a_weight", 1: "b_weight"}, "_index_update_count": {0: 7, 1: 5}},
    )
    updater = sgd(momentum=0.9, param_idx2name={0: "b_weight", 1: "a_weight"})
    updater.load_mxnet(data)
    assert [state.size for _, state in sorted(updater.states.items())] == [2, 3]
    assert updater.optimizer._index_update_count == {1: 7, 0: 5}
    with pytest.raises(CheckpointError, match=r"has \['a_weight'\]"):
        sgd(param_idx2name={0: "b_weight"}).load_mxnet(data)


def test_a_schedule_of_mxnet_is_not_loaded():
    data = pickled({0: dense(MOM)}, {"lr_scheduler": "schedule", "lr": 0.5, "momentum": 0.75})
    updater = sgd(lr_scheduler=lr_scheduler.FactorScheduler(3, 0.5, base_lr=0.25))
    with pytest.warns(UserWarning, match="the present one is kept") as record:
        updater.load_mxnet(data)
    assert record[0].filename == __file__
    assert (updater.optimizer.learning_rate, updater.optimizer.momentum) == (0.25, 0.75)


@pytest.mark.parametrize(
    "data",
    [pickled({0: dense(MOM)}, {"class": "Adam"}), b"", b"N."],
    ids=["class", "empty", "None"],
)
def test_what_does_not_fit_changes_nothing(data, tmp_path):
    """The error has the name of the file."""
    updater, path = sgd(momentum=0.9), tmp_path / "file"
    with pytest.raises(FileNotFoundError):
        updater.load_mxnet(path)
    path.write_bytes(data)
    words = f"saved with Adam|{path}.*(not a file|NoneType where)"
    with pytest.raises(CheckpointError, match=words):
        updater.load_mxnet(path)
    assert updater.states == {}


def lbsgd_states(total, momentum, scale):
    attributes = {
        "class": "LBSGD",
        "batch_scale": scale,
        "momentum": 0.9 if momentum else 0.0,
        "cumgrads": {0: {"cum_grad": total, "num_cums": 4}},
    }
    return pickled({0: momentum}, attributes)


@pytest.mark.parametrize(
    ("total", "momentum", "scale", "expected"),
    [
        (dense(MOM), None, 3, MOM),
        (0, dense(MOM), 2, 0 * MOM),
        (0, None, 1, None),
    ],
    ids=["begun", "not begun", "never"],
)
def test_sums_of_gradients_are_loaded(total, momentum, scale, expected):
    updater = optimizer.get_updater(optimizer.LBSGD())
    updater.load_mxnet(lbsgd_states(total, momentum, scale))
    entry = updater.optimizer.cumgrads[0]
    assert entry["num_cums"] == 4
    np.testing.assert_equal(entry["cum_grad"], expected)


def test_a_sum_of_unknown_shape_is_refused():
    updater = optimizer.get_updater(optimizer.LBSGD())
    with pytest.raises(CheckpointError, match="index 0: a sum of gradients of unknown shape"):
        updater.load_mxnet(lbsgd_states(0, None, 2))
