"""Optimizers of matrices on the device: matrices are refused, a fallback updates the others."""

import numpy as np
import pytest

from fastopt import optimizer
from helpers.device_arrays import check_close, host, on_device

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("name", ["Muon", "SOAP"])
def test_matrices_are_refused_and_nothing_changes(name):
    updater = optimizer.Updater(getattr(optimizer, name)(fallback="sgd"))
    weights = [on_device(np.ones(shape, np.float32)) for shape in ((3,), (2, 3))]
    grads = [on_device(np.ones(shape, np.float32)) for shape in ((3,), (2, 3))]
    for index, grad, weight in (("b", grads[1], weights[1]), (["a", "b"], grads, weights)):
        with pytest.raises(TypeError, match=f"index 'b': {name} computes with NumPy"):
            updater(index, grad, weight)
    assert not updater.states
    for weight in weights:
        np.testing.assert_array_equal(host(weight), 1)


def test_the_fallback_works_on_the_device(rng):
    here, there = (
        optimizer.Updater(optimizer.Muon(learning_rate=0.1, fallback="adam")) for _ in range(2)
    )
    weight = rng.normal(size=5).astype(np.float32)
    device = on_device(weight)
    for _ in range(3):
        grad = rng.normal(size=5).astype(np.float32)
        here(0, grad, weight)
        there(0, on_device(grad), device)
        check_close(device, weight)
