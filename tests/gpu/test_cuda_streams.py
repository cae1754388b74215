"""Streams, lifetimes and places of arrays on devices."""

import copy
import pickle
import weakref

import numpy as np
import pytest
from numba import cuda

from fastopt import Parameter, RowSparse, optimizer
from fastopt._engine.validate import leaves
from fastopt._kernels import cuda_driver, device_memory
from fastopt._kernels.devices import header, is_cuda
from fastopt.device import cuda as cuda_device
from helpers.device_arrays import Foreign, host, on_device

pytestmark = pytest.mark.gpu


def ones(*shape):
    return on_device(np.ones(shape, np.float32))


@pytest.fixture
def streams():
    """Handles of four streams."""
    made = [cuda.stream() for _ in range(4)]
    yield [int(stream) for stream in made]
    cuda.synchronize()


@pytest.fixture
def launched(monkeypatch):
    """Streams of launches, in order."""
    streams, launch = [], cuda_driver.launch

    def record(kernel, blocks, threads, stream, *arguments):
        streams.append(stream)
        launch(kernel, blocks, threads, stream, *arguments)

    monkeypatch.setattr(cuda_driver, "launch", record)
    return streams


@pytest.fixture
def waited(monkeypatch):
    """Pairs of a stream that is waited for, and the one that waits, in order."""
    streams, order = [], cuda_driver.order

    def record(*pair):
        streams.append(pair)
        order(*pair)

    monkeypatch.setattr(cuda_driver, "order", record)
    return streams


def test_kernels_run_on_the_stream_of_the_weight(launched, waited, streams):
    weight, updater = Foreign(ones(3)), optimizer.get_updater(optimizer.LAMB())
    for stream in streams[:2]:
        cuda.synchronize()
        weight.changes["stream"] = stream
        launched.clear()
        updater(0, Foreign(ones(3), stream=stream), weight)
        assert set(launched) == {stream}
    assert not waited


@pytest.mark.parametrize("order", ["C", "F"])
def test_a_master_is_updated_on_the_stream_of_its_weight(launched, waited, streams, order):
    memory = on_device(np.ones((3, 2), np.float16, order=order))
    weight, grad = Foreign(memory), Foreign(on_device(np.ones((3, 2), np.float16)))
    updater = optimizer.get_updater(optimizer.SGD(multi_precision=True))
    for stream in (streams[0], streams[1], streams[1]):
        cuda.synchronize()
        grad.changes["stream"] = weight.changes["stream"] = stream
        updater(0, grad, weight)
        launched.clear()
        updater([0], [grad], [weight])
        assert set(launched) == {stream}
    assert not waited


def test_streams_of_gradients_and_of_their_reader_are_waited_for(launched, waited, streams):
    own, *others = streams
    weight, updater = Foreign(ones(3, 2), stream=own), optimizer.get_updater(optimizer.SGD())
    for _ in range(2):
        updater(0, Foreign(ones(3, 2), stream=others[0]), weight)
        assert waited == [(others[0], own), (own, others[0])]
        waited.clear()
    values, rows = Foreign(ones(1, 2), stream=others[1]), on_device(np.array([1]))
    updater(0, (values, Foreign(rows, stream=others[2])), weight)
    assert set(waited[:2]) == {(other, own) for other in others[1:]}
    assert set(waited[-2:]) == {(own, other) for other in others[1:]}


@cuda.jit
def late(array, turns, value):
    """Write `value` after a long computation."""
    i, x = cuda.grid(1), np.float32(0)
    for _ in range(turns):
        x = x * np.float32(0.5) + np.float32(1)
    if i < len(array):
        array[i] = value if x > 0 else x


def test_a_gradient_is_read_between_the_writes_of_its_stream():
    one, other = cuda.stream(), cuda.stream()
    memory, grad = ones(100_000), ones(100_000)
    weight = Foreign(memory, stream=int(one))
    updater = optimizer.get_updater(optimizer.SGD(learning_rate=1.0))
    for _ in range(3):
        late[400, 256, other](grad, 10**6, 2)
        updater(0, Foreign(grad, stream=int(other)), weight)
        late[400, 256, other](grad, 1, 9)
    cuda.synchronize()
    np.testing.assert_array_equal(host(memory), np.full(100_000, 1 - 3 * 2, np.float32))


def test_a_parameter_copies_rows_after_they_were_written(launched, waited, streams):
    """It keeps them until the step, on the default stream, which its weight uses."""
    weight = Parameter("w", shape=(4, 2), init="ones", grad_stype="row_sparse")
    weight.initialize(device=cuda_device(0))
    one, other = streams[:2]
    rows = Foreign(on_device(np.array([1])), stream=other)
    weight.add_grad(RowSparse(Foreign(ones(1, 2), stream=one), rows, (4, 2)))
    assert waited == [(one, 0), (0, one), (other, 0), (0, other)]
    assert set(launched) == {0}


def test_states_are_copied_on_the_stream_of_their_weight(launched, streams):
    memory, own = on_device(np.ones((3, 2), np.float32, order="F")), streams[0]
    weight, updater = Foreign(memory, stream=own), optimizer.get_updater(optimizer.AdaGrad())
    rows = ones(1, 2), on_device(np.array([1]))
    for _ in range(2):
        launched.clear()
        updater(0, tuple(Foreign(part, stream=own) for part in rows), weight)
        assert set(launched) == {own}
    assert len(launched) > 3


def test_weights_of_a_list_keep_their_streams(launched, waited, streams):
    one, two, three, _ = streams
    weights = [Foreign(ones(3), stream=stream) for stream in (one, two, one)]
    updater = optimizer.get_updater(optimizer.SGD())
    for _ in range(2):
        launched.clear()
        updater([0, 1, 2], [ones(3) for _ in weights], weights)
        assert launched == [one, two]
    cuda.synchronize()
    for weight in weights:
        weight.changes["stream"] = three
    weights[0].changes["stream"] = one
    for _ in range(2):
        launched.clear()
        updater([0, 1, 2], [ones(3) for _ in weights], weights)
        assert launched == [one, three]


def test_a_copy_in_main_memory_waits_for_the_device(monkeypatch):
    updater, seen = optimizer.get_updater(optimizer.Adam()), []
    updater(0, ones(3), ones(3))
    monkeypatch.setattr(cuda, "synchronize", lambda: seen.append(1))
    updater.states_dict()
    assert len(seen) == 2


def test_what_is_copied_to_an_array_lives_until_the_launch(monkeypatch):
    made, owned = [], device_memory.owned

    def recorded(*arguments):
        array = owned(*arguments)
        made.append(weakref.ref(array))
        return array

    def launch(*_):
        assert made
        assert all(array() is not None for array in made)

    target = ones(3)
    monkeypatch.setattr(device_memory, "owned", recorded)
    monkeypatch.setattr(cuda_driver, "launch", launch)
    device_memory.assign(header(target), np.zeros(3, np.float32))


def test_rows_and_values_must_be_together():
    class Elsewhere(Foreign):
        class device:
            id = 1

    values, rows = np.ones((1, 2), np.float32), np.array([3])
    with pytest.raises(ValueError, match=r"values are on cuda\(0\), indices on cuda\(1\)"):
        RowSparse(on_device(values), Elsewhere(on_device(rows)), (4, 2))
    with pytest.raises(ValueError, match=r"indices are on cuda\(0\), the values on the host"):
        RowSparse(values, on_device(rows), (4, 2))
    with pytest.raises(ValueError, match="indices must be at least 0 and below 4, got 9"):
        RowSparse(on_device(values), np.array([9]), (4, 2))
    with pytest.raises(TypeError, match="indices must be integers"):
        RowSparse(on_device(values), np.array([1.5]), (4, 2))


def test_indices_may_be_replaced_by_ones_on_the_host():
    grad = RowSparse(ones(1, 2), on_device(np.array([3])), (4, 2))
    weight, updater = ones(4, 2), optimizer.get_updater(optimizer.SGD(learning_rate=1.0))
    updater(0, grad, weight)
    grad.indices = np.array([1])
    updater(0, grad, weight)
    np.testing.assert_array_equal(weight.copy_to_host()[:, 0], [1, 0, 1, 0])


def test_unaligned_arrays_are_copied():
    memory = on_device(np.zeros(13, np.uint8))
    address = Foreign(memory).__cuda_array_interface__["data"][0]
    weight = Foreign(memory, shape=(3,), typestr="<f4", data=(address + 1, False))
    updater = optimizer.get_updater(optimizer.SGD(learning_rate=1.0))
    for _ in range(2):
        updater(0, ones(3), weight)
    np.testing.assert_array_equal(host(memory)[1:].view(np.float32), [-2, -2, -2])


@pytest.mark.parametrize("name", ["adam", "lbsgd", "adamw"])
@pytest.mark.parametrize("way", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
def test_a_copied_updater_holds_no_device_memory_and_resumes(name, way):
    extra = {"lbsgd": {"batch_scale": 2}, "adamw": {"sparse_decay": "catch_up", "wd": 0.1}}
    updater = optimizer.get_updater(optimizer.create(name, **extra.get(name, {})))
    weight = ones(4, 2)
    updater(0, ones(4, 2), weight)
    told = updater.__getstate__(), updater.optimizer.__getstate__()
    kept = told[1].get("cumgrads", {}), list(told[1]["row_decay"].values())
    held = [*leaves(told[0]["states"].get(0)), *leaves(list(kept[1]))]
    held += [each["cum_grad"] for each in kept[0].values()]
    assert held
    assert not any(map(is_cuda, held))
    made, twin = way(updater), on_device(host(weight))
    made(0, ones(4, 2), twin)
    updater(0, ones(4, 2), weight)
    np.testing.assert_array_equal(host(twin), host(weight))
    assert all(header(leaf).place == cuda_device(0) for leaf in leaves(made.states[0]))
