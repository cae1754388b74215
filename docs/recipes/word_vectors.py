"""fastopt in skip-gram word vectors, whose vocabulary grows as the text is read.

Word vectors are trained to distinguish a word's neighbours from random words of the text (Mikolov
et al. 2013, arXiv:1310.4546). Words are identified by hashes; the vocabulary is not counted in
advance.
"""

import re
from hashlib import blake2b
from pydoc_data.topics import topics

import numpy as np
from both_times import both_times

import fastopt

SIZE, BATCH, STEPS, NEGATIVES, RATE, EPSILON = 32, 256, 300, 4, 0.1, 1e-7


def read():
    """Return the hash of each word of Python's reference pages."""
    words = re.findall(r"[a-z]{2,}", "\n".join(topics.values()).lower())
    numbers = {w: blake2b(w.encode(), digest_size=8).digest() for w in dict.fromkeys(words)}
    return np.frombuffer(b"".join(numbers[word] for word in words), np.int64)


def new_tables(made):
    """Return tables of words and of their neighbours."""
    return {
        "words": fastopt.EmbeddingTable(
            SIZE, made, init=fastopt.initializer.Uniform(0.5 / SIZE, rng=0), name="words"
        ),
        "contexts": fastopt.EmbeddingTable(SIZE, made, init="zeros", name="contexts"),
    }


def with_fastopt():
    """Return functions that look up vectors and update them."""
    made = fastopt.AdaGrad(lr=RATE, eps=EPSILON, lazy_update=True)
    tables = new_tables(made)
    return (
        lambda ids: fastopt.table.lookup(tables, ids),
        lambda ids, grads: fastopt.table.update(tables, ids, grads),
    )


class DictionaryByHand:
    """A dictionary of rows, with AdaGrad on the rows of a batch."""

    def __init__(self):
        self.first = new_tables(fastopt.SGD(lazy_update=True))  # the same initial vectors
        self.vectors = {name: {} for name in self.first}
        self.sums = {name: {} for name in self.first}

    def lookup(self, ids):
        found = {}
        for name, some in ids.items():
            vectors = self.vectors[name]
            for id in dict.fromkeys(some.ravel().tolist()):
                if id not in vectors:
                    vectors[id] = self.first[name].lookup(id)
                    self.sums[name][id] = np.zeros(SIZE, np.float32)
            found[name] = np.reshape([vectors[id] for id in some.flat], (*some.shape, SIZE))
        return found

    def update(self, ids, grads):
        for name, some in ids.items():
            unique, at = np.unique(some, return_inverse=True)
            total = np.zeros((len(unique), SIZE), np.float32)
            np.add.at(total, at.ravel(), grads[name].reshape(-1, SIZE))
            for id, grad in zip(unique.tolist(), total, strict=True):
                self.sums[name][id] += grad * grad
                self.vectors[name][id] -= RATE * grad / np.sqrt(self.sums[name][id] + EPSILON)


def train(lookup, update):
    """Return mean losses of every 10 steps."""
    rng, text, losses = np.random.default_rng(1), read()[:20_000], []
    for _ in range(STEPS):
        at = rng.integers(5, len(text) - 5, BATCH)
        near = text[at + rng.choice([-2, -1, 1, 2], BATCH)]
        others = text[rng.integers(len(text), size=(BATCH, NEGATIVES))]
        ids = {"words": text[at], "contexts": np.column_stack([near, others])}
        found = lookup(ids)
        v, u = found["words"], found["contexts"]
        sign = np.array([-1] + [1] * NEGATIVES, np.float32)
        score = sign * (u @ v[:, :, np.newaxis])[:, :, 0]
        slope = (sign / (1 + np.exp(-score)))[:, :, np.newaxis]
        update(ids, {"words": (slope * u).sum(axis=1), "contexts": slope * v[:, np.newaxis]})
        losses.append(np.logaddexp(0, score).sum(axis=1).mean())
    return np.reshape(losses, (-1, 10)).mean(axis=1).tolist()


def theirs():
    """Return the losses with a dictionary."""
    by_hand = DictionaryByHand()
    return train(by_hand.lookup, by_hand.update)


def ours():
    """Return the losses with tables."""
    return train(*with_fastopt())


def curves():
    """Return the losses of both."""
    return theirs(), ours()


if __name__ == "__main__":
    for part, (one, other) in enumerate(zip(*curves(), strict=True), 1):
        print(f"step {10 * part:3}: by hand {one:.6f}, fastopt {other:.6f}")
    print(both_times("by hand", theirs, ours))
