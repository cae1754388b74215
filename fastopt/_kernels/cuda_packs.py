"""Vector loads and stores of CUDA kernels: a thread moves up to 16 bytes of an array at once.

A pack is a number of consecutive elements. A thread copies the pack of each array to registers,
works on it through pointers like those to memory, and writes it back. Arrays whose next use is in
the next step are streamed: loads and stores are marked as evicted first (``.cs`` in PTX), so that
they do not displace weights from the cache. Instructions are written as PTX, as LLVM emits neither
such hints nor 16-byte accesses at addresses that it does not know to be aligned.

Tests: ``tests/kernels/test_cuda.py``.
"""

from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import overload

from fastopt._kernels.intrinsics import intrinsic
from fastopt._kernels.layout import Layout

ALIGNMENT = 16
"""Bytes of the largest access of a thread, at a multiple of itself."""

WORD = 4
"""Bytes of the words that smaller elements are moved in."""


def pack_size(layout: Layout) -> int:
    """Return the elements of a pack: 16 bytes of the largest elements of a layout.

    So each access of a warp is to consecutive memory. Packs of 16 bytes of half-precision values
    would be two accesses to float32 arrays, each to half of the 32-byte sectors of both, and take
    registers for which a multiprocessor has one block less.
    """
    return _pack_of(*layout.weight, *layout.state, layout.grad)


def sum_pack(layout: Layout) -> int:
    """Return the elements of a pack in reductions; lists of rows are not read in packs."""
    return 1 if layout.sparse else _pack_of(*layout.summed[1], *layout.state, layout.grad)


def _pack_of(*kinds: Any) -> int:
    return ALIGNMENT // max(np.dtype(kind).itemsize for kind in kinds)


def square_pack(kind: Any, sparse: bool) -> int:
    """Return the elements of a pack where gradients of type `kind` are squared."""
    return 1 if sparse else _pack_of(kind)


def read_pack(pointers: Any, i: Any, size: Any) -> Any:
    """Copy `size` elements like :func:`begin_pack`, from memory that the kernel does not write to.

    What is not used is not loaded.
    """


def begin_pack(pointers: Any, i: Any, size: Any, streamed: Any, read: Any) -> Any:
    """Copy `size` elements from element `i` on at each pointer; return pointers to the copies.

    Of the first `read` pointers: the copies of the others are only written. `size`, `read`, and
    `streamed`, whether the arrays are not used again soon, are constants.
    """


@overload(begin_pack, prefer_literal=True, inline="always")  # allocates on the caller's stack
def _begin_pack(pointers, i, size, streamed, read):
    return lambda pointers, i, size, streamed, read: _begin_intrinsic(
        pointers, i, size, streamed, read, True
    )


@overload(read_pack, prefer_literal=True, inline="always")
def _read_pack(pointers, i, size):
    count = len(pointers)
    return lambda pointers, i, size: _begin_intrinsic(pointers, i, size, False, count, False)


@intrinsic(prefer_literal=True)
def _begin_intrinsic(typingctx, pointers, i, size, streamed, read, ordered):
    kinds = [pointer.dtype for pointer in pointers]
    accesses = [_Access(kind, size.literal_value, streamed.literal_value) for kind in kinds]

    def codegen(context, builder, signature, args):
        copies: list[Any] = []
        for pointer, access, base in zip(
            pointers, accesses, cgutils.unpack_tuple(builder, args[0], len(kinds)), strict=True
        ):
            element = context.get_value_type(pointer).pointee
            copy = cgutils.alloca_once(builder, ir.ArrayType(element, size.literal_value))
            copy.align = ALIGNMENT
            if len(copies) < read.literal_value:
                source = builder.gep(base, [args[1]])
                access.read(builder, source, copy, ordered.literal_value)
            copies.append(builder.bitcast(copy, element.as_pointer()))
        return context.make_tuple(builder, signature.return_type, copies)

    made = types.Tuple(list(pointers))
    return made(pointers, types.int64, size, streamed, read, ordered), codegen


@intrinsic(prefer_literal=True)
def end_pack(typingctx, pointers, i, size, streamed, copies):
    """Write the copies of :func:`begin_pack` back."""
    kinds = [pointer.dtype for pointer in pointers]
    accesses = [_Access(kind, size.literal_value, streamed.literal_value) for kind in kinds]

    def codegen(context, builder, signature, args):
        bases, made = (cgutils.unpack_tuple(builder, args[k], len(kinds)) for k in (0, 4))
        for access, base, copy in zip(accesses, bases, made, strict=True):
            access.write(builder, builder.gep(base, [args[1]]), copy)
        return context.get_dummy_value()

    return types.none(pointers, types.int64, size, streamed, copies), codegen


class _Access:
    """Code of the accesses that move a pack of elements of one type."""

    def __init__(self, kind: Any, size: int, streamed: bool) -> None:
        itemsize = kind.bitwidth // 8
        wide = itemsize >= WORD or size * itemsize < WORD
        words = size if wide else size * itemsize // WORD
        kinds = {8: ir.DoubleType(), 4: ir.FloatType(), 2: ir.IntType(16)}
        self.word = kinds[itemsize] if wide else ir.IntType(32)
        step = itemsize if wide else WORD
        self.elements = ALIGNMENT // itemsize
        self.each = min(words, ALIGNMENT // step)
        self.firsts = range(0, words, self.each)
        name = {8: "f64", 4: "f32", 2: "b16"}[itemsize] if wide else "b32"
        self.mark = {8: "d", 4: "f", 2: "h"}[itemsize] if wide else "r"
        hint = ".cs" if streamed else ""
        vector = f".v{self.each}" if self.each > 1 else ""
        self.suffix = f".global{hint}{vector}.{name}"

    def read(self, builder: Any, source: Any, target: Any, ordered: bool) -> None:
        """Load from memory to a copy; `ordered` before and after other accesses of packs."""
        listed = ", ".join(f"${k}" for k in range(self.each))
        listed = f"{{{listed}}}" if self.each > 1 else listed
        several = ir.LiteralStructType([self.word] * self.each)
        typed = ir.FunctionType(several if self.each > 1 else self.word, [source.type])
        marks = ",".join([*[f"={self.mark}"] * self.each, "l"])
        for first, address in self._addresses(builder, source):
            text = f"ld{self.suffix} {listed}, [${self.each}];"
            value = builder.asm(typed, text, marks, [address], ordered)
            for k in range(self.each):
                word = builder.extract_value(value, k) if self.each > 1 else value
                builder.store(word, self._word(builder, target, first + k))

    def write(self, builder: Any, target: Any, source: Any) -> None:
        """Store from a copy to memory."""
        listed = ", ".join(f"${k + 1}" for k in range(self.each))
        listed = f"{{{listed}}}" if self.each > 1 else listed
        typed = ir.FunctionType(ir.VoidType(), [target.type, *[self.word] * self.each])
        marks = ",".join(["l", *[self.mark] * self.each])
        for first, address in self._addresses(builder, target):
            words = [builder.load(self._word(builder, source, first + k)) for k in range(self.each)]
            builder.asm(typed, f"st{self.suffix} [$0], {listed};", marks, [address, *words], True)

    def _addresses(self, builder: Any, base: Any) -> Any:
        """Yield the first word of each access, and its address."""
        for first in self.firsts:
            at = ir.IntType(32)(first // self.each * self.elements)
            yield first, builder.gep(base, [at])

    def _word(self, builder: Any, copy: Any, k: int) -> Any:
        base = builder.bitcast(copy, self.word.as_pointer())
        return builder.gep(base, [ir.IntType(32)(k)])
