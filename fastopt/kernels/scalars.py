"""Scalar functions that many rules share."""

from fastopt.kernels.rule import scalar

__all__ = ["clip", "sign"]


@scalar
def clip(x, bound):
    """Clip `x` to ``[-bound, bound]``; NaN stays NaN, an infinite bound is off."""
    if x > bound:
        return bound
    if x < -bound:
        return -bound
    return x


@scalar
def sign(x):
    """Sign of `x` as -1, 0 or 1 in the type of `x`; NaN stays NaN."""
    one = type(x)(1)
    if x > 0:
        return one
    if x < 0:
        return -one
    return x
