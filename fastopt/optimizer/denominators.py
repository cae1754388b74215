"""Adam with other denominators."""

import math

from fastopt.arguments import FLAG, Real, alias, arg
from fastopt.kernels.rule import Carried, Hyper, Scalar, State, Step, rule, scalar
from fastopt.kernels.scalars import clip, clipped_decayed, decayed, moments, rescaled, sign
from fastopt.optimizer.families import (
    MEAN_AND_VAR,
    MOMENTS,
    AdamFamily,
    DecoupledFamily,
    mean_and_var,
    scaled_ratio,
)
from fastopt.optimizer.optimizer import Optimizer, RateAttribute, corrected, register


@rule(
    state=("mean", "norm"),
    signed=("mean",),
    nonnegative=("norm",),
    hyper=tuple(f for f in MOMENTS if f != "one_minus_beta2"),
)
def adamax(weight: Scalar, grad: Scalar, state: State, h: Hyper) -> Step:
    """Mean gradient divided by its decaying maximum; no step where the maximum is 0."""
    mean, norm = state
    grad = clipped_decayed(weight, grad, h)
    mean = h.beta1 * mean + h.one_minus_beta1 * grad
    norm = h.beta2 * norm
    size = abs(grad) + h.epsilon
    if not size <= norm:
        norm = size
    if not norm:
        return weight, (mean, norm)
    return weight - h.lr * mean / norm, (mean, norm)


def corrected_rate(t: Scalar, h: Hyper, carried: Carried) -> None:
    """Fold the bias correction of the first moment into the learning rate."""
    h.lr = h.lr / (1 - h.beta1**t)


@register
class Adamax(AdamFamily):
    r"""AdaMax: Adam in the infinity norm.

    .. math::
        h &= \mathrm{clip}(r g + \lambda w) \\
        m &\leftarrow \beta_1 m + (1 - \beta_1) h \\
        u &\leftarrow \max(\beta_2 u, |h| + \epsilon) \\
        w &\leftarrow w - \frac{\eta}{1 - \beta_1^t} \frac{m}{u}

    An element with :math:`u = 0` does not change. Source: Kingma and Ba, "Adam: A Method for
    Stochastic Optimization", arXiv:1412.6980, section 7.

    State: the tuple :math:`(m, u)` of arrays in the weight's shape.

    Parameters
    ----------
    learning_rate : float or callable, optional
        Default 0.002; None uses the scheduler's ``base_lr``.
    beta1, beta2 : float
        Decay rates of :math:`m` and :math:`u`, at least 0 and below 1. Defaults 0.9, 0.999.
    epsilon : float
        :math:`\epsilon`, at least 0. Default 0, as in the paper and MXNet; torch has 1e-8.
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
    >>> updater = fastopt.Updater(fastopt.Adamax(lr=0.1))
    >>> weight = np.ones(3)
    >>> updater.step(np.array([1.0, -5.0, 0.0]), weight)
    >>> weight
    array([0.9, 1.1, 1. ])
    """

    base_rule = adamax

    epsilon: float = arg(default=0.0, check=Real(least=0), kw_only=True)
    eps: float = alias("epsilon", default=0.0, kw_only=True)
    cautious: bool = arg(default=False, check=FLAG, kw_only=True, new=True)
    learning_rate: RateAttribute = arg(default=0.002)

    averaged_gradient = staticmethod(clipped_decayed)

    hyper = corrected(corrected_rate)(Optimizer.hyper)


@rule(**MEAN_AND_VAR, hyper=(*MOMENTS, "mean_scale", "rectified"))
def radam(weight: Scalar, grad: Scalar, state: State, h: Hyper) -> Step:
    """Adam's step times ``rectified``, or the mean gradient while ``rectified`` is 0."""
    mean, var = moments(rescaled(grad, h), state, h)
    step = mean * h.mean_scale
    if h.rectified:
        step = step * (h.rectified / (math.sqrt(var) + h.epsilon))
    return weight - h.lr * (step + h.wd * weight), (mean, var)


def rectified(t: Scalar, h: Hyper, carried: Carried) -> None:
    """Compute the bias correction, and the rectification if it is defined."""
    var = 1 - h.beta2**t
    limit = 2 / (1 - h.beta2) - 1
    length = limit - 2 * t * (1 - var) / var
    h.rectified = 0.0
    if length > h.threshold:
        grown = (length - 4) * (length - 2) / length
        h.rectified = math.sqrt(grown * limit / ((limit - 4) * (limit - 2)) * var)
    h.mean_scale = 1 / (1 - h.beta1**t)
    h.var_scale = 1 / var


@scalar
def rectified_ratio(grad: Scalar, state: State, h: Hyper) -> Scalar:
    """Return the ratio of stable variants, 1 while the step is not divided by the root."""
    return scaled_ratio(grad, state, h) if h.rectified else type(grad)(1)


@register
class RAdam(DecoupledFamily):
    r"""RAdam: Adam that uses its second moment only once its variance is tractable.

    .. math::
        h &= \mathrm{clip}(r g) \\
        m &\leftarrow \beta_1 m + (1 - \beta_1) h, \qquad
        v \leftarrow \beta_2 v + (1 - \beta_2) h^2 \\
        \rho_\infty &= \frac{2}{1 - \beta_2} - 1, \qquad
        \rho_t = \rho_\infty - \frac{2 t \beta_2^t}{1 - \beta_2^t} \\
        l_t &= \begin{cases}
            \sqrt{\dfrac{(\rho_t - 4)(\rho_t - 2) \rho_\infty}
                        {(\rho_\infty - 4)(\rho_\infty - 2) \rho_t}}
            \dfrac{\sqrt{1 - \beta_2^t}}{\sqrt{v} + \epsilon} & \rho_t > \rho_0 \\
            1 & \text{otherwise}
        \end{cases} \\
        w &\leftarrow w - \eta \left( \frac{m}{1 - \beta_1^t} l_t + \lambda w \right)

    with :math:`\rho_0` = `threshold`. Weight decay is decoupled. The
    paper has a threshold of 4, torch.optim.RAdam and optax.radam of 5.

    Source: Liu et al., "On the Variance of the Adaptive Learning Rate
    and Beyond", arXiv:1908.03265.

    State: the tuple :math:`(m, v)` of arrays in the weight's shape.

    Parameters
    ----------
    learning_rate : float or callable, optional
        Default 0.001; None uses the scheduler's ``base_lr``.
    beta1, beta2 : float
        Decay rates of :math:`m` and :math:`v`, at least 0 and below 1. Defaults 0.9, 0.999.
    epsilon : float
        :math:`\epsilon`, at least 0. Default 1e-8.
    cautious, cautious_decay : bool
        See :class:`~fastopt.optimizer.AdamW`. Default False.
    threshold : float
        :math:`\rho_0`, at least 4. Default 4.
    stable : bool
        See :class:`~fastopt.optimizer.AdamW`; no effect while :math:`l_t = 1`. Default False.
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
    >>> updater = fastopt.Updater(fastopt.RAdam(lr=0.1))
    >>> weight = np.ones(2)
    >>> updater.step(np.array([1.0, -5.0]), weight)
    >>> weight.round(6)
    array([0.9, 1.5])

    With torch's threshold, from which on steps are divided by the root:

    >>> updater = fastopt.Updater(fastopt.RAdam(lr=0.1, threshold=5.0))
    >>> weight = np.ones(2)
    >>> for _ in range(6):
    ...     updater.step(np.array([1.0, -5.0]), weight)
    >>> weight.round(4)
    array([0.4974, 3.5026])
    """

    threshold: float = arg(default=4.0, check=Real(least=4), kw_only=True, new=True)
    stable: bool = arg(default=False, check=FLAG, kw_only=True, new=True)

    base_rule = radam
    stable_ratio = staticmethod(rectified_ratio)
    stable_ratio_fields = ("var_scale",)

    hyper = corrected(rectified, "var_scale", "threshold")(Optimizer.hyper)


@rule(state=("mean", "var"), signed=("mean",), hyper=(*MOMENTS, "mean_scale", "var_scale"))
def adabelief(weight: Scalar, grad: Scalar, state: State, h: Hyper) -> Step:
    """Mean gradient divided by the root of the mean squared deviation from it."""
    mean, var = state
    grad = rescaled(grad, h)
    mean = h.beta1 * mean + h.one_minus_beta1 * grad
    surprise = grad - mean
    var = h.beta2 * var + h.one_minus_beta2 * surprise * surprise + h.epsilon
    step = mean * h.mean_scale / (math.sqrt(var * h.var_scale) + h.epsilon) + h.wd * weight
    return weight - h.lr * step, (mean, var)


@register
class AdaBelief(DecoupledFamily):
    r"""AdaBelief: Adam that divides by the deviation of the gradient from its moving average.

    .. math::
        h &= \mathrm{clip}(r g) \\
        m &\leftarrow \beta_1 m + (1 - \beta_1) h \\
        s &\leftarrow \beta_2 s + (1 - \beta_2) (h - m)^2 + \epsilon \\
        w &\leftarrow w - \eta \left( \frac{\hat m}{\sqrt{\hat s} + \epsilon} + \lambda w \right)

    with :math:`\hat m = m / (1 - \beta_1^t)` and :math:`\hat s = s / (1 - \beta_2^t)`. Weight decay
    is decoupled. Source: Zhuang et al., "AdaBelief Optimizer: Adapting Stepsizes by the Belief in
    Observed Gradients", arXiv:2010.07468.

    State: the tuple :math:`(m, s)` of arrays in the weight's shape.

    Parameters
    ----------
    learning_rate : float or callable, optional
        Default 0.001; None uses the scheduler's ``base_lr``.
    beta1, beta2 : float
        Decay rates of :math:`m` and :math:`s`, at least 0 and below 1. Defaults 0.9, 0.999.
    epsilon : float
        :math:`\epsilon`, at least 0. Default 1e-8; the authors have
        1e-16, which is another optimizer where gradients are small: :math:`\epsilon` is added to
        :math:`s` in every step.
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
    >>> updater = fastopt.Updater(fastopt.AdaBelief(lr=0.09))
    >>> weight = np.ones(2)
    >>> updater.step(np.array([1.0, -5.0]), weight)
    >>> weight.round(4)
    array([0.9, 1.1])
    """

    base_rule = adabelief

    hyper = corrected(mean_and_var)(Optimizer.hyper)


@rule(state=("mean", "var"), hyper=(*MOMENTS, "mean_scale", "var_scale"))
def yogi(weight: Scalar, grad: Scalar, state: State, h: Hyper) -> Step:
    """Adam whose second moment changes by at most a fraction of the squared gradient."""
    mean, var = state
    grad = decayed(weight, grad, h)
    square = grad * grad
    mean = h.beta1 * mean + h.one_minus_beta1 * grad
    var = var - h.one_minus_beta2 * sign(var - square) * square
    root = math.sqrt(var * h.var_scale) + h.epsilon
    return weight - h.lr * (mean * h.mean_scale) / root, (mean, var)


@register
class Yogi(AdamFamily):
    r"""Yogi: Adam with an additive update of the second moment, which limits how fast it changes.

    .. math::
        h &= \mathrm{clip}(r g) + \lambda w \\
        m &\leftarrow \beta_1 m + (1 - \beta_1) h \\
        v &\leftarrow v - (1 - \beta_2)\, \mathrm{sign}(v - h^2)\, h^2 \\
        w &\leftarrow w - \eta \frac{m}{1 - \beta_1^t}
            \Big/ \left( \sqrt{\frac{v}{1 - \beta_2^t}} + \epsilon \right)

    Source: Zaheer et al., "Adaptive Methods for Nonconvex Optimization", NeurIPS 2018, with the
    bias correction and the initial values of optax.yogi.

    State: the tuple :math:`(m, v)` of arrays in the weight's shape, filled with `initial_value`
    initially.

    Parameters
    ----------
    learning_rate : float or callable, optional
        Default 0.001; None uses the scheduler's ``base_lr``. The paper has 0.01.
    beta1, beta2 : float
        Decay rates of :math:`m` and :math:`v`, at least 0 and below 1. Defaults 0.9, 0.999.
    epsilon : float
        :math:`\epsilon`, at least 0. Default 0.001.
    initial_value : float
        Initial value of :math:`m` and :math:`v`, at least 0. Default 1e-6.
    cautious : bool
        Update only elements whose step has the sign of the gradient including weight decay, see
        :class:`~fastopt.optimizer.AdamW`. Default False.
    stable : bool
        Bound the root mean square of the tensor's step, see :class:`~fastopt.optimizer.AdamW`.
        Default False.
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
    >>> updater = fastopt.Updater(fastopt.Yogi(lr=0.1))
    >>> weight = np.ones(2, np.float32)
    >>> updater.step(np.array([1.0, -5.0], np.float32), weight)
    >>> print(weight.round(4))
    [0.9001 1.1   ]
    """

    base_rule = yogi
    epsilon: float = arg(default=0.001)
    initial_value: float = arg(default=1e-06, check=Real(least=0))
    cautious: bool = arg(default=False, check=FLAG, kw_only=True, new=True)
    stable: bool = arg(default=False, check=FLAG, kw_only=True, new=True)
    stable_ratio = staticmethod(scaled_ratio)

    hyper = corrected(mean_and_var)(Optimizer.hyper)

    @property
    def initial_state(self) -> float:
        """See :attr:`Optimizer.initial_state <fastopt.optimizer.Optimizer.initial_state>`."""
        return self.initial_value


@rule(state=("mean", "var"), signed=("mean",), hyper=(*MOMENTS, "mean_scale", "var_scale"))
def laprop(weight: Scalar, grad: Scalar, state: State, h: Hyper) -> Step:
    """Mean of gradients divided by the root of the second moment, with decoupled decay."""
    mean, var = state
    grad = rescaled(grad, h)
    var = h.beta2 * var + h.one_minus_beta2 * grad * grad
    mean = h.beta1 * mean + h.one_minus_beta1 * (grad / (math.sqrt(var * h.var_scale) + h.epsilon))
    return weight - h.lr * (h.mean_scale * mean + h.wd * weight), (mean, var)


@register
class LaProp(DecoupledFamily):
    r"""LaProp: Adam that normalizes gradients before it averages them.

    .. math::
        h &= \mathrm{clip}(r g) \\
        v &\leftarrow \beta_2 v + (1 - \beta_2) h^2 \\
        m &\leftarrow \beta_1 m + (1 - \beta_1)\, h
            \Big/ \left( \sqrt{\frac{v}{1 - \beta_2^t}} + \epsilon \right) \\
        w &\leftarrow w - \eta \left( \frac{m}{1 - \beta_1^t} + \lambda w \right)

    A large gradient cannot enlarge later steps, so that the step stays bounded for any
    :math:`\beta_1` and :math:`\beta_2`. Weight decay is decoupled.

    Source: Ziyin, Wang and Ueda, "LaProp: Separating Momentum and Adaptivity in Adam",
    arXiv:2002.04839. The authors' code agrees for a constant learning rate; under a schedule it
    averages :math:`\eta` with the gradients, and it subtracts :math:`\lambda w` after the step.

    State: the tuple :math:`(m, v)` of arrays in the weight's shape.

    Parameters
    ----------
    learning_rate : float or callable, optional
        Default 0.0004; None uses the scheduler's ``base_lr``.
    beta1, beta2 : float
        Decay rates of :math:`m` and :math:`v`, at least 0 and below 1. Defaults 0.9, 0.999.
    epsilon : float
        :math:`\epsilon`, at least 0. Default 1e-15.
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
    >>> updater = fastopt.Updater(fastopt.LaProp(lr=0.1))
    >>> weight = np.ones(2)
    >>> for gradient in ([1.0, -5.0], [0.0, 5.0]):
    ...     updater.step(np.array(gradient), weight)
    >>> weight.round(4)
    array([0.8526, 1.0947])
    """

    base_rule = laprop

    learning_rate: RateAttribute = arg(default=0.0004)
    epsilon: float = arg(default=1e-15)

    hyper = corrected(mean_and_var)(Optimizer.hyper)


@rule(state=("mean", "var"), signed=("mean",), hyper=(*MOMENTS, "largest"))
def adopt(weight: Scalar, grad: Scalar, state: State, h: Hyper) -> Step:
    """Mean of normalized, clipped gradients; the second moment is updated last."""
    mean, var = state
    grad, root = rescaled(grad, h), math.sqrt(var)
    if root < h.epsilon:
        root = h.epsilon
    mean = h.beta1 * mean + h.one_minus_beta1 * clip(grad / root, h.largest)
    var = h.beta2 * var + h.one_minus_beta2 * grad * grad
    return weight - h.lr * (mean + h.wd * weight), (mean, var)


def scheduled(t: Scalar, h: Hyper, carried: Carried) -> None:
    """Compute the bound of this step; the first step only initializes the second moment."""
    past = t - 1 - h.begin_num_update
    if past < 1:
        h.lr, h.largest = 0.0, 0.0
        h.beta2, h.one_minus_beta2 = 0.0, 1.0
    else:
        h.largest = past**0.25 if h.clips != 0 else math.inf


@register
class ADOPT(DecoupledFamily):
    r"""ADOPT: Adam that converges with any :math:`\beta_2`.

    .. math::
        h &= \mathrm{clip}(r g) \\
        m &\leftarrow \beta_1 m + (1 - \beta_1) \max \left( -c_t, \min \left( c_t,
            \frac{h}{\max(\sqrt{v}, \epsilon)} \right) \right) \\
        w &\leftarrow w - \eta (m + \lambda w) \\
        v &\leftarrow \beta_2 v + (1 - \beta_2) h^2

    with :math:`c_t = (t - 1)^{1/4}`. The first update only sets :math:`v = h^2`. Rows that a lazy
    update first touches in a later step have :math:`v = 0` there, so the bound applies.

    Source: Taniguchi et al., "ADOPT: Modified Adam Can Converge with Any :math:`\beta_2` with the
    Optimal Rate", arXiv:2411.02853, with the bound from the authors' code.

    State: the tuple :math:`(m, v)` of arrays in the weight's shape.

    Parameters
    ----------
    learning_rate : float or callable, optional
        Default 0.001; None uses the scheduler's ``base_lr``.
    beta1, beta2 : float
        Decay rates of :math:`m` and :math:`v`, at least 0 and below 1. Defaults 0.9, 0.9999.
    epsilon : float
        :math:`\epsilon`, at least 0. Default 1e-6.
    clips : bool
        Bound normalized gradients by :math:`c_t`. Default True.
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
    >>> updater = fastopt.Updater(fastopt.ADOPT(lr=0.1))
    >>> weight = np.ones(2, np.float32)
    >>> for _ in range(2):
    ...     updater.step(np.array([1.0, -5.0], np.float32), weight)
    >>> print(weight.round(4))
    [0.99 1.01]
    """

    beta2: float = arg(default=0.9999)
    epsilon: float = arg(default=1e-06)
    clips: bool = arg(default=True, check=FLAG)

    base_rule = adopt

    hyper = corrected(scheduled, "clips", "begin_num_update")(Optimizer.hyper)

    def decay(self, t: int, lr: float, wd: float) -> float:
        """See :meth:`Optimizer.decay <fastopt.optimizer.Optimizer.decay>`."""
        return lr * wd if t > self.begin_num_update + 1 else 0.0


ANGLED = tuple(field for field in MOMENTS if field != "epsilon")

LOW, HIGH = 0.66, 1 + math.sqrt(2)
"""Bounds of the ranges of y / x in the argument reduction of the arctangent."""

P0, P1, P2 = -8.750608600031904122785e-1, -1.615753718733365076637e1, -7.500855792314704667340e1
P3, P4 = -1.228866684490136173410e2, -6.485021904942025371773e1
Q0, Q1, Q2 = 2.485846490142306297962e1, 1.650270098316988542046e2, 4.328810604912902668951e2
Q3, Q4 = 4.853903996359136964868e2, 1.945506571482613964425e2
"""Coefficients of the arctangent in the Cephes library."""


@scalar
def angle(y: Scalar, x: Scalar) -> Scalar:
    """Return ``math.atan2(y, x)`` for x >= 0, in a form that compilers can vectorize."""
    real, size = type(y), abs(y)
    top, bottom, first = size, x, real(0)
    if size > real(HIGH) * x:
        top, bottom, first = -x, size, real(math.pi / 2)
    elif size > real(LOW) * x:
        top, bottom, first = size - x, size + x, real(math.pi / 4)
    if bottom == real(0):
        bottom = real(1)
    r = top / bottom
    z = r * r
    over = (((real(P0) * z + real(P1)) * z + real(P2)) * z + real(P3)) * z + real(P4)
    under = ((((z + real(Q0)) * z + real(Q1)) * z + real(Q2)) * z + real(Q3)) * z + real(Q4)
    result = first + (r + r * (z * over / under))
    return -result if y < real(0) else result


@rule(**MEAN_AND_VAR, hyper=(*ANGLED, "mean_scale", "var_scale", "a"))
def adam_atan2(weight: Scalar, grad: Scalar, state: State, h: Hyper) -> Step:
    """Arctangent of the ratio of the moments, with decoupled decay."""
    mean, var = moments(rescaled(grad, h), state, h)
    step = h.a * angle(mean * h.mean_scale, math.sqrt(var * h.var_scale))
    return weight - h.lr * (step + h.wd * weight), (mean, var)


def mean_and_angle(t: Scalar, h: Hyper, carried: Carried) -> None:
    """Compute the bias corrections of both moments; the second also includes b squared."""
    mean_and_var(t, h, carried)
    h.var_scale = h.var_scale * h.b * h.b


@register
class AdamAtan2(DecoupledFamily):
    r"""AdamAtan2: Adam with an arctangent instead of a division, so that no epsilon is needed.

    .. math::
        h &= \mathrm{clip}(r g) \\
        m &\leftarrow \beta_1 m + (1 - \beta_1) h, \qquad
        v \leftarrow \beta_2 v + (1 - \beta_2) h^2 \\
        w &\leftarrow w - \eta \left( a\, \mathrm{atan2} \left( \frac{m}{1 - \beta_1^t},\;
            b \sqrt{\frac{v}{1 - \beta_2^t}} \right) + \lambda w \right)

    The step does not depend on the scale of the gradients, and is at most :math:`\eta a \pi / 2`
    without decay. Source: Everett et al., "Scaling Exponents Across Parameterizations and
    Optimizers", arXiv:2407.05872.

    State: the tuple :math:`(m, v)` of arrays in the weight's shape.

    Parameters
    ----------
    learning_rate : float or callable, optional
        Default 0.001; None uses the scheduler's ``base_lr``. The package adam-atan2-pytorch has
        1e-4.
    beta1, beta2 : float
        Decay rates of :math:`m` and :math:`v`, at least 0 and below 1. Defaults 0.9, 0.999;
        the package has a `beta2` of 0.99.
    a, b : float
        :math:`a` and :math:`b`, at least 0. Defaults 1.27, which turns a ratio of 1 into a step of
        nearly 1, and 1.
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
    >>> updater = fastopt.Updater(fastopt.AdamAtan2(lr=0.1))
    >>> weight = np.ones(2, np.float32)
    >>> updater.step(np.array([1.0, -5.0], np.float32), weight)
    >>> print(weight.round(4))
    [0.9003 1.0997]
    """

    epsilon: float = arg(default=0.0, init=False)
    eps: float = alias("epsilon", default=0.0, kw_only=True, init=False)
    a: float = arg(default=1.27, check=Real(least=0))
    b: float = arg(default=1.0, check=Real(least=0))

    base_rule = adam_atan2

    hyper = corrected(mean_and_angle, "b")(Optimizer.hyper)
