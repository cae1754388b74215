"""Shared code of the demos: a training loop that times updates, and reports."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from statistics import fmean
from time import perf_counter
from typing import Any, Self

import numpy as np

from fastopt import optimizer
from fastopt._console import Refused, need
from fastopt.reference import Array

__all__ = ["Refused", "Runner", "Training", "agreement", "chunks", "create", "diverged", "faster"]
__all__ += ["first_step", "heading", "need", "progress_bar", "take_turns", "train", "updates"]


@dataclass
class Runner:
    """An implementation of a step, the weights that it updates, and the seconds of each step."""

    act: Callable[[Any], None]
    weights: Sequence[Array]
    seconds: list[float] = field(default_factory=list)

    @classmethod
    def of(cls, update: Callable[[int, Any, Array], None], weights: Sequence[Array]) -> Self:
        """Create a runner whose step takes gradients and updates the weights one by one."""

        def act(gradients: Sequence[Any]) -> None:
            for index, weight in enumerate(weights):
                update(index, gradients[index], weight)

        return cls(act, weights)

    def step(self, given: Any) -> None:
        """Do and time a step."""
        begin = perf_counter()
        self.act(given)
        self.seconds.append(perf_counter() - begin)


def create(
    name: str, suited: Mapping[str, Any], given: Mapping[str, Any], **fixed: Any
) -> optimizer.Optimizer:
    """Create an optimizer; values in `given` that are not None override those in `suited`.

    Raises
    ------
    Refused
        There is no such optimizer, or it does not accept the arguments.
    """
    arguments = {**suited, **{k: v for k, v in given.items() if v is not None}}
    try:
        return optimizer.create(name, **fixed, **arguments)
    except (TypeError, ValueError) as error:
        raise Refused(str(error)) from None


def heading(name: str, opt: optimizer.Optimizer, options: Any) -> str:
    """Describe the settings of a run in a line."""
    return (
        f"{name}: learning rate {opt.learning_rate:g}, {options.dtype}, "
        f"epochs {options.epochs}, batch size {options.batch_size}, seed {options.seed}"
    )


def chunks(array: Array, size: int) -> list[Array]:
    """Split an array into parts of `size` rows; the last may be shorter."""
    return [array[start : start + size] for start in range(0, len(array), size)]


def first_step(trial: Runner, *given: Any) -> float:
    """Do steps on copies, so that kernels are compiled before steps are timed.

    Returns the seconds that this took.

    Raises
    ------
    Refused
        The optimizer does not accept the weights.
    """
    try:
        for each in given:
            trial.step(each)
    except (TypeError, ValueError) as error:
        raise Refused(str(error)) from None
    return sum(trial.seconds)


def take_turns(runners: Sequence[Runner], *given: Any) -> None:
    """Do one step of each runner, in reverse order every other time."""
    turns = list(zip(runners, given, strict=True))
    for runner, its in turns[:: -1 if len(runners[0].seconds) % 2 else 1]:
        runner.step(its)


def updates(
    epoch: Callable[[], tuple[int, Iterable[tuple[float, Sequence[Any]]]]],
    runners: Sequence[Runner],
) -> Callable[[], tuple[int, Iterator[float]]]:
    """Turn epochs of losses and gradients into epochs of updates for :func:`train`.

    Loss and gradients of a step are computed after the updates of the step before.
    """

    def begin() -> tuple[int, Iterator[float]]:
        number, steps = epoch()
        return number, map(act, steps)

    def act(step: tuple[float, Sequence[Any]]) -> float:
        loss, gradients = step
        take_turns(runners, *[gradients] * len(runners))
        return loss

    return begin


@contextmanager
def progress_bar(shown: bool = True) -> Iterator[Any]:
    """Show a progress bar on standard error if that is a terminal; it is removed at the end.

    Raises
    ------
    Refused
        tqdm is not installed.
    """
    (tqdm,) = need("tqdm")
    disable = None if shown else True  # None: unless standard error is a terminal
    with tqdm.tqdm(unit="step", leave=False, dynamic_ncols=True, disable=disable) as bar:
        yield bar


@dataclass
class Training:
    """The loss and the duration of each step, in seconds."""

    losses: list[list[float]] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)

    def others(self, runners: Iterable[Runner]) -> Array:
        """Seconds of each step without the runners, that is, of computing the gradients."""
        updates = sum(np.array(runner.seconds) for runner in runners)
        gradients: Array = np.array(self.seconds) - updates
        return gradients


def train(
    epochs: int,
    begin: Callable[[], tuple[int, Iterable[float]]],
    bar: Any,
    label: str,
    trainings: int = 1,
) -> Training:
    """Train for a number of epochs and show the progress.

    `begin` starts an epoch: it returns the number of steps and an iterator that does one step at a
    time and yields its loss. The bar covers this training and the following ones, `trainings` in
    all.
    """
    training = Training()
    for epoch in range(1, epochs + 1):
        number, steps = begin()
        bar.total = bar.n + number * (epochs * trainings - epoch + 1)
        bar.set_description_str(f"{label}, epoch {epoch}/{epochs}", refresh=epoch == 1)
        losses: list[float] = []
        training.losses.append(losses)
        start = perf_counter()
        for loss in steps:
            end = perf_counter()
            training.seconds.append(end - start)
            losses.append(loss)
            bar.set_postfix_str(f"loss {fmean(losses):.4f}", refresh=False)
            bar.update()
            start = perf_counter()
    return training


def diverged(training: Training) -> str:
    """Return a line of advice if the last loss is not finite, else an empty string."""
    if math.isfinite(training.losses[-1][-1]):
        return ""
    return "the loss is no longer a finite number: try a smaller --learning-rate\n"


def faster(ours: float, theirs: float) -> str:
    """Describe the ratio of two times."""
    ratio = theirs / ours
    return f"{ratio:.1f} times faster" if ratio >= 1 else f"{1 / ratio:.1f} times slower"


def difference(ours: Runner, theirs: Runner) -> float:
    """Return the largest absolute difference between the weights of two runs."""
    pairs = zip(ours.weights, theirs.weights, strict=True)
    return max(float(abs(a - b).max()) for a, b in pairs)


def agreement(name: str, pairs: Sequence[tuple[Runner, Runner]]) -> str:
    """Report whether runs with the same gradients differ by no more than rounding explains."""
    apart = [difference(ours, theirs) for ours, theirs in pairs]
    if not all(map(math.isfinite, apart)):
        return f"agreement with {name}: unknown, weights are no longer finite numbers"
    excess, worst = max((d / rounding(*pair), d) for d, pair in zip(apart, pairs, strict=True))
    if excess <= 1:
        return f"agreement with {name}: yes, weights differ by {max(apart):.1e} at most"
    return (
        f"agreement with {name}: NO, weights differ by {worst:.1e} at most, "
        f"more than the {worst / excess:.1e} that rounding may explain"
    )


def rounding(ours: Runner, theirs: Runner) -> float:
    """Return the difference of weights that rounding may explain.

    In each run, a step rounds a weight once and its state a few times.
    """
    largest = max(float(abs(weight).max()) for weight in theirs.weights)
    return 4 * len(ours.seconds) * float(np.finfo(ours.weights[0].dtype).eps) * largest
