"""Whole training loops of other libraries, with their own optimizer and with fastopt, as a table.

All loops run in one process on one thread and take turns. The cells for fastopt are the median
ratio of its time to the library's own optimizer in the same round: below 1, fastopt's loop is
faster. "list" updates all parameters in one call, "single" one parameter per call. "difference" is
the largest relative difference between the two loss curves.
"""

import argparse
import os
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from inspect import signature
from itertools import chain
from pathlib import Path

for variable in ("OMP", "OPENBLAS", "MKL", "NUMBA"):  # before the libraries are imported
    os.environ[f"{variable}_NUM_THREADS"] = "1"
sys.path.insert(0, str(Path(__file__).parents[1] / "docs" / "recipes"))

import numpy as np  # noqa: E402

from fastopt._console import progress, table  # noqa: E402
from fastopt.bench.clock import interleaved  # noqa: E402

Train = Callable[[], list[float]]
"""A training run that returns its losses."""
Loops = Iterator[tuple[str, dict[str, Train]]]
"""What is trained, and the trainings by way."""
OWN, OURS = "own", "with_fastopt"


def scikit_learn() -> Loops:
    import scikit_learn as recipe
    from sklearn import neural_network
    from sklearn.datasets import load_diabetes

    from fastopt import adapters

    images, digits = recipe.load_digits(return_X_y=True)
    numbers, targets = load_diabetes(return_X_y=True)
    networks = (((64,), 32, 8), ((100,), 200, 40), ((256, 128), 128, 8))
    data = ("MLPClassifier", images / 16, digits), ("MLPRegressor", numbers, targets / 100)
    for name, x, y in data:
        for hidden, batch, epochs in networks if name == "MLPClassifier" else networks[:2]:
            for dtype in ("float32", "float64"):
                fitting = x.astype(dtype), y if y.dtype.kind == "i" else y.astype(dtype)
                ways = {
                    way: partial(fitted, getattr(library, name), hidden, batch, epochs, *fitting)
                    for way, library in ((OWN, neural_network), ("list", adapters))
                }
                yield f"scikit-learn {name} {hidden}, batch {batch}, {dtype}", ways


def fitted(model, hidden, batch, epochs, x, y) -> list[float]:
    """Return the losses of a network of scikit-learn."""
    from sklearn.exceptions import ConvergenceWarning

    network = model(
        hidden_layer_sizes=hidden,
        batch_size=batch,
        max_iter=epochs,
        n_iter_no_change=epochs,
        random_state=0,
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        return network.fit(x, y).loss_curve_


def autograd() -> Loops:
    import hips_autograd as recipe

    for name in ("adam", "sgd"):
        own, fast = recipe.loops(name)
        yield f"autograd, {name}", {OWN: own, "list": fast}


def thinc() -> Loops:
    import thinc_digits as recipe

    for clip in (1.0, 0.0):
        what = f"thinc, grad_clip {clip:g}"
        yield what, {OWN: partial(recipe.theirs, clip), "single": partial(recipe.ours, clip)}


def loop(what: str, module: str, own: str, ours: str, way: str = "list") -> Callable[[], Loops]:
    """Return a function that yields the loop of a recipe, trained with two of its functions."""

    def loops() -> Loops:
        recipe = import_module(module)
        functions = {OWN: getattr(recipe, own), way: getattr(recipe, ours)}
        made = signature(functions[OWN]).parameters  # whether they make a step for recipe.train
        yield what, {k: partial(recipe.train, f) if made else f for k, f in functions.items()}

    return loops


LIBRARIES: dict[str, Sequence[Callable[[], Loops]]] = {
    # imported name: loops
    "numpy": [
        loop("NumPy, BPR factorization, AdaGrad", "bpr_factorization", "AdaGradByHand", OURS)
    ],
    "sklearn": [
        loop("plain NumPy, softmax regression", "plain_numpy", "AdamByHand", OURS),
        scikit_learn,
    ],
    "autograd": [autograd],
    "thinc": [thinc],
    "mynn": [loop("mygrad and mynn", "mygrad_cancer", "of_mynn", "of_fastopt")],
    "pennylane": [loop("PennyLane, circuit of 3 qubits", "pennylane_circuit", "theirs", "ours")],
    "river": [loop("river, logistic regression", "river_phishing", "theirs", "ours", "single")],
    "torch": [
        loop("torch, Adam", "torch_views", "of_torch", "of_fastopt"),
        loop("torch, fused Adam", "torch_views", "of_torch_fused", "of_fastopt"),
    ],
    "optax": [
        loop("JAX, optax", "jax_gradients", "with_optax", OURS),
        loop("JAX, optax in jit with the gradient", "jax_gradients", "with_optax_in_jit", OURS),
    ],
}


def timed(train: Train) -> float:
    start = time.perf_counter()
    train()
    return time.perf_counter() - start


def difference(losses: list[float], own: list[float]) -> float:
    """Return the largest relative difference."""
    return float(np.max(np.abs(np.subtract(losses, own)) / np.abs(own)))


def line(what: str, trainings: Mapping[str, Train], rounds: int) -> list[str]:
    losses = [train() for train in trainings.values()]  # compiles
    times = interleaved([partial(timed, train) for train in trainings.values()], rounds)
    ratios = dict(zip(trainings, np.median(times / times[:, :1], axis=0), strict=True))
    cells = [f"{ratios[way]:.2f}" if way in ratios else "" for way in ("list", "single")]
    apart = max(difference(curve, losses[0]) for curve in losses[1:])
    return [what, f"{1e3 * np.median(times[:, 0]):.0f} ms", *cells, f"{apart:.0e}"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--only", default="", metavar="TEXT", help="loops whose name has this text")
    parser.add_argument("--rounds", type=int, default=11, help="default 11")
    options = parser.parse_args()
    chosen = []
    for library, loops in LIBRARIES.items():
        if find_spec(library):
            every = chain.from_iterable(function() for function in loops)
            chosen += [(what, ways) for what, ways in every if options.only in what]
        else:
            print(f"{library}: skipped, it is not installed", file=sys.stderr)
    lines = [line(what, ways, options.rounds) for what, ways in progress(chosen, "loop")]
    head = ["loop", "its own optimizer", "list", "single", "difference"]
    print(table(head, lines, markdown=True))


if __name__ == "__main__":
    main()
