"""What an updater does with the gradients of a call before it updates.

Tests: ``tests/engine/test_clip.py``, ``tests/engine/test_clip_adaptive.py``.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from fastopt._engine.backend import Backend
from fastopt._engine.clip import STEPPED, measured, scale_of, squares
from fastopt._engine.clip_adaptive import UnitClip
from fastopt._engine.contract import OptimizerLike
from fastopt._engine.per_index import Index
from fastopt.amp import LossScaler, StepInfo
from fastopt.arguments import as_float


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
        self,
        optimizer: OptimizerLike,
        backend: Backend,
        indices: Sequence[Index],
        grads: Sequence[Any],
        share: float = 1.0,
        down: float = 1.0,
    ) -> tuple[StepInfo, float]:
        """Return the outcome and the gradient factor that follow from the sums of squares.

        `share` is a further factor of the gradients; see :func:`fastopt._engine.clip.measured`.
        """
        if not self.norms:
            return STEPPED, 1.0
        backend.receive()
        sums = lambda down: backend.added(squares(grads, down))  # noqa: E731
        rescale, limit = as_float("rescale_grad", optimizer.rescale_grad), self.clip_global_norm
        names = optimizer.idx2name
        return measured(sums, indices, names, rescale * share, self.loss_scaler, limit, down)

    def clipped(
        self,
        optimizer: OptimizerLike,
        backend: Backend,
        indices: Sequence[Index],
        weights: Sequence[Any],
        grads: Sequence[Any],
        share: float,
    ) -> Sequence[Any]:
        """Return gradients with clipped units; the update multiplies them by `share`."""
        if self.clip_adaptive is None:
            return grads
        backend.receive()
        factor = as_float("rescale_grad", optimizer.rescale_grad) * share * self.scale
        return self.clip_adaptive.all(indices, weights, grads, factor, optimizer.idx2name)
