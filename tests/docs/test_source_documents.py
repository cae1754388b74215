"""What the documents say that fastopt was built from: arguments and formulas.

Comparisons with MXNet's own numbers are in test_golden.py, and the map of names in
test_seed_map.py.
"""

import inspect

import numpy as np
import pytest

from fastopt import optimizer

# Optimizers: order and defaults of the arguments


def arguments(text):
    """Arguments and their defaults, of the text of a signature."""
    return eval(f"dict({text})")


BASE = arguments(
    "rescale_grad=1.0, param_idx2name=None, wd=0.0, clip_gradient=None, learning_rate=0.01, "
    "lr_scheduler=None, sym=None, begin_num_update=0, multi_precision=False, param_dict=None"
)
OF_ADAM = "learning_rate=0.001, beta1=0.9, beta2=0.999, epsilon=1e-8, "
ARGUMENTS = {
    "sgd": "momentum=0.0, lazy_update=True",
    "signum": "learning_rate=0.01, momentum=0.9, wd_lh=0.0",
    "ftml": "beta1=0.6, beta2=0.999, epsilon=1e-8",
    "lbsgd": "momentum=0.0, multi_precision=False, warmup_strategy='linear', warmup_epochs=5, "
    "batch_scale=1, updates_per_epoch=32, begin_epoch=0, num_epochs=60",
    "dcasgd": "momentum=0.0, lamda=0.04",
    "nag": "momentum=0.0",
    "sgld": "",
    "adam": OF_ADAM + "lazy_update=True",
    "adagrad": "eps=1e-7",
    "rmsprop": "learning_rate=0.001, gamma1=0.9, gamma2=0.9, epsilon=1e-8, centered=False, "
    "clip_weights=None",
    "adadelta": "rho=0.9, epsilon=1e-5",
    "ftrl": "lamda1=0.01, learning_rate=0.1, beta=1",
    "adamax": "learning_rate=0.002, beta1=0.9, beta2=0.999",
    "nadam": OF_ADAM + "schedule_decay=0.004",
    "test": "",
}
ATTRIBUTES = {"eps": "float_stable_eps", "begin_epoch": "init_updates"}


def positional(klass):
    parameters = inspect.signature(klass).parameters.values()
    return [p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]


def test_arguments_of_the_base_class_have_the_order_and_defaults_of_mxnet():
    assert positional(optimizer.Optimizer)[: len(BASE)] == list(BASE)
    made, kept = optimizer.Optimizer(), dict(BASE)
    del kept["param_idx2name"], kept["sym"], kept["param_dict"]  # kept in another form
    assert {name: getattr(made, name) for name in kept} == kept


@pytest.mark.parametrize("name", ARGUMENTS)
def test_arguments_of_optimizers_have_the_order_and_defaults_of_mxnet(name):
    expected, made = arguments(ARGUMENTS[name]), optimizer.create(name)
    assert positional(type(made))[: len(expected)] == list(expected)
    assert {name: getattr(made, ATTRIBUTES.get(name, name)) for name in expected} == expected


# Optimizers: formulas


@pytest.mark.slow
def test_lbsgd_warms_up_with_the_square_of_the_time():
    """The other strategies are in test_golden.py."""
    kwargs = {"batch_scale": 2, "warmup_epochs": 2, "updates_per_epoch": 3}
    made = optimizer.LBSGD(learning_rate=0.05, warmup_strategy="power2", **kwargs)
    updater, weight = optimizer.get_updater(made), np.zeros(1)
    for call in range(1, 10):
        before = weight.copy()
        updater(0, np.ones(1), weight)
        step = 0.05 * (1 + min(call / 6, 1) ** 2) if call % 2 == 0 else 0
        np.testing.assert_allclose(before - weight, step, rtol=1e-9)


@pytest.mark.parametrize("name", ["sgd", "signum", "lbsgd"])
def test_momentum_is_what_is_added_and_gradients_are_clipped_after_they_are_rescaled(name):
    """Both as in MXNet's kernels, and unlike its docstrings."""
    made = optimizer.create(
        name, learning_rate=1.0, momentum=0.5, rescale_grad=0.5, clip_gradient=0.25
    )
    updater = optimizer.get_updater(made)
    updater(0, np.array([1.0, 0.25]), np.ones(2))
    scale = 0.5 if name == "signum" else 1.0
    np.testing.assert_allclose(updater.states[0], scale * np.array([-0.25, -0.125]))
