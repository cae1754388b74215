"""Cost of one call of the updater on a small weight."""

from fastopt.bench.steps import Step

from .common import microseconds


class Dispatch:
    # Not a time_ method: asv repeats the setup before each timed call, which is too coarse for
    # calls of microseconds.
    params = ("adam", "sgd")
    param_names = ("optimizer",)
    unit = "us"

    def setup(self, optimizer):
        self.step = Step(optimizer, 1_000)

    def track_update(self, optimizer):
        return microseconds(self.step)
