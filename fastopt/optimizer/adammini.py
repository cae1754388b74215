"""Adam-mini: Adam with one second moment for each row, or for each head of attention."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from fastopt._engine.validate import label
from fastopt._kernels.factored import shared
from fastopt.arguments import FLAG, Integer, Real, Stored, alias, arg, brief
from fastopt.optimizer.matrices import MatrixFamily, Shape, pattern
from fastopt.optimizer.optimizer import Array, Index, register
from fastopt.optimizer.rates import RateAttribute
from fastopt.optimizer.rowsteps import RowSteps


class _Shared(RowSteps):
    """Directions: momentum divided by the root of the mean square of each block of rows."""

    fields = ("fresh", "mean_scale")

    def values(self, main: "AdamMini") -> tuple[float, ...]:
        """See :meth:`RowSteps.values <fastopt.optimizer.rowsteps.RowSteps.values>`."""
        return 1 - main.beta1, 1.0

    def run(
        self,
        main: "AdamMini",
        index: Index,
        target: Array,
        weight: Array,
        grad: Array,
        state: tuple[Array, ...],
        record: Array,
    ) -> None:
        """See :meth:`RowSteps.run <fastopt.optimizer.rowsteps.RowSteps.run>`."""
        mean, var = state
        flat, rows = (var.size, grad.size // var.size), main.rows_of(index, grad.shape)
        count = main.updates_of(index)
        record["mean_scale"] = 1 / (1 - main.beta1**count)
        self.call(
            shared(grad.dtype.type),
            *(grad.reshape(flat), target.reshape(flat), mean.reshape(flat), var.reshape(-1), rows),
            *(1 - main.beta2, 1 / (1 - main.beta2**count), main.epsilon, record),
        )


def _check_heads(name: str, value: Any) -> tuple[tuple[str, int], ...] | None:
    """Check pairs of a regular expression and a number of heads."""
    if value is None:
        return None
    if isinstance(value, Mapping):
        value = tuple(value.items())
    if not isinstance(value, (tuple, list)) or not all(
        isinstance(pair, (tuple, list)) and len(pair) == 2 for pair in value
    ):
        raise TypeError(f"{name} must map regular expressions to counts, got {brief(value)}")
    count = Integer(least=1)
    return tuple((pattern(name, key), count(f"{name}[{key!r}]", part)) for key, part in value)


@register
class AdamMini(MatrixFamily):
    r"""Adam-mini: Adam with one second moment for each row, or for each head of attention.

    .. math::
        h &= \mathrm{clip}(r g), \qquad m \leftarrow \beta_1 m + (1 - \beta_1) h \\
        v_b &\leftarrow \beta_2 v_b + (1 - \beta_2) \frac{1}{|b|} \sum_{i \in b} h_i^2 \\
        w_i &\leftarrow (1 - \eta \lambda) w_i - \eta \frac{m_i}{1 - \beta_1^t}
            \Big/ \left( \sqrt{\frac{v_b}{1 - \beta_2^t}} + \epsilon \right)

    for the elements i of each block b. A block is a row of a matrix, that is, the weights of one
    output, or a slice along the first axis of weights with more dimensions. The rows of a head of
    attention are one block, for queries and keys that `heads` selects, and a weight with fewer than
    two dimensions is one block.

    Source: Zhang et al., "Adam-mini: Use Fewer Learning Rates To Gain More", arXiv:2406.16793, with
    the code of the authors, whose blocks are selected by names of modules. Weights named ``bias``
    have a second moment for each element there, as with AdamW for a group of the updater:
    ``groups={"bias$": {"optimizer": AdamW(formula="torch")}}``.

    State: the tuple of the arrays :math:`m`, in the weight's shape, and :math:`v`, of shape
    (rows, 1), with equal numbers for the rows of a head; for weights with fewer than two dimensions
    :math:`v` has no dimensions.

    Parameters
    ----------
    learning_rate : float or callable, optional
        Default 0.001; None uses the scheduler's ``base_lr``.
    beta1, beta2 : float
        Decay rates of :math:`m` and :math:`v`, at least 0 and below 1. Defaults 0.9, 0.999.
    epsilon : float
        :math:`\epsilon`, at least 0. Default 1e-8.
    heads : dict of str to int, optional
        Numbers of heads. Maps a regular expression for names of weights to the number of equal
        parts along the first axis that have a second moment each. The first pattern that
        ``re.search`` finds in the name applies; the name is the entry in ``idx2name``, the name of
        the object in ``param_dict``, or the index.
    fallback : Optimizer or str, optional
        Optimizer of the weights in `fallback_for`, see :class:`~fastopt.optimizer.Muon`. Default
        None.
    fallback_for : str or sequence of str, optional
        Regular expressions for the names of weights that the fallback updates.
    cautious, cautious_decay : bool
        See :class:`~fastopt.optimizer.AdamW`, for the weights that the fallback does not update.
        Default False.
    **common
        Arguments of :class:`~fastopt.optimizer.Optimizer`; `state_dtype` must be None.

    Raises
    ------
    ValueError
        An argument is NaN or out of range, a pattern is not a regular expression, or
        `fallback_for` is given without `fallback`. In an update: the rows of a weight cannot be
        divided among its heads.
    TypeError
        An argument has the wrong type, or the fallback has no rule. In an update: the gradient is
        row-sparse, or the weight is on a CUDA device.

    Examples
    --------
    >>> import numpy as np
    >>> from fastopt import optimizer
    >>> updater = optimizer.get_updater(optimizer.AdamMini(learning_rate=0.1))
    >>> weight = np.ones((2, 2))
    >>> updater(0, np.array([[1.0, 7.0], [-3.0, 3.0]]), weight)
    >>> weight
    array([[0.98, 0.86],
           [1.1 , 0.9 ]])
    >>> [array.shape for array in updater.states[0]]
    [(2, 2), (2, 1)]

    With one second moment for each of two heads of attention:

    >>> updater = optimizer.get_updater(optimizer.AdamMini(learning_rate=0.1, heads={"query": 2}))
    >>> weight = np.zeros((4, 1))
    >>> updater("query", np.array([[1.0], [7.0], [3.0], [3.0]]), weight)
    >>> weight.ravel().round(2)
    array([-0.02, -0.14, -0.1 , -0.1 ])
    """

    takes_vectors = True
    learning_rate: RateAttribute = arg(default=0.001)
    beta1: float = arg(default=0.9, check=Real(least=0, below=1))
    beta2: float = arg(default=0.999, check=Real(least=0, below=1))
    epsilon: float = arg(default=1e-08, check=Real(least=0))
    heads: Stored[Any, Mapping[str, int] | None] = arg(default=None, check=_check_heads)
    cautious: bool = arg(default=False, check=FLAG, kw_only=True, new=True)
    cautious_decay: bool = arg(default=False, check=FLAG, kw_only=True, new=True)
    betas: tuple[float, float] = alias("beta1", "beta2", default=(0.9, 0.999), kw_only=True)
    eps: float = alias("epsilon", default=1e-8, kw_only=True)
    rounds_state = False

    def directions(self) -> _Shared:
        """See :meth:`MatrixFamily.directions`."""
        return _Shared()

    def slots(self, shape: Shape) -> Mapping[str, Shape]:
        """See :meth:`MatrixFamily.slots`."""
        return {"mean": shape, "var": (shape[0], 1) if len(shape) > 1 else ()}

    def check_shape(self, index: Index, shape: Shape) -> None:
        """See :meth:`MatrixFamily.check_shape`."""
        self.rows_of(index, shape)

    def patterns(self) -> Mapping[str, Sequence[str]]:
        """See :meth:`MatrixFamily.patterns`."""
        return {**super().patterns(), "heads": [each for each, _ in self.heads or ()]}

    def rows_of(self, index: Index, shape: Shape) -> int:
        """Return the number of rows that share a second moment."""
        if not self.heads or len(shape) < 2:
            return 1
        name = self.name_of(index)
        heads = next((count for each, count in self.heads if re.search(each, name)), shape[0])
        if heads and shape[0] % heads:
            raise ValueError(
                f"{label(index, self.idx2name)}: {shape[0]} rows of shape {shape} cannot be "
                f"divided among {heads} heads"
            )
        return shape[0] // heads if heads else 1
