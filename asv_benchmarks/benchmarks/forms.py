"""Every form in which a call may bring its arrays, against the same formula in NumPy, in place."""

import math
from collections.abc import Callable, Iterator
from itertools import count, cycle
from typing import Any

import numpy as np

import fastopt
from fastopt.amp import LossScaler
from fastopt.bench.clock import Call

from .common import ratio

Array = np.ndarray[Any, Any]
Pair = tuple[Call, Call]
"""The step of fastopt, and that of NumPy."""

SHAPE = (20, 50)
ROUNDS = 31


class Plain:
    """An optimizer in NumPy, in place, for arrays by index."""

    def __call__(self, index: Any, grad: Any, weight: Array) -> None:
        raise NotImplementedError

    def many(self, indices: Any, grads: Any, weights: Any) -> None:
        for each in zip(indices, grads, weights, strict=True):
            self(*each)


class Adam(Plain):
    """MXNet's Adam in NumPy, in place, for arrays by index."""

    def __init__(self) -> None:
        self.state: dict[Any, tuple[Array, Array]] = {}
        self.counts: dict[Any, int] = {}

    def __call__(self, index: Any, grad: Any, weight: Array) -> None:
        if index not in self.state:
            self.state[index] = np.zeros_like(weight), np.zeros_like(weight)
        t = self.counts[index] = self.counts.get(index, 0) + 1
        mean, var = self.state[index]
        mean *= 0.9
        mean += 0.1 * grad
        var *= 0.999
        var += 0.001 * (grad * grad)
        rate = 0.001 * math.sqrt(1 - 0.999**t) / (1 - 0.9**t)
        weight -= rate * mean / (np.sqrt(var) + 1e-8)

    def rows(self, index: Any, grad: tuple[Array, Array], weight: Array) -> None:
        """Update indexed rows, none of which is repeated."""
        if index not in self.state:
            self.state[index] = np.zeros_like(weight), np.zeros_like(weight)
        t = self.counts[index] = self.counts.get(index, 0) + 1
        (values, rows), (means, variances) = grad, self.state[index]
        mean, var = means[rows], variances[rows]
        mean *= 0.9
        mean += 0.1 * values
        var *= 0.999
        var += 0.001 * (values * values)
        means[rows], variances[rows] = mean, var
        rate = 0.001 * math.sqrt(1 - 0.999**t) / (1 - 0.9**t)
        weight[rows] -= rate * mean / (np.sqrt(var) + 1e-8)


class AdaGrad(Plain):
    """AdaGrad, for dense gradients and pairs of values and rows."""

    def __init__(self) -> None:
        self.sums: dict[Any, Array] = {}

    def __call__(self, index: Any, grad: Any, weight: Array) -> None:
        if index not in self.sums:
            self.sums[index] = np.zeros_like(weight)
        values, rows = grad if isinstance(grad, tuple) else (grad, slice(None))
        total = self.sums[index]
        total[rows] += values * values
        weight[rows] -= 0.01 * values / np.sqrt(total[rows] + 1e-7)


class SGD(Plain):
    """SGD, for dense gradients and pairs of values and rows."""

    def __call__(self, index: Any, grad: Any, weight: Array) -> None:
        values, rows = grad if isinstance(grad, tuple) else (grad, slice(None))
        weight[rows] -= 0.01 * values


def normal(shape: tuple[int, ...] = SHAPE, dtype: Any = np.float32) -> Array:
    return np.random.default_rng(0).normal(size=shape).astype(dtype)


def fresh(array: Array) -> Iterator[Array]:
    """Copies of an array, several of which are alive at a time."""
    return cycle([array.copy("K") for _ in range(8)])


def single(grads: Iterator[Any], weights: Iterator[Array], index: Any = 0) -> Pair:
    """Return single calls whose arguments come from iterators."""
    ours, plain = fastopt.Updater(fastopt.Adam()), Adam()
    return (
        lambda: ours(index, next(grads), next(weights)),
        lambda: plain(index, next(grads), next(weights)),
    )


def fixed(grad: Any, weight: Array | None = None, index: Any = 0) -> Pair:
    return single(cycle([grad]), cycle([normal() if weight is None else weight]), index)


def views() -> Iterator[Array]:
    weight = normal()
    return (weight[:] for _ in count())


def lists(indices: list[list[int]], shape: tuple[int, ...] = SHAPE) -> Pair:
    """Return calls with lists of indices in turn, with other gradients in each call."""
    ours, plain = fastopt.Updater(fastopt.Adam()), Adam()
    weights = [normal(shape) for _ in range(1 + max(map(max, indices)))]
    grads = [normal(shape) for _ in range(8)]
    calls = cycle(
        [(own, [grads[k % 8] for k in own], [weights[k] for k in own]) for own in indices]
    )
    for _ in indices:
        ours(*next(calls))
    return lambda: ours(*next(calls)), lambda: plain.many(*next(calls))


def subsets() -> Pair:
    rng = np.random.default_rng(0)
    return lists([rng.permutation(50)[:10].tolist() for _ in range(100)])


def rates() -> Pair:
    """Return a list of four with another learning rate in each step."""
    _, plain = lists([[0, 1, 2, 3]])
    optimizer = fastopt.Adam()
    updater, steps = fastopt.Updater(optimizer), count(1)
    weights, grads = [normal() for _ in range(4)], [normal() for _ in range(4)]

    def step() -> None:
        optimizer.learning_rate = 0.1 / next(steps)
        updater([0, 1, 2, 3], grads, weights)

    return step, plain


def scheduled() -> Pair:
    updater, plain = fastopt.Updater(fastopt.Adam(lr=lambda t: 0.1 / t)), fixed(normal())[1]
    grad, weight = normal(), normal()
    return lambda: updater(0, grad, weight), plain


def with_settings(
    tensors: int, shape: tuple[int, ...] = SHAPE, lr: Any = 0.001, order: Any = "C", **settings: Any
) -> Pair:
    """Return lists with settings of the updater, against NumPy without them."""
    updater, plain = fastopt.Updater(fastopt.Adam(lr=lr), **settings), Adam()
    indices, weights = list(range(tensors)), [normal(shape) for _ in range(tensors)]
    grads = [np.asarray(normal(shape), order=order) for _ in indices]
    return lambda: updater(indices, grads, weights), lambda: plain.many(indices, grads, weights)


def uneven() -> Pair:
    """Return lists under a schedule, whose tensors have different update counts."""
    updater, plain = fastopt.Updater(fastopt.Adam(lr=lambda t: 0.1 / t)), Adam()
    indices, weights, grads = list(range(20)), [normal() for _ in range(20)], [normal()] * 20
    for number in indices:
        updater(indices[:number], grads[:number], weights[:number])
    return lambda: updater(indices, grads, weights), lambda: plain.many(indices, grads, weights)


def frozen() -> Pair:
    """Return lists of which a fifth is frozen, which NumPy code leaves out."""
    step, _ = with_settings(25, groups={"[05]$": {"frozen": True}})
    _, plain = with_settings(20)
    return step, plain


def rows_of(
    size: int, shape: tuple[int, ...], tables: int = 1, dtype: Any = np.int64, **settings: Any
) -> Pair:
    """Return lists of tables whose gradients have other rows in each call."""
    rng, indices = np.random.default_rng(0), list(range(tables))
    ours, plain = fastopt.Updater(fastopt.Adam(), **settings), Adam()
    weights = [normal(shape) for _ in indices]

    def grad() -> tuple[Array, Array]:
        rows = rng.choice(shape[0], size, replace=False).astype(dtype)
        return normal((size, *shape[1:])), rows

    calls = cycle([[grad() for _ in indices] for _ in range(64)])

    def in_numpy() -> None:
        for each in zip(indices, next(calls), weights, strict=True):
            plain.rows(*each)

    if tables == 1:
        return lambda: ours(0, next(calls)[0], weights[0]), in_numpy
    return lambda: ours(indices, next(calls), weights), in_numpy


MIXED = [(64, 32), (32,), (32, 32), (32, 1), (32, 10), (10,)]


def first(shapes: list[tuple[int, ...]]) -> Pair:
    """Return the first call of a new updater."""
    indices, weights, grads = list(range(len(shapes))), *([*map(normal, shapes)] for _ in range(2))
    return (
        lambda: fastopt.Updater(fastopt.Adam())(indices, grads, weights),
        lambda: Adam().many(indices, grads, weights),
    )


def updated() -> Pair:
    """Return steps that return new arrays, in both."""
    ours, plain, names = fastopt.Updater(fastopt.Adam()), Adam(), [f"w{k}" for k in range(20)]
    grads, params = ({name: normal() for name in names} for _ in range(2))

    def in_numpy() -> None:
        new = {name: params[name].copy() for name in names}
        plain.many(names, grads.values(), new.values())

    return lambda: ours.updated(grads, params), in_numpy


def trained(tensors: int, steps: int) -> Pair:
    """Return some steps of a new model."""
    indices = list(range(tensors))
    weights, grads = [normal() for _ in indices], [normal() for _ in indices]

    def run(call: Callable[..., None]) -> None:
        for _ in range(steps):
            call(indices, grads, weights)

    return lambda: run(fastopt.Updater(fastopt.Adam())), lambda: run(Adam().many)


class OfStep(fastopt.Adam):
    """A hyper-parameter that is computed in Python in each step."""

    def hyper(self, t: int, lr: float, wd: float) -> Any:
        return {**super().hyper(t, lr, wd), "clip_gradient": 1.0 + 1.0 / t}


def of_step() -> Pair:
    updater, plain, grad, weight = fastopt.Updater(OfStep()), Adam(), normal(), normal()
    return lambda: updater(0, grad, weight), lambda: plain(0, grad, weight)


def rows(count: int) -> Pair:
    """Return AdaGrad for other elements of a vector of 20,000 in each step."""
    rng, weight = np.random.default_rng(0), normal((20_000,))
    listed = [np.sort(rng.choice(20_000, count, replace=False)) for _ in range(8)]
    grads = cycle([(normal((count,)), own) for own in listed])
    ours, plain = fastopt.Updater(fastopt.AdaGrad(lr=0.01, lazy_update=True)), AdaGrad()
    return lambda: ours(0, next(grads), weight), lambda: plain(0, next(grads), weight)


def tables() -> Pair:
    """Return SGD for a row of each of three tables."""
    rng, weights = np.random.default_rng(0), [normal((500, 16)) for _ in range(3)]
    steps = [[(normal((1, 16)), rng.integers(0, 500, 1)) for _ in weights] for _ in range(8)]
    grads, indices = cycle(steps), [0, 1, 2]
    ours, plain = fastopt.Updater(fastopt.SGD(lr=0.01)), SGD()
    return lambda: ours(indices, next(grads), weights), lambda: plain.many(
        indices, next(grads), weights
    )


FORMS: dict[str, Callable[[], Pair]] = {
    "same form, fresh gradient": lambda: single(fresh(normal()), cycle([normal()])),
    "gradient in Fortran order": lambda: fixed(np.asfortranarray(normal())),
    "strided gradient": lambda: fixed(normal((20, 100))[:, ::2]),
    "reversed gradient": lambda: fixed(normal()[::-1]),
    "broadcast gradient": lambda: fixed(np.broadcast_to(normal((50,)), SHAPE)),
    "float64 gradient": lambda: fixed(normal(dtype=np.float64)),
    "another weight object": lambda: single(cycle([normal()]), fresh(normal())),
    "a new view of the weight": lambda: single(cycle([normal()]), views()),
    "weight in Fortran order": lambda: fixed(normal(), np.asfortranarray(normal())),
    "weight is a column slice": lambda: fixed(normal(), normal((20, 90))[:, 10:60]),
    "index of NumPy": lambda: fixed(normal(), index=np.int64(3)),
    "0-d weight, NumPy scalar": lambda: fixed(np.float32(0.5), np.ones((), np.float32)),
    "list of 4": lambda: lists([list(range(4))]),
    "list of 20": lambda: lists([list(range(20))]),
    "list of 50": lambda: lists([list(range(50))]),
    "another 10 of 50 in each call": subsets,
    "20 lists in turn": lambda: lists([list(range(5 * k, 5 * k + 5)) for k in range(20)]),
    "64 lists in turn": lambda: lists([list(range(k, k + 5)) for k in range(64)]),
    "256 lists in turn": lambda: lists([list(range(k, k + 5)) for k in range(256)]),
    "rate assigned in each step (4)": rates,
    "schedule": scheduled,
    "hyper() of the step": of_step,
    "norm clip, 4": lambda: with_settings(4, clip_global_norm=1.0),
    "norm clip, 4, gradients in Fortran order": (
        lambda: with_settings(4, order="F", clip_global_norm=1.0)
    ),
    "scaler, clip and schedule, 20 of 1,000": lambda: with_settings(
        20, (1_000,), lambda t: 0.1 / t, loss_scaler=LossScaler(), clip_global_norm=1.0
    ),
    "adaptive clip, 50": lambda: with_settings(50, clip_adaptive=0.1),
    "adaptive clip and schedule, 50": lambda: with_settings(
        50, lr=lambda t: 0.1 / t, clip_adaptive=0.1
    ),
    "schedule, 20 with other counts": uneven,
    "groups, 20": lambda: with_settings(20, groups={"1$": {"wd": 0.1}, "2$": {"lr": 0.1}}),
    "average (EMA), 20": lambda: with_settings(20, average=fastopt.EMA(0.99)),
    "average (SWA of each 5th), 20": lambda: with_settings(20, average=fastopt.SWA(every=5)),
    "average (Lookahead), 20": lambda: with_settings(20, average=fastopt.Lookahead()),
    "20 beside 5 frozen ones": frozen,
    "accumulate=2, 20": lambda: with_settings(20, accumulate=2),
    "16 rows of 20,000 x 32": lambda: rows_of(16, (20_000, 32)),
    "512 rows of 20,000 x 32": lambda: rows_of(512, (20_000, 32)),
    "16 rows, indices of int32": lambda: rows_of(16, (20_000, 32), dtype=np.int32),
    "12 of 20,000 numbers": lambda: rows_of(12, (20_000,)),
    "256 of 20,000 numbers": lambda: rows_of(256, (20_000,)),
    "2,500 of 20,000 numbers": lambda: rows_of(2_500, (20_000,)),
    "3 tables, one row each": lambda: rows_of(1, (20_000, 32), tables=3),
    "3 tables, 16 rows each, norm clip": (
        lambda: rows_of(16, (20_000, 32), tables=3, clip_global_norm=1.0)
    ),
    "a row of each of 3 tables, SGD": tables,
    "updated(), 20 new arrays": updated,
    "first call of a new updater (3)": lambda: first([SHAPE] * 3),
    "first call of a new updater (6 shapes)": lambda: first(MIXED),
    "first call of a new updater (1,000)": lambda: first([SHAPE] * 1_000),
    "10 steps of a new model (3)": lambda: trained(3, 10),
}


class Forms:
    params = tuple(FORMS)
    param_names = ("form",)
    unit = "time of fastopt / time of NumPy"

    def setup(self, form):
        self.calls = FORMS[form]()

    def track_forms(self, form):
        return ratio(*self.calls, rounds=ROUNDS)
