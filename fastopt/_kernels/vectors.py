"""Vectorization of kernels that arithmetic limits.

Tests: ``tests/kernels/test_blocks.py``, ``tests/kernels/test_compiling.py``.
"""

import hashlib

from numba import njit, types
from numba.core.serialize import dumps

from fastopt._kernels.compiling import switched_on
from fastopt._kernels.intrinsics import intrinsic
from fastopt.kernels.rule import keep_pickle

LITTLE_THROTTLED = "+avx512vbmi2"
"""Feature of Intel's processors since Ice Lake, which hardly slow down for vectors of 512 bits."""


@intrinsic
def prefer_wide_vectors(typingctx):
    """Compile the loops of the kernel that calls this with vectors of up to 512 bits.

    LLVM uses 256 bits on Intel's processors by default, even if they have 512: that is better for
    loops which memory limits, next to other code.
    """

    def codegen(context, builder, signature, args):
        if LITTLE_THROTTLED in context.codegen().magic_tuple()[2]:
            attributes = builder.function.attributes
            attributes.add("noinline")  # into a caller without the preference
            set.add(attributes, '"prefer-vector-width"="512"')  # llvmlite knows only plain names
        return context.get_dummy_value()

    return types.none(), codegen


def inlined(fn):
    """Return a form of `fn` for CPU kernels, in which its loops are compiled as theirs.

    Numba optimizes every other function on its own first: its loops are vectorized before the
    compiler knows the numbers and arrays that the kernel passes.

    The kernels' entries in the cache on disk depend on an identifier of this function, which is
    random by default, and here a digest.
    """
    keep_pickle(fn)
    with switched_on():
        function = njit(inline="always", error_model="numpy")(fn)
    function._set_uuid(hashlib.sha256(dumps(fn)).hexdigest())
    return function
