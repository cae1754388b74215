"""The demo of row-sparse updates: words get vectors, and lazy updates race dense ones."""

from collections.abc import Callable, Iterator, Sequence
from copy import deepcopy
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from statistics import fmean, median
from time import perf_counter
from typing import Any

import numpy as np

from fastopt import optimizer
from fastopt.demo import common, plot
from fastopt.demo.common import Refused, Runner
from fastopt.demo.skipgram import Corpus, SkipGram, nearest
from fastopt.kernels.threads import use_threads
from fastopt.plain import Array
from fastopt.sparse import HALVES, RowSparse

__all__ = ["RATES", "Options", "run"]

SIZE, WINDOW, NEGATIVES, LEAST, THRESHOLD = 64, 5, 5, 2, 3e-4
FEWEST, COMMON, SHOWN, RACE, TALL = 100, 600, 5, 200, 50_000
NAMES = {0: "word_weight", 1: "context_weight"}
WORDS = (
    "tuple", "integer", "string", "dictionary", "exception", "import", "loop", "iterator",
    "async", "class", "method", "true",
)  # fmt: skip

RATES = {"adagrad": 0.1, "groupadagrad": 0.1, "adam": 0.002, "sgd": 0.05, "ccsgd": 0.05}
"""Learning rates that suit this task better than the optimizer's own default."""

COMPARED = ("sgd", "adagrad", "adam")
"""Optimizers whose losses a plot shows, besides that which was asked for."""

EXACT = ("adagrad", "groupadagrad", "sgd", "ccsgd")
"""Optimizers that leave a row alone if its gradient is zero, as lazy updates do."""

Epoch = tuple[int, Iterator[tuple[float, list[RowSparse]]]]


@dataclass(frozen=True)
class Options:
    """What the demo is asked to do; None stands for what suits the optimizer."""

    optimizer: str = "adagrad"
    learning_rate: float | None = None
    dtype: str = "float32"
    epochs: int = 10
    batch_size: int = 128
    seed: int = 0
    text: Path | None = None
    plot: Path | None = None
    compare: Sequence[str] | None = None


@dataclass
class Dense(Runner):
    """Updates with dense gradients; the seconds that it takes to make these are kept apart."""

    making: list[float] = field(default_factory=list)

    def step(self, given: Sequence[RowSparse]) -> None:
        """Update every weight by its gradient."""
        begin = perf_counter()
        dense = [gradient.to_dense() for gradient in given]
        self.making.append(perf_counter() - begin)
        super().step(dense)


@np.errstate(all="ignore")
def run(options: Options) -> float:
    """Train the vectors, print what was measured, and return the mean loss of the last epoch.

    Raises
    ------
    Refused
        An option does not fit, or a package is missing.
    """
    if options.dtype in HALVES:
        raise Refused("--task embeddings takes --dtype float32 or float64")
    name = options.optimizer.lower()
    opt = _optimizer(name, options)
    (progress,) = common.need("tqdm")
    others = _others(options)
    rng = np.random.default_rng(options.seed)
    corpus = _corpus(options.text)
    model = SkipGram(rng, corpus, SIZE, options.dtype)
    print(common.heading(name, opt, options))
    print(
        f"text of {len(corpus.tokens)} words, {len(corpus.words)} of them different; "
        f"a vector of {SIZE} numbers for each as word and as neighbour",
        flush=True,
    )
    for height in sorted({len(corpus.words), max(len(corpus.words), TALL)}):
        other = model.padded(height)
        few = partial(_epoch, corpus, other, deepcopy(rng), options.batch_size, RACE)
        _race(opt, other, few, progress.tqdm)
    train = partial(_train, corpus, options)
    losses = {name: train(progress.tqdm, opt, model, deepcopy(rng))}
    first, last = (fmean(losses[name][epoch]) for epoch in (0, -1))
    print(f"loss of a pair: {first:.3f} in the first epoch, {last:.3f} in the last")
    _show(corpus, model.weights[0])
    passing = partial(progress.tqdm, leave=False)
    for each, opt in others.items():
        fresh = SkipGram(np.random.default_rng(options.seed), corpus, SIZE, options.dtype)
        losses[each] = train(passing, opt, fresh, deepcopy(rng), f"{each}, epoch")
    if options.plot:
        plot.curves(losses, "loss of a pair", options.plot)
        print(f"losses of {', '.join(losses)}: {options.plot}")
    return last


def _optimizer(name: str, options: Options) -> optimizer.Optimizer:
    suited = {"learning_rate": RATES[name]} if name in RATES else {}
    given = {"learning_rate": options.learning_rate}
    fixed = {"param_idx2name": NAMES, "seed": options.seed, "lazy_update": True}
    return common.create(name, suited, given, **fixed)


def _others(options: Options) -> dict[str, optimizer.Optimizer]:
    """Optimizers to compare with, by name, if there is to be a plot and it can be written."""
    names = common.compared(options, COMPARED)
    bare = replace(options, learning_rate=None)
    return {name: _optimizer(name, bare) for name in names}


def _train(
    corpus: Corpus,
    options: Options,
    progress: Callable[..., Any],
    opt: optimizer.Optimizer,
    model: SkipGram,
    rng: np.random.Generator,
    word: str = "epoch",
) -> list[list[float]]:
    """Losses of all epochs of row-sparse updates."""
    lazy = Runner.of(optimizer.get_updater(opt), model.weights)
    epoch = partial(_epoch, corpus, model, rng, options.batch_size)
    return common.train(options.epochs, common.updates(epoch, [lazy]), progress, word)


def _corpus(path: Path | None) -> Corpus:
    """Words of a file, or of the reference pages that Python's ``help`` shows."""
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
    """Number of batches, up to `most`, and the loss and gradients of each."""
    batches = common.chunks(corpus.pairs(rng, WINDOW, THRESHOLD), size)[:most]
    return len(batches), (model.backward(batch, NEGATIVES, rng) for batch in batches)


def _race(
    opt: optimizer.Optimizer,
    model: SkipGram,
    epoch: Callable[[], Epoch],
    progress: Callable[..., Any],
) -> None:
    """Train with row-sparse and with dense gradients in turn, and print how the updates compare.

    Both run on one thread: where other processes are busy, the dense update would mostly wait for
    its second thread.
    """
    _, gradients = next(epoch()[1])
    whole = [gradient.to_dense() for gradient in gradients]
    listed = sum(len(gradient.indices) for gradient in gradients)
    touched = sum(len(gradient.coalesce().indices) for gradient in gradients)
    trial = Runner.of(optimizer.get_updater(deepcopy(opt)), [w.copy() for w in model.weights])
    print(
        f"two tables of {len(whole[0])} rows; the gradients of a step have {listed} row indices, "
        f"{touched} different ones\n"
        f"  {common.first_step(trial, gradients, whole)}",
        flush=True,
    )
    dense = Dense.of(optimizer.get_updater(deepcopy(opt)), [w.copy() for w in model.weights])
    lazy = Runner.of(optimizer.get_updater(deepcopy(opt)), model.weights)
    with use_threads(1):
        common.train(1, common.updates(epoch, [lazy, dense]), progress, "comparison")
    _report(type(opt).__name__.lower(), lazy, dense)


def _report(name: str, lazy: Runner, dense: Dense) -> None:
    print(f"  row-sparse updates:      {common.summary(lazy.seconds)}")
    print(f"  making gradients dense:  {common.summary(dense.making)}")
    print(f"  dense updates:           {common.summary(dense.seconds)}")
    ours, theirs = median(lazy.seconds), median(dense.seconds)
    print(
        f"  medians on one thread: row-sparse updates are {common.faster(ours, theirs)} than dense "
        f"updates,\n  and {common.faster(ours, theirs + median(dense.making))} than making a dense "
        "gradient and updating with it"
    )
    if name in EXACT:
        print(f"  {common.agreement('dense updates', lazy, dense)}")
    else:
        print(f"  dense updates with {name} go on to move rows that a step does not list")


def _show(corpus: Corpus, vectors: Array) -> None:
    """Print the neighbours of some words, among the words that are common in the text."""
    known = corpus.words[:COMMON]
    longer = [word for word in known if len(word) > 4]
    print(f"nearest of the {len(known)} commonest words, with the cosine of their vectors:")
    for word in [word for word in WORDS if word in known] or longer[: len(WORDS)]:
        found = zip(*nearest(vectors[:COMMON], known.index(word), SHOWN), strict=True)
        print(f"  {word:12}" + "  ".join(f"{known[row]} {cosine:.2f}" for row, cosine in found))
