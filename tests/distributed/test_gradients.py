"""Gradients of a call that has a plan: what lies like the weights is taken as it is."""

from contextlib import suppress

import numpy as np

from fastopt import optimizer
from fastopt.distributed import ShardedUpdater, run_threads
from fastopt.distributed.plan import Plan
from helpers.written_headers import in_compiled_code


@in_compiled_code
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
