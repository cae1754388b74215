"""Dense float32 steps, against a loop that moves the same memory."""

from fastopt.bench.steps import Step
from fastopt.warmup import names

from .common import TABLE_SHAPE, against_limit, ns_per_element


class _Dense:
    def track_time(self, _):
        return ns_per_element(self.step, self.step.weight.size)

    track_time.unit = "ns per element"

    def track_slowdown(self, _):
        return 1 / against_limit(self.step)[1]

    track_slowdown.unit = "times the limit"


class Adam(_Dense):
    params = (1_000_000, 50_000_000)
    param_names = ("elements",)

    def setup(self, elements):
        self.step = Step("adam", elements)


class Optimizers(_Dense):
    params = names()
    param_names = ("optimizer",)

    def setup(self, optimizer):
        self.step = Step(optimizer, TABLE_SHAPE)
