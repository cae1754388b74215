"""One table of all optimizers: what the generic tests need to know about each form."""

import warnings
from dataclasses import dataclass, field, replace
from functools import partial

import pytest

from fastopt import optimizer

FAST, FASTER = {"learning_rate": 0.1}, {"learning_rate": 0.5}
SLOW = {"learning_rate": 0.002, "gamma1": 0.9}


@dataclass(frozen=True)
class Case:
    """One form of an optimizer."""

    name: str
    kwargs: dict = field(default_factory=dict)
    shape: tuple = (7, 5)
    wd: float = 0.1
    """Decay used where a test wants some; 0 where the algorithm has none."""
    converges: dict | None = field(default_factory=lambda: FAST)
    """Arguments with which a quadratic is minimized in 200 steps; None if it never is."""
    frozen_by_zero_lr: bool = True
    nan_spreads_to: str = "element"
    recorded: bool = False
    """By default only the comparison with recorded numbers or a formula runs; see `by_default`."""

    def __str__(self):
        return "-".join([self.name, *(f"{k}={v}" for k, v in self.kwargs.items())])

    def make(self, **kwargs):
        """Optimizer of this form."""
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "ccSGD is deprecated")
            return optimizer.create(self.name, **{**self.kwargs, **kwargs})

    def updater(self, **kwargs):
        """Updater of this form."""
        return optimizer.get_updater(self.make(**kwargs))


joint = partial(Case, nan_spreads_to="tensor")
"""A form whose sums over a tensor spread a number that is not finite."""

CASES = [
    Case("sgd"),
    Case("sgd", {"momentum": 0.9}),
    Case("ccsgd", {"momentum": 0.9}),
    Case("nag"),
    Case("nag", {"momentum": 0.9}),
    Case("signum", converges={"learning_rate": 0.02}),
    Case("signum", {"momentum": 0.0}, converges={"learning_rate": 0.02}),
    Case("ftml"),
    Case("lbsgd"),
    Case("lbsgd", {"momentum": 0.9, "batch_scale": 2, "warmup_epochs": 0}),
    joint("lbsgd", {"warmup_strategy": "lars", "momentum": 0.5}),
    joint("lbsgd", {"warmup_strategy": "lars"}),
    Case("dcasgd"),
    Case("dcasgd", {"momentum": 0.9}),
    Case("sgld", converges=None),
    Case("adam"),
    Case("adagrad", converges={"learning_rate": 0.5}),
    Case("rmsprop", converges={"learning_rate": 0.02}),
    Case("rmsprop", {"centered": True}, converges={"learning_rate": 0.002}),
    Case("rmsprop", {"clip_weights": 2.5}, converges={"learning_rate": 0.02}),
    Case("adadelta", converges={"epsilon": 0.01}, frozen_by_zero_lr=False),
    Case("ftrl", converges={"learning_rate": 1.0, "lamda1": 0.0}),
    Case("adamax"),
    Case("nadam"),
    Case("nadam", {"per_parameter": True}),
    Case("test", wd=0.0, converges=None, frozen_by_zero_lr=False),
    joint("lamb"),
    joint("lamb", {"bias_correction": False}, converges={"learning_rate": 0.05}),
    joint("lars", converges={"learning_rate": 1.0, "eta": 0.1}),
    joint("lars", {"momentum": 0.5}, converges={"learning_rate": 1.0, "eta": 0.1}),
    Case("groupadagrad", wd=0.0, converges={"learning_rate": 0.5}, nan_spreads_to="row"),
    Case("adamw"),
    Case("adamw", {"correct_bias": False}),
    Case("adamw", {"eta": 0.5}, frozen_by_zero_lr=False),
    Case("adabelief"),
    joint("lans"),
    Case("radam"),
    Case("lion", converges={"learning_rate": 0.05}),
    Case("adam", {"formula": "torch"}),
    Case("adamw", {"formula": "torch"}),
    Case("adagrad", {"formula": "torch"}, converges={"learning_rate": 0.5}),
    Case("rmsprop", {"formula": "torch"}, converges={"learning_rate": 0.02, "gamma1": 0.9}),
    Case("rmsprop", {"formula": "torch", "centered": True}, converges={**SLOW, "gamma2": 0.9}),
    Case("nadam", {"formula": "torch"}),
]
RECORDED = [
    Case("adam", {"amsgrad": True}),
    Case("adam", {"amsgrad": True, "formula": "torch"}),
    Case("adamw", {"amsgrad": True}),
    Case("adamw", {"amsgrad": True, "formula": "torch"}),
    Case("nadam", {"amsgrad": True}),
    Case("nadam", {"amsgrad": True, "formula": "torch"}),
    Case("nadam", {"decouple": True}),
    Case("rmsprop", {"momentum": 0.9}, converges={"learning_rate": 0.002}),
    Case("rmsprop", {"formula": "torch", "momentum": 0.9}, converges=SLOW),
    Case("adagrad", {"initial_accumulator_value": 0.1, "lr_decay": 0.01}, converges=FASTER),
    Case("sgd", {"formula": "torch", "momentum": 0.9, "dampening": 0.5}),
    Case("sgd", {"decouple": True, "momentum": 0.9}),
    Case("nadamw"),
    Case("nadamw", {"amsgrad": True}),
    Case("yogi"),
    Case("ademamix", converges={**FAST, "beta3": 0.99}),
    Case("adopt"),
    Case("adamatan2"),
    Case("adan"),
    Case("adan", {"proximal": False}),
    joint("novograd", converges={"learning_rate": 0.05}),
    Case("laprop"),
    Case("mars", converges={**FAST, "beta1": 0.9}),
    joint("stablespam"),
    Case("adamw", {"grams": True}),
    Case("rprop", frozen_by_zero_lr=False),
    Case("asgd", converges={"learning_rate": 0.1}),
    Case("schedulefreeadamw"),
    Case("schedulefreesgd"),
    Case("schedulefreesgd", {"average_rate": 0.1}),
    Case("prodigy", converges={"d0": 0.01}),
    Case("dadaptadam", {"decouple": True}, converges={"d0": 0.01, "beta2": 0.9}),
    Case("schedulefreeprodigy", converges={"d0": 0.01}),
    Case("lion", {"cautious": True}, converges={"learning_rate": 0.05}),
    joint("adamw", {"stable": True}),
    joint("adamw", {"formula": "torch", "cautious": True, "cautious_decay": True, "stable": True}),
    Case("prodigy", {"cautious": True, "cautious_decay": True}, converges={"d0": 0.01}),
    joint("nadamw", {"cautious": True, "cautious_decay": True, "stable": True}),
]
CASES += [replace(case, recorded=True) for case in RECORDED]
"""All forms, of which those of RECORDED are compared by default with recorded numbers alone."""

OF_MATRICES = (
    *("adafactor", "adammini", "adamuon", "apollo", "came", "galore", "muon"),
    *("kron", "normuon", "scion", "shampoo", "sm3", "soap"),
)
"""Optimizers that compute with matrices in NumPy, which have tests of their own."""

OF_STEPS = ("prodigy", "dadaptadam", "schedulefreeprodigy")
"""Optimizers whose hyper-parameters are computed from all tensors of a step.

An index is in it once, with a multiplier of the rate of 0 or 1; state and decay are exact.
"""

FIRST = {case.name: case for case in reversed(CASES)}
"""The first form of each optimizer."""

SUMS = "lbsgd-momentum=0.9-batch_scale=2-warmup_epochs=0"
SAMPLE = (SUMS, "sgld", "adam", "lamb", "groupadagrad")
"""A form of each kind of rule: summing, with noise, plain, with reductions, with a row's mean."""

LIGHT = SAMPLE[:3]
"""Those of them that compile fast."""

FEW = ("adam", "lamb")
"""A form of elements and one with reductions."""

KINDS = (
    *("sgd", "signum", "adam", "ademamix", "adan"),  # 0 to 4 slots
    *("adamw", "nadam", "radam", "schedulefreeadamw"),  # decoupled decay, products, cases, a mode
    *("dcasgd", "test", "lbsgd", "sgld"),  # previous weights, no scale, sums of gradients, noise
    *("groupadagrad", "lars", "lamb", "lans"),  # a row's mean, one or two sums
    *("novograd", "prodigy"),  # numbers beside the slots, hyper-parameters of a whole step
)
"""Optimizers of each kind that the engine distinguishes; others have an arithmetic of their own."""
OF_KINDS = [FIRST[name] for name in KINDS]


def slow(*values, profile="default"):
    """Parameters of slow tests, which run in a profile of Hypothesis and in later ones."""
    return [pytest.param(value, marks=pytest.mark.slow(profile)) for value in values]


exhaustive = partial(slow, profile="exhaustive")
nightly = partial(slow, profile="nightly")


def by_default(cases):
    """Parameters for tests of every form, of which those of `recorded` forms are exhaustive."""
    return [pytest.param(c, marks=marks_of(c) if c.recorded else ()) for c in cases]


def sampled(cases, sample=SAMPLE):
    """Parameters for tests of combinations: those in `sample`, and exhaustively the other forms.

    Of recorded forms it takes the first of each class.

    test_optimizers.py runs every form by default.
    """
    return kept([c for c in cases if not c.recorded or c is FIRST[c.name]], *sample)


def kept(values, *names):
    """Parameters whose names are in `names`, and exhaustive ones for the rest of `values`."""
    return [pytest.param(v, marks=() if str(v) in names else marks_of(v)) for v in values]


def named(names, *sample):
    """Parameters that are names of optimizers, marked as :func:`kept` marks their first forms."""
    return [
        pytest.param(name, marks=() if name in sample else marks_of(FIRST.get(name, name)))
        for name in names
    ]


def marks_of(value):
    """Mark of a slow test of a combination: exhaustive for the first form of each of `KINDS`."""
    later = isinstance(value, Case) and value not in OF_KINDS
    return pytest.mark.slow("nightly" if later else "exhaustive")


CHOICES = {"every kind": OF_KINDS, "every case": CASES}
"""Cases of tests in child processes."""

every_choice = pytest.mark.parametrize(
    "choice", [*exhaustive("every kind"), *nightly("every case")]
)
