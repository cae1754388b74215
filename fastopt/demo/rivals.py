"""Other implementations of an update, on one thread, with which the demo compares fastopt."""

import math
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from itertools import count
from typing import Any

from fastopt import optimizer, reference
from fastopt.demo.common import Runner
from fastopt.reference import Array

NUMPY, TORCH = "plain NumPy", "torch fused"

Rival = Callable[[optimizer.Optimizer, Sequence[Array]], Runner]
"""Creates a runner that updates copies of weights with the same rule as an optimizer."""


def rivals(name: str, torch: bool) -> dict[str, Rival]:
    """Return implementations of an optimizer by name, with `torch` also torch's if installed."""
    found: dict[str, Rival] = {}
    if name in reference.UPDATES:
        found[NUMPY] = _numpy
    if torch and name in TORCH_OPTIMIZERS and find_spec("torch"):
        found[TORCH] = _torch
    return found


def _numpy(opt: optimizer.Optimizer, weights: Sequence[Array]) -> Runner:
    update = reference.UPDATES[type(opt).__name__.lower()](opt)
    return Runner.of(update, [weight.copy() for weight in weights])


def _adam(torch: Any, tensors: Sequence[Any], opt: Any) -> Any:
    betas = opt.beta1, opt.beta2
    rate = opt.learning_rate
    return torch.optim.Adam(tensors, lr=rate, betas=betas, eps=opt.epsilon, fused=True)


def _sgd(torch: Any, tensors: Sequence[Any], opt: Any) -> Any:
    return torch.optim.SGD(tensors, lr=opt.learning_rate, momentum=opt.momentum, fused=True)


TORCH_OPTIMIZERS = {"adam": _adam, "sgd": _sgd}


def _torch(opt: optimizer.Optimizer, weights: Sequence[Array]) -> Runner:
    import torch

    copies = [weight.copy() for weight in weights]
    tensors = [torch.from_numpy(copy).requires_grad_() for copy in copies]  # share memory
    rival = TORCH_OPTIMIZERS[type(opt).__name__.lower()](torch, tensors, opt)

    threads = torch.get_num_threads()
    steps = count(1)

    def act(gradients: Sequence[Array]) -> None:
        if isinstance(opt, optimizer.Adam):  # torch adds epsilon after the bias correction
            rival.param_groups[0]["eps"] = opt.epsilon / math.sqrt(1 - opt.beta2 ** next(steps))
        torch.set_num_threads(1)
        for tensor, gradient in zip(tensors, gradients, strict=True):
            tensor.grad = torch.from_numpy(gradient)
        rival.step()
        torch.set_num_threads(threads)

    return Runner(act, copies)
