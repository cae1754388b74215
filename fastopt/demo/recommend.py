"""Demo of embedding tables with 64-bit ids: recommend items from past choices of users."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from hashlib import blake2b
from pathlib import Path
from statistics import fmean
from time import perf_counter

import numpy as np

import fastopt
import fastopt.table
from fastopt._console import table
from fastopt.demo import common, plot
from fastopt.demo.common import Refused
from fastopt.optimizer import Optimizer
from fastopt.reference import Array
from fastopt.sparse import HALVES

USERS, ITEMS, TASTES, CHOSEN, HELD, SIZE, TOP = 3000, 1500, 6, 30, 3, 32, 10
SHARPNESS, POPULARITY = 2.0, 0.7
RATES = {"adagrad": 0.1, "groupadagrad": 0.1, "adam": 0.005, "sgd": 0.1, "ccsgd": 0.1}
"""Learning rates that suit this task better than the optimizers' defaults."""


@dataclass(frozen=True)
class Options:
    """Options of the demo; None selects values suited to the optimizer."""

    optimizer: str = "adagrad"
    learning_rate: float | None = None
    dtype: str = "float32"
    epochs: int = 10
    batch_size: int = 512
    seed: int = 0
    plot: Path | None = None


@dataclass(frozen=True)
class Choices:
    """Choices of users, drawn from a known model.

    User `u` and item `i` have taste vectors, and `u` chooses items without repetition with odds
    that grow with ``exp(SHARPNESS * cosine(u, i)) * popularity(i)``. ``chosen[u]`` are its items,
    of which the last HELD are held out from training. ``scores`` are the logarithms of the odds.
    """

    users: Array
    items: Array
    chosen: Array
    scores: Array

    @classmethod
    def drawn(cls, rng: np.random.Generator, users: int = USERS, items: int = ITEMS) -> "Choices":
        """Draw tastes, popularity and choices; ids are hashes."""
        tastes = [rng.standard_normal((n, TASTES)) for n in (users, items)]
        of_users, of_items = (t / np.linalg.norm(t, axis=1, keepdims=True) for t in tastes)
        popularity = -POPULARITY * np.log1p(rng.permutation(items))
        scores = 2 * SHARPNESS * of_users @ of_items.T + popularity
        # Gumbel top-k: the largest keys are a draw without repetition
        keys = scores + rng.gumbel(size=scores.shape)
        chosen = np.argsort(-keys, axis=1, kind="stable")[:, :CHOSEN]
        chosen = rng.permuted(chosen, axis=1)
        return cls(_hashes("user", users), _hashes("item", items), chosen, scores)

    @property
    def seen(self) -> Array:
        """Items of each user that are used in training."""
        return self.chosen[:, :-HELD]

    @property
    def counts(self) -> Array:
        """How often each item is chosen in training."""
        return np.bincount(self.seen.reshape(-1), minlength=len(self.items))


def _hashes(kind: str, count: int) -> Array:
    """Return 64-bit ids, hashes of names."""
    names = (f"{kind} {number}".encode() for number in range(count))
    digests = b"".join(blake2b(name, digest_size=8).digest() for name in names)
    return np.frombuffer(digests, np.uint64)


def recall(choices: Choices, scores: Array) -> float:
    """Return the share of held-out choices among the TOP unseen items with the highest scores."""
    scores = np.array(np.broadcast_to(scores, choices.scores.shape), np.float64)
    np.put_along_axis(scores, choices.seen, -np.inf, axis=1)
    best = np.argpartition(-scores, TOP, axis=1)[:, :TOP]
    held = choices.chosen[:, -HELD:]
    return float((held[:, :, np.newaxis] == best[:, np.newaxis]).any(axis=2).mean())


class Model:
    """Vectors of users and items, with a larger product for items that the user chose.

    Bayesian personalized ranking: for an item `i` that was chosen and an item `j` drawn at random,
    the loss is ``-log(sigmoid(u (v_i - v_j)))`` (Rendle et al. 2009, arXiv:1205.2618).
    """

    def __init__(self, opt: Optimizer, dtype: str, seed: int) -> None:
        self.tables = {
            name: fastopt.EmbeddingTable(
                SIZE,
                opt,
                dtype=dtype,
                init=fastopt.initializer.Normal(0.1, rng=seed + number),
                name=name,
            )
            for number, name in enumerate(("users", "items"))
        }
        self.seconds: list[float] = []

    def step(self, who: Array, chosen: Array, other: Array) -> float:
        """Update the vectors of ids; return the mean loss."""
        begin = perf_counter()
        ids = {"users": who, "items": np.stack([chosen, other])}
        found = fastopt.table.lookup(self.tables, ids)
        between = perf_counter()
        u, (v, w) = found["users"], found["items"]
        score = ((v - w) * u).sum(axis=1, keepdims=True)
        slope = -1 / (1 + np.exp(score))
        grads = {"users": slope * (v - w), "items": np.stack([slope * u, -slope * u])}
        after = perf_counter()
        fastopt.table.update(self.tables, ids, grads)
        self.seconds.append(perf_counter() - after + between - begin)
        return float(np.logaddexp(0, -score).mean())

    def scores(self, choices: Choices) -> Array:
        """Return the score of each item for each user; ids not seen yet have zero vectors."""
        ids = {"users": choices.users, "items": choices.items}
        u, v = fastopt.table.lookup(self.tables, ids, create=False).values()
        products: Array = u @ v.T
        return products


@np.errstate(all="ignore")
def run(options: Options) -> float:
    """Train the vectors, print the measurements, and return the recall.

    Raises
    ------
    Refused
        An option is invalid, or a package is missing.
    """
    if options.dtype in HALVES:
        raise Refused("--task recommend takes --dtype float32 or float64")
    name = options.optimizer.lower()
    suited = {"learning_rate": RATES[name]} if name in RATES else {}
    fixed = {"seed": options.seed, "lazy_update": True}
    opt = common.create(name, suited, {"learning_rate": options.learning_rate}, **fixed)
    common.need("tqdm")
    if options.plot:
        plot.check(options.plot)
    rng = np.random.default_rng(options.seed)
    choices = Choices.drawn(rng)
    try:
        model = Model(opt, options.dtype, options.seed)
    except (TypeError, ValueError) as error:
        raise Refused(str(error)) from None
    print(common.heading(name, opt, options))
    print(
        f"{len(choices.users)} users chose {CHOSEN} of {len(choices.items)} items each, by tastes "
        f"and popularity;\n{HELD} choices of each are held out. Ids are hashes of 64 bits",
        flush=True,
    )
    recalls: list[float] = []
    with common.progress_bar() as bar:
        epoch = partial(_epoch, choices, model, rng, options.batch_size, recalls)
        training = common.train(options.epochs, epoch, bar, "training")
    print(end=common.diverged(training))
    first, last = (fmean(training.losses[epoch]) for epoch in (0, -1))
    print(f"\nloss of a choice: {first:.3f} in the first epoch, {last:.3f} in the last\n")
    known = {
        "vectors of the tables": recalls[-1],
        "the most popular items": recall(choices, choices.counts),
        "the tastes that made the choices": recall(choices, choices.scores),
    }
    print(table([f"recall@{TOP} by", ""], [[k, f"{100 * v:.1f}%"] for k, v in known.items()]))
    _report(model, training, choices.seen.size * options.epochs)
    if options.plot:
        _draw(recalls, list(known.items())[1:], name, options.plot)
    return recalls[-1]


def _epoch(
    choices: Choices, model: Model, rng: np.random.Generator, size: int, recalls: list[float]
) -> tuple[int, Iterator[float]]:
    """Return the number of batches and an iterator that updates and yields the loss of each.

    The recall is appended to `recalls` at the end of the epoch.
    """
    users, items = np.indices(choices.seen.shape)[0].reshape(-1), choices.seen.reshape(-1)
    batches = common.chunks(rng.permutation(len(users)), size)

    def steps() -> Iterator[float]:
        for number, batch in enumerate(batches, 1):
            other = choices.items[rng.integers(len(choices.items), size=len(batch))]
            loss = model.step(choices.users[users[batch]], choices.items[items[batch]], other)
            if number == len(batches):
                recalls.append(recall(choices, model.scores(choices)))
            yield loss

    return len(batches), steps()


def _report(model: Model, training: common.Training, chosen: int) -> None:
    """Print the throughput of the tables."""
    calls = np.array(model.seconds)
    rows = 3 * chosen / calls.sum()
    print(
        f"\nlookups and updates by id: {rows:,.0f} ids a second, "
        f"{100 * calls.sum() / sum(training.seconds):.0f}% of the training's time"
    )


def _draw(
    recalls: Sequence[float], known: Sequence[tuple[str, float]], name: str, path: Path
) -> None:
    """Plot the recall after each epoch, with the references."""
    with plot.axes(path, 7, 4.2) as axes:
        epochs = range(1, len(recalls) + 1)
        axes.plot(epochs, recalls, "o-", color=plot.COLORS[0], linewidth=2.8, label=name)
        for (words, value), color in zip(known, plot.COLORS[1:], strict=False):
            axes.axhline(value, color=color, linewidth=1.4, label=words)
        axes.set(xlabel="epochs", ylabel=f"recall@{TOP}", ylim=(0, None))
        axes.grid(axis="y")
        axes.legend()
        axes.figure.suptitle("Recommendation by ids of 64 bits", size=13, weight="bold")
    print(f"recall after each epoch: {path}")
