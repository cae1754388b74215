"""Sequences of schedules."""

from bisect import bisect_right
from collections.abc import Iterable
from typing import ClassVar

from fastopt.arguments import Descriptions, Instance, ListOf
from fastopt.lr_scheduler.base import LRScheduler, increasing, listed, register


@register
class JoinedScheduler(LRScheduler):
    r"""Run several schedules in sequence.

    .. math:: \mathrm{schedules}_i(n - b_i), \quad b_i \le n < b_{i+1}

    with :math:`b_0 = 0` and :math:`b_1, b_2, \ldots` = `boundaries`: each schedule counts updates
    from 0 and keeps its own warm-up and ``base_lr``.

    Parameters
    ----------
    schedules : list of LRScheduler
        The schedules, one more than `boundaries`.
    boundaries : list of int, increasing, at least 1
        First update of the second and each later schedule.

    Raises
    ------
    TypeError, ValueError
        `schedules` does not hold LRScheduler objects, their number is not one more than that of
        `boundaries`, or `boundaries` are not increasing integers.

    Examples
    --------
    >>> from fastopt.lr_scheduler import CosineScheduler, FactorScheduler, JoinedScheduler
    >>> constant = FactorScheduler(step=1, base_lr=0.4)
    >>> schedule = JoinedScheduler([constant, CosineScheduler(2, base_lr=0.4)], [3])
    >>> [round(schedule(n), 3) for n in range(6)]
    [0.4, 0.4, 0.4, 0.4, 0.2, 0.0]
    """

    arguments: ClassVar[Descriptions] = {
        "schedules": ListOf(Instance(LRScheduler, "an LRScheduler")),
        "boundaries": increasing,
    }
    keeps_base_lr = True

    def __init__(self, schedules: Iterable[LRScheduler], boundaries: Iterable[int]) -> None:
        self.schedules: list[LRScheduler] = listed("schedules", schedules)
        self.boundaries: list[int] = increasing("boundaries", boundaries)
        super().__init__(self.schedules[0].base_lr if self.schedules else 0.0)

    def check_together(self) -> None:
        """See :meth:`LRScheduler.check_together`."""
        super().check_together()
        if len(self.schedules) != len(self.boundaries) + 1:
            raise ValueError(
                "schedules must be one more than boundaries, "
                f"got {len(self.schedules)} and {len(self.boundaries)}"
            )

    def _rate(self, num_update: int) -> float:
        piece = bisect_right(self.boundaries, num_update)
        begin = self.boundaries[piece - 1] if piece else 0
        return self.schedules[piece](num_update - begin)
