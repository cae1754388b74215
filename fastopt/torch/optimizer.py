"""Optimizers for torch: subclasses of ``torch.optim.Optimizer`` that update with fastopt."""

import inspect
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from itertools import chain
from types import MappingProxyType
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
from torch.optim import optimizer as hooks

from fastopt._engine.clip import measured, squares, times
from fastopt._engine.clip_adaptive import UnitClip
from fastopt._engine.validate import leaves
from fastopt._foreign import of_tensor, resolved
from fastopt._interrupts import between_updates, uninterrupted
from fastopt._kernels.codes import numbers_of
from fastopt._updater.updater import DEFAULTS, Updater
from fastopt.amp import StepInfo
from fastopt.arguments import brief, number
from fastopt.checkpoint.format.errors import CheckpointError
from fastopt.optimizer import Optimizer as Rule
from fastopt.torch.recipes import COMMON, Made, Recipe, apply, check_arguments, plain
from fastopt.torch.rules import Buffered, HeavyBall
from fastopt.torch.views import GRAD, Views, check_parameter

SETTINGS = ("clip_global_norm", "average", "clip_adaptive", "clip_adaptive_eps")
"""Arguments of every class that are arguments of an Updater."""

CLIPS = ("clip_global_norm", "clip_adaptive_eps", "clip_adaptive")
"""Those that limit norms."""

WHOLE = "fastopt"
"""Key in the state of what torch has no form for: the states of the updaters."""

NO_STEP = StepInfo(stepped=False, skipped=False)

increment_version: Callable[[Any], None] = torch.autograd.graph.increment_version


class Call(NamedTuple):
    """Parameters of a group that have gradients, and the arguments of its updater."""

    params: Any
    indices: list[int]
    grads: list[Any]
    arrays: list[Any]


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
        self.known = {name: _constant(group[name]) for name in made.options}
        """The options that the optimizer has."""
        self.known |= {name: group[name] for name in made.fixed}

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
                momentum = getattr(optimizer, "momentum", None)
                apply(optimizer, {name: option}, group)
                if before is not None and _slots(optimizer) != before:
                    if momentum and isinstance(optimizer, Buffered):
                        optimizer.buffered = True
                    else:
                        self.updater.states_synced, self.updater.states = {}, {}  # counts go on
                if isinstance(optimizer, HeavyBall) and optimizer.momentum and not momentum:
                    self._start_buffers(optimizer)
                self.known[name] = _constant(now)

    def _start_buffers(self, optimizer: HeavyBall) -> None:
        """Let the next update be the first one for parameters without momentum so far.

        Torch does not dampen the first gradient in a buffer. Without momentum, a buffer stays zero.
        """
        counts, states = optimizer._index_update_count, self.updater.states
        for index in counts:
            if not any(np.any(array) for array in leaves(states.get(index))):
                counts[index] = optimizer.begin_num_update

    def current(self, group: Mapping[str, Any], numbers: Mapping[torch.Tensor, int]) -> Views:
        """Return the views of the parameters, which are created again if one has other memory."""
        params, views = group["params"], self.views
        if views is None or not views.fit(params):
            own = [numbers[param] for param in params]
            names = _names(group, own)
            views = Views(params, names, own)
            self.updater.optimizer.idx2name = dict(zip(own, names, strict=True))
            self.views = views
        return views

    def update(self, call: Call, factor: float) -> None:
        """Update the parameters of a call with gradients times `factor`."""
        _, indices, grads, arrays = call
        if factor == 1:
            self.updater(indices, grads, arrays)
            return
        optimizer = self.made.optimizer
        if not optimizer.folds:
            self.updater(indices, [times(grad, factor) for grad in grads], arrays)
        else:
            with optimizer.call_lock, uninterrupted:  # a copy of the optimizer never has the factor
                before = optimizer.rescale_grad
                optimizer.rescale_grad = before * factor
                try:
                    self.updater(indices, grads, arrays)
                finally:
                    optimizer.rescale_grad = before


def _names(group: Mapping[str, Any], numbers: Sequence[int]) -> list[str]:
    """Return the names of the parameters of a group, for errors."""
    names = [*(group.get("param_names") or ())][: len(numbers)]
    return names + [f"parameter {k}" for k in numbers[len(names) :]]


def _slots(optimizer: Rule) -> Any:
    """Return the names of the state arrays, on which momentum has an effect if it becomes 0."""
    return optimizer.rule.state if optimizer.native else ()


def _are_alike(grad: Any, array: np.ndarray[Any, Any]) -> bool:
    """Whether a gradient needs no further check."""
    plain_array = type(grad) is np.ndarray
    return plain_array and grad.shape == array.shape and grad.dtype == array.dtype


def _constant(value: object) -> Any:
    """Return the value of an option, or None if it may change in place."""
    return None if _is_mutable(value) else value


def _is_mutable(value: object) -> bool:
    of = isinstance(value, tuple) and any(map(_is_mutable, value))
    return of or isinstance(value, (torch.Tensor, np.ndarray, list))


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
        See :class:`fastopt.Updater`; it precedes `clip_global_norm`.
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

    def __init__(self, params: object, *args: object, **arguments: Any) -> None:
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
        self._units: UnitClip | None = None
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
            names = group.get("param_names") or {}
            for k, param in enumerate(group["params"]):
                name = names[k] if names else f"parameter {k} of the group"
                check_parameter(name, param)
                type(self).recipe.check_shape(name, param)
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
        """Number new parameters, and let the updaters clip, or clip for all of them together."""
        for param in chain.from_iterable(group["params"] for group in self.param_groups):
            self._numbers.setdefault(param, len(self._numbers))
        clips: dict[str, Any] = {name: self._settings.get(name, DEFAULTS[name]) for name in CLIPS}
        self._clips = clips["clip_global_norm"] is not None and len(self._groups) > 1
        self._units = None
        if self._clips:
            if clips["clip_adaptive"] is not None:
                self._units = UnitClip(clips["clip_adaptive"], clips["clip_adaptive_eps"])
            clips = {name: DEFAULTS[name] for name in CLIPS}
        for updater in self.updaters:
            for name, value in clips.items():
                setattr(updater, name, value)

    def _pairs(self) -> Iterator[tuple[dict[str, Any], Group]]:
        """Return each parameter group with its updater."""
        if len(self.param_groups) != len(self._groups):
            raise ValueError(
                f"param_groups must have length {len(self._groups)}, got {len(self.param_groups)}: "
                "call add_param_group() for another group, and construct a new optimizer to remove "
                "one"
            )
        return zip(self.param_groups, self._groups, strict=True)

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
            return _hooked(self, closure)
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

    def _step(self, closure: Callable[[], Any] | None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        calls, factor = [self._call(*pair) for pair in self._pairs()], 1.0
        info = NO_STEP
        if self._clips:
            calls, info, factor = self._clipped(calls)
        for own, call in zip(self._groups, calls, strict=True):
            if call.indices and not info.skipped:
                own.update(call, factor)
                increment_version(call.params)
                info = info if self._clips else own.updater.info
        self.info = info
        return loss

    def _call(self, group: dict[str, Any], own: Group) -> Call:
        """Return the call of a group."""
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
                return Call(params, views.indices, views.of(grads), views.arrays)
        present = [p for p, grad in zip(params, grads, strict=True) if grad is not None]
        return Call(present, *views.some(grads))

    def _clipped(self, calls: Sequence[Call]) -> tuple[list[Call], StepInfo, float]:
        """Clip the units of several groups, and measure the norm of all gradients together.

        Returns
        -------
        list of Call
            With clipped units.
        StepInfo
            The outcome.
        float
            The factor that limits the norm.
        """
        clipped: list[Call] = []
        scales, names = list[float](), dict[Any, str]()
        for own, (params, indices, grads, arrays) in zip(self._groups, calls, strict=True):
            optimizer = own.made.optimizer
            if not all(map(_are_alike, grads, arrays)):
                entries = own.updater._checked_entries(indices, grads, arrays)
                grads = [grad for *_, grad in entries]
            scale = optimizer.rescale_grad
            if self._units is not None:
                grads = self._units.all(indices, arrays, grads, scale, optimizer.idx2name)
            names |= optimizer.idx2name
            clipped.append(Call(params, indices, grads, arrays))
            scales.append(scale)
        if not (indices := [index for call in clipped for index in call.indices]):
            return clipped, NO_STEP, 1.0

        def sums(down: float) -> np.ndarray[Any, Any]:
            return np.concatenate(
                [
                    scale**2 * squares(call.grads, down)
                    for scale, call in zip(scales, clipped, strict=True)
                ]
            )

        limit = self._settings["clip_global_norm"]
        return clipped, *measured(sums, indices, names, 1.0, None, limit)

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
            for group, own in self._pairs():
                views = own.current(group, self._numbers)
                averages = self._settings.get("average") is not None
                known = own.updater.averages if averages else own.updater.states
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
        return MappingProxyType(self._states(_tensor))

    @state.setter
    def state(self, value: Mapping[Any, Any]) -> None:
        if value:
            raise AttributeError("state is read-only; load_state_dict() loads a state")
        for k, group in enumerate(self.param_groups if "param_groups" in vars(self) else ()):
            self._groups[k] = self._group(group)
        if "param_groups" in vars(self):
            self._finish()

    def _states(self, convert: Callable[[Any], torch.Tensor]) -> dict[Any, Any]:
        """Return the state of each parameter, or of all groups, with converted arrays."""
        found: dict[Any, Any] = defaultdict(dict)
        if not all(self._has_form(*pair) for pair in self._pairs()):
            found[WHOLE] = [_mapped(own.updater.state_dict(), _tensor) for own in self._groups]
            return found
        for group, own in self._pairs():
            lock, shares = own.made.optimizer.call_lock, convert is _tensor
            with nullcontext() if shares else between_updates(lock, "state_dict()"):
                for param in group["params"]:
                    entry = _entry(own, self._numbers.get(param), convert)
                    if entry:
                        found[param] = entry
        return found

    def state_dict(self) -> dict[str, Any]:
        """Return a snapshot for ``load_state_dict()``: copies, which later steps do not change.

        Returns
        -------
        dict
            ``"state"`` and ``"param_groups"``, with numbers in place of parameters like in torch.

        Raises
        ------
        RuntimeError
            The call comes from inside an update, for example from a signal handler.

        Examples
        --------
        >>> import torch
        >>> import fastopt.torch
        >>> weight = torch.nn.Parameter(torch.zeros(1))
        >>> opt = fastopt.torch.SGD([weight], lr=1.0, momentum=0.5)
        >>> weight.grad = torch.ones(1)
        >>> opt.step()
        >>> before = opt.state_dict()
        >>> opt.step()
        >>> before["state"][0]["momentum_buffer"]
        tensor([1.])
        """
        for hook in self._optimizer_state_dict_pre_hooks.values():
            hook(self)
        numbers: dict[torch.Tensor, int] = {}
        groups, count = [], 0
        for group in self.param_groups:
            params = group["params"]
            numbers |= {p: k for k, p in enumerate(params, count) if p not in numbers}
            count += len(params)
            options = {name: value for name, value in group.items() if name != "params"}
            own = [numbers[param] for param in params]
            groups.append({**_mapped(options, copied), "params": own})
        states = self._states(lambda array: _tensor(array).clone())
        found = {
            "state": {numbers.get(key, key): entry for key, entry in states.items()},
            "param_groups": groups,
        }
        for hook in self._optimizer_state_dict_post_hooks.values():
            found = found if (result := hook(self, found)) is None else result
        return found

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
            "state": self._states(lambda array: _tensor(array).clone()),
            "param_groups": self.param_groups,
            "_settings": self._settings,
            "_factors": [own.made.optimizer.rescale_grad for own in self._groups],
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Load a state: of a pickle, or the one that ``load_state_dict`` passes."""
        rest = {**state}
        saved, groups = rest.pop("state"), rest["param_groups"]
        factors = rest.pop("_factors", ())
        before = dict(vars(self)) or rest  # empty while a pickle is loaded
        if "_groups" in before:
            factors = [own.made.optimizer.rescale_grad for own in before["_groups"]]
        settings, defaults = before["_settings"], before["defaults"]
        for k, group in enumerate(groups):
            for name, value in defaults.items():
                group.setdefault(name, value)
            if "_groups" in before:
                _check_names(k, group)
        numbers: dict[torch.Tensor, int] = {}
        for param in chain.from_iterable(group["params"] for group in groups):
            numbers.setdefault(param, len(numbers))
        owns = [Group(type(self).recipe.made(group), group, settings) for group in groups]
        if WHOLE in saved and len(saved[WHOLE]) != len(groups):
            raise CheckpointError(
                f"the state has {len(saved[WHOLE])} groups, and param_groups {len(groups)}"
            )
        for k, (group, own) in enumerate(zip(groups, owns, strict=True)):
            if WHOLE in saved:
                own.updater.load_state_dict(_mapped(saved[WHOLE][k], _array))
            else:
                _load(own, group, numbers, saved)
            optimizer, form = own.made.optimizer, own.made.form
            apply(optimizer, own.made.options, group)
            # Saved attributes do not replace what the class and the user of this one have chosen.
            optimizer.rescale_grad = factors[k] if k < len(factors) else 1.0
            for name, value in form.when.items() if form else ():
                setattr(optimizer, name, value)
        super().__setstate__(rest)
        self.info, self._groups, self._numbers = NO_STEP, owns, numbers
        self._finish()


def _check_names(k: int, group: Mapping[str, Any]) -> None:
    """Raise an error unless a group of a state dict has no names, or one for each parameter."""
    names, count = group.get("param_names"), len(group["params"])
    if names is None:
        return
    are_names = isinstance(names, (list, tuple)) and all(isinstance(name, str) for name in names)
    if not are_names or len(names) != count:
        raise CheckpointError(
            f"param_names of parameter group {k} must be a list of {count} names, one for each of "
            f"its parameters, got {brief(names)}"
        )


def _entry(own: Group, number: int | None, convert: Callable[[Any], Any]) -> dict[str, Any]:
    """Return the state of a parameter in torch's form, with converted arrays."""
    form, optimizer = own.made.form, own.made.optimizer
    if form is None or number not in own.updater.states:
        return {}
    arrays = numbers_of(leaves(own.updater.states[number]))
    entry: dict[str, Any] = {}
    if form.counted:
        count = optimizer._index_update_count.get(number, 0)
        entry["step"] = count if form.torch == "SparseAdam" else torch.tensor(float(count))
    if form.torch == "NAdam":
        entry["mu_product"] = torch.tensor(vars(optimizer)["_m_schedules"].get(number, 1.0))
    return entry | dict(zip(form.slots, map(convert, arrays), strict=False))


def _load(
    own: Group,
    group: Mapping[str, Any],
    numbers: Mapping[torch.Tensor, int],
    saved: Mapping[torch.Tensor, Mapping[str, Any]],
) -> None:
    """Load states of torch, by parameter."""
    form, updater = own.made.form, own.updater
    states, counts, products = {}, {}, {}
    indices = [numbers[param] for param in group["params"]]
    for param, name, index in zip(group["params"], _names(group, indices), indices, strict=True):
        entry = {
            slot: value for slot, value in (saved.get(param) or {}).items() if value is not None
        }
        if not entry:
            continue
        if form is None:
            raise CheckpointError(f"torch has no state of {type(updater.optimizer).__name__}")
        context = f"the state of {name}"
        slots = [slot for slot in form.slots if slot in entry or slot != form.optional]
        if missing := [slot for slot in slots if slot not in entry]:
            raise CheckpointError(f"{context} lacks {missing}")
        arrays = [_array(entry[slot], f"{context}: {slot}") for slot in slots]
        for slot, array in zip(slots, arrays, strict=True):
            if array.shape != param.shape:
                raise CheckpointError(
                    f"{context}: {slot} must have shape {tuple(param.shape)}, got {array.shape}"
                )
        if form.optional and form.optional not in entry:
            arrays.append(np.zeros_like(arrays[0]))
        nested = arrays[0] if len(arrays) == 1 and not form.in_tuple else tuple(arrays)
        states[index], counts[index] = nested, _steps(context, entry.get("step", 1))
        products[index] = number(f"{context}: mu_product", plain(entry.get("mu_product", 1.0)))
    if form is None or not states:
        return
    described = updater.state_dict()
    attributes = described["attributes"]
    attributes["_index_update_count"] = counts
    attributes["num_update"] = max(counts.values())
    if form.torch == "NAdam":
        attributes["_m_schedules"] = products
    if form.torch == "SGD":
        attributes["buffered"] = True
    described["parameters"] = {index: index for index in states}
    described["states"] = states
    updater.load_state_dict(described, strict=False)


def _steps(context: str, value: object) -> int:
    """Return a number of steps; raise CheckpointError if it is not one."""
    steps = plain(value)
    if isinstance(steps, (int, float)) and steps >= 0 and float(steps).is_integer():
        return int(steps)
    raise CheckpointError(f"{context}: step must be a whole number, at least 0, got {brief(value)}")


def _tensor(array: np.ndarray[Any, Any]) -> torch.Tensor:
    """Return a tensor with the memory of an array."""
    if array.dtype.name == "bfloat16":
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)


def _array(tensor: object, role: str = "state") -> Any:
    """Return a copy of a tensor as an array."""
    if not isinstance(tensor, torch.Tensor):
        raise CheckpointError(f"{role} must be a tensor, got {brief(tensor)}")
    return np.array(of_tensor(role, resolved(tensor.detach().cpu())))


def copied(value: np.ndarray[Any, Any] | torch.Tensor) -> Any:
    """Return a copy of a tensor or an array."""
    return value.copy() if isinstance(value, np.ndarray) else value.detach().clone()


def _mapped(tree: Any, function: Callable[[Any], Any]) -> Any:
    """Return nested dicts, tuples and lists with arrays or tensors converted."""
    if isinstance(tree, Mapping):
        return {key: _mapped(part, function) for key, part in tree.items()}
    if type(tree) in (tuple, list):
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
