"""Cautious and stable variants of rules.

A variant takes the move of a rule apart from the weight decay that is decoupled. A rule whose decay
is decoupled and which adds a move that does not depend on the weight returns, for a weight of 0,
the move alone.

Tests: ``tests/optimizer/test_families.py``.
"""

import math
from collections.abc import Callable
from functools import cache
from typing import NamedTuple

from fastopt.kernels.rule import Hyper, Rule, Scalar, State, Step, Sums, rule, scalar
from fastopt.kernels.scalars import rescaled, same_sign, sign

Function = Callable[..., Scalar]


class Traits(NamedTuple):
    """How a rule uses the gradient and the weight decay."""

    seen: Function
    """``seen(weight, grad, h)``: the gradient that the moving averages of the rule average."""
    decay: Function
    """``decay(weight, h)``: the amount that decoupled decay subtracts from a weight."""
    from_zero: bool
    """Whether the rule has the same move for a weight of 0."""
    ratio: Function | None = None
    """``ratio(grad, state, h)``: squared gradient over its moving average in the new state."""
    fields: tuple[str, ...] = ()
    """Fields of `h` that `ratio` reads and the rule does not have."""
    step: Function | None = None
    """The rule without decay, if it applies the decay after the step, whose result it shrinks."""


class Variant(NamedTuple):
    """Which variants are selected."""

    cautious: bool = False
    """Move only elements whose move is downhill, and divide moves by the share of these."""
    cautious_decay: bool = False
    """Decay only weights that do not move away from 0."""
    stable: bool = False
    """Divide the change by the root of the mean `ratio` if that is above 1."""
    grams: bool = False
    """Move against the sign of the gradient, by the size of the move."""


@scalar
def beside_decay(weight: Scalar, grad: Scalar, h: Hyper) -> Scalar:
    """Return the rescaled and clipped gradient, for rules with decoupled decay."""
    return rescaled(grad, h)


@scalar
def no_decay(weight: Scalar, h: Hyper) -> Scalar:
    """Return 0, for rules without decoupled decay."""
    return type(weight)(0)


@scalar
def rate_times_decay(weight: Scalar, h: Hyper) -> Scalar:
    """Return what decoupled decay with the learning rate subtracts from a weight."""
    return h.lr * h.wd * weight


@scalar
def shrunk_by(weight: Scalar, h: Hyper) -> Scalar:
    """Return what decoupled decay subtracts from a weight, with the factor ``shrink``."""
    return (type(weight)(1) - h.shrink) * weight


LEAST_SHARE = 1e-3
"""Share of aligned elements below which moves are not scaled up further."""


@scalar
def cautious_move(move: Scalar, grad: Scalar, h: Hyper) -> Scalar:
    """Return the move if it is downhill, divided by the share of such elements; else 0."""
    return move * (h.aligned_scale if same_sign(-move, grad) else type(move)(0))


def aligned_finish(sums: Sums, h: Hyper) -> None:
    """Write the inverse of the share of elements that move downhill."""
    share = sums[0] / sums[1] if sums[1] > 0 else 1.0
    h.aligned_scale = 1.0 / max(share, LEAST_SHARE)


def ratio_finish(sums: Sums, h: Hyper) -> None:
    """Write the inverse of the root mean ratio, at most 1."""
    root = math.sqrt(sums[0] / sums[1]) if sums[1] > 0 else 1.0
    h.trust = 1.0 if root <= 1.0 else 1.0 / root


def keeping(finish: Callable[[Sums, Hyper], None]) -> Callable[..., State]:
    """Return `finish` for a rule that keeps numbers, which it leaves as they are."""

    def finished(sums: Sums, h: Hyper, kept: State) -> State:
        finish(sums, h)
        return kept

    scalar(finish)
    return finished


@cache
def varied(of: Rule, traits: Traits, which: Variant) -> Rule:
    r"""Return a variant of a rule.

    With the move :math:`\Delta` of the rule and its decoupled decay :math:`\delta(w)`, the update
    is

    .. math:: w \leftarrow w + T (M(\Delta) - \delta(D(w)))

    where :math:`M` and :math:`D` are masks and :math:`T` a factor of the tensor. With ``grams``,
    :math:`\Delta` is replaced by :math:`-|\Delta|` times the sign of the gradient. Decay after the
    step is :math:`\delta(D(w + M(\Delta)))`, so that the masks never change the move.

    Parameters
    ----------
    of : Rule
        The rule.
    traits : Traits
        How it uses the gradient and the decay.
    which : Variant
        The variant.
    """
    if not any(which):
        return of
    seen, decay, from_zero, ratio, fields, step = traits
    fn, included = (of.fn, decay) if step is None else (step, no_decay)
    decays_last = step is not None
    # Constants of the functions below, whose compilation removes the other branches.
    cautious, cautious_decay, stable, grams = which

    def variant(weight: Scalar, grad: Scalar, state: State, h: Hyper) -> Step:
        first = type(weight)(0) if from_zero else weight
        last, new = fn(first, grad, state, h)
        against = seen(weight, grad, h)
        move = last - first + included(first, h)
        if grams:
            move = -abs(move) * sign(against)
        change = cautious_move(move, against, h) if cautious else move
        decaying = weight + change if decays_last else weight
        if cautious_decay:
            decaying = type(weight)(0) if same_sign(weight, move) else decaying
        change -= decay(decaying, h)
        return weight + (h.trust * change if stable else change), new

    def aligned_sums(weight: Scalar, grad: Scalar, state: State, h: Hyper) -> State:
        first = type(weight)(0) if from_zero else weight
        last, _ = fn(first, grad, state, h)
        move = last - first + included(first, h)
        aligned = same_sign(-move, seen(weight, grad, h))
        return type(weight)(1) if aligned else type(weight)(0), type(weight)(1)

    def ratio_sums(weight: Scalar, grad: Scalar, state: State, h: Hyper) -> State:
        _, new = fn(type(weight)(0) if from_zero else weight, grad, state, h)
        return ratio(seen(weight, grad, h), new, h), type(weight)(1)  # type: ignore[misc]

    passes: list[tuple[Function, Function]] = [(aligned_sums, aligned_finish)] * cautious
    passes += [(ratio_sums, ratio_finish)] * stable
    if of.kept:
        passes = [(sums, keeping(finish)) for sums, finish in passes]
    names = [name for name, chosen in which._asdict().items() if chosen]
    variant.__name__ = variant.__qualname__ = "_".join([of.name, *names])
    more = (*("aligned_scale",) * cautious, *("trust", *fields) * stable)
    declare = rule(
        state=of.state,
        hyper=(*of.hyper, *more),
        passes=(*of.passes, *passes),
        kept=of.kept,
        signed=of.signed,
        nonnegative=of.nonnegative,
        extra=of.extra or None,
    )
    return declare(variant)
