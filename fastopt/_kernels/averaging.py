"""Rules that maintain an average of the weight, derived from the rules of optimizers.

A derived rule has one more state slot, ``average``, and one more hyper-parameter,
``average_rate``. Its kernels update weight, state and average in one pass over memory.

Tests: ``tests/test_averages.py``.
"""

from collections.abc import Callable
from functools import cache
from typing import Any

from fastopt.kernels.rule import Hyper, Rule, Scalar, State, Step, rule, scalar

Follow = Callable[[Scalar, Scalar, Hyper], tuple[Scalar, Scalar]]


@scalar
def move_average(weight: Scalar, average: Scalar, h: Hyper) -> tuple[Scalar, Scalar]:
    """Move the average towards the weight; a rate of 0 changes nothing, 1 copies the weight."""
    if h.average_rate == 1:
        return weight, weight
    if h.average_rate == 0:
        return weight, average
    return weight, average + h.average_rate * (weight - average)


@scalar
def move_both(weight: Scalar, average: Scalar, h: Hyper) -> tuple[Scalar, Scalar]:
    """Move the average towards the weight, and set the weight to it; a rate of 0 does nothing."""
    if h.average_rate == 0:
        return weight, average
    average = average + h.average_rate * (weight - average)
    return average, average


@cache
def averaged(of: Rule) -> Rule:
    r"""Return a rule that updates like `of`, then moves the average towards the new weight.

    .. math:: a \leftarrow a + r (w - a)

    Parameters
    ----------
    of : Rule
        A rule without `row`.
    """
    return _derived(of, move_average)


@cache
def synced(of: Rule) -> Rule:
    """Return a rule that updates like :func:`averaged`, then sets the weight to the average.

    Parameters
    ----------
    of : Rule
        A rule without `row`.
    """
    return _derived(of, move_both)


def _derived(of: Rule, follow: Follow) -> Rule:
    fn = of.fn

    if of.noise:

        def follower(weight: Scalar, grad: Scalar, state: State, h: Hyper, draw: Scalar) -> Step:
            new, slots = fn(weight, grad, state[:-1], h, draw)
            new, average = follow(type(weight)(new), state[-1], h)
            return new, slots + (average,)  # noqa: RUF005 - numba adds tuples

    else:

        def follower(weight: Scalar, grad: Scalar, state: State, h: Hyper) -> Step:  # type: ignore[misc]
            new, slots = fn(weight, grad, state[:-1], h)
            new, average = follow(type(weight)(new), state[-1], h)
            return new, slots + (average,)  # noqa: RUF005 - numba adds tuples

    name = f"{of.name}_{follow.__name__}"
    follower.__name__ = follower.__qualname__ = name
    passes = [stage._replace(sums=_of_own_state(stage.sums)) for stage in of.passes]
    declare = rule(
        state=(*of.state, "average"),
        hyper=(*of.hyper, "average_rate"),
        noise=of.noise,
        passes=passes,
        kept=of.kept,
        signed=of.signed,
        nonnegative=of.nonnegative,
        extra=of.extra or None,
    )
    return declare(follower)


def _of_own_state(sums: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap the sums of a reduction so that their state does not contain the average."""

    def own_sums(weight: Scalar, grad: Scalar, state: State, h: Hyper) -> tuple[Scalar, ...]:
        terms: tuple[Scalar, ...] = sums(weight, grad, state[:-1], h)
        return terms

    return own_sums


@rule(state=("average",), hyper=("average_rate",))
def averaged_alone(weight: Scalar, grad: Scalar, state: State, h: Hyper) -> Step:
    """Move the average towards the weight, without an update."""
    weight, average = move_average(weight, state[0], h)
    return weight, (average,)


@rule(state=("average",), hyper=("average_rate",))
def synced_alone(weight: Scalar, grad: Scalar, state: State, h: Hyper) -> Step:
    """Move the average towards the weight and set the weight to it, without an update."""
    weight, average = move_both(weight, state[0], h)
    return weight, (average,)
