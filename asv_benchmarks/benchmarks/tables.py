"""Adam on many float32 tensors in one call."""

import math
from collections.abc import Callable
from functools import partial
from itertools import cycle
from typing import Any

import numpy as np

from fastopt import optimizer
from fastopt.bench.clock import Call
from fastopt.bench.steps import MOMENTUM, Step

from .common import microseconds, ratio

Shapes = list[tuple[int, ...]]

LR = 1e-3
ARGUMENTS = {
    "adam": {"learning_rate": LR},
    "sgd": {"learning_rate": LR, "momentum": MOMENTUM},
}

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


def gpt2() -> Shapes:
    """Return the shapes of the parameters of GPT-2 with 124 million elements."""
    width = 768
    shapes: Shapes = [(50_257, width), (1_024, width)]
    for _ in range(12):
        shapes += [(width,)] * 2 + [(width, 3 * width), (3 * width,), (width, width), (width,)]
        shapes += [(width,)] * 2 + [(width, 4 * width), (4 * width,), (4 * width, width), (width,)]
    shapes += [(width,)] * 2
    assert (len(shapes), elements(shapes)) == (148, 124_439_808)
    return shapes


def elements(shapes: Shapes) -> int:
    """Return the total number of elements."""
    return sum(map(math.prod, shapes))


def drawn(shapes: Shapes, fresh: bool) -> tuple[list[np.ndarray], Callable[[], list[np.ndarray]]]:
    """Return weights and a function that returns gradients, new arrays each time if `fresh`."""
    draw = np.random.default_rng(0).standard_normal
    sets = [[draw(shape, np.float32) for shape in shapes] for _ in range(4 if fresh else 2)]
    return sets[0], partial(next, cycle(sets[1:]))


def list_step(
    shapes: Shapes, fresh: bool = False, rule: str = "adam", schedule: Any = None, **settings: Any
) -> Call:
    """Return a step with one call for all weights; `settings` are passed to the updater."""
    weights, gradients = drawn(shapes, fresh)
    made = optimizer.create(rule, lr_scheduler=schedule, **ARGUMENTS.get(rule, {}))
    updater = optimizer.Updater(made, **settings)
    if len(weights) == 1 and not fresh:
        ((weight,), (grad,)) = weights, gradients()
        return lambda: updater(0, grad, weight)
    indices = list(range(len(weights)))
    return lambda: updater(indices, gradients(), weights)


def against_flat(rounds: int = 15) -> float:
    """Return the time of a step of ResNet-50 relative to a flat weight of the same size."""
    shapes = resnet50()
    return ratio(list_step(shapes), Step("adam", elements(shapes)), rounds)


class Small:
    params = ("same", "fresh")
    param_names = ("gradients",)
    unit = "us"

    def setup(self, gradients):
        self.step = list_step(SMALL, gradients == "fresh")

    def track_update(self, gradients):
        return microseconds(self.step)


class ResNet50:
    def setup(self):
        self.step = list_step(resnet50())

    def track_update(self):
        return microseconds(self.step)

    track_update.unit = "us"

    def track_slowdown(self):
        return against_flat()

    track_slowdown.unit = "times one flat weight"
