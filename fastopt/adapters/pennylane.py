"""Optimizers for PennyLane."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pennylane as qml

from fastopt.adapters.common import new_updater
from fastopt.optimizer import Optimizer


class PennyLaneOptimizer(qml.GradientDescentOptimizer):  # type: ignore[misc]
    """An optimizer with the methods ``step`` and ``step_and_cost`` of PennyLane's.

    Parameters
    ----------
    optimizer : str or Optimizer
        Name, or an optimizer, which is copied. Default ``"adam"``, whose formula is PennyLane's;
        PennyLane's `beta2` is 0.99.
    stepsize : float, optional
        Learning rate. Default None: that of the optimizer.
    **arguments
        Arguments of the optimizer, such as ``beta2=0.99``.

    Notes
    -----
    With an optimizer that evaluates with averages, such as ScheduleFreeSGD and ASGD, the results
    of ``step`` are the arguments to train on with. The context manager
    ``optimizer.updater.averaged({0: angles})`` replaces the first one, `angles`, by its average.

    Raises
    ------
    TypeError, ValueError
        An argument is unknown or out of range.

    Examples
    --------
    >>> from pennylane import numpy as np
    >>> from fastopt.adapters import PennyLaneOptimizer
    >>> optimizer = PennyLaneOptimizer("sgd", stepsize=0.25)
    >>> angles = np.array([1.0, 2.0], requires_grad=True)
    >>> optimizer.step(lambda x: (x**2).sum(), angles)
    tensor([0.5, 1. ], requires_grad=True)
    """

    def __init__(
        self, optimizer: str | Optimizer = "adam", stepsize: float | None = None, **arguments: Any
    ) -> None:
        self._new = optimizer, arguments
        self.reset()
        super().__init__(self.stepsize if stepsize is None else stepsize)

    @property
    def stepsize(self) -> float:
        """Learning rate."""
        return self.updater.optimizer.learning_rate

    @stepsize.setter
    def stepsize(self, value: float) -> None:
        if value != self.stepsize:
            self.updater.optimizer.learning_rate = value

    def reset(self) -> None:
        """Forget all states and counts."""
        before = getattr(self, "updater", None)
        self.updater = new_updater(*self._new)
        if before is not None:
            self.stepsize = before.optimizer.learning_rate

    def apply_grad(self, grad: Sequence[Any], args: Sequence[Any]) -> list[Any]:
        """Return new arguments; those that are trainable are updated.

        Parameters
        ----------
        grad : tuple of array
            Gradients of the trainable arguments.
        args : tuple
            All arguments, which do not change.
        """
        new = list(args)
        trained = [k for k, arg in enumerate(args) if getattr(arg, "requires_grad", False)]
        for k in trained:
            new[k] = args[k].copy()
        # Plain arrays: the class of PennyLane dispatches each operation.
        views = [new[k].view(np.ndarray) for k in trained]
        self.updater(trained, [np.asarray(part) for part in grad], views)
        return new
