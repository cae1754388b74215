"""fastopt in an online logistic regression on string features, as used to predict clicks.

Features are strings, hashed to 64 bits, and get a weight when they first appear; weights of
features that have not been seen for long are dropped.
"""

from hashlib import blake2b

import numpy as np
from both_times import both_times

import fastopt

RATE, EPSILON, BATCH, STEPS, UNUSED = 0.3, 1e-7, 32, 400, 100


def stream():
    """Yield batches: arrays of feature hashes, one row per example, and clicks (0 or 1)."""
    rng = np.random.default_rng(0)
    known = {}

    def hashed(text):
        if text not in known:
            digest = blake2b(text.encode(), digest_size=8).digest()
            known[text] = int.from_bytes(digest, "little", signed=True)
        return known[text]

    likes = rng.normal(scale=2, size=(60, 40))
    for step in range(STEPS):
        users, ads = rng.integers(60, size=BATCH), rng.integers(40, size=BATCH)
        texts = [
            (f"user={u}", f"ad={a}", f"user={u},ad={a}", f"hour={step // 20}")
            for u, a in zip(users, ads, strict=True)
        ]
        ids = np.array([[hashed(text) for text in each] for each in texts])
        clicks = rng.random(BATCH) < 1 / (1 + np.exp(-3 * likes[users, ads]))
        yield ids, clicks.astype(np.float64)


class DictionaryByHand:
    """Weights in a dictionary, with AdaGrad."""

    def __init__(self):
        self.weights, self.sums, self.last, self.step = {}, {}, {}, 0

    def lookup(self, ids):
        return np.array([[[self.weights.get(id, 0.0)] for id in each] for each in ids.tolist()])

    def update(self, ids, grads):
        total = {}
        for id, grad in zip(ids.ravel().tolist(), grads.ravel().tolist(), strict=True):
            total[id] = total.get(id, 0.0) + grad
        self.step += 1
        for id, grad in total.items():
            self.sums[id] = self.sums.get(id, 0.0) + grad * grad
            step = RATE * grad / np.sqrt(self.sums[id] + EPSILON)
            self.weights[id] = self.weights.get(id, 0.0) - step
            self.last[id] = self.step

    def evict(self, unused_for):
        for id in [i for i, last in self.last.items() if last <= self.step - unused_for]:
            del self.weights[id], self.sums[id], self.last[id]


def with_fastopt():
    """Return a table of weights."""
    adagrad = fastopt.AdaGrad(lr=RATE, eps=EPSILON, lazy_update=True)
    return fastopt.EmbeddingTable(1, adagrad, dtype="float64", init="zeros")


def train(weights):
    """Return mean losses of every 10 batches, each evaluated before its update."""
    losses = []
    for number, (ids, clicks) in enumerate(stream()):
        score = weights.lookup(ids).sum(axis=(1, 2))
        losses.append(np.mean(np.logaddexp(0, score) - clicks * score))
        slope = 1 / (1 + np.exp(-score)) - clicks
        weights.update(ids, np.repeat(slope, ids.shape[1]).reshape(*ids.shape, 1))
        if number % 20 == 19:
            weights.evict(unused_for=UNUSED)
    return np.reshape(losses, (-1, 10)).mean(axis=1).tolist()


def theirs():
    """Return the losses with a dictionary."""
    return train(DictionaryByHand())


def ours():
    """Return the losses with a table."""
    return train(with_fastopt())


def curves():
    """Return the losses of both."""
    return theirs(), ours()


if __name__ == "__main__":
    for part, (one, other) in enumerate(zip(*curves(), strict=True), 1):
        print(f"batch {10 * part:3}: by hand {one:.9f}, fastopt {other:.9f}")
    print(both_times("by hand", theirs, ours))
