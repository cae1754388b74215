"""Arrays of a parameter, one on each device; allocation waits until the shape is known."""

import warnings
import weakref
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from fastopt._kernels.device_memory import owned
from fastopt.device import Device, current_device
from fastopt.initializer import FusedRNN, InitDesc, Initializer, create
from fastopt.parameter.attributes import Attributes
from fastopt.parameter.checks import Array, Shape, as_devices, is_known
from fastopt.parameter.deprecated import ctx_is_device

__all__ = ["DeferredInitializationError", "Stored"]


class DeferredInitializationError(RuntimeError):
    """Raised when a parameter is read while its initialization waits for its shape.

    Examples
    --------
    >>> from fastopt.parameter import DeferredInitializationError, Parameter
    >>> weight = Parameter("weight", shape=(3, 0), allow_deferred_init=True)
    >>> weight.initialize("zeros")
    >>> try:
    ...     weight.data()
    ... except DeferredInitializationError:
    ...     weight.shape = (3, 2)
    >>> weight.data().shape
    (3, 2)
    """


class Deferred(NamedTuple):
    """Arguments of a deferred initialization."""

    init: Any
    default_init: Any
    devices: tuple[Device, ...]


class Stored(Attributes):
    """Base of :class:`~fastopt.parameter.Parameter`: initialization and access to the arrays."""

    _devices: tuple[Device, ...] = ()
    _deferred: Deferred | None = None
    _trainer: "weakref.ref[Any] | None" = None

    # Initialization

    @ctx_is_device
    def initialize(
        self,
        init: Any = None,
        device: Device | Sequence[Device] | None = None,
        default_init: Any = "uniform",
        force_reinit: bool = False,
    ) -> None:
        """Allocate and initialize the arrays, or defer it until the shape is known.

        Parameters
        ----------
        init : str, Initializer or callable, optional
            Fills the array, whatever the ending of the parameter's name; a function is called with
            name and array. Default: the attribute ``init``, or `default_init` if that is None.
            If the attribute is a ``FusedRNN``, it stays in use and `init` fills its parts.
        device : Device or list of Device, optional
            Devices that hold a copy. Default: the current device.
        default_init : str or Initializer
            Initializers given by name draw from its random generator. Default ``"uniform"``,
            from -0.07 to 0.07.
        force_reinit : bool
            Initialize again if the parameter is initialized already, instead of warning. Default
            False.

        Raises
        ------
        ValueError
            The shape is not known and the parameter does not allow deferred initialization, or
            the initializer cannot fill the array.
        TypeError
            An argument has the wrong type.

        Examples
        --------
        >>> from fastopt.parameter import Parameter
        >>> bias = Parameter("bias", shape=2)
        >>> bias.initialize("ones")
        >>> bias.data()
        array([1., 1.], dtype=float32)
        """
        if self._data is not None and not force_reinit:
            warnings.warn(
                f"{self._words} is initialized already; force_reinit=True makes it anew",
                stacklevel=3,
            )
            return
        if isinstance(self.init, FusedRNN):  # packed array; `init` is for its parts
            init, default_init = self.init, default_init if init is None else init
        elif init is None:
            init = default_init if self.init is None else self.init
        with self._named():
            if isinstance(init, str):
                create(init)  # raises if the name is invalid
            deferred = Deferred(init, default_init, as_devices(device))
        if is_known(self._shape):
            self._fill(deferred)
        elif self.allow_deferred_init:
            self._deferred = deferred
        else:
            raise ValueError(
                f"{self._words} cannot be initialized, its shape is {self._shape}; set the shape, "
                "or allow_deferred_init=True to do so later"
            )

    def _fill(self, deferred: Deferred) -> None:
        """Initialize a parameter of known shape."""
        init, default, devices = deferred
        data = np.zeros(self._shape or (), self._dtype)
        if not isinstance(default, (str, Initializer)):
            default = "uniform"
        create(default)(InitDesc(self._name, {"__init__": init}), data)
        self._place(data, devices)
        self._tell(data)

    def _place(self, data: Array, devices: Sequence[Device]) -> None:
        """Store `data` on the first device and copies on the others."""
        if devices[0].device_type == "cuda":
            self._require("default", "a CUDA device", "a device of the CPU")
            self._data = [owned(data, devices[0])]
        else:
            self._data = [data, *(data.copy() for _ in devices[1:])]
        self._devices, self._deferred, self._gradient = tuple(devices), None, None

    def _complete(self, shape: Shape | None) -> None:
        before, self._shape = self._shape, shape
        if self._deferred is None or not is_known(shape):
            return
        try:
            self._fill(self._deferred)
        except BaseException:
            self._shape = before
            raise

    # Access

    def _arrays(self) -> list[Array]:
        """Return all copies; raise an error if the parameter is not initialized."""
        if self._data is not None:
            return self._data
        if self._deferred is not None:
            raise DeferredInitializationError(
                f"{self._words} is not initialized yet, it waits for its shape: {self._shape} "
                "is all that is known; set its shape or its data"
            )
        raise RuntimeError(f"{self._words} is not initialized; call initialize() first")

    def _position(self, device: Device | None) -> int:
        """Return the index of the copy on a device, by default the only or the current one."""
        self._arrays()
        if device is None:
            if len(self._devices) == 1:
                return 0
            device = current_device()
        if device not in self._devices:
            raise RuntimeError(
                f"{self._words} is not on device {device}, only on {list(self._devices)}"
            )
        return self._devices.index(device)

    def _require(self, stype: str, method: str, instead: str) -> None:
        """Raise RuntimeError unless the parameter has storage type `stype`."""
        if self._stype != stype:
            raise RuntimeError(
                f"{self._words} has stype {self._stype!r}, so that {method} is not for it; "
                f"use {instead}"
            )

    def _attached(self) -> Any:
        """Return the trainer, through which row-sparse data are pulled."""
        trainer = self._trainer() if self._trainer else None
        if trainer is None:
            raise RuntimeError(f"{self._words} is row-sparse and has no Trainer; make one first")
        return trainer

    def _tell(self, values: Array) -> None:
        """Pass new values to the trainer, before they are rounded to the parameter's dtype."""
        trainer = self._trainer() if self._trainer else None
        if trainer is not None:
            trainer._follow(self, values)

    @ctx_is_device
    def data(self, device: Device | None = None) -> Array:
        """Return the parameter's array on one device; writes to it change the parameter.

        Parameters
        ----------
        device : Device, optional
            Default: the only device, or the current one if there are several.

        Raises
        ------
        DeferredInitializationError
            Initialization is deferred until the shape is known.
        RuntimeError
            The parameter is not initialized, not on that device, or row-sparse.
        """
        self._require("default", "data()", "row_sparse_data()")
        return self._arrays()[self._position(device)]

    def list_data(self) -> list[Array]:
        """Return the arrays on all devices, in the order of :meth:`list_device`.

        Raises
        ------
        RuntimeError
            Same errors as :meth:`data`.
        """
        self._require("default", "list_data()", "list_row_sparse_data()")
        return list(self._arrays())

    def list_device(self) -> list[Device]:
        """Return the devices that the parameter is or will be initialized on.

        Raises
        ------
        RuntimeError
            The parameter has not been initialized.
        """
        if self._deferred is not None:
            return list(self._deferred.devices)
        self._arrays()
        return list(self._devices)
