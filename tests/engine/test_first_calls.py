"""First calls: states and records that are written together equal those that are written alone."""

from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

import numpy as np
import pytest

import fastopt
from fastopt import optimizer
from fastopt._engine import templates
from fastopt._engine.validate import leaves
from helpers.cases import CASES
from helpers.tensor_lists import normal
from helpers.written_headers import in_compiled_code

pytestmark = in_compiled_code


@pytest.mark.slow
@pytest.mark.parametrize("before", [False, True], ids=["alone", "after others of its shape"])
def test_part_of_a_large_tensor_has_the_state_of_the_whole(before):
    """In 8 bits, although the part is small."""
    updater = fastopt.Updater(optimizer.Adam(state_dtype="int8", state_min_size=64))
    updater.optimizer.whole_shapes[2] = (8, 16)
    for index in ([0, 1] if before else []) + [2]:
        updater([index], [np.ones((4, 8), np.float32)], [np.ones((4, 8), np.float32)])
    assert np.uint8 in {array.dtype.type for array in leaves(updater.states[2])}


class ByIndex(optimizer.LARS):
    """Rules that differ between parameters, and a number that each one carries."""

    def rule_for(self, index):
        return super().rule_for("weight" if index % 2 else "bias")


@pytest.mark.parametrize("kind", [optimizer.LARS, ByIndex, optimizer.Nadam, optimizer.ASGD])
def test_many_parameters_may_come_at_once(kind, rng):
    """Numbers of parameters that move, as there are more of them, drop no record of the call."""
    together, alone = (fastopt.Updater(kind(learning_rate=0.1)) for _ in range(2))
    weights = [rng.normal(size=(2, 3)) for _ in range(40)]
    others = [weight.copy() for weight in weights]
    for count in (9, 5, 40, 40):
        indices = list(range(count))
        together(indices, [weight.copy() for weight in weights[:count]], weights[:count])
        for index in indices:
            alone(index, others[index].copy(), others[index])
    for one, other in zip(weights, others, strict=True):
        np.testing.assert_array_equal(one, other)


class OfWeight(optimizer.Adam):
    """States that are not zeros."""

    def create_state(self, index, weight):
        mean, var = super().create_state(index, weight)
        return mean, var + abs(weight)


def test_states_of_users_are_created_one_by_one():
    weights = [np.full((3, 4), k, np.float32) for k in range(4)]
    updater = optimizer.Updater(OfWeight(learning_rate=0.0))
    updater(list(range(4)), [np.zeros((3, 4), np.float32)] * 4, weights)
    for k in range(4):
        np.testing.assert_array_equal(updater.states[k][1], weights[k] * np.float32(0.999))


@pytest.mark.parametrize("case", CASES, ids=str)
def test_no_state_of_an_optimizer_that_starts_at_zero_is_anything_else(case):
    made = case.make()
    if made.starts_at_zero:
        weight = normal(0, case.shape, "float32")
        state = made.create_state_multi_precision(0, weight)
        assert not any(array.any() for array in leaves(state))


def test_loops_that_two_threads_look_up_at_once_are_the_same_array(monkeypatch):
    """Records have its address, so that it must stay."""
    both = Barrier(2)

    def compiled(loops):
        both.wait(10)
        return np.zeros(8, np.int64)

    monkeypatch.setattr(templates, "LOOPS", {})
    monkeypatch.setattr(templates, "_compiled", compiled)
    loops = templates.Loops(None, None, False, False)
    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(lambda _: loops.addresses, range(2))
    assert first is second is loops.addresses
