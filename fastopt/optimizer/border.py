"""What an update must be given: checked once, before anything changes."""

from collections.abc import Sequence
from itertools import combinations
from operator import is_
from typing import Any, Literal

import numpy as np

from fastopt.kernels.device_memory import contiguous
from fastopt.kernels.devices import Header, device_of, header
from fastopt.kernels.layout import SPLIT, Layout, kind_of, real_of
from fastopt.kernels.rule import Rule
from fastopt.kernels.table import Table
from fastopt.sparse import HALVES, REALS, RowSparse, as_row_sparse, is_row_sparse

__all__ = [
    "Array",
    "admit",
    "as_lists",
    "check",
    "check_index",
    "check_like",
    "check_state",
    "described",
    "is_fixed",
    "is_half",
    "label",
    "leaves",
    "listed",
    "order_of",
]

Array = np.ndarray[Any, Any]


def label(index: Any, names: dict[Any, str]) -> str:
    """Words that name a parameter in an error message."""
    name = names.get(index)
    return f"index {index!r}" if name is None else f"index {index!r} ({name})"


def check_index(index: Any) -> int | str:
    """Return `index` as a dictionary key; bytes are decoded.

    Raises
    ------
    TypeError
        `index` is not an int, str or bytes.
    """
    if isinstance(index, (int, str)):
        return index
    if isinstance(index, bytes):
        return index.decode()
    if isinstance(index, np.integer):
        return int(index)
    got = type(index).__name__
    raise TypeError(f"index must be an int, str or bytes, or a list of them, got {got}")


def as_lists(indices: Any, grads: Any, weights: Any) -> tuple[list[Any], list[Any], list[Any]]:
    """Lists of our own: what is in them stays alive, whatever others do to the caller's."""
    for role, given in (("gradients", grads), ("weights", weights)):
        if not isinstance(given, (list, tuple)) or len(given) != len(indices):
            got = f"{len(given)}" if isinstance(given, (list, tuple)) else type(given).__name__
            words = f"a list of {len(indices)} indices needs a list of as many {role}"
            raise TypeError(f"{words}, got {got}")
    return list(indices), list(grads), list(weights)


def check(words: str, weight: Any, grad: Any, copy: Any = None) -> Any:
    """Check weight and gradient of one update; return the gradient.

    Parameters
    ----------
    words : str
        Words for the parameter.
    weight, grad : numpy.ndarray
        The gradient may list rows, in any form that :func:`fastopt.sparse.as_row_sparse` takes.
    copy : numpy.ndarray, optional
        Half-precision copy of the weight.

    Returns
    -------
    numpy.ndarray or RowSparse
        The gradient.

    Raises
    ------
    TypeError
        `weight` or `grad` is not a NumPy array, or of a dtype that does not fit.
    ValueError
        The shapes differ, `weight` is read-only, or the two share memory.
    """
    weight = described(words, "weight", weight)
    _check_array(words, "weight", weight, np.ndarray)
    if kind_of(weight.dtype) is None:
        raise TypeError(f"{words}: weight must be {_either(REALS)}, got {weight.dtype}")
    _check_writeable(words, "weight", weight)
    values = grad
    if is_row_sparse(grad):
        grad = listed(words, grad, weight.shape)
        values = header(grad.values)
    elif isinstance(grad, (tuple, list)) or hasattr(grad, "tocsr"):
        raise TypeError(
            f"{words}: gradient must be a NumPy array, or list rows: a RowSparse, a pair (values, "
            "indices) of arrays, or a scipy.sparse array in CSR or COO format, got "
            f"{type(grad).__name__}"
        )
    else:
        values = described(words, "gradient", grad)
        _check_array(words, "gradient", values, (np.ndarray, np.generic))
    if values.dtype != weight.dtype:
        takes = [weight.dtype.name] + ["float32"] * is_half(weight)
        takes += [] if copy is None else [header(copy).dtype.name]
        if values.dtype.name not in takes or not values.dtype.isnative:
            words = f"{words}: gradient must have the weight's dtype"
            raise TypeError(f"{words} {_either(takes)}, got {values.dtype}")
    shape = grad.shape if isinstance(grad, RowSparse) else values.shape
    if shape != weight.shape:
        raise ValueError(f"{words}: gradient must have shape {weight.shape}, got {shape}")
    check_together(words, {"weight": weight, "gradient": values})
    _check_apart(words, {"weight": weight, "gradient": values})
    return grad


def described(words: str, role: str, array: Any) -> Any:
    """Header of an array on a device; errors name the parameter."""
    try:
        return header(array)
    except TypeError as error:
        raise TypeError(f"{words}: {role}: {error}") from error


def _either(names: Sequence[str]) -> str:
    return " or ".join(names)


def listed(words: str, grad: Any, shape: tuple[int, ...]) -> RowSparse:
    """Return `grad` as a RowSparse; errors name the parameter."""
    try:
        return as_row_sparse(grad, shape)
    except (TypeError, ValueError) as error:
        raise type(error)(f"{words}: {error}") from None


def _check_array(words: str, role: str, array: Any, kind: Any) -> None:
    """Raise TypeError unless `array` is of this kind, and not masked."""
    if not isinstance(array, kind) or isinstance(array, np.ma.MaskedArray):
        raise TypeError(f"{words}: {role} must be a NumPy array, got {type(array).__name__}")


def _check_writeable(words: str, role: str, array: Array) -> None:
    """Raise ValueError if `array` is read-only."""
    if not array.flags.writeable:
        raise ValueError(f"{words}: {role} is read-only, an update writes to it")


def check_together(words: str, arrays: dict[str, Any]) -> None:
    """Raise ValueError unless the named arrays are all in main memory or all on one device."""
    (first, one), *others = arrays.items()
    for other, array in others:
        if device_of(array) != device_of(one):
            places = [device_of(each) or "in main memory" for each in (one, array)]
            told = [place if isinstance(place, str) else f"on {place}" for place in places]
            raise ValueError(f"{words}: {first} is {told[0]}, {other} {told[1]}")


def _check_apart(words: str, arrays: dict[str, Any]) -> None:
    """Raise ValueError if two of the named arrays share memory."""
    for (one, first), (other, second) in combinations(arrays.items(), 2):
        if np.may_share_memory(first, second) and np.shares_memory(first, second):
            raise ValueError(f"{words}: {one} and {other} share memory")


def leaves(state: Any) -> tuple[Any, ...]:
    """Arrays of a nested state in order; None stands for a slot that is not used."""
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


def check_state(words: str, rule: Rule, like: Array, dtypes: Any, arrays: tuple[Any, ...]) -> None:
    """Check the arrays of a state against the slots of `rule`.

    `like` is the weight in the precision of the arithmetic, and `dtypes` the dtypes that the arrays
    may have.

    Raises
    ------
    TypeError
        A part of the state is not an array of such a dtype.
    ValueError
        The state has another number of arrays than the rule has slots, an array does not have
        the weight's shape (one number for each row under a row rule), or is read-only; a row
        rule meets a weight that does not have two dimensions.
    """
    if len(arrays) != len(rule.state):
        raise ValueError(
            f"{words}: rule {rule.name} needs {len(rule.state)} state arrays "
            f"{rule.state}, got {len(arrays)}"
        )
    if rule.row and like.ndim != 2:
        raise ValueError(
            f"{words}: rule {rule.name} works on rows and needs a weight of two "
            f"dimensions, got shape {like.shape}"
        )
    shape = (len(like), 1) if rule.row else like.shape
    for slot, array in zip(rule.state, arrays, strict=True):
        check_like(words, f"state {slot!r}", array, dtypes, shape)


def check_like(
    words: str, role: str, array: Any, dtypes: Any, shape: tuple[int, ...], written: bool = True
) -> None:
    """Raise unless `array` is a NumPy array of one of these dtypes and this shape.

    If it is `written` to, it must be writeable.
    """
    _check_array(words, role, array, np.ndarray)
    if array.dtype.name not in dtypes or not array.dtype.isnative:
        raise TypeError(f"{words}: {role} must have dtype {_either(dtypes)}, got {array.dtype}")
    if array.shape != shape:
        raise ValueError(f"{words}: {role} must have shape {shape}, got {array.shape}")
    if written:
        _check_writeable(words, role, array)


def admit(
    words: str,
    rule: Rule,
    weight: tuple[Array, ...],
    grad: Any,
    state: tuple[Array, ...],
    lead: Any = None,
    **options: bool,
) -> Table:
    """Make a table of one tensor from arrays that are known to fit.

    Parameters
    ----------
    words : str
        Words for the parameter.
    rule : Rule
        What updates it.
    weight : tuple of numpy.ndarray
        The exact weight, and its copy or its remainder if there is one.
    grad : numpy.ndarray or RowSparse
        The gradient.
    state : tuple of numpy.ndarray
        One array for each slot of the rule.
    lead : numpy.ndarray, optional
        The array whose stream is worked on, on a device. Default: the exact weight.
    **options
        Further fields of the layout.

    Raises
    ------
    ValueError
        Arrays share memory.
    """
    roles = ("weight", "its copy or remainder")[: len(weight)]
    sparse = isinstance(grad, RowSparse)
    values = header(grad.values if isinstance(grad, RowSparse) else grad)
    values = values if isinstance(values, np.ndarray) else np.asarray(values)
    arrays = (*weight, *state, values)
    named = {"weight": weight[0], "gradient": values, **dict(zip(roles, weight, strict=True))}
    slots = (f"state {slot!r}" for slot in rule.state)
    named |= dict(zip(slots, state, strict=True))
    check_together(words, named)
    _check_apart(words, named)
    given = (lambda _: ()) if sparse else (lambda arrays: arrays[-1:])
    parts = len(weight)
    kinds = [kind_of(array.dtype) for array in arrays]
    layout = Layout(
        rule,
        real_of(arrays[0].dtype),
        tuple(kinds[:parts]) if arrays[parts - 1].dtype != np.uint16 else SPLIT,
        kinds[-1],
        tuple(kinds[parts:-1]),
        sparse=sparse,
        **options,
    )
    turned = rule.elementwise and not (sparse or layout.keyed) and _fortran(weight[0])
    if turned and all(array.flags.f_contiguous for array in arrays[:-1]):
        # No draw belongs to a place: any common order will do, and transposed it is contiguous.
        arrays = tuple(array.T for array in arrays)
    table: Table
    if isinstance(values, Header):
        lead = weight[0] if lead is None else lead
        return _on_device(layout, arrays, (*weight, *state), sparse, parts, lead)
    if all(type(array) is np.ndarray for array in arrays[:-1]):
        table = Table(layout, arrays[:parts], arrays[parts:-1], arrays[-1])
        if table.take(*given(arrays)) < 0:
            table.direct = arrays[0] is weight[0]
            if values is not grad and not sparse:
                table.listed = (values,)  # alive until the launch
            return table
    copies = tuple(np.require(array, None, ("C", "A", "E")) for array in arrays)
    table = Table(layout, copies[:parts], copies[parts:-1], copies[-1])
    table.of_copies(arrays[:-1], arrays[-1], copies[-1])
    table.direct = all(map(is_, copies[:-1], (*weight, *state)))
    taken = table.take(*given(copies))
    assert taken < 0
    return table


def _on_device(
    layout: Layout,
    arrays: Sequence[Any],
    watched: Sequence[Any],
    sparse: bool,
    parts: int,
    lead: Any,
) -> Table:
    """Table of arrays on a CUDA device, and of contiguous copies where they need them."""
    from fastopt.kernels.cuda_table import CudaTable

    streams = [lead.stream] * (len(arrays) - 1) + [arrays[-1].stream]
    copies = tuple(map(contiguous, arrays, streams))
    table = CudaTable(layout, copies[:parts], copies[parts:-1], copies[-1])
    table.of_copies(arrays[:-1], arrays[-1], copies[-1])
    table.direct = all(map(is_, copies[:-1], watched))
    table.leads = [lead]
    table.watch(watched)
    taken = table.take(*(() if sparse else copies[-1:]))
    assert taken < 0
    return table


def is_fixed(state: Any) -> bool:
    """Whether no part of a state can be replaced by another array: it has no lists."""
    return not isinstance(state, list) and (
        not isinstance(state, tuple) or all(map(is_fixed, state))
    )


def is_half(array: Array) -> bool:
    """Whether an array is of half precision."""
    return array.dtype.itemsize == 2 and array.dtype.name in HALVES


def order_of(weight: Array) -> Literal["C", "F"]:
    """Order of elements in which a state goes best with `weight`."""
    return "F" if _fortran(weight) else "C"


def _fortran(array: Array) -> bool:
    return array.flags.f_contiguous and not array.flags.c_contiguous
