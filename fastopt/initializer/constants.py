"""Initializers with fixed values."""

import numpy as np
from numpy.typing import ArrayLike

from fastopt.initializer.base import Array, InitDesc, Initializer, alias, assign, is_real, register
from fastopt.initializer.draws import Seed


class _Fixed(Initializer):
    """Initializer that takes no arguments but `rng`, which it does not use."""

    def __init__(self, *, rng: Seed = None) -> None:
        super().__init__(rng=rng)


@register
@alias("zeros")
class Zero(_Fixed):
    """Fill weights with zeros.

    Parameters
    ----------
    rng
        See :class:`Initializer`, also for errors.

    Examples
    --------
    >>> import numpy as np
    >>> from fastopt import initializer
    >>> weight = np.empty(2)
    >>> initializer.Zero()(initializer.InitDesc("fc_weight"), weight)
    >>> weight
    array([0., 0.])
    """

    def _init_weight(self, desc: InitDesc, arr: Array) -> None:
        self._init_zero(desc, arr)


@register
@alias("ones")
class One(_Fixed):
    """Fill weights with ones.

    Parameters
    ----------
    rng
        See :class:`Initializer`, also for errors.

    Examples
    --------
    >>> import numpy as np
    >>> from fastopt import initializer
    >>> weight = np.empty(2)
    >>> initializer.One()(initializer.InitDesc("fc_weight"), weight)
    >>> weight
    array([1., 1.])
    """

    def _init_weight(self, desc: InitDesc, arr: Array) -> None:
        self._init_one(desc, arr)


@register
class Constant(Initializer):
    """Fill weights with a number or an array.

    Parameters
    ----------
    value : float or array_like
        Must broadcast to the weight's shape.
    rng
        See :class:`Initializer`, also for errors.

    Examples
    --------
    >>> import numpy as np
    >>> from fastopt import initializer
    >>> weight = np.empty((2, 2))
    >>> initializer.Constant([3, 4])(initializer.InitDesc("fc_weight"), weight)
    >>> weight
    array([[3., 4.], [3., 4.]])
    """

    def __init__(self, value: ArrayLike, *, rng: Seed = None) -> None:
        try:
            self.value = np.array(value)
        except ValueError:  # rows of different lengths
            self.value = np.array(None)
        if not is_real(self.value.dtype):
            raise TypeError(f"value must be a real number or an array of them, got {value!r}")
        super().__init__(rng=rng, value=self.value.tolist())

    def _init_weight(self, desc: InitDesc, arr: Array) -> None:
        assign(desc, arr, self.value, "value")


@register
class Bilinear(_Fixed):
    r"""Fill the kernel of a transposed convolution with the weights of bilinear upsampling.

    .. math:: w_{oiyx} = (1 - |y / f - c|) (1 - |x / f - c|),
        \quad f = \lceil \mathrm{width} / 2 \rceil, \quad c = \frac{2 f - 1 - f \bmod 2}{2 f}

    for upsampling by a factor of :math:`f` (arXiv:1411.4038). Both axes use the :math:`f` of the
    width, and every pair of channels has the same kernel.

    Parameters
    ----------
    rng
        See :class:`Initializer`, also for errors.

    Raises
    ------
    ValueError
        The weight does not have shape (out, in, height, width).

    Examples
    --------
    >>> import numpy as np
    >>> from fastopt import initializer
    >>> weight = np.empty((1, 1, 4, 4))
    >>> initializer.Bilinear()(initializer.InitDesc("up_weight"), weight)
    >>> weight[0, 0, 1]
    array([0.1875, 0.5625, 0.5625, 0.1875])
    """

    def _init_weight(self, desc: InitDesc, arr: Array) -> None:
        self._init_bilinear(desc, arr)
