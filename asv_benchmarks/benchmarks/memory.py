"""Peak memory of the first step; the reference holds only the weight and the gradient."""

import numpy as np

from fastopt import optimizer
from fastopt.bench.steps import Step


class PeakMemory:
    params = ("adam", "sgd")
    param_names = ("optimizer",)

    def setup(self, name):
        Step(name, 100_000)  # compiles, so that the reference includes the memory for that
        self.weight, self.grad = np.ones((2, 20_000_000), np.float32)
        self.updater = optimizer.get_updater(optimizer.create(name))

    def peakmem_reference(self, name):
        pass

    def peakmem_step(self, name):
        self.updater(0, self.grad, self.weight)
