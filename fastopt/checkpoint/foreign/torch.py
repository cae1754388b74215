"""State dicts of torch's optimizers, with NumPy arrays instead of tensors, in both directions."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set, Sized
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import numpy as np

from fastopt._engine.newton_schulz import QUINTIC
from fastopt._engine.parameters import Parameters
from fastopt._engine.validate import label, leaves, naming
from fastopt._interrupts import between_updates
from fastopt._kernels.codes import numbers_of
from fastopt.arguments import brief, flag, number
from fastopt.checkpoint.format.container import Array
from fastopt.checkpoint.format.errors import CheckpointError, refusing
from fastopt.checkpoint.restore.describe import Stateful, check_updater, describe, under_keys
from fastopt.checkpoint.restore.parameters import Skipped, keys_of, names_of
from fastopt.checkpoint.restore.restore import restore
from fastopt.kernels.variants import Variant
from fastopt.optimizer.optimizer import Index, Optimizer


class Grouped(Stateful, Protocol):
    """An updater whose parameters may have optimizers of their own."""

    parameters: Parameters


@dataclass(frozen=True)
class Option:
    """One option of torch, and the corresponding attributes of fastopt."""

    attributes: tuple[str, ...]
    to_torch: Callable[..., Any]
    from_torch: Callable[[Any], tuple[Any, ...]]
    default: float | None = None
    """Value for groups without the option; None if groups must have it."""


@dataclass(frozen=True)
class Form:
    """Correspondence between one torch optimizer and one fastopt optimizer."""

    torch: str
    """Name of the class in torch.optim."""

    slots: tuple[str, ...] = ()
    """Torch's names of the state arrays, in fastopt's order."""

    options: Mapping[str, Option] = field(default_factory=dict)

    fixed: Mapping[str, Any] = field(default_factory=dict)
    """Required values of torch's options."""

    when: Mapping[str, Any] = field(default_factory=dict)
    """Required values of fastopt's attributes."""

    with_rate: str | None = None
    """Slot in which fastopt stores torch's array times the negative learning rate."""

    optional: str | None = None
    """Slot that torch stores only with some options."""

    in_tuple: bool = False
    """Whether fastopt stores a single array in a tuple."""

    @property
    def counted(self) -> bool:
        """Whether torch counts the steps of a parameter."""
        return self.torch not in ("SGD", "Muon")

    @property
    def vocabulary(self) -> frozenset[str]:
        """Torch's options that this optimizer has, except learning rate and weight decay."""
        return frozenset((*self.options, *self.fixed))


def same(attribute: str) -> Option:
    """Option with the same value as one attribute."""
    return Option((attribute,), lambda value: value, lambda value: (value,))


def inside_root(attribute: str) -> Option:
    """Epsilon of a square root: torch: sqrt(v) + eps; fastopt: sqrt(v + eps**2)."""
    return Option((attribute,), math.sqrt, lambda value: (value * value,))


BETAS = Option(("beta1", "beta2"), lambda *betas: betas, tuple)
MOMENTS = ("exp_avg", "exp_avg_sq")
MOMENTUM = ("momentum_buffer",)


def plain(optimizer: Optimizer) -> dict[str, bool]:
    """Return values that disable the variants of an optimizer that torch does not have."""
    return {name: False for name in Variant._fields if name in vars(optimizer)}


def of_each_formula(form: Form, eps: Option | None = None, **of_mxnet: Any) -> tuple[Form, ...]:
    """Forms of a class for each value of `formula`, torch's first.

    A state dict of torch matches the first form. With ``formula="mxnet"``, epsilon is `eps` and
    the fields `of_mxnet` differ.
    """
    options = form.options if eps is None else {**form.options, "eps": eps}
    return (
        replace(form, when={**form.when, "formula": "torch"}),
        replace(form, options=options, when={**form.when, "formula": "mxnet"}, **of_mxnet),
    )


def with_amsgrad(name: str, decoupled: bool, when: Mapping[str, Any]) -> Iterator[Form]:
    """Forms of Adam with each formula, without and with AMSGrad."""
    for amsgrad in (False, True):
        yield from of_each_formula(
            Form(
                name,
                (*MOMENTS, "max_exp_avg_sq") if amsgrad else MOMENTS,
                {"betas": BETAS, "eps": same("epsilon")},
                {"amsgrad": amsgrad, "decoupled_weight_decay": decoupled},
                when={**when, "amsgrad": amsgrad},
            )
        )


def rmsprop(
    slots: tuple[str, ...], momentum: str | None, centered: bool, when: Mapping[str, Any]
) -> tuple[Form, ...]:
    """Forms of RMSProp with each formula; `momentum` is the attribute of torch's momentum."""
    options = {"alpha": same("gamma1"), "eps": same("epsilon")}
    fixed: dict[str, Any] = {"centered": centered}
    if momentum is None:
        fixed["momentum"] = 0
    else:
        options["momentum"] = same(momentum)
    return of_each_formula(
        Form(
            "RMSprop",
            slots,
            options,
            fixed,
            when={"centered": centered, "clip_weights": None, **when},
            optional="momentum_buffer" if momentum else None,
            in_tuple=momentum is None,
        ),
        eps=inside_root("epsilon"),
        with_rate="momentum_buffer" if momentum else None,
    )


PLAIN_SGD = Form(
    "SGD",
    (),
    {"momentum": same("momentum")},
    {"momentum": 0, "dampening": 0, "nesterov": False},
    when={"momentum": 0},
)
MOMENTUM_SGD = Form(
    "SGD",
    MOMENTUM,
    {"momentum": same("momentum")},
    {"dampening": 0, "nesterov": False},  # torch does not count, so the first step is lost
    when={"dampening": 0, "decouple": False},
)
SGD = (PLAIN_SGD, *of_each_formula(MOMENTUM_SGD, with_rate="momentum_buffer"))
QUINTIC_STEPS = {"ns_coefficients": QUINTIC[0], "ns_steps": 5}
OUR_STEPS = {"coefficients": "quintic", "steps": 5}
ADJUSTMENTS = (
    ("original", "original"),
    (None, "original"),
    ("match_rms_adamw", "rms"),
    ("spectral_unclamped", "spectral"),
)
SUMS = {
    name: replace(same(name), default=0.0) for name in ("lr_decay", "initial_accumulator_value")
}

FORMS: dict[str, tuple[Form, ...]] = {
    "SGD": SGD,
    "ccSGD": SGD,
    "NAG": (PLAIN_SGD, replace(MOMENTUM_SGD, fixed={"dampening": 0, "nesterov": True}, when={})),
    "Adam": (*with_amsgrad("Adam", False, {}),),
    "AdamW": (*with_amsgrad("AdamW", True, {"correct_bias": True, "eta": None}),),
    "AdaGrad": of_each_formula(
        Form("Adagrad", ("sum",), {"eps": same("float_stable_eps"), **SUMS}),
        eps=inside_root("float_stable_eps"),
        fixed={"weight_decay": 0},
    ),
    "RMSProp": (
        *rmsprop(("square_avg",), None, False, {"momentum": 0}),
        *rmsprop(("square_avg", *MOMENTUM), "momentum", False, {}),
        *rmsprop(("square_avg", "grad_avg", *MOMENTUM), "gamma2", True, {"momentum": 0}),
    ),
    "AdaDelta": (
        Form(
            "Adadelta",
            ("square_avg", "acc_delta"),
            {"rho": same("rho"), "eps": same("epsilon")},
            {"lr": 1, "weight_decay": 0},
        ),
    ),
    "Adamax": (Form("Adamax", ("exp_avg", "exp_inf"), {"betas": BETAS, "eps": same("epsilon")}),),
    "Nadam": tuple(
        Form(
            "NAdam",
            MOMENTS,
            {"betas": BETAS, "eps": same("epsilon"), "momentum_decay": same("schedule_decay")},
            {"decoupled_weight_decay": decouple},
            when={**when, "amsgrad": False, "decouple": decouple},
        )
        for decouple in (False, True)
        for when in ({"formula": "torch"}, {"formula": "mxnet", "per_parameter": True})
    ),
    "Muon": tuple(
        Form(
            "Muon",
            MOMENTUM,
            {"momentum": same("momentum"), "eps": same("eps")},
            {**QUINTIC_STEPS, "nesterov": nesterov, "adjust_lr_fn": name},
            when={**OUR_STEPS, "nesterov": nesterov, "adjust": adjust},
        )
        for name, adjust in ADJUSTMENTS
        for nesterov in (True, False)
    ),
}
"""Forms of each fastopt class; the first match is used."""

VOCABULARY = frozenset().union(*(form.vocabulary for forms in FORMS.values() for form in forms))
VOCABULARY -= {"lr", "weight_decay"}
"""Torch's options that change the result; others concern the implementation, or are the user's."""


MAXIMIZE = replace(same("maximize"), default=False)


def to_torch_state_dict(updater: Grouped, indices: Sequence[Index] | None = None) -> dict[str, Any]:
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
        State dict with copies of the arrays. Parameters with equal options are in one group;
        frozen ones too, as torch does not update parameters without a gradient.

    Raises
    ------
    TypeError
        `updater` is not an updater, or `indices` have no order.
    ValueError
        torch has no such optimizer, or does not support its arguments or those of a group, or a
        group has an optimizer of another class.
    RuntimeError
        The call comes from inside an update, for example from a signal handler.

    Examples
    --------
    >>> import numpy as np
    >>> import fastopt
    >>> from fastopt.checkpoint import to_torch_state_dict
    >>> updater = fastopt.Updater(fastopt.SGD(lr=0.5, momentum=0.9))
    >>> updater(0, np.array([1.0, -2.0]), np.ones(2))
    >>> to_torch_state_dict(updater)["state"]
    {0: {'momentum_buffer': array([ 1., -2.])}}
    """
    _check_arguments(updater, indices)
    optimizer = updater.optimizer
    name = _form_of(optimizer).torch
    optimizer_of = getattr(updater, "shard", updater).parameters.optimizer_of  # that of a rank
    if indices is None:
        indices = sorted(updater.states, key=_integer)
    groups: dict[frozenset[Any], dict[str, Any]] = {}
    state: dict[int, dict[str, Any]] = {}
    with between_updates(optimizer.call_lock, "to_torch_state_dict()"):
        for position, index in enumerate(indices):
            of = optimizer_of(index)
            context, lr = label(index, optimizer.idx2name), of._get_lr(index)
            with naming(context):
                form = _form_of(of)
                made = _group(form, of, lr, of._get_wd(index))
            if form.torch != name:
                raise ValueError(
                    f"{context}: torch has one class for all parameters: {name}, not {form.torch}"
                )
            group = groups.setdefault(frozenset(made.items()), {**made, "params": []})
            group["params"].append(position)
            if index in updater.states and form.slots:
                state[position] = _to_torch(form, of, updater.states[index], index, lr)
    return {"state": state, "param_groups": list(groups.values())}


def _check_arguments(updater: object, indices: object) -> None:
    check_updater(updater)
    if isinstance(indices, (Set, Mapping)):
        raise TypeError(
            "indices must be a list of the updater's indices in the order of torch's parameters, "
            f"got {brief(indices)}"
        )


def _integer(index: Index) -> int:
    if isinstance(index, str):
        raise ValueError(f"the order of index {index!r} is not known, give `indices`")
    return index


def _form_of(optimizer: Optimizer) -> Form:
    name = type(optimizer).__name__
    forms = FORMS.get(name, ())
    attributes, variants = vars(optimizer), plain(optimizer)
    if forms and (on := [name for name in variants if attributes[name]]):
        raise ValueError(f"torch has no {name} with {' and '.join(on)}")
    for form in forms:
        if all(getattr(optimizer, key) == value for key, value in form.when.items()):
            return form
    known = " or ".join(str(dict(form.when)) for form in forms)
    raise ValueError(f"torch has no {name}" + (f" unless it has {known}" if forms else ""))


def _group(form: Form, optimizer: Optimizer, lr: float, wd: float) -> dict[str, Any]:
    """Options of torch's parameter group."""
    group = {"lr": lr, "weight_decay": wd, "maximize": optimizer.maximize}
    group |= form.fixed
    if group["weight_decay"] != wd:
        raise ValueError(f"torch's {form.torch} decays otherwise: wd must be 0, got {wd}")
    for name, option in form.options.items():
        group[name] = option.to_torch(*(getattr(optimizer, key) for key in option.attributes))
    return group


def _to_torch(
    form: Form, optimizer: Optimizer, ours: Any, index: Index, lr: float
) -> dict[str, Any]:
    """State of one parameter in torch's format."""
    arrays = numbers_of(leaves(ours))
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


def from_torch_state_dict(
    updater: Grouped,
    state_dict: Mapping[str, Any],
    indices: Sequence[Index] | None = None,
    strict: bool = True,
) -> Skipped:
    """Load the ``state_dict()`` of the corresponding torch optimizer into `updater`.

    Learning rates, weight decays and the other hyper-parameters are loaded too; the schedule is
    kept. Groups become multipliers of the largest learning rate and weight decay, or of those that
    the updater's groups have. Optimizers that implement torch's formula are set to
    ``formula="torch"``; the page about checkpoints lists the differences of others.

    Parameters
    ----------
    updater : Updater
        Updater with an optimizer of a class that :func:`to_torch_state_dict` supports.
    state_dict : dict
        Dict with ``state`` and ``param_groups``. Arrays can be anything that :func:`numpy.asarray`
        accepts, such as NumPy arrays or CPU tensors; they are copied.
    indices : sequence of int or str, optional
        The updater's index of each torch parameter, in torch's order. Default: torch's numbers.
    strict : bool
        See :meth:`Updater.load <fastopt.Updater.load>`.

    Returns
    -------
    Skipped
        See :meth:`Updater.load <fastopt.Updater.load>`.

    Raises
    ------
    TypeError
        `updater` is not an updater, or `indices` have no order.
    CheckpointError
        `state_dict` is invalid, or has options that the updater's optimizer does not support, or
        that its groups have otherwise. Nothing changes.

    Examples
    --------
    >>> import numpy as np
    >>> import fastopt
    >>> from fastopt.checkpoint import from_torch_state_dict
    >>> group = {"lr": 0.5, "momentum": 0.9, "weight_decay": 0, "params": [0]}
    >>> state = {0: {"momentum_buffer": np.array([1.0, -2.0])}}
    >>> updater = fastopt.Updater(fastopt.SGD())
    >>> from_torch_state_dict(updater, {"state": state, "param_groups": [group]})
    Skipped(nothing)
    >>> updater.states[0], updater.optimizer.formula
    (array([ 1., -2.]), 'torch')
    """
    _check_arguments(updater, indices)
    with refusing("not the state_dict of an optimizer of torch: "):
        described = _described(updater, state_dict, indices)
    return restore(updater, described, strict)


def _described(
    updater: Grouped, state_dict: Mapping[str, Any], indices: Sequence[Index] | None
) -> dict[str, Any]:
    """Convert the dict to the argument of :func:`restore`."""
    if not isinstance(state_dict, Mapping):
        expected = "not the state_dict of an optimizer of torch, which is a dict"
        raise CheckpointError(f"{expected}, got {brief(state_dict)}")
    optimizer, groups = updater.optimizer, state_dict["param_groups"]
    form = _form_for(type(optimizer).__name__, groups)
    numbers = sorted(position for group in groups for position in group["params"])
    if not numbers:
        raise CheckpointError("not the state_dict of an optimizer of torch: it has no parameters")
    chosen = numbers if indices is None else indices
    if isinstance(chosen, str) or not isinstance(chosen, Sized) or len(chosen) != len(numbers):
        expected = f"indices must have length {len(numbers)}, one for each parameter of torch"
        raise CheckpointError(f"{expected}, got {chosen!r}")
    index_of = dict(zip(numbers, chosen, strict=True))
    if len(set(index_of.values())) < len(numbers):
        raise CheckpointError(f"a parameter comes twice among {numbers} or {indices}")
    group_of = {index_of[position]: group for group in groups for position in group["params"]}
    entries: dict[Index, dict[str, Any]] = {}
    for position, index in index_of.items():
        entry = state_dict["state"].get(position, {})
        # slots may be None, such as a momentum not yet set
        if kept := {slot: value for slot, value in entry.items() if value is not None}:
            entries[index] = kept
    options = plain(optimizer) | dict(form.when) | _options(form, groups)
    _check_groups(updater, group_of, options)
    attributes = optimizer.__getstate__() | options | _rates(updater, group_of)
    if form.counted:
        counts = {index: int(entry["step"]) for index, entry in entries.items()}
        attributes["_index_update_count"] = counts
        attributes["num_update"] = max([optimizer.begin_num_update, *counts.values()])
    if form.torch == "NAdam":
        products = {index: float(entry["mu_product"]) for index, entry in entries.items()}
        attributes["_m_schedules"] = products
    states = {i: _from_torch(form, entry, float(group_of[i]["lr"])) for i, entry in entries.items()}
    keys = keys_of(names_of(optimizer), group_of)
    return {
        **describe(updater),
        "attributes": attributes,
        "parameters": {key: index for key, index in keys.items() if index in group_of},
        "states": under_keys(states, keys),
    }


def _form_for(name: str, groups: Sequence[Mapping[str, Any]]) -> Form:
    """Form of a fastopt class that supports all options of the groups."""
    reasons: dict[str, int] = {}
    for form in FORMS.get(name, ()):
        needed = {key for key, option in form.options.items() if option.default is None}
        lacking = {key for key in needed for group in groups if key not in group}
        odd = {
            f"{key}={value}"
            for group in groups
            for key, value in group.items()
            if form.fixed.get(key, value) != value or key in VOCABULARY - form.vocabulary
        }
        if not lacking and not odd:
            return form
        reason = [f"must have {sorted(lacking)}"] * bool(lacking)
        reason += [f"cannot have {sorted(odd)}"] * bool(odd)
        reasons[" and ".join(reason)] = len(lacking) + len(odd)
    if not reasons:
        raise CheckpointError(f"{name} cannot continue a run of torch: torch has no {name}")
    fewest = min(reasons.values())
    nearest = "; or ".join(reason for reason, count in reasons.items() if count == fewest)
    raise CheckpointError(f"{name} cannot continue this run of torch: its groups {nearest}")


def _options(form: Form, groups: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Fastopt's attributes for the options of the groups, which must agree."""
    attributes: dict[str, Any] = {}
    for name, option in {**form.options, "maximize": MAXIMIZE}.items():
        values = {option.from_torch(group.get(name, option.default)) for group in groups}
        if len(values) > 1:
            raise CheckpointError(f"the groups differ in {name}: {sorted(values)}")
        check = flag if option is MAXIMIZE else number
        for attribute, value in zip(option.attributes, *values, strict=True):
            attributes[attribute] = check(name, value)
    return attributes


def _check_groups(updater: Grouped, indices: Iterable[Index], options: Mapping[str, Any]) -> None:
    """Raise CheckpointError if a group of the updater keeps another value of a loaded option."""
    for index in indices:
        of = updater.parameters.optimizer_of(index)
        if of is updater.optimizer:
            continue
        if of.overridden is None:
            kept = {"optimizer"}
        else:
            kept = {key for key in of.overridden & options.keys() if vars(of)[key] != options[key]}
        if kept:
            raise CheckpointError(
                f"{label(index, of.idx2name)}: its group in the updater has {sorted(kept)} in "
                "place of torch's: remove it from updater.groups"
            )


def _rates(updater: Grouped, group_of: Mapping[Index, Mapping[str, Any]]) -> dict[str, Any]:
    """Largest learning rate and weight decay, and multipliers that yield each group's values."""
    attributes: dict[str, Any] = {}
    optimizer, parameters = updater.optimizer, updater.parameters
    routes = {i: parameters.groups.route(i) if parameters.groups else None for i in group_of}
    for option, attribute in (("lr", "lr"), ("weight_decay", "wd")):
        multiplier = f"{attribute}_mult"
        rates = {i: number(option, float(group[option])) for i, group in group_of.items()}
        kept: dict[Index, Any] = {
            i: route and route.multipliers.get(multiplier) for i, route in routes.items()
        }
        objects = optimizer.param_dict.items()
        kept |= {i: getattr(parameter, multiplier, 1.0) for i, parameter in objects}
        attributes[attribute] = base = max(rate / (kept[i] or 1.0) for i, rate in rates.items())
        attributes[multiplier] = table = dict(getattr(optimizer, multiplier))
        for index, rate in rates.items():
            of = parameters.optimizer_of(index)
            unit = getattr(of, attribute) if attribute in (of.overridden or ()) else base
            table[index] = rate / unit if unit else 1.0
            factor = table[index] if kept[index] is None else kept[index]
            if not math.isclose(unit * factor, rate):
                raise CheckpointError(
                    f"{label(index, optimizer.idx2name)}: torch's {option} is {rate}, but a group "
                    f"of the updater or its param_dict makes it {unit * factor}: change these"
                )
    return attributes


def _from_torch(form: Form, entry: Mapping[str, Any], lr: float) -> Any:
    """State of one parameter in fastopt's nesting."""
    arrays: list[Array] = []
    for slot in form.slots:
        if slot in (form.optional, form.with_rate) and slot not in entry:
            arrays.append(np.zeros_like(arrays[0]))
        elif slot == form.with_rate:
            arrays.append(np.asarray(np.asarray(entry[slot]) * -lr))
        else:
            arrays.append(np.asarray(entry[slot]).copy())
    if len(arrays) == 1 and not form.in_tuple:
        return arrays[0]
    return tuple(arrays) or None
