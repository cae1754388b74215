"""Reductions over a tensor: optimizers with layerwise learning rates, and global-norm clipping."""

from fastopt import optimizer
from fastopt.bench.steps import Step, draw

from .common import against_limit, ns_per_element, ratio

SIZE = 20_000_000


class Layers:
    """Updates that need tensor norms, against a loop with the same reads and against Adam."""

    params = (("lamb", "lans", "lars"), (1_000_000, SIZE))
    param_names = ("optimizer", "elements")

    def setup(self, name, elements):
        self.step = Step(name, elements)

    def track_time(self, name, elements):
        return ns_per_element(self.step, elements)

    track_time.unit = "ns per element"

    def track_slowdown(self, name, elements):
        return 1 / against_limit(self.step)[1]

    track_slowdown.unit = "times the limit"

    def track_ratio(self, name, elements):
        return ratio(self.step, Step("adam", elements))

    track_ratio.unit = "times Adam"


class Clip:
    """Adam with ``clip_global_norm``, which reads every gradient once more."""

    params = (1_000, 1_000_000, SIZE)
    param_names = ("elements",)

    def setup(self, elements):
        weight, grad = draw(elements)
        bounded = optimizer.Updater(optimizer.Adam(), clip_global_norm=1.0)
        free = optimizer.get_updater(optimizer.Adam())
        self.bounded = lambda: bounded(0, grad, weight)
        self.free = lambda: free(0, grad, weight)
        self.bounded()
        self.free()

    def track_time(self, elements):
        return ns_per_element(self.bounded, elements)

    track_time.unit = "ns per element"

    def track_slowdown(self, elements):
        return ratio(self.bounded, self.free)

    track_slowdown.unit = "times Adam without a bound"
