"""Optimizers as functions that users' own compiled code calls.

Tests: ``tests/test_in_numba.py``.
"""

from typing import Any, NamedTuple

import numpy as np

from fastopt._engine.hyper import Hyper, check_returned, completed, hyper_of, values_of
from fastopt._engine.hyper_rows import multipliers, names_of
from fastopt._engine.mixed_precision import holds_master
from fastopt._engine.per_index import Index
from fastopt._engine.validate import label, leaves, mapped
from fastopt._kernels.in_numba import INIT, SPECS, UPDATE, UPDATE_ROWS, Function, state_class
from fastopt._kernels.rates import Expression, Program
from fastopt._kernels.whole_calls import Spec
from fastopt._updater.updater import DEFAULTS, Updater
from fastopt.arguments import Instance
from fastopt.kernels.rule import Rule
from fastopt.optimizer import Optimizer, create

__all__ = ["JitFunctions", "jit_functions"]

SAMPLE = np.arange(1.0, 7.0).reshape(3, 2)
"""Weight whose first state shows how states begin."""


class JitFunctions(NamedTuple):
    """Functions that code compiled by ``numba.njit`` calls; see :func:`jit_functions`.

    They can also be called from Python, where a call costs some microseconds.

    Parameters
    ----------
    init : callable
        ``init(weight)`` returns the state before the first update, a named tuple of ``arrays``,
        those of ``updater.states[index]``, ``hyper`` and ``count``, the number of updates.
    update : callable
        ``update(grad, weight, state)`` updates `weight` and `state` in place, and
        ``update(grad, weight, state, lr)`` with another learning rate in this call.
    update_rows : callable
        ``update_rows(values, indices, table, state)``, also with `lr`, updates a table with a
        row-sparse gradient: the indexed rows, or all rows if the optimizer is not lazy.
    """

    init: Function
    update: Function
    update_rows: Function

    def from_updater(self, updater: Updater, index: Index) -> Any:
        """Return the state of a parameter of an updater, with the same arrays.

        Parameters
        ----------
        updater : Updater
            An updater that has updated the parameter, with an optimizer of the same rule.
        index : int or str
            The parameter.

        Returns
        -------
        named tuple
            The state; its ``count`` is a copy, see :meth:`to_updater`.

        Raises
        ------
        KeyError
            The updater has no state of the parameter.
        TypeError
            `updater` is not an updater; its optimizer has another rule or other settings, apart
            from the learning rate, or settings that functions cannot have; the updater has groups,
            a loss scaler, a clip, an average or `accumulate`; or the parameter has a master.

        Examples
        --------
        >>> import numpy as np
        >>> import fastopt
        >>> optimizer = fastopt.Adam(lr=0.1)
        >>> functions = fastopt.jit_functions(optimizer)
        >>> weight, grad = np.ones(2), np.ones(2)
        >>> updater = fastopt.Updater(optimizer)
        >>> updater("w", grad, weight)
        >>> state = functions.from_updater(updater, "w")
        >>> functions.update(grad, weight, state)
        >>> functions.to_updater(updater, "w", state)
        >>> updater.optimizer.num_update
        2
        """
        optimizer, spec = self._check(updater, index), SPECS[self.init.digest]
        arrays, numbers = leaves(updater.states[index]), np.array(self.init.numbers[: spec.size])
        other, present = _specified(optimizer, hyper_of(optimizer), spec.rule, index)
        fixed = [1 + k for k in range(spec.size - 1) if k not in spec.rated]
        if other.digest != spec.digest or any(present[k] != numbers[k] for k in fixed):
            raise TypeError(
                f"{label(index, optimizer.idx2name)}: the functions have other settings than "
                f"{optimizer!r}: use those of jit_functions(updater.optimizer, {index!r})"
            )
        if optimizer.carried is not None:
            numbers[0] = optimizer.carried.get(index, numbers[0])
        count = optimizer._index_update_count.get(index, optimizer.begin_num_update)
        return state_class(self.init.digest)(arrays, numbers, np.array([count]))

    def to_updater(self, updater: Updater, index: Index, state: Any) -> None:
        """Give an updater the state of a parameter, whose arrays it shares from then on.

        Parameters
        ----------
        updater : Updater
            An updater with an optimizer of the same rule.
        index : int or str
            The parameter.
        state : named tuple
            The state.

        Raises
        ------
        TypeError
            The state is that of another rule, or the updater one that :meth:`from_updater` refuses.
        ValueError
            The updater has made more updates of the parameter than the state has.
        """
        optimizer = self._check(updater, index)
        if not isinstance(state, state_class(self.init.digest)):
            raise TypeError(f"state must be that of these functions, got {type(state).__name__}")
        counts, count = optimizer._index_update_count, int(state.count[0])
        if count < counts.get(index, 0):
            raise ValueError(
                f"{label(index, optimizer.idx2name)}: the state has {count} updates, the updater "
                f"{counts[index]}: call from_updater again after updates by the updater"
            )
        arrays, form = iter(state.arrays), optimizer.create_state(index, SAMPLE)
        updater.states[index] = mapped(lambda _: next(arrays), form)
        counts[index] = count
        counts.largest = max(counts.largest, count)
        if optimizer.carried is not None:
            optimizer.carried[index] = float(state.hyper[0])

    def _check(self, updater: Updater, index: Index) -> Optimizer:
        """Return the optimizer of an updater that updates the parameter like these functions."""
        Instance(Updater, "an Updater, before the index")("updater", updater)
        optimizer, rule = updater.optimizer, SPECS[self.init.digest].rule
        if updater.groups is not None:
            raise TypeError("states of an updater with groups do not belong to one optimizer")
        if names := [name for name in DEFAULTS if getattr(updater, name) != DEFAULTS[name]]:
            raise TypeError(
                f"compiled functions have no {', '.join(names)} of the updater: reset these, "
                "or call the updater between compiled functions"
            )
        present = optimizer.rule_for(index)
        if present is None or (present.name, present.digest) != (rule.name, rule.digest):
            raise TypeError(
                f"{label(index, optimizer.idx2name)}: the updater's optimizer must have rule "
                f"{rule.name}, got {optimizer!r}"
            )
        reason = _reason(optimizer, hyper_of(optimizer), present, scheduled=True)
        if holds_master(present, updater.states.get(index)):
            reason = "its state has a master; half-precision weights need an updater"
        if reason:
            context = label(index, optimizer.idx2name)
            raise TypeError(f"{context}: the updater's update cannot be compiled as {reason}")
        return optimizer


def jit_functions(optimizer: str | Optimizer, index: Index = 0) -> JitFunctions:
    """Return an optimizer as functions that code compiled by ``numba.njit`` calls.

    The code takes the functions as a global variable or as an argument. They compute the bits of
    an :class:`~fastopt.optimizer.Updater`, and run on the thread that calls them.

    Parameters
    ----------
    optimizer : str or Optimizer
        Name, or an optimizer, whose numbers the functions have from now on.
    index : int or str
        Parameter whose multipliers (``lr_mult``, ``wd_mult``) and rule the functions have. Default
        0.

    Returns
    -------
    JitFunctions
        The named tuple ``(init, update, update_rows)``.

    Raises
    ------
    TypeError
        The optimizer computes something in Python in each step: a schedule, matrices, ``update()``
        or an unmarked ``hyper()``; or its state is stored in bfloat16 or 8 bits, it draws random
        numbers, defers decay, or has a number that all weights share.
    ValueError
        A learning rate or weight decay is invalid.

    Examples
    --------
    >>> import numba
    >>> import numpy as np
    >>> import fastopt
    >>> functions = fastopt.jit_functions(fastopt.Adam(lr=0.1))
    >>> @numba.njit
    ... def fit(x, y, steps):
    ...     weight = np.zeros(x.shape[1])
    ...     state = functions.init(weight)
    ...     for step in range(steps):
    ...         grad = np.zeros_like(weight)
    ...         for i in range(len(x)):
    ...             error = (x[i] * weight).sum() - y[i]
    ...             grad += error * x[i] / len(x)
    ...         functions.update(grad, weight, state, 0.1 * (1 - step / steps))
    ...     return weight
    >>> x = np.random.default_rng(0).normal(size=(64, 3))
    >>> fit(x, x @ np.array([1.0, -2.0, 0.5]), 200).round(2)
    array([ 1. , -2. ,  0.5])
    """
    made = create(optimizer)
    hyper, rule = hyper_of(made), made.rule_for(index)
    if reason := _reason(made, hyper, rule):
        raise TypeError(f"jit_functions: {type(made).__name__} cannot be compiled as {reason}")
    assert rule is not None
    spec, numbers = _specified(made, hyper, rule, index)
    digest = spec.digest
    SPECS.setdefault(digest, spec)
    init = Function(INIT, digest, numbers)
    return JitFunctions(init, Function(UPDATE, digest), Function(UPDATE_ROWS, digest))


def _reason(optimizer: Optimizer, hyper: Hyper, rule: Rule | None, scheduled: bool = False) -> str:
    """Return why an optimizer has no functions, and what to do; empty if it has."""
    if rule is None or not optimizer.native:
        return "it updates weights in Python; call an updater between compiled functions"
    if optimizer.lr_scheduler is not None and not scheduled:
        return "its schedule is Python; leave it out, and pass the learning rate to update()"
    sums = optimizer.step_sums is not None or optimizer.batches is not None
    if sums or not hyper.constant or optimizer.per_index:
        return "its hyper-parameters are computed in Python in each step; use an updater"
    if hyper.shares:
        return "all weights share one of its numbers; use per_parameter=True"
    if rule.noise:
        return "its random numbers depend on the name of a weight; use an updater"
    if optimizer.state_dtype is not None:
        return f"its state is {optimizer.state_dtype}; leave state_dtype out"
    if optimizer.sparse_decay != "touched":
        return "an updater keeps the decay that rows defer; use sparse_decay='touched'"
    return "it skips updates, with this rescale_grad" if optimizer.skips() else ""


def _specified(
    optimizer: Optimizer, hyper: Hyper, rule: Rule, index: Index
) -> tuple[Spec, list[float]]:
    """Return what the code of the functions depends on, and the numbers of ``init``."""
    names = names_of(rule, hyper.extra)
    numbers, resting = (
        _values(optimizer, hyper, rule, index, rate) for rate in (optimizer.learning_rate, 0.0)
    )
    rated, programs, constants = _programs(optimizer, hyper, names, index)
    sample = SAMPLE.copy()
    arrays = leaves(optimizer.create_state(index, sample))
    copies = tuple(np.array_equal(array, sample) for array in arrays)
    spec = Spec(
        rule,
        names,
        hyper.correct,
        copies,
        bool(optimizer.lazy_update and rule.row is None),
        rated,
        programs,
        len(constants),
    )
    first = [0.0 if copy else float(a.flat[0]) for a, copy in zip(arrays, copies, strict=True)]
    numbers = [optimizer.first_carried, *numbers, *(resting[k] for k in rated), *constants]
    return spec, [*numbers, *first, optimizer.begin_num_update]


def _values(
    optimizer: Optimizer, hyper: Hyper, rule: Rule, index: Index, rate: float
) -> list[float]:
    """Return the hyper-parameters for a learning rate, before the correction for a step."""
    rates = optimizer.rates_at(rate, multipliers(optimizer, index))
    optimizer.check_rates(index, rates["lr"], rates["wd"])
    fields = hyper.compute(optimizer, 0, rates["lr"], rates["wd"])
    names = names_of(rule, hyper.extra)
    values = values_of(optimizer, rule, names, rates, fields)
    check_returned(optimizer, names, rates, fields)
    return values


def _programs(
    optimizer: Optimizer, hyper: Hyper, names: tuple[str, ...], index: Index
) -> tuple[tuple[int, ...], tuple[Program, ...] | None, list[float]]:
    """Return which hyper-parameters depend on the learning rate, how, and the constants."""
    rate: Any = Expression("lr")
    constants: list[float] = []
    try:
        rates = optimizer.rates_at(rate, multipliers(optimizer, index))
        returned = hyper.compute(optimizer, 0, rates["lr"], rates["wd"])
        fields = {**rates, **completed(optimizer, hyper.extra, returned)}
    except (TypeError, AttributeError):
        return (), None, constants
    rated: dict[int, Expression] = {}
    for k, name in enumerate(names):
        field: object = fields.get(name)
        if isinstance(field, Expression):
            rated[k] = field
    return tuple(rated), tuple(field.program(constants) for field in rated.values()), constants
