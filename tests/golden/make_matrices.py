"""Write matrices.json: weights after each step of Muon of torch and optax, in float64.

Run with torch, optax and jax installed: ``python tests/golden/make_matrices.py``. Torch rounds to
bfloat16 before it iterates; that alone is left out.
"""

import json
from pathlib import Path

import jax
import numpy as np
import optax.contrib
import torch

jax.config.update("jax_enable_x64", True)
torch.set_default_dtype(torch.float64)
torch.Tensor.bfloat16 = torch.Tensor.clone

STEPS = 12
SHAPES = ((4, 6), (6, 3), (2, 9))

TORCH = [
    ({"lr": 0.05, "momentum": 0.9, "weight_decay": 0.1}, {"adjust": "original"}),
    (
        {"lr": 0.05, "adjust_lr_fn": "match_rms_adamw", "nesterov": False, "weight_decay": 0.0},
        {"adjust": "rms"},
    ),
    (
        {"lr": 0.02, "momentum": 0.5, "weight_decay": 0.3, "eps": 0.01, "ns_steps": 3},
        {"adjust": "original", "steps": 3},
    ),
]
"""Arguments of torch, and ours in place of those that are called otherwise."""

POLAR = (
    (8.156554524902461 / 1.02, -22.48329292557795 / 1.02**3, 15.878769915207462 / 1.02**5),
    (4.042929935166739, -2.808917465908714, 0.5000178451051316),
    (3.8916678022926607, -2.772484153217685, 0.5060648178503393),
    (3.285753657755655, -2.3681294933425376, 0.46449024233003106),
    (2.3465413258596377, -1.7097828382687081, 0.42323551169305323),
)
"""Of Polar Express; the division of the first matrix by 1.02 is in the first triple."""

OPTAX = [
    ({"beta": 0.9, "weight_decay": 0.1}, {"momentum": 0.9, "adjust": "original"}),
    ({"beta": 0.5, "consistent_rms": 0.2}, {"momentum": 0.5, "adjust": "rms"}),
    (
        {"beta": 0.9, "ns_coeffs": POLAR},
        {"momentum": 0.9, "adjust": "original", "coefficients": "polar"},
    ),
]
"""The same of optax, which has another momentum of Nesterov's."""


def data(shape):
    """First weights, and gradients from large to small."""
    rng = np.random.default_rng(len(shape) * 100 + shape[1])
    scale = np.geomspace(1, 1e-2, shape[1]) * np.geomspace(1e2, 1e-4, STEPS)[:, None, None]
    return rng.normal(size=shape), rng.normal(size=(STEPS, *shape)) * scale


def of_torch(shape, arguments):
    start, gradients = data(shape)
    weight = torch.nn.Parameter(torch.tensor(start))
    optimizer = torch.optim.Muon([weight], **arguments)
    for gradient in gradients:
        weight.grad = torch.tensor(gradient)
        optimizer.step()
        yield weight.detach().tolist()


def of_optax(shape, arguments):
    """The weights of optax map inputs to outputs, and are transposed."""
    start, gradients = data(shape)
    weight = start.T
    optimizer = optax.contrib.muon(0.05, nesterov=False, eps=1e-12, **arguments)
    state = optimizer.init(weight)
    for gradient in gradients:
        step, state = optimizer.update(gradient.T, state, weight)
        weight = optax.apply_updates(weight, step)
        yield np.asarray(weight).T.tolist()


def cases():
    for shape in SHAPES:
        for arguments, renamed in TORCH:
            same = {k: v for k, v in arguments.items() if k not in ("adjust_lr_fn", "ns_steps")}
            yield {
                "library": "torch",
                "shape": shape,
                "arguments": {"momentum": 0.95, "coefficients": "quintic", **same, **renamed},
                "options": arguments,
                "weights": list(of_torch(shape, arguments)),
            }
        for arguments, renamed in OPTAX:
            same = {k: v for k, v in arguments.items() if k == "weight_decay"}
            usual = {"lr": 0.05, "nesterov": False, "eps": 1e-12, "coefficients": "quintic"}
            yield {
                "library": "optax",
                "shape": shape,
                "arguments": {**usual, **same, **renamed},
                "weights": list(of_optax(shape, arguments)),
            }


if __name__ == "__main__":
    made = {
        "packages": {
            "torch": torch.__version__,
            "optax": optax.__version__,
            "jax": jax.__version__,
        },
        "data": {
            f"{shape[0]}x{shape[1]}": [part.tolist() for part in data(shape)] for shape in SHAPES
        },
        "cases": list(cases()),
    }
    path = Path(__file__).with_name("matrices.json")
    path.write_text(json.dumps(made) + "\n")
