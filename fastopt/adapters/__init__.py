"""Fastopt's optimizers as optimizers of other libraries.

Each name needs its library, which is imported when the name is used first: thinc (and spaCy),
scikit-learn, river, PennyLane. Optimizers for torch are in :mod:`fastopt.torch`.
"""

import importlib
import typing

from fastopt._advice import Advice as _Advice
from fastopt._advice import no_attribute as _no_attribute

_MODULES = {
    "MLPClassifier": "scikit_learn",
    "MLPRegressor": "scikit_learn",
    "PennyLaneOptimizer": "pennylane",
    "RiverOptimizer": "river",
    "ThincOptimizer": "thinc",
}


def __getattr__(name: str) -> typing.Any:
    if name not in _MODULES:
        raise _no_attribute(f"module {__name__!r}", name, _MODULES, _Advice("ADAPTERS"))
    module = _MODULES[name]
    try:
        adapter = getattr(importlib.import_module(f"{__name__}.{module}"), name)
    except ModuleNotFoundError as error:
        package = module.replace("_", "-")
        raise ImportError(
            f"fastopt.adapters.{name} needs {package}: pip install {package} ({error})"
        ) from error
    globals()[name] = adapter
    return adapter


def __dir__() -> list[str]:
    return sorted({*globals(), *_MODULES} - {"importlib", "typing"})
