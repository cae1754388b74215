"""The same step in several libraries, on one float32 weight and normal gradients."""

from collections.abc import Callable
from functools import partial

import numba
import numpy as np
from benchmarks.common import Call, Step

from fastopt import optimizer, plain

THREADS = numba.config.NUMBA_NUM_THREADS
LR, MOMENTUM = 1e-3, 0.9
FASTOPT = {
    "adam": {"learning_rate": LR},
    "sgd": {"learning_rate": LR, "momentum": MOMENTUM},
}


def limit_step(algorithm: str, size: int) -> Call:
    return Step(algorithm, size, **FASTOPT[algorithm]).limit


def fastopt_step(algorithm: str, size: int) -> Call:
    return Step(algorithm, size, **FASTOPT[algorithm])


def numpy_step(algorithm: str, size: int) -> Call:
    weight, grad = np.random.default_rng(0).standard_normal((2, size), np.float32)
    update = plain.UPDATES[algorithm](optimizer.create(algorithm, **FASTOPT[algorithm]))
    return partial(update, 0, grad, weight)


def torch_step(algorithm: str, size: int, **options: bool) -> Call:
    import torch

    if algorithm == "adam":
        return torch.optim.Adam(torch_parameters(size), lr=LR, **options).step
    return torch.optim.SGD(torch_parameters(size), lr=LR, momentum=MOMENTUM, **options).step


def deepspeed_step(algorithm: str, size: int) -> Call:
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    return DeepSpeedCPUAdam(torch_parameters(size), lr=LR, adamw_mode=False).step


def torch_parameters(size: int):
    import torch

    torch.set_num_threads(THREADS)
    weight = torch.nn.Parameter(torch.randn(size))
    weight.grad = torch.randn(size)
    return [weight]


def optax_step(algorithm: str, size: int) -> Call:
    import jax
    import optax

    rule = optax.adam(LR) if algorithm == "adam" else optax.sgd(LR, momentum=MOMENTUM)
    weight, grad = jax.random.normal(jax.random.key(0), (2, size))
    state = rule.init(weight)

    @partial(jax.jit, donate_argnums=(0, 1))
    def update(weight, state, grad):
        updates, state = rule.update(grad, state, weight)
        return optax.apply_updates(weight, updates), state

    def step():
        nonlocal weight, state
        weight, state = jax.block_until_ready(update(weight, state, grad))

    return step


PEERS: dict[str, tuple[str, Callable[[str, int], Call], tuple[str, ...]]] = {
    # row: (library, step, algorithms)
    "fastopt": ("fastopt", fastopt_step, ("adam", "sgd")),
    "limit": ("fastopt", limit_step, ("adam", "sgd")),
    "NumPy": ("numpy", numpy_step, ("adam", "sgd")),
    "torch, fused": ("torch", partial(torch_step, fused=True), ("adam", "sgd")),
    "torch, foreach": ("torch", partial(torch_step, foreach=True), ("adam", "sgd")),
    "optax, jit": ("optax", optax_step, ("adam", "sgd")),
    "DeepSpeedCPUAdam": ("deepspeed", deepspeed_step, ("adam",)),
}

LIBRARIES = tuple(dict.fromkeys(library for library, _, _ in PEERS.values()))
