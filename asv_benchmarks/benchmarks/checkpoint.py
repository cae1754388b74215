"""Saving and loading 1 GB of state; memory references hold the state, or nothing.

A save ends when the file is on disk; a load starts with the file in the page cache.
"""

import numpy as np

from fastopt import optimizer
from fastopt.bench.clock import seconds

FILE = "state.safetensors"  # asv runs each benchmark in its own directory
PARAMETERS, ELEMENTS = 25, 5_000_000
GIGABYTES = PARAMETERS * 2 * ELEMENTS * 4 / 1e9


def fresh():
    return optimizer.get_updater(optimizer.Adam())


def filled():
    updater = fresh()
    for index in range(PARAMETERS):
        updater.states[index] = tuple(
            np.random.default_rng(index).random((2, ELEMENTS), np.float32)
        )
    return updater


class Save:
    def setup(self):
        self.updater = filled()

    def track_save(self):
        return seconds(lambda: self.updater.save(FILE), 3) / GIGABYTES

    track_save.unit = "s per GB"

    def peakmem_reference(self):
        pass

    def peakmem_save(self):
        self.updater.save(FILE)


class Load:
    def setup_cache(self):
        filled().save(FILE)

    def track_load(self):
        return seconds(lambda: fresh().load(FILE), 3) / GIGABYTES

    track_load.unit = "s per GB"

    def peakmem_reference(self):
        pass

    def peakmem_load(self):
        fresh().load(FILE)
