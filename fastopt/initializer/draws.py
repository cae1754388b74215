"""Random numbers, drawn block by block from one generator."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from fastopt.initializer.arrays import Array

__all__ = [
    "Sampler",
    "Seed",
    "fill",
    "generator",
    "integers",
    "normal",
    "seed",
    "seeded",
    "standard_truncated",
    "truncated",
    "uniform",
]

Seed = (
    int
    | Sequence[int]
    | np.random.SeedSequence
    | np.random.BitGenerator
    | np.random.Generator
    | None
)
Sampler = Callable[[np.random.Generator, int, Any], Array]
"""Draws a number of values of unit scale in float32 or float64."""

BLOCK = 1 << 15
"""Values drawn at a time: few enough to stay in cache until they are written."""

TRUNCATED_STD = math.sqrt(1 - 4 * math.exp(-2) / math.sqrt(2 * math.pi) / math.erf(math.sqrt(2)))
"""Standard deviation of a standard normal distribution without what is beyond 2."""


def generator(rng: Seed) -> np.random.Generator:
    """Return `rng` if it is a generator, else a new one from that seed."""
    try:
        return np.random.default_rng(rng)
    except (TypeError, ValueError):
        raise TypeError(
            f"rng must be None, a numpy.random.Generator or a seed of integers from 0, got {rng!r}"
        ) from None


_seeded: np.random.Generator | None = None


def seed(seed: Seed = None) -> None:
    """Seed all initializers that were made without a generator or seed of their own.

    From now on they draw from one generator, in the order of the calls, so that
    ``Parameter.initialize()`` makes the same numbers in every run.

    Parameters
    ----------
    seed : int, numpy.random.Generator or other seed, optional
        What :func:`numpy.random.default_rng` takes. Default: each initializer draws from a
        generator with fresh entropy again, as before the first call.

    Raises
    ------
    TypeError
        `seed` is none of these.

    Examples
    --------
    >>> from fastopt import initializer
    >>> from fastopt.parameter import Parameter
    >>> def drawn():
    ...     initializer.seed(0)
    ...     weight = Parameter("weight", shape=3)
    ...     weight.initialize()
    ...     return weight.data()
    >>> bool((drawn() == drawn()).all())
    True
    >>> initializer.seed()
    """
    global _seeded
    _seeded = None if seed is None else generator(seed)


def seeded() -> np.random.Generator | None:
    """The generator of all initializers without one of their own, once :func:`seed` has made it."""
    return _seeded


def fill(
    arr: Array, rng: np.random.Generator, sampler: Sampler, dtype: Any, scale: float = 1
) -> None:
    """Write `scale` times what `sampler` draws to `arr`, in C order whatever its strides."""
    flat = arr.reshape(-1) if arr.flags.c_contiguous else arr.flat
    for start in range(0, arr.size, BLOCK):
        stop = min(start + BLOCK, arr.size)
        flat[start:stop] = sampler(rng, stop - start, dtype) * scale


def uniform(rng: np.random.Generator, count: int, dtype: Any) -> Array:
    """Uniform numbers from -1 to 1."""
    values: Array = rng.random(count, dtype)
    return 2 * values - 1


def normal(rng: np.random.Generator, count: int, dtype: Any) -> Array:
    """Standard normal numbers."""
    return rng.standard_normal(count, dtype)


def truncated(rng: np.random.Generator, count: int, dtype: Any, bound: float = 2) -> Array:
    """Standard normal numbers, drawn again where they are beyond `bound`."""
    values = normal(rng, count, dtype)
    while (beyond := np.flatnonzero(abs(values) > bound)).size:
        values[beyond] = normal(rng, beyond.size, dtype)
    return values


def standard_truncated(rng: np.random.Generator, count: int, dtype: Any) -> Array:
    """Truncated normal numbers, scaled to have standard deviation 1."""
    return truncated(rng, count, dtype) / TRUNCATED_STD


def integers(rng: np.random.Generator, count: int, dtype: Any) -> Array:
    """Integers from -127 to 126."""
    return rng.integers(-127, 127, count, dtype)
