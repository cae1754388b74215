"""Gradients of a call that has a plan: what lies like the weights is taken as it is."""

from contextlib import suppress

import numpy as np
import pytest

from fastopt import optimizer
from fastopt.distributed import ShardedUpdater, run_threads
from fastopt.distributed.plan import Plan

OWN = type("Own", (np.ndarray,), {})


def odd_gradients():
    """Gradients for the place of the second one, which need a conversion or are refused."""
    ones = np.ones(4)
    return {
        "dtype": np.ones(4, np.int64),
        "byte order": np.ones(4, ">f8"),
        "smaller dtype": np.ones(4, np.float32),
        "length": np.ones(5),
        "dimensions": np.ones((2, 2)),
        "no dimension": np.array(1.0),
        "strides": np.ones((4, 2))[:, 0],
        "alignment": np.ones(33, np.uint8)[1:].view(np.float64),
        "subclass": ones.view(OWN),
        "scalar": np.float64(1),
        "None": None,
        "list": [1.0] * 4,
        "type": np.ndarray,
    }


def outcome(updater, grads, weights):
    try:
        updater([0, "b", 2], grads, weights)
    except (TypeError, ValueError) as error:
        return type(error)
    return [weight.tolist() for weight in weights]


@pytest.mark.parametrize("kind", odd_gradients())
@pytest.mark.parametrize("ranks", [1, 2])
def test_odd_gradients_do_what_they_do_without_ranks(ranks, kind):
    def run(comm):
        here, there = optimizer.Updater("sgd"), ShardedUpdater(optimizer.create("sgd"), comm)
        outcomes = []
        for updater, scale in ((here, 1), (there, 1 / ranks)):
            weights, grads = ([np.ones(4) for _ in range(3)] for _ in range(2))
            updater.optimizer.rescale_grad = scale
            outcome(updater, grads, weights)
            odd = [grads[0], odd_gradients()[kind], grads[2]]
            found = outcome(updater, odd, weights)
            outcomes.append((found, outcome(updater, grads, weights)))
        assert outcomes[0] == outcomes[1]

    run_threads(ranks, run)


def test_a_gradient_that_reaches_into_a_weight_is_not_taken_as_it_is(monkeypatch):
    memory, taken = np.ones(40), []
    fit = Plan.fit
    monkeypatch.setattr(Plan, "fit", lambda *args: taken.append(fit(*args)) or taken[-1])

    def run(comm):
        updater, weight = ShardedUpdater(optimizer.create("sgd", lr=0.0), comm), memory[8:12]
        updater(0, np.ones(4), weight)
        for first in range(3, 14):
            taken.clear()
            with suppress(ValueError):
                updater(0, memory[first : first + 4], weight)
            assert (taken[0] is not None) == (first in (3, 4, 12, 13))

    run_threads(1, run)
