"""Step of Adam on many float32 weights in several libraries."""

from collections.abc import Callable
from functools import partial
from itertools import cycle

import numpy as np
from benchmarks.tables import SMALL, ListStep, Shapes, elements, resnet50
from steps import (
    FASTOPT,
    LR,
    deepspeed_rule,
    mxnet,
    mxnet_call,
    optax_call,
    optax_rule,
    torch_parameters,
    torch_rule,
)

from fastopt import optimizer, plain
from fastopt.bench.clock import Call
from fastopt.bench.steps import Step

CASES = {
    "Adam, 1,000 x 1,000": (SMALL, False),
    "Adam, 1,000 x 1,000, fresh gradients": (SMALL, True),
    "Adam, ResNet-50's 161 weights": (resnet50(), False),
}
"""Arguments of a step by its label."""


def fastopt_step(shapes: Shapes, fresh: bool) -> Call:
    return ListStep(shapes, fresh, learning_rate=LR)


def limit_step(shapes: Shapes, fresh: bool) -> Call:
    """Return the memory-bandwidth limit of one flat weight of the same size."""
    return Step("adam", elements(shapes), learning_rate=LR).limit


def arrays(shapes: Shapes, fresh: bool, make: Callable) -> tuple[list, Callable]:
    """Return weights and a function that returns gradients, new arrays each time if `fresh`."""
    draw = np.random.default_rng(0).standard_normal

    def drawn() -> list:
        return [make(draw(shape, np.float32)) for shape in shapes]

    return drawn(), partial(next, cycle([drawn() for _ in range(3 if fresh else 1)]))


def numpy_step(shapes: Shapes, fresh: bool) -> Call:
    weights, gradients = arrays(shapes, fresh, np.asarray)
    update = plain.numpy_adam(optimizer.Adam(**FASTOPT["adam"]))

    def step() -> None:
        for index, (grad, weight) in enumerate(zip(gradients(), weights, strict=True)):
            update(index, grad, weight)

    return step


def torch_step(shapes: Shapes, fresh: bool, rule: Callable) -> Call:
    import torch

    weights = torch_parameters(shapes)
    update = rule(weights).step
    if not fresh:
        return update
    _, gradients = arrays(shapes, fresh, torch.from_numpy)

    def step() -> None:
        for weight, grad in zip(weights, gradients(), strict=True):
            weight.grad = grad
        update()

    return step


def optax_step(shapes: Shapes, fresh: bool) -> Call:
    import jax.numpy as jnp

    return optax_call(optax_rule("adam"), *arrays(shapes, fresh, jnp.asarray))


def mxnet_step(shapes: Shapes, fresh: bool) -> Call:
    weights, gradients = arrays(shapes, fresh, mxnet().nd.array)
    return mxnet_call("adam", weights, gradients, list(range(len(shapes))), **FASTOPT["adam"])


PEERS: dict[str, tuple[str, Callable[[Shapes, bool], Call]]] = {
    # column: (library, step)
    "fastopt": ("fastopt", fastopt_step),
    "limit": ("fastopt", limit_step),
    "NumPy": ("numpy", numpy_step),
    "torch fused": ("torch", partial(torch_step, rule=partial(torch_rule, "adam", fused=True))),
    "torch foreach": ("torch", partial(torch_step, rule=partial(torch_rule, "adam", foreach=True))),
    "optax": ("optax", optax_step),
    "DeepSpeed": ("deepspeed", partial(torch_step, rule=deepspeed_rule)),
    "MXNet": ("mxnet", mxnet_step),
}
