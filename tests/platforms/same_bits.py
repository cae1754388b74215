"""A digest of the weights and states after a few updates of each optimizer and form of call."""

import hashlib
import sys
from itertools import product
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[2]))
from fastopt import optimizer

NAMES = (
    *("sgd", "nag", "signum", "lars", "adagrad", "groupadagrad", "adadelta", "rmsprop", "ftrl"),
    *("ftml", "adam", "adamax", "nadam", "adamw", "yogi", "radam", "adabelief", "lion", "lamb"),
    "sgld",
)
FORMS = "single", "list", "rows", "threads"
LARGE = 70_000
"""Number of elements from which an update runs on several threads."""


def numbers(size, seed):
    """Return float32 numbers that no function of a mathematical library has computed."""
    words = np.arange(seed, seed + size, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    return (words >> np.uint64(40)).astype(np.float32) / np.float32(1 << 23) - np.float32(1)


def arrays(form):
    shapes = {"single": [(4, 9)], "list": [(3, 5), (128, 2), (1, 1)], "rows": [(50, 8)]}
    shapes["threads"] = [(LARGE // 70, 70)]
    return [numbers(m * n, k).reshape(m, n) for k, (m, n) in enumerate(shapes[form])]


def digest(name, form):
    """Return the digest after three updates."""
    others = {} if name == "groupadagrad" else {"wd": 0.01}
    others |= {"momentum": 0.9} if name in ("sgd", "nag") else {}
    updater = optimizer.Updater(optimizer.create(name, learning_rate=0.05, **others))
    weights = arrays(form)
    for step in range(3):
        grads = [numbers(w.size, 99 * step + k).reshape(w.shape) for k, w in enumerate(weights)]
        if form == "list":
            updater([*range(len(weights))], grads, weights)
        elif form == "rows":
            rows = np.array([7, 3, 49, 7]) - step % 2
            updater(0, (grads[0][:4], rows), weights[0])
        else:
            updater(0, grads[0], weights[0])
    found = hashlib.sha256()
    for weight in weights:
        found.update(weight.tobytes())
    found.update(updater.get_states())
    return found.hexdigest()[:16]


if __name__ == "__main__":
    for name, form in product(sys.argv[1:] or NAMES, FORMS):
        print(f"{form:<8}{name:<13}{digest(name, form)}", flush=True)
