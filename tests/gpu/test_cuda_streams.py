"""Streams, lifetimes and places of arrays on devices."""

import weakref

import numpy as np
import pytest
from numba import cuda

from fastopt import Parameter, RowSparse, optimizer
from fastopt._kernels import cuda_driver, device_memory
from fastopt._kernels.devices import header
from fastopt.device import cuda as cuda_device
from helpers.device_arrays import Foreign, host, on_device

pytestmark = pytest.mark.gpu


def ones(*shape):
    return on_device(np.ones(shape, np.float32))


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


def test_a_parameter_copies_rows_after_they_were_written(monkeypatch):
    """It keeps them until the step, on the default stream, which its weight uses."""
    waited, order = [], cuda_driver.order
    monkeypatch.setattr(cuda_driver, "order", lambda *pair: waited.append(pair) or order(*pair))
    made = cuda.stream(), cuda.stream()
    one, other = map(int, made)
    weight = Parameter("w", shape=(4, 2), init="ones", grad_stype="row_sparse")
    weight.initialize(device=cuda_device(0))
    rows = Foreign(on_device(np.array([1])), stream=other)
    weight.add_grad(RowSparse(Foreign(ones(1, 2), stream=one), rows, (4, 2)))
    assert waited == [(one, 0), (0, one), (other, 0), (0, other)]


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


class Elsewhere(Foreign):
    class device:
        id = 1


VALUES, THIRD = np.ones((1, 2), np.float32), np.array([3])
WRONG = [
    (
        r"values are on cuda\(0\), indices on cuda\(1\)",
        on_device,
        lambda i: Elsewhere(on_device(i)),
    ),
    (r"indices are on cuda\(0\), the values on the host", np.array, on_device),
    ("indices must be at least 0 and below 4, got 9", on_device, lambda i: 3 * i),
    ("indices must be integers", on_device, lambda i: i / 2),
]


@pytest.mark.parametrize(("words", "values", "rows"), WRONG)
def test_rows_beside_values_elsewhere_are_refused(words, values, rows):
    with pytest.raises((TypeError, ValueError), match=words):
        RowSparse(values(VALUES), rows(THIRD), (4, 2))


def test_unaligned_arrays_are_copied():
    memory = on_device(np.zeros(13, np.uint8))
    address = Foreign(memory).__cuda_array_interface__["data"][0]
    weight = Foreign(memory, shape=(3,), typestr="<f4", data=(address + 1, False))
    updater = optimizer.get_updater(optimizer.SGD(learning_rate=1.0))
    for _ in range(2):
        updater(0, ones(3), weight)
    np.testing.assert_array_equal(host(memory)[1:].view(np.float32), [-2, -2, -2])
