"""CuPy's arrays, on a GPU."""

import numpy as np
import pytest

from fastopt import RowSparse, optimizer

cupy = pytest.importorskip("cupy")
pytestmark = [
    pytest.mark.gpu,
]


@pytest.mark.filterwarnings("ignore:float16 weights without masters")
@pytest.mark.parametrize("name", ["adam", "lamb", "groupadagrad"])
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_arrays_are_updated_in_place(name, dtype, rng):
    here = rng.normal(size=(50, 7)).astype(dtype)
    there = cupy.asarray(here)
    updaters = [optimizer.get_updater(optimizer.create(name)) for _ in range(2)]
    for _ in range(3):
        grad = rng.normal(size=(50, 7)).astype(dtype)
        updaters[0](0, grad, here)
        updaters[1](0, cupy.asarray(grad), there)
    tolerance = {"rtol": 2e-3, "atol": 2e-3} if dtype == "float16" else {"rtol": 1e-5, "atol": 1e-6}
    np.testing.assert_allclose(cupy.asnumpy(there), here, **tolerance)


def test_rows_are_indexed_by_arrays(rng):
    here = rng.normal(size=(50, 7)).astype(np.float32)
    there, values = cupy.asarray(here), rng.normal(size=(3, 7)).astype(np.float32)
    ids = np.array([9, 2, 9])
    optimizer.get_updater("adam")(0, RowSparse(values, ids, here.shape), here)
    optimizer.get_updater("adam")(0, (cupy.asarray(values), cupy.asarray(ids)), there)
    np.testing.assert_allclose(cupy.asnumpy(there), here, rtol=1e-5, atol=1e-6)


def test_state_is_read_without_a_copy():
    weight = cupy.ones(5, "float32")
    updater = optimizer.get_updater(optimizer.Adam())
    updater(0, cupy.ones(5, "float32"), weight)
    mean = updater.states[0][0]
    pointer = mean.__cuda_array_interface__["data"][0]
    assert cupy.asarray(mean).data.ptr == pointer


def test_an_update_runs_after_the_work_on_its_stream():
    """The stream and the default stream do not wait for each other."""
    weight, grad = (cupy.zeros((2000, 2000), "float32") for _ in range(2))
    updater = optimizer.get_updater(optimizer.SGD(learning_rate=1.0))
    cupy.cuda.Device().synchronize()
    with cupy.cuda.Stream(non_blocking=True) as stream:
        for _ in range(3):
            busy = cupy.ones((4000, 4000), "float32")
            for _ in range(20):
                busy = cupy.sin(busy)
            grad += 1
            updater(0, grad, weight)
            grad *= 2
    stream.synchronize()
    assert bool((weight == -(1 + 3 + 7)).all())
