"""Adam with other numerators: means of several gradients or of changed ones."""

import math

from fastopt.arguments import FLAG, Integer, Real, alias, arg
from fastopt.kernels.rule import Carried, Hyper, Scalar, State, Step, Sums, rule, scalar
from fastopt.kernels.scalars import moments, rescaled
from fastopt.kernels.variants import Traits
from fastopt.optimizer.families import (
    MEAN_AND_VAR,
    MOMENTS,
    AdamFamily,
    DecoupledFamily,
    mean_and_var,
    over,
    squared,
)
from fastopt.optimizer.optimizer import Optimizer, RateAttribute, corrected, register

DIFFERENCES = (
    *("lr", "rescale_grad", "clip_gradient", "epsilon"),
    *("beta1", "one_minus_beta1", "beta2", "one_minus_beta2", "beta3", "one_minus_beta3"),
    *("differs", "mean_scale", "diff_scale", "var_scale", "shrink", "shrink_after"),
)


@scalar
def undecayed(weight: Scalar, grad: Scalar, state: State, h: Hyper) -> Step:
    """Means of the gradient and of its change divided by the root of the second moment."""
    mean, diff, var, previous = state
    grad = rescaled(grad, h)
    change = h.differs * (grad - previous)
    ahead = grad + h.beta2 * change
    mean = h.beta1 * mean + h.one_minus_beta1 * grad
    diff = h.beta2 * diff + h.one_minus_beta2 * change
    var = h.beta3 * var + h.one_minus_beta3 * ahead * ahead
    step = h.mean_scale * mean + h.diff_scale * diff
    step = h.lr * step / (math.sqrt(var * h.var_scale) + h.epsilon)
    return weight - step, (mean, diff, var, grad)


@rule(state=("mean", "diff", "var", "previous"), hyper=DIFFERENCES)
def adan(weight: Scalar, grad: Scalar, state: State, h: Hyper) -> Step:
    """Step from the weight after decay, or with decay after it."""
    weight, new = undecayed(h.shrink * weight, grad, state, h)
    return h.shrink_after * weight, new


@scalar
def proximal_decay(weight: Scalar, h: Hyper) -> Scalar:
    """Return what decay subtracts from a weight, before or after the step."""
    return (type(weight)(1) - h.shrink * h.shrink_after) * weight


def corrected_scales(t: Scalar, h: Hyper, carried: Carried) -> None:
    """Compute the bias corrections; in the first step the gradient difference is 0."""
    h.mean_scale = 1 / (1 - h.beta1**t)
    h.diff_scale = h.beta2 / (1 - h.beta2**t)
    h.var_scale = 1 / (1 - h.beta3**t)
    if t - h.begin_num_update < 2:
        h.differs = 0.0


@register
class Adan(DecoupledFamily):
    r"""Adan: adaptive Nesterov momentum.

    .. math::
        h &= \mathrm{clip}(r g), \qquad d = h - p, \qquad p \leftarrow h \\
        m &\leftarrow \beta_1 m + (1 - \beta_1) h, \qquad
        n \leftarrow \beta_2 n + (1 - \beta_2) d, \qquad
        v \leftarrow \beta_3 v + (1 - \beta_3) (h + \beta_2 d)^2 \\
        w &\leftarrow \frac{1}{1 + \eta \lambda} \left( w - \eta
            \left( \frac{m}{1 - \beta_1^t} + \beta_2 \frac{n}{1 - \beta_2^t} \right)
            \Big/ \left( \sqrt{\frac{v}{1 - \beta_3^t}} + \epsilon \right) \right)

    with :math:`d = 0` in the first update. Without `proximal`, weight decay is applied as in AdamW:
    the weight is multiplied by :math:`1 - \eta \lambda` before the step.

    Source: Xie et al., "Adan: Adaptive Nesterov Momentum Algorithm for Faster Optimizing Deep
    Models", arXiv:2208.06677, following the authors' code; each :math:`\beta` is one minus that of
    the paper. optax.adan has :math:`1 - \beta_2` instead of both factors :math:`\beta_2`.

    State: the tuple :math:`(m, n, v, p)` of arrays in the weight's shape.

    Parameters
    ----------
    learning_rate : float or callable, optional
        Default 0.001; None uses the scheduler's ``base_lr``.
    beta1, beta2, beta3 : float
        Decay rates of :math:`m`, :math:`n` and :math:`v`, at least 0 and below 1. Defaults 0.98,
        0.92, 0.99.
    epsilon : float
        :math:`\epsilon`, at least 0. Default 1e-8.
    proximal : bool
        Apply weight decay by a division after the step. Default True.
    cautious, cautious_decay : bool
        See :class:`~fastopt.optimizer.AdamW`. Default False.
    **common
        Arguments of :class:`~fastopt.optimizer.Optimizer`.

    Raises
    ------
    ValueError
        An argument is NaN or out of range.

    Examples
    --------
    >>> import numpy as np
    >>> import fastopt
    >>> updater = fastopt.Updater(fastopt.Adan(lr=0.1))
    >>> weight = np.ones(2, np.float32)
    >>> updater.step(np.array([1.0, -5.0], np.float32), weight)
    >>> print(weight.round(4))
    [0.9 1.1]
    """

    beta1: float = arg(default=0.98)
    beta2: float = arg(default=0.92)
    beta3: float = arg(default=0.99, check=Real(least=0, below=1))
    proximal: bool = arg(default=True, check=FLAG)
    betas: tuple[float, float, float] = alias(  # type: ignore[assignment]
        "beta1", "beta2", "beta3", default=(0.98, 0.92, 0.99), kw_only=True
    )
    positional = ("learning_rate", "beta1", "beta2", "beta3", "epsilon", "proximal")

    base_rule = adan

    @corrected(corrected_scales, "begin_num_update")
    def hyper(self, t: int, lr: float, wd: float) -> dict[str, float]:
        """See :meth:`Optimizer.hyper <fastopt.optimizer.Optimizer.hyper>`."""
        kept = 1 - self.decay(t, lr, wd)
        before, after = (1.0, kept) if self.proximal else (kept, 1.0)
        return {"shrink": before, "shrink_after": after}

    decay_term = staticmethod(proximal_decay)

    @property
    def rule_traits(self) -> Traits:
        """See :class:`~fastopt.optimizer.Optimizer`."""
        return super().rule_traits._replace(step=undecayed if self.proximal else None)

    def decay(self, t: int, lr: float, wd: float) -> float:
        """See :meth:`Optimizer.decay <fastopt.optimizer.Optimizer.decay>`."""
        return lr * wd / (1 + lr * wd) if self.proximal else lr * wd


MIXED = ("mean_scale", "var_scale", "beta3", "one_minus_beta3", "alpha")


@rule(state=("mean", "slow", "var"), signed=("mean",), hyper=(*MOMENTS, *MIXED))
def ademamix(weight: Scalar, grad: Scalar, state: State, h: Hyper) -> Step:
    """Both means divided by the root of the second moment, with decoupled decay."""
    grad = rescaled(grad, h)
    mean, var = moments(grad, (state[0], state[2]), h)
    slow = h.beta3 * state[1] + h.one_minus_beta3 * grad
    step = (h.mean_scale * mean + h.alpha * slow) / (math.sqrt(var * h.var_scale) + h.epsilon)
    return weight - h.lr * (step + h.wd * weight), (mean, slow, var)


@scalar
def mixed_ratio(grad: Scalar, state: State, h: Hyper) -> Scalar:
    """Return the ratio of stable variants."""
    return over(grad * grad, state[2] * h.var_scale, h)


def scheduled(t: Scalar, h: Hyper, carried: Carried) -> None:
    """Compute the bias corrections, and the factor and decay rate of the slow average."""
    mean_and_var(t, h, carried)
    if t < h.alpha_steps:
        h.alpha = h.alpha * (t / h.alpha_steps)
    if t < h.beta3_steps and h.beta1 > 0 and h.beta3 > 0:
        part = t / h.beta3_steps
        inverse = (1 - part) / math.log(h.beta1) + part / math.log(h.beta3)
        h.beta3 = math.exp(1 / inverse)
        h.one_minus_beta3 = -math.expm1(1 / inverse)


@register
class AdEMAMix(DecoupledFamily):
    r"""AdEMAMix: Adam with a mixture of a fast and a slow moving average of the gradient.

    .. math::
        h &= \mathrm{clip}(r g) \\
        m &\leftarrow \beta_1 m + (1 - \beta_1) h, \qquad
        s \leftarrow b_t s + (1 - b_t) h, \qquad
        v \leftarrow \beta_2 v + (1 - \beta_2) h^2 \\
        w &\leftarrow w - \eta \left( \left( \frac{m}{1 - \beta_1^t} + a_t s \right)
            \Big/ \left( \sqrt{\frac{v}{1 - \beta_2^t}} + \epsilon \right) + \lambda w \right)

    where :math:`a_t = \alpha \min(1, t / T_\alpha)`, and :math:`b_t` goes from :math:`\beta_1` to
    :math:`\beta_3` in :math:`T_\beta` steps such that :math:`1 / \ln b_t` is linear in :math:`t`.
    By default neither is warmed up, like in optax.contrib.ademamix; the paper sets both :math:`T`
    to the total number of steps. If :math:`\beta_1` is 0, :math:`b_t` is not warmed up.

    Source: Pagliardini, Ablin and Grangier, "The AdEMAMix Optimizer: Better, Faster, Older",
    arXiv:2409.03137.

    State: the tuple :math:`(m, s, v)` of arrays in the weight's shape.

    Parameters
    ----------
    learning_rate : float or callable, optional
        Default 0.001; None uses the scheduler's ``base_lr``.
    beta1, beta2, beta3 : float
        Decay rates of :math:`m`, :math:`v` and :math:`s`, at least 0 and below 1. Defaults 0.9,
        0.999, 0.9999.
    alpha : float
        :math:`\alpha`, at least 0. Default 5.
    epsilon : float
        :math:`\epsilon`, at least 0. Default 1e-8.
    alpha_steps, beta3_steps : int
        :math:`T_\alpha` and :math:`T_\beta`, at least 0. Default 0: no warm-up.
    cautious, cautious_decay, stable : bool
        See :class:`~fastopt.optimizer.AdamW`. Default False.
    **common
        Arguments of :class:`~fastopt.optimizer.Optimizer`.

    Raises
    ------
    ValueError
        An argument is NaN or out of range.

    Examples
    --------
    >>> import numpy as np
    >>> import fastopt
    >>> updater = fastopt.Updater(fastopt.AdEMAMix(lr=0.1, beta3=0.99))
    >>> weight = np.ones(2, np.float32)
    >>> updater.step(np.array([1.0, -5.0], np.float32), weight)
    >>> print(weight.round(4))
    [0.895 1.105]
    """

    beta3: float = arg(default=0.9999, check=Real(least=0, below=1))
    alpha: float = arg(default=5.0, check=Real(least=0))
    alpha_steps: int = arg(default=0, check=Integer(least=0))
    beta3_steps: int = arg(default=0, check=Integer(least=0))
    betas: tuple[float, float, float] = alias(  # type: ignore[assignment]
        "beta1", "beta2", "beta3", default=(0.9, 0.999, 0.9999), kw_only=True
    )
    stable: bool = arg(default=False, check=FLAG, kw_only=True, new=True)
    positional = (
        *("learning_rate", "beta1", "beta2", "beta3", "alpha", "epsilon", "alpha_steps"),
        *("beta3_steps",),
    )

    base_rule = ademamix
    stable_ratio = staticmethod(mixed_ratio)

    hyper = corrected(scheduled, "alpha_steps", "beta3_steps")(Optimizer.hyper)


@scalar
def ahead(grad: Scalar, state: State, h: Hyper) -> Scalar:
    """Return the gradient plus a multiple of its change since the last step."""
    grad = rescaled(grad, h)
    return grad + h.gain * (grad - state[2])


def square_ahead(weight: Scalar, grad: Scalar, state: State, h: Hyper) -> State:
    """Return the square of the corrected gradient."""
    grad = ahead(grad, state, h)
    return (grad * grad,)


def norm_ahead(sums: Sums, h: Hyper) -> None:
    """Compute the factor that limits the norm of the corrected gradient to 1."""
    h.shorten = 1.0 / math.sqrt(sums[0]) if sums[0] > 1.0 else 1.0


@rule(
    state=("mean", "var", "previous"),
    signed=("mean",),
    nonnegative=("var",),
    hyper=(*MOMENTS, "mean_scale", "var_scale", "gain", "shorten"),
    passes=((square_ahead, norm_ahead),),
)
def mars(weight: Scalar, grad: Scalar, state: State, h: Hyper) -> Step:
    """AdamW of the corrected gradient, whose norm is at most 1."""
    mean, var = moments(h.shorten * ahead(grad, state, h), (state[0], state[1]), h)
    step = h.mean_scale * mean / (math.sqrt(h.var_scale * var) + h.epsilon)
    return weight - h.lr * (step + h.wd * weight), (mean, var, rescaled(grad, h))


def started(t: Scalar, h: Hyper, carried: Carried) -> None:
    """Compute the bias corrections; in the first step the change of the gradient is 0."""
    mean_and_var(t, h, carried)
    if t - h.begin_num_update < 2:
        h.gain = 0.0


@register
class MARS(DecoupledFamily):
    r"""MARS: AdamW of gradients whose variance is reduced by the gradient of the last step.

    .. math::
        h &= \mathrm{clip}(r g) \\
        c &= h + \gamma \frac{\beta_1}{1 - \beta_1} (h - p), \qquad p \leftarrow h \\
        c &\leftarrow c / \max(1, \|c\|) \\
        m &\leftarrow \beta_1 m + (1 - \beta_1) c, \qquad
        v \leftarrow \beta_2 v + (1 - \beta_2) c^2 \\
        w &\leftarrow w - \eta \left( \frac{m}{1 - \beta_1^t} \Big/
            \left( \sqrt{\frac{v}{1 - \beta_2^t}} + \epsilon \right) + \lambda w \right)

    with :math:`c = h` in the first update of a parameter. This is the approximate form of
    MARS-AdamW: :math:`p` is the gradient of the last batch at the last weights, so one gradient per
    step is enough. The norm is that of the whole tensor, even in a lazy update.

    Source: Yuan et al., "MARS: Unleashing the Power of Variance Reduction for Training Large
    Models", arXiv:2411.10438. The authors' code has :math:`p = 0` in the first update, and by
    default updates vectors with AdamW instead: use a :doc:`group </structures>` for these.

    State: the tuple :math:`(m, v, p)` of arrays in the weight's shape.

    Parameters
    ----------
    learning_rate : float or callable, optional
        Default 0.003; None uses the scheduler's ``base_lr``.
    beta1, beta2 : float
        Decay rates of :math:`m` and :math:`v`, at least 0 and below 1. Defaults 0.95, 0.99.
    epsilon : float
        :math:`\epsilon`, at least 0. Default 1e-8.
    gamma : float
        Strength of the correction :math:`\gamma`, at least 0; with 0 it is AdamW with a clip of
        the norm of each tensor. Default 0.025.
    cautious, cautious_decay : bool
        See :class:`~fastopt.optimizer.AdamW`. Default False.
    **common
        Arguments of :class:`~fastopt.optimizer.Optimizer`.

    Raises
    ------
    ValueError
        An argument is NaN or out of range.

    Examples
    --------
    >>> import numpy as np
    >>> import fastopt
    >>> updater = fastopt.Updater(fastopt.MARS(lr=0.1))
    >>> weight = np.ones(2)
    >>> for gradient in ([0.3, -0.4], [0.1, -0.4]):
    ...     updater.step(np.array(gradient), weight)
    >>> weight.round(4)
    array([0.8297, 1.2   ])
    """

    learning_rate: RateAttribute = arg(default=0.003)
    beta1: float = arg(default=0.95)
    beta2: float = arg(default=0.99)
    gamma: float = arg(default=0.025, check=Real(least=0))

    base_rule = mars

    @corrected(started, "begin_num_update")
    def hyper(self, t: int, lr: float, wd: float) -> dict[str, float]:
        """See :meth:`Optimizer.hyper <fastopt.optimizer.Optimizer.hyper>`."""
        return {"gain": self.gamma * self.beta1 / (1 - self.beta1)}


DECAYS = ("gamma1", "gamma2", "gamma3")
MEASURED = ("bound", "shorten", "norm_scale")
"""Hyper-parameters that the reductions compute."""


@scalar
def limited(grad: Scalar, h: Hyper) -> Scalar:
    """Return the gradient, scaled down if it is larger than the bound."""
    grad = rescaled(grad, h)
    return grad * h.shorten if abs(grad) > h.bound else grad


def size(weight: Scalar, grad: Scalar, state: State, h: Hyper) -> State:
    """Return the size of the gradient."""
    return (abs(rescaled(grad, h)),)


def peak(sums: Sums, h: Hyper, kept: State) -> State:
    """Update the average of the largest size, and compute the bound."""
    average = h.gamma3 * kept[0] + (1 - h.gamma3) * sums[0]
    h.bound = average * h.peak_scale
    h.shorten = h.bound / sums[0] if sums[0] > 0 else 1.0
    return average, kept[1], kept[2]


def square_limited(weight: Scalar, grad: Scalar, state: State, h: Hyper) -> State:
    """Return the square of the limited gradient."""
    grad = limited(grad, h)
    return (grad * grad,)


def norm_limited(sums: Sums, h: Hyper, kept: State) -> State:
    """Update the averages of norm and squared norm, and compute the scale of the gradient."""
    length = math.sqrt(sums[0])
    mean = h.gamma1 * kept[1] + (1 - h.gamma1) * length
    var = h.gamma2 * kept[2] + (1 - h.gamma2) * sums[0]
    target = mean * h.length_scale / (math.sqrt(var * h.square_scale) + h.epsilon)
    h.norm_scale = target / length if length > 0 else 1.0
    return kept[0], mean, var


@rule(
    **MEAN_AND_VAR,
    hyper=(
        *(*MOMENTS, "mean_scale", "var_scale", *DECAYS, *MEASURED),
        *("peak_scale", "length_scale", "square_scale"),
    ),
    passes=((size, peak, max), (square_limited, norm_limited)),
    kept=("peak", "length", "square"),
)
def stable_spam(weight: Scalar, grad: Scalar, state: State, h: Hyper) -> Step:
    """AdamW of the limited and normalized gradient."""
    mean, var = moments(h.norm_scale * limited(grad, h), state, h)
    step = h.mean_scale * mean / (math.sqrt(h.var_scale * var) + h.epsilon)
    return weight - h.lr * (step + h.wd * weight), (mean, var)


def restarted(t: Scalar, h: Hyper, carried: Carried) -> None:
    """Compute all bias corrections; moments restart every ``reset_interval`` steps."""
    h.peak_scale = 1 / (1 - h.gamma3**t)
    h.length_scale = 1 / (1 - h.gamma1**t)
    h.square_scale = 1 / (1 - h.gamma2**t)
    since = t
    if h.reset_interval > 0 and t >= h.reset_interval:
        since = t % h.reset_interval + 1
    mean_and_var(since, h, carried)
    if since < t and since < 2:
        h.beta1, h.beta2 = 0.0, 0.0


@register
class StableSPAM(DecoupledFamily):
    r"""StableSPAM: AdamW that is insensitive to spikes of the gradient.

    .. math::
        h &= \mathrm{clip}(r g), \qquad s = \max_i |h_i| \\
        \theta &\leftarrow \gamma_3 \theta + (1 - \gamma_3) s, \qquad
        \hat\theta = \frac{\theta}{1 - \gamma_3^t}, \qquad
        c_i = \begin{cases} h_i \hat\theta / s & |h_i| > \hat\theta \\ h_i \end{cases} \\
        a &\leftarrow \gamma_1 a + (1 - \gamma_1) \|c\|, \qquad
        b \leftarrow \gamma_2 b + (1 - \gamma_2) \|c\|^2 \\
        u &= \frac{c}{\|c\|} \cdot \frac{a}{1 - \gamma_1^t} \Big/
            \left( \sqrt{\frac{b}{1 - \gamma_2^t}} + \epsilon \right) \\
        m &\leftarrow \beta_1 m + (1 - \beta_1) u, \qquad
        v \leftarrow \beta_2 v + (1 - \beta_2) u^2 \\
        w &\leftarrow w - \eta \left( \frac{m}{1 - \beta_1^\tau} \Big/
            \left( \sqrt{\frac{v}{1 - \beta_2^\tau}} + \epsilon \right) + \lambda w \right)

    with three numbers :math:`\theta`, :math:`a` and :math:`b` for each tensor. Every
    `reset_interval` updates the moments restart: :math:`m` and :math:`v` are 0 before the update,
    and :math:`\tau` is 1; before the first restart :math:`\tau = t`. The maximum and the norm are
    those of the whole tensor, even in a lazy update.

    Source: Huang et al., "Stable-SPAM: How to Train in 4-Bit More Stably than 16-Bit Adam",
    arXiv:2502.17055. In the authors' code a restart also resets :math:`t` in the corrections of
    :math:`\theta`, :math:`a` and :math:`b`, although these do not restart; and the step of the
    restart itself still has the old :math:`m` and :math:`v`, with :math:`\tau = 1`, while the next
    one has :math:`m = v = 0` before it, with :math:`\tau = 2`.

    A gradient that is not finite makes the weight, its moments and these averages NaN, like the
    elements of Adam's. A loss scaler or `clip_global_norm` of the updater skips such steps.

    State: the tuple :math:`(m, v, \theta, a, b)` of two arrays in the weight's shape and three
    zero-dimensional arrays.

    Parameters
    ----------
    learning_rate : float or callable, optional
        Default 0.001; None uses the scheduler's ``base_lr``.
    beta1, beta2 : float
        Decay rates of :math:`m` and :math:`v`, at least 0 and below 1. Defaults 0.9, 0.999.
    epsilon : float
        :math:`\epsilon`, at least 0. Default 1e-8.
    gamma1, gamma2, gamma3 : float
        Decay rates of :math:`a`, :math:`b` and :math:`\theta`, at least 0 and below 1. Defaults
        0.7, 0.9, 0.999.
    reset_interval : int
        Updates from one restart of the moments to the next; 0 for none. Default 1000.
    cautious, cautious_decay : bool
        See :class:`~fastopt.optimizer.AdamW`. Default False.
    **common
        Arguments of :class:`~fastopt.optimizer.Optimizer`.

    Raises
    ------
    ValueError
        An argument is NaN or out of range.

    Examples
    --------
    >>> import numpy as np
    >>> import fastopt
    >>> updater = fastopt.Updater(fastopt.StableSPAM(lr=0.1))
    >>> weight = np.ones(2)
    >>> for gradient in ([1.0, -1.0], [1.0, -1000.0]):
    ...     updater.step(np.array(gradient), weight)
    >>> weight.round(4)
    array([0.8328, 1.2001])
    """

    gamma1: float = arg(default=0.7, check=Real(least=0, below=1))
    gamma2: float = arg(default=0.9, check=Real(least=0, below=1))
    gamma3: float = arg(default=0.999, check=Real(least=0, below=1))
    reset_interval: int = arg(default=1000, check=Integer(least=0))

    base_rule = stable_spam

    hyper = corrected(restarted, "reset_interval")(Optimizer.hyper)


def norm(sums: Sums, h: Hyper, kept: State) -> State:
    """Update the average of squared norms, and compute the inverse of its root."""
    var = h.beta2 * kept[0] + h.one_minus_beta2 * sums[0]
    h.inverse = 1 / (math.sqrt(var) + h.epsilon)
    return (var,)


@scalar
def normalized(weight: Scalar, grad: Scalar, h: Hyper) -> Scalar:
    """Return the gradient divided by the root of the second moment, plus decay."""
    return h.inverse * rescaled(grad, h) + h.wd * weight


@rule(
    state=("mom",),
    signed=("mom",),
    hyper=(*MOMENTS, "inverse"),
    passes=((squared, norm),),
    kept=("var",),
)
def novograd(weight: Scalar, grad: Scalar, state: State, h: Hyper) -> Step:
    """Momentum of normalized gradients plus decay."""
    mom = h.beta1 * state[0] + normalized(weight, grad, h)
    return weight - h.lr * mom, (mom,)


def started_norm(t: Scalar, h: Hyper, carried: Carried) -> None:
    """Initialize the average with the first squared norm."""
    if t - h.begin_num_update < 2:
        h.beta2, h.one_minus_beta2 = 0.0, 1.0


@register
class NovoGrad(AdamFamily):
    r"""NovoGrad: momentum of gradients that are normalized per tensor.

    .. math::
        h &= \mathrm{clip}(r g) \\
        v &\leftarrow \beta_2 v + (1 - \beta_2) \|h\|^2 \\
        m &\leftarrow \beta_1 m + \frac{h}{\sqrt{v} + \epsilon} + \lambda w \\
        w &\leftarrow w - \eta m

    with one number :math:`v` for each tensor, which the first update sets to :math:`\|h\|^2`. The
    norm is that of the whole gradient, even in a lazy update. It is summed in float64, in an order
    that does not depend on the number of threads.

    Source: Ginsburg et al., "Stochastic Gradient Methods with Layer-wise Adaptive Moments for
    Training of Deep Networks", arXiv:1905.11286.

    State: the tuple :math:`(m, v)` of an array in the weight's shape and a zero-dimensional array.

    Parameters
    ----------
    learning_rate : float or callable, optional
        Default 0.01; None uses the scheduler's ``base_lr``.
    beta1, beta2 : float
        Decay rates of :math:`m` and :math:`v`, at least 0 and below 1. Defaults 0.95, 0.98.
    epsilon : float
        :math:`\epsilon`, at least 0. Default 1e-8.
    cautious : bool
        Update only elements whose step has the sign of the gradient including weight decay, see
        :class:`~fastopt.optimizer.AdamW`. Default False.
    **common
        Arguments of :class:`~fastopt.optimizer.Optimizer`.

    Raises
    ------
    ValueError
        An argument is NaN or out of range.

    Examples
    --------
    >>> import numpy as np
    >>> import fastopt
    >>> updater = fastopt.Updater(fastopt.NovoGrad(lr=0.1))
    >>> weight = np.ones(2)
    >>> updater.step({"w": np.array([3.0, -4.0])}, {"w": weight})
    >>> print(weight.round(4), updater.states["w"][1])
    [0.94 1.08] 25.0
    """

    base_rule = novograd

    cautious: bool = arg(default=False, check=FLAG, kw_only=True, new=True)
    learning_rate: RateAttribute = arg(default=0.01)
    beta1: float = arg(default=0.95)
    beta2: float = arg(default=0.98)

    averaged_gradient = staticmethod(normalized)

    hyper = corrected(started_norm, "begin_num_update")(Optimizer.hyper)
