"""Prodigy and DAdaptAdam: learning rates estimated from the distance to a solution."""

import math
from collections.abc import Sequence
from operator import attrgetter

from fastopt.arguments import FLAG, OrNone, Real, arg, kept
from fastopt.kernels.rule import Carried, Hyper, Scalar, State, Step, Sums, rule, scalar
from fastopt.kernels.scalars import rescaled
from fastopt.kernels.variants import shrunk_by
from fastopt.optimizer.jointsums import DistanceFamily, EstimateOf
from fastopt.optimizer.optimizer import corrected, register
from fastopt.optimizer.schedulefree import (
    FREE,
    FREE_STEP,
    ScheduleFreeFamily,
    averaged,
    interpolated,
)


@scalar
def with_decay(weight: Scalar, grad: Scalar, h: Hyper) -> Scalar:
    """Return the rescaled and clipped gradient plus coupled decay."""
    return rescaled(grad, h) + h.coupled * weight


def of_tensor(sums: Sums, h: Hyper, kept: State) -> State:
    """Return the tensor's terms in the numerator and the denominator of the estimate."""
    return h.progress_rate * sums[0], h.counts * sums[1]


class EstimatedAdam(DistanceFamily):
    """Abstract base of Adam with an estimated distance, decoupled or coupled decay, and variants.

    Parameters
    ----------
    learning_rate, beta1, beta2, epsilon, d0, growth_rate
        See :class:`DistanceFamily`.
    decouple : bool
        Use decoupled weight decay.
    **common
        Arguments of :class:`~fastopt.optimizer.Optimizer`, `cautious` and `cautious_decay`.

    Raises
    ------
    ValueError
        An argument is NaN, out of range, or incompatible with the others.
    """

    decouple: bool = arg(default=False, check=FLAG)
    cautious: bool = arg(default=False, check=FLAG, kw_only=True, new=True)
    cautious_decay: bool = arg(default=False, check=FLAG, kw_only=True, new=True)

    def check_together(self) -> None:
        """See :meth:`Optimizer.check_together <fastopt.optimizer.Optimizer.check_together>`."""
        super().check_together()
        if self.rule_variant.cautious_decay and not self.decouple:
            raise ValueError("cautious_decay=True needs decoupled decay, got decouple=False")

    corrects_decay = property(attrgetter("decouple"))
    decay_term = staticmethod(shrunk_by)
    averaged_gradient = staticmethod(with_decay)


FIELDS = (
    *("lr", "rescale_grad", "clip_gradient", "coupled", "shrink"),
    *("beta1", "mean_rate", "beta2", "var_rate", "beta3", "sum_rate", "progress_rate", "counts"),
)


@scalar
def estimated(weight: Scalar, grad: Scalar, state: State, floor: Scalar, h: Hyper) -> Step:
    """Adam's step with the estimated learning rate, and the gradient sum used to estimate it."""
    mean, var, total = state
    grad = with_decay(weight, grad, h)
    mean = h.beta1 * mean + h.mean_rate * grad
    var = h.beta2 * var + h.var_rate * grad * grad
    total = h.beta3 * total + h.sum_rate * grad
    weight = h.shrink * weight - h.lr * mean / (math.sqrt(var) + floor)
    return weight, (mean, var, total)


ESTIMATE = {"d": 1.0, "d_max": 1.0, "d_numerator": 0.0}


def parts(weight: Scalar, grad: Scalar, state: State, h: Hyper) -> State:
    """Return the progress along the gradient since the start, and the absolute gradient sum."""
    grad = with_decay(weight, grad, h)
    return grad * (state[3] - weight), abs(h.beta3 * state[2] + h.sum_rate * grad)


@rule(
    state=("mean", "var", "sum", "start"),
    hyper=(*FIELDS, "floor"),
    passes=((parts, of_tensor),),
    kept=("numerator", "denominator"),
)
def prodigy(weight: Scalar, grad: Scalar, state: State, h: Hyper) -> Step:
    """Adam's step, whose size the distance from the start of the weight determines."""
    mean, var, total, start = state
    weight, (mean, var, total) = estimated(weight, grad, (mean, var, total), h.floor, h)
    return weight, (mean, var, total, start)


def corrected_rates(t: Scalar, h: Hyper, carried: Carried) -> None:
    """Apply the bias correction to the learning rate and to everything proportional to it."""
    if h.lr > 0:
        scale = math.sqrt(1 - h.beta2**t) / (1 - h.beta1**t)
        h.lr = h.lr * scale
        h.shrink = 1 - h.lr * h.decay_rate
        h.progress_rate = h.progress_rate * scale
        if h.safeguarded == 0:
            h.sum_rate = h.sum_rate * scale


@register
class Prodigy(EstimatedAdam):
    r"""Prodigy: Adam with a learning rate estimated from the distance to a solution.

    .. math::
        h &= \mathrm{clip}(r g), \qquad \gamma = \eta d_k \\
        m &\leftarrow \beta_1 m + (1 - \beta_1) d_k h, \qquad
        v \leftarrow \beta_2 v + (1 - \beta_2) d_k^2 h^2 \\
        s &\leftarrow \beta_3 s + \frac{d_k}{d_0} \gamma h, \qquad
        q \leftarrow \beta_3 q + \frac{d_k}{d_0} \gamma \sum \langle h, w_0 - w \rangle \\
        w &\leftarrow (1 - \gamma \lambda) w - \gamma \frac{m}{\sqrt v + d_k \epsilon} \\
        d_{k + 1} &= \min\!\Big(d^{\max}, \; g_{\max} d_k\Big), \qquad
        d^{\max} \leftarrow \max\!\Big(d^{\max}, \; c \, q \Big/ \sum \|s\|_1 \Big)

    The sums run over all parameters of a step, so that there is a single estimate :math:`d`. It
    starts at :math:`d_0` = `d0` and never decreases. :math:`c` is `d_coef`, :math:`g_{\max}` is
    `growth_rate`, and :math:`w_0` are the weights before the first update. With `bias_correction`,
    :math:`\gamma` is multiplied by :math:`\sqrt{1 - \beta_2^t} / (1 - \beta_1^t)`. Without
    `decouple`, :math:`\lambda w` is added to :math:`h` instead.

    A step ends when a parameter that is already part of it is updated again: a call with a list is
    a step, and so are single calls for each parameter, with bitwise equal results. The next call
    uses the new :math:`d`, which is available as ``updater.info.d``. Parameters without a gradient
    in a step do not contribute to its estimate. With single calls, a parameter that was skipped
    contributes to the step in which it is next updated. A list must not contain an index twice.

    The learning rate is a factor for schedules, usually 1 at first, and the same for all
    parameters: multipliers must be 0 or 1. A parameter with learning rate 0 is not updated and does
    not contribute to the estimate. A non-finite gradient stays in the sums and so stops the growth
    of :math:`d`; a `loss_scaler` or `clip_global_norm` of the updater skips such gradients. Lazy
    updates do not change :math:`s` of rows that are not indexed; these rows count as
    :math:`\beta_3 |s|`, which makes the estimate smaller. `sparse_decay` must be 'touched'.

    Source: Mishchenko and Defazio, "Prodigy: An Expeditiously Adaptive Parameter-Free Learner",
    arXiv:2306.06101, algorithm 4, with the sums of the authors' package prodigyopt. That package
    has :math:`d_{k + 1} \epsilon` in the denominator, which requires all sums before the first
    weight is updated; so has optax.contrib.prodigy, which also always corrects the bias.

    State: the tuple of the arrays :math:`m, v, s, w_0`, in the weight's shape, and two
    zero-dimensional arrays, the parameter's terms in both sums of the last step.

    Parameters
    ----------
    learning_rate : float or callable, optional
        Default 1; None uses the scheduler's ``base_lr``.
    beta1, beta2 : float
        Decay rates of :math:`m` and :math:`v`, at least 0 and below 1. Defaults 0.9, 0.999.
    beta3 : float, optional
        Decay rate of the sums, at least 0 and below 1. Default None: :math:`\sqrt{\beta_2}`.
    epsilon : float
        :math:`\epsilon`, at least 0. Default 1e-8.
    d0 : float
        Initial estimate, at least 1e-30; must be set before the first update. Default 1e-6.
    d_coef : float
        Factor of the estimate, at least 0; the preferred way to tune it. Default 1.
    growth_rate : float
        Maximum factor by which the estimate grows in a step, at least 1. Default: infinity.
    decouple : bool
        Use decoupled weight decay. Default True.
    bias_correction : bool
        Correct the bias of both moments. Default False.
    safeguard_warmup : bool
        Leave the learning rate out of :math:`s`, for schedules with a warm-up. Default False.
    cautious, cautious_decay : bool
        See :class:`~fastopt.optimizer.AdamW`; `cautious_decay` needs `decouple`. Default False.
    **common
        Arguments of :class:`~fastopt.optimizer.Optimizer`; `state_dtype` must be None.

    Raises
    ------
    ValueError
        An argument is NaN or out of range. In an update: a list contains an index twice, or a
        learning rate multiplier is neither 0 nor 1. Nothing changes.

    Examples
    --------
    >>> import numpy as np
    >>> import fastopt
    >>> updater = fastopt.Updater(fastopt.Prodigy())
    >>> weight, bias = np.ones(2), np.ones(1)
    >>> for _ in range(150):
    ...     updater.step([weight - 3, bias + 2], [weight, bias])
    >>> print(weight.round(1), bias.round(1), f"{updater.info.d:.2f}")
    [3. 3.] [-2.] 1.07
    """

    base_rule = prodigy
    copied = ("start",)
    same_in_groups = (
        *EstimatedAdam.same_in_groups,
        *("beta3", "d_coef", "bias_correction", "safeguard_warmup"),
    )
    beta3: float | None = arg(default=None, check=OrNone(Real(least=0, below=1)))
    d_coef: float = arg(default=1.0, check=Real(least=0))
    decouple: bool = arg(default=True)
    bias_correction: bool = arg(default=False, check=FLAG)
    safeguard_warmup: bool = arg(default=False, check=FLAG)
    estimate: dict[str, float] = kept(factory=dict, check=EstimateOf(ESTIMATE))
    positional = (
        *("learning_rate", "beta1", "beta2", "beta3", "epsilon", "d0", "d_coef", "growth_rate"),
        *("decouple", "bias_correction", "safeguard_warmup"),
    )

    @corrected(corrected_rates, "decay_rate", "safeguarded", when=lambda made: made.bias_correction)
    def hyper(self, t: int, lr: float, wd: float) -> dict[str, float]:
        """See :meth:`Optimizer.hyper <fastopt.optimizer.Optimizer.hyper>`."""
        if lr == 0:
            return {**self.rest(), "decay_rate": 0.0, "safeguarded": 0.0}
        d = self.d
        rate, scale = d * lr, d / self.d0
        decay = wd if self.decouple else 0.0
        return {
            "mean_rate": d * (1 - self.beta1),
            "var_rate": d * d * (1 - self.beta2),
            "beta3": self.sum_decay,
            "sum_rate": scale * (d if self.safeguard_warmup else rate),
            "progress_rate": scale * rate,
            "counts": 1.0,
            "lr": rate,
            "shrink": 1 - rate * decay,
            "decay_rate": decay,
            "coupled": wd - decay,
            "floor": d * self.epsilon,
            "safeguarded": float(self.safeguard_warmup),
        }

    def advance(self, sums: Sequence[float]) -> None:
        """See :meth:`JointSums.advance <fastopt.optimizer.JointSums.advance>`."""
        progress, size = sums
        if size != 0:
            d, known = self.d, self.estimate
            numerator = self.sum_decay * known.get("d_numerator", 0.0) + progress
            estimate = self.d_coef * numerator / size
            if d == self.d0 and estimate > d:
                d = estimate
            largest = known.get("d_max", self.d0)
            largest = estimate if estimate > largest else largest
            now = min(largest, d * self.growth_rate), largest, numerator
            known.update(zip(ESTIMATE, now, strict=True))


WEIGHTED = {"d": 1.0, "numerator_weighted": 0.0}


def dadapt_parts(weight: Scalar, grad: Scalar, state: State, h: Hyper) -> State:
    """Return the gradient times the normalized gradient sum, and the absolute gradient sum."""
    _, var, total = state
    grad = with_decay(weight, grad, h)
    along = total / (math.sqrt(var) + h.epsilon) if total != type(weight)(0) else total
    return grad * along, abs(h.beta3 * total + h.sum_rate * grad)


@rule(
    state=("mean", "var", "sum"),
    hyper=(*FIELDS, "epsilon"),
    passes=((dadapt_parts, of_tensor),),
    kept=("numerator", "denominator"),
)
def dadaptadam(weight: Scalar, grad: Scalar, state: State, h: Hyper) -> Step:
    """Adam's step, whose first moment has the estimated rate, and the gradient sum."""
    return estimated(weight, grad, state, h.epsilon, h)


@register
class DAdaptAdam(EstimatedAdam):
    r"""DAdaptAdam: Adam with D-Adaptation, which estimates the learning rate.

    .. math::
        h &= \mathrm{clip}(r g) + \lambda w, \qquad \gamma = \eta d_k, \qquad
        \beta_3 = \sqrt{\beta_2} \\
        q &\leftarrow \beta_3 q + (1 - \beta_3) \gamma \sum \left\langle h, \frac{s}{\sqrt v +
            \epsilon} \right\rangle \\
        m &\leftarrow \beta_1 m + (1 - \beta_1) \gamma h, \qquad
        v \leftarrow \beta_2 v + (1 - \beta_2) h^2, \qquad
        s \leftarrow \beta_3 s + (1 - \beta_3) \gamma h \\
        w &\leftarrow w - \frac{m}{\sqrt v + \epsilon} \\
        d_{k + 1} &= \max\!\Big(d_k, \; \min\!\Big(\frac{q}{(1 - \beta_3) \sum \|s\|_1}, \;
            g_{\max} d_k\Big)\Big)

    The sums run over all parameters of a step, so that there is a single estimate :math:`d`. It
    starts at :math:`d_0` = `d0` and never decreases; :math:`g_{\max}` is `growth_rate`. With
    `bias_correction`, :math:`\gamma` is multiplied by
    :math:`\sqrt{1 - \beta_2^t} / (1 - \beta_1^t)`. With `decouple`, the weight is multiplied by
    :math:`1 - \gamma \lambda` instead of adding :math:`\lambda w` to :math:`h`.

    What is a step, what the learning rate means and what row-sparse gradients do is as in
    :class:`~fastopt.optimizer.Prodigy`.

    Source: Defazio and Mishchenko, "Learning-Rate-Free Learning by D-Adaptation",
    arXiv:2301.07733, in the form of the authors' package dadaptation.

    State: the tuple of the arrays :math:`m, v, s`, in the weight's shape, and two zero-dimensional
    arrays, the parameter's terms in both sums of the last step.

    Parameters
    ----------
    learning_rate : float or callable, optional
        Default 1; None uses the scheduler's ``base_lr``.
    beta1, beta2 : float
        Decay rates of :math:`m` and :math:`v`, at least 0 and below 1. Defaults 0.9, 0.999.
    epsilon : float
        :math:`\epsilon`, at least 0. Default 1e-8.
    d0 : float
        Initial estimate, at least 1e-30; must be set before the first update. Default 1e-6.
    growth_rate : float
        Maximum factor by which the estimate grows in a step, at least 1. Default: infinity.
    decouple : bool
        Use decoupled weight decay. Default False.
    bias_correction : bool
        Correct the bias of both moments. Default False.
    cautious, cautious_decay : bool
        See :class:`~fastopt.optimizer.AdamW`; `cautious_decay` needs `decouple`. Default False.
    **common
        Arguments of :class:`~fastopt.optimizer.Optimizer`; `state_dtype` must be None.

    Raises
    ------
    ValueError
        An argument is NaN or out of range. In an update: a list contains an index twice, or a
        learning rate multiplier is neither 0 nor 1. Nothing changes.

    Examples
    --------
    >>> import numpy as np
    >>> import fastopt
    >>> updater = fastopt.Updater(fastopt.DAdaptAdam(beta2=0.99))
    >>> weight, bias = np.ones(2), np.ones(1)
    >>> for _ in range(300):
    ...     updater.step([weight - 3, bias + 2], [weight, bias])
    >>> print(weight.round(1), bias.round(1), f"{updater.info.d:.2f}")
    [3. 3.] [-2.] 3.94
    """

    base_rule = dadaptadam
    same_in_groups = (*EstimatedAdam.same_in_groups, "bias_correction")
    bias_correction: bool = arg(default=False, check=FLAG)
    estimate: dict[str, float] = kept(factory=dict, check=EstimateOf(WEIGHTED))

    def hyper(self, t: int, lr: float, wd: float) -> dict[str, float]:
        """See :meth:`Optimizer.hyper <fastopt.optimizer.Optimizer.hyper>`."""
        if lr == 0:
            return self.rest()
        rate, beta3 = self.d * lr, self.sum_decay
        if self.bias_correction:
            rate *= math.sqrt(1 - self.beta2**t) / (1 - self.beta1**t)
        return {
            "lr": 1.0,
            "mean_rate": rate * (1 - self.beta1),
            "var_rate": 1 - self.beta2,
            "beta3": beta3,
            "sum_rate": rate * (1 - beta3),
            "progress_rate": rate,
            "counts": 1.0,
            "shrink": 1 - rate * wd if self.decouple else 1.0,
            "coupled": 0.0 if self.decouple else wd,
            "epsilon": self.epsilon,
        }

    def advance(self, sums: Sequence[float]) -> None:
        """See :meth:`JointSums.advance <fastopt.optimizer.JointSums.advance>`."""
        progress, size = sums
        if size != 0:
            d, beta3 = self.d, self.sum_decay
            numerator = self.estimate.get("numerator_weighted", 0.0)
            numerator = beta3 * numerator + (1 - beta3) * progress
            estimate = min(numerator / ((1 - beta3) * size), d * self.growth_rate)
            self.estimate.update(d=estimate if estimate > d else d, numerator_weighted=numerator)


FREE_ESTIMATE = {"d": 1.0, "d_numerator": 0.0}


def free_parts(weight: Scalar, grad: Scalar, state: State, h: Hyper) -> State:
    """Return the progress of the fast weight along the gradient, and the absolute gradient sum."""
    _, total, start, lead = state
    grad = rescaled(grad, h)
    return grad * (start - weight - lead), abs(h.beta3 * total + h.sum_rate * grad)


@rule(
    state=("var", "sum", "start", "lead"),
    hyper=(
        *FREE,
        *("beta2", "var_rate", "beta3", "sum_rate", "progress_rate", "counts", "scale", "floor"),
    ),
    passes=((free_parts, of_tensor),),
    kept=("numerator", "denominator"),
)
def schedulefree_prodigy(weight: Scalar, grad: Scalar, state: State, h: Hyper) -> Step:
    """Step of the fast weight along the normalized gradient with decay, and the gradient sum."""
    var, total, start, lead = state
    grad = rescaled(grad, h)
    var = h.beta2 * var + h.var_rate * grad * grad
    total = h.beta3 * total + h.sum_rate * grad
    step = h.scale * grad / (math.sqrt(var) + h.floor) + h.wd * weight
    weight, lead = interpolated(weight, step, lead, h)
    return weight, (var, total, start, lead)


@register
class ScheduleFreeProdigy(DistanceFamily, ScheduleFreeFamily):
    r"""Schedule-Free Prodigy: needs neither a learning rate nor a schedule.

    .. math::
        h &= \mathrm{clip}(r g), \qquad \gamma = \eta_t d_k, \qquad
        v \leftarrow \beta_2 v + (1 - \beta_2) d_k^2 h^2 \\
        s &\leftarrow \beta_3 s + \frac{d_k^2}{d_0} h, \qquad
        q \leftarrow \beta_3 q + \frac{d_k^2}{d_0} \sum \langle h, z_0 - z \rangle \\
        z &\leftarrow z - \gamma \left( \frac{d_k h}{\sqrt v + d_k \epsilon} + \lambda w \right) \\
        x &\leftarrow (1 - c_t) x + c_t z, \qquad
        w = \beta_1 x + (1 - \beta_1) z \\
        d_{k + 1} &= \max\!\Big(d_k, \; c \min\!\Big(\frac{q}{\sum \|s\|_1}, \; g_{\max} d_k
            \Big)\Big)

    Gradients are computed at :math:`w`, the weight. Inside ``with updater.averaged():`` the weights
    hold :math:`x`, for evaluation; save checkpoints of the weights outside this context. The
    averaging rates :math:`c_t` are those of :class:`~fastopt.optimizer.ScheduleFreeAdamW`, with
    :math:`\gamma` as the learning rate. The estimate :math:`d` starts at :math:`d_0` = `d0`,
    :math:`c` is `d_coef`, :math:`g_{\max}` is `growth_rate`, and a first :math:`q` below 0 counts
    as 0. What is a step, and what the learning rate means, is as in
    :class:`~fastopt.optimizer.Prodigy`.

    Source: the package prodigy-plus-schedule-free with ``use_stableadamw=False, factored=False,
    split_groups=False``, except that it estimates from every eleventh element, and rounds s and
    :math:`z_0` to bfloat16. Mishchenko and Defazio, arXiv:2306.06101; Defazio et al.,
    arXiv:2405.15682.

    State: the tuple :math:`(v, s, z_0, z - w)` of arrays in the weight's shape, and two
    zero-dimensional arrays, the parameter's terms in both sums of the last step.

    Parameters
    ----------
    learning_rate : float or callable, optional
        Factor of the estimate. Default 1; None uses the scheduler's ``base_lr``.
    beta1 : float
        :math:`\beta_1`, at least 0.01 and below 1. Default 0.9.
    beta2 : float
        Decay rate of :math:`v`, at least 0 and below 1. Default 0.99.
    beta3 : float, optional
        Decay rate of the sums, at least 0 and below 1. Default None: :math:`\sqrt{\beta_2}`.
    epsilon : float
        :math:`\epsilon`, at least 0. Default 1e-8.
    d0 : float
        Initial estimate, at least 1e-30; must be set before the first update. Default 1e-6.
    d_coef : float
        Factor of the estimate, at least 0; the preferred way to tune it. Default 1.
    growth_rate : float
        Maximum factor by which the estimate grows in a step, at least 1. Default
        :math:`2^{1 / 4}`.
    warmup_steps : int
        Number of updates with a linearly increasing learning rate, at least 0. Default 0.
    r, weight_lr_power : float
        See :class:`~fastopt.optimizer.ScheduleFreeAdamW`. Defaults 0, 2.
    average_rate : float, optional
        Constant :math:`c_t`, above 0 and at most 1. Default None.
    **common
        Arguments of :class:`~fastopt.optimizer.Optimizer`; `state_dtype` must be None.

    Raises
    ------
    ValueError
        An argument is NaN or out of range. In an update: a list contains an index twice, or a
        learning rate multiplier is neither 0 nor 1. Nothing changes.

    Examples
    --------
    >>> import numpy as np
    >>> import fastopt
    >>> updater = fastopt.Updater(fastopt.ScheduleFreeProdigy())
    >>> weight = np.ones(2)
    >>> for _ in range(300):
    ...     updater.step(weight - np.array([3.0, -1.0]), weight)
    >>> with updater.averaged():
    ...     print(weight.round(1), f"{updater.info.d:.2f}")
    [ 3. -1.] 0.52
    """

    rule = schedulefree_prodigy
    copied = ("start",)
    inner = property(attrgetter("beta1"))
    same_in_groups = (
        *DistanceFamily.same_in_groups,
        *("beta3", "d_coef", "warmup_steps", "r", "weight_lr_power", "average_rate"),
    )
    beta1: float = arg(default=0.9, check=Real(least=0.01, below=1))
    beta2: float = arg(default=0.99)
    beta3: float | None = arg(default=None, check=OrNone(Real(least=0, below=1)))
    d_coef: float = arg(default=1.0, check=Real(least=0))
    growth_rate: float = arg(default=2**0.25)
    estimate: dict[str, float] = kept(factory=dict, check=EstimateOf(FREE_ESTIMATE))
    positional = (
        *("learning_rate", "beta1", "beta2", "beta3", "epsilon", "d0", "d_coef", "growth_rate"),
        *("warmup_steps", "r", "weight_lr_power", "average_rate"),
    )

    @corrected(averaged, *FREE_STEP, carries=True)
    def hyper(self, t: int, lr: float, wd: float) -> dict[str, float]:
        """See :meth:`Optimizer.hyper <fastopt.optimizer.Optimizer.hyper>`."""
        free = ScheduleFreeFamily.hyper(self, t, lr, wd)
        if lr == 0:
            return {**free, **self.rest()}
        d = self.d
        return {
            **free,
            "lr": d * lr,
            "var_rate": d * d * (1 - self.beta2),
            "beta3": self.sum_decay,
            "sum_rate": d * d / self.d0,
            "progress_rate": d * d / self.d0,
            "counts": 1.0,
            "scale": d,
            "floor": d * self.epsilon,
        }

    def advance(self, sums: Sequence[float]) -> None:
        """See :meth:`JointSums.advance <fastopt.optimizer.JointSums.advance>`."""
        progress, size = sums
        d, numerator = self.d, self.sum_decay * self.estimate.get("d_numerator", 0.0)
        if d > self.d0 or progress > 0:
            numerator += progress
        if size > 0:
            estimate = self.d_coef * min(numerator / size, d * self.growth_rate)
            d = estimate if estimate > d else d
        self.estimate.update(d=d, d_numerator=numerator)
