"""Write prodigy.json: steps of optimizers that estimate a distance, over three tensors, in float64.

Prodigy of prodigyopt, DAdaptAdam of dadaptation, and the Schedule-Free Prodigy of
prodigy-plus-schedule-free. Run with these and torch installed: ``python
tests/golden/make_prodigy.py``. The first has the next estimate times epsilon in the
denominator; an epsilon of 1e-14 makes it small beside the root. The last one is changed to compute
in float64, from all elements.
"""

import sys
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

import numpy as np
import torch
from dadaptation import DAdaptAdam
from prodigyopt import Prodigy
from recording import write

STEPS, SHAPES, EPS = 12, ((4, 6), (5,), (3, 2)), 1e-14

PRODIGYOPT = [
    {"d0": 1e-3, "d_coef": 0.5},
    {},
    {"d0": 1e-3, "weight_decay": 0.1, "use_bias_correction": True, "d_coef": 2.0},
    {"d0": 0.01, "lr": 0.5, "weight_decay": 0.1, "decouple": False, "growth_rate": 1.5,
     "safeguard_warmup": True, "betas": (0.8, 0.99), "beta3": 0.9},
]
DADAPTATION = [
    {},
    {"decouple": True, "weight_decay": 0.1, "use_bias_correction": True, "d0": 1e-3},
    {"lr": 0.5, "weight_decay": 0.1, "growth_rate": 1.3, "d0": 1e-2, "betas": (0.8, 0.9)},
]
PLUS = [
    {"d0": 1e-3},
    {"lr": 0.7, "weight_decay": 0.1, "d_coef": 0.1, "d0": 1e-3, "d_limiter": False,
     "betas": (0.95, 0.999)},
    {"beta3": 0.9, "d0": 1e-3},
]
PLAIN = {"use_stableadamw": False, "factored": False, "split_groups": False}


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


def exact_plus():
    """The class of prodigy-plus-schedule-free, in float64 and without its samples of elements."""
    folder = Path(find_spec("prodigyplus").origin).parent
    made = {}
    for name in ("core_optimiser", "prodigy_plus_schedulefree"):
        text = (folder / f"{name}.py").read_text().replace("slice_p=11", "slice_p=1")
        text = text.replace("torch.bfloat16 if grad.dtype == torch.float32 else grad.dtype", "p.dtype")
        text = text.replace("torch.float32", "torch.float64").replace(".float()", ".double()")
        made[name] = sys.modules[f"exact.{name}"] = ModuleType(f"exact.{name}")
        made[name].__package__ = "exact"
        exec(text, vars(made[name]))
    return made["prodigy_plus_schedulefree"].ProdigyPlusScheduleFree


def of_torch(kind, arguments):
    """Weights after each step, and the estimate before it."""
    weights, gradients = data()
    parameters = [torch.nn.Parameter(torch.tensor(weight)) for weight in weights]
    optimizer = kind(parameters, **arguments)
    for step in gradients:
        for parameter, gradient in zip(parameters, step, strict=True):
            parameter.grad = torch.tensor(gradient)
        d = optimizer.param_groups[0]["d"]
        optimizer.step()
        yield [parameter.detach().tolist() for parameter in parameters], d


def cases():
    sys.modules["exact"] = ModuleType("exact")
    kinds = {
        "prodigyopt": ("prodigy", PRODIGYOPT, Prodigy, {"eps": EPS}, {"eps": EPS}),
        "dadaptation": ("dadaptadam", DADAPTATION, DAdaptAdam, {}, {}),
        "prodigy-plus-schedule-free": ("schedulefreeprodigy", PLUS, exact_plus(), PLAIN, {}),
    }
    for library, (name, of, kind, always, own) in kinds.items():
        for arguments in of:
            yield case(library, name, own, arguments, of_torch(kind, {**always, **arguments}))


def case(library, name, own, arguments, steps):
    weights, estimates = zip(*steps, strict=True)
    own = own | {name.removeprefix("use_"): value for name, value in arguments.items()}
    if not own.pop("d_limiter", True):
        own["growth_rate"] = 1e30
    return {"library": library, "name": name, "arguments": own, "weights": weights, "d": estimates}


if __name__ == "__main__":
    weights, gradients = data()
    made = {
        "start": [weight.tolist() for weight in weights],
        "gradients": [[gradient.tolist() for gradient in step] for step in gradients],
        "cases": list(cases()),
    }
    libraries = "prodigyopt", "dadaptation", "prodigy-plus-schedule-free"
    write("prodigy.json", (*libraries, "torch"), made)
