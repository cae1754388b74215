"""``fastopt demo``: perceptrons learn to read digits, and their optimizer is timed."""

import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean, median
from time import perf_counter
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fastopt import optimizer
from fastopt._console import Refused, duration, need, progress, say, table
from fastopt._kernels.threads import use_threads
from fastopt.bench.steps import PLAIN
from fastopt.demo.perceptron import Array, Perceptron, train
from fastopt.optimizer import Optimizer
from fastopt.sparse import HALVES
from fastopt.trainer import Trainer

TRAIN, TEST = 1437, 360

ARGUMENTS: dict[str, dict[str, Any]] = {
    **{n: {"learning_rate": 0.1} for n in ("sgd", "ccsgd", "nag", "lbsgd", "dcasgd")},
    "lars": {"learning_rate": 2.0},
    "signum": {"learning_rate": 0.001},
    "lion": {"learning_rate": 0.0003},
    **{n: {"fallback": "adamw"} for n in ("apollo", "galore", "shampoo", "soap")},
    **{n: {"learning_rate": 0.01, "fallback": "adamw"} for n in ("adamuon", "muon", "normuon")},
    # SGLD samples a posterior, which needs the gradient of the sum over all images, not the mean.
    "sgld": {"learning_rate": 0.0001, "rescale_grad": TRAIN},
}
"""Arguments that suit this task better than the optimizer's own defaults."""

NETWORKS: tuple[tuple[int, ...], ...] = ((128,), (512, 512))
"""Sizes of the hidden layers of each network."""


@dataclass(frozen=True)
class Options:
    """Options of the demo; None selects a value suited to the optimizer."""

    optimizer: str = "adam"
    learning_rate: float | None = None
    dtype: str = "float32"
    no_master: bool = False
    rounding: str = "nearest"
    epochs: int = 20
    batch_size: int = 32
    seed: int = 0
    plot: Path | None = None
    mpi: bool = False


class Run:
    """The training of one network, with its results."""

    def __init__(
        self, options: Options, hidden: Sequence[int], opt: optimizer.Optimizer, comm: Any = None
    ) -> None:
        self.options, self.opt, self.comm = options, opt, comm
        self.rng = np.random.default_rng(options.seed)
        images, digits = need("sklearn.datasets")[0].load_digits(return_X_y=True)
        order = self.rng.permutation(len(digits))
        wide = "float64" if options.dtype == "float64" else "float32"
        self.images, self.digits = (images[order] / 16).astype(wide), digits[order]
        self.model = Perceptron(options.dtype, self.rng, hidden)
        self.name = "-".join(map(str, self.model.sizes))
        self.race = Race(self.model, opt, not unrivaled(options), comm)
        self.losses: list[list[float]] = []
        self.seconds: list[float] = []

    def first_step(self) -> float:
        """Do a step on copies, so that kernels are compiled before steps are timed.

        Returns the seconds that this took.

        Raises
        ------
        Refused
            The optimizer does not accept the weights.
        """
        trial, size = deepcopy(self.model), self.options.batch_size
        trial.backward(self.images[:size], self.digits[:size])
        trainer = Trainer(trial.params, deepcopy(self.opt), comm=self.comm)
        start = perf_counter()
        try:
            trainer.step(size)
        except (TypeError, ValueError) as error:
            raise Refused(str(error)) from None
        return perf_counter() - start

    def train(self) -> None:
        """Train for all epochs, show the progress, and compute the test accuracy."""
        size = self.options.batch_size
        for _ in progress(range(self.options.epochs), "epoch"):
            batches = np.split(self.rng.permutation(TRAIN), range(size, TRAIN, size))
            drawn = [(self.images[batch], self.digits[batch]) for batch in batches]
            losses = []
            start = perf_counter()
            for loss in train(self.model, self.race.step, drawn, self.comm):
                self.seconds.append(perf_counter() - start)
                losses.append(loss)
                start = perf_counter()
            self.losses.append(losses)
        self.accuracy = self.model.accuracy(self.images[TRAIN:], self.digits[TRAIN:])

    def row(self) -> list[str]:
        """Return the table cells."""
        return [
            self.name,
            f"{sum(weight.size for weight in self.model.weights):,}",
            f"{fmean(self.losses[-1]):.6f}",
            f"{self.accuracy:.3f}",
            *(duration(median(runner.seconds)) for runner in self.race.runners.values()),
        ]

    def draw(self, path: Path) -> None:
        """Plot the loss over the time of gradients and updates, for each implementation."""
        runners = self.race.runners
        gradients = np.array(self.seconds) - sum(np.array(r.seconds) for r in runners.values())
        times = {name: np.cumsum(gradients + runner.seconds) for name, runner in runners.items()}
        title = f"{self.options.optimizer.lower()} trains a {self.name} network to read digits"
        plot_race(self.losses, times, title, path)
        print(f"loss over time with {', '.join(runners)}: {path}")


@np.errstate(all="ignore")
def run(options: Options) -> float:
    """Train the networks, print the measurements, and return the test accuracy of the first one.

    Raises
    ------
    Refused
        An option is invalid, or a package is missing.
    """
    opt = _optimizer(options)
    comm = need("fastopt.mpi", extra="mpi")[0].MPI.COMM_WORLD if options.mpi else None
    ranks = comm.size if comm else 1
    least = TRAIN % options.batch_size or options.batch_size
    if least < ranks:
        raise Refused(
            f"--batch-size {options.batch_size} leaves a batch of {least} for {ranks} ranks"
        )
    if options.plot:
        check_plot(options.plot)
    with warnings.catch_warnings(), use_threads(1):
        warnings.filterwarnings("ignore", ".* weights without masters")  # --no-master
        runs = [Run(options, hidden, deepcopy(opt), comm) for hidden in NETWORKS]
        seconds = sum(run.first_step() for run in runs)
        shared = f"; batches and state sharded over {ranks} rank{'s' * (ranks > 1)}"
        say(
            f"{options.optimizer.lower()}: learning rate {opt.learning_rate:g}, "
            f"{options.dtype}, epochs {options.epochs}, batch size {options.batch_size}, "
            f"seed {options.seed}\n"
            f"{TRAIN} images of digits to train and {TEST} to test{_precision(options)}"
            f"{shared if comm else ''}\n"
            f"first step: {seconds:.2f} s to compile the kernels or load them from the cache"
        )
        for network in runs:
            network.train()
    _report(options, runs)
    if options.plot and not (comm and comm.rank):
        runs[-1].draw(options.plot)
    return runs[0].accuracy


def _optimizer(options: Options) -> optimizer.Optimizer:
    """Create the optimizer, after checking that the options are compatible."""
    half = options.dtype in HALVES
    if options.batch_size > TRAIN:
        raise Refused(f"--batch-size is at most {TRAIN}, the number of images to train")
    if options.no_master and not half:
        raise Refused("--no-master is for --dtype float16 and bfloat16")
    if options.rounding != "nearest" and not options.no_master:
        raise Refused("--rounding is that of weights without masters, give --no-master too")
    if options.dtype == "bfloat16":
        need("ml_dtypes", extra="bfloat16")
    arguments = {
        "seed": options.seed,
        "multi_precision": half and not options.no_master,
        "rounding": options.rounding,
        **ARGUMENTS.get(options.optimizer.lower(), {}),
    }
    if options.learning_rate is not None:
        arguments["learning_rate"] = options.learning_rate
    try:
        return optimizer.create(options.optimizer, **arguments)
    except (TypeError, ValueError) as error:
        raise Refused(str(error)) from None


def _precision(options: Options) -> str:
    if options.dtype not in HALVES:
        return ""
    if not options.no_master:
        return f"; {options.dtype} with float32 masters"
    rounding = {"nearest": "to nearest", "stochastic": "stochastically"}[options.rounding]
    return f"; {options.dtype} without masters, rounded {rounding}"


def unrivaled(options: Options) -> str:
    """Return why fastopt is not compared with NumPy; empty if it is."""
    name = options.optimizer.lower()
    if options.dtype in HALVES:
        return f"NumPy would round every intermediate result to {options.dtype}"
    if options.mpi:
        return "a rank has the gradients of its own images only"
    return "" if name in PLAIN else f"the demo has no NumPy code for {name}"


def _report(options: Options, runs: Sequence[Run]) -> None:
    """Print the results of each network and the comparison of times."""
    races = [run.race for run in runs]
    reason = unrivaled(options)
    repeated = " updated copies of the weights with the same gradients"
    what = f": not compared, {reason}" if reason else repeated
    say(f"\nfastopt trained {len(runs)} networks; plain NumPy{what}")
    if not reason:
        say(f"agreement with plain NumPy: {agreement(races)}")
    if not all(math.isfinite(run.losses[-1][-1]) for run in runs):
        say("the loss is no longer a finite number: try a smaller --learning-rate")
    head = ["network", "weights", "loss", "test accuracy", *races[0].runners]
    print(f"\n{table(head, [run.row() for run in runs])}\n")
    say("loss: mean of the last epoch; times: medians of an update, on one thread")
    if not reason:
        words = " and ".join(f"{run.race.words} ({run.name})" for run in runs)
        say(f"by the medians, fastopt is {words} than plain NumPy")


@dataclass
class Runner:
    """An implementation of a step, the weights that it updates, and the seconds of each step."""

    act: Callable[[Any], object]
    weights: Sequence[Array]
    seconds: list[float] = field(default_factory=list)

    def step(self, batch: Any) -> None:
        """Do and time a step."""
        begin = perf_counter()
        self.act(batch)
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
    deviations = []
    for race in races:
        ours, plain = race.runners.values()
        pairs = [*zip(ours.weights, plain.weights, strict=True)]
        apart = float(np.max([abs(a - b).max() for a, b in pairs]))
        largest = float(np.max([abs(weight).max() for weight in plain.weights]))
        rounding = 4 * len(ours.seconds) * float(np.finfo(ours.weights[0].dtype).eps) * largest
        deviations.append((apart / rounding, apart, rounding))
    if not np.isfinite(deviations).all():
        return "unknown, weights are no longer finite numbers"
    excess, worst, rounding = max(deviations)
    if excess > 1:
        return (
            f"NO, weights differ by {worst:.1e}, more than {rounding:.1e}, which rounding explains"
        )
    return f"yes, weights differ by {max(apart for _, apart, _ in deviations):.1e} at most"


def check_plot(path: Path) -> None:
    """Check that a plot can be written to `path`, before anything is measured.

    Raises
    ------
    Refused
        matplotlib is missing, does not support the format, or the file cannot be written.
    """
    (backend,) = need("matplotlib.backend_bases")
    if path.suffix[1:].lower() not in backend.FigureCanvasBase.get_supported_filetypes():
        raise _refused(path, "its name must end in a format, such as .png")
    new = not path.exists()
    try:
        path.open("ab").close()
    except OSError as error:
        raise _refused(path, error.strerror) from None
    if new:
        path.unlink(missing_ok=True)  # another rank may have


def plot_race(
    losses: Sequence[Sequence[float]], times: Mapping[str, NDArray[Any]], title: str, path: Path
) -> None:
    """Plot the mean loss of each epoch over the time at its end.

    The losses are the same for all names; `times` are the cumulative seconds after each step.

    Raises
    ------
    Refused
        The file cannot be written.
    """
    from matplotlib.figure import Figure

    ends = np.cumsum([len(epoch) for epoch in losses]) - 1
    means = [fmean(epoch) for epoch in losses]
    figure = Figure(figsize=(7, 4.2), dpi=120, layout="constrained")
    axes: Any = figure.subplots()
    for name, seconds in times.items():
        axes.plot(seconds[ends], means, "o-", label=f"{name}: {float(seconds[-1]):.2f} s")
    axes.set(xlabel="seconds of gradients and updates", ylabel="mean loss of an epoch")
    axes.set(title=title, yscale="log", xlim=(0, None))
    axes.legend()
    try:
        figure.savefig(path)
    except (OSError, ValueError) as error:
        raise _refused(path, error) from None


def _refused(path: Path, reason: object) -> Refused:
    return Refused(f"cannot write the plot to {str(path)!r}: {reason}")
