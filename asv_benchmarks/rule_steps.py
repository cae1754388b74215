"""Steps of newer optimizers in several libraries, on one float32 matrix."""

from collections.abc import Callable
from importlib import import_module

from steps import LR, optax_call, torch_parameters

from fastopt import optimizer
from fastopt.bench.clock import Call
from fastopt.bench.steps import Step

SHAPE = (1000, 1000)
WORDS = {
    "nadam": "NAdam",
    "nadamw": "NAdamW",
    "amsgrad": "AMSGrad",
    "asgd": "ASGD",
    "rprop": "Rprop",
    "yogi": "Yogi",
    "adan": "Adan",
    "ademamix": "AdEMAMix",
    "adopt": "ADOPT",
    "novograd": "NovoGrad",
    "schedulefreeadamw": "Schedule-Free AdamW",
    "schedulefreesgd": "Schedule-Free SGD",
    "prodigy": "Prodigy",
    "adafactor": "Adafactor",
    "sm3": "SM3",
    "muon": "Muon",
}
CASES = {f"{words}, {SHAPE[0]} x {SHAPE[1]}": (name, SHAPE) for name, words in WORDS.items()}
"""Arguments of a step by its label."""

FORMS = {"amsgrad": ("adam", {"amsgrad": True})}
"""Optimizer and arguments of names that are forms of another optimizer."""

TORCH = {
    **{name: WORDS[name] for name in ("nadam", "asgd", "rprop", "adafactor", "muon")},
    "amsgrad": "Adam",
}
"""Classes of torch.optim."""

AUTHORS = {
    "prodigy": ("prodigyopt", "Prodigy"),
    "schedulefreeadamw": ("schedulefree", "AdamWScheduleFree"),
    "schedulefreesgd": ("schedulefree", "SGDScheduleFree"),
}
"""Packages of the authors of an optimizer, for torch, and their classes."""

OPTAX = {
    **{name: name for name in ("rprop", "yogi", "adan", "novograd", "adafactor", "sm3")},
    **{name: f"contrib.{name}" for name in ("ademamix", "adopt", "muon")},
    **{name: name for name in ("nadam", "nadamw", "amsgrad")},
}
"""Functions of optax; its Prodigy stores the weights, so that jit cannot donate their memory."""


def fastopt_step(name: str, shape: tuple[int, int]) -> Call:
    name, arguments = FORMS.get(name, (name, {}))
    return Step(name, shape, learning_rate=LR, **arguments)


def limit_step(name: str, shape: tuple[int, int]) -> Call:
    if not optimizer.create(FORMS.get(name, (name,))[0]).native:
        raise NotImplementedError("its arithmetic, not memory, takes the time")
    return fastopt_step(name, shape).limit


def torch_step(name: str, shape: tuple[int, int]) -> Call:
    if name not in TORCH:
        raise NotImplementedError("torch does not have it")
    import torch

    rule = getattr(torch.optim, TORCH[name])
    options = {} if name == "muon" else {"foreach": True}
    arguments = FORMS.get(name, (name, {}))[1]
    return rule(torch_parameters([shape]), lr=LR, **options, **arguments).step


def author_step(library: str) -> Callable[[str, tuple[int, int]], Call]:
    """Return a step of the torch package of an optimizer's authors."""

    def step(name: str, shape: tuple[int, int]) -> Call:
        package, kind = AUTHORS.get(name, ("", ""))
        if package != library:
            raise NotImplementedError(f"{library} does not have it")
        rule = getattr(import_module(library), kind)(torch_parameters([shape]), lr=LR)
        if hasattr(rule, "train"):
            rule.train()
        return rule.step

    return step


def optax_step(name: str, shape: tuple[int, int]) -> Call:
    if name not in OPTAX:
        raise NotImplementedError("optax does not have it")
    import jax
    import optax
    import optax.contrib

    rule = optax
    for part in OPTAX[name].split("."):
        rule = getattr(rule, part)
    weight, grad = jax.random.normal(jax.random.key(0), (2, *shape))
    return optax_call(rule(LR), weight, lambda: grad)


PEERS: dict[str, tuple[str, Callable[[str, tuple[int, int]], Call]]] = {
    "fastopt": ("fastopt", fastopt_step),
    "limit": ("fastopt", limit_step),
    "torch": ("torch", torch_step),
    "optax": ("optax", optax_step),
    "prodigyopt": ("prodigyopt", author_step("prodigyopt")),
    "schedulefree": ("schedulefree", author_step("schedulefree")),
}
