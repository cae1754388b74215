"""What an updater does with the gradients of a call before it updates.

That is: settings, global gradient norm, clipping factor and overflow detection.

Tests: ``tests/engine/test_clip.py``, ``tests/engine/test_clip_adaptive.py``.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import reduce
from itertools import compress
from math import inf, isfinite
from operator import add
from typing import Any

import numpy as np

from fastopt._engine.clip_adaptive import UnitClip
from fastopt._engine.validate import Array, Grad, check_index
from fastopt._kernels.cpu_calls import FACTOR, LENGTH, SCALE, limit_norm
from fastopt._kernels.device_memory import host, placed
from fastopt._kernels.devices import header
from fastopt._kernels.lanes import DOWN
from fastopt._kernels.layout import real_of
from fastopt.amp import LossScaler, StepInfo
from fastopt.arguments import Descriptions, OrNone, Real
from fastopt.sparse import RowSparse

LIMITS: Descriptions = {
    "clip_global_norm": OrNone(Real(least=0, infinite=True)),
    "clip_adaptive": OrNone(Real(least=0)),
    "clip_adaptive_eps": Real(least=0),
}
"""Limits of an updater, as programs and checkpoints set them."""

STEPPED = StepInfo(stepped=True, skipped=False)
"""Outcome of a call that measures nothing."""

UNCHANGED = StepInfo(stepped=False, skipped=False)
"""Outcome before the first call, and of a call that updated nothing."""


@dataclass(frozen=True, slots=True)
class Settings:
    """Settings of an updater: a new object for each change of one.

    Attributes
    ----------
    loss_scaler : LossScaler or None
        Its scale divides gradients.
    clip_global_norm : float or None
        Maximum norm of all gradients of a call.
    clip_adaptive : UnitClip or None
        Maximum norm of each unit of a gradient.
    accumulate : int
        Number of calls per update of an index.
    """

    loss_scaler: LossScaler | None = None
    clip_global_norm: float | None = None
    clip_adaptive: UnitClip | None = None
    accumulate: int = 1

    @property
    def norms(self) -> bool:
        """Whether the norm of all gradients is computed."""
        return self.loss_scaler is not None or self.clip_global_norm is not None

    @property
    def measures(self) -> bool:
        """Whether gradients are measured, clipped or accumulated before an update."""
        return self.norms or self.clip_adaptive is not None or self.accumulate > 1

    @property
    def scale(self) -> float:
        """Factor that undoes the loss scale."""
        return scale_of(self.loss_scaler)


def measured(
    sums: Callable[[float], Array],
    indices: Sequence[Any],
    names: dict[Any, str],
    rescale_grad: float,
    scaler: LossScaler | None,
    limit: float | None,
    down: float = 1.0,
) -> tuple[StepInfo, float]:
    """Return whether to step or skip, and the factor to multiply gradients by.

    Parameters
    ----------
    sums : callable
        Function of a factor that returns the sum of squares of each gradient times the factor.
    indices : sequence of int, str or bytes
        Index of each gradient.
    names : dict
        Names of parameters by index.
    rescale_grad : float
        Factor of all gradients.
    scaler : LossScaler, optional
        Gradients are divided by its scale.
    limit : float, optional
        Maximum global norm.
    down : float
        The first factor. If the sum of 1.0 is infinite, that of DOWN decides.
    """
    squares = sums(down)
    total = reduce(add, squares.tolist(), 0.0)  # in the same order as the kernels
    if down == 1 and not isfinite(total):
        squares, down = sums(DOWN), DOWN
        total = reduce(add, squares.tolist(), 0.0)
    values = [rescale_grad, scale_of(scaler), inf if limit is None else limit * down, 0.0, 0.0]
    limit_norm(total, values)
    norm = values[LENGTH] / down
    if not isfinite(values[LENGTH]):
        return overflow(squares, indices, names, norm), values[SCALE]
    return StepInfo(stepped=True, skipped=False, global_norm=norm), values[FACTOR]


def scale_of(scaler: LossScaler | None) -> float:
    """Return the factor that undoes the loss scale."""
    return 1.0 if scaler is None else 1 / scaler.scale


def overflow(sums: Array, indices: Sequence[Any], names: dict[Any, str], norm: float) -> StepInfo:
    """Return the result of a call that was skipped because of non-finite gradients."""
    infinite = map(check_index, compress(indices, ~np.isfinite(sums)))
    non_finite = tuple(names.get(index, str(index)) for index in infinite)
    return StepInfo(stepped=False, skipped=True, global_norm=norm, non_finite=non_finite)


def squares(grads: Sequence[Any], down: float = 1.0) -> Array:
    """Return the sum of squares of each gradient times `down`."""
    grads = [_summed(_in_memory(grad)) for grad in grads]
    if down != 1:
        grads = [np.multiply(grad, down, dtype=np.float64) for grad in grads]
    with np.errstate(over="ignore"):
        return np.array([np.square(grad, dtype=np.float64, order="C").sum() for grad in grads])


def _in_memory(grad: Grad) -> Any:
    """Return the gradient on the host."""
    if isinstance(grad, RowSparse):
        return RowSparse(host(grad.values), host(grad.indices), grad.shape)
    return host(grad)


def _summed(grad: Grad) -> Any:
    """Return the values of a gradient, with repeated rows summed."""
    if not isinstance(grad, RowSparse):
        return grad
    return grad.astype(real_of(grad.dtype)).coalesce().values


def times(grad: Grad, factor: float) -> Any:
    """Return gradient times `factor`; half precision becomes float32 to avoid underflow."""
    if factor == 1:
        return grad
    if isinstance(grad, RowSparse):
        return RowSparse(times(grad.values, factor), grad.indices, grad.shape)
    values = host(grad)
    real = real_of(values.dtype)
    return placed(np.asarray(values.astype(real) * real(factor)), header(grad))
