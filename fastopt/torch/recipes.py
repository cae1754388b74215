"""How the classes of :mod:`fastopt.torch` create fastopt's optimizers from parameter groups."""

import inspect
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from numbers import Real
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch

from fastopt._advice import choices, closest
from fastopt.arguments import brief
from fastopt.checkpoint.foreign.torch import FORMS, MOMENTS, Form, Option, same
from fastopt.optimizer import Optimizer as Rule
from fastopt.optimizer.optimizer import CHANGED
from fastopt.torch.rules import Delta, HeavyBall, Rectified, RMSProp

EXTRAS = (
    *("cautious", "cautious_decay", "clip_gradient", "corrected_decay", "lazy_update", "master"),
    *("multi_precision", "rounding", "seed", "sparse_decay", "stable", "state_dtype"),
    "state_min_size",
)
"""Arguments of fastopt's optimizers that every class accepts if its rule has them."""

COMMON = {
    "lr": Option(("lr",), float, lambda x: (float(x),) if isinstance(x, Real) else ()),
    "weight_decay": Option(("wd",), float, lambda x: (float(x),) if isinstance(x, Real) else ()),
    "maximize": same("maximize"),
}
"""Options of every parameter group."""

SIGNED = ("lr", "weight_decay")
"""Options that a program may set to a negative number, as in torch, but not construct with one."""

TORCHS = {"learning_rate": "lr", "wd": "weight_decay", "epsilon": "eps"}
TORCHS |= dict.fromkeys(("beta1", "beta2", "beta3"), "betas")
"""Names that torch has for arguments of fastopt."""

PAIRS = {"betas", "etas", "step_sizes"}
"""Options of torch with two numbers."""

UNSUPPORTED = {"capturable": False, "differentiable": False}
"""Options of torch that CPUs or updates in place do not have."""

ORTHOGONALIZATION = {
    "ns_steps": same("steps"),
    "ns_coefficients": Option(("coefficients",), tuple, lambda value: (tuple(value),)),
}
"""Options of Muon that have one value in the state dicts of other optimizers."""

MODES = ("foreach", "fused", *UNSUPPORTED)
"""Options of many classes of torch that do not concern the formula; every class accepts them."""


class Made(NamedTuple):
    """An optimizer for a parameter group."""

    optimizer: Rule
    options: Mapping[str, Option]
    """Options of the group that may change between steps."""
    fixed: tuple[str, ...]
    """Options of the group that may not change."""
    form: Form | None
    """Torch's names of the state arrays, if torch has the same rule."""


def _made(
    kind: type[Rule], arguments: dict[str, Any], group: Mapping[str, Any], **rest: Any
) -> Made:
    """Create an optimizer and set the options that may change."""
    reasons = [f"{k}={group[k]}" for k, v in UNSUPPORTED.items() if group.get(k, v) != v]
    if reasons:
        raise ValueError(f"fastopt.torch does not support {', '.join(reasons)}")
    extras = {name: group[name] for name in EXTRAS if name in group}
    if kind.native and "lazy_update" in kind.__signature__.parameters:
        extras.setdefault("lazy_update", True)  # as in torch, where only indexed rows are updated
    made = Made(kind(**arguments, **extras), **rest)
    apply(made.optimizer, made.options, group)
    made.optimizer.check_together()
    also = (name for name in (*EXTRAS, *UNSUPPORTED) if name in group)
    return made._replace(fixed=(*made.fixed, *also))


def in_group(group: Mapping[str, Any]) -> dict[str, Option]:
    """Return the common options that a group has; SparseAdam and Rprop lack some."""
    return {name: option for name, option in COMMON.items() if name in group}


def apply(optimizer: Rule, options: Mapping[str, Option], group: Mapping[str, Any]) -> None:
    """Set the attributes of an optimizer to the options of a group."""
    for name, option in options.items():
        count, value = len(option.attributes), plain(group[name])
        try:
            values = tuple(option.from_torch(value))
        except (TypeError, ValueError):
            values = ()
        if len(values) != count:
            kind = "a number" if count == 1 else f"{count} numbers"
            raise TypeError(f"{name} must be {kind}, got {brief(group[name])}")
        for attribute, value in zip(option.attributes, values, strict=True):
            if name in SIGNED and -math.inf < value < 0:
                vars(optimizer).update({attribute: value, "least_rate": -sys.float_info.max})
                optimizer._set_versions(*CHANGED)
                continue
            try:
                setattr(optimizer, attribute, value)
            except ValueError as error:
                raise named(error, {attribute: name}) from error


def named(error: ValueError, names: Mapping[str, str] = TORCHS) -> ValueError:
    """Return an error of an argument of fastopt with the name that torch has."""
    ours, space, rest = str(error).partition(" ")
    name = names.get(ours, ours)
    return ValueError(f"{name}: {error}" if name in PAIRS else name + space + rest)


def plain(value: Any) -> Any:
    """Return a value in which tensors and arrays of one element are numbers."""
    if type(value) in (tuple, list):
        return type(value)(map(plain, value))
    one = isinstance(value, (torch.Tensor, np.ndarray)) and math.prod(value.shape) == 1
    return value.item() if one else value


@dataclass(frozen=True)
class Recipe:
    """Recipe of a class whose rule torch does not have: the arguments are fastopt's."""

    package: ClassVar[str] = "fastopt.optimizer"
    """Package with a class of the same name and options."""

    name: str
    of: type[Rule] | None = None
    """Class of the optimizer, if it is not the registered one of this name."""

    @property
    def summary(self) -> str:
        """Docstring of the class."""
        return (
            f"Optimizer for torch, see :class:`{self.package}.{self.name}` for its options.\n\n"
            "See :class:`Optimizer` for the other arguments."
        )

    @cached_property
    def kind(self) -> Any:
        """Class of the optimizer in fastopt."""
        return self.of or Rule.opt_registry[self.name.lower()]

    @cached_property
    def options(self) -> dict[str, tuple[str, ...]]:
        """Attributes by the name of the argument, with torch's names where torch has one."""
        declared = dict.fromkeys([*self.kind.positional, *self.kind.defaults])
        common = {*Rule.defaults, *EXTRAS}
        names = [name for name in declared if self.kind._has_argument(name) and name not in common]
        named: dict[str, tuple[str, ...]] = {}
        for alias in ("betas", "eps"):
            attributes = self.kind.aliases[alias]
            if set(attributes) <= set(names):
                named[alias] = attributes
        taken = {name for attributes in named.values() for name in attributes}
        return named | {name: (name,) for name in names if name not in taken}

    @cached_property
    def parameters(self) -> list[str]:
        """Names of the arguments in their order."""
        return [*(name for name in COMMON if name != "maximize"), *self.options, "maximize"]

    @property
    def positional(self) -> int:
        """Number of arguments that may be passed by position."""
        return 1

    def defaults(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """Return the options of a parameter group without values of its own."""
        options = {name: plain(value) for name, value in arguments.items() if name not in MODES}
        try:
            made = self.kind(**{**options, "lr": float(options.get("lr", self._lr))})
        except ValueError as error:
            raise named(error) from error
        values: dict[str, Any] = {"lr": arguments.get("lr", made.learning_rate)}
        for name, attributes in self.options.items():
            stored = tuple(getattr(made, field, arguments.get(name)) for field in attributes)
            values[name] = stored if name == "betas" else stored[0]
        values = {**values, "weight_decay": made.wd, "maximize": made.maximize, **arguments}
        known = (*self.parameters, *EXTRAS, *MODES)
        return {name: values[name] for name in known if name in values}

    def check_shape(self, name: str, param: torch.Tensor) -> None:
        """Raise ValueError if the class cannot update a parameter of this shape."""

    @cached_property
    def _lr(self) -> float:
        return float(self.kind().learning_rate)

    def made(self, group: Mapping[str, Any]) -> Made:
        """Create the optimizer of a parameter group."""
        arguments = {name: plain(group[name]) for name in self.options if group[name] is not None}
        options, fixed, vary = in_group(group), list[str](), vars(self.kind())
        for name, attributes in self.options.items():
            if name == "betas":
                options[name] = Option(attributes, tuple, tuple)
            elif attributes[0] in vary and not isinstance(group[name], bool | str | None | Rule):
                options[name] = same(attributes[0])
            else:
                fixed.append(name)
        return _made(self.kind, arguments, group, options=options, fixed=tuple(fixed), form=None)


@dataclass(frozen=True)
class OfTorch(Recipe):
    """Recipe of a class that torch has too: arguments and defaults are torch's."""

    package = "torch.optim"

    forms: tuple[tuple[Any, Form], ...] = ()
    """Classes of fastopt, and the options with which they have torch's formula."""

    @cached_property
    def of_torch(self) -> Any:
        """The class of torch."""
        return getattr(torch.optim, self.name)

    @cached_property
    def parameters(self) -> list[str]:
        """Names of torch's arguments in their order."""
        return list(inspect.signature(self.of_torch).parameters)[1:]

    @property
    def positional(self) -> int:
        """Number of arguments that may be passed by position."""
        taken = inspect.signature(self.of_torch).parameters.values()
        return sum(argument.kind is argument.POSITIONAL_OR_KEYWORD for argument in taken) - 1

    def defaults(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """Return the options of a parameter group without values of its own."""
        others = [name for name in MODES if name not in self.parameters]
        extras = {name: arguments[name] for name in (*EXTRAS, *others) if name in arguments}
        rest = {name: value for name, value in arguments.items() if name not in extras}
        for name in PAIRS & rest.keys():  # torch ignores a third one
            if not isinstance(rest[name], (tuple, list)) or len(rest[name]) != 2:
                raise TypeError(f"{name} must be 2 numbers, got {brief(rest[name])}")
        example = torch.nn.Parameter(torch.zeros(2, 2))
        return {**self.of_torch([example], **rest).defaults, **extras}

    def check_shape(self, name: str, param: torch.Tensor) -> None:
        """See :meth:`Recipe.check_shape`."""
        if self.name == "Muon" and param.ndim != 2:
            raise ValueError(
                f"{name} has shape {tuple(param.shape)}, and Muon only supports 2D parameters: "
                "give others to fastopt.torch.AdamW, or kernels of convolutions to "
                "fastopt.torch.NorMuon"
            )

    def made(self, group: Mapping[str, Any]) -> Made:
        """Create the optimizer of a parameter group."""
        odd: list[list[str]] = []
        for kind, form in self.forms:
            needed = form.fixed
            odd.append([f"{k}={v}" for k, v in needed.items() if group.get(k, v) != v])
            if not odd[-1]:
                options = {**in_group(group), **form.options}
                kept = tuple(name for name in needed if name in group)
                return _made(kind, dict(form.when), group, options=options, fixed=kept, form=form)
        least = min(odd, key=lambda reasons: len(reasons))
        raise ValueError(
            f"fastopt.torch.{self.name} needs {', '.join(least)} with these options; torch.optim."
            f"{self.name} has them"
        )


def of(name: str, *forms: Form) -> list[tuple[Any, Form]]:
    """Return the forms of an optimizer that have torch's formula, with its class."""
    kind = Rule.opt_registry[name.lower()]
    return [(kind, form) for form in forms or FORMS[name] if form.when.get("formula") != "mxnet"]


def _of_torch() -> dict[str, Any]:
    """Return functions that find the classes and forms for each class of torch."""
    ball = Form(
        "SGD",
        ("momentum_buffer",),
        {name: same(name) for name in ("momentum", "dampening", "nesterov")},
    )
    delta = Form(
        "Adadelta", ("square_avg", "acc_delta"), {"rho": same("rho"), "eps": same("epsilon")}
    )
    sparse = Form(
        "SparseAdam",
        MOMENTS,
        FORMS["Adam"][0].options,
        when={"formula": "mxnet", "amsgrad": False},  # whose epsilon is that of SparseAdam
    )
    betas = FORMS["Adam"][0].options
    rectified = Form(
        "RAdam", MOMENTS, {**betas, "decoupled_weight_decay": same("decoupled_weight_decay")}
    )
    pair = Option(("eta_minus", "eta_plus"), lambda *pair: pair, tuple)
    rprop = Form(
        "Rprop",
        ("prev", "step_size"),
        {"etas": pair, "step_sizes": replace(pair, attributes=("least_step", "largest_step"))},
    )
    averaged = Form("ASGD", ("ax",), {name: same(name) for name in ("lambd", "alpha", "t0")})
    muon = [
        replace(
            form,
            options={**form.options, **ORTHOGONALIZATION},
            fixed={k: value for k, value in form.fixed.items() if k not in ORTHOGONALIZATION},
            when={k: v for k, v in form.when.items() if k not in ("steps", "coefficients")},
        )
        for form in FORMS["Muon"]
    ]
    return {
        "SGD": lambda: [(HeavyBall, ball)],
        "Adam": lambda: of("Adam") + of("AdamW"),
        "AdamW": lambda: of("AdamW") + of("Adam"),
        "SparseAdam": lambda: [(Rule.opt_registry["adam"], sparse)],
        "Adagrad": lambda: of("AdaGrad"),
        "RMSprop": lambda: [(RMSProp, form) for _, form in of("RMSProp")],
        "Adadelta": lambda: [(Delta, delta)],
        "Adamax": lambda: of("Adamax"),
        "NAdam": lambda: of("Nadam"),
        "RAdam": lambda: [(Rectified, rectified)],
        "Rprop": lambda: of("Rprop", rprop),
        "ASGD": lambda: of("ASGD", averaged),
        "Muon": lambda: of("Muon", *muon),
    }


OF_TORCH = _of_torch()
SAME_RULE = {"SGD", "ccSGD", "AdaGrad", "RMSProp", "AdaDelta", "Nadam", "Test"}
"""Classes of fastopt that have torch's name here, or none."""


def is_name(name: str) -> bool:
    """Whether a class has this name."""
    if name in OF_TORCH:
        return True
    kind = None if name in SAME_RULE else Rule.opt_registry.get(name.lower())
    return kind is not None and kind.__name__ == name


def names() -> list[str]:
    """Return the names of all classes of the package, torch's first."""
    kinds = Rule.opt_registry.values()
    ours = [kind.__name__ for kind in kinds if kind.__module__.startswith("fastopt.")]
    return [*OF_TORCH, *(name for name in ours if name not in OF_TORCH and is_name(name))]


def recipe(name: str) -> Recipe:
    """Return the recipe of a class."""
    if name in OF_TORCH:
        return OfTorch(name, forms=tuple(OF_TORCH[name]()))
    return Recipe(name)


def check_arguments(recipe: Recipe, arguments: Mapping[str, Any], also: Sequence[str]) -> None:
    """Raise TypeError for arguments that a class does not have, and for a schedule."""
    known = [*dict.fromkeys([*recipe.parameters, *EXTRAS, *MODES, *also])]
    for name in arguments:
        if name not in known:
            near = closest(name, [*known, *(key for key in TORCHS if TORCHS[key] in known)])
            near = TORCHS.get(near or "", near)
            raise TypeError(
                f"fastopt.torch.{recipe.name} has no argument {name!r}; {choices(near, known)}"
            )
    lr = plain(arguments.get("lr", 0.0))
    if isinstance(lr, torch.Tensor):
        raise ValueError(f"Tensor lr must be 1-element, got one of shape {tuple(lr.shape)}")
    if not isinstance(lr, Real):
        raise TypeError(
            f"lr must be a number, got {brief(lr)}; a schedule of torch.optim.lr_scheduler takes "
            "the optimizer"
        )
