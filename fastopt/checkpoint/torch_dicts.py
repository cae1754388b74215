"""Dicts like those of torch.optim, with NumPy arrays in place of tensors."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from fastopt.arguments import number
from fastopt.checkpoint.container import Array
from fastopt.checkpoint.describe import Stateful, describe
from fastopt.checkpoint.errors import CheckpointError
from fastopt.checkpoint.parameters import Skipped, keys_of, names_of
from fastopt.checkpoint.restore import restore
from fastopt.checkpoint.torch_forms import FORMS, Form
from fastopt.optimizer.base import Index, Optimizer
from fastopt.optimizer.border import label, leaves

__all__ = ["from_torch_state_dict", "to_torch_state_dict"]


def to_torch_state_dict(
    updater: Stateful, indices: Sequence[Index] | None = None
) -> dict[str, Any]:
    """Return what ``state_dict()`` of the corresponding optimizer of torch would.

    Where the formulas of the two differ is told on the page about checkpoints. Clipping, rescaling
    and the schedule are no part of torch's optimizers: the present rate is given.

    Parameters
    ----------
    updater : Updater
        With an optimizer of class SGD, NAG, Adam, AdamW, AdaGrad, RMSProp, AdaDelta, Adamax or
        Nadam.
    indices : sequence of int or str, optional
        The updater's indices in the order of torch's parameters. Default: all that have a state,
        which must be integers, in increasing order.

    Returns
    -------
    dict
        With copies of the arrays. Parameters of equal rate and decay are in one group.

    Raises
    ------
    ValueError
        torch has no such optimizer, or not with these arguments.

    Examples
    --------
    >>> import numpy as np
    >>> from fastopt import optimizer
    >>> from fastopt.checkpoint import to_torch_state_dict
    >>> updater = optimizer.get_updater(optimizer.SGD(learning_rate=0.5, momentum=0.9))
    >>> updater(0, np.array([1.0, -2.0]), np.ones(2))
    >>> to_torch_state_dict(updater)["state"]
    {0: {'momentum_buffer': array([ 1., -2.])}}
    """
    optimizer = updater.optimizer
    form = _form_of(optimizer)
    if indices is None:
        indices = sorted(updater.states, key=_integer)
    groups: dict[tuple[float, float], dict[str, Any]] = {}
    state: dict[int, dict[str, Any]] = {}
    with optimizer.lock:
        for position, index in enumerate(indices):
            rates = optimizer._get_lr(index), optimizer._get_wd(index)
            group = groups.setdefault(rates, _group(form, optimizer, *rates))
            group["params"].append(position)
            if index in updater.states:
                state[position] = _to_torch(form, updater, index, rates[0])
    return {"state": state, "param_groups": list(groups.values())}


def _integer(index: Index) -> int:
    if isinstance(index, str):
        raise ValueError(f"the order of index {index!r} is not known, give `indices`")
    return index


def _form_of(optimizer: Optimizer) -> Form:
    name = type(optimizer).__name__
    forms = FORMS.get(name, ())
    for form in forms:
        if all(getattr(optimizer, key) == value for key, value in form.when.items()):
            return form
    known = " or ".join(str(dict(form.when)) for form in forms)
    raise ValueError(f"torch has no {name}" + (f" unless it has {known}" if forms else ""))


def _group(form: Form, optimizer: Optimizer, lr: float, wd: float) -> dict[str, Any]:
    """Group of torch without parameters."""
    group = {"lr": lr, "weight_decay": wd, **form.free, **form.fixed}
    if group["weight_decay"] != wd:
        raise ValueError(f"torch's {form.torch} decays otherwise: wd must be 0, got {wd}")
    for name, option in form.options.items():
        group[name] = option.to_torch(*(getattr(optimizer, key) for key in option.attributes))
    return {**group, "params": []}


def _to_torch(form: Form, updater: Stateful, index: Index, lr: float) -> dict[str, Any]:
    """State of one parameter."""
    optimizer = updater.optimizer
    arrays = leaves(updater.states[index])
    words = label(index, optimizer.idx2name)
    if len(arrays) != len(form.slots):
        raise ValueError(f"{words}: torch keeps {form.slots}, the state has {len(arrays)} arrays")
    made: dict[str, Any] = {}
    if form.counted:
        made["step"] = np.array(_count(optimizer, index), np.float32)
    if form.torch == "NAdam":
        made["mu_product"] = np.array(vars(optimizer)["_m_schedules"][index], np.float32)
    for slot, array in zip(form.slots, arrays, strict=True):
        if slot != form.with_rate:
            made[slot] = array.copy()
        elif lr == 0:
            raise ValueError(f"{words}: the momentum cannot be divided by a rate of 0")
        else:
            made[slot] = np.asarray(array / -lr)
    return made


def _count(optimizer: Optimizer, index: Index) -> int:
    return optimizer._index_update_count.get(index, optimizer.begin_num_update)


def from_torch_state_dict(
    updater: Stateful,
    state_dict: Mapping[str, Any],
    indices: Sequence[Index] | None = None,
    strict: bool = True,
) -> Skipped:
    """Let `updater` go on from what ``state_dict()`` of the corresponding optimizer of torch said.

    Rates, decays and the other numbers are taken up too; a schedule stays. Groups become
    multipliers of the largest rate and decay. Where the formulas of the two differ is told on the
    page about checkpoints.

    Parameters
    ----------
    updater : Updater
        With an optimizer of a class as for :func:`to_torch_state_dict`.
    state_dict : dict
        With ``state`` and ``param_groups``; arrays are NumPy's, or anything that
        :func:`numpy.array` takes, such as tensors in main memory. They are copied.
    indices : sequence of int or str, optional
        The updater's index of each of torch's parameters, in the order in which torch numbers
        them. Default: torch's numbers.
    strict : bool
        See :meth:`Updater.load <fastopt.Updater.load>`.

    Returns
    -------
    Skipped
        See :meth:`Updater.load <fastopt.Updater.load>`.

    Raises
    ------
    CheckpointError
        It is not such a dict, or has options that the updater's optimizer does not know. Nothing
        changes.

    Examples
    --------
    >>> import numpy as np
    >>> from fastopt import optimizer
    >>> from fastopt.checkpoint import from_torch_state_dict
    >>> group = {"lr": 0.5, "momentum": 0.9, "weight_decay": 0, "params": [0]}
    >>> state = {0: {"momentum_buffer": np.array([1.0, -2.0])}}
    >>> updater = optimizer.get_updater(optimizer.SGD())
    >>> from_torch_state_dict(updater, {"state": state, "param_groups": [group]})
    Skipped(missing=[], extra=[])
    >>> updater.states[0], updater.optimizer.momentum
    (array([-0.5,  1. ]), 0.9)
    """
    try:
        described = _described(updater, state_dict, indices)
    except CheckpointError:
        raise
    except Exception as error:  # whatever else a dict of other origin leads to
        raise CheckpointError(f"not the state_dict of an optimizer of torch: {error!r}") from error
    return restore(updater, described, strict)


def _described(
    updater: Stateful, state_dict: Mapping[str, Any], indices: Sequence[Index] | None
) -> dict[str, Any]:
    """What :func:`restore` takes."""
    optimizer, groups = updater.optimizer, state_dict["param_groups"]
    form = _form_for(type(optimizer).__name__, groups)
    numbers = sorted(position for group in groups for position in group["params"])
    index_of = dict(zip(numbers, numbers if indices is None else indices, strict=True))
    states: dict[Index, Any] = {}
    counts = dict(optimizer._index_update_count)
    products: dict[Index, float] = {}
    for group in groups:
        for position in group["params"]:
            entry, index = _entry(state_dict, position), index_of[position]
            if not entry:
                continue
            states[index] = _from_torch(form, entry, group["lr"])
            counts[index] = int(entry["step"]) if form.counted else _count(optimizer, index)
            products[index] = float(entry.get("mu_product", 1.0))
    attributes = {**optimizer.__getstate__(), **form.when, **_options(form, groups)}
    attributes |= _rates(optimizer, groups, index_of)
    attributes["_index_update_count"] = counts
    attributes["num_update"] = max(optimizer.begin_num_update, *counts.values())
    if form.torch == "NAdam":
        attributes["_m_schedules"] = products
    keys = keys_of(names_of(optimizer), index_of.values())
    return {
        **describe(updater),
        "attributes": attributes,
        "parameters": {key: index for key, index in keys.items() if index in index_of.values()},
        "states": {key: states[index] for key, index in keys.items() if index in states},
    }


def _entry(state_dict: Mapping[str, Any], position: int) -> dict[str, Any]:
    """What torch keeps of a parameter; a momentum that has not begun is None."""
    entry = state_dict["state"].get(position, {})
    return {slot: value for slot, value in entry.items() if value is not None}


def _form_for(name: str, groups: Sequence[Mapping[str, Any]]) -> Form:
    """Form of our class under which all options of the groups have a meaning."""
    reasons = []
    for form in FORMS.get(name, ()):
        lacking = {key for key in form.options for group in groups if key not in group}
        odd = {
            f"{key}={group[key]}"
            for key, value in form.fixed.items()
            for group in groups
            if group.get(key, value) != value
        }
        if not lacking and not odd:
            return form
        reasons.append(f"{form.torch} must have {sorted(lacking)} and cannot have {sorted(odd)}")
    raise CheckpointError(f"{name} cannot go on: {'; or '.join(reasons) or 'torch has no such'}")


def _options(form: Form, groups: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Our attributes for the options of all groups."""
    made: dict[str, float] = {}
    for name, option in form.options.items():
        values = {option.from_torch(group[name]) for group in groups}
        if len(values) > 1:
            raise CheckpointError(f"the groups differ in {name}: {sorted(values)}")
        for attribute, value in zip(option.attributes, *values, strict=True):
            made[attribute] = number(name, value)
    return made


def _rates(
    optimizer: Optimizer, groups: Sequence[Mapping[str, Any]], index_of: Mapping[int, Index]
) -> dict[str, Any]:
    """Rate, decay, and the multipliers that make them those of each group."""
    made: dict[str, Any] = {}
    for option, attribute in (("lr", "lr"), ("weight_decay", "wd")):
        base = max(number(option, group[option]) for group in groups)
        table = {
            index_of[position]: group[option] / base if base else 1.0
            for group in groups
            for position in group["params"]
        }
        multiplier = f"{attribute}_mult"
        for index, factor in table.items():
            if getattr(optimizer.param_dict.get(index), multiplier, factor) != factor:
                raise CheckpointError(f"param_dict[{index!r}].{multiplier} must be {factor}")
        made[attribute] = float(base)
        made[multiplier] = getattr(optimizer, multiplier) | table
    return made


def _from_torch(form: Form, entry: Mapping[str, Any], lr: float) -> Any:
    """State of one parameter in our nesting."""
    arrays: list[Array] = []
    for slot in form.slots:
        if slot != form.with_rate:
            arrays.append(np.array(entry[slot]))
        elif slot in entry:
            arrays.append(np.asarray(np.array(entry[slot]) * -lr))
        else:
            arrays.append(np.zeros_like(arrays[0]))
    if len(arrays) == 1 and not form.in_tuple:
        return arrays[0]
    return tuple(arrays) or None
