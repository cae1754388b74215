"""Print what row-sparse updates do in every case, in this process and with any threads."""

import numba
import numpy as np

from helpers.cases import CASES, CHOICES
from helpers.untraced import trace_no_compiler

trace_no_compiler()


def digest(case, lazy, threads):
    numba.set_num_threads(threads)
    rng = np.random.default_rng(0)
    bits = b""
    for height, width, count in ((9, 8, 20), (1500, 120, 2500)):
        updater = case.updater(wd=case.wd, lazy_update=lazy)
        weight = rng.standard_normal((height, width), dtype=np.float32)
        for _ in range(2):
            rows = np.minimum(rng.zipf(1.2, count) - 1, height - 1)  # the first row very often
            values = rng.standard_normal((count, width), dtype=np.float32)
            updater(0, (values, rows), weight)
        bits += weight.tobytes()
    return bits


def print_same(choice):
    """Whether 1, 2 and 4 threads give the same bits."""
    for case in CHOICES[choice]:
        for lazy in (True, False):
            same = len({digest(case, lazy, threads) for threads in (1, 2, 4)}) == 1
            print(f"{case}-{lazy}:{'same' if same else 'different'}")


def print_numbers():
    """Ten weights after three steps with repeated rows."""
    for case in CASES:
        for lazy in (True, False):
            rng = np.random.default_rng(0)
            updater = case.updater(wd=case.wd, clip_gradient=1.5, lazy_update=lazy)
            weight = rng.normal(size=(5, 2))
            for _ in range(3):
                updater(0, (rng.normal(size=(3, 2)), rng.integers(0, 5, 3)), weight)
            print(*weight.ravel().tolist())
