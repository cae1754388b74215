"""Functions whose loops are compiled with the kernels that call them."""

import json

import pytest

UPDATES = """
import json, sys
import numpy as np
from fastopt import optimizer
from fastopt._kernels.compiling import compiled_kernels

weight = np.ones((100, 64), np.float32)
rows = np.ones((2, 64), np.float32), np.array([1, 5])
for grad in (weight.copy(), rows):
    optimizer.get_updater(optimizer.create(**json.loads(sys.argv[1])))(0, grad, weight)
for what in ("cache_misses", "cache_hits"):
    print(sum(sum(getattr(kernel.stats, what).values()) for kernel in compiled_kernels))
"""


@pytest.mark.parametrize(
    "arguments",
    [
        pytest.param({"name": "groupadagrad"}, marks=pytest.mark.slow("exhaustive")),
        pytest.param({"name": "adam", "state_dtype": "int8"}, marks=pytest.mark.slow("exhaustive")),
    ],
    ids=["rows", "blocks"],
)
def test_kernels_that_call_them_are_cached_on_disk(arguments, run_python):
    """The first process compiles those that the cache of this Python lacks."""
    first, again = (run_python(UPDATES, json.dumps(arguments)).split() for _ in range(2))
    total = sum(map(int, first))
    assert total >= 2
    assert again == ["0", str(total)]
