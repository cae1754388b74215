"""Demo of row-sparse updates: word vectors, with lazy updates compared to dense ones."""

from collections.abc import Callable, Iterator, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import fmean, median
from time import perf_counter
from typing import Any

import numpy as np

from fastopt import optimizer
from fastopt._console import duration, table
from fastopt._kernels.threads import use_threads
from fastopt.demo import common, plot
from fastopt.demo.common import Refused, Runner
from fastopt.demo.skipgram import Corpus, SkipGram, nearest
from fastopt.optimizer.matrices import MatrixOptimizer
from fastopt.reference import Array
from fastopt.sparse import HALVES, RowSparse

SIZE, WINDOW, NEGATIVES, LEAST, THRESHOLD = 64, 5, 5, 2, 3e-4
FEWEST, COMMON, SHOWN, RACE, TALL = 100, 600, 5, 200, 50_000
NAMES = {0: "word_weight", 1: "context_weight"}
WORDS = (
    "tuple", "integer", "string", "dictionary", "exception", "import", "loop", "iterator",
    "async", "class", "method", "true",
)  # fmt: skip

RATES = {"adagrad": 0.1, "groupadagrad": 0.1, "adam": 0.002, "sgd": 0.05, "ccsgd": 0.05}
"""Learning rates that suit this task better than the optimizers' defaults."""

EXACT = ("adagrad", "groupadagrad", "sgd", "ccsgd")
"""Optimizers whose dense updates leave rows with zero gradient unchanged, like lazy ones."""

Epoch = tuple[int, Iterator[tuple[float, list[RowSparse]]]]


@dataclass(frozen=True)
class Options:
    """Options of the demo; None selects values suited to the optimizer."""

    optimizer: str = "adagrad"
    learning_rate: float | None = None
    dtype: str = "float32"
    epochs: int = 10
    batch_size: int = 128
    seed: int = 0
    text: Path | None = None
    plot: Path | None = None


@dataclass
class Dense(Runner):
    """Updates with dense gradients; the time to create the gradients is measured separately."""

    making: list[float] = field(default_factory=list)

    def step(self, given: Sequence[RowSparse]) -> None:
        """Convert the gradients to dense ones and update all weights."""
        begin = perf_counter()
        dense = [gradient.to_dense() for gradient in given]
        self.making.append(perf_counter() - begin)
        super().step(dense)


@np.errstate(all="ignore")
def run(options: Options) -> float:
    """Train the vectors, print the measurements, and return the mean loss of the last epoch.

    Raises
    ------
    Refused
        An option is invalid, or a package is missing.
    """
    if options.dtype in HALVES:
        raise Refused("--task embeddings takes --dtype float32 or float64")
    name = options.optimizer.lower()
    opt = _optimizer(name, options)
    common.need("tqdm")
    if options.plot:
        plot.check(options.plot)
    rng = np.random.default_rng(options.seed)
    corpus = _corpus(options.text)
    model = SkipGram(rng, corpus, SIZE, options.dtype)
    print(common.heading(name, opt, options))
    print(
        f"text of {len(corpus.tokens)} words, {len(corpus.words)} of them different; each gets a "
        f"vector of {SIZE} numbers,\nso that words which occur together have similar vectors",
        flush=True,
    )
    with common.progress_bar() as bar:
        races = []
        for height in sorted({len(corpus.words), max(len(corpus.words), TALL)}):
            taller = model.padded(height)
            few = partial(_epoch, corpus, taller, deepcopy(rng), options.batch_size, RACE)
            races.append(_race(opt, taller, few, bar))
        updates = Runner.of(optimizer.get_updater(opt), model.weights)
        epoch = partial(_epoch, corpus, model, rng, options.batch_size)
        steps = common.updates(epoch, [updates])
        training = common.train(options.epochs, steps, bar, "training")
    _report(name, races)
    first, last = (fmean(training.losses[epoch]) for epoch in (0, -1))
    print(end=common.diverged(training))
    print(f"\nloss of a pair of words: {first:.3f} in the first epoch, {last:.3f} in the last")
    _show(corpus, model.weights[0])
    if options.plot:
        _draw(races[-1], name, options.plot)
    return last


def _optimizer(name: str, options: Options) -> optimizer.Optimizer:
    suited = {"learning_rate": RATES[name]} if name in RATES else {}
    given = {"learning_rate": options.learning_rate}
    fixed = {"param_idx2name": NAMES, "seed": options.seed, "lazy_update": True}
    opt = common.create(name, suited, given, **fixed)
    if isinstance(opt, MatrixOptimizer):
        raise Refused(f"{name} takes dense gradients; those of this demo are row-sparse")
    return opt


def _corpus(path: Path | None) -> Corpus:
    """Read the words of a file, or of the reference pages of Python's ``help``."""
    try:
        if path is None:
            from pydoc_data.topics import topics

            text = "\n".join(topics.values())
        else:
            text = path.read_text(encoding="utf-8")
    except (ImportError, OSError, UnicodeDecodeError) as error:
        raise Refused(f"cannot read the text ({error}): name a file with --text") from None
    corpus = Corpus.of(text, LEAST)
    if len(corpus.words) < FEWEST:
        raise Refused(
            f"the text must have {FEWEST} words that occur {LEAST} times or more, "
            f"got {len(corpus.words)}"
        )
    return corpus


def _epoch(
    corpus: Corpus, model: SkipGram, rng: np.random.Generator, size: int, most: int | None = None
) -> Epoch:
    """Return the number of batches, at most `most`, and their losses and gradients."""
    batches = common.chunks(corpus.pairs(rng, WINDOW, THRESHOLD), size)[:most]
    return len(batches), (model.backward(batch, NEGATIVES, rng) for batch in batches)


@dataclass
class Race:
    """Comparison of row-sparse and dense updates of a table, with the number of rows per step."""

    rows: int
    indices: int
    unique: int
    lazy: Runner
    dense: Dense
    training: common.Training


def _race(opt: optimizer.Optimizer, model: SkipGram, epoch: Callable[[], Epoch], bar: Any) -> Race:
    """Train with row-sparse and with dense gradients in turn.

    Both run on one thread: on a busy machine, the dense update would mostly wait for its second
    thread.
    """
    _, gradients = next(epoch()[1])
    whole = [gradient.to_dense() for gradient in gradients]

    def runner(cls: type[Runner], weights: Sequence[Array]) -> Any:
        return cls.of(optimizer.get_updater(deepcopy(opt)), weights)

    common.first_step(runner(Runner, [w.copy() for w in model.weights]), gradients, whole)
    dense = runner(Dense, [w.copy() for w in model.weights])
    lazy = runner(Runner, model.weights)
    with use_threads(1):
        steps = common.updates(epoch, [lazy, dense])
        training = common.train(1, steps, bar, f"comparison on {len(whole[0])} rows")
    return Race(
        len(whole[0]),
        sum(len(gradient.indices) for gradient in gradients),
        sum(len(gradient.coalesce().indices) for gradient in gradients),
        lazy,
        dense,
        training,
    )


def _report(name: str, races: Sequence[Race]) -> None:
    """Print the comparison of row-sparse with dense updates."""
    print(
        f"\nfastopt updated two tables by row-sparse gradients: {races[0].indices} row indices per "
        f"step, {races[0].unique} unique;\ncopies of the tables were updated by the same gradients "
        "made dense"
    )
    if name in EXACT:
        print(common.agreement("dense updates", [(race.lazy, race.dense) for race in races]))
    else:
        print(f"dense updates with {name} also move rows whose gradient is zero: no comparison")
    head = ["rows of a table", "row-sparse update", "dense update", "making a dense gradient"]
    print(f"\n{table(head, [_line(race) for race in races])}\n")
    print("medians of a step, on one thread")
    for race in races:
        dense = median(race.dense.seconds) + median(race.dense.making)
        words = common.faster(median(race.lazy.seconds), dense)
        print(
            f"{race.rows:,} rows: row-sparse updates are {words} than making the gradients dense "
            "and updating with them"
        )


def _line(race: Race) -> list[str]:
    """Return the table cells of a comparison."""
    times = race.lazy.seconds, race.dense.seconds, race.dense.making
    return [f"{race.rows:,}", *(duration(median(seconds)) for seconds in times)]


def _draw(race: Race, name: str, path: Path) -> None:
    """Plot the loss over the time of gradients and updates, row-sparse and dense."""
    making = np.array(race.dense.making)
    gradients = race.training.others([race.lazy, race.dense]) - making
    times = {
        "row-sparse": np.cumsum(gradients + race.lazy.seconds),
        "dense": np.cumsum(gradients + making + race.dense.seconds),
    }
    parts = common.chunks(np.array(race.training.losses[0]), RACE // 10)
    losses = [part.tolist() for part in parts]
    title = f"{name} on tables of {race.rows:,} rows, {race.unique} of them in a step"
    plot.race(losses, times, title, "mean loss of a pair of words", path)
    print(f"loss over time with {' and '.join(times)} gradients: {path}")


def _show(corpus: Corpus, vectors: Array) -> None:
    """Print the nearest neighbours of some words, among the most common words of the text."""
    known = corpus.words[:COMMON]
    longer = [word for word in known if len(word) > 4]
    print(f"nearest of the {len(known)} commonest words, with the cosine of their vectors:")
    for word in [word for word in WORDS if word in known] or longer[: len(WORDS)]:
        found = zip(*nearest(vectors[:COMMON], known.index(word), SHOWN), strict=True)
        print(f"  {word:12}" + "  ".join(f"{known[row]} {cosine:.2f}" for row, cosine in found))
