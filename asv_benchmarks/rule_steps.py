"""Steps of newer optimizers in several libraries, on one float32 matrix."""

from collections.abc import Callable

from steps import LR, optax_call, torch_parameters

from fastopt import optimizer
from fastopt.bench.clock import Call
from fastopt.bench.steps import Step

SHAPE = (1000, 1000)
WORDS = {
    "nadam": "NAdam",
    "asgd": "ASGD",
    "rprop": "Rprop",
    "yogi": "Yogi",
    "adan": "Adan",
    "ademamix": "AdEMAMix",
    "adopt": "ADOPT",
    "novograd": "NovoGrad",
    "schedulefreeadamw": "Schedule-Free AdamW",
    "prodigy": "Prodigy",
    "adafactor": "Adafactor",
    "sm3": "SM3",
    "muon": "Muon",
}
CASES = {f"{words}, {SHAPE[0]} x {SHAPE[1]}": (name, SHAPE) for name, words in WORDS.items()}
"""Arguments of a step by its label."""

TORCH = ("nadam", "asgd", "rprop", "adafactor", "muon")
"""Optimizers that torch.optim has, under the names in WORDS."""

OPTAX = {
    **{name: name for name in ("rprop", "yogi", "adan", "novograd", "adafactor", "sm3")},
    **{name: f"contrib.{name}" for name in ("ademamix", "adopt", "muon")},
    "nadam": "nadam",
}
"""Functions of optax; its Prodigy stores the weights, so that jit cannot donate their memory."""


def fastopt_step(name: str, shape: tuple[int, int]) -> Call:
    return Step(name, shape, learning_rate=LR)


def limit_step(name: str, shape: tuple[int, int]) -> Call:
    if not optimizer.create(name).native:
        raise NotImplementedError("its arithmetic, not memory, takes the time")
    return fastopt_step(name, shape).limit


def torch_step(name: str, shape: tuple[int, int]) -> Call:
    if name not in TORCH:
        raise NotImplementedError("torch does not have it")
    import torch

    rule = getattr(torch.optim, WORDS[name])
    options = {} if name == "muon" else {"foreach": True}
    return rule(torch_parameters([shape]), lr=LR, **options).step


def author_step(library: str) -> Callable[[str, tuple[int, int]], Call]:
    """Return a step of the torch package of an optimizer's authors."""

    def step(name: str, shape: tuple[int, int]) -> Call:
        if name == "prodigy" and library == "prodigyopt":
            from prodigyopt import Prodigy as Rule
        elif name == "schedulefreeadamw" and library == "schedulefree":
            from schedulefree import AdamWScheduleFree as Rule
        else:
            raise NotImplementedError(f"{library} has one optimizer")
        rule = Rule(torch_parameters([shape]), lr=LR)
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
