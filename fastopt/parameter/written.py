"""Writing of parameter values: setting, loading, and moving to other devices."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np

from fastopt._kernels.device_memory import assign, host
from fastopt._kernels.devices import header, is_cuda
from fastopt.arguments import choice
from fastopt.device import Device, cpu
from fastopt.parameter.checks import Array, as_array, as_devices, as_dtype
from fastopt.parameter.deprecated import ctx_is_device, renamed
from fastopt.parameter.stored import Stored
from fastopt.sparse import RowSparse

__all__ = ["Written"]


class Written(Stored):
    """Base of :class:`~fastopt.parameter.Parameter`: methods that write new values."""

    def set_data(self, data: Any) -> None:
        """Write new values into the arrays on all devices.

        Parameters
        ----------
        data : array_like or RowSparse
            Values of the parameter's shape. If initialization is deferred, they complete the shape
            and are used instead of the initializer.

        Raises
        ------
        RuntimeError
            The parameter is not initialized.
        TypeError, ValueError
            `data` has another shape, or a dtype of another kind.

        Examples
        --------
        >>> from fastopt.parameter import Parameter
        >>> weight = Parameter("weight", shape=(0, 2), allow_deferred_init=True)
        >>> weight.initialize()
        >>> weight.set_data([[1, 2]])
        >>> weight.data()
        array([[1., 2.]], dtype=float32)
        """
        if self._deferred is None:
            self._arrays()
        with self._named():
            array = data.to_dense() if isinstance(data, RowSparse) else as_array(data)
        self._check_shape(array)
        if not np.can_cast(array.dtype, self._dtype, "same_kind"):
            raise TypeError(f"{self._words} cannot hold {array.dtype}, it is {self._dtype}")
        self._write(array, self._deferred.devices if self._deferred else self._devices)

    def _check_shape(self, array: Array) -> None:
        """Raise ValueError unless an array agrees with the known dimensions."""
        if self._merged(array.shape) != array.shape:
            raise ValueError(f"{self._words} cannot have shape {array.shape}")

    def _write(self, array: Array, devices: Sequence[Device]) -> None:
        """Write an array to all devices."""
        if self._data is None:
            self._shape = array.shape
            self._place(np.array(array, self._dtype, order="C"), devices)
        else:
            for copy in self._data:
                if is_cuda(copy):
                    assign(header(copy), np.array(array, self._dtype, order="C"))
                else:
                    copy[...] = array
            self._tell(array)

    def _load_init(
        self,
        data: Any,
        device: Device | Sequence[Device] | None,
        cast_dtype: bool = False,
        dtype_source: str = "current",
    ) -> None:
        """Initialize from saved values, or write them into the existing arrays."""
        self._loading(as_array(data), device, cast_dtype, dtype_source)()

    def _loading(
        self,
        data: Array,
        device: Device | Sequence[Device] | None,
        cast_dtype: bool,
        dtype_source: str,
    ) -> partial[None]:
        """Validate saved values and return the call that loads them.

        Raises
        ------
        TypeError, ValueError
            The shape differs, the dtype differs and `cast_dtype` is False, or the parameter is
            on other devices.
        """
        with self._named():
            choice("dtype_source", dtype_source, "current", "saved")
            as_dtype(data.dtype)
        self._check_shape(data)
        if data.dtype != self._dtype and not cast_dtype:
            raise ValueError(
                f"{self._words} is {self._dtype} and was saved as {data.dtype}; cast_dtype=True "
                "casts the saved numbers, dtype_source='saved' with it the parameter"
            )
        there = self._devices if self._deferred is None else self._deferred.devices
        devices = there or (cpu(),)
        if device is not None:
            with self._named():
                devices = as_devices(device)
            if there and set(devices) != set(there):
                raise ValueError(
                    f"{self._words} cannot be loaded on {list(devices)}, it is on {list(there)}"
                )
        dtype = data.dtype if dtype_source == "saved" else self._dtype
        if self._gradient is not None and dtype != self._dtype:
            with self._named():
                self._gradient.cast(dtype)  # raises before any parameter changes
        return partial(self._load, data, dtype, there or devices)

    def _load(self, data: Array, dtype: np.dtype[Any], devices: Sequence[Device]) -> None:
        self.cast(dtype)
        self._write(data, devices)

    @ctx_is_device
    def reset_device(self, device: Device | Sequence[Device] | None = None) -> None:
        """Move the parameter to other devices, with new arrays for its data and gradient.

        The new value is the mean of all copies, which are normally equal.

        Parameters
        ----------
        device : Device or list of Device, optional
            Default: the current device.

        Raises
        ------
        ValueError
            The parameter is not initialized, or cannot be on that device.
        RuntimeError
            The parameter is row-sparse and has no Trainer.

        Examples
        --------
        >>> from fastopt.device import cpu
        >>> from fastopt.parameter import Parameter
        >>> weight = Parameter("weight", shape=2)
        >>> weight.initialize()
        >>> weight.reset_device([cpu(0), cpu(1)])
        >>> weight.list_device()
        [cpu(0), cpu(1)]
        """
        with self._named():
            devices = as_devices(device)
        if self._data is not None:
            self._place(self._mean(), devices)
        elif self._deferred is not None:
            self._deferred = self._deferred._replace(devices=devices)
        else:
            raise ValueError(f"{self._words} is not initialized, so it cannot move to {device}")

    def _mean(self) -> Array:
        """Return the mean of all copies, exactly their value if they are equal."""
        first: Array
        first, *others = map(host, self._arrays())
        if self._stype != "default":
            self._attached()
        if all(np.array_equal(first, other) for other in others):
            return first.copy()
        # A sum of half-precision values may overflow.
        mean = np.mean([copy.astype(np.float64) for copy in self._arrays()], axis=0)
        return np.array(mean, self._dtype)

    def reset_ctx(self, ctx: Device | Sequence[Device] | None) -> None:
        """Deprecated name of :meth:`reset_device`.

        Parameters
        ----------
        ctx : Device or sequence of Device
            The devices.
        """
        renamed("reset_ctx", "reset_device")
        self.reset_device(ctx)

    def list_ctx(self) -> list[Device]:
        """Deprecated name of :meth:`list_device`."""
        renamed("list_ctx", "list_device")
        return self.list_device()
