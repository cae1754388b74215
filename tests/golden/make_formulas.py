"""Write formulas.json: weights after each step of optimizers of other packages, in float64.

Run with torch, optax, jax, schedulefree, timm and pytorch_optimizer installed:
``python tests/golden/make_formulas.py``.
"""

from functools import partial, reduce

import jax
import numpy as np
import optax
import pytorch_optimizer
import schedulefree
import timm.optim
import torch
from recording import steps_of_optax, steps_of_torch, write

jax.config.update("jax_enable_x64", True)
torch.set_default_dtype(torch.float64)

STEPS, SIZE = 12, 6
BETAS = {"betas": (0.8, 0.95)}
DECAYED = {"weight_decay": 0.1}
RATES = [0.05, 0.05, 0.02, 0.08, 0.08, 0.001, 0.03, 0.03, 0.03, 0.06, 0.0, 0.04]

MOMENTS = {"learning_rate": 0.05, "b1": 0.8, "b2": 0.95, "eps": 0.01}
CASES = [
    ("torch", "Adam", "Adam", {"lr": 0.05, "eps": 0.01, **BETAS}, {}),
    ("torch", "Adam", "Adam", {"lr": 0.05, "eps": 0.01, **BETAS, **DECAYED}, {}),
    ("torch", "Adam", "Adam", {"lr": 0.05, "eps": 1e-8, **DECAYED, "maximize": True}, {}),
    ("torch", "AdamW", "AdamW", {"lr": 0.05, "eps": 0.01, **BETAS, **DECAYED}, {}),
    ("torch", "AdamW", "AdamW", {"lr": 0.05, "eps": 1e-8, "weight_decay": 0.3, "maximize": True}, {}),
    ("torch", "Adagrad", "AdaGrad", {"lr": 0.05, "eps": 0.01}, {}),
    ("torch", "Adagrad", "AdaGrad", {"lr": 0.05, "eps": 1e-10, **DECAYED}, {}),
    ("torch", "Adagrad", "AdaGrad", {"lr": 0.05, "eps": 1e-10, **DECAYED, "maximize": True}, {}),
    ("torch", "RMSprop", "RMSProp", {"lr": 0.05, "alpha": 0.8, "eps": 0.01, **DECAYED}, {"gamma1": 0.8}),
    ("torch", "RMSprop", "RMSProp", {"lr": 0.05, "alpha": 0.8, "eps": 0.01, "centered": True,
     "momentum": 0.5, **DECAYED}, {"gamma1": 0.8, "gamma2": 0.5, "centered": True}),
    ("torch", "RMSprop", "RMSProp", {"lr": 0.05, "alpha": 0.8, "eps": 0.01, "centered": True,
     "maximize": True}, {"gamma1": 0.8, "gamma2": 0.0, "centered": True}),
    ("torch", "NAdam", "Nadam", {"lr": 0.05, "eps": 0.01, "momentum_decay": 0.01, **BETAS, **DECAYED},
     {"schedule_decay": 0.01}),
    ("torch", "NAdam", "Nadam", {"lr": 0.05, "eps": 0.01, **BETAS, "maximize": True}, {}),
    ("torch", "NAdam", "Nadam", {"lr": 0.05, "eps": 0.01, **BETAS, **DECAYED,
     "decoupled_weight_decay": True}, {"decouple": True}),
    ("torch", "RMSprop", "RMSProp", {"lr": 0.02, "alpha": 0.8, "eps": 0.01, "momentum": 0.9, **DECAYED},
     {"gamma1": 0.8, "momentum": 0.9}),
    ("torch", "Adagrad", "AdaGrad", {"lr": 0.05, "eps": 0.01, "lr_decay": 0.2,
     "initial_accumulator_value": 0.1, **DECAYED}, {}),
    ("torch", "SGD", "SGD", {"lr": 0.05, "momentum": 0.9, "rates": RATES}, {"momentum": 0.9}),
    ("torch", "SGD", "SGD", {"lr": 0.05, "momentum": 0.9, "dampening": 0.3, **DECAYED, "rates": RATES},
     {"momentum": 0.9}),
    ("optax", "adam", "Adam", MOMENTS, {}),
    ("optax", "adamw", "AdamW", {**MOMENTS, **DECAYED}, {}),
    ("optax", "rmsprop", "RMSProp", {"learning_rate": 0.05, "decay": 0.8, "eps": 0.01,
     "eps_in_sqrt": False}, {}),
]
"""Package, class there, ours, arguments there, and ours in place of those called otherwise.

`rates` are the learning rates of the steps, if they change.
"""

REPLACED = ("alpha", "momentum", "centered", "momentum_decay", "decoupled_weight_decay")
RENAMED = {"b1": "beta1", "b2": "beta2", "b3": "beta3", "decay": "gamma1"}
LEFT_OUT = ("etas", "step_sizes", "use_clipping", "eps_root", "corrected_weight_decay")
LEFT_OUT += ("optimize_1d", "theta", "update_proj_gap", "eps_in_sqrt")

FREE = {"lr": 0.05, "warmup_steps": 4, "weight_decay": 0.1}


def slow_decay(count):
    """Decay rate of AdEMAMix's slow average, as in its paper, from 0.8 to 0.99 in 8 steps."""
    part = jax.numpy.minimum((count + 1) / 8, 1)
    return jax.numpy.exp(1 / ((1 - part) / np.log(0.8) + part / np.log(0.99)))


ADAM = {"lr": 0.05, "eps": 0.01, **BETAS, **DECAYED}
MIXED = {**MOMENTS, **DECAYED, "b3": 0.99, "alpha": 3.0}
OTHERS = [
    ("torch", "Adam", "Adam", {**ADAM, "amsgrad": True}, {"formula": "torch"}),
    ("torch", "AdamW", "AdamW", {**ADAM, "amsgrad": True}, {"formula": "torch"}),
    ("torch", "Rprop", "Rprop", {"lr": 0.05}, {}),
    ("torch", "Rprop", "Rprop", {"lr": 0.05, "etas": (0.4, 1.3), "step_sizes": (0.03, 0.07),
     "maximize": True}, {"eta_minus": 0.4, "eta_plus": 1.3, "least_step": 0.03,
     "largest_step": 0.07}),
    ("torch", "ASGD", "ASGD", {"lr": 0.01, "lambd": 0.2, "t0": 3, **DECAYED}, {}),
    ("torch", "ASGD", "ASGD", {"lr": 0.05, "lambd": 0.2, "t0": 3, **DECAYED, "rates": RATES}, {}),
    ("timm", "AdamWLegacy", "AdamW", {**ADAM, "lr": max(RATES), "corrected_weight_decay": True,
     "rates": RATES}, {"formula": "torch", "corrected_decay": max(RATES)}),
    ("timm", "SGDW", "SGD", {"lr": 0.05, "momentum": 0.9, **DECAYED, "rates": RATES},
     {"formula": "torch", "decouple": True}),
    ("optax", "rmsprop", "RMSProp", {"learning_rate": 0.02, "decay": 0.8, "eps": 0.01,
     "momentum": 0.9}, {}),
    ("optax", "adagrad", "AdaGrad", {"learning_rate": 0.05, "initial_accumulator_value": 0.1,
     "eps": 0.01}, {}),
    ("optax", "nadamw", "NAdamW", {**MOMENTS, **DECAYED}, {}),
    ("optax", "yogi", "Yogi", {**MOMENTS, "eps": 1e-3}, {}),
    ("optax", "contrib.ademamix", "AdEMAMix", MIXED, {}),
    ("optax", "contrib.ademamix", "AdEMAMix", {**MIXED, "b3": slow_decay,
     "alpha": lambda count: 3 * jax.numpy.minimum((count + 1) / 6, 1)}, {"beta3": 0.99,
     "beta3_steps": 8, "alpha": 3.0, "alpha_steps": 6}),
    ("optax", "contrib.adopt", "ADOPT", MOMENTS, {}),
    ("optax", "contrib.adopt", "ADOPT", {**MOMENTS, "use_clipping": False}, {"clips": False}),
    # With a b2 of 0.5 the factors of optax are those of the authors.
    ("optax", "adan", "Adan", {**MOMENTS, **DECAYED, "b2": 0.5, "b3": 0.9, "eps_root": 0.0},
     {"proximal": False}),
    ("optax", "novograd", "NovoGrad", {**MOMENTS, **DECAYED}, {}),
    ("schedulefree", "AdamWScheduleFree", "ScheduleFreeAdamW", {**FREE, "eps": 0.01}, {}),
    ("schedulefree", "AdamWScheduleFree", "ScheduleFreeAdamW", {"lr": 0.05, "betas": (0.8, 0.95),
     "r": 1.0, "weight_lr_power": 1.0}, {}),
    ("schedulefree", "SGDScheduleFree", "ScheduleFreeSGD", {**FREE, "lr": 0.01}, {}),
    # timm decays after the step.
    ("timm", "LaProp", "LaProp", {**ADAM, "weight_decay": 0.0}, {}),
    ("timm", "Mars", "MARS", {**ADAM, "gamma": 0.1, "optimize_1d": True}, {}),
    ("timm", "Mars", "MARS", {**ADAM, "gamma": 0.0, "optimize_1d": True}, {}),
    ("pytorch_optimizer", "StableSPAM", "StableSPAM", {**ADAM, "gamma1": 0.6, "gamma2": 0.8,
     "theta": 0.7, "update_proj_gap": 100}, {"gamma3": 0.7, "reset_interval": 100}),
    ("pytorch_optimizer", "Grams", "AdamW", ADAM, {"formula": "torch", "grams": True}),
]
def data():
    """First weights, and gradients from large to small beside epsilon."""
    rng = np.random.default_rng(0)
    scale = np.array([1e2, 1.0, 1e-1, 1e-2, 1e-4, 0.0])
    return rng.normal(size=SIZE), rng.normal(size=(STEPS, SIZE)) * scale


def of_torch(name, arguments, package=torch.optim):
    rest = {name: value for name, value in arguments.items() if name != "rates"}
    make = partial(getattr(package, name), **rest)
    return steps_of_torch(make, *data(), arguments.get("rates"))


def of_optax(name, arguments):
    return steps_of_optax(reduce(getattr, name.split("."), optax)(**arguments), *data())


def of_schedulefree(name, arguments):
    """Weights that gradients are taken at, and averages."""

    def make(parameters):
        made = getattr(schedulefree, name)(parameters, foreach=False, **arguments)
        made.train()
        return made

    def see(optimizer, weight, step):
        at = weight.detach().tolist()
        optimizer.eval()
        average = weight.detach().tolist()
        optimizer.train()
        return at, average

    return zip(*steps_of_torch(make, *data(), see=see), strict=True)


LIBRARIES = {
    "torch": of_torch,
    "optax": of_optax,
    "schedulefree": of_schedulefree,
    "timm": partial(of_torch, package=timm.optim),
    "pytorch_optimizer": partial(of_torch, package=pytorch_optimizer),
}
"""Function that returns the steps of an optimizer by name and arguments."""


def recorded(library, name, ours, arguments, more):
    left = (*LEFT_OUT, *(REPLACED if library == "torch" else ()))
    own = {RENAMED.get(k, k): v for k, v in arguments.items() if k not in left}
    case = {"library": library, "name": name, "class": ours, "arguments": {**own, **more}}
    steps = [*LIBRARIES[library](name, arguments)]
    if library == "schedulefree":
        return case | dict(zip(("weights", "averages"), steps, strict=True))
    return {**case, "weights": steps}


if __name__ == "__main__":
    weight, gradients = data()
    made = {
        "start": weight.tolist(),
        "gradients": gradients.tolist(),
        "cases": [recorded(*case) for case in CASES],
        "others": [recorded(*case) for case in OTHERS],
    }
    write("formulas.json", ["jax", *LIBRARIES], made, indent=1)
