"""Lazy Adam on row-sparse gradients: 8,192 ids of a table of 64 columns, against a plain loop."""

import sys

from .common import against, microseconds
from .tables import HEIGHT, KINDS, Loop, RowStep, resident_share


class Rows:
    params = (KINDS, ("cold", "cached"))
    param_names = ("ids", "memory")

    def setup(self, kind, memory):
        arguments = kind, memory == "cold"
        self.step, self.loop = RowStep(*arguments), Loop(*arguments)

    def track_time(self, kind, memory):
        return 1e6 * against(self.loop, self.step)[0]

    track_time.unit = "us"

    def track_slowdown(self, kind, memory):
        return 1 / against(self.loop, self.step)[1]

    track_slowdown.unit = "times the loop"


class Heights:
    """The time of a step in cache should not depend on the height of the table."""

    params = (100_000, 1_000_000, 10_000_000)
    param_names = ("rows",)

    def setup(self, height):
        self.step = RowStep("sorted", False, height)

    def track_time(self, height):
        return microseconds(self.step)

    track_time.unit = "us"


class State:
    """Memory of the state after one row in a hundred was updated."""

    params = ("random", "contiguous")
    param_names = ("order",)

    def setup(self, order):
        if sys.platform != "linux":
            raise NotImplementedError("resident memory is read from /proc")

    def track_resident(self, order):
        return 100 * resident_share(order, 10_000_000)

    track_resident.unit = "% of the state's size"

    def peakmem_step(self, order):
        resident_share(order, HEIGHT)
