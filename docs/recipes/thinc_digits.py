"""fastopt in the place of thinc's Adam: a network reads scikit-learn's digits."""

import numpy as np
from sklearn.datasets import load_digits
from thinc.api import Adam, CategoricalCrossentropy, Relu, Softmax, chain, fix_random_seed

from fastopt import optimizer

EPOCHS, BATCH = 10, 128


class FastOptimizer:
    """An optimizer of fastopt, called as ``Model.finish_update`` calls thinc's.

    Parameters
    ----------
    made : fastopt.optimizer.Optimizer
        Decides how to update.
    grad_clip : float, optional
        Largest norm of the gradient of each parameter, as in thinc.
    """

    def __init__(self, made, grad_clip=None):
        self.updater = optimizer.Updater(made, clip_global_norm=grad_clip)

    def __call__(self, key, weights, gradient, *, lr_scale=1.0):
        node, name = key
        self.updater.optimizer.lr_mult[f"{node}/{name}"] = lr_scale
        self.updater(f"{node}/{name}", gradient, weights)
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


def curves():
    """Losses with thinc's Adam, and with fastopt's."""
    theirs = train(Adam(0.005, grad_clip=1.0, use_averages=False))
    return theirs, train(FastOptimizer(optimizer.Adam(learning_rate=0.005), grad_clip=1.0))


if __name__ == "__main__":
    for epoch, (theirs, ours) in enumerate(zip(*curves(), strict=True), 1):
        print(f"epoch {epoch:2}: thinc {theirs:.6f}, fastopt {ours:.6f}")
