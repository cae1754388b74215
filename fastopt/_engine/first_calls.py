"""States and records of parameters whose forms are known, at their first update.

The states of such parameters are parts of one block of zeros, and their records are copies of
templates that differ in a few words, so that nothing is checked or allocated for each parameter.
The first parameter of a form has its state from the optimizer and its record from
:class:`~fastopt._engine.enrolment.Enrolment`.

Tests: ``tests/engine/test_first_calls.py``.
"""

from collections.abc import Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fastopt._engine.blanks import LINE, Blank
from fastopt._engine.forms import INSIDE, MOST_FORMS, Form
from fastopt._kernels import record_words as w
from fastopt._kernels.numpy_abi import address_of

Array = np.ndarray[Any, Any]
Words = NDArray[np.int64]

ALONE_FROM = 1 << 20
"""Bytes from which states of a parameter have a block of their own, which is freed with them."""


BATCHES: dict[Any, "Batch"] = {}
"""Batches by the numbers of their forms."""


class Batch(NamedTuple):
    """Template of the states and records of several new parameters, in order.

    Positions are those of words in `block`; arrays are numbered through all states.
    """

    block: Words
    """The records, with addresses relative to the start."""
    cuts: list[int]
    """Position of each record, and the end of the last."""
    inside: Words
    """Positions of addresses in the block."""
    counts: Words
    """Positions of :data:`COUNT`."""
    named: Words
    """Positions of HYPER and INDEX_ID for each parameter, then of the ids of guarded arrays."""
    addresses: Words
    """Positions of the addresses of guarded arrays."""
    guarded: list[int]
    """Numbers of these arrays."""
    guards: list[int]
    """Where the guarded arrays of each parameter begin, and the end of the last."""
    sizes: list[int]
    """Bytes of each allocation; large parameters have one of their own."""
    arrays: list[tuple[tuple[int, ...], Any, int, int, tuple[int, ...]]]
    """Shape, dtype, allocation, offset and strides of each array."""
    firsts: list[int]
    """Number of the first array of each parameter."""

    def states(self, forms: Sequence[Form]) -> tuple[list[Any], list[Array], Any]:
        """Create the states; return them, the guarded arrays, and the addresses of these."""
        memories = [_aligned(size) for size in self.sizes]
        found = [
            np.ndarray(shape, dtype, memories[number], offset, strides)
            for shape, dtype, number, offset, strides in self.arrays
        ]
        states = [
            found[first]
            if form.blank.nested == 0
            else form.blank.filled(found[first : first + len(form.blank.slots)])
            for form, first in zip(forms, self.firsts, strict=True)
        ]
        starts = [address_of(memory) for memory in memories]
        addresses = [starts[self.arrays[k][2]] + self.arrays[k][3] for k in self.guarded]
        return states, [found[k] for k in self.guarded], addresses


def batch_of(forms: Sequence[Form]) -> Batch:
    """Return the template of parameters of these forms, which are in BLANKS."""
    key = tuple([form.number for form in forms])
    batch = BATCHES.get(key)
    if batch is None:
        batch = BATCHES[key] = _batch_of(forms)
        if sum(map(len, BATCHES)) > MOST_FORMS:
            BATCHES.clear()
    return batch


def _batch_of(forms: Sequence[Form]) -> Batch:
    cuts = [0, *accumulate(len(form.block) for form in forms)]
    guards = [0, *accumulate(len(form.leaves) for form in forms)]
    begins = np.array(cuts[:-1], np.int64)
    of_arrays = np.repeat(begins, np.diff(guards))
    inside = (begins[:, None] + np.array(INSIDE)).ravel()
    heads = (begins[:, None] + np.array([w.HYPER, w.INDEX_ID])).ravel()
    block = np.concatenate([form.block for form in forms])
    block[inside] += np.repeat(8 * begins, len(INSIDE))
    ids, addresses = (
        np.array([place for form in forms for place in getattr(form, name)], np.int64) + of_arrays
        for name in ("guards", "columns")
    )
    sizes, firsts, guarded = [0], list[int](), list[int]()
    arrays: list[tuple[tuple[int, ...], Any, int, int, tuple[int, ...]]] = []
    for form in forms:
        blank: Blank = form.blank
        number, start = 0, sizes[0]
        if blank.spacing >= ALONE_FROM:
            number, start = len(sizes), 0
            sizes.append(blank.spacing)
        else:
            sizes[0] += blank.spacing
        firsts.append(len(arrays))
        guarded += [len(arrays) + k for k in form.leaves]
        arrays += [(s.shape, s.dtype, number, start + s.offset, s.strides) for s in blank.slots]
    named = np.concatenate([heads, ids])
    words = block, cuts, inside, begins + w.COUNT, named, addresses
    return Batch(*words, guarded, guards, sizes, arrays, firsts)


def _aligned(size: int) -> Array:
    """Return zeros that begin with a cache line."""
    memory = np.zeros(size + LINE, np.uint8)
    return memory[-address_of(memory) % LINE :]
