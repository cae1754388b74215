"""Half-precision weights: float32 masters, half-precision copies, and their slots in the state."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from fastopt._engine.contract import OptimizerLike
from fastopt._engine.per_index import Index
from fastopt._engine.validate import check_like, check_state, is_half, label, leaves, order_of
from fastopt._kernels.codes import split_scales
from fastopt._kernels.device_memory import assign, host, placed
from fastopt._kernels.devices import header
from fastopt._kernels.layout import SPLIT, Layout, real_of, state_kind
from fastopt._kernels.weights import parts
from fastopt.kernels.rule import Rule
from fastopt.sparse import HALVES, RowSparse

Array = np.ndarray[Any, Any]


def has_master(optimizer: OptimizerLike, weight: Array) -> bool:
    """Whether a weight has a float32 master."""
    return bool(optimizer.multi_precision) and is_half(weight)


def check_copy(context: str, weight: Array, copy: Array) -> None:
    """Raise TypeError or ValueError unless `copy` can be the half-precision copy of `weight`."""
    if weight.dtype != np.float32:
        raise TypeError(f"{context}: only a float32 weight has a copy, got {weight.dtype}")
    check_like(context, "copy", copy, HALVES, weight.shape)


def state_with_master(optimizer: OptimizerLike, index: Index, weight: Array) -> Any:
    """Create the state of a half-precision weight, with its master or the master's low 16 bits."""
    split, context = optimizer.master == "split", label(index, optimizer.idx2name)
    if split and weight.dtype.name != "bfloat16":
        raise TypeError(f"{context}: master='split' needs a bfloat16 weight, got {weight.dtype}")
    start = optimizer.masters_given.get(index)
    start = host(weight) if start is None else start
    check_like(context, "master", start, (*HALVES, "float32"), weight.shape)
    exact = np.asarray(start, np.float32, order=order_of(weight, optimizer.rule_for(index)))
    master = placed(exact, weight)
    inner = optimizer.create_state(index, master)
    if split:
        rounded, low_bits = parts(exact)
        assign(weight, rounded.view(weight.dtype))
        master = placed(low_bits, weight)
    return (inner, master) if optimizer.master_last else (master, inner)


def split_state(
    optimizer: OptimizerLike, context: str, weight: Array, state: object
) -> tuple[tuple[Array, ...], Any]:
    """Return ``((master, weight), inner)``, or ``((weight, low bits), inner)`` if split."""
    if not isinstance(state, (tuple, list)) or len(state) != 2:
        raise ValueError(
            f"{context}: the state of a weight with a master must be a pair of master and state, "
            f"got {type(state).__name__}"
        )
    inner, master = state if optimizer.master_last else state[::-1]
    master = header(master)
    check_like(context, "master", master, ("float32", "uint16"), weight.shape)
    if master.dtype == np.float32:
        return (master, weight), inner
    if weight.dtype.name != "bfloat16":
        raise TypeError(f"{context}: only a bfloat16 weight has a split master")
    return (weight, master), inner


def arrays_of(
    optimizer: OptimizerLike,
    context: str,
    rule: Rule,
    weight: Array,
    state: object,
    copy: Array | None,
    masters: bool,
) -> tuple[tuple[Array, ...], tuple[Array, ...]]:
    """Return the exact weight with its copy or low bits, and the checked arrays of the state.

    The scales of 8-bit codes follow all other arrays of the state.
    """
    exact: tuple[Array, ...] = (weight,)
    if copy is not None:
        copy = header(copy)
        check_copy(context, weight, copy)
        exact = (weight, copy)
    if masters and has_master(optimizer, weight):
        exact, state = split_state(optimizer, context, weight, state)
    arrays = tuple(map(header, leaves(state)))
    arrays, scales = map(tuple, split_scales(arrays))
    dtypes = np.dtype(real_of(weight.dtype)).name, "bfloat16"
    check_state(context, rule, weight, dtypes, arrays, scales)
    return exact, (*arrays, *scales)


def layout_of(
    rule: Rule,
    exact: Sequence[Array],
    arrays: Sequence[Array],
    grad: Any,
    rounding: str = "nearest",
    copy: Array | None = None,
    **options: bool,
) -> Layout:
    """Return the layout of arrays of :func:`arrays_of`, for gradients of the type `grad`.

    `rounding` is that of the optimizer. `options` are further fields.
    """
    parts, kinds = len(exact), [state_kind(array.dtype) for array in (*exact, *arrays)]
    return Layout(
        rule,
        real_of(exact[0].dtype),
        tuple(kinds[:parts]) if exact[-1].dtype != np.uint16 else SPLIT,
        grad,
        tuple(kinds[parts : parts + len(rule.state)]),
        rounded_sums=rule.rounded and parts == 2 and copy is None,
        dither=rounding == "stochastic" and is_half(exact[0]) and parts == 1,
        **options,
    )


def holds_master(rule: Rule | None, state: object) -> bool:
    """Whether a state is a pair of a master and the slots of `rule`, which may be unknown.

    A rule with two slots has a pair without a master too.
    """
    paired = isinstance(state, (tuple, list)) and len(state) == 2
    if not paired or rule is None:
        return paired
    return len(split_scales(leaves(state))[0]) == len(rule.slots) + 1


def set_master(optimizer: OptimizerLike, index: Index, array: Array, state: Any) -> None:
    """See :meth:`Updater.set_master <fastopt.optimizer.Updater.set_master>`."""
    context, array = label(index, optimizer.idx2name), host(array)
    if not optimizer.multi_precision:
        raise ValueError(f"{context}: a master needs an optimizer with multi_precision=True")
    check_like(context, "master", array, ("float32",), np.shape(array), written=False)
    if state is None:
        optimizer.masters_given[index] = array.copy()
        return
    if optimizer.master == "split" or not holds_master(optimizer.rule_for(index), state):
        raise ValueError(
            f"{context}: a split or missing master cannot be set after the first update"
        )
    held = header(state[optimizer.master_last])
    check_like(context, "master", array, (held.dtype.name,), held.shape, written=False)
    assign(held, array)


@np.errstate(all="ignore")
def round_into(target: Array, exact: Array) -> None:
    """Write `exact`, rounded; values out of range become infinite without a warning."""
    target[...] = exact


def to_float32(grad: Array | RowSparse) -> Any:
    """Return the gradient in float32."""
    return grad.astype(np.float32) if isinstance(grad, RowSparse) else np.asarray(grad, np.float32)
