"""Addresses of tensors, read by compiled code where the layout of their headers is known.

Six calls of torch say where a tensor lies, and that its form is what it was. Compiled code compares
the words in memory instead, see :mod:`fastopt._kernels.tensors`. Where they are is found once per
process, with tensors whose properties torch reports. If forms that differ for torch do not differ
there, or if there is no GIL, the calls are made.

Tests: ``tests/pytorch/test_torch_tensors.py``.
"""

import ctypes
import math
from collections.abc import Callable, Iterable, Sequence
from functools import cache, lru_cache, partial
from operator import is_
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from fastopt._kernels.numpy_abi import at, readable
from fastopt._kernels.tensors import matcher, reader

Words = NDArray[np.int64]
Layout = tuple[int, ...]
"""Words of :data:`fastopt._kernels.record_words.impl_at`."""

COUNT, OFFSET = 2, 4
"""Positions in them of the number of words, and of the position of the offset in the storage."""

AXES = 5
"""Maximum number of dimensions with room for sizes and strides in the implementation."""


class Places:
    """Reads the addresses of tensors that have the forms of others.

    Parameters
    ----------
    like : sequence of torch.Tensor
        Tensors of these forms.
    cells : sequence of int
        Addresses of words to which the addresses of tensors are written.
    impl : Layout, optional
        The layout of tensors. Default: that which has been found.

    Attributes
    ----------
    read : callable
        Writes the addresses of a list of tensors, or returns False: they have other forms.
    """

    def __init__(
        self, like: Sequence[torch.Tensor], cells: Sequence[int] | Words, impl: Layout | None = None
    ) -> None:
        self.read: Callable[[list[torch.Tensor]], bool] = lambda tensors: False
        impl = impl or layout()
        if impl and all(tensor.ndim <= AXES and tensor.numel() for tensor in like):
            self._forms = [form(impl, t.shape, t.stride(), t.dtype) for t in like]
            places = [words.ctypes.data for words in self._forms]
            self._memory = [np.array(numbers, np.int64) for numbers in (impl, places, cells)]
            self.read = partial(reader(), *(a.ctypes.data for a in self._memory), len(like))


class Snapshot:
    """Addresses and forms of tensors.

    Parameters
    ----------
    tensors : list of torch.Tensor
        The tensors.

    Attributes
    ----------
    seen : object
        What :meth:`look` returned at first, which compares equal if nothing has changed.
    """

    def __init__(self, tensors: list[torch.Tensor]) -> None:
        self.tensors, self._addresses = tensors, np.zeros(len(tensors), np.int64)
        cells = self._addresses.ctypes.data + 8 * np.arange(len(tensors))
        self._places = Places(tensors, cells)
        self.seen = self.look()

    def look(self) -> object:
        """Return the addresses and forms that the tensors have now."""
        if self._places.read(self.tensors):
            return self._addresses.tobytes()
        return list(map(report, self.tensors))


def report(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Return what torch reports of the memory of a tensor, and of how it is read."""
    flags = tensor.is_neg(), tensor.is_conj()
    return tensor.data_ptr(), tensor.dtype, tensor.size(), tensor.stride(), *flags


class Same:
    """Compares lists with objects by identity.

    Parameters
    ----------
    objects : list
        The objects, which are kept alive.

    Attributes
    ----------
    match : callable
        Returns whether the items of a list are the objects.
    """

    def __init__(self, objects: list[Any]) -> None:
        self.objects = objects
        self.match: Callable[[list[Any]], bool] = self._match
        if readable():
            self._ids = np.array([*map(id, objects)], np.int64)
            self.match = partial(matcher(), self._ids.ctypes.data, len(objects))

    def _match(self, objects: list[Any]) -> bool:
        return len(objects) == len(self.objects) and all(map(is_, objects, self.objects))


@lru_cache(1024)
def form(impl: Layout, shape: torch.Size, strides: tuple[int, ...], dtype: torch.dtype) -> Words:
    """Return the form of a tensor, see :mod:`fastopt._kernels.tensors`."""
    ndim, axes = len(shape), impl[OFFSET] - 2 * AXES
    with torch.inference_mode(False):
        like = torch.empty((1,) * ndim, dtype=dtype, device="cpu")
    words, size = _words(like, impl[COUNT]).copy(), like.itemsize // (1 + dtype.is_complex)
    words[axes : axes + ndim], words[axes + AXES : axes + AXES + ndim] = shape, strides
    words[-3], mask = math.prod(shape), np.zeros_like(words)
    mask[[0, axes - 1, -3, -1]] = -1  # the class, the numbers of axes and elements, the keys
    mask[axes : axes + ndim] = -1
    mask[axes + AXES : axes + AXES + ndim] = np.where(np.array(shape) == 1, 0, -1)
    mask[-2] = 0xFFFFFFFF  # dtype and device, without the flags that follow from other words
    return np.concatenate([[like.itemsize, size - 1], words & mask, mask])


def _words(tensor: torch.Tensor, count: int) -> Words:
    """Return words of the implementation of a tensor."""
    return np.frombuffer(ctypes.string_at(tensor._cdata, 8 * count), np.int64)


@cache
def layout() -> Layout | None:
    """Return the layout of tensors, or None if compiled code must not read them."""
    try:
        impl = _layout()
        return impl if readable() and _distinguishes(impl) else None
    except Exception:
        return None


def _layout() -> Layout:
    """Find the layout of tensors."""
    plain = [torch.empty(40)[3:], torch.empty(5, dtype=torch.float64), torch.empty(9, 7)[2:]]
    plain += [torch.from_numpy(np.ones(6))[5:], torch.nn.Parameter(torch.empty(11)[7:])]
    storages = [tensor.untyped_storage() for tensor in plain]
    checked = [torch.empty(3), torch._lazy_clone(torch.empty(4))]
    torch._C._set_throw_on_mutable_data_ptr(checked[0])
    flags = [0] * len(plain) + [1] * len(checked)

    def word(starts: Iterable[int], values: Sequence[int], step: int = 8, bits: int = -1) -> int:
        """Return the position of the word, or byte, that has these values after these addresses."""
        pairs = list(zip(starts, values, strict=True))
        return next(
            k for k in range(256 // step) if all(at(a, step * k) & bits == v for a, v in pairs)
        )

    impls, of = [tensor._cdata for tensor in plain], [storage._cdata for storage in storages]
    return (
        id(torch.Tensor),
        id(torch.nn.Parameter),
        word(impls, [torch._C._dispatch_keys(tensor).raw_repr() for tensor in plain]) + 1,
        word(impls, of),
        word(impls, [tensor.storage_offset() for tensor in plain]),
        word(of, [storage.data_ptr() for storage in storages]),
        word(of + [tensor.untyped_storage()._cdata for tensor in checked], flags, 1, 255),
        word(map(id, plain), impls),
    )


def _distinguishes(impl: Layout) -> bool:
    """Whether tensors of a form are read, and tensors that differ from it for torch are not."""
    cell = np.zeros(1, np.int64)

    def reads(like: torch.Tensor, other: torch.Tensor) -> bool:
        read = Places([like], [cell.ctypes.data], impl).read([other])
        return read and int(cell[0]) == other.data_ptr()

    plain, deep = torch.ones(2, 3), torch.ones(2, 3, 4, 5, 6)
    lazy, pair = torch._lazy_clone(plain.clone()), torch.ones(2, 3, dtype=torch.complex64)
    same = [plain, torch.nn.Parameter(plain), torch.ones(20)[9:15].view(2, 3), plain.detach()]
    others = [plain.view(3, 2), torch.ones(3, 2).t(), plain.double(), plain.view(torch.int32)]
    others += [torch._neg_view(plain), plain.to("meta"), plain.to_sparse(), plain[None], lazy]
    return (
        all(reads(plain, other) for other in same)
        and not any(reads(plain, other) for other in others)
        and not reads(deep, torch.ones(6, 5, 4, 3, 2).permute(4, 3, 2, 1, 0))
        and not reads(pair, pair.conj())
    )
