"""Cautious and stable variants of rules with decoupled weight decay.

A rule with decoupled decay adds a move to the weight that does not depend on the weight, and
subtracts a share of the weight. Called with a weight of 0, it thus returns the move alone.
"""

import math
from collections.abc import Callable, Mapping
from functools import cache

from fastopt.kernels.rule import Hyper, Rule, Scalar, State, Step, Sums, rule, scalar
from fastopt.kernels.scalars import rescaled, same_sign

__all__ = ["FIRST", "varied"]

Function = Callable[..., Scalar]

FIRST: Mapping[str, float] = {"aligned_scale": 1.0, "trust": 1.0}
"""Initial values of the fields that reductions set."""

LEAST_SHARE = 1e-3
"""Share of aligned elements below which moves are not scaled up further."""


@scalar
def every_move(move: Scalar, grad: Scalar, h: Hyper) -> Scalar:
    """Return the move of the rule."""
    return move


@scalar
def cautious_move(move: Scalar, grad: Scalar, h: Hyper) -> Scalar:
    """Return the move if it is downhill, divided by the share of such elements; else 0."""
    zero = type(move)(0)
    return move * (h.aligned_scale if same_sign(-move, rescaled(grad, h)) else zero)


@scalar
def every_weight(weight: Scalar, move: Scalar) -> Scalar:
    """Return the weight that decay applies to."""
    return weight


@scalar
def cautious_weight(weight: Scalar, move: Scalar) -> Scalar:
    """Return the weight, or 0 if it moves away from 0."""
    return type(weight)(0) if same_sign(weight, move) else weight


@scalar
def whole(change: Scalar, h: Hyper) -> Scalar:
    """Return the change of the weight."""
    return change


@scalar
def limited(change: Scalar, h: Hyper) -> Scalar:
    """Return the change of the weight, scaled by the tensor's factor."""
    return h.trust * change


def aligned_finish(sums: Sums, h: Hyper) -> None:
    """Write the inverse of the share of elements that move downhill."""
    share = sums[0] / sums[1] if sums[1] > 0 else 1.0
    h.aligned_scale = 1.0 / max(share, LEAST_SHARE)


def ratio_finish(sums: Sums, h: Hyper) -> None:
    """Write the inverse of the root mean ratio, at most 1."""
    root = math.sqrt(sums[0] / sums[1]) if sums[1] > 0 else 1.0
    h.trust = 1.0 if root <= 1.0 else 1.0 / root


@cache
def varied(
    of: Rule,
    share: Function,
    ratio: Function | None,
    fields: tuple[str, ...],
    cautious: bool,
    cautious_decay: bool,
    stable: bool,
) -> Rule:
    r"""Return a cautious or stable variant of the rule `of`.

    With :math:`\Delta` the move of the rule and :math:`\delta` the share of the weight that decay
    subtracts, the update is

    .. math:: w \leftarrow w + T (M(\Delta) - \delta D(w))

    where :math:`M` and :math:`D` are masks and :math:`T` a factor of the tensor.

    Parameters
    ----------
    of : Rule
        A rule with decoupled decay.
    share : callable
        ``share(h)``: share of the weight that decay subtracts.
    ratio : callable or None
        ``ratio(grad, state, h)``: squared gradient over its moving average in the new state.
    fields : tuple of str
        Fields of `h` that `ratio` reads and the rule does not have.
    cautious : bool
        Move only elements whose move is downhill, and divide moves by the share of these elements.
    cautious_decay : bool
        Decay only weights that do not move away from 0.
    stable : bool
        Divide the change by the root of the mean `ratio` if that is above 1.
    """
    if not (cautious or cautious_decay or stable):
        return of
    fn = of.fn
    masked = cautious_move if cautious else every_move
    decaying = cautious_weight if cautious_decay else every_weight
    scaled = limited if stable else whole

    def variant(weight: Scalar, grad: Scalar, state: State, h: Hyper) -> Step:
        move, new = fn(type(weight)(0), grad, state, h)
        change = masked(move, grad, h) - share(h) * decaying(weight, move)
        return weight + scaled(change, h), new

    def aligned_sums(weight: Scalar, grad: Scalar, state: State, h: Hyper) -> State:
        move, _ = fn(type(weight)(0), grad, state, h)
        zero, one = type(weight)(0), type(weight)(1)
        return one if same_sign(-move, rescaled(grad, h)) else zero, one

    def ratio_sums(weight: Scalar, grad: Scalar, state: State, h: Hyper) -> State:
        _, new = fn(type(weight)(0), grad, state, h)
        return ratio(rescaled(grad, h), new, h), type(weight)(1)  # type: ignore[misc]

    passes = [(aligned_sums, aligned_finish)] * cautious + [(ratio_sums, ratio_finish)] * stable
    marks = "_cautious" * cautious + "_cautious_decay" * cautious_decay + "_stable" * stable
    variant.__name__ = variant.__qualname__ = of.name + marks
    more = (*("aligned_scale",) * cautious, *("trust", *fields) * stable)
    declare = rule(
        state=of.state,
        hyper=(*of.hyper, *more),
        passes=passes,
        signed=of.signed,
        nonnegative=of.nonnegative,
    )
    return declare(variant)
