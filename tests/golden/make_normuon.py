"""Write normuon.json: weights after each step of the authors' NorMuon, in float64.

Run with torch installed and with the authors' file ``normuon.py``, of
https://github.com/zichongli5/NorMuon at commit d45c9a4280d758e2cf0b2b8333765d040e953937:
``python tests/golden/make_normuon.py path/to/normuon.py``. It rounds to bfloat16 before it iterates;
that alone is left out.
"""

import runpy
import sys
from functools import partial

import torch
from recording import drawn, steps_of_torch, write

COMMIT = "d45c9a4280d758e2cf0b2b8333765d040e953937"
data = partial(drawn, steps=8)
CASES = [
    ((4, 6), {"lr": 0.05, "weight_decay": 0.1}),
    ((6, 3), {"lr": 0.02, "momentum": 0.8, "beta2": 0.5}),
]


if __name__ == "__main__":
    torch.set_default_dtype(torch.float64)
    torch.Tensor.bfloat16 = torch.Tensor.clone
    made = runpy.run_path(sys.argv[1])["SingleDeviceNorMuon"]
    cases = [
        {
            "shape": shape,
            "arguments": arguments,
            "data": [part.tolist() for part in data(shape)],
            "weights": [*steps_of_torch(partial(made, **arguments), *data(shape))],
        }
        for shape, arguments in CASES
    ]
    write("normuon.json", ["torch"], {"commit": COMMIT, "cases": cases})
