"""Step of Adam in several libraries, on float16 weights with masters or with bfloat16 state."""

from collections.abc import Callable
from functools import partial

import numpy as np
from benchmarks.half import MASTERS, adam
from steps import (
    FASTOPT,
    LR,
    deepspeed_rule,
    mxnet,
    mxnet_call,
    optax_call,
    optax_rule,
    optax_step,
    torch_parameters,
    torch_rule,
)

from fastopt import optimizer, plain
from fastopt.bench.clock import Call
from fastopt.bench.steps import draw

SIZE = 20_000_000
MASTER, STATE = "masters", "state"
CASES = {
    f"Adam, float16 with float32 masters, {SIZE:,}": (MASTER, SIZE),
    f"Adam, float32 with bfloat16 state, {SIZE:,}": (STATE, SIZE),
}
"""Arguments of a step by its label."""


def fastopt_step(what: str, size: int) -> Call:
    if what == MASTER:
        return adam(size, "float16", learning_rate=LR, **MASTERS)
    return adam(size, learning_rate=LR, state_dtype="bfloat16")


def only_masters(make: Callable[[int], Call], what: str, size: int) -> Call:
    if what != MASTER:
        raise NotImplementedError("its state has the weight's precision")
    return make(size)


def numpy_masters(size: int) -> Call:
    weight, grad = (array.astype(np.float16) for array in draw(size))
    update = plain.with_masters(plain.numpy_adam(optimizer.Adam(**FASTOPT["adam"])))
    return partial(update, 0, grad, weight)


def torch_masters(size: int, rule: Callable) -> Call:
    """Return a step of the masters with handwritten casts before and after it."""
    import torch

    (master,) = weights = torch_parameters([(size,)])
    weight, grad = master.detach().half(), master.grad.half()
    update = rule(weights).step

    @torch.no_grad()
    def step() -> None:
        master.grad.copy_(grad)
        update()
        weight.copy_(master)

    return step


def optax_half(what: str, size: int) -> Call:
    """Return a step of optax with masters in the state, or with a bfloat16 mean.

    optax can store only the mean in another dtype, not the variance.
    """
    import jax
    import jax.numpy as jnp
    import optax

    if what == STATE:
        return optax_step("adam", size, mu_dtype=jnp.bfloat16)
    rule = optax_rule("adam")
    weight, grad = jax.random.normal(jax.random.key(0), (2, size)).astype(jnp.float16)

    def init(weight):
        master = weight.astype(jnp.float32)
        return master, rule.init(master)

    def update(grad, state, weight):
        master, moments = state
        updates, moments = rule.update(grad.astype(jnp.float32), moments, master)
        master = optax.apply_updates(master, updates)
        return master - weight, (master, moments)

    return optax_call(optax.GradientTransformation(init, update), weight, lambda: grad)


def mxnet_masters(size: int) -> Call:
    nd = mxnet().nd
    weight, grad = (nd.array(array, dtype="float16") for array in draw(size))
    return mxnet_call("adam", weight, lambda: grad, **MASTERS, **FASTOPT["adam"])


def _masters(make: Callable[[int], Call]) -> Callable[[str, int], Call]:
    return partial(only_masters, make)


PEERS: dict[str, tuple[str, Callable[[str, int], Call]]] = {
    # column: (library, step)
    "fastopt": ("fastopt", fastopt_step),
    "NumPy": ("numpy", _masters(numpy_masters)),
    "torch fused": (
        "torch",
        _masters(partial(torch_masters, rule=partial(torch_rule, "adam", fused=True))),
    ),
    "torch foreach": (
        "torch",
        _masters(partial(torch_masters, rule=partial(torch_rule, "adam", foreach=True))),
    ),
    "optax": ("optax", optax_half),
    "DeepSpeed": ("deepspeed", _masters(partial(torch_masters, rule=deepspeed_rule))),
    "MXNet": ("mxnet", _masters(mxnet_masters)),
}
