"""Attributes of a parameter: name, shape, dtype and multipliers."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, ClassVar

import numpy as np

from fastopt._kernels.device_memory import host, placed
from fastopt._kernels.devices import header
from fastopt._naming import Constructor, unknown_arguments
from fastopt.arguments import brief, choice, number
from fastopt.initializer import Initializer, create
from fastopt.parameter.checks import Array, Shape, as_dtype, as_shape, merged
from fastopt.parameter.gradient import Gradient

__all__ = ["Attributes"]


class Attributes(metaclass=Constructor):
    """Base of :class:`~fastopt.parameter.Parameter`, which documents the arguments."""

    argument_names: ClassVar[Mapping[str, tuple[str, ...]]] = {"initializer": ("init",)}
    argument_advice: ClassVar[Mapping[str, str]] = dict.fromkeys(
        ("requires_grad", "trainable"), "grad_req='null' is for parameters that are not trained"
    )

    _data: list[Array] | None = None
    _gradient: Gradient | None = None

    def __init__(
        self,
        name: str = "weight",
        grad_req: str = "write",
        shape: Any = None,
        dtype: Any = "float32",
        lr_mult: float = 1.0,
        wd_mult: float = 1.0,
        init: Any = None,
        allow_deferred_init: bool = False,
        differentiable: bool = True,
        stype: str = "default",
        grad_stype: str = "default",
        **unknown: Any,
    ) -> None:
        if not isinstance(name, str):
            raise TypeError(f"name must be a string, got {brief(name)}")
        if unknown:
            raise unknown_arguments(type(self), unknown, f"Parameter {name!r}")
        self._name = name
        self.differentiable, self.allow_deferred_init = differentiable, allow_deferred_init
        with self._named():
            self._shape = as_shape(shape)
            self._dtype = as_dtype(dtype)
            self.lr_mult = number("lr_mult", lr_mult)
            self.wd_mult = number("wd_mult", wd_mult)
            self._stype = _stype("stype", stype)
            self._grad_stype = _stype("grad_stype", grad_stype)
            if not (init is None or isinstance(init, str) or callable(init)):
                raise TypeError(f"init must be an initializer or its name, got {init!r}")
        self.init = init
        self._grad_req = ""
        self.grad_req = grad_req

    def __repr__(self) -> str:
        kind, dtype = type(self).__name__, self._dtype.name
        return f"{kind}(name={self._name!r}, shape={self.shape}, dtype={dtype})"

    def __setattr__(self, name: str, value: Any) -> None:
        if name in ASSIGNED or callable(getattr(type(self), name, None)):
            instead = ASSIGNED.get(name, f"call {name}()")
            raise AttributeError(f"{self._words}: {name} cannot be assigned; {instead}")
        super().__setattr__(name, value)

    @property
    def name(self) -> str:
        """Name of the parameter."""
        return self._name

    @property
    def stype(self) -> str:
        """Storage type of the data: ``"default"``, or ``"row_sparse"`` if it is read by rows."""
        return self._stype

    @property
    def grad_stype(self) -> str:
        """Storage type of the gradient: ``"default"`` or ``"row_sparse"``."""
        return self._grad_stype

    @property
    def grad_req(self) -> str:
        """How gradients are accumulated; changing it discards the current gradient."""
        return self._grad_req

    @grad_req.setter
    def grad_req(self, grad_req: str) -> None:
        with self._named():
            choice("grad_req", grad_req, "write", "add", "null")
        grad_req = grad_req if self.differentiable else "null"
        if grad_req != self._grad_req:
            self._grad_req, self._gradient = grad_req, None

    @property
    def dtype(self) -> np.dtype[Any]:
        """Dtype; setting it calls :meth:`~fastopt.parameter.Parameter.cast`."""
        return self._dtype

    @dtype.setter
    def dtype(self, dtype: Any) -> None:
        self.cast(dtype)

    def cast(self, dtype: Any) -> None:
        """Change the dtype of the parameter and of its gradient.

        Parameters
        ----------
        dtype : str or dtype
            A real dtype. If it differs from the current one, new arrays are allocated. An
            optimizer that has state for the parameter no longer accepts it.

        Raises
        ------
        TypeError
            `dtype` is not a real dtype, or a row-sparse gradient cannot have it. Nothing changes.

        Examples
        --------
        >>> from fastopt.parameter import Parameter
        >>> weight = Parameter("weight", shape=2)
        >>> weight.initialize("ones")
        >>> weight.cast("float64")
        >>> weight.data()
        array([1., 1.])
        """
        with self._named():
            exact = as_dtype(dtype)
            if exact == self._dtype:
                return
            data, gradient = self._data, self._gradient
            if data is not None:
                data = [placed(host(copy).astype(exact), header(copy)) for copy in data]
            if gradient is not None:
                gradient = gradient.cast(exact)
        self._dtype, self._data, self._gradient = exact, data, gradient

    @property
    def shape(self) -> Shape | None:
        """Shape, with -1 for unknown dimensions, or None.

        Unknown dimensions can be set; known ones cannot be changed. Setting the last unknown
        dimension of a parameter with deferred initialization initializes it.

        Raises
        ------
        ValueError
            The new shape does not agree with the current one.
        """
        return self._shape

    @shape.setter
    def shape(self, shape: Any) -> None:
        new = self._merged(shape)
        if new != as_shape(shape):
            raise ValueError(f"{self._words}: shape {new} is known, got {shape}")
        self._complete(new)

    @property
    def _words(self) -> str:
        """Prefix of error messages."""
        return f"{type(self).__name__} {self._name!r}"

    @contextmanager
    def _named(self) -> Iterator[None]:
        """Prefix errors about arguments with the parameter's name."""
        try:
            yield
        except (TypeError, ValueError) as error:
            kind = TypeError if isinstance(error, TypeError) else ValueError
            raise kind(f"{self._words}: {error}") from error

    def _merged(self, shape: Any) -> Shape | None:
        """Return the current shape merged with `shape`."""
        with self._named():
            return merged(self._shape, as_shape(shape))

    def _complete(self, shape: Shape | None) -> None:
        """Set a shape that agrees with the current one."""
        self._shape = shape

    def _check_and_setattr(self, **given: Any) -> None:
        """Set the shape and the initializer if they are missing; check all other attributes.

        Raises
        ------
        TypeError
            There is no such attribute.
        ValueError
            An attribute differs from that of this parameter.
        """
        shape = self._merged(given.pop("shape", None))
        for key, value in given.items():
            if key not in COMPARED:
                raise TypeError(f"{self._words} has no attribute {key!r}")
            stored, form = getattr(self, key), COMPARED[key]
            if not (value is None or stored is None or form(value) == form(stored)):
                raise ValueError(f"{self._words} is there with {key} {stored!r}, got {value!r}")
        self._complete(shape)
        if self.init is None:
            self.init = given.get("init")


ASSIGNED = {
    "data": "call set_data(values)",
    "grad": "call set_grad(values), or add_grad(values) for one of several uses",
    "requires_grad": "set grad_req, to 'null' for a parameter that is not trained",
}
"""Advice for assignments that work in other libraries but would have no effect here."""


def _stype(role: str, stype: str) -> str:
    if stype == "csr":
        raise ValueError(f"{role} cannot be 'csr', only rows can be sparse: 'row_sparse'")
    return choice(role, stype, "default", "row_sparse")


def _itself(value: Any) -> Any:
    return value


def _text(init: Any) -> Any:
    """Return a comparable form of an initializer; a function is equal only to itself."""
    return create(init).dumps() if isinstance(init, (str, Initializer)) else init


COMPARED: dict[str, Callable[[Any], Any]] = {
    "grad_req": _itself,
    "dtype": as_dtype,
    "lr_mult": _itself,
    "wd_mult": _itself,
    "init": _text,
    "allow_deferred_init": _itself,
    "differentiable": _itself,
    "stype": _itself,
    "grad_stype": _itself,
}
"""Attributes that must agree when a parameter is requested again, with comparison keys."""
