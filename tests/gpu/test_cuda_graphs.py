"""Steps that CUDA graphs repeat."""

import numpy as np
import pytest
from numba import cuda

from fastopt import optimizer
from helpers.device_arrays import Foreign, host, on_device

pytestmark = [
    pytest.mark.gpu,
]


@pytest.fixture
def stream():
    """Handle of a stream that does not wait for the default stream."""
    from cuda.bindings import driver

    cuda.current_context()
    flags = driver.CUstream_flags.CU_STREAM_NON_BLOCKING
    return int(ok(driver.cuStreamCreate(int(flags))))


def ok(result):
    """Value of a result of the driver."""
    assert not result[0], result[0]
    return result[1] if len(result) > 1 else None


def captured(call, stream):
    """Return a function that launches a graph of a call."""
    from cuda.bindings import driver

    mode = driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_GLOBAL
    ok(driver.cuStreamBeginCapture(stream, mode))
    try:
        call()
    finally:
        graph = ok(driver.cuStreamEndCapture(stream))
    made = ok(driver.cuGraphInstantiate(graph, 0))
    return lambda: ok(driver.cuGraphLaunch(made, stream))


@pytest.mark.parametrize("clip", [None, 0.5], ids=["", "clip"])
@pytest.mark.parametrize("name", ["sgd", "adam", "lamb"])
@pytest.mark.parametrize("sizes", [(300,), (300, 7)], ids=["one", "list"])
def test_a_graph_counts_its_steps_and_follows_the_learning_rate(sizes, name, clip, stream, rng):
    arrays, grads = ([rng.normal(size=n).astype(np.float32) for n in sizes] for _ in range(2))
    here, there = (
        optimizer.Updater(optimizer.create(name), clip_global_norm=clip) for _ in range(2)
    )
    memory = [on_device(array) for array in arrays]
    weights = [Foreign(each, stream=stream) for each in memory]
    own = [Foreign(on_device(grad), stream=stream) for grad in grads]
    later = [Foreign(on_device(grad), stream=stream) for grad in grads]  # as in a pool of graphs
    indices = list(range(len(sizes)))

    def step(grads):
        there(*((0, grads[0], weights[0]) if len(sizes) == 1 else (indices, grads, weights)))

    cuda.synchronize()
    for _ in range(2):
        step(own)
    replay = captured(lambda: step(later), stream)
    for _ in range(3):
        replay()
    step(own)
    replay()
    here.optimizer.learning_rate = there.optimizer.learning_rate = 0.01
    steps = 7
    for _ in range(steps):
        here.optimizer.learning_rate = optimizer.create(name).learning_rate
        here(indices, grads, arrays)
    there.set_copy(9, None)  # forgets all records
    there.refresh_graphs()
    replay()
    here.optimizer.learning_rate = 0.01
    here(indices, grads, arrays)
    cuda.synchronize()
    for one, other in zip(memory, arrays, strict=True):
        np.testing.assert_allclose(host(one), other, rtol=1e-5, atol=1e-6)
    assert there.optimizer.num_update == here.optimizer.num_update == 1 + steps
    assert there.optimizer._index_update_count == here.optimizer._index_update_count


@pytest.mark.parametrize("index", [0, [0]], ids=["one", "list"])
def test_a_first_step_is_not_captured(index, stream):
    """It would allocate."""
    updater, many = optimizer.Updater(optimizer.Adam()), isinstance(index, list)
    weight, grad = (Foreign(on_device(np.ones(3, np.float32)), stream=stream) for _ in range(2))
    call = (index, [grad], [weight]) if many else (index, grad, weight)
    cuda.synchronize()
    with pytest.raises(RuntimeError, match="is being captured for a CUDA graph"):
        captured(lambda: updater(*call), stream)
    assert updater.optimizer.num_update == 0
    assert not updater.states
    np.testing.assert_array_equal(host(weight.array), np.ones(3))


def test_a_step_with_a_loss_scaler_is_not_captured(stream):
    from fastopt.amp import LossScaler

    updater = optimizer.Updater(optimizer.Adam(), LossScaler())
    weight, grad = (Foreign(on_device(np.ones(3, np.float32)), stream=stream) for _ in range(2))
    for _ in range(2):
        updater([0], [grad], [weight])
    with pytest.raises(RuntimeError, match="a loss scaler adapts its scale on the host"):
        captured(lambda: updater([0], [grad], [weight]), stream)
    updater([0], [grad], [weight])
    assert updater.optimizer.num_update == 3
