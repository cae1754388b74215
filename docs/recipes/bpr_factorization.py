"""fastopt in a matrix factorization by Bayesian personalized ranking, with row-sparse gradients.

Users and items have vectors, trained so that an item chosen by a user gets a higher score than one
drawn at random (Rendle et al. 2009, arXiv:1205.2618). A step changes few rows of each table.
"""

import numpy as np
from both_times import both_times

import fastopt

USERS, ITEMS, SIZE, BATCH, STEPS, RATE, EPSILON = 50_000, 20_000, 32, 512, 200, 0.1, 1e-7


def choices():
    """Draw users, items that they chose and other items for each step, with skewed frequencies."""
    rng = np.random.default_rng(0)
    shape = STEPS, BATCH
    users = np.minimum(rng.zipf(1.3, shape), USERS) - 1
    chosen = np.minimum(rng.zipf(1.5, shape), ITEMS // 8) * 8 - 1 - users % 8
    return users, chosen, rng.integers(ITEMS, size=shape)


class AdaGradByHand:
    """AdaGrad on the rows of a row-sparse gradient: repeated rows are summed first."""

    def __init__(self, tables):
        self.tables, self.sums = tables, [np.zeros_like(table) for table in tables]

    def __call__(self, gradients):
        for table, total, (values, rows) in zip(self.tables, self.sums, gradients, strict=True):
            unique, places = np.unique(rows, return_inverse=True)
            grad = np.zeros((len(unique), SIZE), np.float32)
            np.add.at(grad, places, values)
            total[unique] += grad * grad
            table[unique] -= RATE * grad / np.sqrt(total[unique] + EPSILON)


def with_fastopt(tables):
    """Return the same step with an updater, which takes pairs of values and row indices."""
    adagrad = fastopt.AdaGrad(lr=RATE, eps=EPSILON)
    updater = fastopt.Updater(adagrad)
    return lambda gradients: updater.step(gradients, tables)


def train(make_step):
    """Return mean losses of every 10 steps; `make_step(tables)` returns the update function."""
    rng = np.random.default_rng(1)
    tables = [rng.normal(scale=0.1, size=(n, SIZE)).astype(np.float32) for n in (USERS, ITEMS)]
    step, losses = make_step(tables), []
    users, items = tables
    for who, chosen, other in zip(*choices(), strict=True):
        difference = items[chosen] - items[other]
        score = (users[who] * difference).sum(axis=1)
        slope = (-1 / (1 + np.exp(score)))[:, np.newaxis]
        of_items = np.concatenate([slope * users[who], -slope * users[who]])
        step([(slope * difference, who), (of_items, np.concatenate([chosen, other]))])
        losses.append(np.logaddexp(0, -score).mean())
    return np.reshape(losses, (-1, 10)).mean(axis=1).tolist()


def curves():
    """Return the losses with handwritten AdaGrad and with fastopt."""
    return train(AdaGradByHand), train(with_fastopt)


if __name__ == "__main__":
    for part, (theirs, ours) in enumerate(zip(*curves(), strict=True), 1):
        print(f"step {10 * part:3}: by hand {theirs:.6f}, fastopt {ours:.6f}")
    print(both_times("by hand", lambda: train(AdaGradByHand), lambda: train(with_fastopt)))
