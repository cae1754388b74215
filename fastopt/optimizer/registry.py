"""The registry of optimizers, which imports the module of an optimizer on first use."""

import functools
import importlib
import pkgutil
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from typing import Any

SHARED = {
    "adafactor": ("came",),
    "adagrad": ("adadelta", "groupadagrad"),
    "adam": ("adamw",),
    "denominators": ("adabelief", "adamatan2", "adamax", "adopt", "laprop", "radam", "yogi"),
    "ftrl": ("ftml",),
    "layerwise": ("lamb", "lans", "lars"),
    "lowrank": ("apollo", "galore"),
    "muon": ("adamuon", "normuon", "scion"),
    "nadam": ("nadamw",),
    "numerators": ("adan", "ademamix", "mars", "novograd", "stablespam"),
    "prodigy": ("dadaptadam", "schedulefreeprodigy"),
    "rowsteps": ("adammini", "sm3"),
    "schedulefree": ("schedulefreeadamw", "schedulefreesgd"),
    "sgd": ("asgd", "ccsgd", "dcasgd", "nag", "sgld", "test"),
    "shampoo": ("soap",),
    "signs": ("lion", "rprop", "signum"),
}
"""Names of the classes that have no module of their own, by the module that they share."""


class Registry(MutableMapping[str, Any]):
    """Registered classes by lower-case name.

    A class of the package is registered when its module is imported: the first lookup of its name
    does so, and iteration imports all modules.

    Parameters
    ----------
    package : str
        The package. The class of a name is in the module of this name.
    shared : mapping of str to sequence of str
        Modules with several classes, and the names of those that have no module of their own.

    Examples
    --------
    >>> from fastopt.optimizer.registry import Registry
    >>> registry = Registry("fastopt.optimizer", {"sgd": ["ccsgd"]})
    >>> "unknown" in registry, registry.modules >= {"adam", "sgd"}
    (False, True)
    """

    def __init__(self, package: str, shared: Mapping[str, Sequence[str]]):
        self.package = package
        self.elsewhere = {name: module for module, names in shared.items() for name in names}
        self.classes: dict[str, Any] = {}

    @functools.cached_property
    def modules(self) -> frozenset[str]:
        """Names of the modules of the package."""
        path = importlib.import_module(self.package).__path__
        return frozenset(module.name for module in pkgutil.iter_modules(path))

    def module(self, name: str) -> Any:
        """Import the module that belongs to a name; return None if there is none."""
        name = self.elsewhere.get(name, name)
        return importlib.import_module(f"{self.package}.{name}") if name in self.modules else None

    def __getitem__(self, name: str) -> Any:
        if name not in self.classes:
            self.module(name)
        return self.classes[name]

    def __setitem__(self, name: str, klass: type) -> None:
        self.classes[name] = klass

    def __delitem__(self, name: str) -> None:
        del self.classes[name]

    def __iter__(self) -> Iterator[str]:
        for module in sorted(self.modules):
            self.module(module)
        return iter(sorted(self.classes))

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __repr__(self) -> str:
        return f"<registry of {', '.join(sorted(self))}>"
