"""Random numbers, drawn in blocks from one generator."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.random import BitGenerator, Generator, SeedSequence

Array = np.ndarray[Any, Any]
Seed = int | Sequence[int] | SeedSequence | BitGenerator | Generator | None
Sampler = Callable[[Generator, int, Any], Array]
"""Draws a given number of values of unit scale in float32 or float64."""

BLOCK = 1 << 15
"""Number of values per block, small enough for a block to stay in cache until it is written."""

TRUNCATED_STD = math.sqrt(1 - 4 * math.exp(-2) / math.sqrt(2 * math.pi) / math.erf(math.sqrt(2)))
"""Standard deviation of the standard normal distribution truncated to [-2, 2]."""


def generator(rng: Seed) -> Generator:
    """Return `rng` if it is a generator, else a new generator with this seed."""
    try:
        return np.random.default_rng(rng)
    except (TypeError, ValueError):
        raise TypeError(
            f"rng must be None, a numpy.random.Generator or a non-negative seed, got {rng!r}"
        ) from None


_seeded: Generator | None = None


def seed(seed: Seed = None) -> None:
    """Seed all initializers that were created without a generator or seed.

    From then on they draw from one shared generator, in the order of the calls, so that
    ``Parameter.initialize()`` gives the same values in every run.

    Parameters
    ----------
    seed : int, numpy.random.Generator or other seed, optional
        Argument of :func:`numpy.random.default_rng`. Default: each initializer draws from its own
        generator with fresh entropy, as before the first call.

    Raises
    ------
    TypeError
        `seed` is not a valid seed.

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


def seeded() -> Generator | None:
    """Return the shared generator set by :func:`seed`, or None."""
    return _seeded


def fill(arr: Array, rng: Generator, sampler: Sampler, dtype: Any, scale: float = 1) -> None:
    """Fill `arr` with `scale` times values from `sampler`, in C order whatever its strides."""
    flat = arr.reshape(-1) if arr.flags.c_contiguous else arr.flat
    for start in range(0, arr.size, BLOCK):
        stop = min(start + BLOCK, arr.size)
        flat[start:stop] = sampler(rng, stop - start, dtype) * scale


def uniform(rng: Generator, count: int, dtype: Any) -> Array:
    """Draw uniform numbers from [-1, 1)."""
    values: Array = rng.random(count, dtype)
    return 2 * values - 1


def normal(rng: Generator, count: int, dtype: Any) -> Array:
    """Draw standard normal numbers."""
    return rng.standard_normal(count, dtype)


def truncated(rng: Generator, count: int, dtype: Any, bound: float = 2) -> Array:
    """Draw standard normal numbers; values with magnitude above `bound` are drawn again."""
    values = normal(rng, count, dtype)
    while (beyond := np.flatnonzero(abs(values) > bound)).size:
        values[beyond] = normal(rng, beyond.size, dtype)
    return values


def standard_truncated(rng: Generator, count: int, dtype: Any) -> Array:
    """Draw truncated normal numbers, scaled to standard deviation 1."""
    return truncated(rng, count, dtype) / TRUNCATED_STD


def integers(rng: Generator, count: int, dtype: Any) -> Array:
    """Draw integers from -127 to 126."""
    return rng.integers(-127, 127, count, dtype)
