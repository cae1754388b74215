"""Cautious and stable forms of rules with decoupled weight decay: derived from these rules.

A rule with decoupled decay adds to the weight a move that does not depend on the weight, and
subtracts a share of the weight. At a weight of 0 it returns the move alone, whatever its formula.
"""

import math
from collections.abc import Callable, Mapping
from functools import cache

from fastopt.kernels.rule import Hyper, Rule, Scalar, State, Step, Sums, rule, scalar
from fastopt.kernels.scalars import rescaled, same_sign

__all__ = ["FIRST", "varied"]

Function = Callable[..., Scalar]

FIRST: Mapping[str, float] = {"aligned_scale": 1.0, "trust": 1.0}
"""Values of the fields that reductions fill, before they do."""

LEAST_SHARE = 1e-3
"""Share of aligned elements below which moves are not scaled up further."""


@scalar
def every_move(move: Scalar, grad: Scalar, h: Hyper) -> Scalar:
    """The move of the rule."""
    return move


@scalar
def cautious_move(move: Scalar, grad: Scalar, h: Hyper) -> Scalar:
    """The move where it is downhill, scaled up by the share of such elements; else 0."""
    zero = type(move)(0)
    return move * (h.aligned_scale if same_sign(-move, rescaled(grad, h)) else zero)


@scalar
def every_weight(weight: Scalar, move: Scalar) -> Scalar:
    """The weight, of which decay takes a share."""
    return weight


@scalar
def cautious_weight(weight: Scalar, move: Scalar) -> Scalar:
    """The weight unless it moves away from 0."""
    return type(weight)(0) if same_sign(weight, move) else weight


@scalar
def whole(change: Scalar, h: Hyper) -> Scalar:
    """The change of the weight."""
    return change


@scalar
def limited(change: Scalar, h: Hyper) -> Scalar:
    """The change of the weight at the tensor's own rate."""
    return h.trust * change


def aligned_finish(sums: Sums, h: Hyper) -> None:
    """One over the share of elements that move downhill."""
    share = sums[0] / sums[1] if sums[1] > 0 else 1.0
    h.aligned_scale = 1.0 / max(share, LEAST_SHARE)


def ratio_finish(sums: Sums, h: Hyper) -> None:
    """One over the root of the mean ratio, at most 1."""
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
    r"""Rule that changes weights like `of`, but with caution.

    With :math:`\Delta` the move of the rule and :math:`\delta` the share that decay takes,

    .. math:: w \leftarrow w + T (M(\Delta) - \delta D(w))

    where :math:`M` and :math:`D` are masks and :math:`T` a factor of the tensor.

    Parameters
    ----------
    of : Rule
        A rule with decoupled decay.
    share : callable
        ``share(h)``: share of the weight that decay takes.
    ratio : callable or None
        ``ratio(grad, state, h)``: square of the gradient over its average in the new state.
    fields : tuple of str
        Fields of `h` that `ratio` reads besides those of the rule.
    cautious : bool
        Move only elements whose move is downhill, further by the share of these.
    cautious_decay : bool
        Decay only weights that do not move away from 0.
    stable : bool
        Divide by the root of the mean `ratio` where that is above 1.
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
