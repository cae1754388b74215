"""Dense step in several libraries, on one float32 weight with normally distributed gradients."""

from collections.abc import Callable
from functools import partial

import numba
import numpy as np

from fastopt import optimizer, plain
from fastopt.bench.clock import Call
from fastopt.bench.steps import MOMENTUM, Step, draw

THREADS = numba.config.NUMBA_NUM_THREADS
LR = 1e-3
FASTOPT = {
    "adam": {"learning_rate": LR},
    "sgd": {"learning_rate": LR, "momentum": MOMENTUM},
}
SIZES = (1_000, 100_000, 1_000_000, 20_000_000, 50_000_000)
CASES = {
    f"{words}, {size:,}": (algorithm, size)
    for algorithm, words in (("adam", "Adam"), ("sgd", "SGD with momentum"))
    for size in SIZES
}
"""Arguments of a step by its label."""


def limit_step(algorithm: str, size: int) -> Call:
    return Step(algorithm, size, **FASTOPT[algorithm]).limit


def fastopt_step(algorithm: str, size: int) -> Call:
    return Step(algorithm, size, **FASTOPT[algorithm])


def numpy_step(algorithm: str, size: int) -> Call:
    weight, grad = draw(size)
    update = plain.UPDATES[algorithm](optimizer.create(algorithm, **FASTOPT[algorithm]))
    return partial(update, 0, grad, weight)


def torch_rule(algorithm: str, weights: list, **options: bool):
    import torch

    if algorithm == "adam":
        return torch.optim.Adam(weights, lr=LR, **options)
    return torch.optim.SGD(weights, lr=LR, momentum=MOMENTUM, **options)


def torch_step(algorithm: str, size: int, **options: bool) -> Call:
    return torch_rule(algorithm, torch_parameters([(size,)]), **options).step


def deepspeed_rule(weights: list):
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    return DeepSpeedCPUAdam(weights, lr=LR, adamw_mode=False)


def deepspeed_step(algorithm: str, size: int) -> Call:
    if algorithm != "adam":
        raise NotImplementedError("its CPUAdam is for Adam")
    return deepspeed_rule(torch_parameters([(size,)])).step


def torch_parameters(shapes: list[tuple[int, ...]]) -> list:
    import torch

    torch.set_num_threads(THREADS)
    weights = [torch.nn.Parameter(torch.randn(shape)) for shape in shapes]
    for weight in weights:
        weight.grad = torch.randn(weight.shape)
    return weights


def optax_rule(algorithm: str, **options: object):
    import optax

    return optax.adam(LR, **options) if algorithm == "adam" else optax.sgd(LR, momentum=MOMENTUM)


def optax_call(rule, weights, gradients: Callable) -> Call:
    """Return a jitted step with donated weights and state."""
    import jax
    import optax

    state = rule.init(weights)

    @partial(jax.jit, donate_argnums=(0, 1))
    def update(weights, state, grads):
        updates, state = rule.update(grads, state, weights)
        return optax.apply_updates(weights, updates), state

    def step():
        nonlocal weights, state
        weights, state = jax.block_until_ready(update(weights, state, gradients()))

    return step


def optax_step(algorithm: str, size: int, **options: object) -> Call:
    import jax

    weight, grad = jax.random.normal(jax.random.key(0), (2, size))
    return optax_call(optax_rule(algorithm, **options), weight, lambda: grad)


def mxnet():
    """Import MXNet 1.9.1, which uses names removed in NumPy 2 that steps do not need."""
    missing = np.__getattr__
    np.__getattr__ = lambda name: None
    try:
        import mxnet
    finally:
        np.__getattr__ = missing
    return mxnet


def mxnet_call(rule: str, weight, gradients: Callable, index=0, **options: object) -> Call:
    mx = mxnet()
    update = mx.optimizer.get_updater(mx.optimizer.create(rule, **options))

    def step():
        update(index, gradients(), weight)
        mx.nd.waitall()

    return step


def mxnet_step(algorithm: str, size: int) -> Call:
    weight, grad = map(mxnet().nd.array, draw(size))
    return mxnet_call(algorithm, weight, lambda: grad, **FASTOPT[algorithm])


PEERS: dict[str, tuple[str, Callable[[str, int], Call]]] = {
    # column: (library, step)
    "fastopt": ("fastopt", fastopt_step),
    "limit": ("fastopt", limit_step),
    "NumPy": ("numpy", numpy_step),
    "torch fused": ("torch", partial(torch_step, fused=True)),
    "torch foreach": ("torch", partial(torch_step, foreach=True)),
    "optax": ("optax", optax_step),
    "DeepSpeed": ("deepspeed", deepspeed_step),
    "MXNet": ("mxnet", mxnet_step),
}
