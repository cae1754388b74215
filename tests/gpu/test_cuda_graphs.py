"""Steps that CUDA graphs repeat."""

import numpy as np
import pytest
from numba import cuda

from fastopt import optimizer
from fastopt.amp import LossScaler
from helpers.device_arrays import Foreign, check_close, host, on_device

pytestmark = pytest.mark.gpu


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
    here, there = (optimizer.Updater(name, clip_global_norm=clip) for _ in range(2))
    weights, own, later = (
        [Foreign(on_device(each), stream=stream) for each in listed]
        for listed in (arrays, grads, grads)  # the last as in a pool of graphs
    )
    rate, indices = here.optimizer.learning_rate, list(range(len(sizes)))

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
    there.optimizer.learning_rate = 0.01
    there.set_copy(9, None)  # forgets all records
    there.refresh_graphs()
    replay()
    for own_rate in (rate,) * 7 + (0.01,):
        here.optimizer.learning_rate = own_rate
        here(indices, grads, arrays)
    cuda.synchronize()
    check_close([each.array for each in weights], arrays, rtol=1e-5)
    assert there.optimizer.num_update == here.optimizer.num_update
    assert there.optimizer._index_update_count == here.optimizer._index_update_count


REFUSED = [
    (0, lambda: None, "is being captured for a CUDA graph"),  # the first step would allocate
    (2, LossScaler, "a loss scaler adapts its scale on the host"),
]


@pytest.mark.parametrize(("calls", "scaler", "words"), REFUSED)
def test_a_step_that_needs_the_host_is_not_captured(calls, scaler, words, stream):
    updater = optimizer.Updater("adam", scaler())
    weight, grad = (Foreign(on_device(np.ones(3, np.float32)), stream=stream) for _ in range(2))
    for _ in range(calls):
        updater([0], [grad], [weight])
    cuda.synchronize()
    before = host(weight.array)
    with pytest.raises(RuntimeError, match=words):
        captured(lambda: updater([0], [grad], [weight]), stream)
    assert (updater.optimizer.num_update, len(updater.states)) == (calls, calls > 0)
    np.testing.assert_array_equal(host(weight.array), before)
