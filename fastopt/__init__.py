"""In-place optimizer updates for NumPy training loops, at memory speed.

Every registered optimizer is also an attribute of this module, such as ``fastopt.Adam``.
"""

import importlib
import typing

from fastopt import initializer as initializer
from fastopt import lr_scheduler as lr_scheduler
from fastopt import optimizer as optimizer
from fastopt._advice import PACKAGE as _PACKAGE
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
    from fastopt.optimizer import ADOPT as ADOPT
    from fastopt.optimizer import APOLLO as APOLLO
    from fastopt.optimizer import ASGD as ASGD
    from fastopt.optimizer import CAME as CAME
    from fastopt.optimizer import DCASGD as DCASGD
    from fastopt.optimizer import FTML as FTML
    from fastopt.optimizer import LAMB as LAMB
    from fastopt.optimizer import LANS as LANS
    from fastopt.optimizer import LARS as LARS
    from fastopt.optimizer import LBSGD as LBSGD
    from fastopt.optimizer import MARS as MARS
    from fastopt.optimizer import NAG as NAG
    from fastopt.optimizer import SGD as SGD
    from fastopt.optimizer import SGLD as SGLD
    from fastopt.optimizer import SM3 as SM3
    from fastopt.optimizer import SOAP as SOAP
    from fastopt.optimizer import AdaBelief as AdaBelief
    from fastopt.optimizer import AdaDelta as AdaDelta
    from fastopt.optimizer import Adafactor as Adafactor
    from fastopt.optimizer import AdaGrad as AdaGrad
    from fastopt.optimizer import Adam as Adam
    from fastopt.optimizer import AdamAtan2 as AdamAtan2
    from fastopt.optimizer import Adamax as Adamax
    from fastopt.optimizer import AdamMini as AdamMini
    from fastopt.optimizer import AdaMuon as AdaMuon
    from fastopt.optimizer import AdamW as AdamW
    from fastopt.optimizer import Adan as Adan
    from fastopt.optimizer import AdEMAMix as AdEMAMix
    from fastopt.optimizer import DAdaptAdam as DAdaptAdam
    from fastopt.optimizer import Ftrl as Ftrl
    from fastopt.optimizer import GaLore as GaLore
    from fastopt.optimizer import GroupAdaGrad as GroupAdaGrad
    from fastopt.optimizer import Kron as Kron
    from fastopt.optimizer import LaProp as LaProp
    from fastopt.optimizer import Lion as Lion
    from fastopt.optimizer import Muon as Muon
    from fastopt.optimizer import Nadam as Nadam
    from fastopt.optimizer import NAdamW as NAdamW
    from fastopt.optimizer import NorMuon as NorMuon
    from fastopt.optimizer import NovoGrad as NovoGrad
    from fastopt.optimizer import Prodigy as Prodigy
    from fastopt.optimizer import RAdam as RAdam
    from fastopt.optimizer import RMSProp as RMSProp
    from fastopt.optimizer import Rprop as Rprop
    from fastopt.optimizer import ScheduleFreeAdamW as ScheduleFreeAdamW
    from fastopt.optimizer import ScheduleFreeProdigy as ScheduleFreeProdigy
    from fastopt.optimizer import ScheduleFreeSGD as ScheduleFreeSGD
    from fastopt.optimizer import Scion as Scion
    from fastopt.optimizer import Shampoo as Shampoo
    from fastopt.optimizer import Signum as Signum
    from fastopt.optimizer import StableSPAM as StableSPAM
    from fastopt.optimizer import Test as Test
    from fastopt.optimizer import Yogi as Yogi
    from fastopt.optimizer import ccSGD as ccSGD
    from fastopt.table import EmbeddingTable as EmbeddingTable

__version__ = "0.1.0"

_LAZY = ("EmbeddingTable",)
"""Names from :mod:`fastopt.table`, which is imported on first use."""


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
        return getattr(importlib.import_module("fastopt.table"), name)
    schedules = (f"lr_scheduler.{each}" for each in lr_scheduler.scheduler_registry)
    within = ("optimizer.create", "optimizer.register", "amp.LossScaler", "parameter.ParameterDict")
    known = {*globals(), *_optimizers(), *_LAZY, *schedules, *within}
    raise _no_attribute(f"module {__name__!r}", name, known, _PACKAGE)


def __dir__() -> list[str]:
    return sorted({*globals(), *_optimizers(), *_LAZY} - {"importlib", "typing"})
