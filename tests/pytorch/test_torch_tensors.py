"""Addresses of tensors that compiled code reads."""

import numpy as np
import pytest
import torch
from torch._subclasses import FakeTensorMode

import fastopt.torch
from fastopt.torch import tensors
from fastopt.torch.tensors import Places, Same, Snapshot, layout
from helpers.frames import frames

SHAPES = [(), (7,), (1,), (3, 4), (1, 4), (4, 1), (2, 1, 3), (1, 1, 1, 1), (2, 3, 2, 2, 3)]
DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.complex64, torch.int8]


def read(like, *others):
    """Return the addresses that are read of tensors, or None if one has another form."""
    found = np.zeros(len(others), np.int64)
    places = Places([like] * len(others), found.ctypes.data + 8 * np.arange(len(others)))
    return found.tolist() if places.read([*others]) else None


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_addresses_are_those_of_torch_however_tensors_of_the_form_came_about(shape, dtype):
    like = torch.ones(shape, dtype=dtype)
    wide = torch.ones(like.numel() + 9, dtype=dtype)
    strides = [
        5 if length == 1 else step for length, step in zip(shape, like.stride(), strict=True)
    ]
    same = [
        like,
        like.detach(),
        like.clone()[...],
        torch.from_numpy(np.ones(shape)).to(dtype),
        wide[2 : 2 + like.numel()].view(shape),
        wide.as_strided(shape, strides),
        wide.clone().as_strided_((1,) * 5, (5, 4, 3, 2, 1)).as_strided_(shape, like.stride()),
        torch.nn.Parameter(like.clone(), requires_grad=False),
    ]
    if dtype is not torch.int8:
        leaf = like.clone().requires_grad_()
        leaf.grad = like.clone()
        (leaf * 2).abs().sum().backward()
        same += [leaf, leaf.grad, (leaf * 2), leaf.data]
    assert read(like, *same) == [each.data_ptr() for each in same]


class Own(torch.Tensor):
    """A class of a user, which may report something else."""


def made_by(make):
    """Return a function that creates a tensor like torch.ones(2, 3) in a context."""

    def made():
        with make():
            return torch.ones(2, 3)

    return made


def freed():
    tensor = torch.ones(2, 3)
    tensor.untyped_storage().resize_(0)
    return tensor


OTHERS = {
    "none": lambda: None,
    "array": lambda: np.ones((2, 3), np.float32),
    "shape": lambda: torch.ones(3, 2),
    "dimensions": lambda: torch.ones(1, 2, 3),
    "strides": lambda: torch.ones(3, 2).t(),
    "expanded": lambda: torch.ones(1, 3).expand(2, 3),
    "dtype": lambda: torch.ones(2, 3, dtype=torch.float64),
    "bytes": lambda: torch.ones(2, 3).view(torch.int32),
    "conjugated": lambda: torch.ones(2, 3, dtype=torch.complex64).conj(),
    "negated": lambda: torch._neg_view(torch.ones(2, 3)),
    "device": lambda: torch.ones(2, 3, device="meta"),
    "sparse": lambda: torch.ones(2, 3).to_sparse(),
    "lazy": lambda: torch._lazy_clone(torch.ones(2, 3)),
    "zero": lambda: torch._efficientzerotensor((2, 3)),
    "inferred": made_by(torch.inference_mode),
    "fake": made_by(FakeTensorMode),
    "class": lambda: torch.ones(2, 3).as_subclass(Own),
    "freed": freed,
    "unaligned": lambda: torch.frombuffer(bytearray(25), dtype=torch.float32, offset=1).view(2, 3),
}


@pytest.mark.parametrize("name", OTHERS)
def test_tensors_of_other_forms_are_refused(name):
    like = torch.ones(2, 3, dtype=torch.complex64 if name == "conjugated" else torch.float32)
    assert read(like, like, OTHERS[name]()) is None


@pytest.mark.parametrize("count", [0, 1, 3])
def test_lists_of_another_length_are_refused(count):
    like, found = torch.ones(3), np.zeros(2, np.int64)
    places = Places([like] * 2, found.ctypes.data + 8 * np.arange(2))
    assert places.read([like] * 2)
    assert not places.read([like] * count)


CHANGES = {
    "data": lambda x: setattr(x, "data", torch.ones(4, 5)),
    "set": lambda x: x.set_(torch.ones(4, 5)),
    "swap": lambda x: torch.utils.swap_tensors(x, torch.ones(4, 5)),
    "resize": lambda x: x.resize_(40, 50),
    "storage": lambda x: x.untyped_storage().resize_(1 << 20),
    "shared memory": lambda x: x.share_memory_(),
    "reshape": lambda x: x.resize_(5, 4),
    "transpose": lambda x: x.t_(),
    "dtype": lambda x: setattr(x, "data", x.data.view(torch.int32)),
}


@pytest.mark.parametrize("is_known", [True, False])
@pytest.mark.parametrize("name", CHANGES)
def test_memory_that_moves_is_read_again(name, is_known, monkeypatch):
    if not is_known:
        monkeypatch.setattr(tensors, "layout", lambda: None)
    x = torch.ones(4, 5)
    snapshot, hold = Snapshot([torch.ones(2), x]), x.clone()
    x.mul_(2)
    assert snapshot.look() == snapshot.seen
    CHANGES[name](x)
    assert snapshot.look() != snapshot.seen
    assert hold.sum() == 20


def test_a_warm_step_enters_at_most_12_python_functions():
    weights = [torch.nn.Parameter(torch.ones(4, 3)) for _ in range(20)]
    opt = fastopt.torch.Adam(weights)
    for _ in range(4):
        for weight in weights:
            weight.grad = torch.ones(4, 3)
        found = frames(lambda: opt.step())
    assert len(found) <= 12, found


def test_a_parameter_that_is_cloned_when_it_is_written_leaves_the_clone():
    weight = torch.nn.Parameter(torch.ones(3))
    opt = fastopt.torch.SGD([weight], lr=1.0)
    for _ in range(2):
        weight.grad = torch.ones(3)
        opt.step()
    clone = torch._lazy_clone(weight.detach())
    weight.grad = torch.ones(3)
    opt.step()
    assert weight.tolist() == [-2, -2, -2]
    assert clone.tolist() == [-1, -1, -1]


@pytest.fixture
def found_again():
    """The layout is found again, now and after the test."""
    layout.cache_clear()
    yield
    layout.cache_clear()


@pytest.mark.parametrize("find", [lambda: 1 // 0, lambda: tuple(range(8))])
def test_a_layout_that_does_not_tell_tensors_apart_is_not_read(find, found_again, monkeypatch):
    monkeypatch.setattr(tensors, "_layout", find)
    assert layout() is None


def test_tensors_are_not_read_where_arrays_are_not(found_again, monkeypatch):
    monkeypatch.setattr(tensors, "readable", lambda: False)
    assert layout() is None
    assert not Same([1]).match([2])
