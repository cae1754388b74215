"""A run of a few steps, saved and resumed, here or in a new process."""

import numpy as np

__all__ = ["NAMES", "SHAPES", "digits", "resumed", "start", "train", "updater_of"]

NAMES = {0: "a_weight", 1: "a_bias", "top": "b_weight"}
SHAPES = {0: (7, 5), 1: (3, 2), "top": (4, 6)}


def updater_of(case, **kwargs):
    kwargs.setdefault("param_idx2name", NAMES)
    return case.updater(wd=case.wd, seed=3, **kwargs)


def start():
    rng = np.random.default_rng(1)
    return {index: rng.normal(size=shape) for index, shape in SHAPES.items()}


def train(updater, weights, steps):
    for step in steps:
        for index, weight in weights.items():
            gradient = np.random.default_rng([step, *weight.shape]).normal(size=weight.shape)
            updater(index, gradient, weight)


def digits(weights):
    return [weight.tobytes().hex() for weight in weights.values()]


def resumed(case, path):
    """Bits of the weights after two further steps."""
    updater = updater_of(case)
    updater.load(f"{path}.safetensors")
    weights = dict(np.load(f"{path}.npz"))
    weights = {index: weights[str(index)] for index in SHAPES}
    train(updater, weights, range(3, 5))
    return digits(weights)
