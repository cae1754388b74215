"""Initial values of the rows of new ids."""

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fastopt._kernels import hashing
from fastopt.arguments import brief
from fastopt.initializer import Constant, Initializer, Normal, One, Uniform, Zero, create
from fastopt.table.index import Ids
from fastopt.table.records import Array

Init = str | Initializer | Callable[[Array], ArrayLike]


class Start:
    """Initial values of rows, each a function of its id alone.

    Parameters
    ----------
    init : str, Initializer or callable
        'uniform', 'normal', 'zeros', 'ones', or one of these initializers; or a function that takes
        an array of ids and returns an array with a row for each.
    seed : int, optional
        Seed of the random numbers. Default: drawn from the initializer's generator.

    Raises
    ------
    TypeError, ValueError
        `init` is not one of these.
    """

    def __init__(self, init: Init, seed: int | None = None) -> None:
        self.given: Any = init
        self.scale, self.kind = 0.0, "constant"
        self.function: Callable[[Array], Any] | None = None
        if isinstance(init, str):
            init = self.given = create(init)
        match init:
            case Uniform():
                self.kind, self.scale = "uniform", init.scale
            case Normal():
                self.kind, self.scale = "normal", init.sigma
            case Zero():
                pass
            case One():
                self.scale = 1.0
            case Constant() if np.ndim(init.value) == 0:
                self.scale = float(init.value)
            case Initializer():
                raise TypeError(
                    f"init must be uniform, normal, zeros, ones, a constant, or a function of ids, "
                    f"got {init!r}, whose values depend on the whole array"
                )
            case _ if callable(init):
                self.function = init
            case _:
                raise TypeError(
                    f"init must be the name of an initializer, an initializer, or a function of "
                    f"ids, got {brief(init)}"
                )
        if seed is None:
            drawn = self.kind != "constant"
            seed = int(self.given.rng.integers(1 << 63)) if drawn else 0
        self.seed = seed

    @property
    def text(self) -> str | None:
        """Argument for :func:`~fastopt.initializer.create`; None for a function."""
        return None if self.function is not None else self.given.dumps()

    def computed(self, ids: NDArray[Any], dim: int, dtype: np.dtype[Any]) -> Array:
        """Initial values of ids from the user's function, checked.

        Raises
        ------
        TypeError, ValueError
            The function does not return a row of `dim` real numbers for each id.
        """
        assert self.function is not None
        values, shape = np.asarray(self.function(ids)), (len(ids), dim)
        if values.shape != shape:
            raise ValueError(f"init must return an array of shape {shape}, got {values.shape}")
        if values.dtype.kind not in "fiu" and values.dtype != dtype:
            raise TypeError(f"init must return real numbers, got {values.dtype}")
        return values

    def values(self, ids: Ids, like: Array) -> Array:
        """Initial values without a function for an array of rows like `like`."""
        values = np.empty(like.shape, np.float64 if like.dtype == np.float64 else np.float32)
        if self.kind == "constant":
            values[...] = self.scale
        else:
            kernel = hashing.draw(self.kind == "normal")
            kernel(ids, np.int64(self.seed), np.float32(self.scale), values)
        return values
