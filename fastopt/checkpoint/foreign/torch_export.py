"""Export of states in the format of torch's optimizers, with NumPy arrays instead of tensors."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from fastopt._engine.validate import label, leaves
from fastopt._interrupts import between_updates
from fastopt._kernels.codes import numbers_of
from fastopt.checkpoint.foreign.torch_forms import FORMS, Form, plain
from fastopt.checkpoint.restore.describe import Stateful, check_updater
from fastopt.optimizer.optimizer import Index, Optimizer


def to_torch_state_dict(
    updater: Stateful, indices: Sequence[Index] | None = None
) -> dict[str, Any]:
    """Return a dict like ``state_dict()`` of the corresponding torch optimizer.

    With ``formula="torch"``, torch continues with the same formula; the page about checkpoints
    lists the differences of other formulas. Clipping, rescaling and schedules are not part of
    torch's optimizers and are not exported; the learning rate is the current one.

    Parameters
    ----------
    updater : Updater
        Updater with an optimizer of class SGD, NAG, Adam, AdamW, AdaGrad, RMSProp, AdaDelta,
        Adamax, Nadam or Muon.
    indices : sequence of int or str, optional
        The updater's indices, in the order of torch's parameters. Default: all indices with a
        state, which must be integers, in increasing order.

    Returns
    -------
    dict
        State dict with copies of the arrays. Parameters with equal learning rate and weight decay
        are in one group.

    Raises
    ------
    TypeError
        `updater` is not an updater.
    ValueError
        torch has no such optimizer, or does not support its arguments.
    RuntimeError
        The call comes from inside an update, for example from a signal handler.

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
    check_updater(updater)
    optimizer = updater.optimizer
    form = _form_of(optimizer)
    if indices is None:
        indices = sorted(updater.states, key=_integer)
    groups: dict[tuple[float, float], dict[str, Any]] = {}
    state: dict[int, dict[str, Any]] = {}
    with between_updates(optimizer.call_lock, "to_torch_state_dict()"):
        for position, index in enumerate(indices):
            rates = optimizer._get_lr(index), optimizer._get_wd(index)
            group = groups.setdefault(rates, _group(form, optimizer, *rates))
            group["params"].append(position)
            if index in updater.states and form.slots:
                state[position] = _to_torch(form, updater, index, rates[0])
    return {"state": state, "param_groups": list(groups.values())}


def _integer(index: Index) -> int:
    if isinstance(index, str):
        raise ValueError(f"the order of index {index!r} is not known, give `indices`")
    return index


def _form_of(optimizer: Optimizer) -> Form:
    name = type(optimizer).__name__
    forms = FORMS.get(name, ())
    own, variants = vars(optimizer), plain(optimizer)
    if forms and (on := [name for name in variants if own[name]]):
        raise ValueError(f"torch has no {name} with {' and '.join(on)}")
    for form in forms:
        if all(getattr(optimizer, key) == value for key, value in form.when.items()):
            return form
    known = " or ".join(str(dict(form.when)) for form in forms)
    raise ValueError(f"torch has no {name}" + (f" unless it has {known}" if forms else ""))


def _group(form: Form, optimizer: Optimizer, lr: float, wd: float) -> dict[str, Any]:
    """Torch's parameter group, without parameters."""
    group = {"lr": lr, "weight_decay": wd, "maximize": optimizer.maximize}
    group |= {**form.free, **form.fixed}
    if group["weight_decay"] != wd:
        raise ValueError(f"torch's {form.torch} decays otherwise: wd must be 0, got {wd}")
    for name, option in form.options.items():
        group[name] = option.to_torch(*(getattr(optimizer, key) for key in option.attributes))
    return {**group, "params": []}


def _to_torch(form: Form, updater: Stateful, index: Index, lr: float) -> dict[str, Any]:
    """State of one parameter in torch's format."""
    optimizer = updater.optimizer
    arrays = numbers_of(leaves(updater.states[index]))
    context = label(index, optimizer.idx2name)
    if len(arrays) != len(form.slots):
        raise ValueError(f"{context}: torch keeps {form.slots}, the state has {len(arrays)} arrays")
    entries: dict[str, Any] = {}
    if form.counted:
        count = optimizer._index_update_count.get(index, optimizer.begin_num_update)
        entries["step"] = np.array(count, np.float32)
    if form.torch == "NAdam":
        product = vars(optimizer)["_m_schedules"].get(index, 1.0)
        entries["mu_product"] = np.array(product)
    for slot, array in zip(form.slots, arrays, strict=True):
        if slot != form.with_rate:
            entries[slot] = array.copy()
        elif lr == 0:
            raise ValueError(f"{context}: the momentum cannot be divided by a rate of 0")
        else:
            entries[slot] = np.asarray(array / -lr)
    return entries
