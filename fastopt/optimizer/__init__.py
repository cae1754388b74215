"""Optimizers, their base class and registry, and the updater.

Every registered class is an attribute of this package. The module of an optimizer is imported on
first use; type checkers find it in ``algorithms.py``.
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
    from fastopt.optimizer.algorithms import *  # noqa: F403
    from fastopt.optimizer.families import AdamFamily as AdamFamily
    from fastopt.optimizer.jointsums import JointSums as JointSums
    from fastopt.optimizer.matrices import MatrixOptimizer as MatrixOptimizer
    from fastopt.optimizer.matrices import orthogonalize as orthogonalize
    from fastopt.optimizer.muon import clip_attention as clip_attention

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
    known = {*globals(), *_LAZY, *(klass.__name__ for klass in opt_registry.values())}
    raise _no_attribute(f"module {__name__!r}", name, known, {})


def __dir__() -> list[str]:
    return sorted({*globals(), *_LAZY, *(klass.__name__ for klass in opt_registry.values())})


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
