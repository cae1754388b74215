"""fastopt in scikit-learn's MLPClassifier on digits: both optimizers train the same network."""

import warnings

from both_times import both_times
from sklearn.datasets import load_digits
from sklearn.exceptions import ConvergenceWarning
from sklearn.neural_network import MLPClassifier

from fastopt import adapters


def curve(solver, nesterov=True, kind=MLPClassifier):
    """Return the loss after each epoch of an estimator."""
    x, y = load_digits(return_X_y=True)
    model = kind(
        64,
        solver=solver,
        learning_rate_init=0.01,
        max_iter=20,
        random_state=0,
        nesterovs_momentum=nesterov,
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)  # 20 epochs are too few to converge
        model.fit(x / 16, y)
    return model.loss_curve_


def fast_curve(solver, nesterov=True):
    """Return the loss after each epoch of the same estimator of fastopt."""
    return curve(solver, nesterov, adapters.MLPClassifier)


def curves(solver, nesterov=True):
    """Return the losses with scikit-learn's optimizer and with fastopt's."""
    return curve(solver, nesterov), fast_curve(solver, nesterov)


if __name__ == "__main__":
    for solver in ("adam", "sgd"):
        for epoch, (theirs, ours) in enumerate(zip(*curves(solver), strict=True), 1):
            print(f"{solver}, epoch {epoch:2}: scikit-learn {theirs:.9f}, fastopt {ours:.9f}")
    print(both_times("scikit-learn", lambda: curve("adam"), lambda: fast_curve("adam")))
