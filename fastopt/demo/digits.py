"""The demo of dense updates: a perceptron learns to read digits, and its optimizer is timed."""

import warnings
from collections.abc import Iterator, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import fmean, median
from typing import Any

import numpy as np

from fastopt import optimizer, plain
from fastopt.demo import common, plot
from fastopt.demo.common import Refused, Runner
from fastopt.demo.perceptron import Perceptron, train
from fastopt.demo.team import Team
from fastopt.plain import Array
from fastopt.sparse import HALVES
from fastopt.trainer import Trainer

__all__ = ["ARGUMENTS", "Options", "run"]

TRAIN, TEST = 1437, 360

ARGUMENTS: dict[str, dict[str, float]] = {
    **{name: {"learning_rate": 0.1} for name in ("sgd", "ccsgd", "nag", "lbsgd", "dcasgd")},
    "lars": {"learning_rate": 2.0},
    "signum": {"learning_rate": 0.001},
    "lion": {"learning_rate": 0.0003},
    # The posterior that SGLD samples has the gradient of the sum over all images, not the mean.
    "sgld": {"learning_rate": 0.0001, "rescale_grad": TRAIN},
}
"""Arguments that suit this task better than the optimizer's own defaults."""

COMPARED = ("sgd", "adagrad", "rmsprop", "adam", "lion")
"""Optimizers whose losses a plot shows, besides that which was asked for."""


@dataclass(frozen=True)
class Options:
    """What the demo is asked to do; None stands for what suits the optimizer."""

    optimizer: str = "adam"
    learning_rate: float | None = None
    momentum: float | None = None
    dtype: str = "float32"
    no_master: bool = False
    rounding: str = "nearest"
    epochs: int = 20
    batch_size: int = 32
    seed: int = 0
    plot: Path | None = None
    compare: Sequence[str] | None = None
    mpi: bool = False


class Race(Trainer):
    """A trainer whose steps are timed, and done in plain NumPy on a copy of the weights too."""

    def __init__(
        self, model: Perceptron, opt: optimizer.Optimizer, update: plain.Update | None, comm: Any
    ) -> None:
        super().__init__(model.params, opt, comm=comm)
        self.params = model.params
        self.ours = Runner(super().step, model.weights)
        self.shadow = Runner.of(update, [w.copy() for w in model.weights]) if update else None

    def step(self, batch_size: float, ignore_stale_grad: bool = False) -> None:
        """Do the step in both ways."""
        if self.shadow is None:
            self.ours.step(batch_size)
        else:
            means = [parameter.grad() / batch_size for parameter in self.params.values()]
            common.take_turns([self.ours, self.shadow], batch_size, means)


@np.errstate(all="ignore")
def run(options: Options) -> float:
    """Train the perceptron, print what was measured, and return the accuracy on test images.

    Raises
    ------
    Refused
        An option does not fit, or a package is missing.
    """
    name, team = options.optimizer.lower(), Team.of(options.mpi)
    opt = _optimizer(name, options)
    _check_batches(options.batch_size, team.size)
    datasets, progress = common.need("sklearn.datasets", "tqdm")
    others = _others(options)
    task = Task(options, datasets, team)
    model, images, digits = task.model, task.images, task.digits
    print(common.heading(name, opt, options))
    print(
        f"{TRAIN} images to train and {TEST} to test; perceptron 64-128-10, "
        f"{sum(w.size for w in model.weights)} weights in {len(model.weights)} arrays"
        f"{_precision(options)}{_shared(team.size) if options.mpi else ''}",
        flush=True,
    )

    bar = partial(progress.tqdm, disable=team.rank > 0)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".* weights without masters")  # they were asked for
        first = images[: options.batch_size], digits[: options.batch_size]
        print(_first_step(model, opt, *first, team.comm))
        reference = None if options.mpi else _reference(name, opt, options.dtype)
        race = Race(model, opt, reference, team.comm)
        losses = {name: task.train(race, bar)}
    accuracy = model.accuracy(images[TRAIN:], digits[TRAIN:])
    print(f"mean loss of the last epoch: {fmean(losses[name][-1]):.6f}")
    print(f"test accuracy: {accuracy:.3f}")
    _report(name, options, race.ours, race.shadow)
    for each, opt in others.items():
        task = Task(options, datasets, team)
        trainer = Trainer(task.model.params, opt, comm=team.comm)
        losses[each] = task.train(trainer, partial(bar, leave=False), f"{each}, epoch")
    if options.plot and team.rank == 0:
        plot.curves(losses, "cross-entropy", options.plot)
        print(f"losses of {', '.join(losses)}: {options.plot}")
    return accuracy


class Task:
    """Images and digits in random order, and a model that has not seen any."""

    def __init__(self, options: Options, datasets: Any, team: Team) -> None:
        self.options, self.team = options, team
        self.rng = np.random.default_rng(options.seed)
        self.images, self.digits = _images(datasets, self.rng, options.dtype)
        self.model = Perceptron(options.dtype, self.rng)

    def epoch(self, trainer: Trainer) -> tuple[int, Iterator[float]]:
        """Number of steps of an epoch, and the loss of each when it is done."""
        chunks = common.chunks(self.rng.permutation(TRAIN), self.options.batch_size)
        batches = [(self.images[c], self.digits[c]) for c in chunks]
        return len(chunks), train(self.model, trainer, batches, self.team)

    def train(self, trainer: Trainer, progress: Any, word: str = "epoch") -> list[list[float]]:
        """Losses of all epochs."""
        return common.train(self.options.epochs, partial(self.epoch, trainer), progress, word)


def _others(options: Options) -> dict[str, optimizer.Optimizer]:
    """Optimizers to compare with, by name, if there is to be a plot and it can be written."""
    names = common.compared(options, COMPARED)
    bare = replace(options, learning_rate=None, momentum=None)
    return {name: _optimizer(name, bare) for name in names}


def _optimizer(name: str, options: Options) -> optimizer.Optimizer:
    """Make the optimizer that the options ask for, if they fit together."""
    half = options.dtype in HALVES
    if options.batch_size > TRAIN:
        raise Refused(f"--batch-size is at most {TRAIN}, the number of images to train")
    if options.no_master and not half:
        raise Refused("--no-master is for --dtype float16 and bfloat16")
    if options.rounding != "nearest" and not options.no_master:
        raise Refused("--rounding is that of weights without masters, give --no-master too")
    if options.dtype == "bfloat16":
        common.need("ml_dtypes", extra="bfloat16")
    given = {"learning_rate": options.learning_rate, "momentum": options.momentum}
    fixed = {"seed": options.seed, "multi_precision": half and not options.no_master}
    return common.create(name, ARGUMENTS.get(name, {}), given, rounding=options.rounding, **fixed)


def _images(datasets: Any, rng: np.random.Generator, dtype: str) -> tuple[Array, Array]:
    """Images as rows of numbers from 0 to 1, and their digits, in random order."""
    images, digits = datasets.load_digits(return_X_y=True)
    order = rng.permutation(len(digits))
    wide = "float64" if dtype == "float64" else "float32"
    return (images[order] / 16).astype(wide), digits[order]


def _precision(options: Options) -> str:
    if options.dtype not in HALVES:
        return ""
    if not options.no_master:
        return f"; {options.dtype} with float32 masters"
    rounding = {"nearest": "to nearest", "stochastic": "stochastically"}[options.rounding]
    return f"; {options.dtype} without masters, rounded {rounding}"


def _check_batches(batch_size: int, ranks: int) -> None:
    least = TRAIN % batch_size or batch_size
    if least < ranks:
        raise Refused(f"--batch-size {batch_size} leaves a batch of {least} for {ranks} ranks")


def _shared(ranks: int) -> str:
    return f"; batches and state shared out among {ranks} rank{'s' * (ranks > 1)}"


def _first_step(
    model: Perceptron, opt: optimizer.Optimizer, images: Array, digits: Array, comm: Any
) -> str:
    trial = deepcopy(model)
    trial.backward(images, digits)
    trainer = Trainer(trial.params, deepcopy(opt), comm=comm)
    return common.first_step(Runner(trainer.step, trial.weights), len(digits))


def _reference(name: str, opt: optimizer.Optimizer, dtype: str) -> plain.Update | None:
    """Return the update in plain NumPy, if there is one that fastopt can be compared with."""
    return plain.UPDATES[name](opt) if name in plain.UPDATES and dtype not in HALVES else None


def _report(name: str, options: Options, ours: Runner, shadow: Runner | None = None) -> None:
    fast = f"optimizer, fastopt:     {common.summary(ours.seconds)}"
    if shadow is None:
        reason = f"the demo has no NumPy code for {name}"
        if options.dtype in HALVES:
            reason = f"NumPy would round every intermediate result to {options.dtype}"
        if options.mpi:
            reason = "a rank has the gradients of its own images only"
        print(f"{fast}\noptimizer, plain NumPy: not compared, {reason}", flush=True)
        return
    print(common.agreement("plain NumPy", ours, shadow))
    print(f"{fast}\noptimizer, plain NumPy: {common.summary(shadow.seconds)}")
    words = common.faster(median(ours.seconds), median(shadow.seconds))
    if words.endswith("slower"):
        print("on arrays this small the cost of a call counts; fastopt bench measures larger ones")
    print(f"by the medians, fastopt is {words} than plain NumPy", flush=True)
