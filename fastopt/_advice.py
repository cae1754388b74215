"""What to write instead of the names that other libraries have: ``advice.toml``, read when needed.

Tests: ``tests/test_suggestions.py``.
"""

import tomllib
from collections.abc import Iterator, Mapping
from functools import cache
from importlib import resources
from typing import Any


@cache
def _tables() -> dict[str, Mapping[str, Any]]:
    return tomllib.loads(resources.files("fastopt").joinpath("advice.toml").read_text("utf-8"))


class _Table(Mapping[str, Any]):
    """A table of the file, which is read when an error needs it."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __getitem__(self, key: str) -> Any:
        return _tables()[self.name][key]

    def __iter__(self) -> Iterator[str]:
        return iter(_tables()[self.name])

    def __len__(self) -> int:
        return len(_tables()[self.name])


PACKAGE = _Table("PACKAGE")
OPTIMIZER_NAMES = _Table("OPTIMIZER_NAMES")
OPTIMIZER_ARGUMENTS = _Table("OPTIMIZER_ARGUMENTS")
OPTIMIZER_ATTRIBUTES = _Table("OPTIMIZER_ATTRIBUTES")
UPDATER_ATTRIBUTES = _Table("UPDATER_ATTRIBUTES")
UPDATER_NAMES = _Table("UPDATER_NAMES")
UPDATER_ARGUMENTS = _Table("UPDATER_ARGUMENTS")
TRAINER_ATTRIBUTES = _Table("TRAINER_ATTRIBUTES")
TRAINER_ARGUMENTS = _Table("TRAINER_ARGUMENTS")
RANKS_ATTRIBUTES = _Table("RANKS_ATTRIBUTES")
RANKS_NAMES = _Table("RANKS_NAMES")
RANKS_ARGUMENTS = _Table("RANKS_ARGUMENTS")
SCALER_ATTRIBUTES = _Table("SCALER_ATTRIBUTES")
SCHEDULE_NAMES = _Table("SCHEDULE_NAMES")
SCHEDULE_ARGUMENTS = _Table("SCHEDULE_ARGUMENTS")
SCHEDULE_ATTRIBUTES = _Table("SCHEDULE_ATTRIBUTES")
EMA_NAMES = _Table("EMA_NAMES")
SWA_NAMES = _Table("SWA_NAMES")
LOOKAHEAD_NAMES = _Table("LOOKAHEAD_NAMES")
TABLE_ATTRIBUTES = _Table("TABLE_ATTRIBUTES")
RANKS_TABLE_ATTRIBUTES = _Table("RANKS_TABLE_ATTRIBUTES")
PARAMETER_NAMES = _Table("PARAMETER_NAMES")
PARAMETER_ARGUMENTS = _Table("PARAMETER_ARGUMENTS")
INITIALIZERS = _Table("INITIALIZERS")

STEPS = "an optimizer is called by an updater: Updater(optimizer)(index, grad, weight)"
LIBRARIES = (
    "fastopt.scipy_method(optimizer) is for SciPy, "
    "fastopt.adapters.ThincOptimizer(optimizer) for thinc"
)
