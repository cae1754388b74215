"""Initializers of one or two precisions."""

from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import numpy as np

from fastopt import initializer
from fastopt.parameter.checks import Shape, as_dtype, as_shape, is_known
from fastopt.precision.info import (
    FLOATS,
    HALVES,
    Array,
    ParameterInfo,
    Workspace,
    entered,
    full_name,
)

__all__ = [
    "Initializer",
    "PseudoFP16Initializer",
    "ReversePseudoFP16Initializer",
    "update_initializer",
]


class Initializer:
    """Makes weights of one precision with an initializer of :mod:`fastopt.initializer`.

    Parameters
    ----------
    operator_name : str, optional
        Registered name of the initializer. Default: :meth:`update` gives it.
    dtype : str or dtype
        float32 (the default), float64, float16 or bfloat16.
    **kwargs
        Arguments of the initializer.

    Raises
    ------
    TypeError
        The initializer does not take an argument, or there are arguments and no name.
    ValueError
        There is no such initializer, or `dtype` is another one.

    Examples
    --------
    >>> from fastopt.precision import Initializer
    >>> Initializer("constant", value=3).create_param("fc_bias", None, (2,)).blob
    array([3., 3.], dtype=float32)
    """

    dtypes: ClassVar[tuple[str, ...]] = FLOATS
    """What `dtype` may be, the default first."""

    def __init__(
        self, operator_name: str | None = None, *, dtype: Any = None, **kwargs: Any
    ) -> None:
        self.dtype = as_dtype(self.dtypes[0] if dtype is None else dtype)
        if self.dtype.name not in self.dtypes:
            raise ValueError(f"dtype must be one of {', '.join(self.dtypes)}, got {dtype!r}")
        self.operator_name: str | None = None
        self.operator_kwargs: dict[str, Any] = {}
        self._fill: initializer.Initializer | None = None
        if operator_name is not None:
            self.update(operator_name, kwargs)
        elif kwargs:
            raise TypeError(f"{', '.join(kwargs)} need an operator_name that takes them")

    def update(self, operator_name: str, kwargs: Mapping[str, Any]) -> None:
        """Say which initializer to use, if that has not been said yet.

        Parameters
        ----------
        operator_name : str
            Registered name of the initializer.
        kwargs : dict of str to object
            Arguments of the initializer.

        Raises
        ------
        ValueError
            It has been said already, or there is no such initializer.
        TypeError
            The initializer does not take an argument.
        """
        if self.operator_name is not None:
            raise ValueError(
                f"operator_name is {self.operator_name!r} for good, {operator_name!r} cannot "
                "replace it"
            )
        self._fill = initializer.create(operator_name, **kwargs)
        self.operator_name, self.operator_kwargs = operator_name, dict(kwargs)

    def create_param(
        self, param_name: str, init_net: Workspace | None, shape: Any
    ) -> ParameterInfo:
        """Make the arrays of one parameter.

        Parameters
        ----------
        param_name : str
            Its name in the present :class:`~fastopt.scope.name_scope`.
        init_net : dict of str to numpy.ndarray, or None
            Takes in the arrays under their names.
        shape : int or tuple of int
            Shape of the weight.

        Returns
        -------
        ParameterInfo
            The arrays.

        Raises
        ------
        TypeError
            `param_name` is not a str, or the initializer cannot fill such an array.
        ValueError
            `operator_name` is not known yet; `shape` is not known; a name is taken in `init_net`;
            a value is too large for `dtype`.
        """
        name = full_name(param_name)
        if self._fill is None:
            raise ValueError(f"{name}: operator_name is not known, update() gives it")
        known = as_shape(shape)
        if known is None or not is_known(known):
            raise ValueError(f"{name}: shape must be known, got {shape!r}")
        return entered(self._make(name, known, self._fill), init_net)

    def _make(self, name: str, shape: Shape, fill: initializer.Initializer) -> ParameterInfo:
        return ParameterInfo(name, _filled(name, shape, self.dtype, fill))


class PseudoFP16Initializer(Initializer):
    """Makes half-precision weights that are optimized in a float32 master.

    Gradients are computed with the half-precision weight. The master takes the updates, so that
    small ones are not rounded away; it starts from the values before they are rounded. An updater
    uses it once :meth:`ParameterInfo.bind` was called; without that the first update warns.

    Parameters
    ----------
    operator_name : str, optional
        As for :class:`Initializer`.
    dtype : str or dtype
        Of the weight: float16 (the default) or bfloat16.
    **kwargs
        Arguments of the initializer.

    References
    ----------
    Micikevicius et al., "Mixed precision training", 2018, arXiv:1710.03740.

    Examples
    --------
    >>> from fastopt.precision import PseudoFP16Initializer
    >>> info = PseudoFP16Initializer("one").create_param("fc_weight", None, (2, 3))
    >>> {name: str(array.dtype) for name, array in info.arrays.items()}
    {'fc_weight': 'float16', 'fc_weight_fp32': 'float32'}
    """

    dtypes = HALVES

    def _make(self, name: str, shape: Shape, fill: initializer.Initializer) -> ParameterInfo:
        single, half = _pair(name, shape, self.dtype, fill)
        return ParameterInfo(name, half, {"float32": single})


class ReversePseudoFP16Initializer(Initializer):
    """Makes float32 weights with a half-precision copy that every update writes anew.

    Gradients are computed with the copy, and update the weight.

    Parameters
    ----------
    operator_name : str, optional
        As for :class:`Initializer`.
    dtype : str or dtype
        Of the copy: float16 (the default) or bfloat16.
    **kwargs
        Arguments of the initializer.

    Examples
    --------
    >>> from fastopt.precision import ReversePseudoFP16Initializer
    >>> info = ReversePseudoFP16Initializer("one").create_param("fc_weight", None, (2, 3))
    >>> {name: str(array.dtype) for name, array in info.arrays.items()}
    {'fc_weight': 'float32', 'fc_weight_fp16': 'float16'}
    """

    dtypes = HALVES

    def _make(self, name: str, shape: Shape, fill: initializer.Initializer) -> ParameterInfo:
        single, half = _pair(name, shape, self.dtype, fill)
        return ParameterInfo(name, single, {self.dtype.name: half})


def update_initializer(
    initializer_class: Callable[..., Any] | None,
    operator_name_and_kwargs: tuple[str, Mapping[str, Any]] | None,
    default_operator_name_and_kwargs: tuple[str, Mapping[str, Any]],
) -> Any:
    """Make the initializer that a layer was asked for, with the layer's default where it was not.

    Parameters
    ----------
    initializer_class : type or None
        :class:`Initializer` or what is made like it; None means :class:`Initializer`.
    operator_name_and_kwargs : tuple of (str, dict), or None
        Its arguments; None means the default.
    default_operator_name_and_kwargs : tuple of (str, dict)
        The default.

    Raises
    ------
    TypeError
        The pair is not a name and a dict, or `initializer_class` cannot be called.

    Examples
    --------
    >>> from fastopt import precision
    >>> made = precision.update_initializer(
    ...     precision.PseudoFP16Initializer, None, ("normal", {"sigma": 0.1})
    ... )
    >>> made.operator_name, made.operator_kwargs
    ('normal', {'sigma': 0.1})
    """
    if not callable(initializer_class or Initializer):
        raise TypeError(f"initializer_class must be a class or None, got {initializer_class!r}")
    pair = operator_name_and_kwargs or default_operator_name_and_kwargs
    match pair:
        case (str() as name, Mapping() as kwargs):
            return (initializer_class or Initializer)(name, **kwargs)
    raise TypeError(f"expected an operator name and a dict of its arguments, got {pair!r}")


def _filled(name: str, shape: Shape, dtype: Any, fill: initializer.Initializer) -> Array:
    """Return a new array that the initializer has filled, whatever the end of its name says."""
    array = np.empty(shape, dtype)
    fill(initializer.InitDesc(name, {"__init__": fill}), array)
    return array


def _pair(
    name: str, shape: Shape, dtype: np.dtype[Any], fill: initializer.Initializer
) -> tuple[Array, Array]:
    """Return a new float32 array, and the same rounded to half precision."""
    single = _filled(name, shape, np.float32, fill)
    with np.errstate(over="ignore"):
        half = single.astype(dtype)
    if not np.isfinite(half).all():
        raise ValueError(f"{name}: a value is too large for {dtype.name}, or not a number")
    return single, half
