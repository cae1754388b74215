"""Write shampoo.json: weights after each step of Distributed Shampoo with Adam's grafting, in float64.

Run with torch installed and with a checkout of https://github.com/facebookresearch/optimizers at
commit f60660661194de26d3ee78bae6d15820ff8e583d on the path:
``PYTHONPATH=path/to/optimizers python tests/golden/make_shampoo.py``.
"""

from functools import partial

import torch
from distributed_shampoo import (
    AdamPreconditionerConfig,
    DistributedShampoo,
    RootInvShampooPreconditionerConfig,
)
from recording import alike, by_shape, steps_of_torch, write

COMMIT = "f60660661194de26d3ee78bae6d15820ff8e583d"
data = partial(alike, steps=12, last=1e-2)
USUAL = {"lr": 0.0625, "betas": (0.9, 0.95), "precondition_frequency": 3, "weight_decay": 0.1}

CASES = [
    ((5, 5), {}),
    ((5, 5), {"precondition_frequency": 1, "epsilon": 0.01}),
    ((4, 6), {"start_preconditioning_step": 5, "weight_decay": 0.0, "epsilon": 1e-3}),
    ((7, 3), {"betas": (0.0, 0.8), "epsilon": 1e-3}),
    ((3, 4, 2), {"epsilon": 1e-4}),
]
"""Shapes and arguments; the code rounds the learning rate to float32.

Epsilons are small only where all matrices have full rank.
"""

RENAMED = {"epsilon": "root_epsilon", "start_preconditioning_step": "start_step"}


def recorded(shape, arguments):
    arguments = {**USUAL, "epsilon": 1e-12, **arguments}
    exact = RootInvShampooPreconditionerConfig(
        factor_matrix_dtype=torch.float64, inv_factor_matrix_dtype=torch.float64
    )
    make = partial(
        DistributedShampoo,
        **arguments,
        max_preconditioner_dim=7,  # so that no axes are merged
        grafting_config=AdamPreconditionerConfig(beta2=arguments["betas"][1], epsilon=1e-8),
        preconditioner_config=exact,
    )
    ours = {RENAMED.get(name, name): value for name, value in arguments.items()}
    weights = [*steps_of_torch(make, *data(shape))]
    return {"shape": shape, "arguments": {**ours, "epsilon": 1e-8}, "weights": weights}


if __name__ == "__main__":
    torch.set_default_dtype(torch.float64)
    made = {
        "repository": "https://github.com/facebookresearch/optimizers",
        "commit": COMMIT,
        "data": by_shape(data, [shape for shape, _ in CASES]),
        "cases": [recorded(shape, arguments) for shape, arguments in CASES],
    }
    write("shampoo.json", ["torch"], made)
