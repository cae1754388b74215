"""Weight averaging during updates: the arrays, the derived rules.

Tests: ``tests/test_averages.py``.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from fastopt._engine.contract import OptimizerLike
from fastopt._engine.hyper import Hyper
from fastopt._engine.mixed_precision import round_into
from fastopt._engine.per_index import Index
from fastopt._engine.validate import OF_ONE, Array, check_like, order_of
from fastopt._kernels.device_memory import assign, host, like, placed
from fastopt._kernels.devices import Header, header
from fastopt._kernels.layout import real_of
from fastopt._kernels.weights import joined
from fastopt.averages import Average
from fastopt.kernels.rule import Rule

Exact = tuple[Array, ...]


class Averages:
    """Averages of the weights of an updater.

    Parameters
    ----------
    average : Average or None
        How to average weights; None if the optimizer's state holds the averages.

    Attributes
    ----------
    arrays : dict
        Average of each index, in the dtype of the arithmetic.
    held : dict or None
        The original weights by index while the weight arrays hold the averages, else None.
    """

    def __init__(self, average: Average | None) -> None:
        self.average: Any = average
        self.arrays: dict[Index, Any] = {}
        self.held: dict[Index, Array] | None = None
        self._written: dict[Index, Any] | None = None
        self.restarted = set[Index]()
        """Parameters whose state was removed, which may continue with another shape."""

    @property
    def inside(self) -> bool:
        """Whether a context that restores the original weights on exit is active."""
        return self._written is not None

    def __getstate__(self) -> dict[str, Any]:
        return {"average": self.average, "arrays": host(self.arrays), "held": self.held}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state, _written=None, restarted=set())

    # Steps

    def hyper(self, of: Hyper) -> Hyper:
        """Return the hyper-parameters of the derived rule."""
        rate, constant = self.average.rate, self.average.constant

        def compute(optimizer: OptimizerLike, t: int, lr: float, wd: float) -> Mapping[str, float]:
            fields = of.compute(optimizer, t, lr, wd)
            if "average_rate" in fields:
                raise ValueError(
                    f"hyper() of {type(optimizer).__name__} returns 'average_rate', which is the "
                    "field of the updater's average: use another name"
                )
            return {**fields, "average_rate": rate(t - optimizer.begin_num_update)}

        return of._replace(compute=compute, constant=of.constant and constant)

    def derived(
        self, of: str, index: Index, rule: Rule, exact: Exact, arrays: Exact
    ) -> tuple[Rule, tuple[Array, ...]]:
        """Return the rule of a parameter that also averages, and the arrays of its state.

        `of` is its label in errors, `exact` its weight.
        """
        if rule.row is not None:
            raise TypeError(
                f"{of}: rule {rule.name} keeps one state number for each row, an average needs "
                "one for each element"
            )
        slots, average = len(rule.state), header(self.array(of, index, exact, rule))
        return self.average.derive(rule), (*arrays[:slots], average, *arrays[slots:])

    def array(self, of: str, index: Index, exact: Exact, rule: Rule | None = None) -> Any:
        """Return the average of a parameter; a new one starts with a copy of its weight."""
        average, shape = self.arrays.get(index), exact[0].shape
        again = index in self.restarted and average is not None and average.shape != shape
        if average is None or again:
            average = exact_copy(exact, rule)
        else:
            dtype = np.dtype(real_of(exact[0].dtype)).name
            check_like(of, "average", header(average), (dtype,), shape, hint=OF_ONE)
            if isinstance(average, np.ndarray) and isinstance(exact[0], Header):
                average = placed(average, exact[0])
        self.arrays[index] = average
        return average

    # Weight arrays that hold the averages

    def check_free(self) -> None:
        """Raise RuntimeError while the weight arrays hold the averages."""
        if self.held is not None:
            raise RuntimeError(
                "the weights hold their averages: leave updater.averaged(), or call "
                "updater.restore_weights() after a load of what was saved inside of it"
            )

    def swap_in(self, targets: Mapping[Index, Sequence[Any]]) -> None:
        """Write the averages to the weights and their half-precision copies, already checked."""
        held = {i: [_copied(header(array)) for array in arrays] for i, arrays in targets.items()}
        values = {index: host(self.arrays[index]) for index in targets}
        self.held = {index: arrays[0] for index, arrays in held.items()}
        self._written = {i: list(zip(targets[i], held[i], strict=True)) for i in targets}
        for index, arrays in targets.items():
            for array in arrays:
                _write(header(array), values[index])

    def swap_out(self) -> None:
        """Restore the original weights."""
        for pairs in (self._written or {}).values():
            for array, values in pairs:
                _write(header(array), values)
        self.held = self._written = None

    def restore(self, weights: Mapping[Index, Any]) -> None:
        """Write the original weights to the arrays `weights`, after a load."""
        for index, values in (self.held or {}).items():
            _write(header(weights[index]), values)
        self.held = None


def exact_copy(exact: Exact, rule: Rule | None = None) -> Any:
    """Copy a weight in the dtype of the arithmetic, on the same device."""
    weight = exact[0]
    values = host(weight)
    if len(exact) == 2 and exact[1].dtype == np.uint16:
        values = joined(values, host(exact[1]))
    real = real_of(weight.dtype)
    if isinstance(weight, Header):
        return placed(np.array(values, real, order="C"), weight)
    average = like(weight, weight.shape, real, order_of(weight, rule))
    average[...] = values
    return average


def _copied(weight: Array) -> Array:
    """Copy a weight to the host."""
    return host(weight) if isinstance(weight, Header) else np.array(weight, order="K")


def _write(weight: Array, values: Array) -> None:
    """Write values, rounded to the weight's dtype."""
    if isinstance(weight, Header):
        rounded = np.empty(weight.shape, weight.dtype)
        round_into(rounded, values)
        assign(weight, rounded)
    else:
        round_into(weight, values)
