"""The base class of all optimizers: registry, counts, rates, and the way from a rule to a step."""

import math
import re
import threading
import warnings
import zlib
from collections.abc import Mapping, Sequence
from numbers import Real
from typing import Any, ClassVar, TypeVar

import numpy as np
from numba.core.errors import NumbaError

from fastopt.arguments import count, number
from fastopt.kernels import noise
from fastopt.kernels.rule import Rule
from fastopt.kernels.table import Tensor, launch
from fastopt.optimizer.border import admit, label, order_of
from fastopt.optimizer.rates import Array, Index, Rates, Schedule

__all__ = ["Array", "Index", "Optimizer", "create", "register"]

COMPILING = (NumbaError, TypeError, KeyError)
"""What comes out of a launch when a rule cannot be compiled, before anything has run."""

Class = TypeVar("Class", bound="type[Optimizer]")


class Optimizer(Rates):
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
        Seed of optimizers that draw random numbers. Default 0.

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

    opt_registry: ClassVar[dict[str, type["Optimizer"]]] = {}

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
        **unknown: Any,
    ) -> None:
        if unknown:
            raise TypeError(f"{type(self).__name__} does not take {', '.join(unknown)}")
        super().__init__(
            learning_rate, lr_scheduler, wd, begin_num_update, param_idx2name, sym, param_dict
        )
        self.rescale_grad: float = rescale_grad  # AdamW takes what is not finite for an overflow
        if not isinstance(rescale_grad, Real):
            raise TypeError(f"rescale_grad must be a number, got {rescale_grad!r}")
        self.clip_gradient: float | None = clip_gradient
        if clip_gradient is not None:
            number("clip_gradient", clip_gradient, infinite=True)
        self.multi_precision = multi_precision
        self.seed: int = count("seed", seed, least=0)
        self._forget()

    def _forget(self) -> None:
        """Start without what serves the present process only."""
        self.lock = threading.RLock()  # for threads that share the optimizer
        self._tensors: dict[Index, tuple[Tensor, Any]] = {}

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

    @property
    def rule(self) -> Rule | None:
        """The rule that :meth:`update` applies; a class with one rule says ``rule = its_rule``."""
        return None

    def create_state(self, index: Index, weight: Array) -> Any:
        """Make the state of one parameter: zeros for each slot of the rule.

        They have the weight's shape and dtype, under a row rule the shape (rows, 1).

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
        rule = self.rule
        shape = (len(weight), 1) if rule and rule.row and weight.ndim else weight.shape
        order = order_of(weight)
        slots = tuple(np.zeros(shape, weight.dtype, order) for _ in (rule.state if rule else ()))
        return slots if len(slots) > 1 else slots[0] if slots else None

    # State and step

    def create_state_multi_precision(self, index: Index, weight: Array) -> Any:
        """Make the state of one parameter, with a float32 master if it is kept in half precision.

        Takes and returns what :meth:`create_state` does.
        """
        return self.create_state(index, weight)

    def update(self, index: Index, weight: Array, grad: Any, state: Any) -> None:
        """Update `weight` and `state` in place.

        Parameters
        ----------
        index : int or str
            The parameter; counts and multipliers belong to it.
        weight, grad : numpy.ndarray
            Weight and gradient, of equal shape and dtype, float32 or float64. The gradient is
            not changed.
        state : None, numpy.ndarray or tuple
            What :meth:`create_state` returned.

        Raises
        ------
        TypeError, ValueError
            The arrays do not fit, or the rate is not a number of at least 0. Nothing changes.
        """
        with self.lock:
            before = self._index_update_count.get(index), self.num_update
            tensors = self._plan(index, weight, grad, state)
            try:
                launch(tensors)
            except COMPILING as error:
                self._reset_count(index, *before)
                raise self._uncompiled(index, error) from error

    def update_multi_precision(self, index: Index, weight: Array, grad: Any, state: Any) -> None:
        """Update a weight that may have a float32 master; see :meth:`update`."""
        self.update(index, weight, grad, state)

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
        if not self.native:
            for call in calls:
                self.update_multi_precision(*call)
            return
        with self.lock:
            saved = {k: v.copy() if isinstance(v, dict) else v for k, v in vars(self).items()}
            repeated = len({index for index, *_ in calls}) < len(calls)
            tensors: list[Tensor] = []
            try:
                for call in calls:
                    tensors.extend(self._plan(*call))
                    if repeated:  # the next call for this index needs a tensor of its own
                        self._tensors.clear()
            except BaseException:
                self.__dict__.update(saved)
                raise
            try:
                launch(tensors)
            except COMPILING as error:
                self.__dict__.update(saved)
                raise self._uncompiled(calls[0][0], error) from error

    def _plan(self, index: Index, weight: Array, grad: Array, state: Any) -> Sequence[Tensor]:
        """Count one update and return what to launch for it, in order."""
        rule = self._rule_of(index)
        if rule is None:
            raise NotImplementedError(f"{type(self).__name__} has neither a rule nor an update()")
        tensor = self._tensor(index, rule, weight, grad, state)
        self._advance(index, tensor)
        return (tensor,)

    def _tensor(self, index: Index, rule: Rule, weight: Array, grad: Array, state: Any) -> Tensor:
        """Tensor of this index; that of the last call where it still holds."""
        known, of = self._tensors.get(index, (None, None))
        if (
            known is not None
            and of is state
            and known.weight is weight
            and known.rule is rule
            and known.take(grad)
        ):
            return known
        tensor = admit(index, self.idx2name, rule, weight, grad, state)
        if tensor.weight is weight and not isinstance(state, list):
            self._tensors[index] = tensor, state
        return tensor

    def _advance(self, index: Index, tensor: Tensor) -> None:
        """Count one update and fill the tensor's record for it; all or nothing."""
        count, num_update = self._index_update_count.get(index), self.num_update
        try:
            lr, wd = self._count_and_rates(index)
            fields = self._record(tensor.rule, lr, wd, self._hyper_of(index, lr, wd))
            tensor.fill(fields, self._noise_key(index) if tensor.rule.noise else 0)
        except BaseException:
            self._reset_count(index, count, num_update)
            raise

    def _uncompiled(self, index: Index, error: Exception) -> TypeError:
        """Error in words for a rule that cannot be compiled; nothing has run then."""
        rule = self._rule_of(index)
        words = f"{label(index, self.idx2name)}: rule {rule.name if rule else ''}"
        if isinstance(error, KeyError):
            return TypeError(f"{words} reads h.{error.args[0]}, which its hyper=(...) lacks")
        told = [m[1] for m in re.finditer(r"Error: (?!Failed in)(.+)", str(error))]
        return TypeError(f"{words} cannot be compiled: {told[-1] if told else error}")

    def _rule_of(self, index: Index) -> Rule | None:
        """Rule of one parameter, for classes that treat some of them differently."""
        return self.rule

    def _count_and_rates(self, index: Index) -> tuple[float, float]:
        """Count one update, then look up rate and decay."""
        self._update_count(index)
        return self._get_lr(index), self._get_wd(index)

    def _hyper_of(self, index: Index, lr: float, wd: float) -> Mapping[str, float]:
        """Fields of one parameter, for rules whose fields depend on more than ``t, lr, wd``."""
        return self.hyper(self._index_update_count[index], lr, wd)

    def _record(
        self, rule: Rule, lr: float, wd: float, hyper: Mapping[str, float]
    ) -> tuple[float, ...]:
        fields = {
            "lr": lr,
            "wd": wd,
            "rescale_grad": self.rescale_grad,
            "clip_gradient": bound(self.clip_gradient),
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

    def _noise_key(self, index: Index) -> int:
        number = zlib.crc32(index.encode()) if isinstance(index, str) else int(index)
        return noise.key(self.seed, number, self._index_update_count[index])

    # Copies

    def __getstate__(self) -> dict[str, Any]:
        """Everything but param_dict, which holds live parameters, and what serves this process."""
        left_out = ("param_dict", "lock", "_tensors")
        return {name: value for name, value in vars(self).items() if name not in left_out}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self.param_dict = {}
        self._forget()


register = Optimizer.register
create = Optimizer.create_optimizer


def bound(limit: float | None) -> float:
    """Bound of a clip: None, 0 and negative limits mean no clipping."""
    return math.inf if limit is None or limit <= 0 else limit
