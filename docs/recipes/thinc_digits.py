"""fastopt in the place of thinc's Adam: a network reads scikit-learn's digits."""

import numpy as np
from both_times import both_times
from sklearn.datasets import load_digits
from thinc.api import (
    Adam,
    CategoricalCrossentropy,
    NumpyOps,
    Relu,
    Softmax,
    chain,
    fix_random_seed,
)

from fastopt import optimizer

EPOCHS, BATCH = 10, 128


class FastOptimizer:
    """An optimizer of fastopt, called as ``Model.finish_update`` calls thinc's.

    Parameters
    ----------
    made : fastopt.optimizer.Optimizer
        Decides how to update.
    grad_clip : float, optional
        Largest norm of the gradient of each parameter, like in thinc; 0 means no limit.
    """

    def __init__(self, made, grad_clip=0.0):
        self.updater = optimizer.get_updater(made)
        self.grad_clip, self.ops = grad_clip, NumpyOps()
        self.scales = {}

    def __call__(self, key, weights, gradient, *, lr_scale=1.0):
        index = "{}/{}".format(*key)
        if self.scales.get(index, 1.0) != lr_scale:
            self.scales[index] = self.updater.optimizer.lr_mult[index] = lr_scale
        if self.grad_clip:
            gradient = self.ops.clip_gradient(gradient, self.grad_clip)
        self.updater(index, gradient, weights)
        gradient[...] = 0  # thinc adds that of the next batch to it
        return weights, gradient


def train(made):
    """Mean losses of all epochs with an optimizer of thinc's kind."""
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
    """Losses with thinc's Adam."""
    return train(Adam(0.005, grad_clip=grad_clip, use_averages=False))


def ours(grad_clip=1.0):
    """Losses with fastopt's."""
    return train(FastOptimizer(optimizer.Adam(learning_rate=0.005), grad_clip))


def curves():
    """Losses with thinc's Adam, and with fastopt's."""
    return theirs(), ours()


if __name__ == "__main__":
    for epoch, (one, other) in enumerate(zip(*curves(), strict=True), 1):
        print(f"epoch {epoch:2}: thinc {one:.6f}, fastopt {other:.6f}")
    print(both_times("thinc", theirs, ours))
