"""Optimizers for river."""

import struct
from collections.abc import Mapping
from typing import Any

import numpy as np
from river import optim, utils

from fastopt._engine.validate import leaves
from fastopt._updater.averaged import evaluated, evaluates
from fastopt.adapters.common import new_updater
from fastopt.optimizer import Optimizer

INDEX = "weights"
"""Index of the weights in the updater."""


class RiverOptimizer(optim.base.Optimizer):  # type: ignore[misc]
    """An optimizer for linear models of river, and others whose weights are numbers.

    A step updates the features of an example, which may have names that were never seen before,
    like a row-sparse gradient with ``lazy_update=True``: weight and state of all other features
    stay as they are.

    Parameters
    ----------
    optimizer : str or Optimizer
        Name, or an optimizer, which is copied. Default ``"adam"``, whose formula is river's.
    lr : float or river.optim.base.Scheduler, optional
        Learning rate. Default None: that of the optimizer.
    **arguments
        Arguments of the optimizer, such as ``beta1=0.8``.

    Notes
    -----
    A model predicts with the weights that are trained. With an optimizer that evaluates with
    averages, such as ScheduleFreeSGD and ASGD, :meth:`averaged` returns them.

    Raises
    ------
    TypeError, ValueError
        An argument is unknown or out of range; or the optimizer does not update element by
        element, such as Muon.

    Examples
    --------
    >>> from river import linear_model
    >>> from fastopt.adapters import RiverOptimizer
    >>> model = linear_model.LinearRegression(RiverOptimizer("sgd", lr=0.5))
    >>> model.learn_one({"x": 1.0}, 1.0)
    >>> model.weights
    {'x': 1.0}
    """

    def __init__(
        self,
        optimizer: str | Optimizer = "adam",
        lr: float | optim.base.Scheduler | None = None,
        **arguments: Any,
    ) -> None:
        self.updater = new_updater(optimizer, arguments)
        made = self.updater.optimizer
        rule = made.rule if made.native else None
        if rule is None or not rule.elementwise or rule.kept:
            raise ValueError(
                f"RiverOptimizer updates single features, and {type(made).__name__} updates whole "
                "arrays: use an optimizer such as Adam"
            )
        made.lazy_update = True  # a step changes no weight of other features
        self.optimizer, self.arguments = optimizer, arguments
        super().__init__(made.learning_rate if lr is None else lr)
        self._rows: dict[Any, int] = {}
        self._names: list[Any] = []
        """Features of the last step."""
        self._buffers: tuple[Any, Any] = np.empty(0), np.empty(0)
        """Scratch memory for their gradients and weights."""
        self._at: Any = None
        """Rows of `_names`; None if they are all rows in order."""
        self._weights = np.empty(0)
        """Scratch memory for the weights of all rows, of which only those of a step are valid."""

    def step(self, w: Any, g: Any) -> Any:
        """Update the weights of the features in `g`.

        Parameters
        ----------
        w, g : VectorDict or dict
            Weights and gradients by the names of the features. The weights change in place.

        Returns
        -------
        VectorDict or dict
            The weights.
        """
        if isinstance(w, np.ndarray) or isinstance(g, np.ndarray):
            raise TypeError(
                "RiverOptimizer updates weights by the names of their features, and got an array"
            )
        values = g.to_dict() if isinstance(g, utils.VectorDict) else g
        names = [*values]
        if not names:
            return self._count(w)
        known, size = names == self._names, len(names)
        grads: Any
        weights: Any
        buffers = self._buffers if known else (np.empty(size), np.empty(size))
        grads, weights = buffers
        try:
            struct.pack_into(f"{size}d", grads, 0, *values.values())
            struct.pack_into(f"{size}d", weights, 0, *map(w.__getitem__, names))
        except (TypeError, struct.error):
            raise TypeError(
                "RiverOptimizer updates weights that are numbers; latent factors need an optimizer "
                "of river"
            ) from None
        if not known:
            self._find(names, weights)
            self._buffers = buffers
        updater, rate = self.updater, self.lr.get(self.n_iterations)
        made = updater.optimizer
        if made.lr_scheduler is None and made.learning_rate != rate:
            made.learning_rate = rate
        at = self._at
        if at is None:
            updater(INDEX, grads, weights)
        else:
            self._weights[at] = weights
            updater(INDEX, (grads, at), self._weights)
            weights = self._weights[at]
        self.n_iterations += 1
        w.update(dict(zip(names, weights.tolist())))  # noqa: B905 (strict takes twice as long)
        return w

    def averaged(self, w: Mapping[Any, float]) -> dict[Any, float]:
        """Return the weights to predict with, of an optimizer that evaluates with averages.

        Parameters
        ----------
        w : VectorDict or dict
            Weights by the names of the features, such as ``model.weights``.

        Returns
        -------
        dict
            Averages by the names of the features; the weight itself of those without a step.

        Raises
        ------
        ValueError
            The optimizer has no averages.

        Examples
        --------
        >>> from fastopt.adapters import RiverOptimizer
        >>> optimizer, weights = RiverOptimizer("schedulefreesgd", lr=1.0), {"x": 0.0, "y": 0.0}
        >>> for _ in range(2):
        ...     _ = optimizer.step(weights, {"x": -1.0})
        >>> optimizer.averaged(weights)
        {'x': 1.5, 'y': 0.0}
        """
        if not evaluates(self.updater):
            raise ValueError(
                f"{type(self.updater.optimizer).__name__} has no averages: predict with the weights"
            )
        names = [*self._rows]
        whole = np.zeros_like(self._weights)
        whole[: len(names)] = [w[name] for name in names]
        averages = evaluated(self.updater, {INDEX: whole}).get(INDEX, whole)[: len(names)]
        return {**w, **dict(zip(names, averages.tolist(), strict=True))}

    def _count(self, w: Any) -> Any:
        """Count a step without features, which has an effect on corrections of bias."""
        if self._rows:
            self.updater(INDEX, (np.empty(0), np.empty(0, np.int64)), self._weights)
        self.n_iterations += 1
        return w

    def _find(self, names: list[Any], weights: np.ndarray[Any, Any]) -> None:
        """Look up the rows of features; new ones get rows and state."""
        rows, count = self._rows, len(self._rows)
        new = [k for k, name in enumerate(names) if name not in rows]
        if new:
            self._add(weights[new], count)
            rows |= {names[k]: count + j for j, k in enumerate(new)}
        at = np.array([rows[name] for name in names], np.int64)
        whole = len(at) == len(self._weights) and bool((at == np.arange(len(at))).all())
        self._names, self._at = names, None if whole else at

    def _add(self, new: np.ndarray[Any, Any], count: int) -> None:
        """Create the state of new weights, whose rows begin at `count`."""
        updater, end = self.updater, count + len(new)
        if end > len(self._weights):  # twice as many, or those of the first example
            self._weights = np.zeros(max(end, 2 * count))
            state = updater.optimizer.create_state(INDEX, self._weights)
            for now, before in zip(leaves(state), leaves(updater.states.get(INDEX)), strict=False):
                now[: len(before)] = before
            updater.states, updater.states_synced = {INDEX: state}, {INDEX: True}
        added = leaves(updater.optimizer.create_state(INDEX, new))
        for now, values in zip(leaves(updater.states[INDEX]), added, strict=True):
            now[count:end] = values
