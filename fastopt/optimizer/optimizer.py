"""The base class of all optimizers: what an author writes, and what a user sets."""

import itertools
import math
import threading
import warnings
from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import product
from math import inf
from typing import Any, ClassVar, Literal, TypeVar, Unpack
from weakref import WeakSet

import numpy as np
from numpy.typing import NDArray

from fastopt.arguments import (
    ArrayOf,
    Choice,
    Descriptions,
    Flag,
    Instance,
    Integer,
    OrNone,
    PairOf,
    Real,
    Renamed,
    TableOf,
    brief,
    number,
    without_address,
)
from fastopt.checked import Checked
from fastopt.engine.hyper import constant
from fastopt.engine.mixed_precision import (
    check_copy,
    has_master,
    round_into,
    split_state,
    state_with_master,
    to_float32,
)
from fastopt.engine.per_index import Counts, Index, PerIndex
from fastopt.engine.planner import Planner
from fastopt.engine.step_sums import StepSums
from fastopt.engine.tracked import Tracked, weakly
from fastopt.engine.validate import Array, is_half, label, order_of
from fastopt.kernels import noise
from fastopt.kernels.codes import is_worth_codes, scales_shape
from fastopt.kernels.device_memory import host, like
from fastopt.kernels.devices import Header, header, is_cuda
from fastopt.kernels.layout import bfloat16, real_of
from fastopt.kernels.rule import Rule
from fastopt.kernels.table import Table
from fastopt.kernels.threads import in_forked_child
from fastopt.lr_scheduler.base import Schedule, rebased
from fastopt.naming import Same, unknown_arguments
from fastopt.notices import warn_user
from fastopt.optimizer.keywords import Names, Rate
from fastopt.optimizer.unbound import warn_if_unbound
from fastopt.sparse import RowSparse
from fastopt.suggestions import closest

__all__ = [
    "Array",
    "Index",
    "Optimizer",
    "Schedule",
    "ScheduledRateError",
    "as_float",
    "bound",
    "create",
    "endings",
    "register",
]

Class = TypeVar("Class", bound="type[Optimizer]")
Snapshot = dict[str, tuple[Any, dict[Any, Any] | None]]
"""Attributes, and the items of those that are mappings."""

RATE = Real(least=0)
COUNTED = ("_update_count", "_get_lr", "_get_wd", "learning_rate")
"""What a class may override to count, or to find rates, in its own way."""

TABLES = ("lr_mult", "wd_mult", "idx2name", "param_dict")
"""Attributes that decide about multipliers."""

NAMES = {
    **dict.fromkeys(("step_size", "learn_rate", "learning_rate_init", "alpha"), ("learning_rate",)),
    **dict.fromkeys(("b1", "beta_1"), ("beta1",)),
    **dict.fromkeys(("b2", "beta_2"), ("beta2",)),
    **dict.fromkeys(("L2", "l2", "weight_decay_rate", "lambda_"), ("wd",)),
    **dict.fromkeys(("schedule", "scheduler", "lr_schedule"), ("lr_scheduler",)),
    **dict.fromkeys(("clipvalue", "clip_value", "max_delta"), ("clip_gradient",)),
    **dict.fromkeys(("mass", "mu", "decay_rate"), ("momentum", "gamma1")),
    "alpha": ("gamma1", "learning_rate"),
    "rho": ("gamma1",),
    "momentum": ("beta1", "gamma2"),
    "momentum_decay": ("schedule_decay",),
    "adam_epsilon": ("epsilon",),
    "names": ("param_idx2name",),
    "random_state": ("seed",),
    "freeze": ("frozen",),
}
"""Arguments of other libraries, and ours."""

LIMITS = ("clip_adaptive", "clip_global_norm", "loss_scaler")
CLIPS = "Updater(optimizer, clip_global_norm=...) limits the norm of all gradients together"
AUTOMATIC = "nothing has to be chosen: updates run compiled, in lists as well"
ADVICE = {
    **dict.fromkeys(
        ("params", "parameters", "weights", "model"),
        "weights go to each call of an updater: Updater(optimizer)(index, grad, weight)",
    ),
    **dict.fromkeys(("clipnorm", "global_clipnorm", "max_norm", "max_grad_norm"), CLIPS),
    **dict.fromkeys(("grad_clip", "grad_clip_norm", "clip_norm"), CLIPS),
    **dict.fromkeys(("foreach", "fused", "capturable", "jit_compile"), AUTOMATIC),
    **{
        name: f"it is an argument of an updater: Updater(optimizer, {name}=...)"
        for name in ("groups", "accumulate", "average", *LIMITS)
    },
    **dict.fromkeys(
        ("use_ema", "ema_momentum", "ema_decay", "ema_overwrite_frequency"),
        "Updater(optimizer, average=EMA(decay=...)) averages the weights",
    ),
    **dict.fromkeys(
        ("gradient_accumulation_steps", "every_k_schedule", "accumulation_steps"),
        "Updater(optimizer, accumulate=n) averages the gradients of n calls",
    ),
    "loss_scale_factor": "Updater(optimizer, loss_scaler=LossScaler(...)) scales gradients back",
    **dict.fromkeys(
        ("requires_grad", "trainable"),
        "Updater(optimizer, groups={pattern: {'frozen': True}}) leaves weights alone",
    ),
    "amsgrad": "Adam, AdamW, NAdamW and Nadam have AMSGrad",
    "nesterov": "NAG is SGD with Nesterov's momentum, and Nadam is Adam with it",
    "dampening": "with NAG and SGD the gradient enters the momentum undamped",
    "differentiable": "there is no automatic differentiation",
    "decoupled_weight_decay": "AdamW is Adam with decoupled decay",
    "lr_decay": "a schedule is the learning rate: lr=FactorScheduler(...) of fastopt.lr_scheduler",
    "warmup_steps": "a schedule has the warm-up: lr=CosineScheduler(..., warmup_steps=...)",
    "initial_accumulator_value": "the sum of squares starts at 0",
    "eps_root": "epsilon is beside the root or inside it, see formula and docs/formulas.md",
    "formula": "this class has one formula alone; Adam, AdamW, AdaGrad, RMSProp and Nadam have two",
}
"""What to write in place of arguments of other libraries that have no counterpart."""

STEPS = "an optimizer is called by an updater: Updater(optimizer)(index, grad, weight)"
STATES = "an updater has the states: Updater(optimizer).state_dict()"
ELSEWHERE = {
    **dict.fromkeys(("step", "apply_gradients", "apply", "minimize", "init", "build"), STEPS),
    **dict.fromkeys(("states", "save", "load", "get_states", "set_states"), STATES),
    **dict.fromkeys(("state_dict", "load_state_dict", "state"), STATES),
    "zero_grad": "gradients are arguments of each call, there are none to set to zero",
    **dict.fromkeys(
        ("param_groups", "add_param_group"),
        "Updater(optimizer, groups={pattern: {name: value}}) has groups of parameters",
    ),
}
"""What to call instead of methods of other libraries' optimizers."""

TRANSIENT = frozenset(
    {"lock", "planner", "unchecked", "version", "mode_version", "multipliers_version", "_warned"}
    | {"work"}
)
"""Attributes that serve the present process only."""

_versions = itertools.count()
"""Numbers of versions: no two optimizers share one."""

_locked: "WeakSet[Optimizer]" = WeakSet()


def _unlock() -> None:
    for optimizer in list(_locked):
        vars(optimizer)["lock"] = threading.RLock()  # maybe held by a thread that is not here


in_forked_child(_unlock)


def _check_schedule(name: str, lr_scheduler: Any) -> Any:
    if lr_scheduler is None or (callable(lr_scheduler) and not isinstance(lr_scheduler, type)):
        return lr_scheduler
    raise TypeError(f"{name} must be a function or an object, got {brief(lr_scheduler)}")


def _check_sym_info(name: str, value: Any) -> Any:
    """Nothing, or attributes by name and the names, as a symbol has them."""
    if isinstance(value, tuple) and len(value) in (0, 2):
        attributes, names = value or ({}, [])
        if isinstance(attributes, Mapping) and isinstance(names, (list, tuple)):
            for key in names:
                for multiplier in ("__lr_mult__", "__wd_mult__"):
                    number(f"{name}[{key!r}]", float(attributes.get(key, {}).get(multiplier, 1)))
            return value
    raise TypeError(f"{name} must be a pair of attributes and names, got {brief(value)}")


class ScheduledRateError(RuntimeError, UserWarning):
    """The learning rate of an optimizer with a schedule cannot be set.

    It is a UserWarning too, which MXNet raises.

    Examples
    --------
    >>> from fastopt import optimizer
    >>> made = optimizer.SGD(lr_scheduler=lambda n: 0.1)
    >>> try:
    ...     made.set_learning_rate(0.2)
    ... except optimizer.ScheduledRateError:
    ...     print(made.learning_rate)
    0.1
    """


def endings(*words: str) -> tuple[str, ...]:
    """Endings of names whose last part, after ``_``, ``.`` or ``/``, is one of `words`."""
    return tuple(map("".join, product("_./", words)))


class Optimizer(Checked):
    r"""Base class of all optimizers; it updates nothing by itself.

    A subclass names a :func:`~fastopt.rule` and writes :meth:`hyper` and :meth:`create_state`,
    or it overrides :meth:`update` with NumPy code of its own.

    The effective rate of a parameter is :math:`\eta = \mathrm{base} \cdot \mathrm{mult}`, where
    base is ``lr_scheduler(num_update)`` or the learning rate, and mult is the first of:
    ``param_dict[index].lr_mult``, the entry of :attr:`lr_mult` under the index, the entry under
    the parameter's name, 1. The effective weight decay :math:`\lambda` is found likewise.

    Parameters
    ----------
    rescale_grad : float
        Factor of every gradient, usually 1 / batch size. Default 1.
    param_idx2name : dict of int or str to str, optional
        Names of the parameters by index. Names whose last part, after ``_``, ``.`` or ``/``, is
        not ``weight``, ``gamma`` or ``kernel`` get weight decay multiplier 0.
    wd : float
        Weight decay. Default 0.
    clip_gradient : float, optional
        Clip each element of the rescaled gradient to ``[-clip_gradient, clip_gradient]``. None,
        0 and negative values mean no clipping.
    learning_rate : float or callable, optional
        The rate, or a schedule, which then is `lr_scheduler`. Default: the scheduler's own
        ``base_lr`` if there is a scheduler, else 0.01. If both are given, the optimizer works with
        a copy of the schedule whose ``base_lr`` is the rate.
    lr_scheduler : callable, optional
        Takes the number of updates so far and returns the rate.
    sym : object, optional
        Anything with ``attr_dict()`` and ``list_arguments()``, whose attributes ``__lr_mult__``
        and ``__wd_mult__`` are multipliers.
    begin_num_update : int
        Number from which updates are counted. Default 0.
    multi_precision : bool
        Keep float32 masters of half-precision weights; no effect on others. Default False.
    param_dict : dict, optional
        Objects with attributes ``lr_mult`` and ``wd_mult`` by index.
    seed : int
        Seed of what is drawn at random: noise of the rule, stochastic rounding. Default 0.
    lazy_update : bool, optional
        Under row-sparse gradients touch only the rows they list. Default True for SGD, ccSGD,
        Adam, AdaGrad, Ftrl, GroupAdaGrad, LARS and LBSGD, else False: the step that a dense
        gradient with zeros elsewhere would make.
    sparse_decay : str
        Weight decay of rows that a lazy update does not touch: 'touched', none; 'catch_up', made
        up for when the row is next touched, for decoupled decay only; 'dense', at once, by the
        factor 1 - rate * decay, whatever rate LARS, LAMB, LANS or LBSGD's 'lars' find for a layer.
        Both keep a float64 number for each row. Default 'touched'.
    rounding : str
        How half-precision weights without masters are rounded: 'nearest' or 'stochastic', up or
        down at random such that the mean is exact. Default 'nearest'.
    master : str
        How masters are kept: 'float32', or, for bfloat16 weights, 'split': the 16 bits that the
        weight lacks of a float32. Default 'float32'.
    state_dtype : str, optional
        'bfloat16' keeps the state of every slot in bfloat16, rounded stochastically; needs the
        package ml_dtypes. 'int8' keeps moving averages in 8 bits, with a scale for each 128
        elements, see ``docs/8-bit-state.md``. Default None: the precision of the arithmetic.
    maximize : bool
        Ascend: every gradient is taken with the opposite sign. Weight decay still makes weights
        smaller. Default False.
    state_min_size : int, optional
        Elements that a weight has at least where ``state_dtype="int8"`` keeps its state in 8 bits.
        Default: 4096, and weights of one dimension stay in the precision of the arithmetic.
    lr : float or callable, optional
        Another name of `learning_rate`.
    weight_decay : float, optional
        Another name of `wd`.

    Raises
    ------
    ValueError
        A rate or decay is NaN or infinite, or the learning rate is negative; or `maximize` is
        given to a class whose ``update()`` is Python code.
    TypeError
        An argument has the wrong type, is not one of the class, or is given under two names. The
        error suggests a name where it can.

    Examples
    --------
    >>> import numpy as np
    >>> from fastopt import optimizer
    >>> class Scaled(optimizer.Optimizer):
    ...     def update(self, index, weight, grad, state):
    ...         self._update_count(index)
    ...         weight -= self._get_lr(index) * grad
    >>> weight = np.ones(2)
    >>> optimizer.get_updater(Scaled(learning_rate=0.5))(0, np.ones(2), weight)
    >>> weight
    array([0.5, 0.5])
    """

    lazy_by_default: ClassVar[bool] = False
    """Whether row-sparse updates are lazy unless the user says otherwise."""

    decoupled: ClassVar[bool] = False
    """Whether weight decay does nothing but take a share of the weight, see :meth:`decay`."""

    master_last: ClassVar[bool] = False
    """Whether the state is nested as (state, master) instead of (master, state)."""

    rounded_sums: ClassVar[bool] = False
    """Whether the passes of a rule see a weight with a master as it was rounded."""

    rates_before_count: ClassVar[bool] = False
    """Whether a schedule is read before the call is counted."""

    opt_registry: ClassVar[dict[str, type["Optimizer"]]] = {}

    native: ClassVar[bool] = True
    """Whether the class leaves its updates to its rule, overriding no ``update`` method."""

    ascends: ClassVar[bool] = False
    """Whether an :meth:`update` in Python ascends with ``maximize``."""

    evaluates: ClassVar[bool] = False
    """Whether :meth:`evaluated` has weights to evaluate."""

    may_skip: ClassVar[bool] = False
    """Whether :meth:`skips` may be True."""

    rule_by_index: ClassVar[bool] = False
    """Whether parameters have rules of their own."""

    same_in_groups: ClassVar[tuple[str, ...]] = ()
    """Arguments that a group of an updater cannot override."""

    per_index: ClassVar[bool] = False
    """Whether the class overrides how it counts or finds rates, so that it is asked each time."""

    aliases: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "lr": ("learning_rate",),
        "betas": ("beta1", "beta2"),
        "eps": ("epsilon",),
        "epsilon": ("eps",),
        "weight_decay": ("wd",),
    }
    argument_names: ClassVar[Mapping[str, tuple[str, ...]]] = NAMES
    argument_advice: ClassVar[Mapping[str, str]] = ADVICE
    elsewhere: ClassVar[Mapping[str, str]] = ELSEWHERE
    added: ClassVar[Mapping[str, Any]] = {"maximize": False, "state_min_size": None}

    arguments: ClassVar[Descriptions] = {
        "lr": RATE,
        "lr_scheduler": _check_schedule,
        "wd": Real(),
        "begin_num_update": Integer(least=0),
        "rescale_grad": Real(infinite=True, nan=True),  # AdamW takes these for an overflow
        "clip_gradient": OrNone(Real(infinite=True)),
        "multi_precision": Flag(),
        "seed": Integer(least=0, most=None),
        "sparse_decay": Choice("touched", "catch_up", "dense"),
        "lazy_update": Flag(),
        "rounding": Choice("nearest", "stochastic"),
        "master": Choice("float32", "split"),
        "state_dtype": OrNone(Choice("bfloat16", "int8")),
        "state_min_size": OrNone(Integer(least=1)),
        "maximize": Flag(),
    }
    progress: ClassVar[Descriptions] = {
        "num_update": Integer(least=0),
        "_index_update_count": TableOf(Integer(least=0)),
        "lr_mult": TableOf(Real()),
        "wd_mult": TableOf(Real()),
        "idx2name": TableOf(Instance(str, "a name")),
        "sym_info": _check_sym_info,
        "row_decay": TableOf(PairOf(ArrayOf(("float64",), vector=True), Real())),
        "masters_given": TableOf(ArrayOf(("float32",))),
    }

    lr_mult: dict[Any, float]
    wd_mult: dict[Any, float]
    idx2name: dict[Any, str]
    param_dict: dict[Any, Any]
    lock: Any
    """Held during an update, for threads that share the optimizer."""
    planner: Planner | None
    _warned: bool
    version: int
    """Number that changes whenever an attribute or a table of multipliers does."""
    mode_version: int
    """The same, but for `rescale_grad`, which changes no kernel."""
    multipliers_version: int
    """The same, for the tables of multipliers alone."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        rule = vars(cls).get("rule")
        if not (rule is None or isinstance(rule, (Rule, property))):
            raise TypeError(f"{cls.__name__}.rule must be made by fastopt.rule, got {rule!r}")
        cls.native = (
            cls.update is Optimizer.update
            and cls.update_multi_precision is Optimizer.update_multi_precision
        )
        cls.evaluates = cls.evaluated is not Optimizer.evaluated
        cls.may_skip = cls.skips is not Optimizer.skips
        cls.rule_by_index = cls.rule_for is not Optimizer.rule_for
        cls.per_index = any(getattr(cls, name) is not getattr(Optimizer, name) for name in COUNTED)

    def __init__(
        self,
        rescale_grad: float = 1.0,
        param_idx2name: Mapping[Index, str] | None = None,
        wd: float = 0.0,
        clip_gradient: float | None = None,
        learning_rate: Rate = None,
        lr_scheduler: Schedule | None = None,
        sym: Any = None,
        begin_num_update: int = 0,
        multi_precision: bool = False,
        param_dict: Mapping[Index, Any] | None = None,
        seed: int = 0,
        lazy_update: bool | None = None,
        sparse_decay: Literal["touched", "catch_up", "dense"] = "touched",
        rounding: Literal["nearest", "stochastic"] = "nearest",
        master: Literal["float32", "split"] = "float32",
        state_dtype: Literal["bfloat16", "int8"] | None = None,
        maximize: bool = False,
        state_min_size: int | None = None,
        **unknown: Unpack[Names],
    ) -> None:
        if unknown:
            raise unknown_arguments(type(self), unknown)
        self._start()
        if param_idx2name is not None and not isinstance(param_idx2name, Mapping):
            raise TypeError(f"param_idx2name must map indices to names, got {param_idx2name!r}")
        for index, name in (param_idx2name or {}).items():
            if not isinstance(name, str):
                raise TypeError(f"param_idx2name[{index!r}] must be a name, got {name!r}")
        if param_dict is not None and not isinstance(param_dict, Mapping):
            raise TypeError(f"param_dict must map indices to parameters, got {brief(param_dict)}")
        if callable(learning_rate):
            if lr_scheduler is not None:
                raise TypeError("learning_rate is a schedule already, and lr_scheduler another")
            learning_rate, lr_scheduler = None, _check_schedule("learning_rate", learning_rate)
        self.lr_scheduler = lr_scheduler
        self.lr = self._first_rate(learning_rate)
        self.wd = wd
        self.lr_mult, self.wd_mult = {}, {}
        self.begin_num_update = begin_num_update
        self._index_update_count = Counts()
        self.num_update = self.begin_num_update
        self.idx2name = dict(param_idx2name or {})
        if not (sym is None or (hasattr(sym, "attr_dict") and hasattr(sym, "list_arguments"))):
            raise TypeError(f"sym must have attr_dict() and list_arguments(), got {sym!r}")
        self.sym_info = (sym.attr_dict(), sym.list_arguments()) if sym is not None else ()
        self.param_dict = dict(param_dict or {})
        self.set_lr_mult({})
        self.set_wd_mult({})
        self.rescale_grad = rescale_grad
        self.clip_gradient = clip_gradient
        self.multi_precision = multi_precision
        self.seed = seed
        self.sparse_decay = sparse_decay
        by_default = self.lazy_by_default or sparse_decay != "touched"
        self.lazy_update = by_default if lazy_update is None else lazy_update
        self.rounding = rounding
        self.master = master
        self.state_dtype = state_dtype
        self.state_min_size = state_min_size
        self.maximize = maximize
        self.row_decay: dict[Index, tuple[Array, float]] = {}
        self.masters_given: dict[Index, Array] = {}
        self.check_together()

    def _start(self) -> None:
        """Start with what serves the present process only."""
        attributes = vars(self)
        attributes["lock"] = threading.RLock()  # for threads that share the optimizer
        attributes["planner"] = None
        attributes["_warned"] = False
        self._changed_tables()
        _locked.add(self)

    # Versions

    def __setattr__(self, name: str, value: Any) -> None:
        if name in TABLES:
            value = Tracked(value, self._changed_tables)
        elif name in self.by_index:
            value = self._by_index(name, value)
        before = vars(self).get(name)
        names = self.aliases.get(name) if before is None else None
        if names and name not in vars(self) and vars(self).keys() >= {*names}:
            own = f"{type(self).__name__!r} object has no attribute {name!r}"
            raise AttributeError(f"{own} to set; set {' and '.join(names)}")
        try:
            super().__setattr__(name, value)
        finally:  # Ctrl-C may come in between
            if name in TABLES:
                self._changed_tables()
            elif name != "rescale_grad":
                self._changed()
            elif before != vars(self).get(name):  # which trainers assign in every step
                vars(self)["version"] = next(_versions)

    def _by_index(self, name: str, values: Mapping[Index, Any]) -> PerIndex:
        """Numbers by index in an array of our own; what belongs to no index stays as it was."""
        numbers, before = self.by_index[name](values), vars(self).get(name)
        if before is not None:
            numbers.array[: numbers.first] = before.array[: numbers.first]
        numbers.changed = weakly(self._changed)
        return numbers

    def __delattr__(self, name: str) -> None:
        super().__delattr__(name)
        self._changed()

    def _changed(self) -> None:
        """Give plans a new version to compare with."""
        vars(self)["version"] = vars(self)["mode_version"] = next(_versions)

    def _changed_tables(self) -> None:
        self._changed()
        vars(self)["multipliers_version"] = self.version

    def check_together(self) -> None:
        """Raise ValueError unless the arguments fit together."""
        if self.state_dtype == "bfloat16":
            bfloat16()
        if self.maximize and not (self.native or self.ascends):
            raise ValueError(
                f"maximize=True needs a rule, and {type(self).__name__} has an update() in Python: "
                "negate the gradient there"
            )
        if self.sparse_decay == "touched":
            return
        if not self.lazy_update:
            raise ValueError(
                f"sparse_decay={self.sparse_decay!r} needs lazy updates, got lazy_update=False"
            )
        if self.sparse_decay == "catch_up" and not self.decoupled:
            raise ValueError(
                f"sparse_decay='catch_up' needs decoupled decay; that of {type(self).__name__} "
                "goes through the gradient or the state"
            )

    # Registry

    @staticmethod
    def register(klass: Class) -> Class:
        """Register a class under its lower-case name, as a decorator.

        Parameters
        ----------
        klass : type
            Subclass of :class:`Optimizer`. A class of the same name is replaced with a warning.

        Raises
        ------
        TypeError
            `klass` is not a subclass of :class:`Optimizer`.

        Examples
        --------
        >>> from fastopt import optimizer
        >>> @optimizer.register
        ... class MyOptimizer(optimizer.Optimizer):
        ...     pass
        >>> type(optimizer.create("myoptimizer")).__name__
        'MyOptimizer'
        """
        if not (isinstance(klass, type) and issubclass(klass, Optimizer)):
            raise TypeError(f"only subclasses of Optimizer can be registered, got {klass!r}")
        name = klass.__name__.lower()
        old = Optimizer.opt_registry.get(name)
        if old is not None:
            warnings.warn(
                f"optimizer {klass.__module__}.{klass.__name__} replaces "
                f"{old.__module__}.{old.__name__} in the registry",
                stacklevel=2,
            )
        Optimizer.opt_registry[name] = klass
        return klass

    @staticmethod
    def create_optimizer(name: "str | Optimizer", **kwargs: Any) -> "Optimizer":
        """Make an optimizer by its registered name.

        Parameters
        ----------
        name : str or Optimizer
            Name of a registered class; upper and lower case do not matter. An optimizer is
            returned as it is.
        **kwargs
            Arguments of the class.

        Raises
        ------
        ValueError
            No class of that name is registered, or there are arguments besides an optimizer.
        TypeError
            `name` is something else, or the class does not take an argument.

        Examples
        --------
        >>> from fastopt import optimizer
        >>> optimizer.create("Adam", learning_rate=0.1).learning_rate
        0.1
        """
        if isinstance(name, Optimizer):
            if kwargs:
                words = ", ".join(kwargs)
                raise ValueError(
                    f"{words} must be passed with a name, got the optimizer {name}: set its "
                    "attributes instead"
                )
            return name
        if isinstance(name, type) and issubclass(name, Optimizer):
            raise TypeError(
                f"optimizer must be an Optimizer or its name, got the class {name.__name__}: call "
                f"it, {name.__name__}(), and pass what it returns"
            )
        if not isinstance(name, str):
            raise TypeError(f"optimizer must be an Optimizer or its name, got {brief(name)}")
        klass = Optimizer.opt_registry.get(name.lower())
        if klass is None:
            near = closest(name, Optimizer.opt_registry)
            words = f"; did you mean {near!r}?" if near else ""
            known = ", ".join(sorted(Optimizer.opt_registry))
            raise ValueError(f"Cannot find optimizer {name!r}; there are {known}{words}")
        return klass(**kwargs)

    @classmethod
    def check_positional(cls, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Refuse weights in place of the first argument, and warn of a rate that is not the first.

        The order of arguments is MXNet's, where the first one of SGD is the momentum.
        """
        owner = next(base for base in cls.__mro__ if "__init__" in vars(base))
        if not args or owner.__module__.partition(".")[0] != "fastopt":
            return
        first, value = next(iter(cls.__signature__.parameters)), args[0]
        numbers = isinstance(value, Iterable) and getattr(value, "ndim", None) != 0
        if numbers and not isinstance(value, str):
            raise TypeError(
                f"{cls.__name__} takes no weights, got {brief(value)} as {first}; "
                f"{ADVICE['params']}"
            )
        rates = kwargs.keys() & {"learning_rate", "lr", "lr_scheduler"}
        if first != "learning_rate" and not rates:
            warn_user(
                f"{cls.__name__}({value!r}) sets {first}, which comes first as in MXNet, not the "
                f"learning rate; write {first}={value!r} or lr={value!r}"
            )

    def __repr__(self) -> str:
        """Class, rate and whatever else is not the default."""
        own = vars(self)
        shown = {} if own.get("lr_scheduler") is not None else {"learning_rate": own.get("lr")}
        for name, parameter in type(self).__signature__.parameters.items():
            attribute, default = _attribute_of(self, name), parameter.default
            if name == "lazy_update" and default is None:
                default = self.lazy_by_default or own.get("sparse_decay") != "touched"
            if attribute not in own or name == "param_dict" or isinstance(default, Same):
                continue
            if repr(own[attribute]) != repr(default):
                shown[name] = own[attribute]
        for name in ("lr_mult", "wd_mult", "num_update"):
            if "_index_update_count" in own and getattr(self, name):
                shown[name] = getattr(self, name)
        words = ", ".join(
            f"{name}={without_address(brief(value), value)}" for name, value in shown.items()
        )
        return f"{type(self).__name__}({words})"

    # What an author writes

    @constant
    def hyper(self, t: int, lr: float, wd: float) -> Mapping[str, float]:
        """Fields of the rule's record for one step, computed in float64.

        ``lr``, ``wd``, ``rescale_grad`` and ``clip_gradient`` need not be given; a given one
        takes the place of the usual value.

        Parameters
        ----------
        t : int
            Number of updates of this parameter, the present one included.
        lr, wd : float
            Effective rate and weight decay of this parameter.

        Returns
        -------
        mapping of str to float
            Empty by default.
        """
        return {}

    def decay(self, t: int, lr: float, wd: float) -> float:
        """Share of a weight that decay takes in one step, whatever the gradient.

        By default rate times decay.

        Parameters
        ----------
        t, lr, wd
            As :meth:`hyper` takes them.
        """
        return lr * wd

    def evaluated(self, weight: Array, state: Sequence[Array]) -> Array | None:
        """The weights that one evaluates, if they are others than those that are updated.

        Parameters
        ----------
        weight : numpy.ndarray
            A copy of the weight, or of its master, in the precision of the arithmetic.
        state : sequence of numpy.ndarray
            An array for each slot of the rule.

        Returns
        -------
        numpy.ndarray or None
            None by default. Otherwise :meth:`Updater.averaged` writes it to the weight.
        """
        return None

    @property
    def rule(self) -> Rule | None:
        """The rule that :meth:`update` applies; a class with one rule says ``rule = its_rule``."""
        return None

    def rule_for(self, index: Index) -> Rule | None:
        """Rule of one parameter, for classes that treat some of them differently.

        Parameters
        ----------
        index : int or str
            The parameter.
        """
        return self.rule

    def skips(self) -> bool:
        """Whether steps are counted but nothing is updated."""
        return False

    def count_only(self, index: Index) -> None:
        """Count a call that updates nothing, with the checks of one that does."""
        self._get_lr(index), self._get_wd(index)
        self._update_count(index)

    @property
    def carried(self) -> PerIndex | None:
        """Numbers that parameters carry from step to step, see ``corrected``."""
        return None

    def carried_slots(self, indices: Sequence[Index]) -> NDArray[np.int64]:
        """Positions of these numbers in :attr:`carried`."""
        return np.zeros(len(indices), np.int64)

    @property
    def step_sums(self) -> StepSums | None:
        """What adds up the numbers that a rule keeps, where it needs those of all tensors."""
        return None

    @property
    def folds(self) -> bool:
        """Whether a factor of all gradients may be put into `rescale_grad`."""
        rule = self.rule if self.native and not self.accumulates else None
        return rule is not None and "rescale_grad" in rule.hyper

    @property
    def in_list_order(self) -> bool:
        """Whether tensors must be counted in the order of their list."""
        return False

    @property
    def accumulates(self) -> bool:
        """Whether :meth:`accumulate` comes before an update."""
        return False

    def accumulate(
        self, words: str, index: Index, grad: Any, weight: Array
    ) -> tuple[Any, list[Table]]:
        """Gradient to update with, None if there is no update; and the launches that make it."""
        raise NotImplementedError

    def create_state(self, index: Index, weight: Array) -> Any:
        """Make the state of one parameter: zeros for each slot of the rule.

        They have the weight's shape, under a row rule (rows, 1), and dtype: float32 for weights
        of half precision, `state_dtype` if it is given. A slot in 8 bits is a pair: codes of the
        weight's shape, and their scales, with a row for each row of the weight. A number that a
        rule keeps for the tensor is an array without dimensions, in the precision of the
        arithmetic.

        Parameters
        ----------
        index : int or str
            The parameter.
        weight : numpy.ndarray
            Its weight.

        Returns
        -------
        None, numpy.ndarray or tuple
            None without slots, the array itself for one slot, else a tuple.

        Raises
        ------
        ValueError
            `state_dtype` is 'int8', and the rule has no slot that 8 bits can hold.
        TypeError
            `state_dtype` is 'int8', and the weight is on a device.
        """
        rule, weight = self.rule, header(weight)
        shape = (len(weight), 1) if rule and rule.row and weight.ndim else weight.shape
        dtype, order = self._state_dtype(weight), order_of(weight)
        codes = self.codes_of(rule, weight)
        slots: tuple[Any, ...] = tuple(
            (like(weight, shape, codes[slot]), like(weight, scales_shape(shape), dtype))
            if slot in codes
            else like(weight, shape, dtype, order)
            for slot in (rule.state if rule else ())
        )
        real = real_of(weight.dtype)
        slots += tuple(like(weight, (), real, order) for _ in (rule.kept if rule else ()))
        return slots if len(slots) > 1 else slots[0] if slots else None

    def _state_dtype(self, weight: Array) -> Any:
        self.codes_of(self.rule, weight)  # where a class makes its own state, it needs a check too
        return bfloat16() if self.state_dtype == "bfloat16" else real_of(weight.dtype)

    def codes_of(self, rule: Rule | None, weight: Array) -> dict[str, str]:
        """Dtype of the codes of each slot that is kept in 8 bits for this weight.

        Raises
        ------
        ValueError
            The rule has no slot that 8 bits can hold.
        TypeError
            The weight is on a device.
        """
        if self.state_dtype != "int8" or rule is None or not rule.state:
            return {}
        if not rule.codes:
            raise ValueError(
                f"state_dtype='int8' is for moving averages, and rule {rule.name} declares none "
                f"among its state slots {rule.state}: 8 bits would freeze sums that grow by small "
                "steps, and lose the digits that differences need"
            )
        if isinstance(weight, Header):
            raise TypeError("state_dtype='int8' is for weights on the host, got one on a device")
        return rule.codes if is_worth_codes(weight.shape, self.state_min_size) else {}

    def create_state_multi_precision(self, index: Index, weight: Array) -> Any:
        """Make the state of one parameter, with a float32 master if it is kept in half precision.

        With `multi_precision` and a weight of half precision it returns the pair of the master
        (with ``master="split"``, of the 16 bits that the weight lacks of one) and the state; SGD
        has the state first.

        Parameters
        ----------
        index, weight
            As :meth:`create_state` takes them.
        """
        given, weight = weight, header(weight)
        if not is_half(weight):
            return self.create_state(index, given)
        words = label(index, self.idx2name)
        warn_if_unbound(words, given)
        if not self.multi_precision:
            self._warn_of_halves(weight)
            return self.create_state(index, given)
        return state_with_master(self, index, weight)

    def _warn_of_halves(self, weight: Array) -> None:
        if self._warned or (self.native and self.rounding == "stochastic"):
            return
        warn_user(
            f"{weight.dtype} weights without masters lose small updates; use multi_precision=True "
            f"or rounding='stochastic' with {type(self).__name__}"
        )
        vars(self)["_warned"] = True

    # Steps

    def update(self, index: Index, weight: Array, grad: Any, state: Any) -> None:
        """Update `weight` and `state` in place.

        Parameters
        ----------
        index : int or str
            The parameter; counts and multipliers belong to it.
        weight : numpy.ndarray
            The weight: float32, float64, float16 or bfloat16.
        grad : numpy.ndarray or RowSparse
            Gradient of the weight's shape and dtype; float32 too for half-precision weights. It
            is not changed.
        state : None, numpy.ndarray or tuple
            What :meth:`create_state` returned.

        Raises
        ------
        TypeError, ValueError
            The arrays do not fit, or the rate is not a number of at least 0. Nothing changes.
        """
        with self.lock:
            state, masters = self.direct_state(weight, state)
            self._direct().update(index, weight, grad, state, masters)

    def update_multi_precision(self, index: Index, weight: Array, grad: Any, state: Any) -> None:
        """Update a weight that may have a float32 master.

        Parameters
        ----------
        index, weight, grad
            As :meth:`update` takes them, with the same errors.
        state : None, numpy.ndarray or tuple
            What :meth:`create_state_multi_precision` returned.
        """
        if self.native:
            with self.lock:
                self._direct().update(index, weight, grad, state, masters=True)
        else:
            self.update_in_python(index, weight, grad, state, None)

    def direct_state(self, weight: Array, state: Any) -> tuple[Any, bool]:
        """State for :meth:`update` without an updater, and whether it holds a master."""
        return state, False

    def update_in_python(
        self, index: Index, weight: Array, grad: Any, state: Any, copy: Array | None
    ) -> None:
        """Update by a class that overrides ``update()``, which sees no masters or copies."""
        words = label(index, self.idx2name)
        if is_cuda(weight) and (copy is not None or has_master(self, header(weight))):
            raise TypeError(f"{words}: an update() in Python has no masters or copies on a device")
        if copy is not None:
            check_copy(words, weight, copy)
            self.update(index, weight, to_float32(grad), state)
            round_into(copy, weight)
        elif has_master(self, weight):
            exact, inner = split_state(self, words, weight, state)
            if len(exact) != 2 or exact[0].dtype != np.float32:
                raise TypeError(f"{words}: an update() in NumPy needs master='float32'")
            self.update(index, exact[0], to_float32(grad), inner)
            round_into(weight, exact[0])
        else:
            self.update(index, weight, grad, state)

    def check_calls(self, calls: Sequence[tuple[Index, Array, Any, Any]]) -> None:
        """Raise if an update of a list must fail, before the first one is made.

        For classes that override :meth:`update`, whose updates are made one after the other. By
        default nothing is checked but what the updater checks.

        Parameters
        ----------
        calls : sequence of (index, weight, grad, state)
            The list.
        """
        if self.native:
            self._direct().check(calls)

    def dense_gradient(self, index: Index, weight: Array, grad: RowSparse) -> Any:
        """Gradient for a class that overrides :meth:`update`, where it is row-sparse."""
        return grad.to_dense()

    def update_all(self, calls: Sequence[tuple[Index, Array, Any, Any]]) -> None:
        """Update several parameters; a class with a rule checks all of them before any changes.

        Parameters
        ----------
        calls : sequence of (index, weight, grad, state)
            Arguments of :meth:`update_multi_precision`, in order.

        Raises
        ------
        TypeError, ValueError
            As :meth:`update` does.
        """
        with self.lock:
            if self.native:
                self._direct().update_all(list(calls))  # alive, whatever others do to theirs
            else:
                self.check_calls(calls)
                for call in calls:
                    self.update_multi_precision(*call)

    def _direct(self) -> Planner:
        """Planner of updates without an updater."""
        planner = self.planner
        if planner is None:
            planner = vars(self)["planner"] = Planner(self)
        return planner

    def snapshot(self) -> Snapshot:
        """Attributes, and what is in them; arrays apart."""
        return {
            name: (value, dict(value) if isinstance(value, Mapping) else None)
            for name, value in vars(self).items()
            if name not in TRANSIENT
        } | {name: (getattr(self, name), None) for name in self.in_arrays}

    def put_back(self, saved: Snapshot) -> None:
        """Set attributes to those of a snapshot; mappings stay the objects that others may hold."""
        for name, (value, content) in saved.items():
            if content is not None:
                value.clear()
                value.update(content)
            if name not in self.in_arrays:
                vars(self)[name] = value
        for name in self.in_arrays:
            setattr(self, name, saved[name][0])
        self._changed_tables()

    # Counts

    @property
    def num_update(self) -> int:
        """The largest number of updates of a parameter, which schedules are asked for."""
        return self._index_update_count.largest

    @num_update.setter
    def num_update(self, value: int) -> None:
        self._index_update_count.largest = value

    def _update_count(self, index: Index) -> None:
        counts = self._index_update_count
        count = counts.get(index, self.begin_num_update) + 1
        counts[index] = count
        counts.largest = max(counts.largest, count)

    def key(self, index: Index) -> int:
        """Key of the random numbers of this update."""
        count = self._index_update_count.get(index, 0)
        return noise.key(self.seed, noise.index_number(index), count)

    # Learning rate and weight decay

    def _first_rate(self, learning_rate: float | None) -> float:
        own = getattr(self.lr_scheduler, "base_lr", None)
        if learning_rate is None:
            return 0.01 if own is None else float(own)
        learning_rate = RATE("learning_rate", learning_rate)
        if own is not None and own != learning_rate:
            self.lr_scheduler = rebased(self.lr_scheduler, learning_rate, type(self))
        return learning_rate

    def _get_lr(self, index: Index) -> float:
        rate = self.learning_rate * self.multiplier(index, self.lr_mult, "lr_mult")
        if not 0 <= rate < math.inf:
            self.check_rates(index, rate, 0.0)
        return rate

    def _get_wd(self, index: Index) -> float:
        decay = as_float("wd", self.wd) * self.multiplier(index, self.wd_mult, "wd_mult")
        if not math.isfinite(decay):
            self.check_rates(index, 0.0, decay)
        return decay

    def check_rates(self, index: Index, rate: float, decay: float) -> None:
        """Raise ValueError unless rate and decay of a parameter are numbers that make sense."""
        if not 0 <= rate < math.inf:
            number(f"{label(index, self.idx2name)}: learning rate", rate, least=0)
        if not math.isfinite(decay):
            number(f"{label(index, self.idx2name)}: weight decay", decay)

    def multiplier(self, index: Index, table: Mapping[Any, float], attribute: str) -> float:
        """Multiplier of a parameter: the first hit of its object, its index and its name."""
        value: Any
        if index in self.param_dict:
            value, of = getattr(self.param_dict[index], attribute, None), " of its parameter"
        elif table:
            name = index if index in table else self.idx2name.get(index)
            value, of = table.get(name, 1.0), ""
        else:
            return 1.0
        try:
            return float(value)
        except OverflowError:
            return math.inf
        except (TypeError, ValueError):
            words = f"{label(index, self.idx2name)}: {attribute}{of}"
            raise TypeError(f"{words} must be a number, got {brief(value)}") from None

    @property
    def learning_rate(self) -> float:
        """The present rate, before multipliers; setting it is :meth:`set_learning_rate`."""
        if self.lr_scheduler is None:
            return as_float("lr", self.lr)
        try:
            rate = self.lr_scheduler(self.num_update)
        except TypeError:
            _check_schedule("lr_scheduler", self.lr_scheduler)
            raise
        return self.scheduled(rate)

    @learning_rate.setter
    def learning_rate(self, lr: float) -> None:
        self.set_learning_rate(lr)

    @staticmethod
    def scheduled(rate: Any) -> float:
        """What a schedule has returned, as a float."""
        try:
            return float(rate)
        except OverflowError:
            return math.inf  # which no parameter takes
        except (TypeError, ValueError):
            raise TypeError(f"lr_scheduler must return a number, got {brief(rate)}") from None

    def set_learning_rate(self, lr: float) -> None:
        """Set the rate.

        Parameters
        ----------
        lr : float
            New learning rate.

        Raises
        ------
        ScheduledRateError
            There is a scheduler, which decides alone.
        ValueError
            `lr` is negative, NaN or infinite.
        """
        if self.lr_scheduler is not None:
            raise ScheduledRateError(
                "the learning rate comes from lr_scheduler; set_learning_rate works without one"
            )
        self.lr = RATE("learning_rate", lr)

    def set_lr_scale(self, args_lrscale: Any) -> None:
        """Raise DeprecationWarning: :meth:`set_lr_mult` has taken its place."""
        raise DeprecationWarning("set_lr_scale is gone, use set_lr_mult")

    def set_lr_mult(self, args_lr_mult: Mapping[Index, float]) -> None:
        """Set rate multipliers, forgetting those set before.

        Parameters
        ----------
        args_lr_mult : dict of int or str to float
            Multipliers by index or by name; an index takes precedence.

        Raises
        ------
        ValueError
            A multiplier is NaN or infinite.
        """
        self.lr_mult = self._attributes("__lr_mult__") | _multipliers("lr_mult", args_lr_mult)
        self.unchecked = True

    def set_wd_mult(self, args_wd_mult: Mapping[Index, float]) -> None:
        """Set weight decay multipliers, forgetting those set before.

        Named parameters whose last part, after ``_``, ``.`` or ``/``, is not ``weight``, ``gamma``
        or ``kernel`` start at 0.

        Parameters
        ----------
        args_wd_mult : dict of int or str to float
            Multipliers by index or by name; an index takes precedence.

        Raises
        ------
        ValueError
            A multiplier is NaN or infinite.
        """
        given = _multipliers("wd_mult", args_wd_mult)
        spared = {n: 0.0 for n in self.idx2name.values() if not n.endswith(self._decayed)}
        self.wd_mult = spared | self._attributes("__wd_mult__") | given
        self.unchecked = True

    _decayed: ClassVar[tuple[str, ...]] = endings("weight", "gamma", "kernel")
    """Endings of the names that decay unless :meth:`set_wd_mult` says otherwise."""

    unchecked: bool = False
    """Whether :meth:`check_multipliers` has yet to see all names."""

    def check_multipliers(self, indices: Sequence[Index], also: Collection[Index] = ()) -> None:
        """Warn, once, of multipliers that no parameter has, and of decay that no name has.

        All names are known once every index of ``idx2name`` has been updated, or a list is, or an
        index is for the second time.

        Parameters
        ----------
        indices : sequence of int or str
            Parameters that are about to be updated. Nothing is counted yet.
        also : collection of int or str
            Parameters whose gradients wait for their update.
        """
        before = {*self._index_update_count, *also}
        names, seen = self.idx2name, {*indices, *before}
        again = len(indices) > 1 or indices[0] in before
        if not again and not (names and names.keys() <= seen):
            return
        self.unchecked = False
        known = {*seen, *names, *names.values(), *self.param_dict}
        for attribute in ("lr_mult", "wd_mult"):
            symbol = self._attributes(f"__{attribute}__").keys()
            if lost := getattr(self, attribute).keys() - known - symbol:
                words = ", ".join(sorted(map(repr, lost)))
                warn_user(f"{attribute} of {words} has no effect: no parameter is called so")
        if as_float("wd", self.wd) > 0 and names and not any(map(self._decays, names)):
            warn_user(
                f"wd={self.wd} decays none of the parameters {brief(list(names.values()))}: by "
                f"default only names that end in {', '.join(self._decayed)} decay; set_wd_mult "
                "sets others"
            )

    def _decays(self, index: Index) -> bool:
        """Whether a named parameter may decay, by its multiplier."""
        return self.multiplier(index, self.wd_mult, "wd_mult") != 0

    def _attributes(self, key: str) -> dict[Index, float]:
        if not self.sym_info:
            return {}
        attributes, names = self.sym_info
        return {n: float(attributes[n][key]) for n in names if key in attributes.get(n, {})}

    def record(
        self,
        rule: Rule,
        names: Sequence[str],
        rates: Mapping[str, float],
        hyper: Mapping[str, float],
    ) -> list[float]:
        """Values of the fields `names` for a rule.

        `rates` has the learning rate ``lr``, the weight decay ``wd``, and the learning rate without
        multipliers, ``rate``.
        """
        turned = "rescale_grad" in names or ("direction" in names and "direction" not in hyper)
        if self.maximize and not turned:
            raise ValueError(f"rule {rule.name} reads no rescale_grad, so it cannot maximize")
        fields = {
            **rates,
            "rescale_grad": self.rescale_grad,
            "clip_gradient": self.clip_gradient or inf,
            "direction": -1.0 if self.maximize else 1.0,
        }
        try:
            fields.update(hyper)
            if self.maximize:
                fields["rescale_grad"] = -fields["rescale_grad"]
            if not fields["clip_gradient"] > 0:
                fields["clip_gradient"] = inf
            values = list(map(fields.__getitem__, names))
        except KeyError as error:
            raise TypeError(
                f"{type(self).__name__}.hyper() does not give {error}, which rule {rule.name} reads"
            ) from None
        except (TypeError, ValueError):
            bound("clip_gradient", self.clip_gradient)  # which may have been set past its check
            raise TypeError(
                f"{type(self).__name__}.hyper() must return a dict of numbers, got {hyper!r}"
            ) from None
        try:
            return list(map(float, values))
        except (TypeError, ValueError):
            raise TypeError(
                f"rule {rule.name} needs numbers for {tuple(names)}, got {tuple(values)}"
            ) from None

    # Copies

    def __getstate__(self) -> dict[str, Any]:
        """Everything but param_dict, which holds live parameters, and what serves this process.

        Arrays on a device are copied to main memory.
        """
        kept = {k: v for k, v in vars(self).items() if k not in TRANSIENT and k != "param_dict"}
        plain = {
            name: dict(value) if isinstance(value, (PerIndex, Tracked)) else host(value)
            for name, value in kept.items()
        }
        return plain | {name: getattr(self, name) for name in self.in_arrays}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._start()
        self.restore({**state, "param_dict": {}})

    def restore(self, attributes: Mapping[str, Any]) -> None:
        """Set attributes without the checks of assignment, as of a checkpoint that is checked."""
        own = vars(self)
        for name, value in attributes.items():
            if name in TABLES:
                own[name] = Tracked(value, self._changed_tables)
            elif name in self.by_index:
                own[name] = self.by_index[name](value)
                own[name].changed = weakly(self._changed)
            elif name not in self.in_arrays:
                own[name] = value
        for name in self.in_arrays:
            if name in attributes:
                setattr(self, name, attributes[name])
        self._changed_tables()

    by_index: ClassVar[dict[str, type[PerIndex]]] = {"_index_update_count": Counts}
    """Attributes that are numbers by index."""

    in_arrays: ClassVar[tuple[str, ...]] = ("num_update",)
    """Properties whose values lie in the arrays of these."""


register = Optimizer.register
create = Optimizer.create_optimizer


def bound(name: str, limit: float | None) -> float:
    """Bound of a clip of this name: None, 0 and negative limits mean no clipping."""
    if limit is None:
        return math.inf
    exact = as_float(name, limit)
    return math.inf if exact <= 0 else exact


def as_float(name: str, value: Any) -> float:
    """Attribute as a float; faster than the check of the argument, which it has passed."""
    try:
        return float(value)
    except (TypeError, ValueError):
        raise TypeError(f"{name} must be a number, got {brief(value)}") from None
    except OverflowError:
        raise ValueError(f"{name} must be a finite number, got {brief(value)}") from None


def _attribute_of(optimizer: Optimizer, argument: str) -> str:
    """Attribute that keeps an argument of the constructor."""
    for attribute, description in optimizer._arguments.items():
        if isinstance(description, Renamed) and description.argument == argument:
            return attribute
    return argument


def _multipliers(name: str, given: Mapping[Index, float]) -> dict[Index, float]:
    if not isinstance(given, Mapping):
        raise TypeError(f"{name} must be a dict of multipliers, got {brief(given)}")
    return {key: number(f"{name}[{key!r}]", value) for key, value in given.items()}
