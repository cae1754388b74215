"""Steps of small training programs, as NumPy users write them, against NumPy: ``programs.py``.

Each program trains from the start, with the arrays that its backward pass makes: transposed, new in
each step, views, numbers, subsets, rows. Only the calls of the optimizer are timed, first calls
included, as CPU time of the thread; both optimizers take turns. A ratio above 1 is slower than
NumPy; ``--check`` fails if there is one.
"""

import argparse
import math
import re
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import scipy.sparse
from benchmarks.forms import SGD, AdaGrad, Adam

import fastopt
from fastopt._kernels.threads import use_threads

Array = np.ndarray[Any, Any]
Step = tuple[list[Any], list[Any], list[Array]]
"""Indices, gradients and weights of one call; gradients may be pairs of values and rows."""

ROUNDS = 5


class Converting(AdaGrad):
    """AdaGrad whose row-sparse gradients are arrays of scipy.sparse."""

    def __call__(self, index: Any, grad: Any, weight: Array) -> None:
        coo = grad.tocoo()
        super().__call__(index, (coo.data[:, None], coo.row), weight)


MAKERS: dict[str, tuple[Callable[[], fastopt.Updater], Callable[[], Any]]] = {
    "adam": (lambda: fastopt.Updater(fastopt.Adam()), Adam),
    "adagrad": (lambda: fastopt.Updater(fastopt.AdaGrad(lr=0.01, lazy_update=True)), AdaGrad),
    "adagrad, scipy.sparse": (lambda: MAKERS["adagrad"][0](), Converting),
    "sgd": (lambda: fastopt.Updater(fastopt.SGD(lr=0.01)), SGD),
}
RNG = np.random.default_rng(0)


def normal(*shape: int) -> Array:
    return RNG.normal(size=shape).astype(np.float32)


def repeated(make: Callable[[], Step], steps: int) -> Iterator[Step]:
    return (make() for _ in range(steps))


def mlp(transposed: bool = False) -> Iterator[Step]:
    sizes = [(20, 64), (64, 32), (32, 5)]
    weights = [normal(*(size[::-1] if transposed else size)) for size in sizes]
    weights += [normal(size[1]) for size in sizes]
    inputs, errors = [normal(16, a) for a, _ in sizes], [normal(16, b) for _, b in sizes]

    def make() -> Step:
        grads = [x.T @ d for x, d in zip(inputs, errors, strict=True)]
        grads = [g.T for g in grads] if transposed else grads
        return list(range(6)), grads + [d.sum(0) for d in errors], weights

    return repeated(make, 200)


def convolution() -> Iterator[Step]:
    columns, error, weights = normal(200, 27), normal(200, 16), [normal(16, 3, 3, 3), normal(16)]

    def make() -> Step:
        return [0, 1], [(columns.T @ error).T.reshape(16, 3, 3, 3), error.sum(0)], weights

    return repeated(make, 100)


def attention() -> Iterator[Step]:
    weights, x, d = [normal(32, 32) for _ in range(4)], normal(4, 10, 32), normal(4, 10, 32)

    def make() -> Step:
        grads = [np.einsum("btd,bte->de", x, d, optimize=True) for _ in weights]
        return list("qkvo"), grads, weights

    return repeated(make, 100)


def gates() -> Iterator[Step]:
    """Gates of an LSTM: columns of one array, in new views."""
    whole, grad = normal(48, 128), normal(48, 128)

    def make() -> Step:
        parts = [slice(32 * k, 32 * k + 32) for k in range(4)]
        return [0, 1, 2, 3], [grad[:, part] for part in parts], [whole[:, part] for part in parts]

    return repeated(make, 100)


def functional() -> Iterator[Step]:
    """New arrays in each step."""
    weights = [normal(20, 64), normal(64, 5)]

    def make() -> Step:
        weights[:] = [weight.copy() for weight in weights]
        return [0, 1], [normal(20, 64), normal(64, 5)], weights

    return repeated(make, 150)


def flat_vector() -> Iterator[Step]:
    """Views of one vector that are made in each step."""
    vector, grad = normal(20 * 64 + 64 * 5), normal(20 * 64 + 64 * 5)

    def make() -> Step:
        first, second = vector[:1280].reshape(20, 64), vector[1280:].reshape(64, 5)
        return [0, 1], [grad[:1280].reshape(20, 64), grad[1280:].reshape(64, 5)], [first, second]

    return repeated(make, 150)


def layers() -> Iterator[Step]:
    """A call for each of 17 layers."""
    weights = [(normal(16, 16), normal(16)) for _ in range(17)]
    for _ in range(60):
        for layer, (weight, bias) in enumerate(weights):
            yield [f"{layer}w", f"{layer}b"], [normal(16, 16), normal(16)], [weight, bias]


def experts() -> Iterator[Step]:
    """Two of eight experts, another choice in each step."""
    weights = [normal(20, 50) for _ in range(24)]
    for _ in range(150):
        chosen = [int(k) for e in RNG.permutation(8)[:2] for k in range(3 * e, 3 * e + 3)]
        yield chosen, [normal(20, 50) for _ in chosen], [weights[k] for k in chosen]


def numbers() -> Iterator[Step]:
    """Parameters without axes, whose gradients are sums."""
    weights, x = [np.ones(()) for _ in range(3)], RNG.normal(size=50)

    def make() -> Step:
        return ["scale", "length", "noise"], [x.sum(), x @ x, (x * x).mean()], weights

    return repeated(make, 150)


def wide_gradients() -> Iterator[Step]:
    """float64 gradients of float32 weights."""
    weights, x, d = [normal(20, 64), normal(64)], normal(16, 20), RNG.normal(size=(16, 64))
    return repeated(lambda: ([0, 1], [x.T @ d, d.sum(0)], weights), 200)


def word_vectors() -> Iterator[Step]:
    tables = [normal(2_000, 32), normal(2_000, 32)]
    for _ in range(100):
        rows = [np.unique(RNG.integers(0, 2_000, 128)) for _ in tables]
        yield [0, 1], [(normal(len(own), 32), own) for own in rows], tables


def triples() -> Iterator[Step]:
    """One row of each of three tables."""
    tables = [normal(500, 16) for _ in range(3)]
    for _ in range(300):
        grads = [(normal(1, 16), RNG.integers(0, 500, 1)) for _ in tables]
        yield ["user", "good", "bad"], grads, tables


def hashed_features() -> Iterator[Step]:
    """Twelve elements of one vector."""
    weight = normal(20_000)
    for _ in range(500):
        rows = np.unique(RNG.integers(0, 20_000, 12))
        yield [0], [(normal(len(rows)), rows)], [weight]


def logistic(csr: bool) -> Iterator[Step]:
    """Gradients of a batch in the form of scipy.sparse, or as pairs."""
    weight = normal(20_000, 1)
    x = scipy.sparse.random_array((64, 20_000), density=0.002, format="csr", rng=RNG)
    transposed = x.astype(np.float32).T.tocsr()
    for _ in range(100):
        grad = transposed @ scipy.sparse.csr_array(normal(64, 1))
        coo = grad.tocoo()
        yield [0], [scipy.sparse.csr_array(grad) if csr else (coo.data[:, None], coo.row)], [weight]


def factorization_machine() -> Iterator[Step]:
    """A number, a vector and a matrix, with gradients of a batch."""
    weights = [np.zeros((), np.float32), normal(50), normal(50, 8)]
    x, e = normal(32, 50), normal(32)

    def make() -> Step:
        factors = x.T @ (e[:, None] * (x @ weights[2])) - (x * x).T @ e[:, None] * weights[2]
        return ["w0", "w", "v"], [e.sum(), x.T @ e, factors], weights

    return repeated(make, 200)


def gaussian_process() -> Iterator[Step]:
    """Three length scales and two numbers."""
    weights, x = [np.zeros(3), np.zeros(()), np.zeros(())], RNG.normal(size=(40, 3))
    names = ["length", "signal", "noise"]
    return repeated(lambda: (names, [x.sum(0), x[0] @ x[1], np.trace(x[:3])], weights), 150)


def online(rows: int | None) -> Iterator[Step]:
    """One example in each step: of 20 dense features, or of so many of 20,000 hashed ones."""
    weight = normal(20_000 if rows else 20)
    for _ in range(1_000):
        if rows:
            own = np.unique(RNG.integers(0, 20_000, rows))
            yield [0], [(normal(len(own)), own)], [weight]
        else:
            yield [0], [normal(20)], [weight]


def mapped_weights() -> Iterator[Step]:
    """A file that is mapped again in each step."""
    with TemporaryDirectory() as folder:
        file = Path(folder) / "weights"
        np.zeros((300, 8), np.float32).tofile(file)
        for _ in range(100):
            weight = np.memmap(file, np.float32, "r+", shape=(300, 8))
            yield [0], [weight - 1], [weight]


def episodes(count: int, steps: int) -> Iterator[Step | None]:
    """Short runs of a small model, each with a new or reset optimizer, which None stands for."""
    for _ in range(count):
        yield None
        weights = [normal(1, 40), normal(40), normal(40, 1)]
        for _ in range(steps):
            yield [0, 1, 2], [normal(1, 40), normal(40), normal(40, 1)], weights


PROGRAMS: dict[str, tuple[str, Callable[[], Iterator[Step | None]]]] = {
    "perceptron": ("adam", mlp),
    "perceptron, transposed weights": ("adam", lambda: mlp(True)),
    "convolution by columns": ("adam", convolution),
    "attention with einsum": ("adam", attention),
    "LSTM, gates are views": ("adam", gates),
    "functional style": ("adam", functional),
    "views of a flat vector": ("adam", flat_vector),
    "a call for each of 17 layers": ("adam", layers),
    "mixture of experts": ("adam", experts),
    "numbers as parameters": ("adam", numbers),
    "float64 gradients": ("adam", wide_gradients),
    "word vectors": ("adagrad", word_vectors),
    "triples of three tables": ("sgd", triples),
    "hashed features": ("adagrad", hashed_features),
    "logistic regression, csr_array": ("adagrad, scipy.sparse", lambda: logistic(True)),
    "logistic regression, pairs": ("adagrad", lambda: logistic(False)),
    "factorization machine": ("adam", factorization_machine),
    "Gaussian process": ("adam", gaussian_process),
    "online, 20 features, SGD": ("sgd", lambda: online(None)),
    "online, 12 of 20,000 features, SGD": ("sgd", lambda: online(12)),
    "weights in a file": ("adam", mapped_weights),
    "meta-learning, 30 episodes of 10 steps": ("adam", lambda: episodes(30, 10)),
    "the same with reset()": ("adam", lambda: episodes(30, 10)),
    "search, 20 models of 30 steps": ("adam", lambda: episodes(20, 30)),
}


RESETS = {"the same with reset()"}
"""Programs that reset fastopt's updater in place of a new one."""


def seconds(program: str, ours: bool) -> float:
    """Return the CPU seconds of all calls of an optimizer in one run of a program."""
    name, run = PROGRAMS[program]
    make, total = MAKERS[name][0 if ours else 1], 0.0
    optimizer: Any = None
    for step in run():
        start = time.thread_time()
        if step is None and optimizer is not None and ours and program in RESETS:
            optimizer.reset()
        elif optimizer is None or step is None:
            optimizer = make()
            call: Any = optimizer if ours else optimizer.many
        if step is not None:
            call(*step)
        total += time.thread_time() - start
    return total


def ratio(program: str, rounds: int = ROUNDS) -> tuple[float, float, float]:
    """Return the median seconds of fastopt and NumPy, and their median ratio."""
    seconds(program, True)  # compile
    with use_threads(1):
        times = np.array([(seconds(program, True), seconds(program, False)) for _ in range(rounds)])
    ours, plain = np.median(times, axis=0)
    return ours, plain, float(np.median(times[:, 0] / times[:, 1]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", metavar="REGEX", help="programs that match")
    parser.add_argument("--check", action="store_true", help="fail if a program is slower")
    options = parser.parse_args()
    print("| program | fastopt, ms | NumPy, ms | fastopt / NumPy |\n| --- | --- | --- | --- |")
    worst = -math.inf
    for program in PROGRAMS:
        if re.search(options.only, program):
            ours, plain, found = ratio(program)
            worst = max(worst, found)
            print(f"| {program} | {1e3 * ours:.3g} | {1e3 * plain:.3g} | {found:.2f} |", flush=True)
    if options.check and worst > 1:
        sys.exit(f"a program is slower than NumPy by a factor of {worst:.2f}")


if __name__ == "__main__":
    main()
