"""What the demos share: a training loop that times updates, and reports of what it measured."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean, median
from time import perf_counter
from typing import Any, Self

import numpy as np

from fastopt import optimizer
from fastopt.console import Refused, need
from fastopt.demo import plot
from fastopt.plain import Array

__all__ = ["Refused", "Runner", "agreement", "chunks", "compared", "create", "faster", "first_step"]
__all__ += ["heading", "need", "summary", "take_turns", "train", "updates"]


@dataclass
class Runner:
    """A way to do a step, the weights that it changes, and the seconds that each step took."""

    act: Callable[[Any], None]
    weights: Sequence[Array]
    seconds: list[float] = field(default_factory=list)

    @classmethod
    def of(cls, update: Callable[[int, Any, Array], None], weights: Sequence[Array]) -> Self:
        """Update the weights one after the other; a step takes their gradients."""

        def act(gradients: Sequence[Any]) -> None:
            for index, weight in enumerate(weights):
                update(index, gradients[index], weight)

        return cls(act, weights)

    def step(self, given: Any) -> None:
        """Do a step with what it takes."""
        begin = perf_counter()
        self.act(given)
        self.seconds.append(perf_counter() - begin)


def compared(options: Any, suited: Sequence[str]) -> list[str]:
    """Names of the optimizers whose losses a plot shows besides that of the options.

    They are the optimizers that `suited` names, unless the options have others.

    Raises
    ------
    Refused
        A plot cannot be written, or there is none to compare optimizers in.
    """
    if options.plot is None:
        if options.compare is not None:
            raise Refused("--compare draws losses, give --plot FILE.png too")
        return []
    plot.check(options.plot)
    names = [name.lower() for name in options.compare or suited]
    return [name for name in dict.fromkeys(names) if name != options.optimizer.lower()]


def create(
    name: str, suited: Mapping[str, Any], given: Mapping[str, Any], **fixed: Any
) -> optimizer.Optimizer:
    """Make an optimizer: what was `given` and is not None goes before what is `suited`.

    Raises
    ------
    Refused
        There is no such optimizer, or it does not take the arguments.
    """
    arguments = {**suited, **{k: v for k, v in given.items() if v is not None}}
    try:
        return optimizer.create(name, **fixed, **arguments)
    except (TypeError, ValueError) as error:
        raise Refused(str(error)) from None


def heading(name: str, opt: optimizer.Optimizer, options: Any) -> str:
    """What a run is made with."""
    return (
        f"{name}: learning rate {opt.learning_rate:g}, {options.dtype}, "
        f"epochs {options.epochs}, batch size {options.batch_size}, seed {options.seed}"
    )


def chunks(array: Array, size: int) -> list[Array]:
    """Parts of `size` rows; the last may be shorter."""
    return [array[start : start + size] for start in range(0, len(array), size)]


def first_step(trial: Runner, *given: Any) -> str:
    """Do steps on copies, so that nothing is compiled when steps are compared, and say how long.

    Raises
    ------
    Refused
        The optimizer does not take the weights.
    """
    try:
        for each in given:
            trial.step(each)
    except (TypeError, ValueError) as error:
        raise Refused(str(error)) from None
    seconds = sum(trial.seconds)
    return f"first step: {seconds:.2f} s to compile the kernels or load them from the cache"


def take_turns(runners: Sequence[Runner], *given: Any) -> None:
    """Let each runner do a step with what it is given; every other time in reverse order."""
    turns = list(zip(runners, given, strict=True))
    for runner, its in turns[:: -1 if len(runners[0].seconds) % 2 else 1]:
        runner.step(its)


def updates(
    epoch: Callable[[], tuple[int, Iterable[tuple[float, Sequence[Any]]]]],
    runners: Sequence[Runner],
) -> Callable[[], tuple[int, Iterator[float]]]:
    """Make epochs of updates for :func:`train` from epochs of losses and gradients.

    Those of a step are worked out when the updates before it are done.
    """

    def begin() -> tuple[int, Iterator[float]]:
        number, steps = epoch()
        return number, map(act, steps)

    def act(step: tuple[float, Sequence[Any]]) -> float:
        loss, gradients = step
        take_turns(runners, *[gradients] * len(runners))
        return loss

    return begin


def train(
    epochs: int,
    begin: Callable[[], tuple[int, Iterable[float]]],
    progress: Callable[..., Any],
    word: str = "epoch",
) -> list[list[float]]:
    """Loss of each step of each epoch, with one progress bar.

    `begin` begins an epoch: it returns the number of its steps, and what does a step and returns
    its loss whenever it is asked for the next one.
    """
    losses: list[list[float]] = []
    with progress(unit="batch") as bar:
        for epoch in range(1, epochs + 1):
            number, steps = begin()
            bar.total = bar.n + number * (epochs - epoch + 1)
            bar.set_description_str(f"{word} {epoch}/{epochs}", refresh=False)
            losses.append([])
            for loss in steps:
                losses[-1].append(loss)
                bar.set_postfix_str(f"loss {fmean(losses[-1]):.4f}", refresh=False)
                bar.update()
    if not math.isfinite(losses[-1][-1]):
        print("the loss is no longer a finite number: try a smaller --learning-rate")
    return losses


def summary(seconds: Sequence[float]) -> str:
    """Median and sum of the time of steps."""
    return (
        f"median {median(seconds) * 1e6:6.1f} us a step, "
        f"{sum(seconds) * 1e3:.1f} ms in {len(seconds)} steps"
    )


def faster(ours: float, theirs: float) -> str:
    """How two times compare, in words."""
    ratio = theirs / ours
    return f"{ratio:.1f} times faster" if ratio >= 1 else f"{1 / ratio:.1f} times slower"


def agreement(name: str, ours: Runner, theirs: Runner) -> str:
    """Whether rounding explains how far apart two runs with the same gradients have ended."""
    largest = max(float(abs(weight).max()) for weight in theirs.weights)
    pairs = zip(ours.weights, theirs.weights, strict=True)
    difference = max(float(abs(a - b).max()) for a, b in pairs)
    if not math.isfinite(difference):
        return f"agreement with {name}: unknown, weights are no longer finite numbers"
    # Each step rounds a weight once in either run, and the state behind it a few times.
    steps, epsilon = len(ours.seconds), float(np.finfo(ours.weights[0].dtype).eps)
    allowed = 4 * steps * epsilon * largest
    if difference <= allowed:
        return f"agreement with {name}: yes, weights differ by {difference:.1e} at most"
    return (
        f"agreement with {name}: NO, weights differ by {difference:.1e} at most, "
        f"more than the {allowed:.1e} that rounding may explain"
    )
