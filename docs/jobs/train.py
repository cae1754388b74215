"""A program that trains on all ranks of a communicator, stops at any time, and goes on."""

import signal
import threading
from pathlib import Path

import numpy as np

from fastopt import optimizer
from fastopt.distributed import ShardedUpdater

SEED, EXAMPLES, BATCH = 0, 512, 64
SAVE_EVERY = 100  # steps, of which a job that is killed loses that many
TRUE = np.array([1, -2, 0.5], np.float32)


def train(comm, rank, ranks, path, steps):
    """Train until `steps` are done or a rank gets SIGTERM; return the step and the weights."""
    rng = np.random.default_rng(SEED)
    x = rng.normal(size=(EXAMPLES, 3)).astype(np.float32)
    y = x @ TRUE + 3
    weights = {"weight": np.zeros(3, np.float32), "bias": np.zeros(1, np.float32)}
    adam = optimizer.Adam(learning_rate=0.05, rescale_grad=1 / BATCH)
    updater = ShardedUpdater(adam, comm)
    if updater.any(Path(path).exists()):
        updater.load(path, weights=weights)
    stop = threading.Event()
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, lambda *_: stop.set())
    with updater.join():  # an error of one rank is reported to the others, and ends them
        for step in range(adam.num_update, steps):  # num_update: steps that were done, also before
            batch = np.random.default_rng([SEED, step]).integers(EXAMPLES, size=BATCH)
            rows = batch[rank::ranks]
            error = x[rows] @ weights["weight"] + weights["bias"] - y[rows]
            grads = [error @ x[rows], error.sum(keepdims=True)]
            updater([*weights], grads, [*weights.values()])
            stopping = updater.any(stop.is_set())
            if stopping or step + 1 == steps or (step + 1) % SAVE_EVERY == 0:
                updater.save(path, weights=weights)
            if stopping:
                break
    if rank == 0:
        print(f"step {adam.num_update} on {ranks} ranks", *weights["weight"].round(2), flush=True)
    return adam.num_update, weights
