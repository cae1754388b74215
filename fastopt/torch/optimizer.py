"""Optimizers for torch: subclasses of ``torch.optim.Optimizer`` that update with fastopt."""

import inspect
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from itertools import chain
from types import MappingProxyType
from typing import Any, ClassVar

import numpy as np
import torch
from torch.optim import optimizer as hooks

from fastopt._engine.clip import measured, squares
from fastopt._engine.validate import leaves
from fastopt._foreign import of_tensor
from fastopt._kernels.codes import numbers_of
from fastopt._updater.updater import Updater
from fastopt.amp import StepInfo
from fastopt.arguments import brief
from fastopt.checkpoint.format.errors import CheckpointError
from fastopt.torch.recipes import COMMON, Made, Recipe, apply, check_arguments
from fastopt.torch.views import GRAD, Views, check_parameter

__all__ = ["Group", "Optimizer"]

SETTINGS = ("clip_global_norm", "average", "clip_adaptive", "clip_adaptive_eps")
"""Arguments of every class that are arguments of an Updater."""

WHOLE = "fastopt"
"""Key in the state of what torch has no form for: the states of the updaters."""

NO_STEP = StepInfo(stepped=False, skipped=False)

increment_version: Callable[[Any], None] = torch.autograd.graph.increment_version


class Group:
    """Updater and views of the parameters of one group.

    Parameters
    ----------
    made : Made
        The optimizer.
    group : dict
        The parameter group.
    settings : dict
        Arguments of the updater.
    """

    def __init__(self, made: Made, group: dict[str, Any], settings: Mapping[str, Any]) -> None:
        self.made = made
        self.updater = Updater(made.optimizer, **settings)
        self.views: Views | None = None
        self.note(group)

    def note(self, group: Mapping[str, Any]) -> None:
        """Keep the options that the optimizer has, except values that may change in place."""
        known = {name: group[name] for name in (*self.made.options, *self.made.fixed)}
        self.known = {k: None if _is_mutable(v) else v for k, v in known.items()}

    def follow(self, group: Mapping[str, Any]) -> None:
        """Set the options of the optimizer that have changed in the group."""
        for name, value in self.known.items():
            now = group[name]
            if now is value:
                continue
            if name in self.made.fixed:
                if now != value:
                    raise ValueError(
                        f"{name} of a parameter group cannot change from {value!r} to {now!r}: "
                        "construct a new optimizer"
                    )
            else:
                optimizer, option = self.made.optimizer, self.made.options[name]
                before = None if name in COMMON else _slots(optimizer)
                apply(optimizer, {name: option}, group)
                if before is not None and _slots(optimizer) != before:
                    self.updater.states, self.updater.states_synced = {}, {}
                self.known[name] = None if _is_mutable(now) else now

    def current(self, group: Mapping[str, Any], numbers: Mapping[torch.Tensor, int]) -> Views:
        """Return the views of the parameters, which are created again if one has other memory."""
        params, views = group["params"], self.views
        if views is None or not views.fit(params):
            own = [numbers[param] for param in params]
            names = group.get("param_names") or [f"parameter {number}" for number in own]
            views = Views(params, names, own)
            self.updater.optimizer.idx2name = dict(zip(own, names, strict=True))
            self.views = views
        return views


def _slots(optimizer: Any) -> Any:
    """Return the names of the state arrays, on which momentum has an effect if it becomes 0."""
    return optimizer.rule.state if optimizer.native else ()


def _is_mutable(value: Any) -> bool:
    return isinstance(value, (torch.Tensor, list))


class Optimizer(torch.optim.Optimizer):  # type: ignore[misc]
    """Base class of the optimizers for torch.

    Parameters
    ----------
    params : iterable of torch.Tensor, of (name, tensor), or of dict
        Parameters on the CPU, or groups of them, see :class:`torch.optim.Optimizer`.
    lr : float
        Learning rate.
    clip_global_norm : float, optional
        Maximum norm of all gradients of a step, concatenated. A step with a non-finite gradient
        updates nothing. Default None.
    average : EMA, SWA or Lookahead, optional
        Average of the parameters to maintain, see :meth:`averaged`. Default None.
    clip_adaptive, clip_adaptive_eps : float, optional
        See :class:`fastopt.Updater`.
    **arguments
        Options of the parameter groups: torch's where torch has the optimizer, else those of the
        class of the same name in :mod:`fastopt.optimizer`.

    Attributes
    ----------
    info : fastopt.amp.StepInfo
        Outcome of the last step, with `clip_global_norm` including the norm.

    Raises
    ------
    TypeError
        A parameter is not a dense real tensor on the CPU, or an argument is unknown.
    ValueError
        An option is out of range, or torch's rule with this option is not supported.

    Examples
    --------
    >>> import torch
    >>> import fastopt.torch
    >>> weight = torch.nn.Parameter(torch.ones(2))
    >>> opt = fastopt.torch.SGD([weight], lr=0.1)
    >>> (weight**2).sum().backward()
    >>> opt.step()
    >>> weight.detach()
    tensor([0.8000, 0.8000])
    """

    recipe: ClassVar[Recipe]

    def __init__(self, params: Any, *args: Any, **arguments: Any) -> None:
        if not hasattr(type(self), "recipe"):
            raise TypeError("fastopt.torch.Optimizer is abstract: use a class such as Adam")
        recipe = type(self).recipe
        if len(args) > recipe.positional:
            raise TypeError(
                f"{recipe.name} takes {recipe.positional} options by position, got {len(args)}"
            )
        positions = dict(zip(recipe.parameters, args, strict=False))
        if twice := positions.keys() & arguments.keys():
            raise TypeError(f"{recipe.name} got {sorted(twice)} twice")
        check_arguments(recipe, {**positions, **arguments}, SETTINGS)
        self._settings = {name: arguments.pop(name) for name in SETTINGS if name in arguments}
        self._groups: list[Group] = []
        self._numbers: dict[torch.Tensor, int] = {}
        self.info = NO_STEP
        super().__init__(params, recipe.defaults({**positions, **arguments}))

    @property
    def updaters(self) -> list[Updater]:
        """The updater of each parameter group; indices are positions in all groups together."""
        return [group.updater for group in self._groups]

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group of parameters with options of its own.

        Parameters
        ----------
        param_group : dict
            ``"params"``, and options that differ from the defaults.

        Raises
        ------
        TypeError, ValueError
            A parameter or an option is not supported. Nothing changes.
        """
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        try:
            for k, param in enumerate(group["params"]):
                names = group.get("param_names") or {k: f"parameter {k} of the group"}
                check_parameter(names[k], param)
            self._groups.append(self._group(group))
        except BaseException:
            self.param_groups.pop()
            raise
        self._finish()

    def _group(self, group: dict[str, Any]) -> Group:
        """Create the updater of a group."""
        made = type(self).recipe.made(group)
        if made.optimizer.step_sums is not None and len(self.param_groups) > 1:
            raise ValueError(
                f"{type(self).__name__} estimates one learning rate for all parameters: pass one "
                "parameter group"
            )
        return Group(made, group, self._settings)

    def _finish(self) -> None:
        """Number new parameters, and let the only updater clip, or none."""
        for param in chain.from_iterable(group["params"] for group in self.param_groups):
            self._numbers.setdefault(param, len(self._numbers))
        several, limit = len(self._groups) > 1, self._settings.get("clip_global_norm")
        for updater in self.updaters:
            updater.clip_global_norm = None if several else limit
        self._clips = limit is not None and several

    # Steps

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update the parameters that have gradients, in place.

        Parameters
        ----------
        closure : callable, optional
            Computes the loss again and its gradients, and returns the loss.

        Returns
        -------
        object
            What `closure` returned.

        Raises
        ------
        TypeError, ValueError
            A gradient does not match its parameter, or an option is out of range.
        """
        if self._has_hooks():
            return self._step_with_hooks(closure)
        return self._step(closure)

    step.hooked = True  # type: ignore[attr-defined]

    def _has_hooks(self) -> bool:
        return bool(
            self._optimizer_step_pre_hooks
            or self._optimizer_step_post_hooks
            or hooks._global_optimizer_pre_hooks
            or hooks._global_optimizer_post_hooks
            or torch.autograd._profiler_enabled()
        )

    def _step_with_hooks(self, closure: Any) -> Any:
        return _hooked(self, closure)

    def _step(self, closure: Callable[[], Any] | None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if self._clips:
            self._clipped_step()
            return loss
        info = NO_STEP
        for group, own in zip(self.param_groups, self._groups, strict=True):
            params, indices, grads, arrays = self._call(group, own)
            if indices:
                own.updater(indices, grads, arrays)
                increment_version(params)
                info = own.updater.info
        self.info = info
        return loss

    def _call(
        self, group: dict[str, Any], own: Group
    ) -> tuple[Any, list[int], list[Any], list[Any]]:
        """Return the parameters that have gradients, and the arguments of the updater."""
        own.follow(group)
        try:
            views = own.current(group, self._numbers)
        except KeyError:  # a parameter was appended to the group
            self._finish()
            views = own.current(group, self._numbers)
        params = group["params"]
        grads = list(map(GRAD, params))
        if views.whole:
            with suppress(TypeError, RuntimeError):
                return params, views.indices, views.of(grads), views.arrays
        present = [p for p, grad in zip(params, grads, strict=True) if grad is not None]
        return present, *views.some(grads)

    def _clipped_step(self) -> None:
        """Update several groups, whose gradients are clipped by the norm of all together."""
        calls = [self._call(*pair) for pair in zip(self.param_groups, self._groups, strict=True)]
        entries = [
            (index, array, grad, None)
            for _, *call in calls
            for index, grad, array in zip(*call, strict=True)
        ]
        if not entries:
            self.info = NO_STEP
            return
        limit = self._settings["clip_global_norm"]
        indices = [index for index, *_ in entries]
        sums = squares([(i, w, g, s) for i, w, g, s in entries])
        self.info, factor = measured(sums, indices, {}, 1.0, None, limit)
        if self.info.stepped:
            for own, (params, *call) in zip(self._groups, calls, strict=True):
                own.made.optimizer.rescale_grad = factor
                if params:
                    own.updater(*call)
                    increment_version(params)

    # Averages

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """Context manager in which the parameters have their averages, for evaluation.

        With `average`, or with the optimizers that average themselves: ASGD and the Schedule-Free
        ones. On exit the parameters have their own values again.

        Raises
        ------
        RuntimeError
            The optimizer has no averages.

        Examples
        --------
        >>> import torch
        >>> import fastopt, fastopt.torch
        >>> weight = torch.nn.Parameter(torch.zeros(1))
        >>> opt = fastopt.torch.SGD([weight], lr=1.0, average=fastopt.EMA(decay=0.5))
        >>> weight.grad = torch.tensor([-1.0])
        >>> opt.step()
        >>> with opt.averaged():
        ...     print(weight.item())
        0.5
        >>> weight.item()
        1.0
        """
        with ExitStack() as stack:
            for group, own in zip(self.param_groups, self._groups, strict=True):
                views = own.current(group, self._numbers)
                known = own.updater.averages if "average" in self._settings else own.updater.states
                pairs = zip(views.indices, views.arrays, strict=True)
                stack.enter_context(own.updater.averaged({i: a for i, a in pairs if i in known}))
            self._mark_all()
            yield
        self._mark_all()

    def _mark_all(self) -> None:
        for group in self.param_groups:
            increment_version(group["params"])

    # State

    @property
    def state(self) -> Any:
        """State of each parameter, read-only: tensors that share memory with fastopt's arrays."""
        found: dict[Any, Any] = defaultdict(dict)
        if not all(map(self._has_form, self.param_groups, self._groups)):
            found[WHOLE] = [_mapped(own.updater.state_dict(), _tensor) for own in self._groups]
            return MappingProxyType(found)
        for group, own in zip(self.param_groups, self._groups, strict=True):
            for param in group["params"]:
                entry = _entry(own, self._numbers.get(param))
                if entry:
                    found[param] = entry
        return MappingProxyType(found)

    @state.setter
    def state(self, value: Mapping[Any, Any]) -> None:
        if value:
            raise AttributeError("state is read-only; load_state_dict() loads a state")
        for k, group in enumerate(self.param_groups if "param_groups" in vars(self) else ()):
            self._groups[k] = self._group(group)

    def _has_form(self, group: Mapping[str, Any], own: Group) -> bool:
        """Whether torch's format has the whole state of a group."""
        optimizer = own.made.optimizer
        return (
            own.made.form is not None
            and not self._settings.get("average")
            and optimizer.sparse_decay == "touched"
            and all(param.dtype.itemsize > 2 for param in group["params"])
            and optimizer.state_dtype is None
        )

    def __getstate__(self) -> dict[str, Any]:
        return {
            "defaults": self.defaults,
            "state": dict(self.state),
            "param_groups": self.param_groups,
            "_settings": self._settings,
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Load a state: of a pickle, or the one that ``load_state_dict`` passes."""
        rest = {**state}
        saved, groups = rest.pop("state"), rest["param_groups"]
        before = dict(vars(self)) or rest  # empty while a pickle is loaded
        settings, defaults = before["_settings"], before["defaults"]
        for group in groups:
            for name, value in defaults.items():
                group.setdefault(name, value)
        numbers: dict[torch.Tensor, int] = {}
        for param in chain.from_iterable(group["params"] for group in groups):
            numbers.setdefault(param, len(numbers))
        owns = [Group(type(self).recipe.made(group), group, settings) for group in groups]
        for k, (group, own) in enumerate(zip(groups, owns, strict=True)):
            if WHOLE in saved:
                own.updater.load_state_dict(_mapped(saved[WHOLE][k], _array))
            else:
                _load(own, {numbers[p]: saved[p] for p in group["params"] if saved.get(p)})
            apply(own.made.optimizer, own.made.options, group)
        super().__setstate__(rest)
        self.info, self._groups, self._numbers = NO_STEP, owns, numbers
        self._finish()


def _entry(own: Group, number: int | None) -> dict[str, Any]:
    """Return the state of a parameter in torch's form."""
    form, optimizer = own.made.form, own.made.optimizer
    if form is None or number not in own.updater.states:
        return {}
    arrays = numbers_of(leaves(own.updater.states[number]))
    entry: dict[str, Any] = {}
    if form.counted:
        entry["step"] = torch.tensor(float(optimizer._index_update_count.get(number, 0)))
    if form.torch == "NAdam":
        entry["mu_product"] = torch.tensor(vars(optimizer)["_m_schedules"].get(number, 1.0))
    return entry | dict(zip(form.slots, map(_tensor, arrays), strict=False))


def _load(own: Group, entries: Mapping[int, Mapping[str, Any]]) -> None:
    """Load states of torch, by the number of the parameter."""
    form, updater = own.made.form, own.updater
    entries = {i: {k: v for k, v in each.items() if v is not None} for i, each in entries.items()}
    if not any(entries.values()):
        return
    if form is None:
        raise CheckpointError(f"torch has no state of {type(updater.optimizer).__name__}")
    described = updater.state_dict()
    states, counts, products = {}, {}, {}
    for index, entry in entries.items():
        slots = [slot for slot in form.slots if slot in entry or slot != form.optional]
        if missing := [slot for slot in slots if slot not in entry]:
            raise CheckpointError(f"the state of parameter {index} lacks {missing}")
        arrays = [_array(entry[slot]) for slot in slots]
        if form.optional and form.optional not in entry:
            arrays.append(np.zeros_like(arrays[0]))
        nested = arrays[0] if len(arrays) == 1 and not form.in_tuple else tuple(arrays)
        states[index], counts[index] = nested, int(entry.get("step", 1))
        products[index] = float(entry.get("mu_product", 1.0))
    attributes = described["attributes"]
    attributes["_index_update_count"] = counts
    attributes["num_update"] = max([0, *counts.values()])
    if form.torch == "NAdam":
        attributes["_m_schedules"] = products
    described["parameters"] = {index: index for index in entries}
    described["states"] = states
    updater.load_state_dict(described, strict=False)


def _tensor(array: Any) -> torch.Tensor:
    """Return a tensor with the memory of an array."""
    if array.dtype.name == "bfloat16":
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)


def _array(tensor: Any) -> Any:
    """Return a copy of a tensor as an array."""
    if not isinstance(tensor, torch.Tensor):
        raise CheckpointError(f"a state must be a tensor, got {brief(tensor)}")
    return np.array(of_tensor("state", tensor.detach().cpu()))


def _mapped(tree: Any, function: Callable[[Any], Any]) -> Any:
    """Return nested dicts, tuples and lists with arrays or tensors converted."""
    if isinstance(tree, Mapping):
        return {key: _mapped(part, function) for key, part in tree.items()}
    if isinstance(tree, (tuple, list)):
        return type(tree)(_mapped(part, function) for part in tree)
    return function(tree) if isinstance(tree, (np.ndarray, torch.Tensor)) else tree


_hooked = torch.optim.Optimizer.profile_hook_step(Optimizer._step)


def make(recipe: Recipe) -> type[Optimizer]:
    """Create the class of a recipe."""
    keyword, position = inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD
    parameters = [inspect.Parameter("params", position)]
    for k, name in enumerate(recipe.parameters):
        kind = position if k < recipe.positional else keyword
        parameters.append(inspect.Parameter(name, kind, default=None))
    parameters.append(inspect.Parameter("arguments", inspect.Parameter.VAR_KEYWORD))
    namespace = {
        "recipe": recipe,
        "__module__": "fastopt.torch",
        "__doc__": recipe.summary,
        "__signature__": inspect.Signature(parameters),
    }
    return type(recipe.name, (Optimizer,), namespace)
