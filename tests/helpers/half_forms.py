"""Print what steps with weights of half precision come to, bit by bit; run as a process."""

import warnings
import zlib

import ml_dtypes
import numba
import numpy as np

from fastopt import optimizer
from fastopt.sparse import RowSparse
from helpers.half_precision import FORMS, flat
from helpers.untraced import trace_no_compiler

trace_no_compiler()


def steps(name, form, half, rows, listed):
    """Checksum of weight and state after three steps with all rows."""
    rng = np.random.default_rng(0)
    updater = optimizer.get_updater(optimizer.create(name, learning_rate=0.1, **FORMS[form]))
    weight = rng.normal(size=(rows, 2)).astype(half)
    for _ in range(3):
        gradient = rng.normal(size=weight.shape).astype(half)
        if listed:
            gradient = RowSparse(gradient, rng.permutation(rows), weight.shape)
        updater(0, gradient, weight)
    arrays = [weight, *flat(updater.states[0])]
    return zlib.crc32(b"".join(array.tobytes() for array in arrays))


def main(names, forms, rows, threads=None):
    warnings.filterwarnings("ignore", "b?float16 weights without masters")
    if threads:
        numba.set_num_threads(threads)
    for name in names:
        for form in forms or FORMS:
            for half in (np.float16, ml_dtypes.bfloat16):
                if (form, half) == ("split masters", np.float16):
                    continue
                for listed in (False, True):
                    made = steps(name, form, half, rows, listed)
                    print(name, form, np.dtype(half), "listed" if listed else "dense", made)
