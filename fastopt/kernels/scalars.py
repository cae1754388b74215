"""Scalar functions and field names that many rules share.

Tests: ``tests/optimizer/test_formulas.py``.
"""

from fastopt.kernels.rule import Hyper, Scalar, State, scalar

__all__ = [
    "COMMON",
    "clip",
    "clipped_decayed",
    "decayed",
    "moments",
    "peak_moments",
    "rescaled",
    "same_sign",
    "sign",
]

COMMON = ("lr", "wd", "rescale_grad", "clip_gradient")
"""Fields that :class:`~fastopt.optimizer.Optimizer` sets for every rule."""


@scalar
def clip(x: Scalar, bound: Scalar) -> Scalar:
    """Clip `x` to ``[-bound, bound]``; NaN stays NaN, and an infinite bound does nothing."""
    if x > bound:
        return bound
    if x < -bound:
        return -bound
    return x


@scalar
def sign(x: Scalar) -> Scalar:
    """Return the sign of `x` as -1, 0 or 1 in the type of `x`; NaN stays NaN."""
    zero, one = type(x)(0), type(x)(1)
    if x > zero:
        return one
    if x < zero:
        return -one
    return x


@scalar
def same_sign(x: Scalar, y: Scalar) -> bool:
    """Whether both are positive or both negative; comparing their product could underflow."""
    zero = type(x)(0)
    return (x > zero and y > zero) or (x < zero and y < zero)


@scalar
def rescaled(grad: Scalar, h: Hyper) -> Scalar:
    """Return the rescaled and clipped gradient."""
    return clip(h.rescale_grad * grad, h.clip_gradient)


@scalar
def decayed(weight: Scalar, grad: Scalar, h: Hyper) -> Scalar:
    """Return the rescaled and clipped gradient plus weight decay, which is not clipped."""
    return rescaled(grad, h) + h.wd * weight


@scalar
def clipped_decayed(weight: Scalar, grad: Scalar, h: Hyper) -> Scalar:
    """Return the rescaled gradient plus weight decay, clipped together."""
    return clip(h.rescale_grad * grad + h.wd * weight, h.clip_gradient)


@scalar
def moments(grad: Scalar, state: State, h: Hyper) -> State:
    """Update the moving averages of the gradient and of its square."""
    mean, var = state
    mean = h.beta1 * mean + h.one_minus_beta1 * grad
    var = h.beta2 * var + h.one_minus_beta2 * grad * grad
    return mean, var


@scalar
def peak_moments(grad: Scalar, state: State, h: Hyper) -> State:
    """Update :func:`moments`, and the maximum of the second one so far, for AMSGrad."""
    mean, var = moments(grad, (state[0], state[1]), h)
    peak = state[2]
    if not var <= peak:
        peak = var
    return mean, var, peak
