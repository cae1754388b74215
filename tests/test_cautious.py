"""Cautious forms: each is the plain step with a mask."""

import numpy as np
import pytest

from fastopt import optimizer

FORMS = {
    "adabelief": {},
    "radam": {"beta2": 0.9},
    "adamatan2": {},
    "ademamix": {"beta3": 0.9},
    "adopt": {},
    "lion": {},
    "nadamw": {},
    "adamw": {"formula": "torch"},
}
"""Classes with decoupled decay whose share is the rate times the decay."""

ONE = "adamatan2"
RATE, DECAY = 0.1, 0.5


def moves(name, gradients):
    """What the plain form adds to weights of 0, which do not decay."""
    updater = optimizer.get_updater(optimizer.create(name, lr=RATE, **FORMS[name]))
    for grad in gradients:
        move = np.zeros_like(grad)
        updater(0, grad, move)
        yield move


@pytest.mark.parametrize(
    ("name", "cautious", "cautious_decay"),
    [
        *(
            pytest.param(n, True, True, marks=[] if n == ONE else [pytest.mark.exhaustive])
            for n in FORMS
        ),
        pytest.param(ONE, True, False, marks=pytest.mark.exhaustive),
        pytest.param(ONE, False, True, marks=pytest.mark.exhaustive),
    ],
)
def test_a_cautious_form_masks_the_move_and_the_decay_of_the_plain_one(
    name, cautious, cautious_decay, rng
):
    gradients = rng.normal(size=(8, 5, 7)) * np.array([3.0, 0.1] * 4).reshape(8, 1, 1)
    weight = rng.normal(size=(5, 7))
    flags = {"cautious": cautious, "cautious_decay": cautious_decay}
    made = optimizer.create(name, lr=RATE, wd=DECAY, **flags, **FORMS[name])
    updater, got = optimizer.get_updater(made), weight.copy()
    for step, (grad, move) in enumerate(zip(gradients, moves(name, gradients), strict=True)):
        decays = move * weight <= 0 if cautious_decay else np.ones_like(weight)
        if cautious:
            downhill = move * grad < 0
            move *= downhill / max(downhill.mean(), 1e-3)
        rate = 0.0 if (name, step) == ("adopt", 0) else RATE
        weight += move - rate * DECAY * decays * weight
        updater(0, grad, got)
        np.testing.assert_allclose(got, weight, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", FORMS)
def test_cautious_decay_of_single_rows_cannot_wait(name):
    with pytest.raises(ValueError, match="cautious_decay=True decays by the gradient's sign"):
        optimizer.create(name, cautious_decay=True, sparse_decay="catch_up")
