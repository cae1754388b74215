"""Update count, learning rate and weight decay of the updates of a step.

Tests: ``tests/engine/test_records_settings.py``, ``tests/engine/test_rare_forms.py``.
"""

from collections.abc import Mapping
from typing import Any

from fastopt._engine.contract import OptimizerLike
from fastopt._engine.hyper import Hyper, completed, hyper_of
from fastopt._engine.per_index import Index
from fastopt._kernels.advance import step as corrected_fields

Rates = dict[str, float]
"""Learning rate before multipliers ``rate``, after them ``lr``, and weight decay ``wd``.

With them are the fields of :meth:`Optimizer.fields_of`.
"""


class StepRates:
    """Learning rates before multipliers of the updates of a step, each of which is asked for once.

    Parameters
    ----------
    largest : int
        Largest update count so far.
    found : dict
        Rates that have been asked for, by optimizer and update count.
    """

    def __init__(self, largest: int, found: dict[tuple[Any, int], float] | None = None) -> None:
        self.largest = largest
        self._found = {} if found is None else found

    def next(self, optimizer: OptimizerLike, t: int) -> int:
        """Return the largest update count before update `t` of the next parameter."""
        update: int = max(t - optimizer.rates_before_count, self.largest)
        self.largest = max(update, t)
        return update

    def at(self, optimizer: OptimizerLike, update: int) -> float:
        """Return the rate at an update count, which a schedule or ``hyper()`` can ask for."""
        if optimizer.lr_scheduler is not None:
            optimizer._index_update_count.largest = update
        if (optimizer, update) not in self._found:
            self._found[optimizer, update] = float(optimizer.learning_rate)
        return self._found[optimizer, update]


def multipliers(optimizer: OptimizerLike, index: Index) -> tuple[Any, ...]:
    """Return a parameter's multipliers of learning rate and weight decay, and its own fields."""
    return (
        optimizer.multiplier(index, optimizer.lr_mult, "lr_mult"),
        optimizer.multiplier(index, optimizer.wd_mult, "wd_mult"),
        *optimizer.fields_of(index).items(),
    )


def counted(optimizer: OptimizerLike, index: Index) -> tuple[int, Rates]:
    """Count an update with an optimizer that overrides how; return its number and rates."""
    optimizer._update_count(index)
    lr, wd = optimizer._get_lr(index), optimizer._get_wd(index)
    rate = optimizer.learning_rate if hyper_of(optimizer).carries else lr
    own = {"rate": rate, "lr": lr, "wd": wd, **optimizer.fields_of(index)}
    return optimizer._index_update_count.get(index, 0), own


def counted_fields(
    optimizer: OptimizerLike, hyper: Hyper, index: Index, carried: Any
) -> tuple[int, Rates, Mapping[str, float]]:
    """Count an update with an optimizer that overrides how; return also its hyper-parameters.

    `hyper` may be that of an average; `carried` has the number that the parameter carries.
    """
    own = hyper_of(optimizer)
    t, rates = counted(optimizer, index)
    lr, wd = rates["lr"], rates["wd"]
    fields: Mapping[str, float] = {
        **rates,
        **completed(optimizer, own.extra, optimizer.hyper(t, lr, wd)),
    }
    if hyper.given is not own.given:
        fields = {**hyper.given(optimizer, t, lr, wd), **fields}
    if own.carries and own.correct:
        fields = corrected_fields(t, fields, own.correct, carried)
    return t, rates, fields
