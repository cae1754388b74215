"""Local SGD with an outer optimizer (DiLoCo, arXiv:2311.08105): ranks send sums every few steps."""

import numpy as np

import fastopt
from fastopt.distributed import ShardedUpdater


class LocalSteps:
    """Updater whose ranks update alone; the outer optimizer applies their mean change."""

    def __init__(self, inner, outer, comm, weights, every):
        self.inner, self.weights, self.every, self.steps = fastopt.Updater(inner), weights, every, 0
        outer.rescale_grad = 1 / comm.size
        self.outer = ShardedUpdater(outer, comm)
        self.start = {name: weight.copy() for name, weight in weights.items()}

    def step(self, grads):
        self.inner.step(grads, self.weights)
        self.steps += 1
        if self.steps % self.every == 0:
            change = {name: self.start[name] - weight for name, weight in self.weights.items()}
            self.outer.step(change, self.start)  # equal on all ranks, before and after
            for name, weight in self.weights.items():
                weight[...] = self.start[name]


def train(comm, rank, steps=400, every=5):
    """Train on examples of this rank; return the weights, equal on all ranks."""
    rng = np.random.default_rng(rank)
    x = rng.normal(size=(256, 3)).astype(np.float32)
    y = x @ np.array([1, -2, 0.5], np.float32)
    weights = {"weight": np.zeros(3, np.float32)}
    outer = fastopt.NAG(lr=0.3, momentum=0.9)
    local = LocalSteps(fastopt.Adam(lr=0.02), outer, comm, weights, every)
    for _ in range(steps):
        rows = rng.integers(256, size=16)
        error = x[rows] @ weights["weight"] - y[rows]
        local.step({"weight": error @ x[rows] / len(rows)})
    return weights
