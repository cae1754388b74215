"""Write packages.json: steps of optimizers of pytorch_optimizer, galore_torch and apollo_torch.

Run with torch and these packages installed: ``python tests/golden/make_packages.py``. The first one
rounds to bfloat16 before it iterates, and keeps a state in float32; that alone is left out.
"""

from functools import partial

import apollo_torch
import galore_torch
import numpy as np
import pytorch_optimizer as packaged
import torch
from pytorch_optimizer.optimizer import psgd, scion
from pytorch_optimizer.optimizer.scion import LMONorm
from recording import drawn, steps_of_torch, write

STEPS = 8
data = partial(drawn, steps=STEPS, last=1e-2)
ITERATE = scion.zero_power_via_newton_schulz_5
scion.zero_power_via_newton_schulz_5 = partial(ITERATE, dtype=torch.float64)

CASES = [
    ("came", "CAME", (4, 6), {"lr": 0.05}, {}),
    ("came", "CAME", (2, 3, 4), {"lr": 0.05, "betas": (0.8, 0.9, 0.7), "weight_decay": 0.1,
     "clip_threshold": 0.5}, {}),
    ("came", "CAME", (5,), {"lr": 0.05, "weight_decay": 0.1}, {}),
    ("adammini", "AdamMini", (4, 6), {"lr": 0.05, "weight_decay": 0.1}, {"heads": {".": 2}}),
    ("adammini", "AdamMini", (5,), {"lr": 0.05, "betas": (0.8, 0.9)}, {"wd": 0.1}),
    ("scion", "SCION", (4, 6), {"lr": 0.02, "scale": 5.0}, {"radius": 5.0, "momentum": 0.9}),
    ("scion", "SCION", (6, 4), {"lr": 0.02, "scale": 5.0, "momentum": 0.3, "constraint": True},
     {"radius": 5.0, "momentum": 0.7, "wd": 1.0}),
    ("scion", "SCION", (4, 3, 2, 2), {"lr": 0.02, "scale": 5.0}, {"radius": 5.0}),
    ("scion", "SCION", (5,), {"lr": 0.02, "scale": 5.0}, {"radius": 5.0}),
    ("scion", "SCION", (3, 5), {"lr": 0.02, "norm_type": LMONorm.SIGN, "scale": 30.0},
     {"norms": {".": ("sign", 30.0)}}),
    ("scion", "SCION", (3, 6), {"lr": 0.02, "norm_type": LMONorm.ROW, "scale": 30.0},
     {"norms": {".": ("rows", 30.0)}}),
]
"""Our name, the package's, a shape, its arguments, and ours that are called otherwise."""

PROJECTED = [
    ("galore", (4, 6), {"lr": 0.05, "weight_decay": 0.1}, {"rank": 2, "scale": 0.25}, {}),
    ("galore", (7, 3), {"lr": 0.05, "betas": (0.8, 0.9)}, {"rank": 3, "scale": 1.0}, {}),
    ("apollo", (4, 6), {"lr": 0.05, "weight_decay": 0.1}, {"rank": 2, "scale": 1.0}, {}),
    ("apollo", (7, 3), {"lr": 0.05}, {"rank": 1, "scale": 128.0}, {"scale_by": "tensor"}),
]
"""Our name, a shape, arguments, those of a group, and ours that are called otherwise."""

WHITENED = [
    ((4, 6), {}, {}),
    ((5,), {}, {}),
    ((), {}, {}),
    ((3, 4, 2), {"memory_save_mode": "one_diag", "weight_decay": 0.1, "momentum": 0.5},
     {"diagonal": "one_diag", "wd": 0.1, "momentum": 0.5}),
    ((6, 3), {"memory_save_mode": "smart_one_diag", "pre_conditioner_update_probability": 0.5},
     {"diagonal": "smart_one_diag", "precondition_probability": 0.5}),
]
"""Shapes, arguments of Kron, and ours."""

GAP = 3
"""Steps from one projection to the next."""

SAME = ("lr", "weight_decay", "clip_threshold")


class Layer(torch.nn.Module):
    """A module whose weight has the name of a linear layer's."""

    def __init__(self, weight):
        super().__init__()
        self.weight = weight


def case(name, shape, arguments, given, weights, **more):
    """A case with our arguments: those that both have, the betas, and others in `arguments`."""
    same = {k: v for k, v in given.items() if k in SAME}
    same |= {f"beta{k}": beta for k, beta in enumerate(given.get("betas", ()), 1)}
    found = {"name": name, "shape": shape, "arguments": {**same, **arguments}}
    parts = [np.asarray(part).tolist() for part in data(shape)]
    return {**found, "data": parts, **more, "weights": [*weights]}


def packed(name, kind, shape, arguments, ours):
    """A case of pytorch_optimizer."""

    def make(parameters):
        if kind != "AdamMini":
            return getattr(packaged, kind)(parameters, **arguments)
        layer = "q_proj" if len(shape) > 1 else "mlp"
        module = torch.nn.ModuleDict({layer: Layer(*parameters)})
        return packaged.AdamMini(module, num_embeds=12, num_heads=12, **arguments)

    return case(name, shape, ours, arguments, steps_of_torch(make, *data(shape)))


def projected(name, shape, arguments, group, ours):
    """A case of a package that projects gradients, with the projections that it draws."""
    drawn, more = [], {"proj_type": "std", "update_proj_gap": GAP}
    if name == "apollo":
        more |= {"proj": "random", "scale_type": ours.get("scale_by", "channel")}
    kind = galore_torch.GaLoreAdamW if name == "galore" else apollo_torch.APOLLOAdamW

    def make(parameters):
        groups = [{"params": parameters, **group, **more}]
        return kind(groups, no_deprecation_warning=True, **arguments)

    def see(optimizer, weight, step):
        if step % GAP == 0:
            found = optimizer.state[weight]["projector"].ortho_matrix
            drawn.append((found.T if shape[0] >= shape[1] else found).tolist())
        return weight.detach().tolist()

    weights = [*steps_of_torch(make, *data(shape), see=see)]
    own = {**group, "update_interval": GAP, **ours}
    return case(name, shape, own, arguments, weights, drawn=drawn)


def whitened(shape, arguments, ours):
    """A case of PSGD, with the random numbers that it draws."""
    noise = np.random.default_rng(1).normal(size=(STEPS, *shape))
    unused = iter(noise)
    psgd.torch.randn_like = lambda *_, **__: torch.tensor(next(unused))
    usual = {"lr": 0.05, "balance_prob": 0, "precondition_dtype": None}
    weights = steps_of_torch(partial(packaged.Kron, **usual, **arguments), *data(shape))
    return case("kron", shape, {"lr": 0.05, **ours}, {}, weights, drawn=noise.tolist())


if __name__ == "__main__":
    torch.set_default_dtype(torch.float64)
    torch.float32 = torch.float64
    torch.Tensor.float = torch.Tensor.double
    found = [*(packed(*each) for each in CASES), *(projected(*each) for each in PROJECTED)]
    found += [whitened(*each) for each in WHITENED]
    names = "torch", "pytorch_optimizer", "galore_torch", "apollo_torch"
    write("packages.json", names, {"cases": found})
