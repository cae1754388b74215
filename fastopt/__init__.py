"""In-place optimizer updates for NumPy training loops, at memory speed.

Every registered optimizer is also an attribute of this module, such as ``fastopt.Adam``.
"""

import importlib
import typing

from fastopt import initializer as initializer
from fastopt import lr_scheduler as lr_scheduler
from fastopt import optimizer as optimizer
from fastopt._advice import Advice as _Advice
from fastopt._advice import no_attribute as _no_attribute
from fastopt._updater.updater import Updater as Updater
from fastopt._updater.updater import get_updater as get_updater
from fastopt.averages import EMA as EMA
from fastopt.averages import SWA as SWA
from fastopt.averages import Lookahead as Lookahead
from fastopt.device import cpu as cpu
from fastopt.device import cuda as cuda
from fastopt.kernels.rule import rule as rule
from fastopt.minimization import minimize as minimize
from fastopt.minimization import scipy_method as scipy_method
from fastopt.parameter import Parameter as Parameter
from fastopt.pure import functional as functional
from fastopt.scope import name_scope as name_scope
from fastopt.sparse import RowSparse as RowSparse
from fastopt.trainer import Trainer as Trainer
from fastopt.vectors import flat as flat

if typing.TYPE_CHECKING:
    from fastopt.in_numba import jit_functions as jit_functions
    from fastopt.optimizer.algorithms import *  # noqa: F403
    from fastopt.table import EmbeddingTable as EmbeddingTable

__version__ = "0.1.0"

_LAZY = {"EmbeddingTable": "fastopt.table", "jit_functions": "fastopt.in_numba"}
"""Names from modules that are imported on first use."""


def _optimizers() -> list[str]:
    """Return the names of the registered classes."""
    return [klass.__name__ for klass in optimizer.opt_registry.values()]


def __getattr__(name: str) -> typing.Any:
    if name.lower() in optimizer.opt_registry:
        klass = getattr(optimizer, name, None)
        if getattr(klass, "__name__", None) == name:
            if klass.__module__.startswith("fastopt."):  # others may be registered again
                globals()[name] = klass
            return klass
    if name in _LAZY:
        return getattr(importlib.import_module(_LAZY[name]), name)
    schedules = (f"lr_scheduler.{key}" for key in lr_scheduler.scheduler_registry)
    within = ("optimizer.create", "optimizer.register", "amp.LossScaler", "parameter.ParameterDict")
    known = {*globals(), *_optimizers(), *_LAZY, *schedules, *within}
    raise _no_attribute(f"module {__name__!r}", name, known, _Advice("PACKAGE"))


def __dir__() -> list[str]:
    return sorted({*globals(), *_optimizers(), *_LAZY} - {"importlib", "typing"})
