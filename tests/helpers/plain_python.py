"""Print what three steps of every case do to six weights; run as a process."""

import numpy as np

from helpers.cases import CASES


def main():
    for case in CASES:
        for dtype in (np.float32, np.float64):
            rng = np.random.default_rng(0)
            updater = case.updater(wd=case.wd, clip_gradient=1.5)
            weight = rng.normal(size=(3, 2)).astype(dtype)
            for _ in range(3):
                updater(0, rng.normal(size=(3, 2)).astype(dtype), weight)
            print(case, *weight.ravel().tolist())
