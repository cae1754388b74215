"""A schedule of each class, and recorded learning rates as schedules."""

from fastopt.lr_scheduler import (
    CosineRestartsScheduler,
    CosineScheduler,
    ExponentialScheduler,
    FactorScheduler,
    InverseRootScheduler,
    JoinedScheduler,
    MultiFactorScheduler,
    OneCycleScheduler,
    PlateauScheduler,
    PolyScheduler,
    WSDScheduler,
)

EXAMPLES = [
    FactorScheduler(3, 0.5, base_lr=0.2),
    ExponentialScheduler(3, 0.5, base_lr=0.2),
    MultiFactorScheduler([3, 5], 0.5, base_lr=0.2),
    PlateauScheduler(0.5, base_lr=0.2),
    PolyScheduler(9, base_lr=0.2),
    CosineScheduler(9, base_lr=0.2),
    WSDScheduler(9, 3, base_lr=0.2),
    InverseRootScheduler(base_lr=0.2, timescale=3),
    CosineRestartsScheduler(9, base_lr=0.2),
    OneCycleScheduler(9, base_lr=0.2),
    JoinedScheduler([PolyScheduler(9, base_lr=0.2), CosineScheduler(9)], [5]),
]


def with_schedule(arguments):
    """Arguments with the learning rates of the steps, `rates`, as a schedule."""
    rates = arguments.get("rates")
    if rates is None:
        return arguments
    rest = {name: value for name, value in arguments.items() if name not in ("rates", "lr")}
    return {**rest, "lr": lambda update: rates[update - 1]}
