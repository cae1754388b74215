"""Gradients: what comes first in a step replaces or adds, on each device for itself."""

import contextlib
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import sparse

from fastopt import optimizer
from fastopt.device import cpu
from fastopt.parameter import Parameter
from fastopt.parameter.gradient import Gradient
from fastopt.sparse import RowSparse
from fastopt.trainer import Trainer

SHAPE = (4, 2)
whole = st.integers(-8, 8).map(float)  # sums of these are exact
dense = st.lists(whole, min_size=8, max_size=8).map(lambda a: np.reshape(a, SHAPE))
rows = st.lists(st.tuples(st.integers(0, 3), whole, whole), max_size=5).map(
    lambda triples: RowSparse(
        np.array([values for _, *values in triples], np.float32).reshape(-1, 2),
        np.array([row for row, *_ in triples], np.int64),
        SHAPE,
    )
)
gradients = dense | rows
forms = gradients | dense.map(np.ndarray.tolist) | dense.map(sparse.csr_array)
forms |= rows.map(lambda grad: (grad.values, grad.indices))
devices = st.sampled_from([cpu(0), cpu(1)])
operations = st.lists(
    st.tuples(st.sampled_from(["add", "set", "zero", "step", "look", "anew"]), forms, devices),
    max_size=12,
)


class Ignore:
    """An updater that only serves to make steps."""

    optimizer = optimizer.SGD()

    def __call__(self, indices, grads, weights):
        pass


def parameter_of(grad_req="write", grad_stype="default", dtype="float32", device=None):
    parameter = Parameter("w", grad_req, SHAPE, dtype, grad_stype=grad_stype)
    parameter.initialize("ones", device)
    return parameter


def numbers(grad):
    grad = RowSparse(*grad, SHAPE) if isinstance(grad, tuple) else grad
    dense = grad.to_dense() if isinstance(grad, RowSparse) else grad
    return np.array(dense.toarray() if sparse.issparse(dense) else dense)


@given(operations, st.sampled_from(["write", "add"]), st.sampled_from(["default", "row_sparse"]))
def test_gradients_follow_the_rules_of_grad_req(steps, grad_req, grad_stype):
    parameter = parameter_of(grad_req, grad_stype, device=[cpu(0), cpu(1)])
    trainer = Trainer([parameter], Ignore.optimizer, comm=Ignore())
    expected = {cpu(0): np.zeros(SHAPE), cpu(1): np.zeros(SHAPE)}
    begun = {cpu(0): False, cpu(1): False}
    for kind, grad, device in steps:
        if kind in ("add", "set"):
            getattr(parameter, f"{kind}_grad")(grad, device)
            keeps = kind == "add" and (grad_req == "add" or begun[device])
            expected[device] = numbers(grad) + (expected[device] if keeps else 0)
            begun[device] = True
        elif kind == "zero":
            parameter.zero_grad()
            expected = dict.fromkeys(expected, np.zeros(SHAPE))
        elif kind == "anew":
            for req in ("null", grad_req):
                parameter.grad_req = req
            expected, begun = dict.fromkeys(expected, np.zeros(SHAPE)), dict.fromkeys(begun, False)
        elif kind == "look":
            seen = parameter.list_grad()
            assert isinstance(seen[0], RowSparse) is (grad_stype == "row_sparse")
        else:
            parameter.list_grad()
            trainer.step(1)
            total = expected[cpu(0)] + expected[cpu(1)]
            expected, begun = dict.fromkeys(expected, total), dict.fromkeys(begun, False)
    for device, total in expected.items():
        np.testing.assert_array_equal(numbers(parameter.grad(device)), total)


@given(gradients, st.sampled_from(["default", "row_sparse"]))
def test_given_gradients_are_copied_and_not_changed(grad, grad_stype):
    parameter, before = parameter_of(grad_stype=grad_stype), numbers(grad)
    for change in (parameter.add_grad, parameter.add_grad, parameter.set_grad):
        change(grad)
    np.testing.assert_array_equal(numbers(grad), before)
    getattr(grad, "values", grad)[...] = 99
    np.testing.assert_array_equal(numbers(parameter.grad()), before)


def test_grad_is_the_live_array_for_good():
    parameter = parameter_of()
    trainer = Trainer([parameter], "sgd", {"learning_rate": 1.0})
    array = parameter.grad()
    array[...] = 0.25
    trainer.step(1)
    np.testing.assert_array_equal(parameter.data(), 0.75)
    for change, value in ((parameter.set_grad, 1), (parameter.add_grad, 2)):
        change(np.ones(SHAPE))
        assert parameter.grad() is array
        assert (array == value).all()
    parameter.zero_grad()
    assert parameter.list_grad()[0] is array
    assert (array == 0).all()


def test_without_gradients_calls_are_ignored_and_reading_is_an_error():
    constant = Parameter("w", "add", SHAPE, differentiable=False)
    constant.initialize()
    constant.grad_req = "write"
    for parameter in (parameter_of("null"), constant):
        parameter.add_grad(np.ones(SHAPE))
        parameter.set_grad("anything")
        parameter.zero_grad()
        for read in (parameter.grad, parameter.list_grad):
            with pytest.raises(RuntimeError, match=r"'w' has no .* because its grad_req is 'null'"):
                read()


def test_a_gradient_that_was_refused_is_not_there_for_a_step():
    parameter = parameter_of()
    trainer = Trainer([parameter])
    for give in (parameter.add_grad, parameter.set_grad):
        with pytest.raises(ValueError, match="Parameter 'w': "):
            give(np.ones(4))
    with pytest.raises(UserWarning, match="stale"):
        trainer.step(1)


def test_threads_may_each_serve_a_device_from_the_start(monkeypatch):
    places = [cpu(0), cpu(1)]
    parameter = parameter_of(device=places)
    together = threading.Barrier(2)

    def slowly(*arguments):
        with contextlib.suppress(threading.BrokenBarrierError):
            together.wait(timeout=0.1)  # passes only if both threads make a gradient
        return Gradient(*arguments)

    monkeypatch.setattr("fastopt.parameter.parameter.Gradient", slowly)
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(parameter.add_grad, [np.ones(SHAPE)] * 2, places))
    for place in places:
        np.testing.assert_array_equal(parameter.grad(place), 1)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float64"])
@pytest.mark.parametrize("grad_stype", ["default", "row_sparse"])
def test_gradients_take_the_type_of_the_parameter_and_overflow_to_infinity(dtype, grad_stype):
    parameter = parameter_of(dtype=dtype, grad_stype=grad_stype)
    parameter.add_grad(np.full(SHAPE, 3e38, np.float32))
    parameter.add_grad(np.full(SHAPE, 3e38, np.float32))
    grad = parameter.grad()
    assert grad.dtype == parameter.dtype
    assert (numbers(grad).astype(np.float64) > 5e38).all()
    parameter.set_grad(np.full(SHAPE, np.inf))
    parameter.add_grad(np.full(SHAPE, -np.inf))
    assert np.isnan(numbers(parameter.grad())).all()
    wide = parameter_of(grad_stype=grad_stype)
    wide.set_grad(np.full(SHAPE, 1e30))
    wide.cast(dtype)
    assert np.isinf(numbers(wide.grad())).all() == (dtype == "float16")


def test_a_single_number_is_a_parameter_and_a_list_of_two_rows_an_array():
    parameter = Parameter("w", shape=())
    parameter.initialize("ones", [cpu(0), cpu(1)])
    trainer = Trainer([parameter], "sgd", {"learning_rate": 0.125})
    parameter.add_grad(1.0, cpu(0))
    parameter.add_grad(1.0, cpu(0))
    parameter.add_grad(3, cpu(1))
    trainer.step(1)
    assert [float(a) for a in parameter.list_data()] == [0.375, 0.375]
    pair = Parameter("w", shape=(2, 2))
    pair.initialize()
    pair.set_grad([[1, 2], [3, 4]])  # values, not values and rows
    np.testing.assert_array_equal(pair.grad(), [[1, 2], [3, 4]])
