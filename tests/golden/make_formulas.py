"""Write formulas.json: weights after each step of optimizers of torch and optax, in float64.

Run with torch, optax and jax installed: ``python tests/golden/make_formulas.py``.
"""

import json
from pathlib import Path

import jax
import numpy as np
import optax
import torch

jax.config.update("jax_enable_x64", True)
torch.set_default_dtype(torch.float64)

STEPS, SIZE = 12, 6
BETAS = {"betas": (0.8, 0.95)}
DECAYED = {"weight_decay": 0.1}

TORCH = [
    ("Adam", "Adam", {"lr": 0.05, "eps": 0.01, **BETAS}, {}),
    ("Adam", "Adam", {"lr": 0.05, "eps": 0.01, **BETAS, **DECAYED}, {}),
    ("Adam", "Adam", {"lr": 0.05, "eps": 1e-8, **DECAYED, "maximize": True}, {}),
    ("AdamW", "AdamW", {"lr": 0.05, "eps": 0.01, **BETAS, **DECAYED}, {}),
    ("AdamW", "AdamW", {"lr": 0.05, "eps": 1e-8, "weight_decay": 0.3, "maximize": True}, {}),
    ("Adagrad", "AdaGrad", {"lr": 0.05, "eps": 0.01}, {}),
    ("Adagrad", "AdaGrad", {"lr": 0.05, "eps": 1e-10, **DECAYED}, {}),
    ("Adagrad", "AdaGrad", {"lr": 0.05, "eps": 1e-10, **DECAYED, "maximize": True}, {}),
    (
        "RMSprop",
        "RMSProp",
        {"lr": 0.05, "alpha": 0.8, "eps": 0.01, **DECAYED},
        {"gamma1": 0.8},
    ),
    (
        "RMSprop",
        "RMSProp",
        {"lr": 0.05, "alpha": 0.8, "eps": 0.01, "centered": True, "momentum": 0.5, **DECAYED},
        {"gamma1": 0.8, "gamma2": 0.5, "centered": True},
    ),
    (
        "RMSprop",
        "RMSProp",
        {"lr": 0.05, "alpha": 0.8, "eps": 0.01, "centered": True, "maximize": True},
        {"gamma1": 0.8, "gamma2": 0.0, "centered": True},
    ),
    (
        "NAdam",
        "Nadam",
        {"lr": 0.05, "eps": 0.01, "momentum_decay": 0.01, **BETAS, **DECAYED},
        {"schedule_decay": 0.01},
    ),
    ("NAdam", "Nadam", {"lr": 0.05, "eps": 0.01, **BETAS, "maximize": True}, {}),
]
"""Class of torch, ours, arguments of torch, and ours in place of those that are called otherwise."""

OPTAX = [
    ("adam", "Adam", {"learning_rate": 0.05, "b1": 0.8, "b2": 0.95, "eps": 0.01}),
    (
        "adamw",
        "AdamW",
        {"learning_rate": 0.05, "b1": 0.8, "b2": 0.95, "eps": 0.01, "weight_decay": 0.1},
    ),
    ("rmsprop", "RMSProp", {"learning_rate": 0.05, "decay": 0.8, "eps": 0.01, "eps_in_sqrt": False}),
]
REPLACED = ("alpha", "momentum", "centered", "momentum_decay")
RENAMED = {"b1": "beta1", "b2": "beta2", "decay": "gamma1"}


def data():
    """First weights, and gradients from large to small beside epsilon."""
    rng = np.random.default_rng(0)
    scale = np.array([1e2, 1.0, 1e-1, 1e-2, 1e-4, 0.0])
    return rng.normal(size=SIZE), rng.normal(size=(STEPS, SIZE)) * scale


def of_torch(name, arguments):
    start, gradients = data()
    weight = torch.nn.Parameter(torch.tensor(start))
    optimizer = getattr(torch.optim, name)([weight], **arguments)
    for gradient in gradients:
        weight.grad = torch.tensor(gradient)
        optimizer.step()
        yield weight.detach().tolist()


def of_optax(name, arguments):
    weight, gradients = data()
    optimizer = getattr(optax, name)(**arguments)
    state = optimizer.init(weight)
    for gradient in gradients:
        step, state = optimizer.update(gradient, state, weight)
        weight = optax.apply_updates(weight, step)
        yield np.asarray(weight).tolist()


def cases():
    for name, ours, arguments, renamed in TORCH:
        same = {k: v for k, v in arguments.items() if k not in REPLACED}
        yield {
            "library": "torch",
            "name": name,
            "class": ours,
            "arguments": {**same, **renamed},
            "weights": list(of_torch(name, arguments)),
        }
    for name, ours, arguments in OPTAX:
        same = {RENAMED.get(k, k): v for k, v in arguments.items() if k != "eps_in_sqrt"}
        yield {
            "library": "optax",
            "name": name,
            "class": ours,
            "arguments": same,
            "weights": list(of_optax(name, arguments)),
        }


if __name__ == "__main__":
    weight, gradients = data()
    made = {
        "packages": {"torch": torch.__version__, "optax": optax.__version__, "jax": jax.__version__},
        "start": weight.tolist(),
        "gradients": gradients.tolist(),
        "cases": list(cases()),
    }
    path = Path(__file__).with_name("formulas.json")
    path.write_text(json.dumps(made, indent=1) + "\n")
