"""Demo of dense updates: a perceptron learns to classify digits, and its optimizer is timed."""

import warnings
from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median
from typing import Any

import numpy as np

from fastopt import optimizer, reference
from fastopt._console import duration, table
from fastopt._kernels.threads import use_threads
from fastopt.demo import common, plot
from fastopt.demo.common import Refused, Runner
from fastopt.demo.perceptron import Perceptron, train
from fastopt.demo.rivals import NUMPY, Rival, rivals
from fastopt.demo.team import Team
from fastopt.reference import Array
from fastopt.sparse import HALVES
from fastopt.trainer import Trainer

TRAIN, TEST = 1437, 360

ARGUMENTS: dict[str, dict[str, Any]] = {
    **{name: {"learning_rate": 0.1} for name in ("sgd", "ccsgd", "nag", "lbsgd", "dcasgd")},
    "lars": {"learning_rate": 2.0},
    "signum": {"learning_rate": 0.001},
    "lion": {"learning_rate": 0.0003},
    "muon": {"learning_rate": 0.01, "fallback": "adamw"},
    "shampoo": {"fallback": "adamw"},
    "soap": {"fallback": "adamw"},
    # SGLD samples a posterior, which needs the gradient of the sum over all images, not the mean.
    "sgld": {"learning_rate": 0.0001, "rescale_grad": TRAIN},
}
"""Arguments that suit this task better than the optimizer's own defaults."""

NETWORKS: tuple[tuple[int, ...], ...] = ((128,), (512, 512))
"""Sizes of the hidden layers of each network."""


@dataclass(frozen=True)
class Options:
    """Options of the demo; None selects values suited to the optimizer, or all networks."""

    optimizer: str = "adam"
    learning_rate: float | None = None
    momentum: float | None = None
    dtype: str = "float32"
    no_master: bool = False
    rounding: str = "nearest"
    hidden: Sequence[int] | None = None
    epochs: int = 20
    batch_size: int = 32
    seed: int = 0
    plot: Path | None = None
    mpi: bool = False


class Race(Trainer):
    """A trainer whose steps are timed and repeated by rivals on copies of the weights."""

    def __init__(
        self, model: Perceptron, opt: optimizer.Optimizer, rivals: Mapping[str, Rival], comm: Any
    ) -> None:
        super().__init__(model.params, opt, comm=comm)
        self.params = model.params
        self.ours = Runner(super().step, model.weights)
        self.rivals = {name: rival(opt, model.weights) for name, rival in rivals.items()}

    def step(self, batch_size: float = 1, ignore_stale_grad: bool = False) -> None:
        """Do the step with fastopt and all rivals."""
        if not self.rivals:
            self.ours.step(batch_size)
            return
        means = [parameter.grad() / batch_size for parameter in self.params.values()]
        common.take_turns(
            [self.ours, *self.rivals.values()], batch_size, *[means] * len(self.rivals)
        )


class Task:
    """A network to train, with the results."""

    def __init__(
        self,
        options: Options,
        hidden: Sequence[int],
        datasets: Any,
        rivals: Mapping[str, Rival],
        team: Team,
    ) -> None:
        self.options, self.team = options, team
        self.rng = np.random.default_rng(options.seed)
        self.images, self.digits = _images(datasets, self.rng, options.dtype)
        self.model = Perceptron(options.dtype, self.rng, hidden)
        self.name = "-".join(map(str, self.model.sizes))
        self.race = Race(self.model, _optimizer(options), rivals, team.comm)

    def first_step(self) -> float:
        """Do a step on copies and return its seconds."""
        trial, size = deepcopy(self.model), self.options.batch_size
        trial.backward(self.images[:size], self.digits[:size])
        trainer = Trainer(trial.params, _optimizer(self.options), comm=self.team.comm)
        return common.first_step(Runner(trainer.step, trial.weights), size)

    def epoch(self) -> tuple[int, Iterator[float]]:
        """Start an epoch: return the number of steps and an iterator over their losses."""
        chunks = common.chunks(self.rng.permutation(TRAIN), self.options.batch_size)
        batches = [(self.images[c], self.digits[c]) for c in chunks]
        return len(chunks), train(self.model, self.race, batches, self.team)

    def train(self, bar: Any, trainings: int) -> None:
        """Train for all epochs and compute the test accuracy."""
        epochs = self.options.epochs
        self.training = common.train(epochs, self.epoch, bar, self.name, trainings)
        self.accuracy = self.model.accuracy(self.images[TRAIN:], self.digits[TRAIN:])


@np.errstate(all="ignore")
def run(options: Options) -> float:
    """Train the networks, print the measurements, and return the test accuracy of the first one.

    Raises
    ------
    Refused
        An option is invalid, or a package is missing.
    """
    name, team = options.optimizer.lower(), Team.of(options.mpi)
    opt = _optimizer(options)
    _check_batches(options.batch_size, team.size)
    (datasets, _) = common.need("sklearn.datasets", "tqdm")
    if options.plot:
        plot.check(options.plot)
    networks = [options.hidden] if options.hidden else NETWORKS
    others = {} if _unrivaled(options) else rivals(name, torch=options.plot is not None)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".* weights without masters")  # --no-master
        tasks = [Task(options, hidden, datasets, others, team) for hidden in networks]
        seconds = sum(task.first_step() for task in tasks)
        print(common.heading(name, opt, options))
        print(
            f"{TRAIN} images of digits to train and {TEST} to test{_precision(options)}"
            f"{_shared(team.size) if options.mpi else ''}\n"
            f"first step: {seconds:.2f} s to compile the kernels or load them from the cache",
            flush=True,
        )
        with common.progress_bar(team.rank == 0) as bar, use_threads(1):
            for left, task in zip(range(len(tasks), 0, -1), tasks, strict=False):
                task.train(bar, left)
    _report(name, options, tasks)
    if options.plot and team.rank == 0:
        _draw(tasks[-1], name, options.plot)
    return tasks[0].accuracy


def _optimizer(options: Options) -> optimizer.Optimizer:
    """Create the optimizer, after checking that the options are compatible."""
    name, half = options.optimizer.lower(), options.dtype in HALVES
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
    """Return images as rows of values from 0 to 1, and their digits, in random order."""
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


def _unrivaled(options: Options) -> str:
    """Return why fastopt is not compared with NumPy; empty if it is."""
    name = options.optimizer.lower()
    if options.dtype in HALVES:
        return f"NumPy would round every intermediate result to {options.dtype}"
    if options.mpi:
        return "a rank has the gradients of its own images only"
    return "" if name in reference.UPDATES else f"the demo has no NumPy code for {name}"


def _report(name: str, options: Options, tasks: Sequence[Task]) -> None:
    """Print the results of each network and the comparison of times."""
    names = list(tasks[0].race.rivals)
    many = f"{len(tasks)} networks" if len(tasks) > 1 else "a network"
    if names:
        print(
            f"\nfastopt trained {many}; {' and '.join(names)} updated copies of the weights "
            "with the same gradients"
        )
    else:
        print(f"\nfastopt trained {many}; plain NumPy: not compared, {_unrivaled(options)}")
    print(end="".join(sorted({common.diverged(task.training) for task in tasks})))
    for rival in names:
        pairs = [(task.race.ours, task.race.rivals[rival]) for task in tasks]
        print(common.agreement(rival, pairs))
    head = ["network", "weights", "loss", "test accuracy", "fastopt", *names]
    print(f"\n{table(head, [_line(task) for task in tasks])}\n")
    print("loss: mean of the last epoch; times: medians of an update, on one thread")
    if names:
        print(_conclusion(tasks), flush=True)


def _line(task: Task) -> list[str]:
    """Return the table cells of a network."""
    runners = task.race.ours, *task.race.rivals.values()
    return [
        task.name,
        f"{sum(w.size for w in task.model.weights):,}",
        f"{fmean(task.training.losses[-1]):.6f}",
        f"{task.accuracy:.3f}",
        *(duration(median(runner.seconds)) for runner in runners),
    ]


def _conclusion(tasks: Sequence[Task]) -> str:
    """Summarize the comparison with NumPy."""
    words = [
        common.faster(median(task.race.ours.seconds), median(task.race.rivals[NUMPY].seconds))
        for task in tasks
    ]
    parts = [f"{w} ({task.name})" for w, task in zip(words, tasks, strict=True)]
    hint = ""
    if any(w.endswith("slower") for w in words):
        hint = (
            "on arrays this small the cost of a call counts; fastopt bench measures larger ones\n"
        )
    return f"{hint}by the medians, fastopt is {' and '.join(parts)} than {NUMPY}"


def _draw(task: Task, name: str, path: Path) -> None:
    """Plot the loss over the time of gradients and updates, for each implementation."""
    runners = {"fastopt": task.race.ours, **task.race.rivals}
    gradients = task.training.others(runners.values())
    times = {way: np.cumsum(gradients + runner.seconds) for way, runner in runners.items()}
    title = f"{name} trains a {task.name} network to read digits"
    plot.race(task.training.losses, times, title, "mean loss of an epoch", path)
    print(f"loss over time with {', '.join(runners)}: {path}")
