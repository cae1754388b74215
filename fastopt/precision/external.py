"""Initializer for weights provided by the caller."""

import numpy as np

from fastopt.arguments import is_array
from fastopt.parameter.checks import Array, as_shape, merged
from fastopt.precision.info import FLOATS, ParameterInfo, Workspace, entered, full_name


class ExternalInitializer:
    """Use an existing array as a weight, which is updated in place.

    Parameters
    ----------
    array : numpy.ndarray, optional
        The weight. Default: :meth:`create_param` looks it up in `init_net`.

    Raises
    ------
    TypeError
        `array` is not a NumPy array of float32, float64, float16 or bfloat16.

    Examples
    --------
    >>> import numpy as np
    >>> from fastopt.precision import ExternalInitializer
    >>> table = np.ones((1000, 16), np.float32)
    >>> ExternalInitializer(table).create_param("table", None, (1000, 16)).blob is table
    True
    """

    def __init__(self, array: Array | None = None) -> None:
        self.array = None if array is None else _of_floats("ExternalInitializer", array)

    def create_param(
        self, param_name: str, init_net: Workspace | None, shape: object
    ) -> ParameterInfo:
        """Check the array and return it as a parameter.

        Parameters
        ----------
        param_name : str
            Name of the parameter in the current :class:`~fastopt.scope.name_scope`.
        init_net : dict of str to numpy.ndarray, or None
            Workspace that holds the array under its full name, or to which it is added.
        shape : int or tuple of int, or None
            Expected shape, where 0, -1 and None match any length.

        Returns
        -------
        ParameterInfo
            The parameter.

        Raises
        ------
        TypeError
            `param_name` is not a str, or the array is not a NumPy array of float32, float64,
            float16 or bfloat16.
        ValueError
            The array is missing or given twice, has another shape, is read-only, or contains
            infinities or NaN.
        """
        name = full_name(param_name)
        if self.array is not None:
            return entered(ParameterInfo(name, _checked(name, self.array, shape)), init_net)
        if init_net is None or name not in init_net:
            raise ValueError(f"{name}: neither ExternalInitializer nor init_net has its array")
        return ParameterInfo(name, _checked(name, init_net[name], shape))


def _of_floats(name: str, array: object) -> Array:
    """Return `array`; TypeError unless it is a NumPy array of a supported float dtype."""
    if not is_array(array):
        raise TypeError(f"{name}: array must be a NumPy array, got {type(array).__name__}")
    if array.dtype.name not in FLOATS or not array.dtype.isnative:
        raise TypeError(f"{name}: array must be of {', '.join(FLOATS)}, got {array.dtype}")
    floats: Array = array
    return floats


def _checked(name: str, given: object, shape: object) -> Array:
    """Return the array if it is a valid weight of this shape."""
    array = _of_floats(name, given)
    if not array.flags.writeable:
        raise ValueError(f"{name}: array is read-only, updates write to it")
    if not np.isfinite(array).all():
        raise ValueError(f"{name}: array holds infinities or NaN")
    try:
        merged(array.shape, as_shape(shape))
    except (TypeError, ValueError) as error:
        raise type(error)(f"{name}: {error}") from None
    return array
