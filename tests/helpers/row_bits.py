"""Print whether row-sparse updates do the same in every case with any number of threads."""

import numba
import numpy as np

from helpers.cases import CHOICES
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
