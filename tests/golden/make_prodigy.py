"""Write prodigy.json: steps of prodigyopt's and of optax's Prodigy over three tensors, in float64.

Run with prodigyopt, torch, optax and jax installed: ``python tests/golden/make_prodigy.py``. Both
packages have the next estimate times epsilon in the denominator; an epsilon of 1e-14 makes it
small beside the root.
"""

import json
from importlib.metadata import version
from pathlib import Path

import jax
import numpy as np
import optax.contrib
import torch
from prodigyopt import Prodigy

jax.config.update("jax_enable_x64", True)

STEPS, SHAPES, EPS = 12, ((4, 6), (5,), (3, 2)), 1e-14

PRODIGYOPT = [
    ({"d0": 1e-3, "d_coef": 0.5}, {"d0": 1e-3, "d_coef": 0.5}),
    ({}, {}),
    (
        {"d0": 1e-3, "weight_decay": 0.1, "use_bias_correction": True, "d_coef": 2.0},
        {"d0": 1e-3, "weight_decay": 0.1, "bias_correction": True, "d_coef": 2.0},
    ),
    (
        {"d0": 0.01, "lr": 0.5, "weight_decay": 0.1, "decouple": False, "growth_rate": 1.5}
        | {"safeguard_warmup": True, "betas": (0.8, 0.99), "beta3": 0.9},
        {"d0": 0.01, "lr": 0.5, "weight_decay": 0.1, "decouple": False, "growth_rate": 1.5}
        | {"safeguard_warmup": True, "betas": (0.8, 0.99), "beta3": 0.9},
    ),
]
"""Arguments of prodigyopt, and ours."""

OPTAX = [
    (
        {"estim_lr0": 1e-3, "weight_decay": 0.1, "estim_lr_coef": 0.5, "betas": (0.8, 0.99)},
        {"d0": 1e-3, "weight_decay": 0.1, "d_coef": 0.5, "betas": (0.8, 0.99)},
    ),
    (
        {"estim_lr0": 1e-3, "learning_rate": 0.7, "safeguard_warmup": True, "estim_lr_coef": 10.0},
        {"d0": 1e-3, "lr": 0.7, "safeguard_warmup": True, "d_coef": 10.0},
    ),
]
"""The same of optax, which always corrects the bias."""


def data():
    """First weights, and gradients from large to small that go in one direction more or less."""
    rng = np.random.default_rng(23)
    weights = [rng.normal(size=shape) for shape in SHAPES]
    scales = [np.geomspace(1e2, 1e-4, int(np.prod(shape))).reshape(shape) for shape in SHAPES]
    mean = [rng.normal(size=shape) * scale for shape, scale in zip(SHAPES, scales, strict=True)]
    size = np.exp(np.cos(np.arange(STEPS)))
    return weights, [
        [size[k] * each * (1 + 0.3 * rng.normal(size=each.shape)) for each in mean]
        for k in range(STEPS)
    ]


def of_prodigyopt(arguments):
    """Weights after each step, and the estimate before it."""
    weights, gradients = data()
    parameters = [torch.nn.Parameter(torch.tensor(weight)) for weight in weights]
    optimizer = Prodigy(parameters, eps=EPS, **arguments)
    for step in gradients:
        for parameter, gradient in zip(parameters, step, strict=True):
            parameter.grad = torch.tensor(gradient)
        d = optimizer.param_groups[0]["d"]
        optimizer.step()
        yield [parameter.detach().tolist() for parameter in parameters], d


def of_optax(arguments):
    """The same of optax."""
    weights, gradients = data()
    optimizer = optax.contrib.prodigy(eps=EPS, **arguments)
    state = optimizer.init(weights)
    for step in gradients:
        d = float(state.estim_lr)
        moves, state = optimizer.update(step, state, weights)
        weights = optax.apply_updates(weights, moves)
        yield [np.asarray(weight).tolist() for weight in weights], d


def cases():
    for library, run, of in (("prodigyopt", of_prodigyopt, PRODIGYOPT), ("optax", of_optax, OPTAX)):
        for arguments, ours in of:
            always = {"bias_correction": True} if library == "optax" else {}
            weights, estimates = zip(*run(arguments), strict=True)
            yield {
                "library": library,
                "arguments": {"eps": EPS, **always, **ours},
                "weights": weights,
                "d": estimates,
            }


if __name__ == "__main__":
    weights, gradients = data()
    made = {
        "packages": {name: version(name) for name in ("prodigyopt", "torch", "optax", "jax")},
        "start": [weight.tolist() for weight in weights],
        "gradients": [[gradient.tolist() for gradient in step] for step in gradients],
        "cases": list(cases()),
    }
    path = Path(__file__).with_name("prodigy.json")
    path.write_text(json.dumps(made) + "\n")
