"""A run of a few steps, saved and resumed, here or in a new process."""

import numpy as np

import fastopt

__all__ = ["NAMES", "SETTINGS", "SHAPES", "digits", "resumed", "start", "train", "updater_of"]
__all__ += ["updater_with"]

NAMES = {0: "a_weight", 1: "a_bias", "top": "b_weight"}
SHAPES = {0: (7, 5), 1: (3, 2), "top": (4, 6)}
SETTINGS = {
    "accumulated and averaged": {"accumulate": 2, "average": fastopt.EMA(0.5)},
    "clipped and averaged": {"clip_global_norm": 0.5, "average": fastopt.SWA(start=1, every=2)},
    "groups and slow weights": {
        "groups": {"bias$": {"lr": 0.5, "wd_mult": 0.0}},
        "average": fastopt.Lookahead(k=2, alpha=0.5),
    },
    "scaled": {"loss_scaler": fastopt.amp.LossScaler(4.0), "clip_adaptive": 0.1},
}
"""Settings of updaters, which a checkpoint has the progress of."""


def updater_with(settings):
    return fastopt.Updater(fastopt.Adam(param_idx2name=NAMES), **SETTINGS[settings])


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


def resumed(updater, path):
    """Bits of the weights after two further steps."""
    updater.load(f"{path}.safetensors")
    weights = dict(np.load(f"{path}.npz"))
    weights = {index: weights[str(index)] for index in SHAPES}
    train(updater, weights, range(3, 5))
    return digits(weights)
