"""A schedule of each class, and recorded learning rates as schedules."""

from fastopt import lr_scheduler as lr

EXAMPLES = [
    lr.FactorScheduler(3, 0.5, base_lr=0.2),
    lr.ExponentialScheduler(3, 0.5, base_lr=0.2),
    lr.MultiFactorScheduler([3, 5], 0.5, base_lr=0.2),
    lr.PlateauScheduler(0.5, base_lr=0.2),
    lr.PolyScheduler(9, base_lr=0.2),
    lr.CosineScheduler(9, base_lr=0.2),
    lr.WSDScheduler(9, 3, base_lr=0.2),
    lr.InverseRootScheduler(base_lr=0.2, timescale=3),
    lr.CosineRestartsScheduler(9, base_lr=0.2),
    lr.OneCycleScheduler(9, base_lr=0.2),
    lr.JoinedScheduler([lr.PolyScheduler(9, base_lr=0.2), lr.CosineScheduler(9)], [5]),
]


def with_schedule(arguments):
    """Arguments with the learning rates of the steps, `rates`, as a schedule."""
    rest, rates = {**arguments}, arguments.get("rates")
    rest.pop("rates", None)
    return rest if rates is None else {**rest, "lr": lambda update: rates[update - 1]}
