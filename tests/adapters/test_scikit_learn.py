"""Perceptrons of scikit-learn with fastopt's updates have scikit-learn's losses."""

import pickle
import warnings

import numpy as np
import pytest
from sklearn import neural_network
from sklearn.base import clone
from sklearn.datasets import load_digits
from sklearn.exceptions import ConvergenceWarning

import fastopt
import fastopt.adapters.scikit_learn
from fastopt import adapters

IMAGES, DIGITS = load_digits(return_X_y=True)
X, Y = IMAGES[:200] / 16, DIGITS[:200]
SMALL = {"hidden_layer_sizes": (8, 6), "max_iter": 12, "random_state": 0, "batch_size": 64}


def fitted(kind, y=Y, x=X, **arguments):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        return kind(**{**SMALL, **arguments}).fit(x, y)


SGD = {"solver": "sgd", "nesterovs_momentum": False, "learning_rate_init": 0.2}
STOP = {"n_iter_no_change": 1, "tol": 0.05, "max_iter": 100}
CASES = {
    "adam": {"beta_1": 0.8, "epsilon": 1e-4, "learning_rate_init": 0.01},
    "sgd": {"solver": "sgd", "learning_rate_init": 0.1, "momentum": 0.5},
    "no Nesterov": {**SGD, "alpha": 0.1},
    "invscaling": {**SGD, "learning_rate": "invscaling", "momentum": 0.0},
    "adaptive": {**SGD, "learning_rate": "adaptive", **STOP},
    "early stopping": {"early_stopping": True, "n_iter_no_change": 2, "tol": 0.1},
    "lbfgs": {"solver": "lbfgs"},
}


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("name", ["MLPClassifier", "MLPRegressor"])
def test_coefficients_are_those_of_scikit_learn(case, name):
    libraries = neural_network, adapters
    theirs, ours = (fitted(getattr(each, name), **CASES[case]) for each in libraries)
    assert ours.n_iter_ == theirs.n_iter_
    for array, other in zip(ours.coefs_, theirs.coefs_, strict=True):
        np.testing.assert_allclose(array, other, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("optimizer", ["lion", fastopt.Lion(lr=0.002)])
def test_another_optimizer_trains(optimizer):
    arguments = {"learning_rate_init": 2e-3, "hidden_layer_sizes": 32, "max_iter": 30}
    model = fitted(adapters.MLPClassifier, optimizer=optimizer, **arguments)
    made = model._optimizer.updater.optimizer
    assert type(made) is fastopt.Lion
    assert made is not optimizer
    assert made.learning_rate == 0.002
    assert model.score(X, Y) > 0.9


def test_the_schedules_of_the_solver_are_for_any_optimizer():
    model = fitted(
        adapters.MLPClassifier, optimizer=fastopt.Adam(lr=0.01), solver="sgd",
        learning_rate="adaptive", tol=1.0, n_iter_no_change=1, learning_rate_init=0.5,
    )  # fmt: skip
    solver = model._optimizer
    share = solver.updater.optimizer.learning_rate / 0.01
    assert share == pytest.approx(solver.theirs.learning_rate / 0.5)
    assert share < 0.1


def test_partial_fit_continues_also_after_pickling():
    theirs = neural_network.MLPClassifier(8, random_state=0)
    ours = adapters.MLPClassifier(8, random_state=0)
    for start in (0, 50, 100, 150):
        for model in (theirs, ours):
            model.partial_fit(X[start : start + 50], Y[start : start + 50], classes=range(10))
        ours = pickle.loads(pickle.dumps(ours))
    np.testing.assert_allclose(ours.coefs_[0], theirs.coefs_[0])


AVERAGING = {
    "Schedule-Free": lambda: fastopt.ScheduleFreeAdamW(lr=0.05),
    "ASGD": lambda: fastopt.ASGD(lr=0.2, t0=0.0, lambd=0.0),
}


@pytest.fixture
def calls(monkeypatch):
    """First weights and all gradients of what a test trains."""
    kind, found = fastopt.adapters.scikit_learn._Solver, []
    update = kind.update_params

    def record(self, params, grads):
        found.append(([each.copy() for each in params], [each.copy() for each in grads]))
        update(self, params, grads)

    monkeypatch.setattr(kind, "update_params", record)
    return found


def replayed(optimizer, calls):
    """Averages after the recorded steps from the first weights."""
    updater, weights = fastopt.Updater(optimizer), [each.copy() for each in calls[0][0]]
    for params, grads in calls:
        np.testing.assert_equal(params, weights)
        updater([*range(len(grads))], grads, weights)
    with updater.averaged():
        return [each.copy() for each in weights]


@pytest.mark.parametrize("name", AVERAGING)
def test_coefficients_are_averages_and_training_goes_on_from_the_weights(name, calls):
    model = adapters.MLPClassifier(8, random_state=0, optimizer=AVERAGING[name]())
    for step in range(4):
        model.partial_fit(X[:50], Y[:50], classes=range(10))
        if step % 2:
            model = pickle.loads(pickle.dumps(model))
        with pytest.raises(ValueError, match="does not support early_stopping"):
            model.set_params(early_stopping=True).partial_fit(X, Y)
        model.set_params(early_stopping=False)
    expected = replayed(AVERAGING[name](), calls)
    np.testing.assert_equal(model.coefs_ + model.intercepts_, expected)
    assert not np.array_equal(expected[0], calls[-1][0][0])


def test_a_warm_start_goes_on_from_the_weights(calls):
    arguments = {"optimizer": AVERAGING["ASGD"](), "warm_start": True, "max_iter": 2}
    model = fitted(adapters.MLPClassifier, **arguments)
    first, size = model.coefs_[0], len(calls)
    with pytest.warns(ConvergenceWarning):
        model.fit(X, Y)
    before = [(params[0], grads[0]) for params, grads in calls]
    np.testing.assert_allclose(before[size][0], before[size - 1][0] - 0.2 * before[size - 1][1])
    assert not np.array_equal(before[size][0], first)
    calls[:size] = []
    np.testing.assert_equal(model.coefs_ + model.intercepts_, replayed(AVERAGING["ASGD"](), calls))


def test_validation_and_the_best_coefficients_are_those_of_averages(calls, monkeypatch):
    scored = []

    def score(self, *args, **kwargs):
        scored.append(self.coefs_[0].copy())
        return len(scored)

    monkeypatch.setattr(adapters.MLPClassifier, "_score", score)
    arguments = {"early_stopping": True, "max_iter": 3, "batch_size": "auto"}
    model = fitted(adapters.MLPClassifier, optimizer=AVERAGING["ASGD"](), **arguments)
    for epoch, found in enumerate(scored):
        expected = replayed(AVERAGING["ASGD"](), calls[: epoch + 1])[0]
        np.testing.assert_equal(found, expected)
    np.testing.assert_equal(model.coefs_[0], expected)


def test_estimators_have_the_parameters_of_scikit_learn_and_optimizer():
    for name in ("MLPClassifier", "MLPRegressor"):
        theirs, ours = (getattr(library, name)() for library in (neural_network, adapters))
        assert ours.get_params() == {**theirs.get_params(), "optimizer": None}
    lion = fastopt.Lion(lr=0.5)
    copied = clone(adapters.MLPClassifier(optimizer=lion, alpha=0.5))
    assert (copied.alpha, copied.optimizer.learning_rate) == (0.5, 0.5)
