"""Learning rate schedules: functions from the number of updates so far to a rate."""

from fastopt.lr_scheduler.annealing import CosineRestartsScheduler as CosineRestartsScheduler
from fastopt.lr_scheduler.annealing import CosineScheduler as CosineScheduler
from fastopt.lr_scheduler.annealing import OneCycleScheduler as OneCycleScheduler
from fastopt.lr_scheduler.annealing import PolyScheduler as PolyScheduler
from fastopt.lr_scheduler.base import LRScheduler as LRScheduler
from fastopt.lr_scheduler.base import register as register
from fastopt.lr_scheduler.base import scheduler_registry as scheduler_registry
from fastopt.lr_scheduler.factor import ExponentialScheduler as ExponentialScheduler
from fastopt.lr_scheduler.factor import FactorScheduler as FactorScheduler
from fastopt.lr_scheduler.factor import MultiFactorScheduler as MultiFactorScheduler
from fastopt.lr_scheduler.factor import PlateauScheduler as PlateauScheduler
from fastopt.lr_scheduler.joined import JoinedScheduler as JoinedScheduler
