"""Write defaults.json: default arguments of the optimizers of torch and of the authors.

Run with the packages of PACKAGES installed: ``python tests/golden/make_defaults.py``.
"""

import inspect
from importlib import import_module

from recording import write

REFERENCES = {
    "SGD": "torch.optim.SGD",
    "Adam": "torch.optim.Adam",
    "AdamW": "torch.optim.AdamW",
    "AdaGrad": "torch.optim.Adagrad",
    "AdaDelta": "torch.optim.Adadelta",
    "RMSProp": "torch.optim.RMSprop",
    "Nadam": "torch.optim.NAdam",
    "Adamax": "torch.optim.Adamax",
    "RAdam": "torch.optim.RAdam",
    "Rprop": "torch.optim.Rprop",
    "ASGD": "torch.optim.ASGD",
    "Muon": "torch.optim.Muon",
    "AdaBelief": "adabelief_pytorch.AdaBelief",
    "AdamAtan2": "adam_atan2_pytorch.AdamAtan2",
    "AdEMAMix": "optax.contrib.ademamix",
    "Lion": "lion_pytorch.Lion",
    "NAdamW": "optax.nadamw",
    "Prodigy": "prodigyopt.Prodigy",
    "ScheduleFreeAdamW": "schedulefree.AdamWScheduleFree",
    "ScheduleFreeSGD": "schedulefree.SGDScheduleFree",
    "Yogi": "torch_optimizer.Yogi",
}
PACKAGES = (
    *("torch", "adabelief-pytorch", "adam-atan2-pytorch", "lion-pytorch", "optax"),
    *("prodigyopt", "schedulefree", "torch-optimizer"),
)


def defaults(path):
    """Default arguments that are numbers, tuples of numbers, strings, flags or None."""
    module, _, name = path.rpartition(".")
    parameters = inspect.signature(getattr(import_module(module), name)).parameters.values()
    kinds = (int, float, str, tuple, type(None))
    return {each.name: each.default for each in parameters if isinstance(each.default, kinds)}


if __name__ == "__main__":
    found = {name: {path: defaults(path)} for name, path in REFERENCES.items()}
    write("defaults.json", PACKAGES, {"defaults": found}, indent=1)
