"""The trainer, which updates all parameters of a model in one call."""

import os
from collections.abc import Iterable, Mapping
from importlib import import_module
from typing import Any, ClassVar

import numpy as np

from fastopt._advice import Advice
from fastopt._updater.updater import Updater
from fastopt.amp import LossScaler
from fastopt.arguments import Checked, brief, number
from fastopt.optimizer import Optimizer, create
from fastopt.parameter import Parameter, ParameterDict
from fastopt.parameter.checks import Array
from fastopt.parameter.gradient import Gradient
from fastopt.sparse import HALVES, RowSparse

__all__ = ["StaleGradientError", "Trainer"]

Parameters = ParameterDict | Mapping[str, Parameter] | Iterable[Parameter]


class StaleGradientError(RuntimeError, UserWarning):
    """A gradient has been neither read nor written since the last step.

    It is also a UserWarning, which is what Gluon raises.

    Examples
    --------
    >>> from fastopt.parameter import Parameter
    >>> from fastopt.trainer import StaleGradientError, Trainer
    >>> weight = Parameter("weight", shape=2)
    >>> weight.initialize()
    >>> try:
    ...     Trainer([weight]).step(batch_size=1)
    ... except StaleGradientError as error:
    ...     print(error)  # doctest: +ELLIPSIS
    gradient of Parameter 'weight' is stale: ...
    """


class Trainer(Checked):
    """Updates the parameters of a model from their gradients.

    Parameters
    ----------
    params : ParameterDict, dict of str to Parameter, or list of Parameter
        Parameters to train. Those in a dict are numbered by sorted name, those in a list by
        position. A parameter that occurs several times is updated once per step.
    optimizer : str or Optimizer
        The optimizer, or its registered name. Default ``"sgd"``. Learning rate and weight decay
        multipliers are taken from the parameters, whatever their names.
    optimizer_params : dict, optional
        Arguments of an optimizer that is given by name.
    loss_scaler : fastopt.amp.LossScaler, optional
        Divides gradients by the loss scale, and skips steps in which they overflow.
    clip_global_norm : float, optional
        Maximum norm of all gradients, concatenated.
    comm : mpi4py communicator, torch process group, or updater, optional
        Communicator among whose ranks the optimizer state is sharded; or an existing updater,
        whose optimizer must be `optimizer`, with its own groups, `accumulate`, `average`,
        `loss_scaler` and clips.

    Attributes
    ----------
    updater : Updater
        The updater, which holds the optimizer state.

    Raises
    ------
    TypeError, ValueError
        An argument has the wrong type or value.
    RuntimeError
        A row-sparse parameter belongs to another trainer.

    Examples
    --------
    >>> import numpy as np
    >>> from fastopt.parameter import ParameterDict
    >>> from fastopt.trainer import Trainer
    >>> params = ParameterDict()
    >>> weight = params.get("fc_weight", shape=2, init="ones")
    >>> bias = params.get("fc_bias", shape=2, init="zeros", wd_mult=0)
    >>> params.initialize()
    >>> trainer = Trainer(params, "sgd", {"learning_rate": 0.1, "wd": 0.5})
    >>> weight.add_grad(np.array([10.0, 20.0]))
    >>> bias.grad()[:] = 5
    >>> trainer.step(batch_size=10)
    >>> weight.data(), bias.data()
    (array([0.85, 0.75], dtype=float32), array([-0.05, -0.05], dtype=float32))
    """

    attribute_advice: ClassVar[Mapping[str, str]] = Advice("TRAINER_ATTRIBUTES")
    argument_names: ClassVar[Mapping[str, tuple[str, ...]]] = Advice("UPDATER_NAMES")
    argument_advice: ClassVar[Mapping[str, str]] = Advice("TRAINER_ARGUMENTS")

    def __init__(
        self,
        params: Parameters,
        optimizer: str | Optimizer = "sgd",
        optimizer_params: Mapping[str, Any] | None = None,
        *,
        loss_scaler: LossScaler | None = None,
        clip_global_norm: float | None = None,
        comm: object = None,
    ) -> None:
        self._parameters, self._names = _numbered(params)
        opt = _optimizer(optimizer, optimizer_params)
        self._batch_size: float | None = None
        self._several = False
        options = {"loss_scaler": loss_scaler, "clip_global_norm": clip_global_norm}
        settings = {name: value for name, value in options.items() if value is not None}
        self.updater: Any = _updater(opt, comm, settings)
        scale, divided = self.optimizer.divided
        self._scale = self.optimizer.rescale_grad
        if self._scale == divided:  # by the batch size of another trainer with the optimizer
            self._scale = scale
        self._rescale_grad = self._scale
        for parameter in sorted(self._parameters, key=lambda p: p.stype == "default"):
            parameter._set_trainer(self)  # row-sparse ones first, because they may raise
        # The optimizer looks up multipliers in param_dict, and names for messages and files in
        # idx2name.
        self.optimizer.param_dict = dict(enumerate(self._parameters))
        self.optimizer.idx2name = dict(enumerate(self._names))

    def __repr__(self) -> str:
        return f"{type(self).__name__}({len(self._parameters)} parameters, {self.updater!r})"

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        for parameter in self._parameters:
            if parameter._trainer is None:  # a copy, which is not attached
                parameter._set_trainer(self)
        self.optimizer.param_dict = dict(enumerate(self._parameters))

    @property
    def optimizer(self) -> Optimizer:
        """The optimizer."""
        optimizer: Optimizer = self.updater.optimizer
        return optimizer

    @property
    def learning_rate(self) -> float:
        """Current learning rate, before multipliers; assigning calls :meth:`set_learning_rate`."""
        return self.optimizer.learning_rate

    @learning_rate.setter
    def learning_rate(self, lr: float) -> None:
        self.set_learning_rate(lr)

    def set_learning_rate(self, lr: float) -> None:
        """Set the learning rate of the optimizer.

        Parameters
        ----------
        lr : float
            New learning rate; errors are those of
            :meth:`fastopt.optimizer.Optimizer.set_learning_rate`.
        """
        self.optimizer.set_learning_rate(lr)

    # Steps

    def step(self, batch_size: float = 1, ignore_stale_grad: bool = False) -> None:
        """Sum each parameter's gradients over its devices, and update the parameters.

        Parameters
        ----------
        batch_size : float
            Divisor of the gradients: ``rescale_grad`` is set to its initial value divided by
            `batch_size`. Default 1, for gradients that are means over the batch.
        ignore_stale_grad : bool
            Skip parameters without a new gradient since the last step instead of raising.
            Default False.

        Raises
        ------
        StaleGradientError
            A gradient has been neither read nor written since the last step.
        RuntimeError
            A parameter that requires a gradient is not initialized.
        TypeError, ValueError
            :class:`~fastopt.optimizer.Updater` raises. No parameter changes.
        """
        if batch_size is not self._batch_size:
            self._rescale(batch_size)
        ready = self._ready(ignore_stale_grad)
        if self._several:
            self.allreduce_grads()
        self._update(ready)

    def allreduce_grads(self) -> None:
        """Sum each parameter's gradients over its devices, and write the sum to all of them.

        Gradients are added in the order of the devices; stale ones are left out. :meth:`step`
        calls this method; call it directly to modify the sums before :meth:`update`.
        """
        for parameter in self._parameters:
            gradient = parameter._gradient
            if gradient is not None and len(gradient.buffers) > 1:
                gradient.allreduce()

    def update(self, batch_size: float = 1, ignore_stale_grad: bool = False) -> None:
        """Update from the gradients of the first device, after :meth:`allreduce_grads`.

        Parameters
        ----------
        batch_size, ignore_stale_grad
            See :meth:`step`, also for errors.
        """
        if batch_size is not self._batch_size:
            self._rescale(batch_size)
        self._update(self._ready(ignore_stale_grad))

    def _rescale(self, batch_size: float) -> None:
        """Compute ``rescale_grad`` for a new batch size."""
        if number("batch_size", batch_size) <= 0:
            raise ValueError(f"batch_size must be more than 0, got {batch_size}")
        self._rescale_grad, self._batch_size = self._scale / batch_size, batch_size
        vars(self.optimizer)["divided"] = self._scale, self._rescale_grad

    def _ready(self, ignore_stale_grad: bool) -> list[int]:
        """Return the indices of the parameters to update."""
        ready: list[int] = []
        self._several = False
        for i, parameter in enumerate(self._parameters):
            if parameter._grad_req == "null":
                continue
            gradient = parameter._gradient
            fresh = gradient.fresh if gradient else [False]
            if len(fresh) > 1:
                self._several = True
            if any(fresh) and (ignore_stale_grad or all(fresh)):
                ready.append(i)
            elif not ignore_stale_grad:
                parameter._arrays()
                raise StaleGradientError(
                    f"gradient of Parameter {self._names[i]!r} is stale: it was neither read "
                    "nor written since the last step; ignore_stale_grad=True skips the parameter"
                )
        return ready

    def _update(self, ready: list[int]) -> None:
        """Update the copies on the first devices in one call, and copy them to the others."""
        optimizer, rescale_grad = self.updater.optimizer, self._rescale_grad
        copies, buffers, grads, weights = [], [], [], []
        for i in ready:
            parameter = self._parameters[i]
            gradient = parameter._gradient or parameter._buffers()
            arrays = parameter._data or parameter._arrays()
            copies.append(arrays)
            buffers.append(gradient)
            grads.append(gradient.buffers[0])
            weights.append(arrays[0])
        before = optimizer.rescale_grad
        if before != rescale_grad:
            optimizer.rescale_grad = rescale_grad
        try:
            self.updater(ready, grads, weights)
        except BaseException:
            optimizer.rescale_grad = before
            raise
        for arrays in copies:
            for other in arrays[1:]:
                other[...] = arrays[0]
        Gradient.finish_all(buffers)

    def finish(self) -> None:
        """Update with the gradients that an updater with `accumulate` has added so far.

        See :meth:`fastopt.optimizer.Updater.finish`. `rescale_grad` is that of the last step.

        Examples
        --------
        >>> import numpy as np
        >>> from fastopt import Parameter, SGD, Trainer, Updater
        >>> weight, sgd = Parameter("fc_weight", shape=(1,), init="zeros"), SGD(lr=1.0)
        >>> weight.initialize()
        >>> trainer = Trainer([weight], sgd, comm=Updater(sgd, accumulate=4))
        >>> for gradient in (1, 2):
        ...     weight.set_grad(np.full(1, gradient, np.float32))
        ...     trainer.step()
        >>> trainer.finish()
        >>> weight.data()
        array([-1.5], dtype=float32)
        """
        self.updater.finish()
        for parameter in self._parameters:
            arrays = parameter._data or []
            for other in arrays[1:]:
                other[...] = arrays[0]

    def _follow(self, parameter: Parameter, values: Array) -> None:
        """Write new values to the float32 master of a parameter, if it has one."""
        index, opt = self._parameters.index(parameter), self.updater.optimizer
        has_master = opt.multi_precision and getattr(opt, "master", "") == "float32"
        if has_master and parameter.dtype.name in HALVES and index in self.updater.states:
            self.updater.set_master(index, values.astype(np.float32))

    def _row_sparse_pull(self, copy: Array, rows: Array) -> RowSparse:
        """Return rows of one copy of a parameter."""
        return RowSparse(copy[rows], rows, copy.shape)

    # States

    def save_states(self, path: str | os.PathLike[str]) -> None:
        """Write the optimizer state, update counts and hyper-parameters to a file.

        See :meth:`fastopt.optimizer.Updater.save`. The parameters are not included; save them
        separately.

        Parameters
        ----------
        path : str or os.PathLike
            The file, whose name should end in ``.safetensors``.

        Raises
        ------
        OSError
            The file cannot be written.
        RuntimeError
            The call comes from inside an update, for example from a signal handler.
        """
        self.updater.save(path)

    def load_states(self, path: str | os.PathLike[str]) -> None:
        """Restore the state from a file of :meth:`save_states`, matching parameters by name.

        See :meth:`fastopt.optimizer.Updater.load`.

        Parameters
        ----------
        path : str or os.PathLike
            The file.

        Raises
        ------
        fastopt.checkpoint.CheckpointError
            The file is damaged or does not match the parameters. Nothing changes.
        OSError
            The file cannot be read.
        """
        self.updater.load(path)


def _numbered(params: object) -> tuple[list[Parameter], list[str]]:
    """Return the parameters without duplicates, and their names."""
    if isinstance(params, (ParameterDict, Mapping)):
        pairs = [(name, params[name]) for name in sorted(params.keys())]
    elif isinstance(params, Iterable):
        pairs = [(getattr(parameter, "name", ""), parameter) for parameter in params]
    else:
        raise TypeError(f"params must be a dict or a list of Parameters, got {brief(params)}")
    for _, parameter in pairs:
        if not isinstance(parameter, Parameter):
            raise TypeError(
                f"params must hold Parameters, got {brief(parameter)}; arrays are updated by an "
                "Updater: Updater(optimizer)(names, gradients, weights)"
            )
    unique: dict[Parameter, str] = {}
    for name, parameter in pairs:
        unique.setdefault(parameter, name)
    return list(unique), list(unique.values())


def _optimizer(optimizer: str | Optimizer, arguments: Mapping[str, Any] | None) -> Optimizer:
    if not isinstance(arguments, Mapping | None):
        raise TypeError(f"optimizer_params must be a dict of arguments, got {arguments!r}")
    if arguments and isinstance(optimizer, Optimizer):
        raise ValueError(f"optimizer_params is for an optimizer given by name, got {arguments}")
    return create(optimizer, **(arguments or {}))


def _updater(optimizer: Optimizer, comm: object, options: Mapping[str, Any]) -> Any:
    if comm is None:
        return Updater(optimizer, **options)
    if callable(comm) and hasattr(comm, "optimizer"):
        siblings = optimizer.siblings or {optimizer}
        if comm.optimizer not in siblings or options:
            raise ValueError(
                "comm is an updater, so optimizer must be its optimizer, and loss_scaler and "
                "clip_global_norm are its own"
            )
        return comm
    return import_module("fastopt.distributed").ShardedUpdater(optimizer, comm, **options)
