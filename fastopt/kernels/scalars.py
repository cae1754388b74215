"""Scalar functions and field names that many rules share."""

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
"""Fields that :class:`~fastopt.optimizer.Optimizer` fills for every rule."""


@scalar
def clip(x: Scalar, bound: Scalar) -> Scalar:
    """Clip `x` to ``[-bound, bound]``; NaN stays NaN, an infinite bound is off."""
    if x > bound:
        return bound
    if x < -bound:
        return -bound
    return x


@scalar
def sign(x: Scalar) -> Scalar:
    """Sign of `x` as -1, 0 or 1 in the type of `x`; NaN stays NaN."""
    zero, one = type(x)(0), type(x)(1)
    if x > zero:
        return one
    if x < zero:
        return -one
    return x


@scalar
def same_sign(x: Scalar, y: Scalar) -> bool:
    """Whether both are positive or both negative; their product might underflow."""
    zero = type(x)(0)
    return (x > zero and y > zero) or (x < zero and y < zero)


@scalar
def rescaled(grad: Scalar, h: Hyper) -> Scalar:
    """Rescaled and clipped gradient."""
    return clip(h.rescale_grad * grad, h.clip_gradient)


@scalar
def decayed(weight: Scalar, grad: Scalar, h: Hyper) -> Scalar:
    """Rescaled and clipped gradient plus the decay, which the clip does not cover."""
    return rescaled(grad, h) + h.wd * weight


@scalar
def clipped_decayed(weight: Scalar, grad: Scalar, h: Hyper) -> Scalar:
    """Rescaled gradient plus the decay, clipped together."""
    return clip(h.rescale_grad * grad + h.wd * weight, h.clip_gradient)


@scalar
def moments(grad: Scalar, state: State, h: Hyper) -> State:
    """Moving averages of the gradient and of its square."""
    mean, var = state
    mean = h.beta1 * mean + h.one_minus_beta1 * grad
    var = h.beta2 * var + h.one_minus_beta2 * grad * grad
    return mean, var


@scalar
def peak_moments(grad: Scalar, state: State, h: Hyper) -> State:
    """Moving averages as :func:`moments` has them, and the largest second one so far: AMSGrad."""
    mean, var = moments(grad, (state[0], state[1]), h)
    peak = state[2]
    if not var <= peak:
        peak = var
    return mean, var, peak
