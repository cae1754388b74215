"""Dense updates on the device are those of the CPU."""

import numpy as np
import pytest
from numba import cuda

from fastopt import optimizer
from fastopt._kernels import device_memory
from fastopt._kernels.device_memory import zero
from fastopt._kernels.devices import header
from helpers.cases import CASES
from helpers.device_arrays import Foreign, check_close, check_steps, host, on_device

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("size", [1023, 10_001, 70_000])
@pytest.mark.parametrize("dtype", [np.float32, np.float64], ids=["float32", "float64"])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_every_rule_steps_in_several_blocks(case, dtype, size, rng):
    """Sizes that reach whole packs and single elements, one block and many, and groups of sums."""
    shape = (size // 7, 7) if case.shape[1:] else (size,)
    weight = rng.normal(size=shape).astype(dtype)
    grads = [rng.normal(size=shape).astype(dtype) for _ in range(2)]
    exact = dtype == np.float64 and case.name != "sgld"
    tolerance = {"rtol": 1e-11, "atol": 1e-13} if exact else {"rtol": 1e-5, "atol": 5e-6}
    check_steps(lambda: case.updater(wd=case.wd), weight, grads, **tolerance)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:float16 weights without masters")
def test_elements_beyond_2_to_the_31_are_updated(rng):
    size, shown = 2**31 + 20_481, 10_000
    weight = cuda.device_array(size, np.float16)
    grad = cuda.device_array(size, np.float16)
    for array in (weight, grad):
        zero(array, 0)
    ends = rng.normal(size=shown).astype(np.float16)
    for part in (
        slice(0, shown),
        slice(2**31 - shown // 2, 2**31 + shown // 2),
        slice(-shown, None),
    ):
        grad[part].copy_to_device(ends)
    optimizer.get_updater(optimizer.SGD(learning_rate=1.0))(0, grad, weight)
    for part in (slice(0, shown), slice(-shown, None)):
        np.testing.assert_array_equal(weight[part].copy_to_host(), -grad[part].copy_to_host())
    assert not weight[shown : 10 * shown].copy_to_host().any()


def test_sums_are_in_the_order_of_the_cpu(rng):
    weight = rng.normal(size=34_000).astype(np.float32)
    grad = rng.normal(size=34_000).astype(np.float32)
    here, there = (optimizer.Updater(optimizer.LARS(), clip_global_norm=1e9) for _ in range(2))
    device = on_device(weight)
    here(0, grad, weight)
    there(0, on_device(grad), device)
    assert here.info.global_norm == there.info.global_norm
    check_close(device, weight)


INT8 = {"state_dtype": "int8", "state_min_size": 1}
FORMS = ("adam", {}), ("adam", INT8), ("lamb", {}), ("groupadagrad", {}), ("sgld", {})


@pytest.mark.parametrize(("name", "kwargs"), FORMS)
def test_a_list_is_the_same_as_single_calls(name, kwargs, rng):
    shapes = [(4, 5), (2, 130), (40, 30), (1, 1)]
    weights = [rng.normal(size=shape).astype(np.float32) for shape in shapes]
    listed, single = (optimizer.Updater(optimizer.create(name, **kwargs)) for _ in range(2))
    together, alone = on_device(weights), on_device(weights)
    for _ in range(3):
        grads = on_device([rng.normal(size=shape).astype(np.float32) for shape in shapes])
        listed([0, 1, 2, 3], grads, together)
        for index, (grad, weight) in enumerate(zip(grads, alone, strict=True)):
            single(index, grad, weight)
    for one, other in zip(host(together), host(alone), strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("order", [(0, 2, 3, 1), (3, 2, 1, 0), (1, 0, 2, 3)], ids=str)
@pytest.mark.parametrize("turned", [False, True], ids=["alike", "gradient in C order"])
def test_dense_arrays_are_updated_as_they_lie(order, turned, rng, monkeypatch):
    """A weight whose channels are last in memory, with a gradient like it, needs no copies."""
    shape = (4, 3, 2, 5)
    array, grad = (rng.normal(size=shape).astype(np.float32) for _ in range(2))
    back = np.argsort(order)

    def lying(values):
        memory = on_device(np.ascontiguousarray(values.transpose(order)))
        turned = values.transpose(order).copy().transpose(back)
        return memory, Foreign(memory, shape=turned.shape, strides=turned.strides)

    memory, weight = lying(array)
    given = on_device(grad) if turned else lying(grad)[1]
    moved = []
    run = device_memory.Copy.run

    def count(*arguments):
        moved.append(arguments)
        run(*arguments)

    monkeypatch.setattr(device_memory.Copy, "run", count)
    updater, expected = optimizer.get_updater(optimizer.Adam()), optimizer.get_updater("adam")
    for _ in range(3):
        updater(0, given, weight)
        expected(0, grad, array)
    assert len(moved) == (3 + 1) * turned  # the gradient, in each step, and when it is prepared
    np.testing.assert_allclose(host(memory).transpose(back), array, rtol=2e-6)
    mean = updater.states[0][0]
    assert header(mean).strides == header(weight).strides
    np.testing.assert_allclose(device_memory.host(mean), expected.states[0][0], rtol=2e-6)
