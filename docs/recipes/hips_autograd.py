"""fastopt with gradients of HIPS autograd: a network tells tumours apart."""

import autograd.numpy as np
from autograd import grad
from autograd.misc import optimizers
from both_times import both_times
from sklearn.datasets import load_breast_cancer

from fastopt import optimizer

STEPS, BATCH = 200, 64


X, Y = load_breast_cancer(return_X_y=True)
X = (X - X.mean(axis=0)) / X.std(axis=0)


def start():
    """Weights and biases of a network with 16 hidden units."""
    rng = np.random.default_rng(0)
    return [rng.normal(size=(30, 16)) / 30**0.5, np.zeros(16), rng.normal(size=16) / 4, np.zeros(1)]


def loss(params, x, y):
    """Mean cross-entropy."""
    w1, b1, w2, b2 = params
    score = np.tanh(x @ w1 + b1) @ w2 + b2
    return np.mean(np.logaddexp(0, score) - y * score)


def slope(params, step):
    """Gradient of the loss of a batch."""
    rows = np.random.default_rng(step).integers(len(X), size=BATCH)
    return grad(loss)(params, X[rows], Y[rows])


def theirs(method, **arguments):
    """Losses before each step of an optimizer of autograd."""
    losses = []
    method(
        slope,
        start(),
        num_iters=STEPS,
        callback=lambda params, step, g: losses.append(loss(params, X, Y)),
        **arguments,
    )
    return losses


def ours(made):
    """Losses before each step of an optimizer of fastopt."""
    params, losses = start(), []
    updater, names = optimizer.get_updater(made), ["w1", "b1", "w2", "b2"]
    for step in range(STEPS):
        losses.append(loss(params, X, Y))
        updater(names, slope(params, step), params)
    return losses


def loops(name):
    """Trainings with one of autograd's optimizers, and with fastopt's; each returns its losses."""
    if name == "adam":
        return (
            lambda: theirs(optimizers.adam, step_size=0.01),
            lambda: ours(optimizer.Adam(lr=0.01, formula="torch")),
        )
    # The average of autograd's sgd has weights that add up to 1: the rate is smaller by 1 - mass.
    return (
        lambda: theirs(optimizers.sgd, step_size=0.1, mass=0.9),
        lambda: ours(optimizer.SGD(learning_rate=0.1 * (1 - 0.9), momentum=0.9)),
    )


def curves(name):
    """The losses of one of autograd's optimizers, and of fastopt's."""
    return [train() for train in loops(name)]


if __name__ == "__main__":
    for name in ("adam", "sgd"):
        for step, (one, other) in enumerate(zip(*curves(name), strict=True)):
            if step % 20 == 0:
                print(f"{name}, step {step:3}: autograd {one:.9f}, fastopt {other:.9f}")
    print(both_times("autograd", *loops("adam")))
