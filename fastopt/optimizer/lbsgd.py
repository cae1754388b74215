"""LBSGD: gradient descent with emulated large batches."""

import math
from collections.abc import Collection, Mapping
from typing import Any, ClassVar

import numpy as np

from fastopt._engine.accumulate import add
from fastopt._engine.mixed_precision import has_master
from fastopt._engine.validate import Grad, check_like, leaves, listed
from fastopt._kernels.devices import header
from fastopt._kernels.layout import real_of
from fastopt.arguments import ArrayOf, Instance, Integer, PairOf, TableOf, arg, brief, kept
from fastopt.kernels.rule import Hyper, Rule, Sums
from fastopt.optimizer.families import MomentumFamily
from fastopt.optimizer.layerwise import lars_sums
from fastopt.optimizer.optimizer import Array, Index, register
from fastopt.optimizer.sgd import sgd, sgd_momentum
from fastopt.sparse import RowSparse

LARGEST = 2**62
"""Number of rows assumed for a weight of unknown height."""


def lars_finish(sums: Sums, h: Hyper) -> None:
    """Scale the learning rate by the root of the ratio of squared norms, within [0.01, 100]."""
    grad = sums[1] / (h.batch_scale * h.batch_scale)
    factor = math.sqrt(sums[0] / (grad + h.wd * sums[0] + 1e-18))
    h.lr = h.lr * min(max(factor, 0.01), 100.0)


PASSES = ((lars_sums, lars_finish),)
lbsgd = sgd.with_passes("lbsgd", PASSES, "batch_scale")
lbsgd_momentum = sgd_momentum.with_passes("lbsgd_momentum", PASSES, "batch_scale")


def _check_sum(name: str, value: object) -> dict[str, Any]:
    """Check an entry of :attr:`LBSGD.cumgrads`: the sum of gradients and the number of calls."""
    if not isinstance(value, Mapping) or set(value) != {"cum_grad", "num_cums"}:
        raise TypeError(f"{name} must have cum_grad and num_cums, got {brief(value)}")
    total, calls = value["cum_grad"], Integer(least=0)(f"{name}['num_cums']", value["num_cums"])
    check = ArrayOf(("float32", "float64"))
    if isinstance(total, tuple):
        values, rows = PairOf(check, ArrayOf(("int32", "int64")))(f"{name}['cum_grad']", total)
        RowSparse(values, rows, (LARGEST, *values.shape[1:]))
    elif total is not None:
        check(f"{name}['cum_grad']", total)
    return {"cum_grad": total, "num_cums": calls}


class LargeBatches:
    """The sums of gradients of an optimizer, see :class:`fastopt._engine.contract.Batches`."""

    def __init__(self, optimizer: "LBSGD") -> None:
        self.of, self.every, self.sums = optimizer, optimizer.batch_scale, optimizer.cumgrads

    @property
    def active(self) -> bool:
        """Whether an update takes several calls, or a sum of gradients is left from such calls."""
        return self.every > 1 or bool(self.sums)

    def arrays(self, index: Index) -> tuple[Array, ...]:
        """Return the arrays of a parameter's sum of gradients."""
        return leaves(self.sums[index]["cum_grad"]) if index in self.sums else ()

    def completes(self, index: Index) -> bool:
        """Whether the last call of :meth:`add` for a parameter has returned a gradient."""
        kept = self.sums.get(index)
        return kept is None or kept["num_cums"] % self.every == 0

    def add(self, context: str, index: Index, grad: Grad, weight: Array) -> tuple[Any, list[Any]]:
        """Return the gradient to update with, or None for no update, and the kernels to launch."""
        if self.every <= 1:
            self.sums.pop(index, None)
            return grad, []
        before, first = self.sums.get(index), self.of.begin_num_update
        count = self.of._index_update_count.get(index, first) - first
        calls = (before["num_cums"] if before else self.of.init_updates + count) + 1
        total, tables = self._total(context, index, grad, weight)
        kept = (total.values, total.indices) if isinstance(total, RowSparse) else total
        self.sums[index] = {"cum_grad": kept, "num_cums": calls}
        return (total if calls % self.every == 0 else None), tables

    def _total(self, context: str, index: Index, grad: Any, weight: Array) -> tuple[Any, list[Any]]:
        """Return the sum of gradients since the last update, and the kernels that complete it."""
        before, of = self.sums.get(index), header(weight)
        keep = before is not None and before["num_cums"] % self.every != 0
        total: Any = before["cum_grad"] if before is not None else None
        if isinstance(total, tuple):
            total = listed(context, total, of.shape) if keep else None
            if total is not None:
                dtype, shape = np.dtype(real_of(of.dtype)).name, (len(total.indices), *of.shape[1:])
                check_like(context, "the sum of gradients", header(total.values), (dtype,), shape)
        return add(context, total, grad, weight, keep)


@register
class LBSGD(MomentumFamily):
    r"""LBSGD: gradient descent that accumulates gradients over `batch_scale` calls.

    Every `batch_scale`-th call of a parameter updates it, with :math:`A` the sum of gradients since
    the last update:

    .. math::
        h &= \mathrm{clip}(r A / S) + \lambda w \\
        m &\leftarrow \mu m - \eta f h \\
        w &\leftarrow w + m

    with :math:`S` = `batch_scale`. The factor :math:`f` grows from 1 to :math:`S` in
    :math:`N` = `warmup_epochs` * `updates_per_epoch` calls: with :math:`x = n / N` after
    :math:`n` calls, it is :math:`1 + (S - 1) x` for 'linear', :math:`1 + (S - 1) x^2` for
    'power2', :math:`1 + (S - 1) \sqrt{x}` for 'sqrt', and 1 for any other name. For 'lars' it is
    :math:`\sqrt{\|w\|^2 / (\|A / S\|^2 + \lambda \|w\|^2 + 10^{-18})}`, at least 0.01 and at
    most 100. The schedule is evaluated before the call is counted.

    Sources: Goyal et al., "Accurate, Large Minibatch SGD", arXiv:1706.02677 (warm-up); You,
    Gitman and Ginsburg, arXiv:1708.03888 (layer-wise rates).

    State: None, or with momentum the array :math:`m`, in the weight's shape. With
    `multi_precision`, :meth:`create_state` of a half-precision weight returns the pair of this and
    the float32 master, which :meth:`update` accepts. If `batch_scale` is above 1,
    ``cumgrads[index]`` holds the sum and the number of calls; the sum of row-sparse gradients is a
    pair of values and indices.

    Parameters
    ----------
    momentum : float
        Momentum :math:`\mu`. Default 0.
    multi_precision : bool
        See :class:`~fastopt.optimizer.Optimizer`.
    warmup_strategy : str
        'linear', 'power2', 'sqrt' or 'lars'. Default 'linear'.
    warmup_epochs : int
        Epochs of warm-up. Default 5.
    batch_scale : int
        Number of calls per update, :math:`S`. Default 1.
    updates_per_epoch : int
        Number of calls per epoch. Default 32.
    begin_epoch : int
        The call count starts at ``begin_epoch * updates_per_epoch``. Default 0.
    num_epochs : int
        Unused. Default 60.
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
    >>> updater = fastopt.Updater(
    ...     fastopt.LBSGD(lr=0.1, batch_scale=2, warmup_epochs=0))
    >>> weight = np.ones(2)
    >>> updater.step(np.array([1.0, 2.0]), weight)
    >>> weight
    array([1., 1.])
    >>> updater.step(np.array([3.0, 4.0]), weight)
    >>> weight
    array([0.6, 0.4])
    """

    lazy_by_default = True
    rates_before_count = True
    warmup_strategy: str = arg(default="linear", check=Instance(str, "a string"))
    warmup_epochs: int = arg(default=5, check=Integer(least=0))
    batch_scale: int = arg(default=1, check=Integer())
    updates_per_epoch: int = arg(default=32, check=Integer())
    begin_epoch: int = arg(default=0, check=Integer(least=0), stored="init_updates")
    num_epochs: int = arg(default=60, check=Integer(least=0))
    cumgrads: dict[Index, dict[str, Any]] = kept(factory=dict, check=TableOf(_check_sum))
    positional = (
        *("momentum", "multi_precision", "warmup_strategy", "warmup_epochs", "batch_scale"),
        *("updates_per_epoch", "begin_epoch", "num_epochs"),
    )
    init_updates: ClassVar[int]

    def _initialize(self, values: dict[str, Any]) -> None:
        super()._initialize(values)
        vars(self)["init_updates"] *= self.updates_per_epoch

    @property
    def rule(self) -> Rule:
        """Rule for the warm-up strategy, with or without a momentum buffer."""
        scaled = self.warmup_strategy == "lars"
        forms = (lbsgd, lbsgd_momentum) if scaled else (sgd, sgd_momentum)
        return forms[self.momentum != 0]

    def restart(self, indices: Collection[Index]) -> None:
        """See :meth:`Optimizer.restart <fastopt.optimizer.Optimizer.restart>`."""
        super().restart(indices)
        for index in indices:
            self.cumgrads.pop(index, None)

    def create_state(self, index: Index, weight: Array) -> Any:
        """See :meth:`Optimizer.create_state <fastopt.optimizer.Optimizer.create_state>`.

        With `multi_precision`, the state of a half-precision weight is the pair of momentum and
        float32 master, as in MXNet. Other optimizers return the master only from
        :meth:`create_state_multi_precision`.
        """
        if not has_master(self, header(weight)):
            return super().create_state(index, weight)
        master, momentum = self.create_state_multi_precision(index, weight)
        return momentum, master

    def direct_state(self, weight: Array, state: object) -> tuple[Any, bool]:
        """See :meth:`Optimizer.direct_state`; :meth:`create_state` returns masters too."""
        if isinstance(state, (tuple, list)) and has_master(self, header(weight)):
            return tuple(state)[::-1], True
        return state, False

    @property
    def batches(self) -> LargeBatches:
        """The sums of gradients, which exist even if `batch_scale` is 1: it can be changed."""
        return LargeBatches(self)

    def hyper(self, t: int, lr: float, wd: float) -> Mapping[str, float]:
        """See :meth:`Optimizer.hyper <fastopt.optimizer.Optimizer.hyper>`."""
        return {
            "lr": lr * self._warmup(self.init_updates + t - self.begin_num_update),
            "rescale_grad": self.rescale_grad / self.batch_scale,
            "momentum": self.momentum,
        }

    def decay(self, t: int, lr: float, wd: float) -> float:
        """See :meth:`Optimizer.decay <fastopt.optimizer.Optimizer.decay>`."""
        return lr * self._warmup(self.init_updates + t - self.begin_num_update) * wd

    def _warmup(self, calls: int) -> float:
        """Return the warm-up factor of the learning rate after `calls` calls."""
        length = self.warmup_epochs * self.updates_per_epoch
        if self.warmup_strategy == "lars":
            return 1.0
        if calls >= length:
            return float(self.batch_scale)
        grown = {"linear": 1.0, "power2": 2.0, "sqrt": 0.5}.get(self.warmup_strategy)
        if length <= 1 or grown is None:
            return 1.0
        return 1.0 + (self.batch_scale - 1) * math.pow(calls / length, grown)
