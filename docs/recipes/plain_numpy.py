"""fastopt in a plain NumPy loop, compared to handwritten Adam: softmax regression on digits."""

import numpy as np
from both_times import both_times
from sklearn.datasets import load_digits

import fastopt

EPOCHS, BATCH, RATE = 20, 32, 0.01


class AdamByHand:
    """Adam as at the end of section 2 of arXiv:1412.6980, with NumPy's temporary arrays."""

    def __init__(self, weights):
        self.weights, self.t = weights, 0
        self.means = [np.zeros_like(w) for w in weights]
        self.variances = [np.zeros_like(w) for w in weights]

    def __call__(self, grads):
        self.t += 1
        rate = RATE * np.sqrt(1 - 0.999**self.t) / (1 - 0.9**self.t)
        for w, g, m, v in zip(self.weights, grads, self.means, self.variances, strict=True):
            m[...] = 0.9 * m + 0.1 * g
            v[...] = 0.999 * v + 0.001 * g**2
            w -= rate * m / (np.sqrt(v) + 1e-8)


def with_fastopt(weights):
    """Return the same step with an updater."""
    updater = fastopt.Updater(fastopt.Adam(lr=RATE))
    return lambda grads: updater.step(grads, weights)


def train(make_step):
    """Return the mean loss of each epoch; `make_step(weights)` returns the update function."""
    images, digits = load_digits(return_X_y=True)
    x, y = images / 16, np.eye(10)[digits]
    weight, bias = weights = [np.zeros((64, 10)), np.zeros(10)]
    step = make_step(weights)
    rng, curve = np.random.default_rng(0), []
    for _ in range(EPOCHS):
        losses = []
        for rows in np.array_split(rng.permutation(len(x)), len(x) // BATCH):
            scores = x[rows] @ weight + bias
            likelihood = np.exp(scores - scores.max(axis=1, keepdims=True))
            likelihood /= likelihood.sum(axis=1, keepdims=True)
            error = (likelihood - y[rows]) / len(rows)
            step([x[rows].T @ error, error.sum(axis=0)])
            losses.append(-np.log(likelihood[y[rows] == 1]).mean())
        curve.append(float(np.mean(losses)))
    return curve


def curves():
    """Return the losses with handwritten Adam and with fastopt."""
    return train(AdamByHand), train(with_fastopt)


if __name__ == "__main__":
    for epoch, (theirs, ours) in enumerate(zip(*curves(), strict=True), 1):
        print(f"epoch {epoch:2}: by hand {theirs:.9f}, fastopt {ours:.9f}")
    print(both_times("by hand", lambda: train(AdamByHand), lambda: train(with_fastopt)))
