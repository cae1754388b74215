"""Optimizers beside the packages of their authors, live: ``pytest -m packages``.

The extra ``references`` installs the packages. The default run has recorded steps instead, in
``tests/golden``, and the formulas of ``tests/helpers/oracles.py``; ``tests/pytorch`` has torch.
"""

import numpy as np
import pytest

from fastopt import optimizer

pytestmark = pytest.mark.packages

STEPS = 30
TOLERANCE = 1e-7
"""Some packages keep numbers in float32."""
BETAS = {"betas": (0.8, 0.95)}
OURS = {"beta1": 0.8, "beta2": 0.95}
DECAY = {"weight_decay": 0.1}

CASES = [
    ("lion", {"wd": 0.1}, "pytorch_optimizer.Lion", {**DECAY, "weight_decouple": True}),
    ("laprop", {**OURS}, "pytorch_optimizer.LaProp", {**BETAS}),
    ("yogi", {**OURS, "epsilon": 1e-3}, "pytorch_optimizer.Yogi", {**BETAS, "eps": 1e-3}),
    ("adabelief", {**OURS, "epsilon": 1e-16}, "pytorch_optimizer.AdaBelief", {**BETAS,
     "eps": 1e-16}),
    ("ademamix", {}, "pytorch_optimizer.AdEMAMix", {"weight_decay": 0.0}),
    ("adan", {"wd": 0.1}, "pytorch_optimizer.Adan", {**DECAY, "weight_decouple": False}),
    ("novograd", {}, "pytorch_optimizer.NovoGrad", {}),
    ("stablespam", {}, "pytorch_optimizer.StableSPAM", {}),
    ("adamw", {"grams": True, "formula": "torch", "epsilon": 1e-6, "wd": 0.0},
     "pytorch_optimizer.Grams", {"weight_decay": 0.0}),
    ("sgd", {"decouple": True, "momentum": 0.9, "formula": "torch", "wd": 0.1},
     "pytorch_optimizer.SGDW", {"momentum": 0.9, **DECAY}),
    ("signum", {"momentum": 0.9}, "pytorch_optimizer.SignSGD", {"momentum": 0.9}),
    ("signum", {"momentum": 0.965, "wd_lh": 0.1}, "pytorch_optimizer.Tiger", {"beta": 0.965,
     **DECAY, "weight_decouple": True}),
    ("came", {}, "pytorch_optimizer.CAME", {}),
    ("sm3", {"momentum": 0.0}, "pytorch_optimizer.SM3", {"momentum": 0.0, "eps": 0.0}),
    ("soap", {**OURS, "wd": 0.0}, "pytorch_optimizer.SOAP", {**BETAS, "weight_decay": 0.0}),
    ("dadaptadam", {"d0": 1e-3, "decouple": True, "wd": 0.1}, "dadaptation.DAdaptAdam", {"d0": 1e-3,
     "decouple": True, **DECAY}),
    ("prodigy", {"d0": 1e-3, "wd": 0.1, "epsilon": 1e-14}, "prodigyopt.Prodigy", {"d0": 1e-3,
     **DECAY, "eps": 1e-14}),
    ("schedulefreeadamw", {"wd": 0.1}, "schedulefree.AdamWScheduleFree", DECAY),
    ("schedulefreesgd", {"wd": 0.1}, "schedulefree.SGDScheduleFree", DECAY),
]  # fmt: skip
"""Our name and arguments, the class of a package, and its arguments."""


def named(case):
    name, ours, kind, _ = case
    return "-".join([name, *map(str, ours), kind])


@pytest.mark.parametrize("shape", [(5,), (4, 6)], ids=str)
@pytest.mark.parametrize("case", CASES, ids=named)
def test_steps_are_those_of_the_package(case, shape):
    name, ours, kind, theirs = case
    module, _, attribute = kind.rpartition(".")
    torch = pytest.importorskip("torch")
    package = pytest.importorskip(module)
    rate = 1.0 if name in ("prodigy", "dadaptadam") else 0.01
    if name == "soap":  # products of full rank have one basis, up to signs
        shape = (5, 5)
    rng = np.random.default_rng(len(shape))
    weight = rng.normal(size=shape)
    parameter = torch.nn.Parameter(torch.tensor(weight))
    made = getattr(package, attribute)([parameter], lr=rate, **theirs)
    if hasattr(made, "train"):
        made.train()
    updater = optimizer.get_updater(optimizer.create(name, learning_rate=rate, **ours))
    for step in range(STEPS):
        grad = rng.normal(size=shape) * np.exp(np.cos(step))
        parameter.grad = torch.tensor(grad)
        made.step()
        updater(0, grad, weight)
        found = parameter.detach().numpy()
        np.testing.assert_allclose(weight, found, TOLERANCE, TOLERANCE, err_msg=f"step {step}")
