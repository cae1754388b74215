"""Defaults of fastopt beside those of torch and of the authors, as recorded."""

import json
from math import isclose

from fastopt import optimizer
from helpers.paths import GOLDEN

RECORDED = json.loads((GOLDEN / "defaults.json").read_text())["defaults"]
NAMES = {
    "lr": ("learning_rate",),
    "weight_decay": ("wd",),
    "momentum_decay": ("schedule_decay",),
    "betas": ("beta1", "beta2"),
    "b1": ("beta1",),
    "b2": ("beta2",),
    "b3": ("beta3",),
    "etas": ("eta_minus", "eta_plus"),
    "step_sizes": ("least_step", "largest_step"),
    "alpha": ("gamma1", "alpha"),
    "initial_accumulator": ("initial_value",),
    "ns_steps": ("steps",),
    "ns_coefficients": ("coefficients",),
    "adjust_lr_fn": ("adjust",),
}
"""Arguments of fastopt for those of other libraries that are called otherwise."""
MEANINGS = {"ns_coefficients": "quintic", "adjust_lr_fn": "original"}
"""What torch's defaults of these arguments are called in fastopt."""
WITHOUT = {("AdaDelta", "lr")}
"""Arguments that the formula of fastopt does not have."""


def of(name, **arguments):
    """Default values of a class by argument, as an optimizer has them."""
    made = getattr(optimizer, name)(**arguments)
    names = vars(made).keys() & type(made).__signature__.parameters.keys()
    found = {each: getattr(made, each) for each in names}
    eps = {"eps": made.float_stable_eps} if name == "AdaGrad" else {}
    return {**found, **eps, "learning_rate": made.lr, "wd": made.wd}


def compared(name, ours):
    """Triples of argument, value here and value there."""
    ((_, theirs),) = RECORDED[name].items()
    for argument, value in theirs.items():
        names = [each for each in NAMES.get(argument, (argument,)) if each in ours]
        if argument == "eps":
            names = ["epsilon" if "epsilon" in ours else "eps"]
        if (name, argument) not in WITHOUT:
            value = MEANINGS.get(argument, value)
            values = value if isinstance(value, list) else [value]
            yield from zip(names, map(ours.get, names), values, strict=bool(names))


def same(ours, theirs):
    """Whether two defaults are equal."""
    return ours == theirs or (type(ours) is type(theirs) is float and isclose(ours, theirs))


def rows():
    """Rows of the table of docs/formulas.md."""
    for name, ((path, _),) in ((name, of.items()) for name, of in RECORDED.items()):
        for argument, *values in compared(name, of(name)):
            if not same(*values):
                shown = [f"{v:g}" if isinstance(v, (int, float)) else v for v in values]
                yield name, f"`{argument}`", *shown, f"`{path}`"
