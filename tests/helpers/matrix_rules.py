"""Short runs of optimizers of matrices, and promises that several of them make."""

from functools import partial

import numpy as np

import fastopt
from fastopt.optimizer import (
    APOLLO,
    CAME,
    SM3,
    SOAP,
    Adafactor,
    AdamMini,
    AdaMuon,
    GaLore,
    Kron,
    Muon,
    NorMuon,
    Scion,
    Shampoo,
)

F32 = np.float32
FORMS = {
    "muon": Muon,
    "normuon": NorMuon,
    "adamuon": AdaMuon,
    "soap": partial(SOAP, precondition_frequency=2),
    "shampoo": partial(Shampoo, precondition_frequency=2, cautious=True),
    "sm3": SM3,
    "sm3 without momentum": partial(SM3, momentum=0),
    "adafactor": Adafactor,
    "came": CAME,
    "adammini": AdamMini,
    "galore": partial(GaLore, rank=3, update_interval=3),
    "apollo": partial(APOLLO, rank=2, update_interval=2),
    "scion": partial(Scion, radius=1.0),
    "kron": Kron,
}
"""Optimizers of matrices in their forms."""


def drawn(rng, *shapes, steps=4, dtype=F32):
    """Weights, and lists of gradients for some steps."""
    weights = [rng.normal(size=shape).astype(dtype) for shape in shapes]
    return weights, [[rng.normal(size=s).astype(dtype) for s in shapes] for _ in range(steps)]


def single(rng, shape=(4, 6), steps=4, dtype=F32):
    """One weight, and its gradients for some steps."""
    (weight,), gradients = drawn(rng, shape, steps=steps, dtype=dtype)
    return weight, [grads[0] for grads in gradients]


def trained(made, weight, gradients, index=0):
    """The updater, and the weight after steps with `gradients`."""
    updater, weight = fastopt.Updater(made), weight.copy()
    for grad in gradients:
        updater(index, grad, weight)
    return updater, weight


def check_recorded(made, data, weights, dtype, rtol):
    """Each step is the recorded one, relative to the largest weight."""
    start, gradients = data
    updater, weight = fastopt.Updater(made), np.array(start, dtype)
    for step, (grad, expected) in enumerate(zip(gradients, weights, strict=True)):
        updater(0, np.array(grad, dtype), weight)
        largest = np.abs(expected).max()
        np.testing.assert_allclose(weight, expected, rtol, rtol * largest, err_msg=f"step {step}")
