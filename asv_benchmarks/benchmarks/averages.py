"""Weight averages computed in the same pass as the update, and gradient accumulation."""

import numpy as np

from fastopt import EMA, SWA, Lookahead, optimizer
from fastopt.bench.steps import draw

from .common import ns_per_element, ratio

SIZES = (1_000, 1_000_000, 20_000_000)
DECAY = 0.999


def adam(size, **kwargs):
    """Return a step of Adam on a new array."""
    weight, grad = draw(size)
    updater = optimizer.Updater(optimizer.Adam(), **kwargs)

    def step():
        updater(0, grad, weight)

    step.weight, step.updater = weight, updater
    return step


def numpy_average(size):
    """Return a step of Adam followed by an average in NumPy, in as few passes as possible."""
    step = adam(size)
    average, room = step.weight.copy(), np.empty_like(step.weight)

    def both():
        step()
        np.subtract(step.weight, average, out=room)
        np.multiply(room, np.float32(1 - DECAY), out=room)
        np.add(average, room, out=average)

    return both


def torch_average(size):
    """Return a step of fastopt's Adam on a tensor's memory, followed by torch's AveragedModel."""
    import torch
    from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

    weight, grad = draw(size)
    model = torch.nn.Module()
    model.weight = torch.nn.Parameter(torch.from_numpy(weight))
    averaged = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(DECAY))
    updater = optimizer.Updater(optimizer.Adam())

    def both():
        updater(0, grad, weight)
        averaged.update_parameters(model)

    return both


def repeated(step, times):
    """Return a function that does `times` steps, one period of averages updated so often."""

    def steps():
        for _ in range(times):
            step()

    return steps


KINDS = {
    "ema": (1, lambda size: adam(size, average=EMA(DECAY))),
    "ema, warm-up": (1, lambda size: adam(size, average=EMA(DECAY, warmup=True))),
    "swa of every 10th": (10, lambda size: adam(size, average=SWA(every=10))),
    "lookahead of 5": (5, lambda size: adam(size, average=Lookahead())),
    "ema in numpy": (1, numpy_average),
    "ema of torch": (1, torch_average),
    "accumulate 4": (4, lambda size: adam(size, accumulate=4)),
    "clip_adaptive": (1, lambda size: adam((size // 100, 100), clip_adaptive=0.01)),
}
"""Period in steps, and a function that creates the step for an array of some size."""


class Averages:
    """Time of a step relative to Adam alone."""

    params = (tuple(KINDS), SIZES)
    param_names = ("kind", "elements")

    def setup(self, kind, size):
        times, make = KINDS[kind]
        try:
            self.step = repeated(make(size), times)
        except ImportError:
            raise NotImplementedError from None  # torch is not installed
        self.adam = repeated(adam(size), times)

    def track_ratio(self, kind, size):
        return ratio(self.step, self.adam)

    track_ratio.unit = "times Adam's"


class Sums:
    """Time of a call that adds a gradient to the accumulated sum."""

    params = (SIZES,)
    param_names = ("elements",)

    def setup(self, size):
        self.step = adam(size, accumulate=1 << 40)
        self.step()
        self.step.updater.finish()  # creates the state, like the end of an epoch

    def track_time(self, size):
        return ns_per_element(self.step, size)

    track_time.unit = "ns per element"
