"""What the settings and the optimizers of an updater ask of its calls.

Tests: ``tests/engine/test_records.py``.
"""

from dataclasses import dataclass
from typing import Any

from fastopt._engine.clip import Settings
from fastopt._engine.contract import OptimizerLike, batches_of
from fastopt._engine.hyper import hyper_of
from fastopt._engine.parameters import Parameters


@dataclass(frozen=True, slots=True)
class Mode:
    """What is done in each call: computed once for settings and attributes that rarely change.

    Attributes
    ----------
    kernels : tuple
        Everything besides the arrays that determines the kernels of records.
    usable : bool
        Whether calls run compiled code: no user's ``update()`` is asked.
    batches : bool
        Whether an update takes several calls.
    norms : bool
        Whether gradients are measured, to undo a loss scale or to clip their global norm.
    clips : bool
        Whether gradients are clipped unit by unit.
    measures : bool
        Whether gradients are measured, clipped or accumulated before an update.
    factors : bool
        Whether gradients are multiplied by a factor, so that rules need ``rescale_grad``.
    folds : bool
        Whether all rules have it.
    live : bool
        Whether multipliers are those of the user's objects, which are asked in every call.
    scheduled, timed : bool
        Whether hyper-parameters depend on the number of the update, and on the tensors' counts.
    by_tensor : bool
        Whether an optimizer overrides counts or rates, which are then asked for each tensor.
    sums : tuple of Optimizer
        Optimizers that sum over the tensors of each step.
    defers : bool
        Whether an optimizer defers the decay of rows.
    begins : bool
        Whether a step begins with what may have to be undone.
    asks : bool
        Whether hyper-parameters differ from step to step, so that Python computes them.
    foresees : bool
        Whether they are computed before a call of one parameter, for the update that it should be.
    """

    kernels: tuple[Any, ...] = ()
    usable: bool = False
    batches: bool = False
    norms: bool = False
    clips: bool = False
    measures: bool = False
    factors: bool = False
    folds: bool = False
    live: bool = False
    scheduled: bool = False
    timed: bool = False
    by_tensor: bool = False
    sums: tuple[OptimizerLike, ...] = ()
    defers: bool = False
    begins: bool = False
    asks: bool = False
    foresees: bool = False

    @property
    def passes(self) -> tuple[bool, bool, bool]:
        """What kernels are needed for besides updates."""
        return self.norms, self.clips, self.factors


IDLE = Mode()
"""The mode before the first call."""


def kernels_of(optimizer: OptimizerLike) -> tuple[Any, ...]:
    """Return what of an optimizer determines the kernels of its parameters."""
    return (
        () if optimizer.rule_by_index else optimizer.rule,
        hyper_of(optimizer),
        optimizer.multi_precision,
        optimizer.rounding,
        optimizer.lazy_update,
        optimizer.sparse_decay,
        optimizer.seed,
        batches_of(optimizer) is not None,
        optimizer.rates_before_count and optimizer.lr_scheduler is not None,
    )


def mode_of(settings: Settings, parameters: Parameters, runs_updates: bool) -> Mode:
    """Return the mode of an updater that runs ``update()`` if it is overridden, or does not."""
    optimizers, averages = parameters.optimizers(), parameters.averages
    generation = None if parameters.groups is None else parameters.groups.generation()
    batches = batches_of(parameters.optimizer) is not None
    norms = settings.norms and not batches  # Python clips what is added to its sums
    clips = settings.clip_adaptive is not None and not batches
    sums_up = settings.accumulate > 1
    measures, factors = norms or clips or sums_up, norms or sums_up
    usable = parameters.native or not runs_updates
    scheduled = any(optimizer.lr_scheduler is not None for optimizer in optimizers)
    timed = not all(hyper_of(optimizer).constant for optimizer in optimizers)
    timed |= averages is not None and not averages.average.constant
    by_tensor = batches or any(optimizer.per_index for optimizer in optimizers)
    sums = tuple([optimizer for optimizer in optimizers if optimizer.step_sums is not None])
    defers = any(optimizer.sparse_decay != "touched" for optimizer in optimizers)
    begins = by_tensor or bool(sums) or defers
    asks = scheduled or timed or begins
    alone = parameters.groups is None and not parameters.optimizer.rates_before_count
    return Mode(
        kernels=(generation, *map(kernels_of, optimizers), norms, clips, factors),
        usable=usable,
        batches=batches,
        norms=norms,
        clips=clips,
        measures=measures,
        factors=factors,
        folds=parameters.folds,
        live=usable and any(optimizer.param_dict for optimizer in optimizers),
        scheduled=scheduled,
        timed=timed,
        by_tensor=by_tensor,
        sums=sums,
        defers=defers,
        begins=begins,
        asks=asks,
        foresees=asks and alone and not (begins or measures),
    )
