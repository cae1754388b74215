"""Write normuon.json: weights after each step of the authors' NorMuon, in float64.

Run with torch installed and with the authors' file ``normuon.py``, of
https://github.com/zichongli5/NorMuon at commit d45c9a4280d758e2cf0b2b8333765d040e953937:
``python tests/golden/make_normuon.py path/to/normuon.py``. It rounds to bfloat16 before it iterates;
that alone is left out.
"""

import json
import runpy
import sys
from pathlib import Path

import numpy as np
import torch

COMMIT = "d45c9a4280d758e2cf0b2b8333765d040e953937"
STEPS = 8
CASES = [
    ((4, 6), {"lr": 0.05, "weight_decay": 0.1}),
    ((6, 3), {"lr": 0.02, "momentum": 0.8, "beta2": 0.5}),
]


def data(shape):
    """First weights and gradients."""
    rng = np.random.default_rng(sum(shape))
    return rng.normal(size=shape), rng.normal(size=(STEPS, *shape))


def steps(made, shape, arguments):
    start, gradients = data(shape)
    weight = torch.nn.Parameter(torch.tensor(start))
    optimizer = made([weight], **arguments)
    for gradient in gradients:
        weight.grad = torch.tensor(gradient)
        optimizer.step()
        yield weight.detach().tolist()


if __name__ == "__main__":
    torch.set_default_dtype(torch.float64)
    torch.Tensor.bfloat16 = torch.Tensor.clone
    made = runpy.run_path(sys.argv[1])["SingleDeviceNorMuon"]
    cases = [
        {
            "shape": shape,
            "arguments": arguments,
            "data": [part.tolist() for part in data(shape)],
            "weights": list(steps(made, shape, arguments)),
        }
        for shape, arguments in CASES
    ]
    path = Path(__file__).with_name("normuon.json")
    path.write_text(json.dumps({"commit": COMMIT, "cases": cases}) + "\n")
