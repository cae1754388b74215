"""The base class of all optimizers: rules, states, updates, and the registry."""

import copy
import itertools
import math
import threading
import warnings
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from inspect import getattr_static
from math import inf
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self, TypeVar, cast
from weakref import WeakSet, ref

import numpy as np
from numpy.typing import NDArray

from fastopt._advice import LIBRARIES, STEPS, Advice, choices, closest
from fastopt._engine import mixed_precision
from fastopt._engine.contract import Batches, StepSums
from fastopt._engine.direct import Direct
from fastopt._engine.hyper import bound as bound
from fastopt._engine.hyper import constant as constant
from fastopt._engine.hyper import corrected as corrected
from fastopt._engine.hyper import hyper_of
from fastopt._engine.per_index import Counts
from fastopt._engine.per_index import Index as Index
from fastopt._engine.per_index import PerIndex as PerIndex
from fastopt._engine.tracked import Tracked, weakly
from fastopt._engine.validate import Array as Array
from fastopt._engine.validate import Grad, check_key, is_half, label, leaves, order_of
from fastopt._kernels import noise
from fastopt._kernels.codes import encoded, is_worth_codes, scales_shape
from fastopt._kernels.device_memory import host, lie_alike, like, placed
from fastopt._kernels.devices import Header, header, is_cuda
from fastopt._kernels.layout import bfloat16, real_of
from fastopt._kernels.threads import start_locks
from fastopt._notices import warn_user
from fastopt.arguments import (
    FLAG,
    ArrayOf,
    Checked,
    Choice,
    Declaring,
    Descriptions,
    Instance,
    Integer,
    OrNone,
    PairOf,
    Real,
    Same,
    Stored,
    TableOf,
    alias,
    arg,
    as_float,
    brief,
    kept,
    local,
    number,
    unknown_arguments,
    without_address,
)
from fastopt.kernels import variants
from fastopt.kernels.rule import Rule
from fastopt.kernels.scalars import decayed
from fastopt.kernels.variants import Traits, Variant
from fastopt.lr_scheduler.base import Schedule as Schedule
from fastopt.lr_scheduler.base import rebased, restored
from fastopt.optimizer.registry import SHARED, Registry
from fastopt.optimizer.unbound import warn_if_unbound
from fastopt.sparse import RowSparse

Rate = float | Schedule | None
"""A learning rate or a schedule."""

RateAttribute = Stored[float, Rate]
LazyAttribute = Stored[bool, bool | None]

RATE = Real(least=0)

SMALLEST_RATE = float(np.finfo(np.float32).tiny)


def check_parameters(param_idx2name: object, param_dict: object, sym: object) -> None:
    """Raise TypeError unless arguments that describe the parameters have the right types."""
    if param_idx2name is not None and not isinstance(param_idx2name, Mapping):
        raise TypeError(f"param_idx2name must map indices to names, got {param_idx2name!r}")
    for index, name in (param_idx2name or {}).items():
        if not isinstance(name, str):
            raise TypeError(f"param_idx2name[{index!r}] must be a name, got {name!r}")
    if param_dict is not None and not isinstance(param_dict, Mapping):
        raise TypeError(f"param_dict must map indices to parameters, got {brief(param_dict)}")
    if not (sym is None or (hasattr(sym, "attr_dict") and hasattr(sym, "list_arguments"))):
        raise TypeError(f"sym must have attr_dict() and list_arguments(), got {sym!r}")


def check_schedule(name: str, lr_scheduler: object) -> Any:
    """Return a schedule or None; raise TypeError for anything that cannot be called."""
    if lr_scheduler is None or (callable(lr_scheduler) and not isinstance(lr_scheduler, type)):
        return lr_scheduler
    got = brief(lr_scheduler)
    if isinstance(lr_scheduler, type):
        got = f"the class {lr_scheduler.__name__}: pass an instance"
    raise TypeError(f"{name} must be a function of the number of updates, got {got}")


def check_rate(name: str, lr: object) -> float:
    """Return a learning rate; raise unless it is a finite number, at least 0."""
    if callable(lr):
        raise TypeError(f"{name} must be a number; assign a schedule to lr_scheduler")
    if isinstance(lr, (int, float)) and lr < 0:
        must = f"{name} must be a finite number, at least 0, got {lr}"
        raise ValueError(f"{must}; maximize=True ascends")
    return RATE(name, lr)


def largest_rate(name: str, value: object) -> float:
    """Check the learning rate that others are divided by."""
    rate = number(name, value)
    if rate < SMALLEST_RATE:
        raise ValueError(
            f"{name} must be the largest learning rate, above 0, or None for uncorrected decay, "
            f"got {brief(value)}"
        )
    return rate


def check_sym_info(name: str, value: object) -> Any:
    """Check `sym_info`: an empty tuple, or the attributes and argument names of a symbol."""
    if isinstance(value, tuple) and len(value) in (0, 2):
        attributes, names = value or ({}, [])
        if isinstance(attributes, Mapping) and isinstance(names, (list, tuple)):
            for key in names:
                for multiplier in ("__lr_mult__", "__wd_mult__"):
                    number(f"{name}[{key!r}]", float(attributes.get(key, {}).get(multiplier, 1)))
            return value
    raise TypeError(f"{name} must be a pair of attributes and names, got {brief(value)}")


SCHEDULED = (
    "the learning rate comes from lr_scheduler: assign another to lr_scheduler, or None before a "
    "number; set_learning_rate works without one"
)


class ScheduledRateError(RuntimeError, UserWarning):
    """The learning rate of an optimizer with a schedule cannot be set.

    It is also a UserWarning, which is what MXNet raises.

    Examples
    --------
    >>> import fastopt
    >>> from fastopt import optimizer
    >>> sgd = fastopt.SGD(lr_scheduler=lambda n: 0.1)
    >>> try:
    ...     sgd.set_learning_rate(0.2)
    ... except optimizer.ScheduledRateError:
    ...     print(sgd.learning_rate)
    0.1
    """


def endings(*words: str) -> tuple[str, ...]:
    """Return the suffixes of names whose last part, after ``_``, ``.`` or ``/``, is in `words`."""
    return tuple(map("".join, itertools.product("_./", words)))


def multipliers(name: str, table: Mapping[Index, float]) -> dict[Index, float]:
    """Return a checked copy of a table of multipliers."""
    if not isinstance(table, Mapping):
        raise TypeError(f"{name} must be a dict of multipliers, got {brief(table)}")
    return {key: number(f"{name}[{key!r}]", value) for key, value in table.items()}


Class = TypeVar("Class", bound="type[Optimizer]")


TAKEN = ("param_idx2name", "param_dict", "sym", "learning_rate", "lr_scheduler", "lazy_update")
"""Arguments that are converted, not only checked, before they are stored."""

COUNTED = ("_update_count", "_get_lr", "_get_wd", "learning_rate")
"""Methods that a class may override to change how updates are counted or rates are computed."""


def replaceable(method: Callable[[Any], Any]) -> Any:
    """Return a property that type checkers let a subclass replace by a value."""
    return property(method)


def reject_reentrant(lock: Any) -> Any:
    """Return the lock of an update; raise if it is held, so that no update is inside another.

    Raises
    ------
    RuntimeError
        The lock is held: a signal handler, a schedule or a property called by an update updates.
    """
    if lock.locked():
        raise RuntimeError(
            "update inside an update: a signal handler, schedule or property has called the "
            "optimizer while it updates; let it set a flag, and update after the call"
        )
    return lock


Snapshot = dict[str, tuple[Any, dict[Any, Any] | None]]
"""Attributes of an optimizer, and the items of those that are mappings."""

TABLES = ("lr_mult", "wd_mult", "idx2name", "param_dict")
"""Attributes that determine the multipliers."""

MULTIPLIERS = ("lr_mult", "wd_mult")

FOLLOWED = (
    *("_index_update_count", "idx2name", "param_dict", "rescale_grad", "begin_num_update"),
    *("row_decay", "masters_given"),
)
"""Attributes of an optimizer that another one for some of its parameters shares with it."""

CHANGED = ("version", "mode_version")

CHANGED_TABLES = (*CHANGED, "multipliers_version")
"""Versions that change with an attribute, and with one of TABLES."""

RATES = ("lr", "learning_rate")

VALUES = ("rescale_grad", *RATES)
"""Attributes that trainers assign in every step, and on which no kernel depends."""

_versions = itertools.count()
"""Version numbers, unique among all optimizers of the process."""


class Optimizer(Checked, metaclass=Declaring):
    r"""Base class of all optimizers.

    A subclass sets a :func:`~fastopt.rule` and implements :meth:`hyper` and, if needed,
    :meth:`create_state`; or it overrides :meth:`update` with NumPy code.

    The effective learning rate of a parameter is :math:`\eta = \mathrm{base} \cdot \mathrm{mult}`,
    where base is ``lr_scheduler(num_update)`` or the learning rate, and mult is the first of these
    that exists: ``param_dict[index].lr_mult``, the entry of :attr:`lr_mult` for the index, the
    entry for the parameter's name, 1. The effective weight decay :math:`\lambda` is computed in
    the same way.

    Parameters
    ----------
    rescale_grad : float
        Factor of every gradient, usually 1 / batch size. Default 1.
    param_idx2name : dict of int or str to str, optional
        Names of the parameters by index. Names whose last part, after ``_``, ``.`` or ``/``, is
        not ``weight``, ``gamma`` or ``kernel`` get weight decay multiplier 0.
    wd : float
        Weight decay, at least 0. Default 0.
    clip_gradient : float, optional
        Clip each element of the rescaled gradient to ``[-clip_gradient, clip_gradient]``. None,
        0 and negative values mean no clipping.
    learning_rate : float or callable, optional
        The learning rate, or a schedule, which is then used as `lr_scheduler`. Default: the
        scheduler's ``base_lr`` if there is a scheduler, else 0.01. If both are given, the optimizer
        uses a copy of the schedule with ``base_lr`` set to the learning rate.
    lr_scheduler : callable, optional
        Function from the number of updates so far to the learning rate.
    sym : object, optional
        Object with ``attr_dict()`` and ``list_arguments()``, such as an MXNet symbol, whose
        attributes ``__lr_mult__`` and ``__wd_mult__`` are multipliers.
    begin_num_update : int
        Initial value of the update counts. Default 0. Schedules, and the t of the formulas, go on
        from there, as in MXNet: a bias correction of Adam with a new state is that of a later
        step. What depends on the first update of a weight does not, such as the first step of
        ADOPT, nor does the t of optimizers of matrices, which counts updates since.
    multi_precision : bool
        Keep float32 masters of half-precision weights; no effect on other weights. Default False.
    param_dict : dict, optional
        Objects with attributes ``lr_mult`` and ``wd_mult``, by index.
    seed : int
        Seed of the random numbers: noise of the rule and stochastic rounding. Default 0.
    lazy_update : bool, optional
        Update only the indexed rows of row-sparse gradients. Default True for SGD, ccSGD, Adam,
        AdaGrad, Ftrl, GroupAdaGrad, LARS and LBSGD, and for every optimizer with `sparse_decay`
        'catch_up' or 'dense', else False: a row-sparse gradient then has the effect of the
        equivalent dense gradient, with zeros in the other rows.
    sparse_decay : str
        Weight decay of rows that a lazy update does not touch. 'touched': no decay. 'catch_up':
        the decay is deferred until the row is next touched; only for decoupled weight decay.
        'dense': the decay is applied at once, by the factor 1 - learning rate * weight decay,
        without the layer-wise scaling of LARS, LAMB, LANS and LBSGD's 'lars'. Both 'catch_up' and
        'dense' store a float64 number for each row, and raise a ValueError with
        ``lazy_update=False``. Default 'touched'.
    rounding : str
        Rounding of half-precision weights without masters: 'nearest', or 'stochastic', which
        rounds up or down at random so that the expected value is exact. Default 'nearest'.
    master : str
        Format of the masters: 'float32', or, for bfloat16 weights, 'split', which stores only the
        low 16 bits that the weight lacks. Default 'float32'.
    state_dtype : str, optional
        'bfloat16' stores all state in bfloat16 with stochastic rounding; it needs the package
        ml_dtypes. 'int8' stores moving averages in 8 bits, with one scale for every 128 elements,
        see ``docs/8-bit-state.md``. Default None: the precision of the arithmetic.
    maximize : bool
        Maximize: negate every gradient. Weight decay still shrinks the weights. Default False.
    state_min_size : int, optional
        With ``state_dtype="int8"``, minimum number of elements of a weight whose state is stored
        in 8 bits. Default: 4096, and only for weights with two or more dimensions.
    corrected_decay : float, optional
        AdamC: multiply the weight decay by the current learning rate over this one, the largest of
        the schedule, both before multipliers. A decoupled decay then subtracts
        :math:`\lambda w \eta_t^2 / \eta_{\max}` instead of :math:`\lambda w \eta_t`, so that the
        norms of weights in front of normalization layers, and with them the gradients, stay the
        same while the learning rate falls. Only for decoupled decay. Source: Defazio, "Why
        Gradients Rapidly Increase Near the End of Training", arXiv:2506.02285. Default None: no
        correction.
    lr : float or callable, optional
        Another name of `learning_rate`.
    weight_decay : float, optional
        Another name of `wd`.

    Raises
    ------
    ValueError
        The learning rate or the weight decay is NaN, infinite or negative, or
        `maximize` is True for a class that implements ``update()`` in Python.
    TypeError
        An argument has the wrong type, is unknown, or is given under two names. For an unknown
        argument the error suggests a name if it can.

    Examples
    --------
    >>> import numpy as np
    >>> import fastopt
    >>> from fastopt import optimizer
    >>> class Scaled(optimizer.Optimizer):
    ...     def update(self, index, weight, grad, state):
    ...         self._update_count(index)
    ...         weight -= self._get_lr(index) * grad
    >>> weight = np.ones(2)
    >>> fastopt.Updater(Scaled(lr=0.5)).step(np.ones(2), weight)
    >>> weight
    array([0.5, 0.5])
    """

    lazy_by_default: ClassVar[bool] = False
    """Default value of `lazy_update`."""

    master_last: ClassVar[bool] = False
    """Whether the state is nested as (state, master) instead of (master, state)."""

    opt_registry: ClassVar[Registry] = Registry("fastopt.optimizer", SHARED)

    native: ClassVar[bool] = True
    """Whether updates use the rule: the class overrides no ``update`` method."""

    ascends: ClassVar[bool] = False
    """Whether an :meth:`update` in Python supports ``maximize``."""

    evaluates: ClassVar[bool] = False
    """Whether the class overrides :meth:`evaluated`."""

    carried_in: ClassVar[str] = ""
    """Attribute with the numbers that parameters keep between steps, if they keep one."""

    first_carried: ClassVar[float] = 0.0
    """This number before the first update of a parameter."""

    least_rate: ClassVar[float] = 0.0
    """Minimum of learning rates and weight decays."""

    copied: ClassVar[tuple[str, ...]] = ()
    """Slots of the rule that start as copies of the weight."""

    rule_by_index: ClassVar[bool] = False
    """Whether the class overrides :meth:`rule_for`, so that rules differ between parameters."""

    same_in_groups: ClassVar[tuple[str, ...]] = ()
    """Arguments that a group of an updater cannot override."""

    per_index: ClassVar[bool] = False
    """Whether the class overrides counts or rates, so that its methods are called every time."""

    decoupled: ClassVar[bool] = False
    """Whether weight decay only multiplies the weight by a factor, see :meth:`decay`."""

    rates_before_count: ClassVar[bool] = False
    """Whether the schedule is evaluated before the update is counted."""

    stable_ratio: ClassVar[Callable[..., Any] | None] = None
    """Scalar function for `stable`: squared gradient divided by its moving average."""

    stable_ratio_fields: ClassVar[tuple[str, ...]] = ()
    """Hyper-parameters that `stable_ratio` reads in addition to those of the rule."""

    by_index: ClassVar[dict[str, type[PerIndex]]] = {}
    """Attributes that store a number for each index."""

    independent = frozenset(VALUES)

    in_arrays: ClassVar[tuple[str, ...]] = ("num_update",)
    """Properties whose values are stored in the arrays of `by_index` attributes."""

    _decayed: ClassVar[tuple[str, ...]] = endings("weight", "gamma", "kernel")
    """Suffixes of the names that decay by default, see :meth:`set_wd_mult`."""

    _plain: ClassVar[bool] = True
    """Whether the class stores arguments like this one, without properties or methods for it."""
    _plain_rate: ClassVar[bool] = True
    """Whether the class assigns learning rates like this one."""
    _followed: ClassVar[frozenset[str]]
    """Attributes whose assignment does more than to check the value."""

    _ready: ClassVar[dict[str, Any]]
    """Checked defaults by attribute, which instances share; of this class, as the next."""
    _fresh: ClassVar[dict[str, Any]]
    """Defaults by argument that are checked in each constructor, as instances may change them."""

    aliases: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "betas": ("beta1", "beta2"),
        "eps": ("epsilon",),
        "epsilon": ("eps",),
    }
    argument_names: ClassVar[Mapping[str, tuple[str, ...]]] = Advice("OPTIMIZER_NAMES")
    argument_advice: ClassVar[Mapping[str, str]] = Advice("OPTIMIZER_ARGUMENTS")
    attribute_advice: ClassVar[Mapping[str, str]] = Advice("OPTIMIZER_ATTRIBUTES")
    unlisted = Checked.unlisted | {
        *("add_follower", "averaged_gradient", "base_rule", "batches", "by_index", "by_row"),
        *("call_lock", "carried_in", "carried_slots", "check_multipliers", "check_rates"),
        *("claimed", "codes_of", "copied", "corrects_decay", "decay_term", "direct_state"),
        *("evaluates", "first_carried", "first_estimate", "folds", "forget_updates"),
        *("in_arrays", "keep_updates", "key", "least_rate", "masters_given", "multiplier"),
        *("native", "per_index", "put_back", "rates_at", "rates_before_count", "restore"),
        *("restore_from", "row_decay", "rule_by_index", "rule_traits", "rule_variant"),
        *("scheduled", "snapshot", "stable_ratio", "stable_ratio_fields", "starts_at_zero"),
        *("step_sums", "sym_info", "update_in_python"),
    }
    rescale_grad: float = arg(  # AdamW treats NaN and infinity as overflow
        default=1.0, check=Real(infinite=True, nan=True), kw_only=True
    )
    param_idx2name: Mapping[Index, str] | None = arg(default=None, kw_only=True)
    wd: float = arg(default=0.0, check=RATE, kw_only=True)
    clip_gradient: float | None = arg(default=None, check=OrNone(Real(infinite=True)), kw_only=True)
    learning_rate: RateAttribute = arg(default=None, check=check_rate, stored="lr", kw_only=True)
    lr_scheduler: Schedule | None = arg(default=None, check=check_schedule, kw_only=True)
    sym: Any = arg(default=None, kw_only=True)
    begin_num_update: int = arg(default=0, check=Integer(least=0), kw_only=True)
    multi_precision: bool = arg(default=False, check=FLAG, kw_only=True)
    param_dict: Stored[dict[Any, Any], Mapping[Index, Any] | None] = arg(default=None, kw_only=True)
    seed: int = arg(default=0, check=Integer(least=0, most=None), kw_only=True)
    lazy_update: LazyAttribute = arg(default=None, check=FLAG, kw_only=True)
    sparse_decay: Literal["touched", "catch_up", "dense"] = arg(
        default="touched", check=Choice("touched", "catch_up", "dense"), kw_only=True
    )
    rounding: Literal["nearest", "stochastic"] = arg(
        default="nearest", check=Choice("nearest", "stochastic"), kw_only=True
    )
    master: Literal["float32", "split"] = arg(
        default="float32", check=Choice("float32", "split"), kw_only=True
    )
    state_dtype: Literal["bfloat16", "int8"] | None = arg(
        default=None, check=OrNone(Choice("bfloat16", "int8")), kw_only=True
    )
    maximize: bool = arg(default=False, check=FLAG, kw_only=True, new=True)
    state_min_size: int | None = arg(
        default=None, check=OrNone(Integer(least=1)), kw_only=True, new=True
    )
    corrected_decay: float | None = arg(
        default=None, check=OrNone(largest_rate), kw_only=True, new=True
    )
    lr: RateAttribute = alias("learning_rate", default=None, kw_only=True)
    weight_decay: float = alias("wd", default=0.0, kw_only=True)

    row_decay: dict[Index, tuple[Array, float]] = kept(
        factory=dict, check=TableOf(PairOf(ArrayOf(("float64",), vector=True), Real()))
    )
    masters_given: dict[Index, Array] = kept(factory=dict, check=TableOf(ArrayOf(("float32",))))
    lr_mult: dict[Any, float] = kept(factory=dict, check=TableOf(Real()))
    wd_mult: dict[Any, float] = kept(factory=dict, check=TableOf(Real()))
    idx2name: dict[Any, str] = kept(factory=dict, check=TableOf(Instance(str, "a name")))
    sym_info: tuple[Any, ...] = kept(factory=tuple, check=check_sym_info)
    _index_update_count: Counts = kept(factory=Counts, check=TableOf(Integer(least=0)))
    progress: ClassVar[Descriptions] = {"num_update": Integer(least=0)}

    lock: Any = local()
    """Lock of updates without an updater, see :attr:`call_lock`."""
    updating: Any = local()
    """Lock that is held during the updates of updaters; the thread that holds `lock` tests it."""
    stepping: Any = local()
    """Lock like `updating`, held during updates without an updater, which may be inside of one."""
    version: int = local()
    """Number that changes whenever an attribute or a multiplier changes."""
    mode_version: int = local()
    """Like `version`, but not changed by VALUES, which do not affect the kernels."""
    multipliers_version: int = local()
    """Like `version`, but changed only by multipliers."""
    followers: "WeakSet[Optimizer] | None" = local(None)
    """Optimizers whose versions change with those of this one, the optimizer of a group."""
    claim: "ref[Any] | None" = local(None)
    """The updater that has the optimizer, see :meth:`claimed`."""
    inherits: bool = local(False)
    """Whether counts of another updater are here, for parameters whose states may be set."""
    siblings: "WeakSet[Optimizer] | None" = local(None)
    """The optimizers of several updaters that were given the same one: all have its settings."""
    divided: tuple[float, float] = local((1.0, 1.0))
    """``rescale_grad`` before and after a trainer has divided it by its batch size."""
    overridden: frozenset[str] | None = local(None)
    """Attributes that a group overrides in a twin of its updater's optimizer; None for others."""
    direct: dict[bool, Any] = local()
    """What updates without an updater, with states that have masters, and with others."""
    whole_shapes: dict[Index, tuple[int, ...]] = local()
    """Shapes of the tensors whose weights are slices, such as the rows that one process has."""
    unchecked: bool = local(False)
    """Whether :meth:`check_multipliers` still has to check the multipliers."""
    _warned: bool = local(False)

    def __init_subclass__(cls, **kwargs: object) -> None:
        super().__init_subclass__(**kwargs)
        rule = vars(cls).get("rule")
        if not (rule is None or isinstance(rule, (Rule, property))):
            raise TypeError(
                f"{cls.__name__}.rule must be a function decorated with @fastopt.rule(...), got "
                f"{without_address(brief(rule), rule)}"
            )

        def same(*names: str) -> bool:
            return all(getattr(cls, name) is getattr(Optimizer, name) for name in names)

        cls.native = same("update", "update_multi_precision")
        cls.evaluates = not same("evaluated")
        cls.rule_by_index, cls.per_index = not same("rule_for"), not same(*COUNTED)
        cls._plain = same("__setattr__", "set_lr_mult", "set_wd_mult") and not any(
            hasattr(getattr_static(cls, name, None), "__set__") for name in cls._arguments
        )
        cls._plain_rate = cls._plain and same("learning_rate", "set_learning_rate")
        cls._plain_rate &= cls._arguments["lr"] is check_rate
        cls._follow_tables()

    @classmethod
    def _follow_tables(cls) -> None:
        """Find the attributes whose assignment does more than to check the value."""
        kinds = {n: kind for n, kind in cls._factories.items() if isinstance(kind, type)}
        cls.by_index = {name: kind for name, kind in kinds.items() if issubclass(kind, PerIndex)}
        cls._followed = frozenset({*TABLES, *cls.by_index, *cls.aliases})

    if not TYPE_CHECKING:  # checkers read the declarations

        def __init__(self, *args, **kwargs):
            cls = type(self)
            if len(args) > len(cls.positional):
                most = len(cls.positional)
                raise TypeError(
                    f"{cls.__name__} takes at most {most} positional arguments, got {len(args)}"
                )
            for name, value in zip(cls.positional, args, strict=False):
                if name in kwargs:
                    raise TypeError(f"{cls.__name__} got {name} by position and by name")
                kwargs[name] = value
            if unknown := [name for name in kwargs if name not in cls.defaults]:
                raise unknown_arguments(cls, unknown)
            self._start()
            self._initialize(kwargs)
            self.check_together()

        __init__.takes_declared = True

    @classmethod
    def _prepare(cls) -> None:
        """Check the defaults once."""
        ready, fresh = dict[str, Any](), dict[str, Any]()
        for name in [name for name in cls.defaults if name not in TAKEN]:
            attribute, value = attribute_of(cls, name), cls.defaults[name]
            check = cls._arguments.get(attribute)
            checked = value if check is None else check(name, value)
            if cls._plain and isinstance(checked, Hashable):
                ready[attribute] = checked
            else:
                fresh[name] = value
        cls._fresh, cls._ready = fresh, ready  # in this order, as other threads look for the last

    def _put(self, name: str, value: object) -> None:
        """Set a checked attribute in the constructor."""
        if self._plain:
            self.__dict__[name] = value
        else:
            setattr(self, name, value)

    def _initialize(self, arguments: dict[str, Any]) -> None:
        """Set all attributes: to the arguments given, or to defaults."""
        cls, fields = type(self), vars(self)
        explicit = "learning_rate" in arguments and hasattr(cls.__init__, "takes_declared")
        taken = [arguments.pop(name, cls.defaults[name]) for name in TAKEN]
        names, parameters, sym, rate, schedule, lazy = taken
        check_parameters(names, parameters, sym)
        if "_ready" not in vars(cls):
            cls._prepare()
        fields.update(cls._ready)
        self._put("lr", self._first_rate(rate, schedule, explicit))
        for name, value in {**cls._fresh, **arguments}.items():
            attribute = attribute_of(cls, name)
            check = cls._arguments.get(attribute)
            self._put(attribute, value if check is None else check(name, value))
        if lazy is None:
            lazy = self.lazy_by_default or self.sparse_decay != "touched"
        self._put("lazy_update", FLAG("lazy_update", lazy))
        changed = weakly(self._edited_tables)
        for name, factory in cls._factories.items():
            fields[name] = Tracked({}, changed) if name in TABLES else factory()
            if name in cls.by_index:
                fields[name].add_owner(self)
        if self.begin_num_update:
            self.num_update = self.begin_num_update
        self._put("param_dict", Tracked(parameters or {}, changed))
        if names:
            self._put("idx2name", Tracked(names, changed))
        if sym is not None:
            self._put("sym_info", (sym.attr_dict(), sym.list_arguments()))
        if names or sym is not None or not self._plain:
            self.set_lr_mult({})
            self.set_wd_mult({})
        fields["unchecked"] = True

    def _start(self) -> None:
        """Initialize the attributes of the current process."""
        start_locks(self)
        vars(self).update(type(self)._local, direct={}, whole_shapes={})

    def _start_locks(self) -> None:
        lock = threading.Lock
        vars(self).update(lock=threading.RLock(), updating=lock(), stepping=lock())

    @classmethod
    def _constructed(cls, instance: Self) -> None:
        """Set versions for the first time, once all attributes are set."""
        if "lock" in vars(instance):
            instance._changed_tables()

    def check_together(self) -> None:
        """Raise ValueError unless the arguments are consistent."""
        if self.state_dtype == "bfloat16":
            bfloat16()
        if self.maximize and not (self.native or self.ascends):
            raise ValueError(
                f"maximize=True needs a rule, and {type(self).__name__} has an update() in Python: "
                "negate the gradient there"
            )
        if self.corrected_decay is not None and not self.corrects_decay:
            cure = "pass decouple=True" if hasattr(self, "decouple") else "AdamW has such a decay"
            raise ValueError(
                f"corrected_decay={self.corrected_decay} needs decoupled decay; that of "
                f"{type(self).__name__} is not the learning rate times wd times the weight: {cure}"
            )
        if self.sparse_decay == "touched":
            return
        if not self.lazy_update:
            raise ValueError(
                f"sparse_decay={self.sparse_decay!r} needs lazy updates, got lazy_update=False: "
                "set lazy_update=True"
            )
        if self.sparse_decay == "catch_up" and not self.decoupled:
            raise ValueError(
                f"sparse_decay='catch_up' needs decoupled decay; that of {type(self).__name__} "
                "goes through the gradient or the state"
            )
        if self.rule_variant.cautious_decay:
            raise ValueError(
                "cautious_decay=True decays by the gradient's sign, so it needs "
                f"sparse_decay='touched', got {self.sparse_decay!r}"
            )
        if self.rule_variant.stable and self.sparse_decay == "catch_up":
            raise ValueError("stable=True decays at the tensor's rate: use sparse_decay='dense'")

    # Attributes

    def __setattr__(self, name: str, value: object) -> None:
        fields = self.__dict__
        plain = name in RATES and type(value) is float and 0 <= value < inf and self._plain_rate
        if plain and "version" in fields and fields["lr_scheduler"] is None:
            if fields.get("lr") != value:  # trainers assign it in every step
                fields["lr"] = value
                self._set_versions("version")
                self._share("lr")
            return
        if name == "lr" and "version" in fields and fields["lr_scheduler"] is not None:
            raise ScheduledRateError(SCHEDULED)
        if name in self._followed:
            value = self._stored(name, value)
        if "version" not in fields:  # it is being made, and constructed() sets versions
            described = self._arguments.get(name)
            object.__setattr__(self, name, value if described is None else described(name, value))
            return
        before = fields.get(name)
        try:
            super().__setattr__(name, value)
            self._share(name)
        finally:  # even if Ctrl-C interrupts the assignment
            if name not in VALUES:
                self._set_versions(*(CHANGED_TABLES if self._selects(name) else CHANGED))
            elif before != fields.get(name):  # trainers assign them in every step
                self._set_versions("version")

    def _selects(self, name: str) -> bool:
        """Whether what a parameter has for itself may depend on an attribute."""
        return name in TABLES or type(self).fields_of is not Optimizer.fields_of

    def _stored(self, name: str, value: Any) -> Any:
        """Return the mapping that stores a value; raise for an alias of other attributes."""
        if name in TABLES:
            return self._table(value)
        if name in self.by_index:
            return self._by_index(name, value)
        fields, names = vars(self), type(self).aliases[name]
        if name not in fields and fields.keys() >= {*names}:
            kind = f"{type(self).__name__!r} object has no attribute {name!r}"
            raise AttributeError(f"{kind} to set; set {' and '.join(names)}")
        return value

    def _table(self, items: Mapping[Any, Any]) -> Tracked:
        return Tracked(items, weakly(self._edited_tables))

    def _by_index(self, name: str, values: Mapping[Index, Any]) -> PerIndex:
        """Return a new PerIndex of `values`; numbers that belong to no index are kept."""
        numbers, before = self.by_index[name](values), vars(self).get(name)
        if before is not None:
            numbers.array[: numbers.first] = before.array[: numbers.first]
        numbers.add_owner(self)
        return numbers

    def __delattr__(self, name: str) -> None:
        super().__delattr__(name)
        self._changed()

    def _changed(self) -> None:
        """Set a new version, which records follow."""
        self._set_versions(*CHANGED)

    def _changed_tables(self) -> None:
        self._set_versions(*CHANGED_TABLES)

    def _edited_tables(self, *keys: object) -> None:
        """Follow a change inside of one of TABLES."""
        for name in MULTIPLIERS:
            self._share(name)
        self._changed_tables()

    def _set_versions(self, *names: str) -> None:
        fields, number = vars(self), next(_versions)
        for name in names:
            fields[name] = number
        followers = fields.get("followers")
        if followers is not None:
            for follower in followers:
                follower._set_versions(*names)

    def add_follower(self, follower: "Optimizer") -> None:
        """Change the versions of `follower` with those of this optimizer."""
        if self.followers is None:
            vars(self)["followers"] = WeakSet()
        cast("WeakSet[Optimizer]", self.followers).add(follower)

    # Updaters

    @property
    def call_lock(self) -> Any:
        """Lock that is held during updates: that of the updater that has the optimizer, if any."""
        owner = None if self.claim is None else self.claim()
        return self.lock if owner is None else owner.lock

    def _share(self, name: str) -> None:
        """Set an attribute of the siblings to the value here, if it is a setting."""
        fields = self.__dict__
        siblings = fields.get("siblings")
        if siblings is None or name not in fields or not self._is_setting(name):
            return
        for other in list(siblings):
            if other is not self:
                vars(other)[name] = other._table(fields[name]) if name in TABLES else fields[name]
                other._set_versions(*(CHANGED_TABLES if self._selects(name) else CHANGED))

    def _is_setting(self, name: str) -> bool:
        """Whether an attribute is an argument of the constructor, and not about parameters."""
        named = name in self._arguments or name in type(self).__signature__.parameters
        return name in MULTIPLIERS or (named and name not in TABLES)

    # Copies

    def snapshot(self) -> Snapshot:
        """Return attributes and copies of mappings for :meth:`put_back`; arrays are not copied."""
        return {
            name: (value, dict(value) if isinstance(value, Mapping) else None)
            for name, value in vars(self).items()
            if name not in self.transient
        } | {name: (getattr(self, name), None) for name in self.in_arrays}

    def put_back(self, saved: Snapshot) -> None:
        """Restore a snapshot; mappings are changed in place, since other objects may hold them."""
        for name, (value, content) in saved.items():
            if content is not None:
                value.clear()
                value.update(content)
            if name not in self.in_arrays:
                vars(self)[name] = value
        for name in self.in_arrays:
            setattr(self, name, saved[name][0])
        self._changed_tables()

    def __getstate__(self) -> dict[str, Any]:
        """All attributes except param_dict, which holds live parameters, and transient ones.

        Arrays on a device are copied to the host.
        """
        never = self.transient | {"param_dict"}
        kept = {name: value for name, value in vars(self).items() if name not in never}
        plain = {
            name: dict(value) if isinstance(value, (PerIndex, Tracked)) else host(value)
            for name, value in kept.items()
        }
        return plain | {name: getattr(self, name) for name in self.in_arrays}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._start()
        self.restore({**state, "param_dict": {}})

    def restore(self, attributes: Mapping[str, Any]) -> None:
        """Set attributes without validation, such as those of a validated checkpoint.

        A schedule of the same class is restored in place.
        """
        present = vars(self)
        if "lr_scheduler" in attributes:
            schedule = restored(present.get("lr_scheduler"), attributes["lr_scheduler"])
            attributes = {**attributes, "lr_scheduler": schedule}
        for name, value in attributes.items():
            if name in TABLES or name in self.by_index:
                present[name] = self._stored(name, value)
            elif name not in self.in_arrays:
                present[name] = value
        for name in self.in_arrays:
            if name in attributes:
                setattr(self, name, attributes[name])
        self._changed_tables()

    def restore_from(self, other: Self) -> None:
        """Restore the attributes of another optimizer of the same class.

        Attributes that are never saved belong to this process or the user, and are kept.
        """
        kept = vars(self).keys() - self.__getstate__().keys()
        self.restore({k: v for k, v in other.__getstate__().items() if k not in kept})

    # Counts

    @property
    def num_update(self) -> int:
        """Largest update count of a parameter, at which the schedule is evaluated."""
        return self._index_update_count.largest

    @num_update.setter
    def num_update(self, value: int) -> None:
        self._index_update_count.largest = value

    def _update_count(self, index: Index) -> None:
        counts = self._index_update_count
        count = counts.get(index, self.begin_num_update) + 1
        counts[index] = count
        counts.largest = max(counts.largest, count)

    # Rates

    def _first_rate(self, learning_rate: object, lr_scheduler: object, explicit: bool) -> float:
        """Set the schedule, which may be given as the learning rate, and return the latter."""
        if callable(learning_rate):
            if lr_scheduler is not None:
                raise TypeError("learning_rate is a schedule already, and lr_scheduler another")
            learning_rate, lr_scheduler = None, check_schedule("learning_rate", learning_rate)
        self._put("lr_scheduler", check_schedule("lr_scheduler", lr_scheduler))
        base_lr = getattr(lr_scheduler, "base_lr", None)
        if learning_rate is None:
            return 0.01 if base_lr is None else float(base_lr)
        rate: float = check_rate("learning_rate", learning_rate)
        if base_lr is not None and base_lr != rate:
            self.lr_scheduler = rebased(lr_scheduler, rate, type(self), explicit)
        return rate

    def _current_rate(self) -> float:
        """Current learning rate, before multipliers; assigning calls :meth:`set_learning_rate`."""
        if self.lr_scheduler is None:
            return as_float("lr", self.lr)
        try:
            rate = self.lr_scheduler(self.num_update)
        except TypeError:
            check_schedule("lr_scheduler", self.lr_scheduler)
            raise
        return self.scheduled(rate)

    @staticmethod
    def scheduled(rate: float) -> float:
        """Return the result of a schedule as a float."""
        try:
            return float(rate)
        except OverflowError:
            return math.inf  # rejected when the rate of a parameter is checked
        except (TypeError, ValueError):
            raise TypeError(f"lr_scheduler must return a number, got {brief(rate)}") from None

    def set_learning_rate(self, lr: float) -> None:
        """Set the learning rate.

        Parameters
        ----------
        lr : float
            New learning rate.

        Raises
        ------
        ScheduledRateError
            The optimizer has a schedule, which determines the learning rate.
        ValueError
            `lr` is negative, NaN or infinite.
        """
        self.lr = check_rate("learning_rate", lr)

    def _get_lr(self, index: Index) -> float:
        rate = self.learning_rate * self.multiplier(index, self.lr_mult, "lr_mult")
        if not 0 <= rate < math.inf:
            self.check_rates(index, rate, 0.0)
        return rate

    def _get_wd(self, index: Index) -> float:
        base = as_float("wd", self.wd)
        if self.corrected_decay is not None:
            base = self.rates_at(self.learning_rate)["wd"]
        decay = base * self.multiplier(index, self.wd_mult, "wd_mult")
        if not 0 <= decay < math.inf:
            self.check_rates(index, 0.0, decay)
        return decay

    @property
    def corrects_decay(self) -> bool:
        """Whether decay is decoupled and proportional to the learning rate: `corrected_decay`."""
        return self.decoupled

    def rates_at(self, rate: float, multipliers: tuple[Any, ...] = (1.0, 1.0)) -> dict[str, float]:
        """Return learning rate ``lr`` and weight decay ``wd`` of a parameter, and ``rate``.

        Parameters
        ----------
        rate : float
            The learning rate before multipliers.
        multipliers : tuple
            Those of learning rate and weight decay, and pairs of the parameter's own fields, which
            are returned too.
        """
        (lr_mult, wd_mult, *fields), decay = multipliers, self.wd
        if self.corrected_decay is not None and self.corrects_decay:
            decay = decay * (rate / self.corrected_decay)
        return {"rate": rate, "lr": rate * lr_mult, "wd": decay * wd_mult, **dict(fields)}

    def check_rates(self, index: Index, rate: float, decay: float) -> None:
        """Raise ValueError unless a parameter's learning rate and weight decay are valid."""
        of = "" if self.lr_scheduler is None else " of lr_scheduler"
        for name, value in ((f"learning rate{of}", rate), ("weight decay", decay)):
            if not self.least_rate <= value < math.inf:
                number(f"{label(index, self.idx2name)}: {name}", value, least=self.least_rate)

    # Multipliers

    def multiplier(self, index: Index, table: Mapping[Any, float], attribute: str) -> float:
        """Return the multiplier of a parameter, looked up by its object, index and name in turn."""
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
            context = label(index, self.idx2name)
            raise TypeError(
                f"{context}: {attribute}{of} must be a number, got {brief(value)}"
            ) from None

    def set_lr_scale(self, args_lrscale: object) -> None:
        """Raise DeprecationWarning; use :meth:`set_lr_mult` instead."""
        raise DeprecationWarning("set_lr_scale is gone, use set_lr_mult")

    def set_lr_mult(self, args_lr_mult: Mapping[Index, float]) -> None:
        """Set learning rate multipliers, replacing all earlier ones.

        Parameters
        ----------
        args_lr_mult : dict of int or str to float
            Multipliers by index or by name; an index takes precedence.

        Raises
        ------
        ValueError
            A multiplier is NaN or infinite.
        """
        table = multipliers("lr_mult", args_lr_mult)
        vars(self)["unchecked"] = True
        self.lr_mult = self._attributes("__lr_mult__") | table

    def set_wd_mult(self, args_wd_mult: Mapping[Index, float]) -> None:
        """Set weight decay multipliers, replacing all earlier ones.

        The default is 0 for named parameters whose last part, after ``_``, ``.`` or ``/``, is not
        ``weight``, ``gamma`` or ``kernel``.

        Parameters
        ----------
        args_wd_mult : dict of int or str to float
            Multipliers by index or by name; an index takes precedence.

        Raises
        ------
        ValueError
            A multiplier is NaN or infinite.
        """
        table = multipliers("wd_mult", args_wd_mult)
        spared = {n: 0.0 for n in self.idx2name.values() if not n.endswith(self._decayed)}
        vars(self)["unchecked"] = True
        self.wd_mult = spared | self._attributes("__wd_mult__") | table

    def _attributes(self, key: str) -> dict[Index, float]:
        if not self.sym_info:
            return {}
        attributes, names = self.sym_info
        return {n: float(attributes[n][key]) for n in names if key in attributes.get(n, {})}

    def check_multipliers(
        self, indices: Sequence[Index], also: Collection[Index] = (), grouped: bool = False
    ) -> None:
        """Warn once about multipliers of unknown parameters, and if weight decay has no effect.

        The check runs when all parameters are assumed to be known: every index of ``idx2name`` has
        been updated, a list is updated, or an index is updated for the second time.

        Parameters
        ----------
        indices : sequence of int or str
            Parameters that are about to be updated and are not counted yet.
        also : collection of int or str
            Parameters with accumulated gradients that are not applied yet.
        grouped : bool
            Whether patterns of names are checked at the same time. Default False.
        """
        counted, names = self._index_update_count, self.idx2name
        if not (names or self.lr_mult or self.wd_mult or grouped):
            vars(self)["unchecked"] = False
            return
        again = len(indices) > 1 or indices[0] in counted or indices[0] in also
        seen = {*indices, *counted, *also}
        if not again and not (names and names.keys() <= seen):
            return
        vars(self)["unchecked"] = False  # no result depends on it, so the versions stay
        if misnamed := [index for index in names if index not in seen and str(index) in seen]:
            warn_user(
                f"param_idx2name names {brief(misnamed)}, but these calls update "
                f"{brief(list(map(str, misnamed)))}: step() names the items of lists by strings; "
                "name those, or call updater([0, 1], grads, weights)"
            )
        known = {*seen, *names, *names.values(), *self.param_dict}
        for attribute in ("lr_mult", "wd_mult"):
            symbol = self._attributes(f"__{attribute}__").keys()
            if lost := getattr(self, attribute).keys() - known - symbol:
                unknown = ", ".join(sorted(map(repr, lost)))
                warn_user(f"{attribute} of {unknown} has no effect: no parameter is called so")
        factors = (self.multiplier(index, self.wd_mult, "wd_mult") for index in names)
        if names and as_float("wd", self.wd) > 0 and not any(factors):
            warn_user(
                f"wd={self.wd} decays none of the parameters {brief(list(names.values()))}: by "
                f"default only names that end in {', '.join(self._decayed)} decay; set_wd_mult "
                "sets others"
            )

    # Registry

    @staticmethod
    def register(klass: Class) -> Class:
        """Register a class under its lower-case name; usable as a decorator.

        Parameters
        ----------
        klass : type
            Subclass of :class:`Optimizer`. It replaces a class of the same name, with a warning.

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
        """Create an optimizer by its registered name.

        Parameters
        ----------
        name : str or Optimizer
            Case-insensitive name of a registered class. An optimizer is returned unchanged.
        **kwargs
            Arguments of the class.

        Raises
        ------
        ValueError
            No class of that name is registered, or arguments are passed together with an optimizer.
        TypeError
            `name` has another type, or the class does not accept an argument.

        Examples
        --------
        >>> from fastopt import optimizer
        >>> optimizer.create("Adam", learning_rate=0.1).learning_rate
        0.1
        """
        if isinstance(name, Optimizer):
            if kwargs:
                names = ", ".join(kwargs)
                raise ValueError(
                    f"{names} must be passed with a name, got the optimizer {name}: set its "
                    "attributes instead"
                )
            return name
        if isinstance(name, type) and issubclass(name, Optimizer):
            raise TypeError(
                f"optimizer must be an Optimizer or its name, got the class {name.__name__}: call "
                f"it, {name.__name__}(), and pass what it returns"
            )
        if not isinstance(name, str):
            cure = f"; lr={name!r} is a learning rate" if isinstance(name, float) else ""
            if type(name).__module__.startswith("torch."):
                cure = "; fastopt.torch has optimizers of torch's parameters"
            elif isinstance(name, (dict, list, np.ndarray)):
                cure = "; weights are passed to updater.step(grads, weights)"
            elif hasattr(name, "rank"):
                cure = "; it comes first, the communicator second"
            raise TypeError(f"optimizer must be an Optimizer or its name, got {brief(name)}{cure}")
        klass: type[Optimizer] | None = Optimizer.opt_registry.get(name.lower())
        if klass is None:
            known = sorted(Optimizer.opt_registry)
            advices = {key.lower(): text for key, text in Advice("PACKAGE").items()}
            advice = advices.get(name.lower()) or choices(closest(name, known), known)
            raise ValueError(f"Cannot find optimizer {name!r}; {advice}")
        return klass(**kwargs)

    @classmethod
    def _add_defaults(cls, kwargs: dict[str, Any], others: Collection[str]) -> None:
        """Add :attr:`torch_defaults` of arguments that are not given to those of torch's formula.

        A schedule keeps its own learning rate.
        """
        if kwargs.get("formula") != "torch":
            return
        scheduled = kwargs.get("lr_scheduler") is not None
        for name, value in cls.torch_defaults.items():
            if name not in others and not (scheduled and name == "learning_rate"):
                kwargs.setdefault(name, value)

    @classmethod
    def _check_positional(cls, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Raise if the first argument is weights; warn if it may be meant as the learning rate.

        The order of arguments follows MXNet, where the first argument of SGD is the momentum.
        """
        if not args:
            return
        owner = next(base for base in cls.__mro__ if "__init__" in vars(base))
        if owner.__module__.partition(".")[0] != "fastopt":
            return
        first, value = next(iter(cls.__signature__.parameters)), args[0]
        numbers = isinstance(value, Iterable) and getattr(value, "ndim", None) != 0
        if numbers and not isinstance(value, str):
            raise TypeError(
                f"{cls.__name__} takes no weights, got {brief(value)} as {first}; "
                f"{Optimizer.argument_advice['params']}"
            )
        rates = kwargs.keys() & {"learning_rate", "lr", "lr_scheduler"}
        if first != "learning_rate" and not rates:
            warn_user(
                f"{cls.__name__}({value!r}) sets {first}, which comes first as in MXNet, not the "
                f"learning rate; write {first}={value!r} or lr={value!r}"
            )

    if not TYPE_CHECKING:  # checkers report a call

        def __call__(self, *args, **kwargs):
            """Raise TypeError: an updater, or an adapter for another library, is called."""
            raise TypeError(f"{type(self).__name__} is not callable; {STEPS}; {LIBRARIES}")

    def __repr__(self) -> str:
        """Class, learning rate, and all arguments that differ from their default.

        With torch's formula also those whose defaults are others in torch.
        """
        fields = vars(self)
        always = self.torch_defaults if fields.get("formula") == "torch" else ()
        shown = {}
        if fields.get("lr_scheduler") is None:
            shown["learning_rate"] = fields.get("lr")
        for name, parameter in type(self).__signature__.parameters.items():
            attribute, default = attribute_of(type(self), name), parameter.default
            if name == "lazy_update" and default is None:
                default = self.lazy_by_default or fields.get("sparse_decay") != "touched"
            if attribute not in fields or isinstance(default, Same):
                continue
            if name in ("learning_rate", "param_dict"):
                continue
            if repr(fields[attribute]) != repr(default) or name in always:
                shown[name] = fields[attribute]
        for name in ("lr_mult", "wd_mult", "num_update"):
            if value := getattr(self, name, None):  # none while it is constructed
                shown[name] = value
        arguments = ", ".join(
            f"{name}={without_address(brief(value), value)}" for name, value in shown.items()
        )
        return f"{type(self).__name__}({arguments})"

    # Methods for subclasses

    @constant
    def hyper(self, t: int, lr: float, wd: float) -> Mapping[str, float]:
        """Return the hyper-parameters of the rule for one step, computed in float64.

        ``lr``, ``wd``, ``rescale_grad`` and ``clip_gradient`` are added automatically, and so are
        declared arguments that the rule has fields of the names of, 1 minus an argument for a field
        with its name after ``one_minus_``, and 1 for fields that reductions or the function of
        :func:`corrected` compute. Values returned here override them.

        Parameters
        ----------
        t : int
            Update count of this parameter, including the current update; the first one has
            `begin_num_update` + 1.
        lr, wd : float
            Effective learning rate and weight decay of this parameter.

        Returns
        -------
        mapping of str to float
            Empty by default.
        """
        return {}

    def fields_of(self, index: Index) -> Mapping[str, float]:
        """Return fields of the rule that depend on the parameter alone, such as on its shape.

        It is called again when an attribute or a multiplier changes. Learning rate and weight decay
        have multipliers instead.

        Parameters
        ----------
        index : int or str
            The parameter.

        Returns
        -------
        mapping of str to float
            Empty by default.
        """
        return {}

    def decay(self, t: int, lr: float, wd: float) -> float:
        """Return the fraction by which weight decay shrinks a weight in one step.

        By default the learning rate times the weight decay.

        Parameters
        ----------
        t, lr, wd
            See :meth:`hyper`.
        """
        return lr * wd

    def check_saved(self, index: Index, state: object) -> None:
        """Raise ValueError if a state from a checkpoint has impossible numbers.

        It is called for classes that override :meth:`update`, without the weight; shapes and dtypes
        are checked at its first update.

        Parameters
        ----------
        index : int or str
            The parameter.
        state : None, number, numpy.ndarray, tuple, list or dict
            The state, which may be a pair with a master.
        """

    def evaluated(self, weight: Array, state: Sequence[Array]) -> Array | None:
        """Return the weights to evaluate with, if they differ from the updated weights.

        Parameters
        ----------
        weight : numpy.ndarray
            A copy of the weight, or of its master, in the precision of the arithmetic.
        state : sequence of numpy.ndarray
            One array for each state slot of the rule.

        Returns
        -------
        numpy.ndarray or None
            None by default. Otherwise :meth:`Updater.averaged` copies the result to the weight.
        """
        return None

    @replaceable
    def rule(self) -> Rule | None:
        """Rule that :meth:`update` applies; a class with one rule sets ``rule = its_rule``.

        By default the variant of :attr:`base_rule` that the arguments `cautious`, `cautious_decay`,
        `stable` and `grams` select, those of them that the class declares.
        """
        plain: Rule | None = self.base_rule
        if plain is None or not any(which := self.rule_variant):
            return plain
        return variants.varied(plain, self.rule_traits, which)

    @replaceable
    def base_rule(self) -> Rule | None:
        """Rule without its variants; a class with one rule sets ``plain = its_rule``."""
        return None

    @property
    def rule_variant(self) -> Variant:
        """The selected variant."""
        fields = vars(self)
        return Variant(*[fields.get(name, False) for name in Variant._fields])

    @replaceable
    def averaged_gradient(self) -> Callable[..., Any]:
        """Scalar function ``(weight, grad, h)``: the gradient that moving averages average."""
        return variants.beside_decay if self.decoupled else decayed

    @replaceable
    def decay_term(self) -> Callable[..., Any]:
        """Scalar function ``(weight, h)``: what decoupled decay subtracts from a weight."""
        return variants.rate_times_decay if self.decoupled else variants.no_decay

    @property
    def rule_traits(self) -> Traits:
        """How the plain rule uses gradient and weight decay, from which variants are derived."""
        stable = self.stable_ratio, self.stable_ratio_fields
        return Traits(self.averaged_gradient, self.decay_term, self.decoupled, *stable)

    def rule_for(self, index: Index) -> Rule | None:
        """Return the rule of one parameter, for classes with different rules.

        Parameters
        ----------
        index : int or str
            The parameter.
        """
        rule: Rule | None = self.rule
        return rule

    def check_takes_over(self, other: "Optimizer", index: Index, state: Any) -> None:
        """Raise ValueError unless a state of another optimizer has the meaning of its own.

        The arrays of equal names have it, but for momentum, which each formula scales in its way.
        """
        if isinstance(self, type(other)) or isinstance(other, type(self)) or not leaves(state):
            return
        rules = [of.rule_for(index) if of.native else None for of in (self, other)]
        slots = [rule.slots if rule else None for rule in rules]
        if (
            slots[0] is None
            or slots[0] != slots[1]
            or "mom" in slots[0]
            or (self.master_last != other.master_last)
        ):
            raise ValueError(
                f"{label(index, self.idx2name)}: {type(self).__name__} cannot go on with the state "
                f"of {type(other).__name__}: delete it from updater.states before, to start with "
                "a new one (updater.states.clear() deletes all)"
            )

    def skips(self) -> bool:
        """Whether updates are counted but change no weight or state."""
        return False

    @property
    def carried(self) -> PerIndex | None:
        """Numbers that parameters keep between steps, see :func:`~fastopt.optimizer.corrected`."""
        return getattr(self, self.carried_in) if self.carried_in else None

    def carried_slots(self, indices: Sequence[Index]) -> NDArray[np.int64]:
        """Return the positions of the parameters' numbers in :attr:`carried`."""
        if self.carried is None or hyper_of(self).shares:
            return np.zeros(len(indices), np.int64)
        return self.carried.slots(indices, self.first_carried)

    @property
    def step_sums(self) -> StepSums | None:
        """Object that sums the rule's kept numbers over the tensors of a step, or None."""
        return None

    @property
    def batches(self) -> Batches | None:
        """Object that sums the gradients of several calls for each update, or None."""
        return None

    @property
    def folds(self) -> bool:
        """Whether a common factor of the gradients may be folded into `rescale_grad`."""
        rule = self.rule if self.native and self.batches is None else None
        return rule is not None and "rescale_grad" in rule.hyper

    @property
    def by_row(self) -> bool:
        """Whether rows or matrices are updated as a whole; else complex weights are real pairs."""
        return not self.native or self.rule is None or self.rule.row is not None

    def create_state(self, index: Index, weight: Array) -> Any:
        """Create the state of one parameter: an array for each slot of the rule, usually of zeros.

        The arrays have the shape of the weight, or (rows, 1) for numbers of rows. Their dtype is
        `state_dtype` if it is given, else float32 for half-precision weights and the weight's
        dtype for others. An 8-bit slot is a pair of codes, in the weight's shape, and scales, with
        one row for each row of the weight. A number that a rule keeps for the whole tensor is a
        zero-dimensional array in the precision of the arithmetic.

        Parameters
        ----------
        index : int or str
            The parameter.
        weight : numpy.ndarray
            The weight of the parameter.

        Returns
        -------
        None, numpy.ndarray or tuple
            None without slots, the array for a single slot, else a tuple.

        Raises
        ------
        ValueError
            `state_dtype` is 'int8', and the rule has no slot that can be stored in 8 bits.
        TypeError
            `state_dtype` is 'int8', the rule sums over tensors, and the weight is on a device.
        """
        rule, weight = self.rule, header(weight)
        dtype = self._state_dtype(index, weight)
        as_it_lies = rule and rule.elementwise and isinstance(weight, Header)
        order: Any = "K" if as_it_lies and lie_alike((weight,)) else order_of(weight, rule)
        codes = self.codes_of(rule, weight, index)

        def first(slot: str, shape: tuple[int, ...]) -> Any:
            if slot in self.copied:
                copy = np.array(host(weight), dtype, order=order_of(weight, rule), subok=False)
                return placed(copy, weight)
            if value := self.initial_of(slot):
                if slot in codes:
                    filled = np.full(shape, value, dtype)
                    return placed(encoded(filled, np.dtype(codes[slot])), weight)
                return placed(np.full(shape, value, dtype, order_of(weight, rule)), weight)
            if slot in codes:
                return like(weight, shape, codes[slot]), like(weight, scales_shape(shape), dtype)
            return like(weight, shape, dtype, order)

        slots: tuple[Any, ...] = tuple(
            first(slot, shape) for slot, shape in (rule.shapes(weight.shape) if rule else ())
        )
        real = real_of(weight.dtype)
        slots += tuple(like(weight, (), real, order) for _ in (rule.kept if rule else ()))
        return slots if len(slots) > 1 else slots[0] if slots else None

    @property
    def initial_state(self) -> float:
        """Initial value of the elements of every state array."""
        return 0.0

    def initial_of(self, slot: str) -> float:
        """Return the initial value of the elements of a state array; by default `initial_state`.

        Parameters
        ----------
        slot : str
            Name of the slot of the rule.
        """
        return self.initial_state

    @property
    def starts_at_zero(self) -> bool:
        """Whether states are zeros, as :meth:`create_state` of this class creates them."""
        rule = self.rule
        return not (self.copied or any(map(self.initial_of, rule.state if rule else ()))) and all(
            getattr(getattr(self, name), "__func__", None) is vars(Optimizer)[name]
            for name in ("create_state", "create_state_multi_precision")
        )

    def _state_dtype(self, index: Index, weight: Array) -> Any:
        self.codes_of(self.rule, weight, index)  # refuses classes that create their own state
        return bfloat16() if self.state_dtype == "bfloat16" else real_of(weight.dtype)

    def codes_of(self, rule: Rule | None, weight: Array, index: Index) -> dict[str, str]:
        """Return the dtype of the codes of each slot that is stored in 8 bits for this weight.

        `whole_shapes` has the shape of the tensor if the weight is a slice of it.

        Raises
        ------
        ValueError
            The rule has no slot that can be stored in 8 bits.
        TypeError
            The rule sums over tensors, and the weight is on a device.
        """
        if self.state_dtype != "int8" or rule is None or not rule.state:
            return {}
        if not rule.codes:
            raise ValueError(
                f"state_dtype='int8' is for moving averages, and rule {rule.name} declares none "
                f"among its state slots {rule.state}: 8 bits would freeze sums that grow by small "
                "steps, and lose the digits that differences need"
            )
        if isinstance(weight, Header) and rule.passes:
            raise TypeError(
                f"{label(index, self.idx2name)}: state_dtype='int8' with rule {rule.name}, which "
                "sums over tensors, is for weights on the host, got one on a device"
            )
        whole = self.whole_shapes.get(index) or weight.shape
        return rule.codes if is_worth_codes(whole, self.state_min_size) else {}

    def create_state_multi_precision(self, index: Index, weight: Array) -> Any:
        """Create the state of one parameter, with a float32 master for a half-precision weight.

        With `multi_precision` and a half-precision weight it returns a pair of the master (the low
        16 bits with ``master="split"``) and the state; for SGD the state is first.

        Parameters
        ----------
        index, weight
            See :meth:`create_state`.
        """
        array, weight = weight, header(weight)
        if not is_half(weight):
            return self.create_state(index, array)
        context = label(index, self.idx2name)
        warn_if_unbound(context, array)
        if not self.multi_precision:
            self._warn_of_halves(weight)
            return self.create_state(index, array)
        return mixed_precision.state_with_master(self, index, weight)

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
            The parameter, which selects the update count and the multipliers.
        weight : numpy.ndarray
            The weight: float32, float64, float16 or bfloat16.
        grad : numpy.ndarray or RowSparse
            Gradient with the weight's shape and dtype; for half-precision weights it may also be
            float32. It is not changed.
        state : None, numpy.ndarray or tuple
            The state returned by :meth:`create_state`.

        Raises
        ------
        TypeError, ValueError
            The arrays do not match, or the learning rate is not a non-negative number. Nothing
            changes.
        """
        check_key(index)
        with self.call_lock, reject_reentrant(self.stepping):
            state, masters = self.direct_state(weight, state)
            self._direct(masters).update(index, weight, grad, state)

    def update_multi_precision(self, index: Index, weight: Array, grad: Any, state: Any) -> None:
        """Update a weight that may have a float32 master.

        Parameters
        ----------
        index, weight, grad
            See :meth:`update`, also for errors.
        state : None, numpy.ndarray or tuple
            The state returned by :meth:`create_state_multi_precision`.
        """
        check_key(index)
        if self.native:
            with self.call_lock, reject_reentrant(self.stepping):
                self._direct().update(index, weight, grad, state)
        else:
            self.update_in_python(index, weight, grad, state, None)

    def direct_state(self, weight: Array, state: object) -> tuple[Any, bool]:
        """Return the state for :meth:`update` without an updater, and whether it has a master."""
        return state, False

    def update_in_python(
        self, index: Index, weight: Array, grad: Grad, state: object, copy: Array | None
    ) -> None:
        """Update with an overridden ``update()``, handling masters and half-precision copies."""
        context = label(index, self.idx2name)
        if is_cuda(weight) and (
            copy is not None or mixed_precision.has_master(self, header(weight))
        ):
            raise TypeError(
                f"{context}: an update() in Python has no masters or copies on a device"
            )
        if copy is not None:
            mixed_precision.check_copy(context, weight, copy)
            self.update(index, weight, mixed_precision.to_float32(grad), state)
            mixed_precision.round_into(copy, weight)
        elif mixed_precision.has_master(self, weight):
            exact, inner = mixed_precision.split_state(self, context, weight, state)
            if len(exact) != 2 or exact[0].dtype != np.float32:
                raise TypeError(f"{context}: an update() in NumPy needs master='float32'")
            self.update(index, exact[0], mixed_precision.to_float32(grad), inner)
            mixed_precision.round_into(weight, exact[0])
        else:
            self.update(index, weight, grad, state)

    def check_calls(self, calls: Sequence[tuple[Index, Array, Any, Any]]) -> None:
        """Raise if an update of a list would fail, before the first weight changes.

        Classes that override :meth:`update` may override this too, because their updates run one
        at a time. By default such a class has no checks beyond those of the updater.

        Parameters
        ----------
        calls : sequence of (index, weight, grad, state)
            The updates.
        """
        if self.native:
            self._direct().check(calls)

    def dense_gradient(self, index: Index, weight: Array, grad: RowSparse) -> Any:
        """Convert a row-sparse gradient for a class that overrides :meth:`update`."""
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
            See :meth:`update`.
        """
        with self.call_lock:
            if self.native:
                # The copy keeps the arrays alive even if another thread changes the caller's list.
                calls = list(calls)
                with reject_reentrant(self.stepping):
                    self._direct().update_all(calls)
            else:
                self.check_calls(calls)
                for call in calls:
                    self.update_multi_precision(*call)

    def _direct(self, masters: bool = True) -> Direct:
        """Return what updates without an updater, with states that have masters or not."""
        direct = self.direct.get(masters)
        if direct is None:
            direct = self.direct[masters] = Direct(self, masters)
        return direct

    def restart(self, indices: Collection[Index]) -> None:
        """Forget the updates of some parameters, so that their next one is their first.

        The updater calls it in :meth:`~fastopt.Updater.reset`, and in a copy of an optimizer for a
        further updater. A class that keeps more than update counts for its parameters, outside of
        their states, overrides it.

        Parameters
        ----------
        indices : collection of int or str
            The parameters.
        """
        counts = self._index_update_count
        for index in indices:
            self.row_decay.pop(index, None)
            self.masters_given.pop(index, None)
            if self.carried is not None:
                self.carried.pop(index, None)
            if index in counts:  # it keeps its position, which records know
                counts[index] = self.begin_num_update
        counts.largest = max([self.begin_num_update, *counts.values()])

    def claimed(self, owner: object, assigned: bool = False) -> Self:
        """Return the optimizer of an updater that is given this one.

        It is this one, unless another updater has it, which counts updates in it. Then it is a copy
        that has counted none. Settings of either are those of both from then on.

        A copy that is assigned to an updater has the counts of parameters whose states are set
        before the next update: the updater goes on in place of the other.

        Parameters
        ----------
        owner : object with an attribute ``lock``
            The updater.
        assigned : bool
            Whether it is made already, and may have states.
        """
        with self.call_lock:
            before = None if self.claim is None else self.claim()
            new = self.claim is None or before is owner
            if new or (before is None and not self._index_update_count):
                made = self
            else:
                made = self._sibling()
                vars(made)["inherits"] = assigned
                if not assigned:
                    made.forget_updates()
            vars(made)["claim"] = ref(owner)
        return made

    def _sibling(self) -> Self:
        """Return a copy, with which this optimizer has its settings in common.

        Attributes that a user's class does not declare are the same objects.
        """
        made = copy.copy(self)
        for name in self._progress:
            value = vars(self).get(name)
            if type(value) is dict:  # not the tables of multipliers, which are copied
                vars(made)[name] = dict(value)
        siblings = self.siblings or WeakSet([self])
        siblings.add(made)
        vars(self)["siblings"] = siblings
        shared = {"param_dict": made._table(self.param_dict), "divided": self.divided}
        vars(made).update(shared, siblings=siblings)
        return made

    def keep_updates(self, indices: Collection[Index]) -> None:
        """Forget the updates of all parameters but some."""
        known = {*self._index_update_count, *self.row_decay, *self.masters_given}
        others = (known | set(self.carried or ())).difference(indices)
        if others or not indices:  # a class may have one counter for all parameters
            self.restart(others)
        vars(self)["inherits"] = False

    def forget_updates(self) -> None:
        """Forget the updates of all parameters, like a new optimizer with the same settings."""
        self.keep_updates(())
        self._index_update_count = Counts()
        self.whole_shapes.clear()
        vars(self).update(unchecked=True, _warned=False)

    def key(self, index: Index) -> int:
        """Return the key of the random numbers of this update."""
        count = self._index_update_count.get(index, 0)
        return noise.key(self.seed, noise.index_number(index), count)


Optimizer._follow_tables()
Optimizer.positional = tuple(Optimizer.defaults)
Optimizer.learning_rate = property(  # type: ignore[assignment]
    Optimizer._current_rate, lambda self, lr: self.set_learning_rate(lr)
)


def new_copy(optimizer: Optimizer) -> Optimizer:
    """Return a copy of an optimizer that has made no updates."""
    made = copy.deepcopy(optimizer)
    made.forget_updates()
    return made


register = Optimizer.register
create = Optimizer.create_optimizer


def attribute_of(kind: type[Optimizer], argument: str) -> str:
    """Return the name of the attribute that stores a constructor argument."""
    if argument in kind.declared:
        return kind.declared[argument].stored or argument
    return argument
