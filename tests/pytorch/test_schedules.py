"""The table of schedules in docs/coming-from.md: which argument gives torch's learning rates."""

import pytest
import torch
from torch.optim import lr_scheduler as theirs

import fastopt.torch
from fastopt import lr_scheduler as ours

UPDATES = 20
FACTOR = {"factor": 0.5, "base_lr": 0.4}
TAIL = {"final_lr": 0.1, "base_lr": 0.4}
SCHEDULES = {
    "StepLR": ((7, 0.5), 0, ours.FactorScheduler(7, **FACTOR)),
    "MultiStepLR": (([5, 12], 0.5), 0, ours.MultiFactorScheduler([5, 12], **FACTOR)),
    "ExponentialLR": ((0.9,), 1, ours.ExponentialScheduler(1, factor=0.9, base_lr=0.4)),
    "PolynomialLR": ((15, 2.0), 1, ours.PolyScheduler(max_update=15, pwr=2, base_lr=0.4)),
    "CosineAnnealingLR": ((UPDATES, 0.1), 1, ours.CosineScheduler(max_update=UPDATES, **TAIL)),
    "CosineAnnealingWarmRestarts":
        ((4, 2, 0.1), 1, ours.CosineRestartsScheduler(period=4, period_mult=2, **TAIL)),
    "OneCycleLR": ((0.4, 21), 1, ours.OneCycleScheduler(
        max_update=20, pct_start=(0.3 * 21 - 1) / 20, final_div_factor=1e4, base_lr=0.4)),
}  # fmt: skip
"""Arguments of torch's class, by how many updates it is ahead, and the schedule that it is."""


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_schedule_has_the_learning_rates_of_torch(name):
    arguments, ahead, schedule = SCHEDULES[name]
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.4)
    their = getattr(theirs, name)(optimizer, *arguments)
    for update in range(1, UPDATES + 1):
        assert schedule(update - ahead) == pytest.approx(optimizer.param_groups[0]["lr"])
        optimizer.step()
        their.step()


@pytest.mark.parametrize("threshold", [0.0, 0.05])
def test_a_plateau_reduces_at_the_metrics_of_torch(threshold):
    options = {"patience": 2, "factor": 0.5, "threshold": threshold, "threshold_mode": "abs"}
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.4)
    schedule = theirs.ReduceLROnPlateau(optimizer, **options)
    own = ours.PlateauScheduler(patience=3, min_delta=threshold, **FACTOR)
    for loss in [1, 0.9, 0.9, 0.88, 0.91, 0.8, *[0.78] * 9, 0.5, *[0.5] * 4]:
        schedule.step(loss)
        own.step(loss)
        assert own(1) == optimizer.param_groups[0]["lr"]


def test_a_schedule_may_pass_values_that_nothing_is_updated_with():
    weight = torch.nn.Parameter(torch.ones(1))
    opt = fastopt.torch.Adam([weight], lr=0.1)
    opt.param_groups[0]["betas"] = (22.0, 0.999)
    opt.step()
    weight.grad = torch.ones(1)
    with pytest.raises(ValueError, match=r"beta1 must be .* below 1, got 22\.0"):
        opt.step()
    opt.param_groups[0]["betas"] = (0.9, 0.999)
    opt.step()
    assert weight.item() == pytest.approx(0.9)
