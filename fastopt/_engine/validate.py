"""Validation of the arguments of an update, before anything changes.

Tests: ``tests/updater/test_updater.py``, ``tests/engine/test_rows.py``.
"""

from array import array as BufferOf
from collections.abc import Callable, Collection, Iterator, Mapping, MappingView, Sequence
from contextlib import contextmanager
from functools import cache
from itertools import combinations
from numbers import Number
from typing import Any, Literal

import numpy as np

from fastopt._arrays import Gradient
from fastopt._foreign import as_real
from fastopt._kernels.codes import is_coded, scales_shape
from fastopt._kernels.devices import Header, device_of, header, is_cuda
from fastopt._kernels.layout import kind_of, real_of
from fastopt._structure import by_index
from fastopt.arguments import array_inside, brief, is_masked
from fastopt.kernels.rule import Rule
from fastopt.sparse import HALVES, REALS, RowSparse, as_row_sparse, is_row_sparse

Array = np.ndarray[Any, Any]

Grad = Array | RowSparse
"""A gradient in a form that updates use, see :func:`check`."""

OF_OTHER_SETTINGS = (
    "the state is of other settings: delete it from updater.states, to start with a new one"
)

OF_ONE = (
    "; each index has the state of one weight: give another weight another index, or delete the "
    "old state from updater.states; updater.resize() follows rows that were added or pruned"
)


def label(index: int | str, names: dict[Any, str]) -> str:
    """Return the label of a parameter in error messages."""
    if index == "":
        return "the array"
    name = names.get(index)
    return f"index {index!r}" if name is None else f"index {index!r} ({name})"


@contextmanager
def naming(context: str) -> Iterator[None]:
    """Context whose errors begin with the label of what they are about."""
    try:
        yield
    except (TypeError, ValueError, MemoryError) as error:
        raise type(error)(f"{context}: {error}") from error


def check_index(index: object) -> int | str:
    """Return `index` as a dictionary key; bytes are decoded.

    Raises
    ------
    TypeError
        `index` is not an int, str or bytes. True and False are refused, although they equal 1
        and 0.
    ValueError
        `index` is bytes that are not UTF-8.
    """
    if type(index) is int or type(index) is str:
        return index
    if isinstance(index, str):
        return str.__str__(index)
    if isinstance(index, int) and not isinstance(index, bool):
        return int(index)
    if isinstance(index, bytes):
        try:
            return index.decode()
        except UnicodeDecodeError:
            raise ValueError(f"index must be text in UTF-8 if it is bytes, got {index!r}") from None
    if isinstance(index, np.integer) and not isinstance(index, np.timedelta64):
        return int(index)
    got = type(index).__name__
    message = f"index must be an int, str or bytes, or a list of them, got {got}"
    if isinstance(index, Mapping):
        message = f"{message}; updater.step(grads, weights) takes dictionaries"
    elif isinstance(index, np.ndarray):
        message = f"{message}; the order is updater(index, grad, weight)"
    raise TypeError(message)


def check_known(index: int | str, known: Collection[Any]) -> None:
    """Raise ValueError unless an index is that of a known parameter."""
    if index not in known:
        names = ", ".join(map(repr, known)) or "none"
        raise ValueError(f"index {index!r} is of no parameter; those so far are {names}")


def weights_by_index(weights: object) -> dict[int | str, Any]:
    """Return the arrays of nested weights, or of a mapping of indices, by checked index."""
    return {check_index(index): array for index, array in by_index(weights).items()}


def selected(
    method: str, index: Any, weight: object, known: Collection[int | str]
) -> dict[int | str, Any]:
    """Return what a method takes by index: its weights, or None for those of the last calls.

    Parameters
    ----------
    method : str
        Name in errors.
    index, weight
        The arguments: an index and its weight, lists of them, or no index and nested weights.
    known : collection of int or str
        The indices without an argument, of which nested weights need one at least.
    """
    if isinstance(index, Mapping) and weight is None:
        index, weight = None, index
    if index is None:
        weights = weights_by_index(weight)
        if weight is not None and known and not weights.keys() & {*known}:
            raise TypeError(
                f"{method}(weight=weights) takes weights nested as in step, got {brief(weight)}; "
                f"{method}(index, weight) takes one and its index"
            )
        order = [i for i in weights if i in known] + [i for i in known if i not in weights]
        return {i: weights.get(i) for i in order}
    if not is_listed(index):
        return {check_index(index): weight}
    indices = [check_index(i) for i in index]
    arrays = [None] * len(indices) if weight is None else as_lists(indices, indices, weight)[2]
    return dict(zip(indices, arrays, strict=True))


def check_key(index: object) -> None:
    """Raise TypeError unless `index`, that of an update without an updater, can be a key."""
    if type(index).__hash__ is None:
        raise TypeError(
            f"index must be an int or a str, got {brief(index)}: Optimizer.update takes one "
            "parameter; Updater(optimizer)(indices, grads, weights) takes lists"
        )


def repeated(indices: Sequence[Any]) -> Any:
    """Return the first item of a list that is there twice, or None."""
    if len(set(indices)) == len(indices):
        return None
    return next(index for k, index in enumerate(indices) if index in indices[:k])


def is_listed(value: object) -> bool:
    """Whether `value` is list-like: a list, tuple, range, view of a dict, ..."""
    if isinstance(value, (list, tuple)):
        return True
    if isinstance(value, (str, bytes, bytearray, memoryview, BufferOf)):
        return False
    return isinstance(value, (Sequence, MappingView))


def as_lists(indices: Any, grads: Any, weights: Any) -> tuple[list[Any], list[Any], list[Any]]:
    """Copy the arguments to new lists, which keep the arrays alive if the caller's change."""
    for role, items in (("gradients", grads), ("weights", weights)):
        if not is_listed(items) or len(items) != len(indices):
            got = f"{len(items)}" if is_listed(items) else type(items).__name__
            message = f"a list of {len(indices)} indices needs a list of as many {role}, got {got}"
            if isinstance(items, Mapping):
                message = f"{message}; updater.step(grads, weights) takes dictionaries"
            elif isinstance(indices, tuple):  # a key of a model
                message = (
                    f"{message}; an index is not a tuple (for thinc and spaCy: fastopt.adapters)"
                )
            raise TypeError(message)
    return list(indices), list(grads), list(weights)


def check(context: str, weight: Array, grad: Any, copy: Any = None, role: str = "gradient") -> Any:
    """Check the weight and the gradient of one update; return the gradient.

    Parameters
    ----------
    context : str
        Label of the parameter.
    weight, grad : numpy.ndarray
        The gradient may be row-sparse, in any form that :func:`fastopt.sparse.as_row_sparse`
        takes.
    copy : numpy.ndarray, optional
        Half-precision copy of the weight.
    role : str
        What the array is called in errors. Default "gradient".

    Returns
    -------
    numpy.ndarray or RowSparse
        The gradient; a NumPy scalar becomes an array.

    Raises
    ------
    TypeError
        `weight` or `grad` is not a NumPy array, or has an unsupported dtype. On the host gradients
        may have any real floating dtype.
    ValueError
        The shapes differ, `weight` is read-only, or the two share memory.
    RuntimeError
        The stream of an array is being captured for a CUDA graph.
    """
    weight = described(context, "weight", weight)
    if isinstance(weight, Header):
        _refuse_capture(weight)
    _check_array(context, "weight", weight, np.ndarray)
    if kind_of(weight.dtype) is None:
        cure = _weight_cure(weight.dtype)
        raise TypeError(f"{context}: weight must be {_either(REALS)}, got {weight.dtype}{cure}")
    _check_writeable(context, "weight", weight)
    values = grad
    if is_row_sparse(grad):
        grad = listed(context, grad, weight.shape)
        values = header(grad.values)
    elif isinstance(grad, (tuple, list)) or hasattr(grad, "tocsr"):
        hint = "; convert it with tocsr()" if hasattr(grad, "tocsr") else ""
        hint = "; convert it with np.array(x)" if isinstance(grad, list) else hint
        raise TypeError(
            f"{context}: {role} must be a NumPy array, or row-sparse: a RowSparse, a pair "
            "(values, indices) of arrays, where indices may be a list of ints, or a scipy.sparse "
            f"array in CSR or COO format, got {_kinds(grad)}{hint}"
        )
    else:
        if grad is None:
            raise TypeError(
                f"{context}: gradient must be a NumPy array, got None; omit the index, or call "
                "updater.step(grads, weights), which skips weights whose gradient is None"
            )
        if isinstance(grad, (float, np.generic)) and weight.size == 1:
            grad = np.full(weight.shape, grad, getattr(grad, "dtype", None))
        values = described(context, role, grad)
        _check_array(context, role, values, (np.ndarray, np.generic), weight.shape)
    if values.dtype != weight.dtype:
        takes = [weight.dtype.name] + ["float32"] * is_half(weight)
        takes += [] if copy is None else [header(copy).dtype.name]
        if values.dtype.name not in takes or not values.dtype.isnative:
            grad = converted(f"{context}: {role}", grad, values.dtype, weight, takes)
            values = grad.values if isinstance(grad, RowSparse) else grad
    shape = grad.shape if isinstance(grad, RowSparse) else values.shape
    if shape != weight.shape:
        hint = ""
        if [n for n in shape if n != 1] == [n for n in weight.shape if n != 1]:
            hint = f"; pass grad.reshape({weight.shape})"
        elif shape == weight.shape[::-1]:
            hint = "; pass grad.T"
        hint = f"; pass np.full({weight.shape}, x)" if shape == () else hint
        raise ValueError(f"{context}: {role} must have shape {weight.shape}, got {shape}{hint}")
    check_together(context, {"weight": weight, role: values})
    check_apart(context, {"weight": weight, role: values})
    parts = (values, header(grad.indices)) if isinstance(grad, RowSparse) else (values,)
    _refuse_capture(*parts)
    return np.asarray(grad) if isinstance(grad, np.generic) else grad


def real_views(context: str, refused: str, grad: Any, weight: Any, clips: bool) -> tuple[Any, Any]:
    """Return a gradient and its weight, complex ones as views of the pairs of their parts.

    `refused` is the name of an optimizer that does not update complex weights, else empty.

    Raises
    ------
    TypeError
        The optimizer does not update complex weights, or their units cannot be clipped; or one of
        the two is complex, and the other is not its real view.
    ValueError
        The shapes of the two differ.
    """
    if isinstance(grad, (complex, np.complexfloating)) and np.size(weight) == 1:
        grad = np.full(np.shape(weight), grad)
    values, view = as_real(grad), as_real(weight)
    if view is not weight and refused:
        raise TypeError(
            f"{context}: weight is {weight.dtype}, and {refused} has no rule by "
            "element: update its real and imaginary parts as two weights, or use a group with "
            "another optimizer, such as AdamW"
        )
    if view is not weight and clips and view.ndim == 2:
        raise TypeError(
            f"{context}: clip_adaptive clips a vector as a whole, and pairs of real numbers each, "
            f"got a weight of {weight.dtype} with one dimension: reshape it to (1, {len(weight)})"
        )
    pair = isinstance(grad, (tuple, list)) and len(grad) == 2
    of, passed = (part[0] if pair else getattr(part, "values", part) for part in (grad, values))
    arrays = isinstance(of, np.ndarray) and isinstance(weight, np.ndarray)
    if not arrays or (passed is of and view is weight):
        return values, view
    rows = np.ndim(grad[1]) if pair else 1
    if passed.ndim != view.ndim - 1 + rows or (passed is values and passed.shape != view.shape):
        error = ValueError if (passed is of) == (view is weight) else TypeError
        cure = "pass its real part, x.real" if view is weight else "pass dL/dRe + 1j * dL/dIm"
        raise error(
            f"{context}: gradient must match the weight, {weight.dtype} of shape {weight.shape}, "
            f"got {of.dtype} of shape {of.shape}{f': {cure}' if error is TypeError else ''}"
        )
    return values, view


def _refuse_capture(*arrays: Array) -> None:
    """Raise if the stream of an array on a device is being captured for a CUDA graph."""
    if streams := {array.stream for array in arrays if isinstance(array, Header)}:
        from fastopt._kernels.cuda_driver import refuse_capture

        refuse_capture(*streams)


def converted(context: str, grad: Grad, dtype: Any, weight: Array, takes: Sequence[str]) -> Any:
    """Return a gradient of another real floating `dtype` in the dtype of the arithmetic.

    `takes` are the names of dtypes that need no conversion.

    Raises
    ------
    TypeError
        The dtype is no real floating one, or one of the arrays is on a device.
    """
    real = np.dtype(real_of(weight.dtype))
    floating = np.issubdtype(dtype, np.floating) or dtype.name == "bfloat16"
    if not floating or not isinstance(grad, (np.ndarray, RowSparse)) or isinstance(weight, Header):
        context = f"{context} must have the weight's dtype {_either(takes)}"
        other = "" if floating else " or another real floating dtype"
        cure = "" if floating else f": convert it with astype({real.name!r})"
        cure = ": pass its real part, x.real" if dtype.kind == "c" else cure
        raise TypeError(f"{context}{other}, got {dtype}{cure}")
    with np.errstate(over="ignore", under="ignore"):
        return grad.astype(real)


def _weight_cure(dtype: np.dtype[Any]) -> str:
    """Return what can be done about a weight of a dtype that is not supported."""
    if dtype.names:
        return "; pass its fields, {name: x[name] for name in x.dtype.names}"
    if dtype.hasobject:
        return "; pass the arrays in a list, list(x)"
    if dtype.kind == "c":
        view = f"view('f{dtype.itemsize // 2}')"
        return f"; update x.{view}, its real and imaginary parts, with grad.{view}"
    order = "" if dtype.isnative else " in another byte order"
    real = dtype.kind in "biuf"
    wide = 64 if dtype.kind == "f" and dtype.itemsize > 8 else 32
    return f"{order}; store x.astype('float{wide}') instead" if real else order


def described(context: str, role: str, array: object) -> Any:
    """Return the header of a device array, or the NumPy array; errors name the parameter."""
    with naming(f"{context}: {role}"):
        return header(array)


def _kinds(grad: object) -> str:
    """Return the type of `grad`, for a tuple with the types of its items."""
    kind = type(grad).__name__
    if not isinstance(grad, tuple) or len(grad) > 3:
        return kind
    return f"{kind} of {', '.join(type(part).__name__ for part in grad)}"


def _either(names: Sequence[str]) -> str:
    return " or ".join(names)


def listed(context: str, grad: Gradient, shape: tuple[int, ...]) -> RowSparse:
    """Return `grad` as a RowSparse; errors name the parameter."""
    with naming(context):
        return as_row_sparse(grad, shape)


def _check_array(context: str, role: str, array: object, kind: Any, shape: Any = ()) -> None:
    """Raise TypeError unless `array` is an instance of `kind` and not masked."""
    if not isinstance(array, kind) or is_masked(array):
        nested = role == "weight" and isinstance(array, (list, tuple, Mapping))
        hint = "; updater.step(grads, weights) takes nested weights" if nested else ""
        if role == "weight" and isinstance(array, (Number, np.generic)):
            hint = ", which cannot change in place: store np.array(x)"
        if role == "gradient" and isinstance(array, Number):
            hint = f"; pass np.full({shape}, float(x))"
        if cure := array_inside(array):
            hint = f"; pass {cure}" if role == "gradient" else f"; store {cure}"
        if is_masked(array):
            hint = "; pass x.filled(0)" if role == "gradient" else "; pass x.data"
        raise TypeError(
            f"{context}: {role} must be a NumPy array, got {type(array).__name__}{hint}"
        )


def _check_writeable(context: str, role: str, array: Array) -> None:
    """Raise ValueError if `array` is read-only, or broadcast (elements share an address)."""
    if not array.flags.writeable:
        raise ValueError(
            f"{context}: {role} is read-only, an update writes to it: "
            "copy it with np.array(x) and keep the copy"
        )
    if array.size and any(
        length > 1 and stride == 0
        for length, stride in zip(array.shape, array.strides, strict=True)
    ):
        raise ValueError(
            f"{context}: elements of {role} share an address (strides {array.strides}), an update "
            "writes to each"
        )


def check_together(context: str, arrays: dict[str, Any]) -> None:
    """Raise ValueError unless the named arrays are all on the host or all on one device."""
    (first, one), *others = arrays.items()
    for other, array in others:
        if device_of(array) != device_of(one):
            devices = [device_of(side) or "the host" for side in (one, array)]
            raise ValueError(f"{context}: {first} is on {devices[0]}, {other} on {devices[1]}")


def roles_of(rule: Rule, exact: Sequence[Any], arrays: Sequence[Any]) -> list[tuple[str, Any]]:
    """Return the arrays that an update writes to, after the names that errors use."""
    names = [*("weight", "its copy or remainder")[: len(exact)]]
    names += [f"state {slot!r}" for slot in rule.slots]
    codes = zip(rule.state, arrays, strict=False)
    names += [f"scales of state {slot!r}" for slot, array in codes if is_coded(array)]
    return list(zip(names, (*exact, *arrays), strict=True))


def check_apart(context: str, arrays: dict[str, Any]) -> None:
    """Raise ValueError if two of the named arrays share memory."""
    for (one, first), (other, second) in combinations(arrays.items(), 2):
        if np.may_share_memory(first, second) and np.shares_memory(first, second):
            cure = "; pass a copy of the gradient" if other == "gradient" else ""
            cure = "; replace one by a copy" if "state" in other else cure
            raise ValueError(f"{context}: {one} and {other} share memory{cure}")


def leaves(state: object) -> tuple[Any, ...]:
    """Return the arrays of a nested state in order; None stands for an unused slot."""
    if state is None:
        return ()
    if not isinstance(state, (tuple, list)):
        return (state,)
    arrays: list[Any] = []
    for part in state:
        if isinstance(part, np.ndarray):
            arrays.append(part)
        else:
            arrays.extend(leaves(part))
    return tuple(arrays)


def mapped(change: Callable[..., Any], *states: Any) -> Any:
    """Return a nested state like the first one, with ``change`` of the arrays of all states."""
    first = states[0]
    if isinstance(first, np.ndarray) or is_cuda(first):
        return change(*states)
    if isinstance(first, Mapping):
        return {key: mapped(change, *(state[key] for state in states)) for key in first}
    if isinstance(first, (tuple, list)):
        return type(first)([mapped(change, *parts) for parts in zip(*states, strict=True)])
    return first


def check_state(
    context: str,
    rule: Rule,
    like: Array,
    dtypes: Sequence[str],
    arrays: tuple[Any, ...],
    scales: tuple[Any, ...] = (),
) -> None:
    """Check the arrays of a state against the slots of `rule`.

    `like` is the weight in the dtype of the arithmetic, `dtypes` are the dtypes allowed besides
    8-bit codes, and `scales` are the scales of the arrays of codes.

    Raises
    ------
    TypeError
        A part of the state is not an array, or its dtype is not allowed.
    ValueError
        The number of arrays differs from the number of slots; an array is read-only or does not
        have the expected shape (the weight's; ``(rows, 1)`` for numbers of rows; ``()`` for a
        number kept for the tensor); or a row rule is used with a weight that is not
        two-dimensional.
    """
    if len(arrays) != len(rule.slots):
        raise ValueError(
            f"{context}: rule {rule.name} needs {len(rule.slots)} state arrays "
            f"{rule.slots}, got {len(arrays)}; {OF_OTHER_SETTINGS}"
        )
    if rule.row and like.ndim != 2:
        raise ValueError(
            f"{context}: rule {rule.name} works on rows and needs a weight of two "
            f"dimensions, got shape {like.shape}"
        )
    for (slot, shape), array in zip(rule.shapes(like.shape), arrays, strict=False):
        allowed = (*dtypes, rule.codes[slot]) if is_coded(array) and slot in rule.codes else dtypes
        check_like(context, f"state {slot!r}", array, allowed, shape, hint=OF_ONE)
    for slot, array in zip(rule.kept, arrays[len(rule.state) :], strict=True):
        check_like(context, f"state {slot!r}", array, dtypes[:1], (), hint=OF_ONE)
    coded = [slot for slot, array in zip(rule.state, arrays, strict=False) if is_coded(array)]
    if len(coded) != len(scales):
        raise ValueError(f"{context}: state {coded[-1]!r} has codes without scales")
    for slot, array in zip(coded, scales, strict=True):
        check_like(
            context, f"scales of state {slot!r}", array, dtypes[:1], scales_shape(like.shape)
        )
    if coded and any(array.dtype.name == "bfloat16" for array in arrays):
        raise TypeError(f"{context}: state slots are in bfloat16 and in 8 bits, use one of them")


@cache
def _name(dtype: np.dtype[Any]) -> str:
    """Return ``dtype.name``, cached because NumPy recomputes it on each access."""
    return dtype.name


def check_like(
    context: str,
    role: str,
    array: Array,
    dtypes: Sequence[str],
    shape: tuple[int, ...],
    written: bool = True,
    hint: str = "",
) -> None:
    """Raise unless `array` is a NumPy array of one of these dtypes and this shape.

    If `written`, it must also be writeable. Errors about dtype and shape end in `hint`.
    """
    _check_array(context, role, array, np.ndarray)
    must = f"{context}: {role} must have"
    if _name(array.dtype) not in dtypes or not array.dtype.isnative:
        raise TypeError(f"{must} dtype {_either(dtypes)}, got {array.dtype}{hint}")
    if array.shape != shape:
        raise ValueError(f"{must} shape {shape}, got {array.shape}{hint}")
    if written:
        _check_writeable(context, role, array)


def is_fixed(state: object) -> bool:
    """Whether no array of a state can be replaced, as the state contains no lists."""
    return not isinstance(state, list) and (
        not isinstance(state, tuple) or all(map(is_fixed, state))
    )


def is_half(array: Array) -> bool:
    """Whether an array has a half-precision dtype."""
    return array.dtype.itemsize == 2 and array.dtype.name in HALVES


def order_of(weight: Array, rule: Rule | None = None) -> Literal["C", "F"]:
    """Return the memory order for the state of `weight` under a rule.

    It is that of the weight, unless positions matter to the rule: those are positions in C order.
    """
    free = rule is None or (rule.elementwise and not rule.noise)
    return "F" if free and is_fortran(weight) else "C"


def is_fortran(array: Array) -> bool:
    """Whether an array is Fortran-contiguous and not C-contiguous."""
    return array.flags.f_contiguous and not array.flags.c_contiguous
