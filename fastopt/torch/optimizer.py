"""Optimizers for torch: subclasses of ``torch.optim.Optimizer`` that update with fastopt.

Tests: ``tests/pytorch``.
"""

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import cache
from itertools import chain, count
from operator import attrgetter, is_, itemgetter
from typing import Any, ClassVar

import numpy as np
import torch
from torch.optim import optimizer as hooks

from fastopt._engine.clip import measured, squares, times
from fastopt._engine.clip_adaptive import UnitClip
from fastopt._engine.per_index import Index
from fastopt._interrupts import uninterrupted
from fastopt._updater.updater import DEFAULTS, Updater
from fastopt.amp import StepInfo
from fastopt.checkpoint.format.errors import CheckpointError
from fastopt.optimizer import JointSums
from fastopt.optimizer import Optimizer as Rule
from fastopt.torch.recipes import UNSUPPORTED, Made, Recipe, apply, check_arguments
from fastopt.torch.state import Exact, State, States, array_of, converted
from fastopt.torch.tensors import Same
from fastopt.torch.views import GRAD, Gradients, Views, check_parameter

SETTINGS = ("clip_global_norm", "average", "clip_adaptive", "clip_adaptive_eps")
"""Arguments of every class that are arguments of an Updater."""

CLIPS = ("clip_global_norm", "clip_adaptive_eps", "clip_adaptive")
"""Those that limit norms."""

WHOLE = "fastopt"
"""Key under which version 0.1 saved the states of the updaters, if torch had no form for them."""

ESTIMATE = "estimate"
"""Option of a group with what its rule knows of all parameters, such as the distance of Prodigy."""

NO_STEP = StepInfo(stepped=False, skipped=False)

GROUP, PARAMS = attrgetter("group"), itemgetter("params")

Number = Callable[[Sequence[torch.Tensor]], list[int]]
"""Function that returns the indices of parameters."""

increment_version: Callable[[Any], None] = torch.autograd.graph.increment_version


Call = tuple[Gradients, list[Any], list[torch.Tensor]]
"""Parameters that have gradients, these as arrays, and the tensors whose memory the arrays have."""


class Group:
    """Updater, views and states of the parameters of one group.

    Parameters
    ----------
    made : Made
        The optimizer.
    group : dict
        The parameter group.
    settings : mapping
        Arguments of the updater.
    """

    def __init__(self, made: Made, group: dict[str, Any], settings: Mapping[str, Any]) -> None:
        self.made, self.group = made, group
        self.updater = Updater(made.optimizer, **settings)
        self.names = [*made.options, *made.fixed]
        """The options that the optimizer has."""
        self.known = [_constant(group[name]) for name in self.names]
        self.leading: dict[int, int] = {}
        self.by_row = settings.get("clip_adaptive") is not None or made.optimizer.by_row
        """Whether rows or matrices are updated or clipped as a whole."""
        self.views: Views | None = None
        self.forms: dict[Index, Any] = {}
        """Shapes and dtypes of the views, by index."""
        self.states: States | None = None
        self.joint = made.optimizer if isinstance(made.optimizer, JointSums) else None
        """The optimizer, if its rule has numbers that are computed from all parameters."""
        if self.joint is not None:
            self.joint.estimate = dict(group.get(ESTIMATE, {}))
            group.setdefault(ESTIMATE, self.joint.first_estimate)

    def follow(self, values: list[Any]) -> bool:
        """Set the options that have changed; return False if they need another optimizer."""
        optimizer, options = self.made.optimizer, self.made.options
        slots = _slots(optimizer)
        for name, value, known in zip(self.names, values, self.known, strict=True):
            if value is known:
                continue
            if name in options:
                apply(optimizer, {name: options[name]}, self.group)
            elif value != known:
                return False
        self.known = list(map(_constant, values))
        if _slots(optimizer) != slots:
            self.states = None
            self.updater.states.clear()
        return True

    def current(
        self, state: State, number: Number, moved: bool = True, loads: bool = False
    ) -> Views:
        """Return the views of the parameters, and enter their states in the updater.

        Nothing is done unless something has changed; `moved` says whether entries may have. With
        `loads` they are those of a state dict.
        """
        views = self.views
        if (
            views is None
            or not views.same.match([*self.group["params"]])
            or views.snapshot.look() != views.snapshot.seen
        ):
            views = self._view(number)
        states = self.states
        if states is None:
            states = States(self.updater, self.made.form, views)
        elif not moved and states.fit():
            return views
        states.follow(state, loads)
        self.states = states
        return views

    def _view(self, number: Number) -> Views:
        """Create the views of the parameters."""
        params, optimizer = self.group["params"], self.updater.optimizer
        indices = number(params)
        names = [*(self.group.get("param_names") or ())][: len(params)]
        names += [f"parameter {k}" for k in indices[len(names) :]]
        self.views = Views(params, names, indices, self.leading, self.by_row)
        known = dict(zip(indices, names, strict=True))
        if optimizer.idx2name != known:
            optimizer.idx2name = known
        forms = [(array.shape, array.dtype) for array in self.views.arrays]
        before, after = self.forms, dict[Index, Any](zip(indices, forms, strict=True))
        for index in {*before, *self.updater.states}:
            if index not in after or before.get(index, after[index]) != after[index]:
                self.updater.states.pop(index, None)
        if self.states is not None and [*before.items()] == [*after.items()]:
            self.states.views = self.views
        else:
            self.states = None
        self.forms = after
        return self.views

    def call(self, state: State, number: Number, moved: bool) -> Call:
        """Return the call of the parameters that have gradients."""
        views = self.current(state, number, moved)
        grads, present = list(map(GRAD, views.params)), views.present
        if present.point(grads):
            return present, present.grads, grads
        positions = [k for k, grad in enumerate(grads) if grad is not None]
        if False in [views.follow(k, grads[k]) for k in positions]:  # all are asked
            self.views = None
            views = self.current(state, number)
            present = views.present
        if positions != present.positions:
            present = views.present = Gradients(views, positions)
        used = [grads[k] for k in positions]
        arrays = present.grads if present.point(used) else list(map(views.of, positions, used))
        return present, arrays, used

    def update(self, call: Call, factor: float, state: State) -> bool:
        """Update the parameters of a call with gradients times `factor`.

        Returns whether entries of the state are new.
        """
        of, grads, _ = call
        optimizer = self.made.optimizer
        if factor == 1:
            self.updater(of.indices, grads, of.arrays)
        elif not optimizer.folds:
            self.updater(of.indices, [times(grad, factor) for grad in grads], of.arrays)
        else:
            with optimizer.call_lock, uninterrupted:  # a copy of the optimizer never has the factor
                before = optimizer.rescale_grad
                optimizer.rescale_grad = before * factor
                try:
                    self.updater(of.indices, grads, of.arrays)
                finally:
                    optimizer.rescale_grad = before
        increment_version(of.params)
        if self.joint is not None:
            self.group[ESTIMATE] = self.joint.estimate or self.group[ESTIMATE]
        states: Any = self.states
        if states.fresh or states.changes:
            return bool(states.note(state, of.positions))
        states.count()
        return False

    def read_earlier(self, whole: Any, state: State, number: Number) -> None:
        """Enter what version 0.1 saved of a group in the states of its parameters."""
        saved = converted(whole, lambda part: np.array(array_of("state", part)))
        saved["attributes"].pop("buffered", None)  # of SGD, whose buffers now stay in the entry
        self.updater.load_state_dict(saved)
        if self.joint is not None:
            self.group[ESTIMATE] = self.joint.estimate
        states = States(self.updater, self.made.form, self._view(number))
        states.show(state)


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

    Raises
    ------
    TypeError
        A parameter is not a dense tensor on the CPU, or an argument is unknown.
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
    _groups: Sequence[Group] = ()
    _numbers: Mapping[torch.Tensor, int] = {}
    _entries: Same | None = None
    """The entries of the state after the last step."""
    _info: StepInfo | Updater = NO_STEP

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
        super().__init__(params, recipe.defaults({**positions, **arguments}))

    @property
    def updaters(self) -> list[Updater]:
        """The updater of each parameter group; an index stands for a parameter in all of them."""
        if not self._groups:  # of a pickle
            self._regroup()
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
        try:
            self._regroup()
        except BaseException:
            self.param_groups.pop()
            raise

    def _regroup(self) -> None:
        """Follow the parameter groups: each one that is new gets an updater."""
        if WHOLE in self.state:
            self._read_earlier(self.state[WHOLE])
        known = {id(group.group): group for group in self._groups}
        self._groups = [
            known.get(id(group)) or self._made(group, len(self.param_groups))
            for group in self.param_groups
        ]
        self._finish()

    def _made(self, group: dict[str, Any], count: int) -> Group:
        """Create the updater of one of `count` groups."""
        recipe, names = type(self).recipe, group.get("param_names") or ()
        for name, value in self.defaults.items():
            if name not in UNSUPPORTED:  # torch adds differentiable in a load
                group.setdefault(name, value)
        for k, param in enumerate(group["params"]):
            name = names[k] if k < len(names) else f"parameter {k} of the group"
            check_parameter(name, param, recipe.name)
            recipe.check_shape(name, param)
        made = recipe.made(group)
        optimizer = made.optimizer
        if any(map(torch.is_complex, group["params"])) and optimizer.by_row:
            raise TypeError(
                f"fastopt.torch.{recipe.name} computes with rows or matrices of real numbers, got "
                "a complex parameter: make torch.view_as_real(x) the parameter"
            )
        if optimizer.step_sums is not None and count > 1:
            raise ValueError(
                f"{type(self).__name__} estimates one learning rate for all parameters: pass one "
                "parameter group"
            )
        return Group(made, group, self._settings)

    def _number(self, params: Sequence[torch.Tensor]) -> list[int]:
        """Return the indices of parameters in the updaters, which they keep in other groups."""
        present = dict.fromkeys(chain.from_iterable(map(PARAMS, self.param_groups)))
        known = self._numbers = {p: k for p, k in self._numbers.items() if p in present}
        free = count(max(known.values(), default=-1) + 1)
        for param in present:
            if param not in known:
                known[param] = next(free)
        return [known[param] for param in params]

    def _finish(self) -> None:
        """Let the updaters clip, or clip for all of them together."""
        clips: dict[str, Any] = {name: self._settings.get(name, DEFAULTS[name]) for name in CLIPS}
        self._clips = clips["clip_global_norm"] is not None and len(self._groups) > 1
        self._units = None
        if self._clips:
            if clips["clip_adaptive"] is not None:
                self._units = UnitClip(clips["clip_adaptive"], clips["clip_adaptive_eps"])
            clips = {name: DEFAULTS[name] for name in CLIPS}
        for group in self._groups:
            for name, value in clips.items():
                setattr(group.updater, name, value)

    def _follow(self) -> bool:
        """Follow the groups and their options; return whether entries of the state are others."""
        present, groups = self._groups, self.param_groups
        if len(present) != len(groups) or not all(map(is_, map(GROUP, present), groups)):
            self._regroup()
        for group in self._groups:
            values = list(map(group.group.__getitem__, group.names))
            if not (all(map(is_, values, group.known)) or group.follow(values)):
                self._groups = [known for known in self._groups if known is not group]
                self._regroup()
        entries = [*self.state.values()]
        moved = self._entries is None or not self._entries.match(entries)
        if moved:
            self._entries = Same(entries)
        return moved

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
        if (
            self._optimizer_step_pre_hooks
            or self._optimizer_step_post_hooks
            or hooks._global_optimizer_pre_hooks
            or hooks._global_optimizer_post_hooks
            or torch.autograd._profiler_enabled()
        ):
            return _hooked(self, closure)
        return self._step(closure)

    step.hooked = True  # type: ignore[attr-defined]

    def _step(self, closure: Callable[[], Any] | None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        try:
            moved, factor = self._follow(), 1.0
        except ValueError:  # torch has no limits: what nothing is updated with may be out of range
            if all(param.grad is None for group in self.param_groups for param in group["params"]):
                return loss
            raise
        info: Any = NO_STEP
        calls = list[Call]()
        for group in self._groups:
            calls.append(group.call(self.state, self._number, moved))
        if self._clips:
            calls, info, factor = self._clipped(calls)
        for group, call in zip(self._groups, calls, strict=True):
            if call[1] and not (self._clips and info.skipped):
                if group.update(call, factor, self.state):
                    self._entries = None
                info = info if self._clips else group.updater
        self._info = info
        return loss

    @property
    def info(self) -> StepInfo:
        """Outcome of the last step, with `clip_global_norm` including the norm."""
        return self._info.info if isinstance(self._info, Updater) else self._info

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
        for group, (of, grads, held) in zip(self._groups, calls, strict=True):
            optimizer, indices, arrays = group.made.optimizer, of.indices, of.arrays
            if not all(map(_are_alike, grads, arrays)):
                entries = group.updater._checked_entries(indices, grads, arrays)
                grads = [grad for *_, grad in entries]
            scale = optimizer.rescale_grad
            if self._units is not None:
                grads = self._units.all(indices, arrays, grads, scale, optimizer.idx2name)
            names |= optimizer.idx2name
            clipped.append((of, grads, held))
            scales.append(scale)
        if not (indices := [index for of, *_ in clipped for index in of.indices]):
            return clipped, NO_STEP, 1.0

        def sums(down: float) -> np.ndarray[Any, Any]:
            return np.concatenate(
                [
                    scale**2 * squares(grads, down)
                    for scale, (_, grads, _) in zip(scales, clipped, strict=True)
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
            moved = self._follow()
            for group in self._groups:
                views = group.current(self.state, self._number, moved)
                averages = self._settings.get("average") is not None
                known = group.updater.averages if averages else group.updater.states
                pairs = zip(views.indices, views.arrays, strict=True)
                stack.enter_context(group.updater.averaged({i: a for i, a in pairs if i in known}))
            self._mark_all()
            yield
        self._mark_all()

    def _mark_all(self) -> None:
        for group in self.param_groups:
            increment_version(group["params"])

    # State

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state dict of this class, or of the class of torch with the same name.

        Parameters
        ----------
        state_dict : dict
            Result of ``state_dict()``. Tensors are copied, in the dtype that they have.

        Raises
        ------
        CheckpointError, TypeError, ValueError
            The state dict does not match the optimizer. Nothing has changed.

        Examples
        --------
        >>> import torch
        >>> import fastopt.torch
        >>> weight = torch.nn.Parameter(torch.zeros(1))
        >>> opt = fastopt.torch.Adam([weight], lr=1.0)
        >>> opt.load_state_dict(torch.optim.Adam([weight], lr=0.5).state_dict())
        >>> opt.param_groups[0]["lr"]
        0.5
        """
        before = {**vars(self)}
        try:  # torch alone would cast masters and codes to the dtype of the parameter
            with (
                self.register_load_state_dict_pre_hook(_kept),  # after those of users
                self.register_load_state_dict_post_hook(_entered, prepend=True),
            ):
                super().load_state_dict(state_dict)
        except BaseException:
            self.__dict__ = before
            raise

    def __getstate__(self) -> dict[str, Any]:
        # Torch pickles options, and neither clips nor averages are options.
        return {**super().__getstate__(), "_settings": self._settings}

    def _read_earlier(self, earlier: Sequence[Any]) -> None:
        """Enter the states that version 0.1 saved for all groups."""
        if len(earlier) != len(self.param_groups):
            raise CheckpointError(
                f"the state has {len(earlier)} groups, and param_groups {len(self.param_groups)}"
            )
        for whole, group in zip(earlier, self.param_groups, strict=True):
            made = self._made(group, len(self.param_groups))
            made.read_earlier(whole, self.state, self._number)
        del self.state[WHOLE]


def _kept(opt: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
    """Return a state dict whose tensors torch loads as they are."""
    return {**state_dict, "state": converted(state_dict["state"], Exact)}


def _entered(opt: Optimizer) -> None:
    """Enter the states of a state dict."""
    for key, entry in opt.state.items():
        opt.state[key] = converted(entry, lambda kept: kept.tensor.detach().clone())
    for group in opt.param_groups:
        # torch adds options that are off, such as amsgrad, to groups of its earlier versions.
        needed = {k for k, default in opt.defaults.items() if not isinstance(default, bool | None)}
        if missing := sorted(needed - group.keys()):
            raise CheckpointError(
                f"the state dict is of another optimizer than {type(opt).__name__}: its groups "
                f"lack {', '.join(missing)}; load it with the class that saved it"
            )
        if type(opt).recipe.name == "AdamW":
            group["decoupled_weight_decay"] = True  # as in torch, also with a state dict of Adam
    opt._follow()
    for group in opt._groups:
        group.current(opt.state, opt._number, loads=True)


_hooked = torch.optim.Optimizer.profile_hook_step(Optimizer._step)


def make(recipe: Recipe, **methods: Callable[..., Any]) -> type[Optimizer]:
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
        **methods,
    }
    return type(recipe.name, (Optimizer,), namespace)


@cache
def class_of(kind: type[Rule]) -> type[Optimizer]:
    """Create the class of an optimizer of a user."""
    return make(Recipe(kind.__name__, kind), __reduce__=_reduced)


def _reduced(opt: Optimizer) -> tuple[Any, ...]:
    """Pickle an optimizer of a class that is no attribute of the package."""
    return _blank, (type(opt).recipe.kind,), opt.__getstate__()


def _blank(kind: type[Rule]) -> Optimizer:
    made = class_of(kind)
    return made.__new__(made)
