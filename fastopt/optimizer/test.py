"""Test optimizer: ``weight += rescale_grad * grad``."""

from fastopt.kernels.rule import Hyper, Scalar, State, Step, rule
from fastopt.optimizer.optimizer import Index, Optimizer, register


@rule(state=("copy",), hyper=("rescale_grad",))
def test(weight: Scalar, grad: Scalar, state: State, h: Hyper) -> Step:
    """Add the gradient and keep a copy."""
    weight = weight + h.rescale_grad * grad
    return weight, (weight,)


@register
class Test(Optimizer):
    r"""Test optimizer that adds the gradient: :math:`w \leftarrow w + r g`.

    It has no learning rate, weight decay or clipping, and does not count updates. State: a copy of
    the weight after the update.

    Parameters
    ----------
    **common
        Arguments of :class:`~fastopt.optimizer.Optimizer`.

    Examples
    --------
    >>> import numpy as np
    >>> from fastopt import optimizer
    >>> updater = optimizer.get_updater(optimizer.create("test"))
    >>> weight = np.ones(2)
    >>> updater(0, np.array([1.0, -5.0]), weight)
    >>> weight
    array([ 2., -4.])
    """

    rule = test
    __test__ = False  # not a test case

    def _update_count(self, index: Index) -> None:
        """Updates are not counted."""
