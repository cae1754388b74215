"""Write matrices.json: steps of Muon, Adafactor and SM3 of torch and optax, in float64.

Run with torch, optax and jax installed: ``python tests/golden/make_matrices.py``. Torch rounds to
bfloat16 before it iterates; that alone is left out.
"""

from functools import partial

import jax
import numpy as np
import optax
import optax.contrib
import torch
from recording import by_shape, case, steps_of_optax, steps_of_torch, write

jax.config.update("jax_enable_x64", True)
torch.set_default_dtype(torch.float64)
torch.Tensor.bfloat16 = torch.Tensor.clone

STEPS = 12
SHAPES = ((4, 6), (6, 3), (2, 9))

TORCH = [
    ({"lr": 0.05, "momentum": 0.9, "weight_decay": 0.1}, {"adjust": "original"}),
    ({"lr": 0.05, "adjust_lr_fn": "match_rms_adamw", "nesterov": False, "weight_decay": 0.0},
     {"adjust": "rms"}),
    ({"lr": 0.02, "momentum": 0.5, "weight_decay": 0.3, "eps": 0.01, "ns_steps": 3},
     {"adjust": "original", "steps": 3}),
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
    ({"beta": 0.9, "ns_coeffs": POLAR}, {"momentum": 0.9, "adjust": "original",
     "coefficients": "polar_express"}),
]
"""The same of optax, which has another momentum of Nesterov's."""


SMALL = {"eps": (1e-30, 1e-3)}
ADAFACTOR_SHAPES = (*SHAPES, (3, 4, 2), (5,))
ADAFACTOR = [
    ("torch", {"lr": 0.05, **SMALL}, {"eps1": 1e-30}),
    ("torch", {"lr": 0.5, "eps": (1e-30, 0.5), "d": 1.2, "weight_decay": 0.1, "beta2_decay": -0.5},
     {"eps1": 1e-30, "eps2": 0.5, "clip_threshold": 1.2, "decay_rate": 0.5}),
    ("optax", {"learning_rate": 0.05, "min_dim_size_to_factor": 1, "clipping_threshold": 0.3},
     {"lr": 0.05, "relative_step": False, "clip_threshold": 0.3}),
    ("optax", {"learning_rate": 0.05, "min_dim_size_to_factor": 1,
     "multiply_by_parameter_scale": False, "clipping_threshold": None, "decay_rate": 0.6,
     "eps": 1e-3}, {"lr": 0.05, "relative_step": False, "scale_parameter": False,
     "clip_threshold": None, "decay_rate": 0.6, "eps1": 1e-3}),
]
"""Library, its arguments of Adafactor, and ours in place of those that are called otherwise."""


def data(shape):
    """First weights, and gradients from large to small."""
    rng = np.random.default_rng(len(shape) * 100 + shape[-1])
    steps = np.geomspace(1e2, 1e-4, STEPS).reshape(-1, *[1] * len(shape))
    scale = np.geomspace(1, 1e-2, shape[-1]) * steps
    return rng.normal(size=shape), rng.normal(size=(STEPS, *shape)) * scale


def of_optax(shape, arguments):
    """The weights of optax map inputs to outputs, and are transposed."""
    start, gradients = data(shape)
    optimizer = optax.contrib.muon(0.05, nesterov=False, eps=1e-12, **arguments)
    steps = steps_of_optax(optimizer, start.T, np.swapaxes(gradients, 1, 2))
    return [np.transpose(weight).tolist() for weight in steps]


def adafactor_cases():
    for shape in ADAFACTOR_SHAPES:
        for library, arguments, renamed in ADAFACTOR:
            if library == "torch":
                steps = steps_of_torch(partial(torch.optim.Adafactor, **arguments), *data(shape))
            elif len(shape) > 2:
                continue  # where optax takes the two longest axes for rows and columns
            else:
                steps = steps_of_optax(optax.adafactor(**arguments), *data(shape))
            same = {k: v for k, v in arguments.items() if k in ("lr", "weight_decay")}
            yield case(shape, {**same, **renamed}, steps, library=library)


def sm3_cases():
    for shape in ADAFACTOR_SHAPES:
        for momentum in (0.9, 0.0):
            steps = steps_of_optax(optax.sm3(0.05, momentum=momentum), *data(shape))
            yield case(shape, {"lr": 0.05, "momentum": momentum, "eps": 1e-8}, steps)


def cases():
    for shape in SHAPES:
        for arguments, renamed in TORCH:
            same = {k: v for k, v in arguments.items() if k not in ("adjust_lr_fn", "ns_steps")}
            own = {"momentum": 0.95, "coefficients": "quintic", **same, **renamed}
            steps = steps_of_torch(partial(torch.optim.Muon, **arguments), *data(shape))
            yield case(shape, own, steps, library="torch", options=arguments)
        for arguments, renamed in OPTAX:
            same = {k: v for k, v in arguments.items() if k == "weight_decay"}
            own = {"lr": 0.05, "nesterov": False, "eps": 1e-12, "coefficients": "quintic", **same}
            yield case(shape, {**own, **renamed}, of_optax(shape, arguments), library="optax")


if __name__ == "__main__":
    made = {
        "data": by_shape(data, ADAFACTOR_SHAPES),
        "cases": [*cases()],
        "adafactor": [*adafactor_cases()],
        "sm3": [*sm3_cases()],
    }
    write("matrices.json", ["torch", "optax", "jax"], made)
