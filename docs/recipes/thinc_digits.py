"""fastopt instead of thinc's Adam: a network classifies scikit-learn's digits."""

import numpy as np
from both_times import both_times
from sklearn.datasets import load_digits
from thinc.api import Adam, CategoricalCrossentropy, Relu, Softmax, chain, fix_random_seed

from fastopt.adapters import ThincOptimizer

EPOCHS, BATCH = 10, 128


def train(made):
    """Return the mean loss of each epoch with an optimizer that has thinc's interface."""
    images, digits = load_digits(return_X_y=True)
    x, y = (images / 16).astype("float32"), np.eye(10, dtype="float32")[digits]
    fix_random_seed(0)
    model = chain(Relu(64), Softmax())
    model.initialize(x[:5], y[:5])
    cross_entropy = CategoricalCrossentropy()
    rng, curve = np.random.default_rng(0), []
    for _ in range(EPOCHS):
        losses = []
        for rows in np.array_split(rng.permutation(len(x)), len(x) // BATCH):
            scores, backprop = model.begin_update(x[rows])
            gradient, loss = cross_entropy(scores, y[rows])
            backprop(gradient)
            model.finish_update(made)
            losses.append(loss)
        curve.append(float(np.mean(losses)))
    return curve


def theirs(grad_clip=1.0):
    """Return the losses with thinc's Adam."""
    return train(Adam(0.005, grad_clip=grad_clip, use_averages=False))


def ours(grad_clip=1.0):
    """Return the losses with fastopt's Adam."""
    return train(ThincOptimizer("adam", learn_rate=0.005, grad_clip=grad_clip))


def curves():
    """Return the losses with thinc's Adam and with fastopt's."""
    return theirs(), ours()


if __name__ == "__main__":
    for epoch, (one, other) in enumerate(zip(*curves(), strict=True), 1):
        print(f"epoch {epoch:2}: thinc {one:.6f}, fastopt {other:.6f}")
    print(both_times("thinc", theirs, ours))
