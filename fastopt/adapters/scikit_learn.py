"""Multi-layer perceptrons of scikit-learn, trained by fastopt."""

import inspect
from contextlib import nullcontext
from typing import Any

from sklearn import neural_network

from fastopt._updater.averaged import evaluated, evaluates
from fastopt._updater.updater import Updater
from fastopt.adapters.common import new_updater
from fastopt.optimizer import NAG, SGD, Adam, Optimizer


class _Solver:
    """An updater with the interface of scikit-learn's stochastic optimizers.

    Parameters
    ----------
    theirs : object
        Scikit-learn's optimizer, which changes the learning rate between epochs.
    updater : Updater
        The updater of the weights.
    """

    def __init__(self, theirs: Any, updater: Updater) -> None:
        self.theirs, self.updater = theirs, updater
        self.start = updater.optimizer.learning_rate
        self.rate = theirs.learning_rate
        self.indices: list[int] = []

    def update_params(self, params: list[Any], grads: list[Any]) -> None:
        """Update the weights in place."""
        if len(self.indices) != len(params):
            self.indices = list(range(len(params)))
        if self.theirs.learning_rate != self.rate:
            self.rate = self.theirs.learning_rate
            factor = self.rate / self.theirs.learning_rate_init
            self.updater.optimizer.learning_rate = self.start * factor
        self.updater(self.indices, grads, params)

    def iteration_ends(self, time_step: int) -> None:
        """Change the learning rate at the end of an epoch."""
        self.theirs.iteration_ends(time_step)

    def trigger_stopping(self, message: str, verbose: bool) -> Any:
        """Return whether to stop, or reduce the learning rate."""
        return self.theirs.trigger_stopping(message, verbose)


class _Fastopt:
    """What the two estimators add to those of scikit-learn."""

    coefs_: list[Any]
    intercepts_: list[Any]
    early_stopping: bool

    def __init__(self, *args: Any, optimizer: str | Optimizer | None = None, **rest: Any) -> None:
        super().__init__(*args, **rest)
        self.optimizer = optimizer

    @property
    def _optimizer(self) -> _Solver:
        """What scikit-learn updates the weights with; it assigns an optimizer of its own."""
        try:
            return vars(self)["_solver"]  # type: ignore[no-any-return]
        except KeyError:
            raise AttributeError("_optimizer") from None

    @_optimizer.setter
    def _optimizer(self, theirs: Any) -> None:
        made: Any = self.optimizer
        rate = {"learning_rate": theirs.learning_rate_init}
        if made is None and hasattr(theirs, "nesterov"):
            made = (NAG if theirs.nesterov else SGD)(momentum=theirs.momentum, **rate)
        elif made is None:
            made = Adam(theirs.learning_rate_init, theirs.beta_1, theirs.beta_2, theirs.epsilon)
        arguments = rate if isinstance(made, str) else {}
        for name in {"ms", "vs", "velocities"} & vars(theirs).keys():
            setattr(theirs, name, [])  # its state is not used
        vars(self)["_solver"] = _Solver(theirs, new_updater(made, arguments))

    def _fit_stochastic(self, *args: object, **options: object) -> None:
        """Train on from the weights, where the coefficients are averages of them."""
        before = self.coefs_, self.intercepts_
        averages, *trained = vars(self).get("_trained", (None,))
        if averages is not self.coefs_:
            trained = [*before]
        self.coefs_, self.intercepts_ = trained
        try:
            super()._fit_stochastic(*args, **options)  # type: ignore[misc]
        except BaseException:
            self.coefs_, self.intercepts_ = before
            raise
        updater = self._optimizer.updater
        vars(self).pop("_trained", None)
        if evaluates(updater) and updater.states:
            if self.coefs_ is trained[0]:  # else they are the best averages of early stopping
                averages, layers = evaluated(updater), range(len(self.coefs_))
                self.coefs_ = [averages[k] for k in layers]
                self.intercepts_ = [averages[len(layers) + k] for k in layers]
            vars(self)["_trained"] = self.coefs_, *trained

    def _update_no_improvement_count(self, *args: object) -> None:
        """Look for an improvement, with the averages in validation."""
        updater = self._optimizer.updater
        averages = self.early_stopping and evaluates(updater)
        with updater.averaged() if averages else nullcontext():
            super()._update_no_improvement_count(*args)  # type: ignore[misc]


def _signature(kind: type) -> inspect.Signature:
    """Return the arguments of a class of scikit-learn, which reads them, and `optimizer`."""
    signature = inspect.signature(kind.__init__)  # type: ignore[misc]
    added = inspect.Parameter("optimizer", inspect.Parameter.KEYWORD_ONLY, default=None)
    return signature.replace(parameters=[*signature.parameters.values(), added])


class MLPClassifier(_Fastopt, neural_network.MLPClassifier):  # type: ignore[misc]
    """Scikit-learn's MLPClassifier, whose weights fastopt updates.

    With ``solver="adam"`` and ``solver="sgd"``, also with Nesterov's momentum, the losses are those
    of scikit-learn to rounding, as long as the learning rate is constant; the steps are faster.

    Parameters
    ----------
    *args, **arguments
        Those of :class:`sklearn.neural_network.MLPClassifier`. ``solver="lbfgs"`` is unchanged, and
        `optimizer` has no effect with it.
    optimizer : str or Optimizer, optional
        Another optimizer, used in place of the solver's formula: a name, with
        `learning_rate_init` as its learning rate, or an optimizer, which is copied. With
        ``solver="sgd"`` its learning rate follows `learning_rate`. After training with one that
        evaluates with averages, such as ScheduleFreeAdamW and ASGD, the coefficients are the
        averages; further training continues from the weights. Default None.

    Raises
    ------
    TypeError, ValueError
        When fitted: an argument is invalid.

    Examples
    --------
    >>> import numpy as np
    >>> from sklearn.datasets import load_digits
    >>> from fastopt.adapters import MLPClassifier
    >>> x, y = load_digits(return_X_y=True)
    >>> model = MLPClassifier(64, optimizer="lion", learning_rate_init=5e-3, random_state=0)
    >>> for rows in np.array_split(np.arange(len(x)), 50):
    ...     _ = model.partial_fit(x[rows] / 16, y[rows], classes=range(10))
    >>> model.score(x / 16, y) > 0.8
    True
    """

    def __init__(self, *args: object, **arguments: Any) -> None:
        super().__init__(*args, **arguments)

    __init__.__signature__ = _signature(neural_network.MLPClassifier)  # type: ignore[attr-defined]


class MLPRegressor(_Fastopt, neural_network.MLPRegressor):  # type: ignore[misc]
    """Scikit-learn's MLPRegressor, whose weights fastopt updates.

    Parameters
    ----------
    *args, **arguments
        Those of :class:`sklearn.neural_network.MLPRegressor`.
    optimizer : str or Optimizer, optional
        See :class:`MLPClassifier`.

    Examples
    --------
    >>> import numpy as np
    >>> from fastopt.adapters import MLPRegressor
    >>> x = np.linspace(-1, 1, 50)[:, None]
    >>> model = MLPRegressor(hidden_layer_sizes=32, learning_rate_init=0.01, random_state=0)
    >>> model.fit(x, x.ravel() ** 2).score(x, x.ravel() ** 2) > 0.9
    True
    """

    def __init__(self, *args: object, **arguments: Any) -> None:
        super().__init__(*args, **arguments)

    __init__.__signature__ = _signature(neural_network.MLPRegressor)  # type: ignore[attr-defined]
