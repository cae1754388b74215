"""fastopt in scikit-learn's MLPClassifier on digits: both optimizers train the same network."""

import warnings
from unittest import mock

from both_times import both_times
from sklearn.datasets import load_digits
from sklearn.exceptions import ConvergenceWarning
from sklearn.neural_network import MLPClassifier, _multilayer_perceptron
from sklearn.neural_network._stochastic_optimizers import AdamOptimizer, SGDOptimizer

from fastopt import optimizer


class FastAdam(AdamOptimizer):
    """Adam of fastopt, where scikit-learn expects its own."""

    def __init__(self, params, learning_rate_init, beta_1, beta_2, epsilon):
        super().__init__([], learning_rate_init, beta_1, beta_2, epsilon)
        adam = optimizer.Adam(learning_rate_init, beta_1, beta_2, epsilon)
        self.updater, self.indices = optimizer.get_updater(adam), list(range(len(params)))

    def update_params(self, params, grads):
        self.updater(self.indices, grads, params)


class FastSGD(SGDOptimizer):
    """SGD with momentum of fastopt; scikit-learn still sets `learning_rate`."""

    def __init__(self, params, learning_rate_init, lr_schedule, momentum, nesterov, power_t):
        super().__init__([], learning_rate_init, lr_schedule, momentum, nesterov, power_t)
        made = optimizer.NAG if nesterov else optimizer.SGD
        self.updater = optimizer.get_updater(
            made(learning_rate=learning_rate_init, momentum=momentum)
        )
        self.indices = list(range(len(params)))

    def update_params(self, params, grads):
        if self.updater.optimizer.learning_rate != self.learning_rate:
            self.updater.optimizer.set_learning_rate(self.learning_rate)
        self.updater(self.indices, grads, params)


def curve(solver, nesterov=True):
    """Return the loss after each epoch with scikit-learn's optimizer, or its replacement."""
    x, y = load_digits(return_X_y=True)
    model = MLPClassifier(
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
    """Return the loss after each epoch with scikit-learn's optimizer replaced by fastopt's."""
    fast = {"AdamOptimizer": FastAdam, "SGDOptimizer": FastSGD}
    with mock.patch.multiple(_multilayer_perceptron, **fast):
        return curve(solver, nesterov)


def curves(solver, nesterov=True):
    """Return the losses with scikit-learn's optimizer and with fastopt's."""
    return curve(solver, nesterov), fast_curve(solver, nesterov)


if __name__ == "__main__":
    for solver in ("adam", "sgd"):
        for epoch, (theirs, ours) in enumerate(zip(*curves(solver), strict=True), 1):
            print(f"{solver}, epoch {epoch:2}: scikit-learn {theirs:.9f}, fastopt {ours:.9f}")
    print(both_times("scikit-learn", lambda: curve("adam"), lambda: fast_curve("adam")))
