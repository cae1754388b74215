"""What the adapters share."""

from typing import Any

from fastopt._updater.updater import Updater
from fastopt.optimizer import Optimizer, create
from fastopt.optimizer.optimizer import new_copy


def new_updater(optimizer: str | Optimizer, arguments: dict[str, Any], **settings: Any) -> Updater:
    """Return the updater of a new optimizer, or of a copy of one."""
    return Updater(new_copy(create(optimizer, **arguments)), **settings)
