"""Adam with weights or state of half precision, against float32 Adam in the same rounds."""

from functools import partial

import ml_dtypes
import numpy as np

from fastopt import optimizer, plain

from .common import Call, ratio

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
    "bfloat16, masters, bfloat16 state": ("bfloat16", {**MASTERS, "state_dtype": "bfloat16"}),
}


def adam(size: int, dtype: str = "float32", casts: bool = False, **kwargs: object) -> Call:
    """A step, compiled and on touched memory; `casts` has NumPy cast around a float32 update."""
    draw = partial(np.random.default_rng(0).standard_normal, size, np.float32)
    weight, grad = (draw().astype(DTYPES[dtype], copy=False) for _ in range(2))
    updater = optimizer.get_updater(optimizer.Adam(**kwargs))
    step = partial(plain.with_masters(updater) if casts else updater, 0, grad, weight)
    step()
    return step


def slowdown(form: str, size: int = SIZE, rounds: int = 15) -> float:
    """Time over that of float32 Adam."""
    dtype, kwargs = FORMS[form]
    return ratio(adam(size, dtype, **kwargs), adam(size), rounds)


def speedup_over_casts(dtype: str, rounds: int = 5) -> float:
    """How many times faster masters are than casts with NumPy around float32 Adam."""
    return ratio(adam(SIZE, dtype, casts=True), adam(SIZE, dtype, **MASTERS), rounds)


class Forms:
    params = tuple(FORMS)
    param_names = ("form",)
    unit = "times float32"

    def track_slowdown(self, form):
        return slowdown(form)


class Casts:
    params = ("float16", "bfloat16")
    param_names = ("dtype",)
    unit = "times faster"

    def track_speedup(self, dtype):
        return speedup_over_casts(dtype)


def track_speedup_of_compressed_state():
    return 1 / slowdown("float32, bfloat16 state", LARGE)


track_speedup_of_compressed_state.unit = "times faster"
