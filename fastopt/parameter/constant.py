"""Constants of a model, which are not trained."""

import warnings

import numpy as np
from numpy.typing import ArrayLike

from fastopt import initializer
from fastopt.parameter.checks import as_array
from fastopt.parameter.parameter import Parameter


class Constant(Parameter):
    """A parameter that has no gradient and is not updated; ``set_data`` changes it.

    Parameters
    ----------
    value : array_like
        Value of the constant. Anything but a NumPy array is converted to float32.

    Attributes
    ----------
    value : numpy.ndarray
        Copy of the value, which :meth:`initialize` uses.

    Raises
    ------
    TypeError
        `value` does not consist of real numbers.

    Examples
    --------
    >>> from fastopt.parameter import Constant
    >>> mean = Constant([0.5, 0.25])
    >>> mean.initialize()
    >>> mean.data()
    array([0.5 , 0.25], dtype=float32)
    """

    def __init__(self, value: ArrayLike) -> None:
        is_array = isinstance(value, (np.ndarray, np.generic))
        given = as_array(value)
        self.value = np.array(given, None if is_array else np.float32)
        super().__init__(
            name="const",
            grad_req="null",
            shape=self.value.shape,
            dtype=self.value.dtype,
            init=initializer.Constant(self.value),
        )

    @property
    def grad_req(self) -> str:
        """Always ``'null'``; setting it to anything else warns and has no effect."""
        return self._grad_req

    @grad_req.setter
    def grad_req(self, grad_req: str) -> None:
        if grad_req != "null":
            warnings.warn(
                f"{self._words} keeps grad_req 'null', {grad_req!r} is ignored", stacklevel=2
            )
        self._grad_req = "null"
