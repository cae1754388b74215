"""Adam on many float32 tensors in one call."""

import math
from itertools import cycle

import numpy as np

from fastopt import optimizer
from fastopt.bench.clock import microseconds, ratio
from fastopt.bench.steps import Step

Shapes = list[tuple[int, ...]]

SMALL: Shapes = [(1_000,)] * 1_000
"""Many small tensors."""


def resnet50() -> Shapes:
    """Return the shapes of the parameters of ResNet-50."""

    def normalized(*shape: int) -> Shapes:
        return [shape, shape[:1], shape[:1]]

    shapes, channels = normalized(64, 3, 7, 7), 64
    for stage, blocks in enumerate((3, 4, 6, 3)):
        width = 64 << stage
        for block in range(blocks):
            shapes += normalized(width, channels, 1, 1) + normalized(width, width, 3, 3)
            shapes += normalized(4 * width, width, 1, 1)
            shapes += [] if block else normalized(4 * width, channels, 1, 1)
            channels = 4 * width
    shapes += [(1_000, channels), (1_000,)]
    assert (len(shapes), elements(shapes)) == (161, 25_557_032)
    return shapes


def elements(shapes: Shapes) -> int:
    """Return the total number of elements."""
    return sum(map(math.prod, shapes))


class ListStep:
    """A call of Adam on a list of weights, compiled and with all memory touched.

    Parameters
    ----------
    shapes : list of tuple of int
        Shape of each weight.
    fresh : bool
        Whether each call has other gradient arrays than the two calls before.
    **kwargs
        Arguments of the optimizer.
    """

    def __init__(self, shapes: Shapes, fresh: bool = False, **kwargs: object) -> None:
        draw = np.random.default_rng(0).standard_normal
        self._indices = list(range(len(shapes)))
        self._weights = [draw(shape, np.float32) for shape in shapes]
        self._gradients = cycle(
            [[draw(shape, np.float32) for shape in shapes] for _ in range(3 if fresh else 1)]
        )
        self._updater = optimizer.get_updater(optimizer.Adam(**kwargs))
        self()

    def __call__(self) -> None:
        self._updater(self._indices, next(self._gradients), self._weights)


def against_flat(rounds: int = 15) -> float:
    """Return the time of a step of ResNet-50 relative to a flat weight of the same size."""
    shapes = resnet50()
    return ratio(ListStep(shapes), Step("adam", elements(shapes)), rounds)


class Small:
    params = ("same", "fresh")
    param_names = ("gradients",)
    unit = "us"

    def setup(self, gradients):
        self.step = ListStep(SMALL, fresh=gradients == "fresh")

    def track_update(self, gradients):
        return microseconds(self.step)


class ResNet50:
    def setup(self):
        self.step = ListStep(resnet50())

    def track_update(self):
        return microseconds(self.step)

    track_update.unit = "us"

    def track_slowdown(self):
        return against_flat()

    track_slowdown.unit = "times one flat weight"
