"""Weights in two precisions under an updater: both are those of training in float32."""

import numpy as np
import pytest

from fastopt import optimizer
from fastopt.precision import Initializer, PseudoFP16Initializer
from helpers.cases import kept
from helpers.two_precisions import HALVES, halves, paired, single_and_half

OPTIMIZERS = {
    "sgd": {"learning_rate": 0.1},
    "nag": {"learning_rate": 0.1, "momentum": 0.9},
    "adam": {"learning_rate": 0.01, "wd": 0.1},
    "lamb": {"learning_rate": 0.01, "wd": 0.1},
}
optimizers = pytest.mark.parametrize("name", kept(OPTIMIZERS, "adam"))


def updater_of(name, **kwargs):
    return optimizer.get_updater(optimizer.create(name, **OPTIMIZERS[name], **kwargs))


def gradients(dtype, count=4):
    rng = np.random.default_rng(1)
    return [rng.normal(size=(5, 3)).astype("f4").astype(HALVES[dtype]) for _ in range(count)]


def made(klass, dtype, workspace=None):
    return klass("normal", sigma=1.0, rng=0, dtype=dtype).create_param("w", workspace, (5, 3))


def single_precision(name, dtype):
    """Weights after each step when everything is float32."""
    weight = made(Initializer, "float32").blob
    updater = updater_of(name)
    for grad in gradients(dtype):
        updater("w", grad.astype(np.float32), weight)
        yield weight


@optimizers
def test_the_master_is_the_array_that_the_optimizer_works_on(name):
    info, updater = made(PseudoFP16Initializer, "float16"), updater_of(name, multi_precision=True)
    info.bind(updater, 3)
    start = info.blob_copy["float32"].copy()
    np.testing.assert_array_equal(start, made(Initializer, "float32").blob)
    updater(3, gradients("float16")[0], info.blob)
    assert any(info.arrays["w_fp32"] is part for part in updater.states[3])
    assert (info.blob_copy["float32"] != start).all()


@paired
@halves
@optimizers
def test_a_workspace_follows_training_and_saves_the_truth(name, dtype, klass):
    """A run that goes on from a saved workspace is the run that was not interrupted."""
    workspace, updater = {}, updater_of(name, multi_precision=True)
    info = made(klass, dtype, workspace).bind(updater)
    grads = gradients(dtype)
    for grad in grads[:2]:
        updater("w", grad, info.blob)
        assert all(workspace[key] is array for key, array in info.arrays.items())
    restored, later = {}, updater_of(name, multi_precision=True)
    info = made(klass, dtype, restored)
    info.blob[...] = workspace["w"]
    later.set_states(updater.get_states(dump_optimizer=True))
    info.bind(later)
    if klass is PseudoFP16Initializer:
        np.testing.assert_array_equal(restored["w_fp32"], workspace["w_fp32"])
    for grad in grads[2:]:
        later("w", grad, info.blob)
    *_, expected = single_precision(name, dtype)
    single, half = single_and_half(info)
    np.testing.assert_array_equal(single, expected)
    np.testing.assert_array_equal(half, expected.astype(HALVES[dtype]))


@pytest.mark.parametrize("multi_precision", [True, False])
def test_a_master_that_no_updater_uses_warns_once(multi_precision):
    info = made(PseudoFP16Initializer, "float16")
    updater = updater_of("sgd", multi_precision=multi_precision, rounding="stochastic")
    grad = gradients("float16")[0]
    with pytest.warns(UserWarning, match=r"^index 3: .*master is not used; call bind") as record:
        updater(3, grad, info.blob)
    assert [warning.filename for warning in record] == [__file__]
    updater(3, grad, info.blob)
    updater_of("sgd", multi_precision=True)(3, grad, info.blob)


def test_a_split_master_is_no_array_but_starts_unrounded_too():
    workspace, updater = {}, updater_of("adam", multi_precision=True, master="split")
    info = made(PseudoFP16Initializer, "bfloat16", workspace).bind(updater)
    expected = single_precision("adam", "bfloat16")
    for grad, single in zip(gradients("bfloat16"), expected, strict=True):
        updater("w", grad, info.blob)
        np.testing.assert_allclose(info.blob.astype("f4"), single, rtol=2**-8)
    assert [*info.arrays] == [*workspace] == ["w"]


def test_one_precision_needs_no_masters_and_two_are_refused_without():
    info, updater = made(Initializer, "float32"), updater_of("sgd")
    assert info.bind(updater).blob_copy == {}
    info = made(PseudoFP16Initializer, "float16")
    before = info.blob_copy["float32"]
    with pytest.raises(ValueError, match="multi_precision=True"):
        info.bind(updater)
    assert info.blob_copy["float32"] is before
    assert repr(info) == "<ParameterInfo w: float16, w_fp32: float32, shape (5, 3)>"
