"""Prodigy: Adam with a learning rate estimated from the distance to a solution."""

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, ClassVar, Unpack

from fastopt._engine.averaging import exact_copy
from fastopt._engine.hyper import corrected
from fastopt._engine.validate import label
from fastopt._kernels.devices import header
from fastopt._kernels.variants import Traits
from fastopt.arguments import Descriptions, Flag, OrNone, PairOf, Real, TableOf, brief
from fastopt.kernels.rule import Hyper, Scalar, State, Step, Sums, rule, scalar
from fastopt.kernels.scalars import rescaled
from fastopt.optimizer.families import AdamFamily, Varied, shrunk_by
from fastopt.optimizer.keywords import CautiousArguments, Rate
from fastopt.optimizer.optimizer import Array, Index, register

__all__ = ["Prodigy", "prodigy"]

ESTIMATE = ("d", "d_max", "d_numerator")
ANY = Real(infinite=True, nan=True)

FIELDS = (
    *("lr", "rescale_grad", "clip_gradient", "coupled", "shrink", "floor"),
    *("beta1", "mean_rate", "beta2", "var_rate", "beta3", "sum_rate", "progress_rate", "counts"),
)


@scalar
def with_decay(weight: Scalar, grad: Scalar, h: Hyper) -> Scalar:
    """Return the rescaled and clipped gradient plus coupled decay."""
    return rescaled(grad, h) + h.coupled * weight


def parts(weight: Scalar, grad: Scalar, state: State, h: Hyper) -> State:
    """Return the progress along the gradient since the start, and the absolute gradient sum."""
    grad = with_decay(weight, grad, h)
    return grad * (state[3] - weight), abs(h.beta3 * state[2] + h.sum_rate * grad)


def of_tensor(sums: Sums, h: Hyper, kept: State) -> State:
    """Return the tensor's terms in the numerator and the denominator of the estimate."""
    return h.progress_rate * sums[0], h.counts * sums[1]


@rule(
    state=("mean", "var", "sum", "start"),
    hyper=FIELDS,
    passes=((parts, of_tensor),),
    kept=("numerator", "denominator"),
)
def prodigy(weight: Scalar, grad: Scalar, state: State, h: Hyper) -> Step:
    """Adam's step with the estimated learning rate, and the gradient sum used to estimate it."""
    mean, var, total, start = state
    grad = with_decay(weight, grad, h)
    mean = h.beta1 * mean + h.mean_rate * grad
    var = h.beta2 * var + h.var_rate * grad * grad
    total = h.beta3 * total + h.sum_rate * grad
    weight = h.shrink * weight - h.lr * mean / (math.sqrt(var) + h.floor)
    return weight, (mean, var, total, start)


def corrected_rates(t: Scalar, h: Hyper, carried: Any) -> None:
    """Apply the bias correction to the learning rate and to everything proportional to it."""
    if h.lr > 0:
        scale = math.sqrt(1 - h.beta2**t) / (1 - h.beta1**t)
        h.lr = h.lr * scale
        h.shrink = 1 - h.lr * h.decay_rate
        h.progress_rate = h.progress_rate * scale
        if h.safeguarded == 0:
            h.sum_rate = h.sum_rate * scale


def _check_estimate(name: str, value: Any) -> dict[str, float]:
    """Check the saved estimate: empty, or the numbers that determine the next estimate."""
    found = TableOf(ANY)(name, value)
    if found and (tuple(found) != ESTIMATE or not found["d"] > 0):
        raise ValueError(f"{name} must have {ESTIMATE} with d above 0, got {brief(value)}")
    return found


@register
class Prodigy(Varied, AdamFamily):
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
    >>> from fastopt import optimizer
    >>> updater = optimizer.get_updater(optimizer.Prodigy())
    >>> weight, bias = np.ones(2), np.ones(1)
    >>> for _ in range(150):
    ...     updater([0, 1], [weight - 3, bias + 2], [weight, bias])
    >>> print(weight.round(1), bias.round(1), f"{updater.info.d:.2f}")
    [3. 3.] [-2.] 1.07
    """

    plain = prodigy
    variants = ("cautious", "cautious_decay")
    same_in_groups = (
        *("learning_rate", "lr_scheduler", "beta1", "beta2", "beta3", "d0", "d_coef"),
        *("growth_rate", "bias_correction", "safeguard_warmup"),
    )
    arguments: ClassVar[Descriptions] = {
        "beta3": OrNone(Real(least=0, below=1)),
        "d0": Real(least=1e-30),
        "d_coef": Real(least=0),
        "growth_rate": Real(least=1, infinite=True),
        "decouple": Flag(),
        "bias_correction": Flag(),
        "safeguard_warmup": Flag(),
    }
    progress: ClassVar[Descriptions] = {
        "estimate": _check_estimate,
        "shares": TableOf(PairOf(ANY, ANY)),
    }

    def __init__(
        self,
        learning_rate: Rate = 1.0,
        beta1: float = 0.9,
        beta2: float = 0.999,
        beta3: float | None = None,
        epsilon: float = 1e-8,
        d0: float = 1e-6,
        d_coef: float = 1.0,
        growth_rate: float = math.inf,
        decouple: bool = True,
        bias_correction: bool = False,
        safeguard_warmup: bool = False,
        **common: Unpack[CautiousArguments],
    ) -> None:
        self.decouple = decouple
        super().__init__(learning_rate, beta1, beta2, epsilon, **common)
        self.beta3 = beta3
        self.d0 = d0
        self.d_coef = d_coef
        self.growth_rate = growth_rate
        self.bias_correction = bias_correction
        self.safeguard_warmup = safeguard_warmup
        self.estimate: dict[str, float] = {}
        self.shares: dict[Index, tuple[float, ...]] = {}

    def check_together(self) -> None:
        """See :meth:`Optimizer.check_together <fastopt.optimizer.Optimizer.check_together>`."""
        super().check_together()
        if self.state_dtype is not None:
            raise ValueError(
                "Prodigy measures how far weights are from their start, which rounded state "
                "cannot hold: state_dtype must be None"
            )
        if self.variant.cautious_decay and not self.decouple:
            raise ValueError("cautious_decay=True needs decoupled decay, got decouple=False")
        if self.sparse_decay != "touched":
            raise ValueError(
                "the rate of Prodigy is not known beforehand: sparse_decay must be 'touched', "
                f"got {self.sparse_decay!r}"
            )

    @property
    def corrects_decay(self) -> bool:
        """See :attr:`Optimizer.corrects_decay`."""
        return self.decouple

    def create_state(self, index: Index, weight: Array) -> Any:
        """See :meth:`Optimizer.create_state <fastopt.optimizer.Optimizer.create_state>`."""
        mean, var, total, _, *numbers = super().create_state(index, weight)
        return mean, var, total, exact_copy((header(weight),), self.rule), *numbers

    def restart(self, indices: Collection[Index]) -> None:
        """See :meth:`Optimizer.restart <fastopt.optimizer.Optimizer.restart>`."""
        super().restart(indices)
        if self.num_update == self.begin_num_update:
            self.estimate, self.shares = {}, {}

    def multiplier(self, index: Index, table: Mapping[Any, float], attribute: str) -> float:
        """See :meth:`Optimizer.multiplier`; learning rate multipliers must be 0 or 1."""
        found = super().multiplier(index, table, attribute)
        if attribute == "lr_mult" and found not in (0, 1):
            raise ValueError(
                f"{label(index, self.idx2name)}: Prodigy estimates one learning rate for all "
                f"parameters: lr_mult must be 0 or 1, got {found}"
            )
        return found

    @property
    def decays(self) -> Callable[..., Any]:
        """See :attr:`~fastopt.optimizer.families.Varied.decays`."""
        return shrunk_by

    @property
    def seen(self) -> Callable[..., Any]:
        """See :attr:`~fastopt.optimizer.families.Varied.seen`."""
        return with_decay

    @property
    def traits(self) -> Traits:
        """See :attr:`~fastopt.optimizer.families.Varied.traits`."""
        return super().traits._replace(from_zero=False)  # decay may be part of the gradient

    @corrected(corrected_rates, "decay_rate", "safeguarded", when=lambda made: made.bias_correction)
    def hyper(self, t: int, lr: float, wd: float) -> dict[str, float]:
        """See :meth:`Optimizer.hyper <fastopt.optimizer.Optimizer.hyper>`."""
        if lr == 0:
            nothing = ("mean_rate", "var_rate", "sum_rate", "progress_rate", "counts", "coupled")
            still = ("beta1", "beta2", "beta3", "shrink", "floor")
            return {
                **dict.fromkeys((*nothing, "lr", "decay_rate", "safeguarded"), 0.0),
                **dict.fromkeys(still, 1.0),
            }
        d = self.d
        rate, scale = d * lr, d / self.d0
        decay = wd if self.decouple else 0.0
        return {
            "beta1": self.beta1,
            "mean_rate": d * (1 - self.beta1),
            "beta2": self.beta2,
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

    # The estimate

    @property
    def d(self) -> float:
        """Estimate of the distance in the current step."""
        return self.estimate.get("d", self.d0)

    @property
    def sum_decay(self) -> float:
        """Decay rate of the sums."""
        return math.sqrt(self.beta2) if self.beta3 is None else self.beta3

    @property
    def step_sums(self) -> "Prodigy":
        """See :attr:`Optimizer.step_sums`."""
        return self

    def begin(self, indices: Sequence[Index]) -> Any:
        """Start a new step and update the estimate if an index is already in the current step."""
        if self.shares.keys().isdisjoint(indices):
            return None
        before = dict(self.estimate), dict(self.shares)
        shares = list(self.shares.values())
        self.shares.clear()
        progress, size = (sum(each[k] for each in shares) for k in (0, 1))
        if size != 0:
            d, known = self.d, self.estimate
            numerator = self.sum_decay * known.get("d_numerator", 0.0) + progress
            found = self.d_coef * numerator / size
            if d == self.d0 and found > d:
                d = found
            largest = known.get("d_max", self.d0)
            largest = found if found > largest else largest
            now = min(largest, d * self.growth_rate), largest, numerator
            known.update(zip(ESTIMATE, now, strict=True))
        return before

    def put_back(self, before: Any) -> None:
        """Undo the changes of :meth:`begin`."""
        if before is not None:
            self.estimate.clear()
            self.shares.clear()
            self.estimate.update(before[0])
            self.shares.update(before[1])

    def add(self, indices: Sequence[Index], numbers: Sequence[Sequence[float]]) -> None:
        """Record the terms of tensors in the sums of a step."""
        self.shares.update(zip(indices, map(tuple, numbers), strict=True))
