"""Steps that are timed, and repeated in plain NumPy on copies of the weights."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import median
from time import perf_counter
from typing import Any

import numpy as np

from fastopt.bench.steps import PLAIN
from fastopt.demo.perceptron import Array, Perceptron
from fastopt.optimizer import Optimizer
from fastopt.trainer import Trainer


@dataclass
class Runner:
    """An implementation of a step, the weights that it updates, and the seconds of each step."""

    act: Callable[[Any], object]
    weights: Sequence[Array]
    seconds: list[float] = field(default_factory=list)

    def step(self, given: Any) -> None:
        """Do and time a step."""
        begin = perf_counter()
        self.act(given)
        self.seconds.append(perf_counter() - begin)


class Race:
    """Steps of a trainer, which are timed and, if `repeated`, repeated by plain NumPy."""

    def __init__(
        self, model: Perceptron, opt: Optimizer, repeated: bool = False, comm: Any = None
    ) -> None:
        self.params = model.params
        trainer = Trainer(model.params, opt, comm=comm)
        self.runners = {"fastopt": Runner(trainer.step, model.weights)}
        if repeated:
            update = PLAIN[type(opt).__name__.lower()](opt)
            copies = [weight.copy() for weight in model.weights]

            def act(gradients: Sequence[Array]) -> None:
                for index, weight in enumerate(copies):
                    update(index, gradients[index], weight)

            self.runners["plain NumPy"] = Runner(act, copies)

    def step(self, batch_size: int) -> None:
        """Do the step with both, each of them first in every other step."""
        ours, *others = self.runners.values()
        means = [p.grad() / batch_size for p in self.params.values()] if others else []
        for runner in [ours, *others][:: -1 if len(ours.seconds) % 2 else 1]:
            runner.step(batch_size if runner is ours else means)

    @property
    def words(self) -> str:
        """How the medians of the times compare."""
        ours, plain = (median(runner.seconds) for runner in self.runners.values())
        faster, slower = f"{plain / ours:.1f} times faster", f"{ours / plain:.1f} times slower"
        return faster if ours <= plain else slower


def agreement(races: Sequence[Race]) -> str:
    """Report whether the weights differ by no more than rounding explains.

    In each run, a step rounds a weight once and its state a few times.
    """
    found = []
    for race in races:
        ours, plain = race.runners.values()
        pairs = [*zip(ours.weights, plain.weights, strict=True)]
        apart = float(np.max([abs(a - b).max() for a, b in pairs]))
        largest = float(np.max([abs(weight).max() for weight in plain.weights]))
        rounding = 4 * len(ours.seconds) * float(np.finfo(ours.weights[0].dtype).eps) * largest
        found.append((apart / rounding, apart, rounding))
    if not np.isfinite(found).all():
        return "unknown, weights are no longer finite numbers"
    excess, worst, rounding = max(found)
    if excess > 1:
        return (
            f"NO, weights differ by {worst:.1e}, more than {rounding:.1e}, which rounding explains"
        )
    return f"yes, weights differ by {max(apart for _, apart, _ in found):.1e} at most"
