"""Short runs of optimizers of matrices, and promises that several of them make."""

from functools import partial

import numpy as np

import fastopt
from fastopt import optimizer

F32 = np.float32
FORMS = {
    "muon": optimizer.Muon,
    "normuon": optimizer.NorMuon,
    "adamuon": optimizer.AdaMuon,
    "soap": partial(optimizer.SOAP, precondition_frequency=2),
    "shampoo": partial(optimizer.Shampoo, precondition_frequency=2, cautious=True),
    "sm3": optimizer.SM3,
    "sm3 without momentum": partial(optimizer.SM3, momentum=0),
    "adafactor": optimizer.Adafactor,
    "came": optimizer.CAME,
    "adammini": optimizer.AdamMini,
    "galore": partial(optimizer.GaLore, rank=3, update_interval=3),
    "apollo": partial(optimizer.APOLLO, rank=2, update_interval=2),
    "scion": partial(optimizer.Scion, radius=1.0),
    "kron": optimizer.Kron,
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
