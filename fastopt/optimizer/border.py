"""What an update must be given: checked once, before anything changes."""

from itertools import combinations
from typing import Any, Literal

import numpy as np

from fastopt.kernels.rule import Rule
from fastopt.kernels.table import Tensor

__all__ = ["Array", "admit", "check", "check_index", "check_state", "label", "leaves", "order_of"]

Array = np.ndarray[Any, Any]
REAL = (np.dtype(np.float32), np.dtype(np.float64))


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
    if isinstance(index, bytes):
        return index.decode()
    if not isinstance(index, (int, str, np.integer)):
        raise TypeError(
            f"index must be an int, str or bytes, or a list of them, got {type(index).__name__}"
        )
    return index if isinstance(index, (int, str)) else int(index)


def check(index: Any, names: dict[Any, str], weight: Any, grad: Any) -> None:
    """Check the arrays of one update.

    Raises
    ------
    TypeError
        `weight` or `grad` is not a NumPy array, or their dtypes are not the same float32 or
        float64.
    ValueError
        The shapes differ, `weight` is read-only, or the two share memory.
    """
    words = label(index, names)
    _check_array(words, "weight", weight, np.ndarray)
    if weight.dtype not in REAL:
        raise TypeError(f"{words}: weight must be float32 or float64, got {weight.dtype}")
    _check_writeable(words, "weight", weight)
    _check_like(words, "gradient", grad, weight.dtype, weight.shape)
    _check_apart(words, {"weight": weight, "gradient": grad})


def _check_array(words: str, role: str, array: Any, kind: Any) -> None:
    """Raise TypeError unless `array` is of this kind, and not masked."""
    if not isinstance(array, kind) or isinstance(array, np.ma.MaskedArray):
        raise TypeError(f"{words}: {role} must be a NumPy array, got {type(array).__name__}")


def _check_writeable(words: str, role: str, array: Array) -> None:
    """Raise ValueError if `array` is read-only."""
    if not array.flags.writeable:
        raise ValueError(f"{words}: {role} is read-only, an update writes to it")


def _check_like(
    words: str, role: str, array: Any, dtype: np.dtype[Any], shape: tuple[int, ...]
) -> None:
    """Raise unless `array` is a NumPy array (or scalar) of this dtype and shape."""
    _check_array(words, role, array, (np.ndarray, np.generic))
    if array.dtype != dtype:
        raise TypeError(f"{words}: {role} must have the weight's dtype {dtype}, got {array.dtype}")
    if array.shape != shape:
        raise ValueError(f"{words}: {role} must have shape {shape}, got {array.shape}")


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


def check_state(
    index: Any, names: dict[Any, str], rule: Rule, weight: Array, arrays: tuple[Any, ...]
) -> None:
    """Check the arrays of a state against the slots of `rule`.

    Raises
    ------
    TypeError
        A part of the state is not an array of the weight's dtype.
    ValueError
        The state has another number of arrays than the rule has slots, an array does not have
        the weight's shape (one number for each row under a row rule), or is read-only; a row
        rule meets a weight that does not have two dimensions.
    """
    if len(arrays) != len(rule.state):
        raise ValueError(
            f"{label(index, names)}: rule {rule.name} needs {len(rule.state)} state arrays "
            f"{rule.state}, got {len(arrays)}"
        )
    if rule.row and weight.ndim != 2:
        raise ValueError(
            f"{label(index, names)}: rule {rule.name} works on rows and needs a weight of two "
            f"dimensions, got shape {weight.shape}"
        )
    shape = (len(weight), 1) if rule.row else weight.shape
    for slot, array in zip(rule.state, arrays, strict=True):
        words, role = label(index, names), f"state {slot!r}"
        _check_like(words, role, array, weight.dtype, shape)
        _check_writeable(words, role, array)


def admit(
    index: Any, names: dict[Any, str], rule: Rule, weight: Any, grad: Any, state: Any
) -> Tensor:
    """Make a tensor of a weight, its gradient and its state, once they are known to fit `rule`.

    Raises
    ------
    TypeError, ValueError
        As :func:`check` and :func:`check_state` do.
    """
    check(index, names, weight, grad)
    arrays = leaves(state)
    check_state(index, names, rule, weight, arrays)
    roles = ("weight", "gradient", *(f"state {slot!r}" for slot in rule.state))
    _check_apart(label(index, names), dict(zip(roles, (weight, grad, *arrays), strict=True)))
    grad = np.asarray(grad)
    if rule.elementwise and _fortran(weight) and all(a.flags.f_contiguous for a in arrays):
        # The elements may come in any common order, and the transposed arrays are contiguous.
        weight, grad, arrays = weight.T, grad.T, tuple(array.T for array in arrays)
    tensor = Tensor(rule, weight, arrays)
    if type(weight) is np.ndarray and tensor.take(grad):
        return tensor
    return Tensor.of_copies(rule, weight, grad, arrays)


def order_of(weight: Array) -> Literal["C", "F"]:
    """Order of elements in which a state goes best with `weight`."""
    return "F" if _fortran(weight) else "C"


def _fortran(array: Array) -> bool:
    return array.flags.f_contiguous and not array.flags.c_contiguous
