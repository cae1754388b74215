"""The compiled entry finds the hyper-parameters that ``hyper()`` gives, with the same bits."""

import warnings

import numpy as np
import pytest

from fastopt import optimizer, rule
from fastopt._engine.hyper import hyper_of
from fastopt._kernels import record_words
from helpers.cases import exhaustive, kept

TIMES = [1, 2, 3, 5, 6, 10, 100, 1000, 12_345, 10**6]
BETAS = [(0.9, 0.999), (0.0, 0.0), (0.5, 1e-9), (0.999999, 0.9999999), (1e-12, 0.99)]
MEASURED = {
    "lamb": {"lr"},
    "lans": {"lr", "inverse_norm", "mean_rate", "grad_rate"},
    "mars": {"shorten"},
    "novograd": {"inverse"},
    "stablespam": {"bound", "shorten", "norm_scale"},
}
"""Fields that sums over the tensor fill in."""


def corrected():
    """Names of the optimizers whose hyper-parameters depend on the step through a correction."""
    found = []
    for name, klass in optimizer.opt_registry.items():
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "ccSGD is deprecated")
            hyper = hyper_of(klass())
        if hyper.correct is not None and not hyper.carries:
            found.append(name)
    return sorted(found)


def fields(updater):
    """Hyper-parameters that the last step was made with, in float64."""
    (record,) = updater.records.known().values()
    names = record.layout.rule.hyper
    first = (record.block[record_words.FIELDS] - record.block.ctypes.data) // 8
    values = record.block[first : first + len(names)].view(record.layout.real)
    return dict(zip(names, values.tolist(), strict=True))


def updater_of(name, betas, **kwargs):
    made = optimizer.create(name, learning_rate=0.1, wd=0.01, **kwargs)
    if hasattr(made, "beta1"):
        made.beta1, made.beta2 = betas
    return optimizer.Updater(made)


def mean_of(weight, grad, state, h):
    mean = h.beta1 * state[0] + h.one_minus_beta1 * grad
    return weight - h.lr * mean, (mean,)


@pytest.mark.parametrize("betas", BETAS, ids=str)
@pytest.mark.parametrize("name", kept(corrected(), "adam", "radam"))
def test_hyper_parameters_of_a_step_have_the_bits_of_hyper(name, betas):
    updater, weight = updater_of(name, betas), np.ones((2, 2))
    made, grad = updater.optimizer, np.ones((2, 2))
    for t in TIMES:
        for again in range(3):
            made._index_update_count[0] = t - 1
            updater(0, grad, weight)
            expected = {"lr": 0.1, "wd": 0.01, "rescale_grad": 1.0, "clip_gradient": np.inf}
            with np.errstate(all="ignore"):
                expected |= made.hyper(t, 0.1, 0.01)
            found = fields(updater)
            for field in found.keys() - MEASURED.get(name, set()):
                assert np.float64(found[field]).hex() == np.float64(expected[field]).hex(), (
                    field, t, again, found[field], expected[field])  # fmt: skip


@pytest.mark.parametrize("name", ["nadam", *exhaustive("lars")])
@pytest.mark.parametrize("per_index", [False, True])
def test_what_is_carried_has_the_bits_of_plain_python(name, per_index):
    """A class that counts in its own way is asked in Python, step by step."""
    klass = optimizer.opt_registry[name]

    class Counting(klass):
        def _update_count(self, index):
            super()._update_count(index)

    ends = []
    for kind in (klass, Counting):
        made = kind(learning_rate=0.1, wd=0.01, **({"momentum": 0.9} if name == "lars" else {}))
        if name == "nadam":
            made.per_parameter = per_index
        updater, weights = optimizer.Updater(made), [np.ones(4), np.ones(4)]
        for step in range(6):
            made.lr = 0.1 / (1 + step // 2)
            updater([0, 1], [np.ones(4), np.full(4, 0.5)], weights)
            updater(1, np.ones(4), weights[1])
        ends.append([weight.tobytes() for weight in weights] + [dict(made.carried)])
    assert ends[0] == ends[1]


def test_one_minus_a_field_follows_what_hyper_returns_in_each_step():
    class Kept(optimizer.AdamFamily):
        rule = rule(state=("mean",), hyper=("lr", "beta1", "one_minus_beta1"))(mean_of)

        def hyper(self, t, lr, wd):
            return {"beta1": 1 / (1 + t)}

    updater, weight = optimizer.Updater(Kept()), np.ones(2)
    for t in (1, 2, 3):
        updater(0, np.ones(2), weight)
        assert fields(updater)["one_minus_beta1"] == 1 - 1 / (1 + t)
