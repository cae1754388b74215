"""Parameters and trainers on a device."""

import copy
import pickle

import numpy as np
import pytest

from fastopt import Parameter, RowSparse, Trainer
from fastopt._kernels.devices import is_cuda
from fastopt.device import cpu
from fastopt.device import cuda as cuda_device
from fastopt.parameter import ParameterDict
from helpers.device_arrays import host, on_device

pytestmark = pytest.mark.gpu


def parameter(device, dtype="float32", **kwargs):
    made = Parameter("fc_weight", shape=(4, 3), init="ones", dtype=dtype, **kwargs)
    made.initialize(device=device)
    return made


def test_a_parameter_lives_on_its_device():
    weight = parameter(cuda_device(0))
    assert is_cuda(weight.data())
    assert is_cuda(weight.grad())
    assert weight.list_device() == [cuda_device(0)]
    np.testing.assert_array_equal(host(weight.data()), np.ones((4, 3), np.float32))


def test_a_trainer_takes_the_same_steps(rng):
    there, here = parameter(cuda_device(0)), parameter(cpu())
    trainers = [Trainer([each], "adam", {"learning_rate": 0.1}) for each in (there, here)]
    for k in range(3):
        grad, more = (rng.normal(size=(4, 3)).astype(np.float32) for _ in range(2))
        there.add_grad(on_device(grad))
        there.add_grad(more)
        here.add_grad(grad)
        here.add_grad(more)
        if k == 1:
            rows = RowSparse(np.ones((2, 3), np.float32), np.array([3, 3]), (4, 3))
            there.add_grad(rows)
            here.add_grad(rows)
        for trainer in trainers:
            trainer.step(batch_size=2)
    np.testing.assert_allclose(host(there.data()), here.data(), rtol=1e-6)


def test_repeated_rows_of_a_gradient_are_summed():
    there, here = (parameter(d, grad_stype="row_sparse") for d in (cuda_device(0), cpu()))
    trainers = [Trainer([each], "adagrad") for each in (there, here)]
    first = RowSparse(np.ones((2, 3), np.float32), np.array([3, 1]), (4, 3))
    for _ in range(2):
        there.add_grad(on_device(first))
        there.add_grad(first)
        here.add_grad(first)
        here.add_grad(first)
        for trainer in trainers:
            trainer.step(batch_size=1)
    np.testing.assert_allclose(host(there.data()), here.data(), rtol=1e-6)


def test_grad_req_add_keeps_until_zero_grad():
    weight = parameter(cuda_device(0), grad_req="add")
    for _ in range(2):
        weight.add_grad(np.ones((4, 3)))
    np.testing.assert_array_equal(host(weight.grad()), np.full((4, 3), 2, np.float32))
    weight.zero_grad()
    assert not host(weight.grad()).any()


def test_it_can_be_set_cast_moved_and_saved(tmp_path):
    params = ParameterDict()
    weight = params.get("weight", shape=(2, 2), init="zeros")
    params.initialize(device=cuda_device(0))
    weight.set_data([[1, 2], [3, 4]])
    weight.set_data(on_device(np.array([[1, 2], [3, 5]], np.float32)))
    weight.cast("float64")
    params.save(tmp_path / "params.safetensors")
    weight.reset_device(cpu())
    assert isinstance(weight.data(), np.ndarray)
    weight.reset_device(cuda_device(0))
    np.testing.assert_array_equal(host(weight.data()), [[1, 2], [3, 5]])
    weight.set_data(np.zeros((2, 2)))
    params.load(tmp_path / "params.safetensors")
    np.testing.assert_array_equal(host(weight.data()), [[1, 2], [3, 5]])


def test_wrong_gradients_and_devices_are_refused():
    weight = parameter(cuda_device(0))
    with pytest.raises(ValueError, match=r"gradient must have shape \(4, 3\), got \(2,\)"):
        weight.add_grad(on_device(np.ones(2, np.float32)))
    with pytest.raises(TypeError, match="complex"):
        weight.add_grad(np.ones((4, 3), complex))
    with pytest.raises(ValueError, match="one CUDA device"):
        parameter([cuda_device(0), cpu()])
    table = Parameter("table", shape=(4, 3), stype="row_sparse", init="ones")
    with pytest.raises(RuntimeError, match="stype 'row_sparse'"):
        table.initialize(device=cuda_device(0))


def test_a_half_with_a_master_trains(half):
    weight = parameter(cuda_device(0), dtype=half)
    trainer = Trainer([weight], "sgd", {"learning_rate": 0.125, "multi_precision": True})
    weight.add_grad(np.ones((4, 3), np.float32))
    trainer.step(batch_size=1)
    assert host(weight.data()).dtype == half
    np.testing.assert_array_equal(host(weight.data()).astype(np.float32), 0.875)


@pytest.mark.parametrize("stype", ["default", "row_sparse"])
@pytest.mark.parametrize("way", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
def test_a_copy_has_arrays_of_its_own_on_the_device(way, stype):
    weight = parameter(cuda_device(0), grad_stype=stype)
    weight.add_grad(np.ones((4, 3)))
    told = weight.__getstate__()
    assert isinstance(told["_data"][0], np.ndarray)
    buffer = told["_gradient"].__getstate__()["buffers"][0]
    assert isinstance(buffer.values if stype == "row_sparse" else buffer, np.ndarray)
    made = way(weight)
    Trainer([made], "sgd", {"learning_rate": 1.0}).step(1)
    assert is_cuda(made.data())
    np.testing.assert_array_equal(host(made.data()), np.zeros((4, 3)))
    np.testing.assert_array_equal(host(weight.data()), np.ones((4, 3)))


@pytest.mark.parametrize("kept", [False, True], ids=["first", "second"])
def test_a_wrong_gradient_changes_nothing(kept):
    weight = parameter(cuda_device(0))
    weight.set_grad(np.full((4, 3), 7.0))
    if not kept:
        Trainer([weight]).step(1)
    wrong = on_device(np.ones((1, 3), np.float32)), on_device(np.array([9]))
    with pytest.raises(ValueError, match="indices must be at least 0 and below 4"):
        weight.add_grad(wrong)
    with pytest.raises(TypeError, match="complex"):
        weight.add_grad(on_device(np.ones((4, 3), complex)))
    assert weight._gradient.fresh == [kept]
    np.testing.assert_array_equal(host(weight.grad()), np.full((4, 3), 7.0))


@pytest.mark.parametrize("dtype", ["bool", "uint8", "int64", "float16", ">f4", "float64"])
def test_gradients_of_any_kind_are_converted(dtype):
    weight = parameter(cuda_device(0))
    weight.set_grad(on_device(np.ones((4, 3), dtype)))
    weight.add_grad(on_device(np.ones((4, 3), dtype)))
    np.testing.assert_array_equal(host(weight.grad()), np.full((4, 3), 2.0))


def test_integers_have_no_gradients_on_a_device():
    with pytest.raises(TypeError, match="int64 has no gradients on a CUDA device"):
        parameter(cuda_device(0), dtype="int64").add_grad(np.ones((4, 3), int))


def test_a_parameter_in_main_memory_takes_gradients_from_a_device():
    weight = parameter(cpu())
    weight.add_grad(on_device(np.ones((4, 3), np.float32)))
    weight.add_grad((on_device(np.ones((1, 3), np.float32)), on_device(np.array([2]))))
    np.testing.assert_array_equal(weight.grad()[:, 0], [1, 1, 2, 1])
