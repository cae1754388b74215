"""PennyLaneOptimizer has the results of PennyLane's optimizers and returns new arrays."""

import pennylane as qml
import pytest
from pennylane import numpy as np

import fastopt
from fastopt.adapters import PennyLaneOptimizer


@qml.qnode(qml.device("default.qubit", wires=1))
def circuit(angles):
    qml.Rot(angles[0], angles[1], angles[2], wires=0)
    return qml.expval(qml.PauliZ(0))


def cost(angles, x, bias):
    return (circuit(angles) + bias - x) ** 2


def trained(optimizer, steps=4):
    """Arguments after each step; the second one is not trainable, the third a number."""
    args = [
        np.array([0.1, 0.2, 0.3], requires_grad=True),
        np.array(-1.0, requires_grad=False),
        np.array(0.5, requires_grad=True),
    ]
    found = []
    for _ in range(steps):
        args, value = optimizer.step_and_cost(cost, *args)
        found.append((float(value), [arg.tolist() for arg in args]))
    return found, args


PAIRS = {
    "Adam": (qml.AdamOptimizer(0.1), lambda: PennyLaneOptimizer("adam", 0.1, beta2=0.99)),
    "SGD": (qml.GradientDescentOptimizer(0.1), lambda: PennyLaneOptimizer(fastopt.SGD(lr=0.1))),
    "heavy": (qml.MomentumOptimizer(0.1), lambda: PennyLaneOptimizer("sgd", 0.1, momentum=0.9)),
}


@pytest.mark.parametrize("pair", PAIRS)
def test_arguments_are_those_of_pennylanes_optimizer(pair):
    theirs, ours = PAIRS[pair]
    (theirs, _), (ours, args) = trained(theirs), trained(ours())
    for (value, arrays), (expected, others) in zip(ours, theirs, strict=True):
        assert value == pytest.approx(expected)
        for array, other in zip(arrays, others, strict=True):
            assert array == pytest.approx(other)
    assert [arg.requires_grad for arg in args] == [True, False, True]


def test_arguments_do_not_change_and_one_is_returned_alone():
    optimizer, angles = PennyLaneOptimizer("sgd", 0.25), np.array([1.0, 2.0], requires_grad=True)
    new = optimizer.step(lambda x: (x**2).sum(), angles)
    assert (angles.tolist(), new.tolist()) == ([1, 2], [0.5, 1])
    assert type(new) is type(angles)


def test_the_step_size_can_change_and_a_reset_forgets_the_rest():
    optimizer, angles = PennyLaneOptimizer("adam", 0.5), np.array([1.0], requires_grad=True)
    for _ in range(3):
        first = optimizer.step(lambda x: x.sum(), angles)
    optimizer.stepsize = 0.25
    optimizer.reset()
    assert optimizer.updater.states == {}
    assert first.tolist() == pytest.approx([0.5])
    assert optimizer.step(lambda x: x.sum(), angles).tolist() == pytest.approx([0.75])


def test_averages_replace_an_argument_while_it_is_evaluated():
    optimizer, angles = PennyLaneOptimizer("schedulefreesgd", 0.25), np.ones(2)
    path = [angles := optimizer.step(lambda x: (x**2).sum(), angles) for _ in range(3)]
    trained = angles.tolist()
    with optimizer.updater.averaged({0: angles}):
        assert path[0].tolist() > angles.tolist() > trained
    assert angles.tolist() == trained
