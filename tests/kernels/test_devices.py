"""Headers and readings of torch's tensors on devices, without one."""

from types import SimpleNamespace

import pytest

from fastopt._kernels.devices import header, readings

torch = pytest.importorskip("torch")


class Tensor(torch.Tensor):
    """A tensor that torch takes for one on a device."""

    is_cuda = True


@pytest.fixture(autouse=True)
def current(monkeypatch):
    """The current stream."""
    stream = SimpleNamespace(cuda_stream=0)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream)
    return stream


def tensor(*numbers):
    return torch.tensor(numbers).as_subclass(Tensor)


def test_a_tensor_that_was_moved_to_main_memory_is_none_of_a_device():
    weight = tensor(1.0)
    assert header(weight) is header(weight) is not weight
    weight.is_cuda = False
    assert header(weight) is weight


def test_the_current_stream_is_used(current):
    one, other = tensor(1.0), tensor(2.0, 3.0)
    for current.cuda_stream in (0, 48):
        assert readings([one, other]).streams == [current.cuda_stream] * 2
        assert header(one).stream == header(other).stream == current.cuda_stream


def test_the_address_shape_and_dtype_are_read():
    one, other = tensor([1.0, 2.0], [3.0, 4.0]), tensor(1.0, 2.0)
    assert readings([one, other]).addresses == [one.data_ptr(), other.data_ptr()]
    kinds = readings([one.t(), one, one[:, 0], other]).kinds
    assert len(set(kinds)) == 4
    assert header(one.t()).strides == (4, 8)
