"""Addresses of tensors whose headers have known forms, in compiled code.

A tensor of torch is a Python object with the address of an implementation, a structure of C++. That
has sizes, strides, dtype, device, flags and the keys of dispatch, and the address of a storage,
which has the address of the memory. The words of the implementation are compared with those of a
dense tensor that torch has created, with other sizes and strides, under a mask, so that views that
are lazily negated or conjugated, other devices, layouts and wrappers differ.
:mod:`fastopt.torch.tensors` finds the positions of these words, and compares what is read here with
what torch reports.

*Lifetime.* The caller's list holds the tensors, each holds its implementation, and that its
storage. Both may be replaced (``x.data = y``, ``x.set_(y)``, ``swap_tensors``), thus all three are
followed in each call. ``test_memory_that_moves_is_read_again``.

*The GIL.* It is held throughout, like in ``Tensor.data_ptr()``, which reads the same words, and no
Python code runs.

*Access.* A storage with a check, such as one that is copied when it is written, is refused:
``Tensor.data_ptr()`` does what the check asks for. ``test_tensors_of_other_forms_are_refused``.

Tests: ``tests/pytorch/test_torch_tensors.py``.
"""

from functools import cache

from numba import types

from fastopt._kernels.compiling import bind_to, compiled
from fastopt._kernels.objects import Object, address, bytes_, words
from fastopt._kernels.record_words import header_at, impl_at
from fastopt.kernels.rule import scalar

ITEMSIZE, ALIGNED, FORM = range(3)
"""Words of a form: bytes of an element, mask of an aligned address, then words and their masks."""


@scalar
def memory_of(tensor, impl, form):
    """Return the address of the elements of a tensor, or 0 if it has another form."""
    kind, fields, count, other = header_at(tensor).type, words(tensor), impl.count, 0
    if kind != impl.tensor and kind != impl.parameter:
        return 0
    fields = words(fields[impl.own])
    for k in range(count):
        other |= (fields[k] ^ form[FORM + k]) & form[FORM + count + k]
    storage = fields[impl.storage]
    if other or storage == 0 or bytes_(storage + impl.check)[0]:
        return 0
    start = words(storage)[impl.data]
    first = start + form[ITEMSIZE] * fields[impl.offset]
    return first if start and first & form[ALIGNED] == 0 else 0


def read_tensors(impl, forms, cells, count, tensors):
    """Write the addresses of the tensors of a list to cells; return whether all have their forms.

    `impl` is the address of the layout, `forms` and `cells` those of arrays of addresses.
    """
    header = header_at(address(tensors))
    for k in range(count if header.length == count else 0):
        first = memory_of(words(header.items)[k], impl_at(impl), words(words(forms)[k]))
        if first == 0:
            return False
        words(words(cells)[k])[0] = first
    return header.length == count


def match(ids, count, objects):
    """Return whether the items of a list are the objects with these addresses."""
    header = header_at(address(objects))
    same = header.length == count
    for k in range(count if same else 0):
        same = same and words(header.items)[k] == words(ids)[k]
    return same


@cache
def reader():
    """Return the compiled ``(impl, forms, cells, count, tensors)``, see :func:`read_tensors`."""
    kernel = compiled(read_tensors, None, parallel=False, nogil=False)
    return bind_to(kernel, *[types.int64] * 4, Object)


@cache
def matcher():
    """Return the compiled ``(ids, count, objects)``, see :func:`match`."""
    kernel = compiled(match, None, parallel=False, nogil=False)
    return bind_to(kernel, types.int64, types.int64, Object)
