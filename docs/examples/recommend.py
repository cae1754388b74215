"""Items that users will choose next, of 1,500, found by embedding tables.

Users and items have vectors, by ids that are hashes of names. An item that a user chose gets a
higher score than one drawn at random (Rendle et al. 2009, arXiv:1205.2618). The choices are drawn
from a known model, by tastes and by the popularity of items.
"""

from hashlib import blake2b

import numpy as np

import fastopt
import fastopt.table

USERS, ITEMS, CHOSEN, HELD, SIZE, BATCH, EPOCHS, TOP = 3000, 1500, 30, 3, 32, 512, 5, 10


def hashes(kind, count):
    """64-bit ids of names."""
    names = (f"{kind} {number}".encode() for number in range(count))
    return np.frombuffer(b"".join(blake2b(n, digest_size=8).digest() for n in names), np.uint64)


def choices(rng):
    """Items that each user chose, without repetition: a row of numbers for each user."""
    of_users, of_items = (rng.standard_normal((count, 6)) for count in (USERS, ITEMS))
    cosines = of_users @ of_items.T
    cosines /= np.linalg.norm(of_users, axis=1, keepdims=True) * np.linalg.norm(of_items, axis=1)
    odds = 4 * cosines - 0.7 * np.log1p(rng.permutation(ITEMS))
    return rng.permuted(np.argsort(-(odds + rng.gumbel(size=odds.shape)))[:, :CHOSEN], axis=1)


def recall(scores, seen, held):
    """Share of held-out choices among the TOP items of each user that were not seen."""
    scores = np.array(np.broadcast_to(scores, (USERS, ITEMS)), np.float64)
    np.put_along_axis(scores, seen, -np.inf, axis=1)
    best = np.argpartition(-scores, TOP, axis=1)[:, :TOP]
    return (held[:, :, np.newaxis] == best[:, np.newaxis]).any(axis=2).mean()


def train(tables, users, items, others):
    """Do a step with ids of users, of items that they chose, and of other items."""
    ids = {"users": users, "items": np.stack([items, others])}
    found = fastopt.table.lookup(tables, ids)
    u, (v, w) = found["users"], found["items"]
    slope = -1 / (1 + np.exp(((v - w) * u).sum(axis=1, keepdims=True)))
    grads = {"users": slope * (v - w), "items": np.stack([slope * u, -slope * u])}
    fastopt.table.update(tables, ids, grads)


def main():
    """Print the share of held-out choices that are recommended, by epoch."""
    rng = np.random.default_rng(0)
    seen, held = np.split(choices(rng), [CHOSEN - HELD], axis=1)
    ids = {"users": hashes("user", USERS), "items": hashes("item", ITEMS)}
    adagrad = fastopt.AdaGrad(lr=0.1, lazy_update=True)
    init = fastopt.initializer.Normal(0.1, rng=0)
    tables = {name: fastopt.EmbeddingTable(SIZE, adagrad, init=init, name=name) for name in ids}
    print(f"the most popular items: {recall(np.bincount(seen.ravel()), seen, held):.1%}")
    for epoch in range(1, EPOCHS + 1):
        order = rng.permutation(seen.size)
        for batch in np.split(order, range(BATCH, len(order), BATCH)):
            others = ids["items"][rng.integers(ITEMS, size=len(batch))]
            users, items = batch // seen.shape[1], seen.ravel()[batch]
            train(tables, ids["users"][users], ids["items"][items], others)
        found = fastopt.table.lookup(tables, ids, create=False)
        scores = found["users"] @ found["items"].T
        print(f"epoch {epoch}: {recall(scores, seen, held):.1%} of the held-out choices in {TOP}")


if __name__ == "__main__":
    main()
