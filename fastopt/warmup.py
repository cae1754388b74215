"""``fastopt warmup``: compiles kernels ahead of time, for container images and clusters."""

from collections.abc import Sequence
from itertools import product
from typing import Any

import numpy as np

from fastopt import optimizer
from fastopt._console import Refused, progress, unknown
from fastopt._kernels.chunks import PARALLEL_FROM
from fastopt._kernels.compiling import compiled_kernels
from fastopt._kernels.layout import bfloat16
from fastopt.optimizer.families import MomentumFamily
from fastopt.optimizer.matrices import MatrixOptimizer
from fastopt.sparse import RowSparse

DTYPES = ("float32", "float64", "float16", "bfloat16")


def names() -> list[str]:
    """Return the names of the optimizers with kernels, without deprecated ones."""
    return [
        name
        for name, klass in sorted(optimizer.opt_registry.items())
        if name != "ccsgd" and (issubclass(klass, MatrixOptimizer) or _has_rule(klass))
    ]


def _has_rule(klass: type[optimizer.Optimizer]) -> bool:
    base = optimizer.Optimizer
    return klass.native and (klass.rule, klass.base_rule) != (base.rule, base.base_rule)


def warm(name: str, dtype: str, rows: bool) -> None:
    """Compile the kernels of an optimizer for weights of `dtype`, or load them from the cache.

    Parameters
    ----------
    name : str
        Registered name of the optimizer.
    dtype : str
        One of :data:`DTYPES`; half-precision weights are updated with float32 masters.
    rows : bool
        Whether gradients are row-sparse.

    Examples
    --------
    >>> from fastopt.warmup import warm
    >>> warm("sgd", "float32", rows=False)
    """
    if rows and issubclass(optimizer.opt_registry[name], MatrixOptimizer):
        return  # these optimizers accept only dense gradients
    kind: Any = bfloat16() if dtype == "bfloat16" else np.dtype(dtype)
    for momentum, height in product(_momenta(name), (1, PARALLEL_FROM)):
        opt = optimizer.create(name, multi_precision=kind.itemsize == 2, **momentum)
        weight = np.zeros((height, 2), kind)
        gradient: Any = np.zeros((height, 2), kind)
        if rows:
            gradient = RowSparse(gradient, np.arange(height)[::-1], weight.shape)
        updater = optimizer.get_updater(opt)
        for rate in (0.1, 0.2, 0.3):  # calls after a change run an additional checking kernel
            opt.lr = rate
            updater(0, gradient, weight)


def _momenta(name: str) -> list[dict[str, float]]:
    """Return arguments for the variants of an optimizer with and without momentum."""
    with_momentum = issubclass(optimizer.opt_registry[name], MomentumFamily)
    return [{"momentum": 0.0}, {"momentum": 0.9}] if with_momentum else [{}]


def counts() -> tuple[int, int]:
    """Return the numbers of kernels that this process compiled and loaded from the cache."""
    stats = [kernel.stats for kernel in compiled_kernels]
    return (
        sum(sum(kernel.cache_misses.values()) for kernel in stats),
        sum(sum(kernel.cache_hits.values()) for kernel in stats),
    )


def run(
    optimizers: Sequence[str] = (), dtypes: Sequence[str] = ("float32",), rows: bool = False
) -> None:
    """Compile the chosen kernels with a progress bar, and print how many were compiled.

    Parameters
    ----------
    optimizers : sequence of str
        Registered names. Default: all of :func:`names`.
    dtypes : sequence of str
        Some of :data:`DTYPES`.
    rows : bool
        Whether to compile the kernels for row-sparse gradients too.

    Raises
    ------
    Refused
        There is no such optimizer or dtype.
    """
    chosen = list(dict.fromkeys(name.lower() for name in optimizers)) or names()
    for asked, known in ((chosen, names()), (dtypes, DTYPES)):
        for name in asked:
            if name not in known:
                raise Refused(unknown(name, known))
    before = counts()
    tasks = list(product(chosen, dtypes, (False, True) if rows else (False,)))
    for task in progress(tasks, "variant"):
        warm(*task)
    compiled, loaded = (after - start for after, start in zip(counts(), before, strict=True))
    print(f"{compiled} kernels compiled, {loaded} were in the cache")
