"""Optimizers, their base class and registry, and the updater.

Every registered class is an attribute of this package. The module of an optimizer is imported on
first use; its import below is for type checkers.
"""

import importlib
import sys
import types
import typing

from fastopt._advice import no_attribute as _no_attribute
from fastopt.optimizer.optimizer import Optimizer as Optimizer
from fastopt.optimizer.optimizer import PerIndex as PerIndex
from fastopt.optimizer.optimizer import ScheduledRateError as ScheduledRateError
from fastopt.optimizer.optimizer import constant as constant
from fastopt.optimizer.optimizer import corrected as corrected
from fastopt.optimizer.optimizer import create as create
from fastopt.optimizer.optimizer import register as register

_LAZY = {
    "AdamFamily": "fastopt.optimizer.families",
    **dict.fromkeys(("MatrixOptimizer", "orthogonalize"), "fastopt.optimizer.matrices"),
    "JointSums": "fastopt.optimizer.jointsums",
    "clip_attention": "fastopt.optimizer.muon",
    **dict.fromkeys(("Updater", "get_updater"), "fastopt._updater.updater"),
}
"""Other names, and their modules, which are imported on first use."""

if typing.TYPE_CHECKING:
    from fastopt._updater.updater import Updater as Updater
    from fastopt._updater.updater import get_updater as get_updater
    from fastopt.optimizer.adafactor import CAME as CAME
    from fastopt.optimizer.adafactor import Adafactor as Adafactor
    from fastopt.optimizer.adagrad import AdaDelta as AdaDelta
    from fastopt.optimizer.adagrad import AdaGrad as AdaGrad
    from fastopt.optimizer.adagrad import GroupAdaGrad as GroupAdaGrad
    from fastopt.optimizer.adam import Adam as Adam
    from fastopt.optimizer.adam import AdamW as AdamW
    from fastopt.optimizer.denominators import ADOPT as ADOPT
    from fastopt.optimizer.denominators import AdaBelief as AdaBelief
    from fastopt.optimizer.denominators import AdamAtan2 as AdamAtan2
    from fastopt.optimizer.denominators import Adamax as Adamax
    from fastopt.optimizer.denominators import LaProp as LaProp
    from fastopt.optimizer.denominators import RAdam as RAdam
    from fastopt.optimizer.denominators import Yogi as Yogi
    from fastopt.optimizer.families import AdamFamily as AdamFamily
    from fastopt.optimizer.ftrl import FTML as FTML
    from fastopt.optimizer.ftrl import Ftrl as Ftrl
    from fastopt.optimizer.jointsums import JointSums as JointSums
    from fastopt.optimizer.kron import Kron as Kron
    from fastopt.optimizer.layerwise import LAMB as LAMB
    from fastopt.optimizer.layerwise import LANS as LANS
    from fastopt.optimizer.layerwise import LARS as LARS
    from fastopt.optimizer.lbsgd import LBSGD as LBSGD
    from fastopt.optimizer.lowrank import APOLLO as APOLLO
    from fastopt.optimizer.lowrank import GaLore as GaLore
    from fastopt.optimizer.matrices import MatrixOptimizer as MatrixOptimizer
    from fastopt.optimizer.matrices import orthogonalize as orthogonalize
    from fastopt.optimizer.muon import AdaMuon as AdaMuon
    from fastopt.optimizer.muon import Muon as Muon
    from fastopt.optimizer.muon import NorMuon as NorMuon
    from fastopt.optimizer.muon import Scion as Scion
    from fastopt.optimizer.muon import clip_attention as clip_attention
    from fastopt.optimizer.nadam import Nadam as Nadam
    from fastopt.optimizer.nadam import NAdamW as NAdamW
    from fastopt.optimizer.numerators import MARS as MARS
    from fastopt.optimizer.numerators import Adan as Adan
    from fastopt.optimizer.numerators import AdEMAMix as AdEMAMix
    from fastopt.optimizer.numerators import NovoGrad as NovoGrad
    from fastopt.optimizer.numerators import StableSPAM as StableSPAM
    from fastopt.optimizer.prodigy import DAdaptAdam as DAdaptAdam
    from fastopt.optimizer.prodigy import Prodigy as Prodigy
    from fastopt.optimizer.prodigy import ScheduleFreeProdigy as ScheduleFreeProdigy
    from fastopt.optimizer.rmsprop import RMSProp as RMSProp
    from fastopt.optimizer.rowsteps import SM3 as SM3
    from fastopt.optimizer.rowsteps import AdamMini as AdamMini
    from fastopt.optimizer.schedulefree import ScheduleFreeAdamW as ScheduleFreeAdamW
    from fastopt.optimizer.schedulefree import ScheduleFreeSGD as ScheduleFreeSGD
    from fastopt.optimizer.sgd import ASGD as ASGD
    from fastopt.optimizer.sgd import DCASGD as DCASGD
    from fastopt.optimizer.sgd import NAG as NAG
    from fastopt.optimizer.sgd import SGD as SGD
    from fastopt.optimizer.sgd import SGLD as SGLD
    from fastopt.optimizer.sgd import Test as Test
    from fastopt.optimizer.sgd import ccSGD as ccSGD
    from fastopt.optimizer.shampoo import SOAP as SOAP
    from fastopt.optimizer.shampoo import Shampoo as Shampoo
    from fastopt.optimizer.signs import Lion as Lion
    from fastopt.optimizer.signs import Rprop as Rprop
    from fastopt.optimizer.signs import Signum as Signum

create_optimizer = Optimizer.create_optimizer
opt_registry = Optimizer.opt_registry


def __getattr__(name: str) -> typing.Any:
    if name in _LAZY:
        return getattr(importlib.import_module(_LAZY[name]), name)
    module = opt_registry.module(name.lower())
    for klass in (getattr(module, name, None), opt_registry.get(name.lower())):
        if isinstance(klass, type) and klass.__name__ == name and issubclass(klass, Optimizer):
            if klass.__module__.startswith(f"{__name__}."):  # others may be registered again
                globals()[name] = klass
            return klass
    if module is not None and name.islower():
        return module
    known = {*globals(), *_LAZY, *(each.__name__ for each in opt_registry.values())}
    raise _no_attribute(f"module {__name__!r}", name, known, {})


def __dir__() -> list[str]:
    return sorted({*globals(), *_LAZY, *(each.__name__ for each in opt_registry.values())})


class _Package(types.ModuleType):
    """The package, whose call raises an error that names the constructors."""

    def __call__(self, *args: object, **kwargs: object) -> typing.NoReturn:
        raise TypeError(
            f"{__name__} is a module: fastopt.Adam(...) or {__name__}.create('adam', ...) returns "
            "an optimizer, and fastopt.Updater(optimizer) updates weights"
        )

    def __reduce__(self) -> tuple[typing.Any, tuple[str]]:
        """Pickle by name, as joblib and Ray pickle the modules that a user's function names."""
        return importlib.import_module, (self.__name__,)


sys.modules[__name__].__class__ = _Package
