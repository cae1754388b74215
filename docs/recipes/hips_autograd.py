"""fastopt with gradients of HIPS autograd: a network classifies tumours."""

import autograd.numpy as np
from autograd import grad
from autograd.misc import optimizers
from both_times import both_times
from sklearn.datasets import load_breast_cancer

import fastopt

STEPS, BATCH = 200, 64


X, Y = load_breast_cancer(return_X_y=True)
X = (X - X.mean(axis=0)) / X.std(axis=0)


def start():
    """Return initial weights and biases of a network with 16 hidden units."""
    rng = np.random.default_rng(0)
    return [rng.normal(size=(30, 16)) / 30**0.5, np.zeros(16), rng.normal(size=16) / 4, np.zeros(1)]


def loss(params, x, y):
    """Return the mean cross-entropy."""
    w1, b1, w2, b2 = params
    score = np.tanh(x @ w1 + b1) @ w2 + b2
    return np.mean(np.logaddexp(0, score) - y * score)


def slope(params, step):
    """Return the gradient of the loss of a batch."""
    rows = np.random.default_rng(step).integers(len(X), size=BATCH)
    return grad(loss)(params, X[rows], Y[rows])


def theirs(method, **arguments):
    """Return the loss before each step of an autograd optimizer."""
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
    params, losses, updater = start(), [], fastopt.Updater(made)
    for step in range(STEPS):
        losses.append(loss(params, X, Y))
        updater.step(slope(params, step), params)
    return losses


def loops(name):
    """Return training functions with autograd's optimizer and with fastopt's."""
    if name == "adam":
        return (
            lambda: theirs(optimizers.adam, step_size=0.01),
            lambda: ours(fastopt.Adam(lr=0.01, formula="torch")),
        )
    # autograd's sgd averages gradients with weights that sum to 1, so the learning rate is scaled
    # by 1 - mass.
    return (
        lambda: theirs(optimizers.sgd, step_size=0.1, mass=0.9),
        lambda: ours(fastopt.SGD(lr=0.1 * (1 - 0.9), momentum=0.9)),
    )


def curves(name):
    """Return the losses with autograd's optimizer and with fastopt's."""
    return [train() for train in loops(name)]


if __name__ == "__main__":
    for name in ("adam", "sgd"):
        for step, (one, other) in enumerate(zip(*curves(name), strict=True)):
            if step % 20 == 0:
                print(f"{name}, step {step:3}: autograd {one:.9f}, fastopt {other:.9f}")
    print(both_times("autograd", *loops("adam")))
