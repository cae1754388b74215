"""Learning rate schedules: functions from the number of updates so far to a learning rate."""

from typing import Any

from fastopt._advice import Advice as _Advice
from fastopt._advice import no_attribute as _no_attribute
from fastopt.lr_scheduler.annealing import CosineRestartsScheduler as CosineRestartsScheduler
from fastopt.lr_scheduler.annealing import CosineScheduler as CosineScheduler
from fastopt.lr_scheduler.annealing import InverseRootScheduler as InverseRootScheduler
from fastopt.lr_scheduler.annealing import OneCycleScheduler as OneCycleScheduler
from fastopt.lr_scheduler.annealing import PolyScheduler as PolyScheduler
from fastopt.lr_scheduler.annealing import WSDScheduler as WSDScheduler
from fastopt.lr_scheduler.base import LRScheduler as LRScheduler
from fastopt.lr_scheduler.base import register as register
from fastopt.lr_scheduler.base import scheduler_registry as scheduler_registry
from fastopt.lr_scheduler.factor import ExponentialScheduler as ExponentialScheduler
from fastopt.lr_scheduler.factor import FactorScheduler as FactorScheduler
from fastopt.lr_scheduler.factor import JoinedScheduler as JoinedScheduler
from fastopt.lr_scheduler.factor import MultiFactorScheduler as MultiFactorScheduler
from fastopt.lr_scheduler.factor import PlateauScheduler as PlateauScheduler


def __getattr__(name: str) -> Any:
    if name in scheduler_registry:
        return scheduler_registry[name]
    advice = {theirs: f"{ours} is its counterpart" for theirs, ours in _Advice("SCHEDULES").items()}
    raise _no_attribute(f"module {__name__!r}", name, scheduler_registry, advice)
