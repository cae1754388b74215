"""Optimizers for thinc and spaCy."""

from collections.abc import Callable, Iterable
from typing import Any

import thinc.api

from fastopt._engine.validate import Array
from fastopt._updater.averaged import evaluated, evaluates
from fastopt.adapters.common import new_updater
from fastopt.arguments import number
from fastopt.averages import EMA
from fastopt.optimizer import SGD, Adam, Optimizer

MAX_DECAY = 0.9999
"""Decay of thinc's averages."""


class ThincOptimizer(thinc.api.Optimizer):  # type: ignore[misc]
    r"""An optimizer for thinc models and spaCy pipelines on CPUs.

    It is a ``thinc.api.Optimizer``: ``model.finish_update(optimizer)`` and
    ``nlp.update(examples, sgd=optimizer)`` update the parameters in place. In configuration files
    of spaCy its name is ``@optimizers = "fastopt.v1"``; a section ``options`` of that block has the
    arguments of the optimizer.

    Parameters
    ----------
    optimizer : str or Optimizer
        Name, or an optimizer, which is copied. Default ``"adam"``, whose formula is thinc's.
    learn_rate : float or iterable of float, optional
        Learning rate, or a schedule that ``step_schedules()`` advances. Default None: that of the
        optimizer.
    grad_clip : float
        Maximum norm of the gradient of each parameter; 0 for no limit. Gradients that are not
        finite are skipped, unless it is 0. Default 1.0, as in thinc.
    use_averages : bool
        Keep the averages of thinc, with a decay of :math:`\min(0.9999, (1 + t) / (10 + t))`, for
        ``model.use_params(optimizer.averages)``. Those of spaCy's optimizers are off. They start
        at the initial weights, and thinc's at zero. Default False. Optimizers that evaluate with
        averages, such as ScheduleFreeAdamW and ASGD, have their own `averages` without it.
    **arguments
        Arguments of the optimizer, such as ``beta1=0.8``. ``wd`` of Adam and SGD is thinc's `L2`
        with ``L2_is_weight_decay=False``: it is added to the gradient before the clip. That of
        other optimizers is a part of their step, after the clip.

    Raises
    ------
    TypeError, ValueError
        An argument is unknown or out of range.

    Examples
    --------
    >>> import numpy as np
    >>> from thinc.api import Linear
    >>> from fastopt.adapters import ThincOptimizer
    >>> model = Linear(1, 2).initialize()
    >>> optimizer = ThincOptimizer("sgd", learn_rate=0.5, grad_clip=0)
    >>> y, backprop = model.begin_update(np.ones((1, 2), np.float32))
    >>> _ = backprop(np.ones((1, 1), np.float32))
    >>> model.finish_update(optimizer)
    >>> model.get_param("b")
    array([-0.5], dtype=float32)
    """

    def __init__(
        self,
        optimizer: str | Optimizer = "adam",
        *,
        learn_rate: float | Iterable[float] | None = None,
        grad_clip: float = 1.0,
        use_averages: bool = False,
        **arguments: Any,
    ) -> None:
        average = EMA(MAX_DECAY, warmup=True) if use_averages else None
        self.updater = new_updater(
            optimizer, arguments, average=average, clip_global_norm=grad_clip or None
        )
        self.schedules: dict[str, Any] = {}
        self._step, self._last_score = 0, None
        self._rate: Any = None
        self._indices: dict[tuple[int, str], str] = {}
        self._scales: dict[str, float] = {}
        if self._is_clipped:
            self._penalty, self.updater.optimizer.wd = self.updater.optimizer.wd, 0.0
        if learn_rate is not None:
            self._set_attr_or_schedule("learn_rate", learn_rate)

    @property
    def learn_rate(self) -> float:
        """Learning rate."""
        return self.updater.optimizer.learning_rate

    @learn_rate.setter
    def learn_rate(self, value: float | Callable[[int], float]) -> None:
        self._rate = value if callable(value) else None
        self.updater.optimizer.learning_rate = self._scheduled() if self._rate else value

    def _scheduled(self) -> float:
        """Return the learning rate of the present step, of a schedule of thinc 9."""
        return float(self._rate(step=self._step, last_score=self._last_score))

    def step_schedules(self) -> None:
        """Advance the schedule of the learning rate."""
        super().step_schedules()
        if self._rate is not None:
            self.updater.optimizer.learning_rate = self._scheduled()

    @property
    def grad_clip(self) -> float:
        """Maximum norm of a gradient; 0 for no limit."""
        return self.updater.clip_global_norm or 0.0

    @grad_clip.setter
    def grad_clip(self, value: float) -> None:
        self.updater.clip_global_norm = value or None

    _penalty = 0.0
    """Weight decay that is added to the gradient before the clip."""

    @property
    def _is_clipped(self) -> bool:
        """Whether the weight decay is a part of the gradient that is clipped, as in thinc."""
        opt = self.updater.optimizer
        return isinstance(opt, (Adam, SGD)) and not opt.decoupled

    @property
    def L2(self) -> float:
        """Weight decay of the optimizer, which is coupled, and clipped, for Adam and SGD."""
        return self._penalty if self._is_clipped else self.updater.optimizer.wd

    @L2.setter
    def L2(self, value: float) -> None:
        if self._is_clipped:
            self._penalty = number("L2", value, least=0)
        else:
            self.updater.optimizer.wd = value

    @property
    def averages(self) -> dict[tuple[int, str], Array] | None:
        """Averages by the key of the parameter; None without `use_averages`, or own ones."""
        if self.updater.average is not None:
            arrays = self.updater.averages
        elif evaluates(self.updater):
            arrays = evaluated(self.updater)
        else:
            return None
        return {key: arrays[index] for key, index in self._indices.items()}

    def __call__(
        self, key: tuple[int, str], weights: Array, gradient: Array, *, lr_scale: float = 1.0
    ) -> tuple[Array, Array]:
        """Update a parameter in place and zero its gradient; `finish_update` of a model calls it.

        Parameters
        ----------
        key : tuple
            Number of the node of the model, and name of the parameter.
        weights, gradient : numpy.ndarray
            Parameter and gradient.
        lr_scale : float
            Factor of the learning rate.

        Returns
        -------
        tuple of numpy.ndarray
            The two arrays.
        """
        index = self._indices.get(key)
        if index is None:
            index = self._indices[key] = "/".join(map(str, key))
        if self._scales.get(index, 1.0) != lr_scale:
            self._scales[index] = self.updater.optimizer.lr_mult[index] = lr_scale
        penalized = gradient
        if self._penalty:
            opt = self.updater.optimizer
            penalized = self._penalty * opt.multiplier(index, opt.wd_mult, "wd_mult") * weights
            penalized += gradient
        self.updater(index, penalized, weights)
        gradient.fill(0)  # thinc adds the next gradient to it
        return weights, gradient

    def __getstate__(self) -> dict[str, Any]:
        slots = ("schedules", "_step", "_last_score")  # of the base class, some in thinc 9 alone
        return {**vars(self), **{name: getattr(self, name) for name in slots}}

    def __setstate__(self, state: dict[str, Any]) -> None:
        for name, value in state.items():
            setattr(self, name, value)


def configured(
    optimizer: str = "adam",
    learn_rate: float | Iterable[float] | None = None,
    grad_clip: float = 1.0,
    use_averages: bool = False,
    options: dict[str, Any] | None = None,
) -> ThincOptimizer:
    """Return a ThincOptimizer for a block of a configuration file, which cannot name `**arguments`.

    Parameters
    ----------
    optimizer, learn_rate, grad_clip, use_averages
        See :class:`ThincOptimizer`.
    options : dict, optional
        Arguments of the optimizer.
    """
    return ThincOptimizer(
        optimizer,
        learn_rate=learn_rate,
        grad_clip=grad_clip,
        use_averages=use_averages,
        **(options or {}),
    )
