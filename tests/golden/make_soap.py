"""Write soap.json: weights after each step of the authors' SOAP, in float64.

Run with torch installed and with the authors' file ``soap.py``, of
https://github.com/nikhilvyas/SOAP at commit a1e553530fde97d0e6b307d7c82ac6d38b072340:
``python tests/golden/make_soap.py path/to/soap.py``. It rounds matrices to float32 before it
decomposes them; that alone is left out.
"""

import runpy
import sys
from functools import partial

import torch
from recording import alike, by_shape, steps_of_torch, write

COMMIT = "a1e553530fde97d0e6b307d7c82ac6d38b072340"
data = partial(alike, steps=12, last=1e-4)
USUAL = {"lr": 0.05, "betas": (0.9, 0.95), "precondition_frequency": 3, "weight_decay": 0.1}

CASES = [
    ((5, 5), {}),
    ((5, 5), {"precondition_frequency": 1, "eps": 0.01, "shampoo_beta": 0.5}),
    ((4, 6), {"max_precond_dim": 4}),
    ((6, 4), {"max_precond_dim": 4, "weight_decay": 0.0}),
    ((6, 6), {"max_precond_dim": 5}),
    ((3, 4, 2), {}),
    ((2, 3, 2, 3), {"merge_dims": True, "max_precond_dim": 6}),
]
"""Shapes and arguments where every matrix that is decomposed has full rank from the start.

Otherwise eigenvectors of the eigenvalue 0 are arbitrary, and the steps depend on them.
"""

GOES_ON = [((4, 6), {}), ((7, 3), {"precondition_frequency": 2})]
"""Where they are arbitrary: the state is recorded after some steps, to go on from it."""


def recorded(soap, shape, arguments, state_after=None):
    arguments, arrays = {**USUAL, **arguments}, []

    def see(optimizer, weight, step):
        if step + 1 == state_after:
            state = optimizer.state[weight]
            pairs = [part for pair in zip(state["GG"], state["Q"], strict=True) for part in pair]
            arrays[:] = state["exp_avg"], state["exp_avg_sq"], torch.tensor([step + 1]), *pairs
            arrays[:] = [array.tolist() for array in arrays]
        return weight.detach().tolist()

    weights = [*steps_of_torch(partial(soap, **arguments), *data(shape), see=see)]
    case = {"shape": shape, "arguments": arguments, "weights": weights}
    return {**case, "state": arrays} if state_after else case


if __name__ == "__main__":
    torch.set_default_dtype(torch.float64)
    torch.Tensor.float = torch.Tensor.clone
    soap = runpy.run_path(sys.argv[1])["SOAP"]
    made = {
        "repository": "https://github.com/nikhilvyas/SOAP",
        "commit": COMMIT,
        "data": by_shape(data, [shape for shape, _ in CASES + GOES_ON]),
        "cases": [recorded(soap, *case) for case in CASES],
        "goes_on": [recorded(soap, *case, state_after=4) for case in GOES_ON],
    }
    write("soap.json", ["torch"], made)
