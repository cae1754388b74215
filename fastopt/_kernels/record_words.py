"""Words that compiled code reads: those of objects' headers, records, calls and contexts.

Each is a number of 64 bits; an address is that of an array that the owner of the records keeps
alive. See :mod:`fastopt._kernels.front`.

Tests: ``tests/engine/test_records.py``.
"""

from fastopt._kernels import numpy_abi

AXES = 64
"""Maximum number of dimensions, which is that of NumPy."""

MOST = 1 << 44
"""Maximum number of elements, of indices, and of bytes of scratch memory in a compiled call.

An array whose strides are 0 may have up to 2**63 elements, and sums and products of such sizes
overflow.
"""

# Words of the headers of arrays, dtypes, lists and numbers.
TYPE, DATA, NDIM, SHAPE = (
    offset // 8 for offset in (numpy_abi.TYPE, numpy_abi.DATA, numpy_abi.NDIM, numpy_abi.SHAPE)
)
STRIDES, DTYPE, FLAGS = SHAPE + 1, numpy_abi.DTYPE // 8, numpy_abi.FLAGS // 8
KIND = numpy_abi.KIND // 8
LENGTH, ITEMS, LOW_HALF = numpy_abi.LENGTH // 8, numpy_abi.ITEMS // 8, 0xFFFFFFFF

# Words of a record. Addresses are those of arrays that the owner of the records keeps alive.
# KERNELS are the loops for dense gradients, ROW_KERNELS for row-sparse ones, 0 before the first.
# RESTING is that of the record that is used in steps that do not average the weight, else 0. SCALED
# says that gradients are multiplied by FACTOR, as the rule has no ``rescale_grad``; FROZEN that
# neither weight nor gradient is read.
(KERNELS, COUNT, CARRIED, HYPER, FIELDS, SUMS, ROW, GUARDS, GUARDED, GUARD_WIDTH, WEIGHT_COLUMN,
 GRAD_COLUMN, WEIGHT_DTYPE, WEIGHT_CODE, GRAD_CODE, ORDER, NDIMS, SIZE, BYTES, ITEM_COUNT, CHUNKS,
 FLAT, FLAT_COUNT, KEYED, NUMBER, SEED, MARK, INDEX_ID, WEIGHT_ID, CLEAR_WEIGHT, CLEAR_GRAD,
 RESTING, SCALED, FROZEN, ROW_KERNELS, LENGTHS) = range(36)  # fmt: skip
RECORD = LENGTHS + 2  # with more dimensions, a record is longer

# Words of the loops of a layout: addresses, and for each reduction two of them, the number of its
# sums, and whether they are maxima.
# BY_ROW: chunks of an update consist of indexed rows, and with EVERY_ROW dense gradients index all
# rows. FLUSH applies deferred decay to all rows after each update, if it is not 0. FOLLOW, if it is
# not 0, averages all rows after the indexed ones have been updated with the RESTING record.
UPDATE, SQUARES, UNITS, BY_ROW, FLUSH, FOLLOW, PASSES, PASS, PASS_WORDS = 0, 1, 2, 3, 4, 5, 6, 7, 4
EVERY_ROW = 2

# Words of hyper-parameters, which tensors with equal multipliers share. VALUES is the address of
# the step that they are corrected for, the values before the correction, and those after it;
# CARRIED_NUMBERS that of the numbers that parameters carry from step to step. AHEAD says whether
# rates are those of the update that is counted, else of the one before it; RESTS that a step does
# not average the weight, SKIPS that it only counts.
(PREPARE, CARRIES, NAMES, OWN, RESCALE, WIDE, VALUES, CARRIED_NUMBERS, VALID, AHEAD, RESTS, SKIPS,
 HYPER_WORDS) = range(13)  # fmt: skip

# Words of a tensor of a call. T_UNIT_WEIGHT to T_UNIT_OUT are addresses of arrays in C order, from
# which gradients with clipped units are computed. T_COUNT is its update count if Python has
# counted, else -1. T_FOLLOW is the record with whose FOLLOW all rows are averaged, or 0. Words from
# T_INDICES on are of row-sparse gradients: the indices, their number,
# memory for them, whether they ascend, the rows as kernels read them, and the chunks that are
# measured; see :mod:`fastopt._kernels.row_admission`.
(T_RECORD, T_HYPER, T_COUNT, T_WEIGHT, T_COPIED, T_LOW, T_HIGH, T_GRAD, T_GRAD_CODE,
 T_GRAD_COPIED, T_GRAD_LOW, T_GRAD_HIGH, T_SCRATCH, T_GRAD_ID, T_WEIGHT_ID, T_MEASURED,
 T_UNIT_WEIGHT, T_UNIT_GRAD, T_UNIT_OUT, T_KERNELS, T_CHUNKS, T_LISTED, T_STATUS, T_INDICES,
 T_LENGTH, T_REGION, T_ASCENDS, T_ROWS, T_STARTS, T_ORDER, T_CUTS, T_CUT_COUNT,
 T_CUT_SUMS, T_CHUNK, _, T_SEGMENTS, T_GRAD_AXES, T_FOLLOW, T_STRIDES) = range(39)  # fmt: skip
T_GRAD_STRIDES = T_STRIDES + AXES
T_GRAD_LENGTHS = T_GRAD_STRIDES + AXES
TENSOR = T_GRAD_LENGTHS + AXES

INTEGER_KINDS = 10
"""Number of integer dtypes; some have the same size."""

# Words of the context. DTYPES are those of float32, float64, float16 and bfloat16, NUMBERS the
# types of NumPy's scalars of the first three. With ASKING, Python computes hyper-parameters in each
# step; SCHEDULED and TIMED say that they depend on the number of the update, and on the tensors'
# counts: those of the call are UPDATE_NUMBER and TIME, if not UNEVEN. ASKED: they are computed, and
# with EACH for each tensor; or they are computed for the update EXPECTED, at EXPECTED_TIME, if that
# is not 0. NOTHING is a record without elements. CHECKS: only check the call. COPY, SPREAD and the
# SHAREs are addresses of functions that are compiled when they are first needed. SELF is the
# context's own address, COUNTING that of the numbers from 0 to COUNTED - 1, LISTED the bytes of
# scratch memory for rows. APART: it has been checked that no element of a gradient is one of its
# weight or state, though they may be interleaved; such arrays are copied. WRITTEN: Python has
# written the headers, which are no objects. INTEGERS has the dtypes of row indices with their
# sizes, negative for signed ones.
(SLOTS, TENSORS, CAPACITY, COUNTS, NORM, CLIP, CLIP_LARGE, MEASURE, MEASURE_LARGE, LARGE, SCRATCH,
 ROOM, NEED, ASKING, SCHEDULED, TIMED, UPDATE_NUMBER, TIME, UNEVEN, ASKED, EACH, NOTHING,
 LARGE_FROM, RUN, THREADS, CALL_NUMBER, REPEATS, SPANS, NDARRAY, LIST, TUPLE, INT, INT64, STR,
 FLOAT, CHECKS, DONE, EXPECTED, EXPECTED_TIME, COPY, SPREAD, UPDATE_SHARE, MEASURE_SHARE,
 CLIP_SHARE, SELF, ADMIT_ROWS, LIST_ROWS, ORDER_ROWS, COUNTING, COUNTED, NEED_COUNTED,
 LISTED, APART, WRITTEN, ROW_SPARSE, VALUES_NAME, INDICES_NAME, SHAPE_NAME) = range(58)  # fmt: skip
DTYPES = SHAPE_NAME + 1
NUMBERS = DTYPES + 4
INTEGERS = NUMBERS + 3
CONTEXT = INTEGERS + 2 * INTEGER_KINDS

(RESCALE_GRAD, SCALE, LIMIT, FACTOR, GLOBAL_NORM, SHARE, UNIT_FACTOR, UNIT_LIMIT, UNIT_LEAST,
 NORM_NUMBERS) = range(10)  # fmt: skip
"""Numbers of a measured call, in float64: ``rescale_grad``, the other factor of the gradients, the
maximum global norm, the factor after clipping, the norm before clipping, and a last factor. Units
are clipped with the magnitude of all factors, the maximum ratio of the norms of gradient and
weight, and the lower bound of the latter."""

FLOAT32, FLOAT64, FLOAT16, BFLOAT16 = range(1, 5)
"""Codes of dtypes."""

OK, MOVED, SKIPPED, LEFT_OUT = range(4)
REFUSED, UNKNOWN, NO_ROOM, NO_CAPACITY, IS_LARGE, ASKS = range(-1, -7, -1)
"""Statuses of a call.

MOVED: done, and some weight is another object than in the last call. SKIPPED: gradients are not
finite, and nothing has changed. LEFT_OUT, of a single tensor: it is frozen. Nothing has changed
either if the status is negative: the arguments do not fit (REFUSED), or an index has no record
(UNKNOWN). With a smaller status the call can be entered again: scratch memory of NEED bytes is
missing (NO_ROOM) or rows for NEED tensors (NO_CAPACITY), it should run without the GIL (IS_LARGE),
or hyper-parameters of an update must be computed (ASKS).
"""
