"""Initializers of weights in one or two precisions."""

from collections.abc import Callable, Mapping, MutableMapping
from typing import Any, ClassVar, Self

import numpy as np
from numpy.typing import DTypeLike

from fastopt import initializer
from fastopt._engine.mixed_precision import split_state
from fastopt._engine.validate import check_index, naming
from fastopt._updater.updater import Updater
from fastopt.arguments import is_array
from fastopt.checkpoint.restore.describe import check_updater
from fastopt.optimizer.unbound import bound, expect_bind
from fastopt.parameter.checks import Array, Shape, as_dtype, as_shape, is_known, merged
from fastopt.scope import current_scope

__all__ = [
    *("ExternalInitializer", "Initializer", "ParameterInfo", "PseudoFP16Initializer"),
    *("ReversePseudoFP16Initializer", "update_initializer"),
]

Workspace = MutableMapping[str, Array]

SUFFIX = {"float32": "_fp32", "float16": "_fp16", "bfloat16": "_bf16"}
HALVES = ("float16", "bfloat16")
FLOATS = ("float32", "float64", *HALVES)


class ParameterInfo:
    """A weight and its copies in other precisions.

    Parameters
    ----------
    name : str
        Name of the weight.
    blob : numpy.ndarray
        The weight, as passed to an updater.
    blob_copy : dict of str to numpy.ndarray, optional
        Copies by dtype. ``"float32"`` is the master copy of a half-precision weight, to which
        updates are applied; ``"float16"`` or ``"bfloat16"`` is the rounded copy of a float32
        weight.

    Examples
    --------
    >>> import numpy as np
    >>> import fastopt
    >>> from fastopt.precision import PseudoFP16Initializer
    >>> updater = fastopt.Updater(fastopt.SGD(lr=0.5, multi_precision=True))
    >>> init = PseudoFP16Initializer("constant", value=0.75)
    >>> weight = init.create_param("w", None, 1).bind(updater)
    >>> updater.step({"w": np.array([2**-12], np.float16)}, {"w": weight.blob})
    >>> weight.arrays
    {'w': array([0.75], dtype=float16), 'w_fp32': array([0.7498779], dtype=float32)}
    """

    def __init__(
        self, name: str, blob: Array, blob_copy: Mapping[str, Array] | None = None
    ) -> None:
        self.name = name
        self.blob = blob
        self._copies = dict(blob_copy or {})
        self._bound: tuple[Any, int | str] | None = None
        self._workspace: Workspace | None = None
        if "float32" in self._copies:
            expect_bind(blob)

    def __repr__(self) -> str:
        arrays = ", ".join(f"{name}: {array.dtype}" for name, array in self.arrays.items())
        return f"<ParameterInfo {arrays}, shape {self.blob.shape}>"

    @property
    def blob_copy(self) -> dict[str, Array]:
        """Copies of the weight by dtype; the master is the array that updates write.

        With ``master="split"`` there is no separate array for the master.
        """
        if "float32" not in self._copies or self._bound is None:
            return dict(self._copies)
        updater, index = self._bound
        if index not in updater.states:
            return dict(self._copies)
        exact, _ = split_state(updater.optimizer, self.name, self.blob, updater.states[index])
        return {"float32": exact[0]} if exact[0] is not self.blob else {}

    @property
    def arrays(self) -> dict[str, Array]:
        """All arrays by name; copies have the suffix ``_fp32``, ``_fp16`` or ``_bf16``."""
        copies = {self.name + SUFFIX[dtype]: array for dtype, array in self.blob_copy.items()}
        return {self.name: self.blob, **copies}

    def bind(self, updater: Updater, index: int | str | None = None) -> Self:
        """Attach the copies to an updater: its updates of `index` write them in the same pass.

        Call it before the first update of `index`, and after ``updater.set_states``. A restored
        master keeps its values. From then on, the workspace holds the master that is updated; if
        no single array holds the whole master, with ``master="split"`` or under MPI, it is removed
        from the workspace.

        Parameters
        ----------
        updater : fastopt.optimizer.Updater
            Its optimizer needs ``multi_precision=True`` if the weight has a master.
        index : int or str, optional
            Index of the weight in calls of `updater`. Default: its name.

        Returns
        -------
        ParameterInfo
            The object itself.

        Raises
        ------
        TypeError
            `updater` is not an updater, or `index` is not an index.
        ValueError
            The weight has a master, but the optimizer does not use masters.
        """
        check_updater(updater)
        index = self.name if index is None else check_index(index)
        for dtype, array in self._copies.items():
            if dtype != "float32":
                updater.set_copy(index, array)
            elif index not in updater.states:
                updater.set_master(index, array)
                masters = updater.optimizer.masters_given
                if index in masters:
                    masters[index] = array  # this very array, so that the workspace sees updates
        self._bound = updater, index
        bound(self.blob)
        self._enter_master()
        return self

    def _enter_master(self) -> None:
        """Put the master that updates write into the workspace, if it is a single array."""
        name = self.name + SUFFIX["float32"]
        if self._workspace is None or self._bound is None or name not in self._workspace:
            return
        updater, index = self._bound
        whole = index in updater.states or index in updater.optimizer.masters_given
        if whole and updater.optimizer.master != "split":
            self._workspace[name] = self.blob_copy["float32"]
        else:
            del self._workspace[name]


def full_name(param_name: str) -> str:
    """Return the full name of a parameter in the current scope; TypeError if it is not a str."""
    if not isinstance(param_name, str):
        raise TypeError(f"param_name must be a str, got {type(param_name).__name__}")
    return current_scope().gen_name(param_name)


def entered(info: ParameterInfo, init_net: Workspace | None) -> ParameterInfo:
    """Add the arrays to a workspace; ValueError if one of their names is taken."""
    if not isinstance(init_net, MutableMapping | None):
        raise TypeError(f"init_net must be a dict of arrays or None, got {init_net!r}")
    if init_net is not None:
        if taken := sorted(info.arrays.keys() & init_net.keys()):
            raise ValueError(f"{info.name}: init_net has {', '.join(taken)} already")
        init_net.update(info.arrays)
        info._workspace = init_net
    return info


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
    return array


def _checked(name: str, values: object, shape: object) -> Array:
    """Return the array if it is a valid weight of this shape."""
    array = _of_floats(name, values)
    if not array.flags.writeable:
        raise ValueError(f"{name}: array is read-only, updates write to it")
    if not np.isfinite(array).all():
        raise ValueError(f"{name}: array holds infinities or NaN")
    with naming(name):
        merged(array.shape, as_shape(shape))
    return array
