"""Write soap.json, shampoo.json and normuon.json: steps of authors' code, in float64.

Run with torch installed, and for each file with its code, at the commit below:
``python tests/golden/make_authors.py soap path/to/soap.py``, ``... normuon path/to/normuon.py`` and
``PYTHONPATH=path/to/optimizers python tests/golden/make_authors.py shampoo``. The first two round
matrices to float32 or to bfloat16 before they decompose them or iterate; that alone is left out.
"""

import runpy
import sys
from functools import partial

import torch
from recording import alike, by_shape, case, drawn, steps_of_torch, write

USUAL = {"betas": (0.9, 0.95), "precondition_frequency": 3, "weight_decay": 0.1}

SOAP = [
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

SHAMPOO = [
    ((5, 5), {}),
    ((5, 5), {"precondition_frequency": 1, "epsilon": 0.01}),
    ((4, 6), {"start_preconditioning_step": 5, "weight_decay": 0.0, "epsilon": 1e-3}),
    ((7, 3), {"betas": (0.0, 0.8), "epsilon": 1e-3}),
    ((3, 4, 2), {"epsilon": 1e-4}),
]
"""Shapes and arguments; the code rounds the learning rate to float32.

Epsilons are small only where all matrices have full rank.
"""

NORMUON = [
    ((4, 6), {"lr": 0.05, "weight_decay": 0.1}),
    ((6, 3), {"lr": 0.02, "momentum": 0.8, "beta2": 0.5}),
]

RENAMED = {"epsilon": "root_epsilon", "start_preconditioning_step": "start_step"}


def of_soap(kind, data, shape, arguments, state_after=None):
    arguments, arrays = {"lr": 0.05, **USUAL, **arguments}, []

    def see(optimizer, weight, step):
        if step + 1 == state_after:
            state = optimizer.state[weight]
            pairs = [part for pair in zip(state["GG"], state["Q"], strict=True) for part in pair]
            arrays[:] = state["exp_avg"], state["exp_avg_sq"], torch.tensor([step + 1]), *pairs
            arrays[:] = [array.tolist() for array in arrays]
        return weight.detach().tolist()

    made = case(shape, arguments, steps_of_torch(partial(kind, **arguments), *data(shape), see=see))
    return {**made, "state": arrays} if state_after else made


def of_shampoo(package, data, shape, arguments):
    """Without merged axes."""
    arguments = {"lr": 0.0625, **USUAL, "epsilon": 1e-12, **arguments}
    dtypes = dict.fromkeys(("factor_matrix_dtype", "inv_factor_matrix_dtype"), torch.float64)
    make = partial(
        package.DistributedShampoo,
        **arguments,
        max_preconditioner_dim=7,
        grafting_config=package.AdamPreconditionerConfig(beta2=arguments["betas"][1], epsilon=1e-8),
        preconditioner_config=package.RootInvShampooPreconditionerConfig(**dtypes),
    )
    ours = {RENAMED.get(name, name): value for name, value in arguments.items()}
    return case(shape, {**ours, "epsilon": 1e-8}, steps_of_torch(make, *data(shape)))


def of_normuon(kind, data, shape, arguments):
    return case(shape, arguments, steps_of_torch(partial(kind, **arguments), *data(shape)))


FILES = {
    "soap": ("nikhilvyas/SOAP", "a1e553530fde97d0e6b307d7c82ac6d38b072340", SOAP, of_soap,
             partial(alike, steps=12, last=1e-4)),
    "shampoo": ("facebookresearch/optimizers", "f60660661194de26d3ee78bae6d15820ff8e583d", SHAMPOO,
                of_shampoo, partial(alike, steps=12, last=1e-2)),
    "normuon": ("zichongli5/NorMuon", "d45c9a4280d758e2cf0b2b8333765d040e953937", NORMUON,
                of_normuon, partial(drawn, steps=8)),
}
"""Repository, commit, cases, function of a case, and that of first weights and gradients."""


if __name__ == "__main__":
    name, *path = sys.argv[1:]
    repository, commit, cases, compute, data = FILES[name]
    torch.set_default_dtype(torch.float64)
    if name == "shampoo":
        import distributed_shampoo as code
    else:
        torch.Tensor.float = torch.Tensor.bfloat16 = torch.Tensor.clone
        code = runpy.run_path(*path)["SOAP" if name == "soap" else "SingleDeviceNorMuon"]
    going_on = GOES_ON if name == "soap" else []
    made = {"repository": f"https://github.com/{repository}", "commit": commit}
    made["data"] = by_shape(data, [shape for shape, _ in cases + going_on])
    made["cases"] = [compute(code, data, *each) for each in cases]
    if going_on:
        made["goes_on"] = [of_soap(code, data, *each, state_after=4) for each in going_on]
    write(f"{name}.json", ["torch"], made)
