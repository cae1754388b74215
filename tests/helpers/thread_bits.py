"""Print for every case whether any number of threads gives the same bits; run as a process."""

import numba
import numpy as np

from helpers.cases import CHOICES
from helpers.untraced import trace_no_compiler

trace_no_compiler()


def digest(case, threads):
    numba.set_num_threads(threads)
    rng = np.random.default_rng(0)
    bits = b""
    for shape in ((9, 8), (1111, 120)):
        updater = case.updater(wd=case.wd)
        weight = rng.standard_normal(shape, dtype=np.float32)
        for _ in range(2):
            updater(0, rng.standard_normal(shape, dtype=np.float32), weight)
        bits += weight.tobytes()
    return bits


def main(choice):
    for case in CHOICES[choice]:
        same = len({digest(case, threads) for threads in (1, 2, 4)}) == 1
        print(f"{case}:{'same' if same else 'different'}")
