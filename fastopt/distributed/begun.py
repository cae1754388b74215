"""Gradients that are passed before the call that needs them."""

from typing import Any

import numpy as np

from fastopt._engine.validate import as_lists, check_index, label
from fastopt.distributed.exchange import Exchange
from fastopt.distributed.plan import Plan
from fastopt.optimizer.optimizer import Index


class Begun:
    """Gradients passed to :meth:`ShardedUpdater.begin` since the last call.

    Parameters
    ----------
    names : dict
        Names of the parameters, for messages.

    Attributes
    ----------
    exchange : Exchange or None
        The exchange to which gradients were passed on.
    """

    def __init__(self, names: dict[Any, str]) -> None:
        self.names = names
        self.exchange: Exchange | None = None
        self._grads: dict[Index, tuple[Any, bool]] = {}
        """Gradients, None for those that were released, and whether they were sent."""

    @property
    def any(self) -> bool:
        """Whether there are gradients."""
        return bool(self._grads)

    def add(self, index: Index, grad: Any, sent: bool = False) -> None:
        """Enter a gradient."""
        if index in self._grads:
            raise ValueError(f"{label(index, self.names)}: begin() was called twice in a step")
        self._grads[index] = grad, sent

    def complete(self, index: Any, grad: Any, weight: Any) -> Any:
        """Return the gradients of a call, also of parameters for which it has None.

        Those that were released are zeros without memory of their own.
        """
        if not self._grads:
            return grad
        if not isinstance(index, (list, tuple)):
            return self._completed(index, grad, weight)
        return [*map(self._completed, *as_lists(index, grad, weight))]

    def _completed(self, index: Any, grad: Any, weight: Any) -> Any:
        if grad is not None or (index := check_index(index)) not in self._grads:
            return grad
        own, _ = self._grads[index]
        return np.broadcast_to(np.float32(0), np.shape(weight)) if own is None else own

    def check(self, plan: Plan, grads: Any) -> None:
        """Raise ValueError unless a call has the gradients that were sent, or None."""
        if self.exchange is None:
            return
        if self.exchange.plan is not plan:
            raise ValueError(
                "begin() was called for the parameters of the previous call, not for these"
            )
        given = grads if isinstance(grads, (list, tuple)) else [grads]
        for index, (own, sent) in self._grads.items():
            grad = given[plan.places[index]]
            if sent and grad is not None and (own is None or not _is_same(own, grad)):
                problem = "the gradient is not the one passed to begin()"
                cure = ", which was released: pass None" if own is None else ""
                raise ValueError(f"{label(index, self.names)}: {problem}{cure}")


def _is_same(one: Any, other: Any) -> bool:
    """Whether two gradients are the same array or views of the same elements."""
    if one is other:
        return True
    one, other = np.asarray(one), np.asarray(other)
    places = [each.__array_interface__["data"] for each in (one, other)]
    header = (one.shape, one.dtype, one.strides) == (other.shape, other.dtype, other.strides)
    return header and places[0] == places[1]
