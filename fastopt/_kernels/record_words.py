"""What compiled code reads by address: headers of objects, records, calls, as structures.

In kernels :data:`record_at`, and its like for the other structures, give an address the fields, as
in ``record_at(tensor.record).weight_column``. A field is a number of 64 bits, if nothing else is
said. Python has the same words in arrays: the position of a field is the constant with its name in
capitals, as in ``words[WEIGHT_COLUMN]``, with ``T_`` before that of a tensor. An address is that
of an array that the owner of the records keeps alive. See :mod:`fastopt._kernels.front`.

Tests: ``tests/engine/test_records.py``.
"""

from typing import TYPE_CHECKING, Any

import numpy as np
from numba import from_dtype, types

from fastopt._kernels import numpy_abi
from fastopt._kernels.intrinsics import intrinsic
from fastopt._kernels.objects import as_pointer

AXES = 64
"""Maximum number of dimensions, which is that of NumPy."""

MOST = 1 << 44
"""Maximum number of elements, of indices, and of bytes of scratch memory in a compiled call.

An array whose strides are 0 may have up to 2**63 elements, and sums and products of such sizes
overflow.
"""

INTEGER_KINDS = 10
"""Number of integer dtypes; some have the same size."""

if TYPE_CHECKING:

    def __getattr__(name: str) -> int:
        """Position of a field."""


def _fields_at(structure: np.dtype[Any]) -> Any:
    """Return the function of compiled code that gives an address the fields of a structure."""
    kind = from_dtype(structure)

    @intrinsic
    def fields_at(typingctx, place):
        return kind(types.int64), as_pointer

    return fields_at


def _structure(
    names: str, prefix: str = "", real: type = np.int64, **arrays: int
) -> tuple[Any, int]:
    """Return the function like :func:`_fields_at` of a structure of numbers, and their number.

    At its end are `arrays` of these lengths. The positions become constants of this module.
    """
    fields: list[Any] = [(name, real) for name in names.split()]
    fields += [(name, real, length) for name, length in arrays.items()]
    structure = np.dtype(fields, align=True)
    for name, (_, offset, *_) in (structure.fields or {}).items():
        globals()[prefix + name.upper()] = offset // 8
    return _fields_at(structure), structure.itemsize // 8


_HEADER = {
    "type": ("i8", numpy_abi.TYPE),
    "data": ("i8", numpy_abi.DATA),
    "ndim": ("i4", numpy_abi.NDIM),
    "shape": ("i8", numpy_abi.SHAPE),
    "strides": ("i8", numpy_abi.STRIDES),
    "dtype": ("i8", numpy_abi.DTYPE),
    "flags": ("i4", numpy_abi.FLAGS),
    "kind": ("i8", numpy_abi.KIND),
    "length": ("i8", numpy_abi.LENGTH),
    "items": ("i8", numpy_abi.ITEMS),
}
_KINDS, _OFFSETS = zip(*_HEADER.values(), strict=True)
globals().update({name.upper(): offset // 8 for name, (_, offset) in _HEADER.items()})

header_at = _fields_at(
    np.dtype({"names": [*_HEADER], "formats": _KINDS, "offsets": _OFFSETS}, align=True)
)
"""Header of an object: its type; of an array also data to flags, where a number has its value at
`data`; of a dtype its kind; of a list or tuple the length, and of a list `items`."""

guard_at, _ = _structure("id nbytes type dtype flags ndim", "GUARD_", shape=AXES)
"""Expected properties of an array, see :func:`fastopt._kernels.numpy_abi.guard`."""

record_at, RECORD = _structure(
    "kernels count carried hyper fields sums row guards guarded guard_width weight_column "
    "grad_column weight_dtype weight_code grad_code order ndims size bytes item_count chunks flat "
    "flat_count keyed number seed mark index_id weight_id clear_weight clear_grad resting scaled "
    "frozen row_kernels pair_dtype",
    lengths=2,
)
"""The record of a parameter, which is longer if it has more than two dimensions.

The KERNELS are the loops for dense gradients, ROW_KERNELS those for row-sparse ones, 0 before the
first. RESTING is that of the record that is used in steps that do not average the weight, else 0.
SCALED says that gradients are multiplied by FACTOR, as the rule has no ``rescale_grad``; FROZEN
that neither weight nor gradient is read. PAIR_DTYPE is that of the complex numbers whose parts are
the pairs along the last axis, or 0 where complex arrays are not read. At CLEAR_WEIGHT and
CLEAR_GRAD weight and gradient share no memory with the other arrays of the parameter.
"""

pass_at, PASS_WORDS = _structure("sums finish count largest", "PASS_")
"""A reduction of a layout: addresses of its loops, number of its sums, whether they are maxima."""

loops_at, PASS = _structure("update squares units by_row flush follow passes")
"""The loops of a layout: addresses, and the number of its reductions, which follow.

BY_ROW: chunks of an update consist of indexed rows, and with EVERY_ROW dense gradients index all
rows. FLUSH applies deferred decay to all rows after each update, if it is not 0. FOLLOW, if it is
not 0, averages all rows after the indexed ones have been updated with the RESTING record.
"""
EVERY_ROW = 2

hyper_at, HYPER_WORDS = _structure(
    "prepare carries names own rescale wide values carried_numbers valid ahead rests skips"
)
"""Hyper-parameters, which tensors with equal multipliers share.

VALUES is the address of the step that they are corrected for, the values before the correction, and
those after it; CARRIED_NUMBERS that of the numbers that parameters carry from step to step. AHEAD
says whether rates are those of the update that is counted, else of the one before it; RESTS that a
step does not average the weight, SKIPS that it only counts.
"""

tensor_at, TENSOR = _structure(
    "record hyper count weight copied low high grad grad_code grad_copied grad_low grad_high "
    "scratch grad_id weight_id measured unit_weight unit_grad unit_out kernels chunks listed "
    "status indices length region ascends rows starts order cuts cut_count cut_sums chunk "
    "chunk_first segments grad_axes follow",
    "T_",
    strides=AXES,
    grad_strides=AXES,
    grad_lengths=AXES,
)
"""A tensor of a call.

`unit_weight` to `unit_out` are addresses of arrays in C order, from which gradients with clipped
units are computed. `count` is its update count if Python has counted, else -1. `follow` is the
record with whose FOLLOW all rows are averaged, or 0. Those from `indices` on are of row-sparse
gradients: the indices, their number, memory for them, whether they ascend, the rows as kernels read
them, and the chunks that are measured; see :mod:`fastopt._kernels.row_admission`.
"""

context_at, CONTEXT = _structure(
    "slots tensors capacity counts norm clip measure large scratch "
    "room need asking scheduled timed update_number time uneven asked each nothing large_from "
    "run threads call_number repeats spans ndarray list tuple int int64 str float checks done "
    "expected expected_time copy spread update_share measure_share self admit_rows "
    "list_rows order_rows counting counted need_counted listed apart written row_sparse "
    "values_name indices_name shape_name",
    dtypes=6,
    numbers=3,
    integers=2 * INTEGER_KINDS,
)
"""The context of calls, and what is known of the last one.

DTYPES are those of float32, float64, float16, bfloat16, complex64 and complex128, NUMBERS the types
of NumPy's scalars of the first three. With ASKING, Python computes hyper-parameters in each step;
SCHEDULED and TIMED say that they depend on the number of the update, and on the tensors' counts:
those of the call are UPDATE_NUMBER and TIME, if not UNEVEN. ASKED: they are computed, and with EACH
for each tensor; or they are computed for the update EXPECTED, at EXPECTED_TIME, if that is not 0.
NOTHING is a record without elements. CHECKS: only check the call. COPY, SPREAD, RUN, CLIP, MEASURE
and the SHAREs are addresses of functions that are compiled when they are first needed. SELF is the
context's own address, COUNTING that of the numbers from 0 to COUNTED - 1, LISTED the bytes of
scratch memory for rows. APART: it has been checked that no element of a gradient is one of its
weight or state, though they may be interleaved; such arrays are copied. WRITTEN: Python has written
the headers, which are no objects. INTEGERS has the dtypes of row indices with their sizes, negative
for signed ones.
"""

repeat_at, REPEAT = _structure(
    "count places output rests targets firsts objects listed dead folds stream "
    "context launches launch_count driver state measured following reports counts hypers reader "
    "uploads upload_count",
    "R_",
)
"""A call on devices that is made again; see :mod:`fastopt._kernels.device_front`.

It has COUNT records at PLACES; OUTPUT and TARGETS are those of
:func:`~fastopt._kernels.device_front.admit_call` and ``advance_call``. RESTS says whether the step
does not average each weight. FIRSTS has the position of the tensor whose hyper-parameters each one
shares, which may be itself. OBJECTS are the addresses of the gradients, then of the weights, all of
which live while the list DEAD is empty. LISTED says that the arguments are lists, FOLDS that the
rules have ``rescale_grad``. DRIVER has the functions of the driver, STATE is memory for what they
return. MEASURED says that the norm of the gradients is measured: the ring REPORTS brings it to the
host, and the device has the COUNTS and the addresses of HYPERS. FOLLOWING is the same call with
other gradients, or 0. A READER reads gradients that were not seen before; the UPLOADS are the rings
of the tables that they are entered into, and of hyper-parameters that the tensors of a table do not
share.
"""

driver_at, DRIVER = _structure(
    "current capturing launching upload download record query wait", "D_"
)
"""Addresses of functions of the driver: the current context, whether a stream is captured, a
launch, copies to and from the device, and of events: to record one, to query it, to wait for it."""

ring_at, RING = _structure("slots pitch events slot_count first last memory size source", "RING_")
"""Pinned memory in SLOTS of PITCH bytes that are used in turns, with an event for each: those from
FIRST to LAST may be in use. SIZE bytes, a multiple of 4, are copied to or from MEMORY on the
device; those that are uploaded come from SOURCE."""

reader_at, READER = _structure(
    "forms kind memory_kind device shape strides dtype stream memory pointer value part context "
    "first last count",
    "READ_",
)
"""How gradients that are objects of numba are read: their type, that of their memory, the context
of the DEVICE or 0 for any; the names of their attributes; and the COUNT sorted ranges of memory
from FIRST to LAST that they must not overlap. FORMS has one for each gradient."""

form_at, FORM = _structure("shape strides dtype stream unit size slot", "FORM_")
"""The form of a gradient: equal objects, the divisor of its address, its bytes, and the SLOT of a
table for its address."""

impl_at, IMPL = _structure("tensor parameter count storage offset data check own", "IMPL_")
"""The layout of tensors: the addresses of the two types; of an implementation the COUNT of words,
and the positions of those with the address of the storage and the OFFSET in it; of a storage the
position of the word with the address of its DATA, and the offset in bytes of its CHECK; of an
object the position of the word with the address of its OWN implementation."""

launch_at, LAUNCH = _structure("handle blocks across down arguments", "L_")
"""A launch: the kernel, its grid, and the addresses of its ARGUMENTS."""

norm_at, NORM_NUMBERS = _structure(
    "rescale_grad scale limit factor global_norm share unit_factor unit_limit unit_least",
    real=np.float64,
)
"""Numbers of a measured call, in float64: ``rescale_grad``, the other factor of the gradients, the
maximum global norm, the factor after clipping, the norm before clipping, and a last factor. Units
are clipped with the magnitude of all factors, the maximum ratio of the norms of gradient and
weight, and the lower bound of the latter."""

FLOAT32, FLOAT64, FLOAT16, BFLOAT16 = range(1, 5)
"""Codes of dtypes; 4 more than that of their parts are those of complex numbers."""

OK, MOVED, SKIPPED, LEFT_OUT, AWAITED = range(5)
REFUSED, UNKNOWN, NO_ROOM, NO_CAPACITY, IS_LARGE, ASKS, FAILED = range(-1, -8, -1)
"""Statuses of a call.

MOVED: done, and some weight is another object than in the last call. SKIPPED: gradients are not
finite, and nothing has changed. LEFT_OUT, of a single tensor: it is frozen. AWAITED: launched, and
a device decides whether it is skipped, which the host learns later. Nothing has changed either if
the status is negative: the arguments do not fit (REFUSED), or an index has no record (UNKNOWN).
With a smaller status the call can be entered again: scratch memory of NEED bytes is missing
(NO_ROOM) or rows for NEED tensors (NO_CAPACITY), it should run without the GIL (IS_LARGE), or
hyper-parameters of an update must be computed (ASKS). FAILED: a driver has reported an error.
"""
