"""Correspondence between torch's optimizers and fastopt's, with their options.

The formulas of a pair are equal except for the documented differences. Torch's options without a
counterpart must have the value that disables them.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from fastopt._engine.newton_schulz import QUINTIC
from fastopt.kernels.variants import Variant
from fastopt.optimizer.optimizer import Optimizer


@dataclass(frozen=True)
class Option:
    """One option of torch, and the corresponding attributes of fastopt."""

    attributes: tuple[str, ...]
    to_torch: Callable[..., Any]
    from_torch: Callable[[Any], tuple[float, ...]]
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

    free: Mapping[str, Any] = field(default_factory=dict)
    """Torch's options without effect here, and the values to export for them."""

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
        return frozenset((*self.options, *self.fixed, *self.free))


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
    "Adamax": (Form("Adamax", ("exp_avg", "exp_inf"), {"betas": BETAS}, free={"eps": 1e-8}),),
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
