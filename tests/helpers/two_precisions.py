"""What tests of weights in two precisions have in common."""

import ml_dtypes
import numpy as np
import pytest

from fastopt.precision import PseudoFP16Initializer, ReversePseudoFP16Initializer

HALVES = {"float16": np.dtype(np.float16), "bfloat16": np.dtype(ml_dtypes.bfloat16)}
PAIRED = [PseudoFP16Initializer, ReversePseudoFP16Initializer]
halves = pytest.mark.parametrize("dtype", HALVES)
paired = pytest.mark.parametrize("klass", PAIRED, ids=["pseudo", "reverse"])


def single_and_half(info):
    """The float32 array of a pair, and the other."""
    both = sorted([info.blob, *info.blob_copy.values()], key=lambda array: -array.itemsize)
    assert [array.itemsize for array in both] == [4, 2]
    return both
