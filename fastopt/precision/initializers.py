"""Initializers of weights in one or two precisions."""

from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import numpy as np
from numpy.typing import DTypeLike

from fastopt import initializer
from fastopt.parameter.checks import Array, Shape, as_dtype, as_shape, is_known
from fastopt.precision.info import FLOATS, HALVES, ParameterInfo, Workspace, entered, full_name


class Initializer:
    """Create weights of one precision with an initializer of :mod:`fastopt.initializer`.

    Parameters
    ----------
    operator_name : str, optional
        Registered name of the initializer. Default: set later by :meth:`update`.
    dtype : str or dtype
        float32 (the default), float64, float16 or bfloat16.
    **kwargs
        Arguments of the initializer.

    Raises
    ------
    TypeError
        The initializer does not accept an argument, or there are arguments without a name.
    ValueError
        There is no such initializer, or `dtype` is not supported.

    Examples
    --------
    >>> from fastopt.precision import Initializer
    >>> Initializer("constant", value=3).create_param("fc_bias", None, (2,)).blob
    array([3., 3.], dtype=float32)
    """

    dtypes: ClassVar[tuple[str, ...]] = FLOATS
    """Supported values of `dtype`, the default first."""

    def __init__(
        self, operator_name: str | None = None, *, dtype: DTypeLike | None = None, **kwargs: object
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
        """Set the initializer, if it is not set yet.

        Parameters
        ----------
        operator_name : str
            Registered name of the initializer.
        kwargs : dict of str to object
            Arguments of the initializer.

        Raises
        ------
        ValueError
            The initializer is set already, or there is no initializer of that name.
        TypeError
            The initializer does not accept an argument.
        """
        if self.operator_name is not None:
            raise ValueError(
                f"operator_name is {self.operator_name!r} for good, {operator_name!r} cannot "
                "replace it"
            )
        self._fill = initializer.create(operator_name, **kwargs)
        self.operator_name, self.operator_kwargs = operator_name, dict(kwargs)

    def create_param(
        self, param_name: str, init_net: Workspace | None, shape: object
    ) -> ParameterInfo:
        """Create the arrays of one parameter.

        Parameters
        ----------
        param_name : str
            Name of the parameter in the current :class:`~fastopt.scope.name_scope`.
        init_net : dict of str to numpy.ndarray, or None
            Workspace to which the arrays are added by name.
        shape : int or tuple of int
            Shape of the weight.

        Returns
        -------
        ParameterInfo
            The parameter.

        Raises
        ------
        TypeError
            `param_name` is not a str, or the initializer cannot fill such an array.
        ValueError
            `operator_name` is not set yet; `shape` has unknown dimensions; a name is taken in
            `init_net`; a value is too large for `dtype`.
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
    """Create half-precision weights with float32 master weights.

    Gradients are computed with the half-precision weight. Updates are applied to the master, so
    that small ones are not lost to rounding; it starts from the unrounded initial values. An
    updater uses the master after :meth:`ParameterInfo.bind`; without that call the first update
    warns.

    Parameters
    ----------
    operator_name : str, optional
        See :class:`Initializer`.
    dtype : str or dtype
        Dtype of the weight: float16 (the default) or bfloat16.
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
    """Create float32 weights with a half-precision copy that every update rewrites.

    Gradients are computed with the copy and applied to the weight.

    Parameters
    ----------
    operator_name : str, optional
        See :class:`Initializer`.
    dtype : str or dtype
        Dtype of the copy: float16 (the default) or bfloat16.
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
    """Create the initializer of a layer, from the user's arguments or the layer's defaults.

    Parameters
    ----------
    initializer_class : type or None
        :class:`Initializer` or a callable with the same arguments. None means
        :class:`Initializer`.
    operator_name_and_kwargs : tuple of (str, dict), or None
        Name and arguments of the initializer. None means the default.
    default_operator_name_and_kwargs : tuple of (str, dict)
        Default name and arguments.

    Raises
    ------
    TypeError
        The pair is not a name and a dict, or `initializer_class` is not callable.

    Examples
    --------
    >>> from fastopt import precision
    >>> init = precision.update_initializer(
    ...     precision.PseudoFP16Initializer, None, ("normal", {"sigma": 0.1})
    ... )
    >>> init.operator_name, init.operator_kwargs
    ('normal', {'sigma': 0.1})
    """
    if not callable(initializer_class or Initializer):
        raise TypeError(f"initializer_class must be a class or None, got {initializer_class!r}")
    pair = operator_name_and_kwargs or default_operator_name_and_kwargs
    match pair:
        case (str() as name, Mapping() as kwargs):
            return (initializer_class or Initializer)(name, **kwargs)
    raise TypeError(f"expected an operator name and a dict of its arguments, got {pair!r}")


def _filled(name: str, shape: Shape, dtype: DTypeLike, fill: initializer.Initializer) -> Array:
    """Return a new array filled by the initializer, regardless of the ending of its name."""
    array = np.empty(shape, dtype)
    fill(initializer.InitDesc(name, {"__init__": fill}), array)
    return array


def _pair(
    name: str, shape: Shape, dtype: np.dtype[Any], fill: initializer.Initializer
) -> tuple[Array, Array]:
    """Return a new float32 array and its copy rounded to half precision."""
    single = _filled(name, shape, np.float32, fill)
    with np.errstate(over="ignore"):
        half = single.astype(dtype)
    if not np.isfinite(half).all():
        raise ValueError(f"{name}: a value is too large for {dtype.name}, or not a number")
    return single, half
