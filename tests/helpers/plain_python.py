"""Print what three steps of every rule do to six weights; run as a process."""

import numpy as np

from fastopt import Updater
from helpers.cases import CASES
from helpers.matrix_rules import FORMS
from helpers.untraced import trace_no_compiler

trace_no_compiler()

MATRICES = ["sm3", "adafactor", "came", "adammini"]
"""Optimizers of matrices whose steps are kernels."""


def main():
    for case in [*CASES, *MATRICES]:
        for dtype in (np.float32, np.float64):
            rng = np.random.default_rng(0)
            if case in MATRICES:
                updater = Updater(FORMS[case](wd=0.1, clip_gradient=1.5))
            else:
                updater = case.updater(wd=case.wd, clip_gradient=1.5)
            weight = rng.normal(size=(3, 2)).astype(dtype)
            for _ in range(3):
                updater(0, rng.normal(size=(3, 2)).astype(dtype), weight)
            print(case, *weight.ravel().tolist())
