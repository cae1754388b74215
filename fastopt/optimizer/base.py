"""The base class of all optimizers: registry, counts, rates, and the way from a rule to a step."""

import inspect
import math
import warnings
from collections.abc import Mapping
from numbers import Real
from typing import Any, ClassVar, TypeVar

import numpy as np

from fastopt.arguments import choice, count, flag, number
from fastopt.kernels.device_memory import assign, host, like, placed
from fastopt.kernels.devices import header
from fastopt.kernels.layout import bfloat16, real_of
from fastopt.kernels.rule import Rule
from fastopt.kernels.weights import parts
from fastopt.optimizer.border import check_like, is_half, label, order_of
from fastopt.optimizer.counts import Counts
from fastopt.optimizer.planning import TRANSIENT, Planner
from fastopt.optimizer.rates import Array, Index, Schedule, as_float
from fastopt.sparse import HALVES

__all__ = ["Array", "Index", "Optimizer", "create", "register"]

Class = TypeVar("Class", bound="type[Optimizer]")


class Optimizer(Planner):
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
        Names of the parameters by index. Names that end neither in ``_weight`` nor in
        ``_gamma`` get weight decay multiplier 0.
    wd : float
        Weight decay. Default 0.
    clip_gradient : float, optional
        Clip each element of the rescaled gradient to ``[-clip_gradient, clip_gradient]``. None,
        0 and negative values mean no clipping.
    learning_rate : float, optional
        Default: the scheduler's own ``base_lr`` if there is a scheduler, else 0.01. If both are
        given, the rate becomes the scheduler's ``base_lr``.
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
        package ml_dtypes. Default None: the precision of the arithmetic.
    **unknown
        Refused: the error names them.

    Raises
    ------
    ValueError
        A rate or decay is NaN or infinite, or the learning rate is negative.
    TypeError
        An argument has the wrong type.

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

    _lazy: ClassVar[bool] = False
    """Whether row-sparse updates are lazy unless the user says otherwise."""

    decoupled: ClassVar[bool] = False
    """Whether weight decay does nothing but take a share of the weight, see :meth:`decay`."""

    opt_registry: ClassVar[dict[str, type["Optimizer"]]] = {}

    alike = True

    native: ClassVar[bool] = True
    """Whether the class leaves its updates to its rule, overriding no ``update`` method."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        rule = vars(cls).get("rule")
        if not (rule is None or isinstance(rule, (Rule, property))):
            raise TypeError(f"{cls.__name__}.rule must be made by fastopt.rule, got {rule!r}")
        cls.native = (
            cls.update is Optimizer.update
            and cls.update_multi_precision is Optimizer.update_multi_precision
        )
        cls.alike = cls.native and all(
            getattr(cls, name) is getattr(Optimizer, name)
            for name in (
                "_rule_of",
                "_hyper_of",
                "_count_and_rates",
                "_update_count",
                "_get_lr",
                "_get_wd",
            )
        )

    def __init__(
        self,
        rescale_grad: float = 1.0,
        param_idx2name: Mapping[Index, str] | None = None,
        wd: float = 0.0,
        clip_gradient: float | None = None,
        learning_rate: float | None = None,
        lr_scheduler: Schedule | None = None,
        sym: Any = None,
        begin_num_update: int = 0,
        multi_precision: bool = False,
        param_dict: Mapping[Index, Any] | None = None,
        seed: int = 0,
        lazy_update: bool | None = None,
        sparse_decay: str = "touched",
        rounding: str = "nearest",
        master: str = "float32",
        state_dtype: str | None = None,
        **unknown: Any,
    ) -> None:
        if unknown:
            taken = dict.fromkeys(
                name
                for klass in (type(self), Optimizer)
                for name, parameter in inspect.signature(klass).parameters.items()
                if parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
            )
            raise TypeError(
                f"{type(self).__name__} does not take {', '.join(unknown)}; "
                f"it takes {', '.join(taken)}"
            )
        super().__init__(
            learning_rate, lr_scheduler, wd, begin_num_update, param_idx2name, sym, param_dict
        )
        self.rescale_grad: float = rescale_grad  # AdamW takes what is not finite for an overflow
        if not isinstance(rescale_grad, Real):
            raise TypeError(f"rescale_grad must be a number, got {rescale_grad!r}")
        self.clip_gradient: float | None = clip_gradient
        if clip_gradient is not None:
            number("clip_gradient", clip_gradient, infinite=True)
        self.multi_precision = flag("multi_precision", multi_precision)
        self.seed: int = count("seed", seed, least=0)
        self.sparse_decay = choice("sparse_decay", sparse_decay, "touched", "catch_up", "dense")
        self.lazy_update = self._is_lazy(lazy_update)
        self.rounding = choice("rounding", rounding, "nearest", "stochastic")
        self.master = choice("master", master, "float32", "split")
        if state_dtype is not None:
            choice("state_dtype", state_dtype, "bfloat16")
            bfloat16()
        self.state_dtype = state_dtype
        self.row_decay = {}
        self.masters_given = {}
        self._forget()

    def _is_lazy(self, lazy_update: bool | None) -> bool:
        """Whether updates are lazy, once `sparse_decay` is known to fit."""
        if self.sparse_decay == "touched":
            return self._lazy if lazy_update is None else flag("lazy_update", lazy_update)
        if lazy_update is False:
            raise ValueError(
                f"sparse_decay={self.sparse_decay!r} needs lazy updates, got lazy_update=False"
            )
        if self.sparse_decay == "catch_up" and not self.decoupled:
            raise ValueError(
                f"sparse_decay='catch_up' needs decoupled decay; that of {type(self).__name__} "
                "goes through the gradient or the state"
            )
        return True

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
    def create_optimizer(name: str, **kwargs: Any) -> "Optimizer":
        """Make an optimizer by its registered name.

        Parameters
        ----------
        name : str
            Name of a registered class; upper and lower case do not matter.
        **kwargs
            Arguments of the class.

        Raises
        ------
        ValueError
            No class of that name is registered.
        TypeError
            The class does not take an argument.

        Examples
        --------
        >>> from fastopt import optimizer
        >>> optimizer.create("Adam", learning_rate=0.1).learning_rate
        0.1
        """
        klass = Optimizer.opt_registry.get(name.lower()) if isinstance(name, str) else None
        if klass is None:
            known = ", ".join(sorted(Optimizer.opt_registry))
            raise ValueError(f"Cannot find optimizer {name!r}; there are {known}")
        return klass(**kwargs)

    # What a subclass writes

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

    @property
    def rule(self) -> Rule | None:
        """The rule that :meth:`update` applies; a class with one rule says ``rule = its_rule``."""
        return None

    def create_state(self, index: Index, weight: Array) -> Any:
        """Make the state of one parameter: zeros for each slot of the rule.

        They have the weight's shape, under a row rule (rows, 1), and dtype: float32 for weights
        of half precision, `state_dtype` if it is given.

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
        """
        rule, weight = self.rule, header(weight)
        shape = (len(weight), 1) if rule and rule.row and weight.ndim else weight.shape
        dtype, order = self._state_dtype(weight), order_of(weight)
        slots = tuple(like(weight, shape, dtype, order) for _ in (rule.state if rule else ()))
        return slots if len(slots) > 1 else slots[0] if slots else None

    def _state_dtype(self, weight: Array) -> Any:
        return bfloat16() if self.state_dtype else real_of(weight.dtype)

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
        if not self.multi_precision:
            self._warn_of_halves(weight)
            return self.create_state(index, given)
        split, words = self.master == "split", label(index, self.idx2name)
        if split and weight.dtype.name != "bfloat16":
            raise TypeError(f"{words}: master='split' needs a bfloat16 weight, got {weight.dtype}")
        start = self.masters_given.get(index)
        start = host(weight) if start is None else start
        check_like(words, "master", start, (*HALVES, "float32"), weight.shape)
        exact = np.array(start, np.float32, order=order_of(weight), subok=False)
        master = placed(exact, weight)
        inner = self.create_state(index, master)
        if not split:
            return self._nested(inner, master)
        rounded, remainder = parts(exact)
        assign(weight, rounded.view(weight.dtype))
        return self._nested(inner, placed(remainder, weight))

    def _warn_of_halves(self, weight: Array) -> None:
        if self._warned or (self.native and self.rounding == "stochastic"):
            return
        warnings.warn(
            f"{weight.dtype} weights without masters lose small updates; use multi_precision=True "
            f"or rounding='stochastic' with {type(self).__name__}",
            stacklevel=7,
        )
        self._warned = True

    def record(
        self, rule: Rule, lr: float, wd: float, hyper: Mapping[str, float]
    ) -> tuple[float, ...]:
        """Values of the rule's fields in order."""
        fields = {
            "lr": lr,
            "wd": wd,
            "rescale_grad": self.rescale_grad,
            "clip_gradient": bound("clip_gradient", self.clip_gradient),
        }
        try:
            fields.update(hyper)
            return rule.values(fields)
        except KeyError as error:
            raise TypeError(
                f"{type(self).__name__}.hyper() does not give {error}, which rule {rule.name} reads"
            ) from None
        except (TypeError, ValueError):
            raise TypeError(
                f"{type(self).__name__}.hyper() must return a dict of numbers, got {hyper!r}"
            ) from None

    # Copies

    def __getstate__(self) -> dict[str, Any]:
        """Everything but param_dict, which holds live parameters, and what serves this process.

        Arrays on a device are copied to main memory.
        """
        return {k: host(v) for k, v in vars(self).items() if k not in ("param_dict", *TRANSIENT)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._index_update_count = Counts(self._index_update_count)
        self.param_dict = {}
        self._forget()


register = Optimizer.register
create = Optimizer.create_optimizer


def bound(name: str, limit: float | None) -> float:
    """Bound of a clip of this name: None, 0 and negative limits mean no clipping."""
    if limit is None:
        return math.inf
    exact = as_float(name, limit)
    return math.inf if exact <= 0 else exact
