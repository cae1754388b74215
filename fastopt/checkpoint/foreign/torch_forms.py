"""Correspondence between torch's optimizers and fastopt's, with their options.

The formulas of a pair are equal except for the documented differences. Torch's options without a
counterpart must have the value that disables them.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from fastopt._engine.newton_schulz import QUINTIC
from fastopt.kernels.variants import Variant


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


SUMS = {
    name: replace(same(name), default=0.0) for name in ("lr_decay", "initial_accumulator_value")
}


def plain(optimizer: Any) -> dict[str, bool]:
    """Return values that disable the variants of an optimizer that torch does not have."""
    return {name: False for name in Variant._fields if name in vars(optimizer)}


def of_each_formula(form: Form, **of_mxnet: Any) -> tuple[Form, ...]:
    """Forms of a class for each value of `formula`, torch's first.

    A state dict of torch matches the first form. `of_mxnet` are the fields that differ with
    ``formula="mxnet"``.
    """
    return (
        replace(form, when={**form.when, "formula": "torch"}),
        replace(form, **of_mxnet, when={**form.when, "formula": "mxnet"}),
    )


PLAIN_SGD = Form(
    "SGD",
    (),
    {"momentum": same("momentum")},
    {"momentum": 0, "dampening": 0, "nesterov": False},
    when={"momentum": 0},
)
SGD = (
    PLAIN_SGD,
    *of_each_formula(
        Form(
            "SGD",
            ("momentum_buffer",),
            {"momentum": same("momentum")},
            {"dampening": 0, "nesterov": False},  # torch does not count, so the first step is lost
            when={"dampening": 0, "decouple": False},
        ),
        with_rate="momentum_buffer",
    ),
)


def with_amsgrad(form: Form) -> tuple[Form, ...]:
    """Forms of Adam with each formula, without and with AMSGrad."""
    return tuple(
        one
        for amsgrad in (False, True)
        for one in of_each_formula(
            replace(
                form,
                slots=(*form.slots, "max_exp_avg_sq") if amsgrad else form.slots,
                fixed={"amsgrad": amsgrad, **form.fixed},
                when={**form.when, "amsgrad": amsgrad},
            )
        )
    )


FORMS: dict[str, tuple[Form, ...]] = {
    "SGD": SGD,
    "ccSGD": SGD,
    "NAG": (
        PLAIN_SGD,
        Form(
            "SGD",
            ("momentum_buffer",),
            {"momentum": same("momentum")},
            {"dampening": 0, "nesterov": True},
        ),
    ),
    "Adam": with_amsgrad(
        Form(
            "Adam",
            MOMENTS,
            {"betas": BETAS, "eps": same("epsilon")},
            {"decoupled_weight_decay": False},
        )
    ),
    "AdamW": with_amsgrad(
        Form(
            "AdamW",
            MOMENTS,
            {"betas": BETAS, "eps": same("epsilon")},
            {"decoupled_weight_decay": True},
            when={"correct_bias": True, "eta": None},
        )
    ),
    "AdaGrad": of_each_formula(
        Form(
            "Adagrad",
            ("sum",),
            {"eps": same("float_stable_eps"), **SUMS},
        ),
        options={"eps": inside_root("float_stable_eps"), **SUMS},
        fixed={"weight_decay": 0},
    ),
    "RMSProp": (
        *of_each_formula(
            Form(
                "RMSprop",
                ("square_avg",),
                {"alpha": same("gamma1"), "eps": same("epsilon")},
                {"centered": False, "momentum": 0},
                when={"centered": False, "momentum": 0, "clip_weights": None},
                in_tuple=True,
            ),
            options={"alpha": same("gamma1"), "eps": inside_root("epsilon")},
        ),
        *of_each_formula(
            Form(
                "RMSprop",
                ("square_avg", "momentum_buffer"),
                {"alpha": same("gamma1"), "momentum": same("momentum"), "eps": same("epsilon")},
                {"centered": False},
                when={"centered": False, "clip_weights": None},
                optional="momentum_buffer",
            ),
            options={
                "alpha": same("gamma1"),
                "momentum": same("momentum"),
                "eps": inside_root("epsilon"),
            },
            with_rate="momentum_buffer",
        ),
        *of_each_formula(
            Form(
                "RMSprop",
                ("square_avg", "grad_avg", "momentum_buffer"),
                {"alpha": same("gamma1"), "momentum": same("gamma2"), "eps": same("epsilon")},
                {"centered": True},
                when={"centered": True, "momentum": 0, "clip_weights": None},
                optional="momentum_buffer",
            ),
            options={
                "alpha": same("gamma1"),
                "momentum": same("gamma2"),
                "eps": inside_root("epsilon"),
            },
            with_rate="momentum_buffer",
        ),
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
            {
                "betas": BETAS,
                "eps": same("epsilon"),
                "momentum_decay": same("schedule_decay"),
            },
            {"decoupled_weight_decay": decouple},
            when={**when, "amsgrad": False, "decouple": decouple},
        )
        for decouple in (False, True)
        for when in ({"formula": "torch"}, {"formula": "mxnet", "per_parameter": True})
    ),
    "Muon": tuple(
        Form(
            "Muon",
            ("momentum_buffer",),
            {"momentum": same("momentum"), "eps": same("eps")},
            {
                "nesterov": nesterov,
                "ns_coefficients": QUINTIC[0],
                "ns_steps": 5,
                "adjust_lr_fn": name,
            },
            when={
                "nesterov": nesterov,
                "coefficients": "quintic",
                "steps": 5,
                "adjust": adjust,
            },
        )
        for name, adjust in (
            ("original", "original"),
            (None, "original"),
            ("match_rms_adamw", "rms"),
            ("spectral_unclamped", "spectral"),
        )
        for nesterov in (True, False)
    ),
}
"""Forms of each fastopt class; the first match is used."""

VOCABULARY = frozenset().union(*(form.vocabulary for forms in FORMS.values() for form in forms))
VOCABULARY -= {"lr", "weight_decay"}
"""Torch's options that change the result; others concern the implementation, or are the user's."""
