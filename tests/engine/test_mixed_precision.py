"""Half-precision weights with float32 masters: the float32 trajectory, and its rounded copy."""

import numpy as np
import pytest

from fastopt import optimizer
from helpers.cases import exhaustive
from helpers.half_precision import bits, every_case, master_of


@pytest.mark.slow("exhaustive")
@pytest.mark.parametrize("momentum", [0.0, *exhaustive(0.5)])
def test_lars_takes_the_norm_of_the_rounded_weight(momentum, half, rng):
    exact = np.full((4, 3), 1 + float(np.spacing(half.type(1))) * 0.49, np.float32)
    gradient = rng.normal(size=exact.shape).astype(np.float32)
    made = optimizer.LARS(learning_rate=1.0, eta=0.1, momentum=momentum, multi_precision=True)
    updater, weight = optimizer.get_updater(made), exact.astype(half)
    updater.set_master(0, exact)
    assert (weight == 1).all()
    updater(0, gradient, weight)
    norms = [np.linalg.norm(w.astype(float)) for w in (np.ones_like(exact), exact)]
    rounded, unrounded = (exact - 0.1 * n / np.linalg.norm(gradient) * gradient for n in norms)
    np.testing.assert_allclose(master_of(updater)[0], rounded, rtol=3e-7)
    assert abs(rounded - unrounded).max() > 5e-5


@pytest.mark.parametrize("name", ["adam", *exhaustive("sgd", "lamb", "groupadagrad", "sgld")])
def test_a_float32_gradient_is_used_as_it_is(name, half, rng):
    wide, narrow, single = (
        optimizer.get_updater(optimizer.create(name, learning_rate=0.1, multi_precision=mixed))
        for mixed in (True, True, False)
    )
    weights = [np.ones((5, 3), half), np.ones((5, 3), half), np.ones((5, 3), np.float32)]
    for _ in range(3):
        gradient = rng.normal(size=(5, 3)).astype(np.float32)
        for updater, weight in zip((wide, single), weights[::2], strict=True):
            updater(0, gradient, weight)
        narrow(0, gradient.astype(half), weights[1])
    np.testing.assert_array_equal(bits(master_of(wide)[0]), bits(weights[2]))
    assert not np.array_equal(master_of(wide)[0], master_of(narrow)[0])


@pytest.mark.slow
@every_case
def test_state_is_nested_as_in_mxnet(case, half):
    single, mixed = case.updater(), case.updater(multi_precision=True)
    single(0, np.ones(case.shape, np.float32), np.ones(case.shape, np.float32))
    mixed(0, np.ones(case.shape, half), np.ones(case.shape, half))
    state = mixed.states[0]
    assert type(state) is tuple
    inner, master = state if case.name in ("sgd", "ccsgd", "lars") else state[::-1]
    assert (master.dtype, master.shape) == (np.float32, case.shape)
    assert describe(inner) == describe(single.states[0])


def describe(state):
    if isinstance(state, np.ndarray):
        return state.dtype, state.shape
    return tuple(map(describe, state)) if isinstance(state, tuple) else state
