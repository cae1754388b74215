"""Adam with half-precision weights or state, against float32 Adam in the same rounds."""

from functools import partial

import ml_dtypes
import numpy as np

from fastopt import optimizer
from fastopt.bench.clock import Call
from fastopt.bench.steps import draw

from .common import ns_per_element, ratio
from .rows import RowStep

SIZE, LARGE = 20_000_000, 50_000_000
DTYPES = {"float32": np.float32, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16}
MASTERS = {"multi_precision": True}
FORMS = {
    "float16, masters": ("float16", MASTERS),
    "bfloat16, masters": ("bfloat16", MASTERS),
    "bfloat16, split masters": ("bfloat16", {**MASTERS, "master": "split"}),
    "float16, stochastic": ("float16", {"rounding": "stochastic"}),
    "bfloat16, stochastic": ("bfloat16", {"rounding": "stochastic"}),
    "float32, bfloat16 state": ("float32", {"state_dtype": "bfloat16"}),
    "float32, 8-bit state": ("float32", {"state_dtype": "int8", "state_min_size": 1}),
    "bfloat16, masters, bfloat16 state": ("bfloat16", {**MASTERS, "state_dtype": "bfloat16"}),
}


def adam(size: int, dtype: str = "float32", **kwargs: object) -> Call:
    """Return a warm step of Adam."""
    weight, grad = (array.astype(DTYPES[dtype], copy=False) for array in draw(size))
    updater = optimizer.get_updater(optimizer.Adam(**kwargs))
    step = partial(updater, 0, grad, weight)
    step()
    return step


def of_form(form: str, size: int = SIZE) -> Call:
    dtype, kwargs = FORMS[form]
    return adam(size, dtype, **kwargs)


class Forms:
    params = tuple(FORMS)
    param_names = ("form",)

    def setup(self, form):
        self.step, self.single = of_form(form), adam(SIZE)

    def track_time(self, form):
        return ns_per_element(self.step, SIZE)

    track_time.unit = "ns per element"

    def track_slowdown(self, form):
        return ratio(self.step, self.single)

    track_slowdown.unit = "times float32"


class CompressedState:
    """State of two bytes or one byte per value instead of four, too large for the caches."""

    params = ("float32, bfloat16 state", "float32, 8-bit state")
    param_names = ("form",)

    def setup(self, form):
        self.step = of_form(form, LARGE)

    def track_time(self, form):
        return ns_per_element(self.step, LARGE)

    track_time.unit = "ns per element"


class CompressedRows:
    """Lazy Adam on 8,192 rows of a table of 1,000,000 x 64, which are not in the caches."""

    params = ("bfloat16", "int8")
    param_names = ("state_dtype",)

    def setup(self, state_dtype):
        self.step = RowStep("permuted", True, state_dtype=state_dtype)
        self.single = RowStep("permuted", True)

    def track_slowdown(self, state_dtype):
        return ratio(self.step, self.single)

    track_slowdown.unit = "times float32"
