"""Base class of optimizers of one's own for weight matrices, and orthogonalization."""

from collections.abc import Mapping
from typing import Any, Literal

import numpy as np

from fastopt._engine.newton_schulz import COEFFICIENTS, NewtonSchulz
from fastopt._engine.validate import label, leaves
from fastopt.arguments import Choice, Descriptions, Integer, Real
from fastopt.optimizer.matrices import MatrixFamily, Rescaled, Shape
from fastopt.optimizer.optimizer import Array, Index

CHECKS: Descriptions = {
    "coefficients": Choice(*COEFFICIENTS),
    "steps": Integer(1, 100),
    "eps": Real(1e-30),
}


def orthogonalize(
    matrix: Any,
    coefficients: Literal["polar", "polar_express", "quintic"] = "polar",
    steps: int = 5,
    eps: float = 1e-7,
) -> Array:
    r"""Return the nearest matrix with orthonormal rows or columns, approximately.

    For the singular value decomposition :math:`U S V^T` it approximates :math:`U V^T` by matrix
    products alone, see :class:`~fastopt.optimizer.Muon`.

    Parameters
    ----------
    matrix : array_like
        Matrix of shape (rows, columns), or several of shape (count, rows, columns); float32 or
        float64. Other types are converted to float32.
    coefficients : str
        'polar' and 'polar_express', of Polar Express, or 'quintic', of the first Newton-Schulz
        iteration of Muon. Default 'polar'.
    steps : int
        Number of iterations, from 1 to 100. Default 5.
    eps : float
        Lower bound of the Frobenius norm that the matrix is divided by, at least 1e-30. Default
        1e-7.

    Returns
    -------
    numpy.ndarray
        New array of the same shape.

    Raises
    ------
    ValueError
        `matrix` has neither two nor three dimensions, or another argument is out of range.
    TypeError
        `matrix` has other than real numbers.

    Examples
    --------
    >>> import numpy as np
    >>> from fastopt import optimizer
    >>> optimizer.orthogonalize(np.array([[3.0, 0.0], [0.0, -0.5]])).round(1) + 0
    array([[ 1.,  0.],
           [ 0., -1.]])
    """
    matrix = np.asarray(matrix)
    if matrix.ndim not in (2, 3):
        raise ValueError(f"matrix must have two or three dimensions, got shape {matrix.shape}")
    if matrix.dtype.kind in "cOSU":
        raise TypeError(f"matrix must have real numbers, got {matrix.dtype}")
    if matrix.dtype not in (np.float32, np.float64):
        matrix = matrix.astype(np.float32)
    given = {"coefficients": coefficients, "steps": steps, "eps": eps}
    checked = [check(name, given[name]) for name, check in CHECKS.items()]
    result = np.empty(matrix.shape, matrix.dtype)
    if result.size:
        NewtonSchulz()(matrix, result, *checked)
    return result


def _real(context: str, shape: Shape, value: Any) -> Array:
    """Return `value` as an array of real numbers, or raise if it has another shape."""
    if value is None:
        raise TypeError(f"{context} an array of shape {shape}, got None")
    array = np.asarray(value)
    if array.shape != shape:
        raise ValueError(f"{context} an array of shape {shape}, got {array.shape}")
    if np.iscomplexobj(array):
        raise TypeError(f"{context} an array of real numbers, got {array.dtype}")
    return array


class _Computed:
    """Directions that the method of a subclass computes."""

    def __init__(self) -> None:
        self._rescaled = Rescaled()

    def reserve(self, main: Any, index: Index, direction: Array) -> None:
        """See :meth:`Directions.reserve <fastopt.optimizer.matrices.Directions.reserve>`."""
        self._rescaled.reserve(direction)

    def write(
        self, main: Any, index: Index, weight: Array, direction: Array, grad: Array, state: Any
    ) -> bool:
        """See :meth:`Directions.write <fastopt.optimizer.matrices.Directions.write>`."""
        gradient = self._rescaled(main, index, direction, grad)
        arrays = dict(zip(main.named_slots(weight.shape), leaves(state), strict=True))
        slots = dict(arrays)
        result = main.direction(main.updates_of(index), gradient, slots)
        context = f"{label(index, main.idx2name)}: {type(main).__name__}.direction() must"
        if slots.keys() != arrays.keys():
            raise ValueError(f"{context} keep the slots {[*arrays]}, got {[*slots]}")
        assigned = {
            name: _real(f"{context} assign to {name!r}", arrays[name].shape, value).copy()
            for name, value in slots.items()
            if value is not arrays[name]
        }
        direction[...] = _real(f"{context} return", weight.shape, result)
        for name, value in assigned.items():
            arrays[name][...] = value
        return True


class MatrixOptimizer(MatrixFamily):
    r"""Base class of optimizers for matrices, whose steps are computed by NumPy.

    .. math::
        w \leftarrow (1 - \eta \lambda) w - \eta d

    with the direction d that the method :meth:`direction` of a subclass returns. The base class
    counts updates, computes the learning rate and the weight decay, rescales and clips the gradient
    before, and has the masters of half-precision weights, the forms `cautious` and
    `cautious_decay`, and another optimizer for vectors and other weights.

    Parameters
    ----------
    learning_rate : float or callable, optional
        Default 0.001; None uses the scheduler's ``base_lr``.
    fallback : Optimizer or str, optional
        Optimizer of weights with fewer than two dimensions, and of those in `fallback_for`, see
        :class:`~fastopt.optimizer.Muon`. Default None: such weights raise an error.
    fallback_for : str or sequence of str, optional
        Regular expressions for the names of weights that the fallback updates.
    cautious, cautious_decay : bool
        See :class:`~fastopt.optimizer.AdamW`. Default False.
    **common
        Arguments of :class:`~fastopt.optimizer.Optimizer`.

    Raises
    ------
    ValueError, TypeError
        Like :class:`~fastopt.optimizer.Muon`; in an update also if :meth:`direction` returns an
        array of another shape.

    Examples
    --------
    >>> import numpy as np
    >>> from fastopt import optimizer
    >>> class Orthogonal(optimizer.MatrixOptimizer):
    ...     def slots(self, shape):
    ...         return {"mom": shape}
    ...
    ...     def direction(self, t, grad, state):
    ...         state["mom"] += 0.1 * (grad - state["mom"])
    ...         return optimizer.orthogonalize(state["mom"])
    >>> updater = optimizer.get_updater(Orthogonal(learning_rate=0.1))
    >>> weight = np.zeros((2, 2))
    >>> updater(0, np.array([[3.0, 0.0], [0.0, -1.0]]), weight)
    >>> weight.round(2) + 0
    array([[-0.1,  0. ],
           [ 0. ,  0.1]])
    """

    directions = _Computed

    def slots(self, shape: Shape) -> Mapping[str, Shape]:
        """Return the shapes of the state arrays of a weight by name; by default there are none.

        Parameters
        ----------
        shape : tuple of int
            Shape of the weight.
        """
        return {}

    def direction(self, t: int, grad: Array, state: Mapping[str, Array]) -> Array:
        """Return the direction of a step, which is subtracted from the weight.

        Parameters
        ----------
        t : int
            Number of updates of this weight, from 1, whatever `begin_num_update` is.
        grad : numpy.ndarray
            Rescaled and clipped gradient in the weight's shape, float32 or float64. The array
            belongs to the optimizer, and has another gradient after the call.
        state : dict of str to numpy.ndarray
            The arrays of :meth:`slots`, which are 0 at first. Change them in place, or assign
            others of the same shape, which are copied. If the method raises an error, what it has
            changed in place until then remains.

        Returns
        -------
        numpy.ndarray
            Array of the same shape.
        """
        raise NotImplementedError(f"{type(self).__name__} needs a method direction(t, grad, state)")
