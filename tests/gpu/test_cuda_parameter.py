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
from helpers.device_arrays import check_close, host, on_device
from helpers.tensor_lists import dtype_of

pytestmark = pytest.mark.gpu


def parameter(device, dtype="float32", **kwargs):
    made = Parameter("fc_weight", shape=(4, 3), init="ones", dtype=dtype, **kwargs)
    made.initialize(device=device)
    return made


ROWS = RowSparse(np.ones((2, 3), np.float32), np.array([3, 3]), (4, 3))


@pytest.mark.parametrize(
    ("name", "dtype", "stype"),
    [
        ("adam", "float32", "default"),
        ("adagrad", "float32", "row_sparse"),
        ("sgd", "float16", "default"),
        ("sgd", "bfloat16", "default"),
    ],
)
def test_a_trainer_takes_the_same_steps(name, dtype, stype, rng):
    """Gradients from either side are added, rows too, which may come twice."""
    dtype = dtype_of(dtype)
    there, here = (parameter(d, dtype, grad_stype=stype) for d in (cuda_device(0), cpu()))
    arguments = {"learning_rate": 0.125, "multi_precision": dtype.itemsize == 2}
    trainers = [Trainer([each], name, arguments) for each in (there, here)]
    for k in range(3):
        grads = [rng.normal(size=(4, 3)).astype(np.float32) for _ in range(2)]
        grads = [ROWS, ROWS] if stype == "row_sparse" else grads + [ROWS] * (k == 1)
        for place, grad in enumerate(grads):
            there.add_grad(grad if place % 2 else on_device(grad))
            here.add_grad(grad)
        for trainer in trainers:
            trainer.step(batch_size=2)
    check_close(there.data(), here.data())


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


@pytest.mark.parametrize("stype", ["default", "row_sparse"])
@pytest.mark.parametrize("way", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
def test_a_copy_has_arrays_of_its_own_on_the_device(way, stype):
    weight = parameter(cuda_device(0), grad_stype=stype)
    weight.add_grad(np.ones((4, 3)))
    made = way(weight)
    Trainer([made], "sgd", {"learning_rate": 1.0}).step(1)
    assert is_cuda(made.data())
    assert made.list_device() == [cuda_device(0)]
    np.testing.assert_array_equal(host(made.data()), np.zeros((4, 3)))
    np.testing.assert_array_equal(host(weight.data()), np.ones((4, 3)))


WRONG = [
    (ValueError, r"gradient must have shape \(4, 3\), got \(2,\)", np.ones(2, np.float32)),
    (TypeError, "complex", np.ones((4, 3), complex)),
    (ValueError, "indices must be .* below 4", (np.ones((1, 3), np.float32), np.array([9]))),
]


@pytest.mark.parametrize("kept", [False, True], ids=["first", "second"])
@pytest.mark.parametrize(("error", "words", "wrong"), WRONG)
def test_a_wrong_gradient_is_refused_and_changes_nothing(error, words, wrong, kept):
    weight = parameter(cuda_device(0))
    weight.set_grad(np.full((4, 3), 7.0))
    if not kept:
        Trainer([weight]).step(1)
    with pytest.raises(error, match=words):
        weight.add_grad(on_device(wrong))
    assert weight._gradient.fresh == [kept]
    np.testing.assert_array_equal(host(weight.grad()), np.full((4, 3), 7.0))


def test_what_a_device_does_not_have_is_refused():
    with pytest.raises(ValueError, match="one CUDA device"):
        parameter([cuda_device(0), cpu()])
    table = Parameter("table", shape=(4, 3), stype="row_sparse", init="ones")
    with pytest.raises(RuntimeError, match="stype 'row_sparse'"):
        table.initialize(device=cuda_device(0))
    with pytest.raises(TypeError, match="int64 has no gradients on a CUDA device"):
        parameter(cuda_device(0), dtype="int64").add_grad(np.ones((4, 3), int))


@pytest.mark.parametrize("dtype", ["bool", "uint8", "int64", "float16", ">f4", "float64"])
def test_gradients_of_any_kind_are_converted_and_kept_until_zero_grad(dtype):
    weight = parameter(cuda_device(0), grad_req="add")
    weight.set_grad(on_device(np.ones((4, 3), dtype)))
    weight.add_grad(on_device(np.ones((4, 3), dtype)))
    np.testing.assert_array_equal(host(weight.grad()), np.full((4, 3), 2.0))
    weight.zero_grad()
    assert not host(weight.grad()).any()


def test_a_parameter_in_main_memory_takes_gradients_from_a_device():
    weight = parameter(cpu())
    weight.add_grad(on_device(np.ones((4, 3), np.float32)))
    weight.add_grad((on_device(np.ones((1, 3), np.float32)), on_device(np.array([2]))))
    np.testing.assert_array_equal(weight.grad()[:, 0], [1, 1, 2, 1])
