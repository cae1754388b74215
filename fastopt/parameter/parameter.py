"""A model parameter: its data and gradient, on one or several devices."""

import threading
import warnings
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, ClassVar, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, DTypeLike

from fastopt import initializer
from fastopt._advice import Advice
from fastopt._kernels.device_memory import assign, host, owned, placed
from fastopt._kernels.devices import header, is_cuda
from fastopt.arguments import Checked, brief, choice, number, unknown_arguments
from fastopt.device import Device, cpu, current_device
from fastopt.initializer import FusedRNN, InitDesc, Initializer, create
from fastopt.initializer.base import Init
from fastopt.parameter import checks
from fastopt.parameter.checks import Array, Shape, ctx_is_device
from fastopt.parameter.gradient import DeviceGradient, Gradient
from fastopt.sparse import RowSparse


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


MAKING = threading.Lock()
"""Held while a gradient is created, as each device may have its own thread."""


class Deferred(NamedTuple):
    """Arguments of a deferred initialization."""

    init: Init
    default_init: Init
    devices: tuple[Device, ...]


class Parameter(Checked):
    """A model weight with its gradient, updated by a :class:`~fastopt.trainer.Trainer`.

    After :meth:`initialize` it holds one array for each device, and one gradient buffer for each
    device from the first use of the gradient.

    Parameters
    ----------
    name : str
        Name in messages, optimizers and files. Default ``"weight"``.
    grad_req : {'write', 'add', 'null'}
        How :meth:`add_grad` accumulates: with ``'write'`` the first gradient after a step
        replaces the old one and later ones are added; with ``'add'`` gradients are always added,
        until :meth:`zero_grad`; with ``'null'`` there is no gradient and no update. Default
        ``'write'``.
    shape : int or tuple of int, optional
        Shape, in which 0, -1 and None are unknown dimensions. Default: unknown.
    dtype : str or dtype
        Data type. Default ``"float32"``.
    lr_mult, wd_mult : float
        Multipliers of the learning rate and of the weight decay. Default 1.
    init : str, Initializer or callable, optional
        Fills the array. Default: the argument of :meth:`initialize`.
    allow_deferred_init : bool
        Let :meth:`initialize` defer initialization until the shape is known. Default False.
    differentiable : bool
        If False, `grad_req` stays ``'null'``. Default True.
    stype, grad_stype : {'default', 'row_sparse'}
        Storage type of the data and of the gradient. A row-sparse parameter is read with
        :meth:`row_sparse_data`; a row-sparse gradient is a :class:`~fastopt.sparse.RowSparse`.
    **unknown
        Rejected with an error that lists them.

    Attributes
    ----------
    lr_mult, wd_mult : float
        May be changed at any time.
    init : str, Initializer, callable or None
        The argument `init`.

    Raises
    ------
    TypeError, ValueError
        An argument is invalid.

    Examples
    --------
    >>> import numpy as np
    >>> from fastopt.parameter import Parameter
    >>> from fastopt.trainer import Trainer
    >>> weight = Parameter("weight", shape=3, init="ones")
    >>> weight.initialize()
    >>> trainer = Trainer([weight], "sgd", {"learning_rate": 0.5})
    >>> weight.add_grad(np.array([1.0, 2.0, 4.0]))
    >>> trainer.step(batch_size=2)
    >>> weight.data()
    array([0.75, 0.5 , 0.  ], dtype=float32)
    """

    argument_names: ClassVar[Mapping[str, tuple[str, ...]]] = Advice("PARAMETER_NAMES")
    argument_advice: ClassVar[Mapping[str, str]] = Advice("PARAMETER_ARGUMENTS")

    _data: list[Array] | None = None
    _gradient: Gradient | None = None
    _devices: tuple[Device, ...] = ()
    _deferred: Deferred | None = None
    _trainer: "weakref.ref[Any] | None" = None

    def __init__(
        self,
        name: str = "weight",
        grad_req: str = "write",
        shape: object = None,
        dtype: DTypeLike = "float32",
        lr_mult: float = 1.0,
        wd_mult: float = 1.0,
        init: Init | None = None,
        allow_deferred_init: bool = False,
        differentiable: bool = True,
        stype: str = "default",
        grad_stype: str = "default",
        **unknown: object,
    ) -> None:
        if not isinstance(name, str):
            raise TypeError(f"name must be a string, got {brief(name)}")
        if unknown:
            raise unknown_arguments(type(self), unknown, f"Parameter {name!r}")
        self._name = name
        self.differentiable, self.allow_deferred_init = differentiable, allow_deferred_init
        with self._named():
            self._shape = checks.as_shape(shape)
            self._dtype = checks.as_dtype(dtype)
            self.lr_mult = number("lr_mult", lr_mult)
            self.wd_mult = number("wd_mult", wd_mult)
            self._stype = checks.storage_type("stype", stype)
            self._grad_stype = checks.storage_type("grad_stype", grad_stype)
            if not (init is None or isinstance(init, str) or callable(init)):
                raise TypeError(f"init must be an initializer or its name, got {init!r}")
        self.init = init
        self._grad_req = ""
        self.grad_req = grad_req

    def __repr__(self) -> str:
        kind, dtype = type(self).__name__, self._dtype.name
        return f"{kind}(name={self._name!r}, shape={self.shape}, dtype={dtype})"

    def __setattr__(self, name: str, value: object) -> None:
        if name in checks.ASSIGNED or callable(getattr(type(self), name, None)):
            instead = checks.ASSIGNED.get(name, f"call {name}()")
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
    def dtype(self, dtype: DTypeLike) -> None:
        self.cast(dtype)

    def cast(self, dtype: DTypeLike) -> None:
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
            exact = checks.as_dtype(dtype)
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
    def shape(self, shape: object) -> None:
        new = self._merged(shape)
        if new != checks.as_shape(shape):
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

    def _merged(self, shape: object) -> Shape | None:
        """Return the current shape merged with `shape`."""
        with self._named():
            return checks.merged(self._shape, checks.as_shape(shape))

    def _check_and_setattr(self, **attributes: Any) -> None:
        """Set the shape and the initializer if they are missing; check all other attributes.

        Raises
        ------
        TypeError
            There is no such attribute.
        ValueError
            An attribute differs from that of this parameter.
        """
        shape = self._merged(attributes.pop("shape", None))
        for key, value in attributes.items():
            if key not in checks.COMPARED:
                raise TypeError(f"{self._words} has no attribute {key!r}")
            stored, form = getattr(self, key), checks.COMPARED[key]
            if not (value is None or stored is None or form(value) == form(stored)):
                raise ValueError(f"{self._words} exists with {key}={stored!r}, got {value!r}")
        self._complete(shape)
        if self.init is None:
            self.init = attributes.get("init")

    # Initialization

    @ctx_is_device
    def initialize(
        self,
        init: Init | None = None,
        device: Device | Sequence[Device] | None = None,
        default_init: Init = "uniform",
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
                f"{self._words} is already initialized; force_reinit=True initializes it again",
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
            deferred = Deferred(init, default_init, checks.as_devices(device))
        if checks.is_known(self._shape):
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
        if self._deferred is None or not checks.is_known(shape):
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
                f"{self._words} is not initialized yet, as its shape {self._shape} has unknown "
                "dimensions; set its shape or its data"
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
                f"{self._words} has stype {self._stype!r}, which {method} does not support; "
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

    # Values

    def set_data(self, data: object) -> None:
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
            array = data.to_dense() if isinstance(data, RowSparse) else checks.as_array(data)
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
            checks.as_dtype(data.dtype)
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
                devices = checks.as_devices(device)
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
            devices = checks.as_devices(device)
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
        checks.renamed("reset_ctx", "reset_device")
        self.reset_device(ctx)

    def list_ctx(self) -> list[Device]:
        """Deprecated name of :meth:`list_device`."""
        checks.renamed("list_ctx", "list_device")
        return self.list_device()

    # Gradient

    def _buffers(self) -> Gradient:
        """Return the gradient; it is allocated on first use."""
        copies = self._arrays()
        if self._grad_req == "null":
            raise RuntimeError(f"{self._words} has no gradient because its grad_req is 'null'")
        if self._gradient is not None:
            return self._gradient
        with MAKING:
            if self._gradient is None:
                rows = self._grad_stype == "row_sparse"
                if is_cuda(copies[0]):
                    self._gradient = DeviceGradient(copies[0], rows)
                else:
                    self._gradient = Gradient(copies[0].shape, self._dtype, len(copies), rows)
            return self._gradient

    @ctx_is_device
    def grad(self, device: Device | None = None) -> Any:
        """Return the gradient on one device and mark it as written in this step.

        Parameters
        ----------
        device : Device, optional
            Default: the only device, or the current one if there are several.

        Returns
        -------
        numpy.ndarray or RowSparse
            The array that updates read; it may be written in place. Replace a row-sparse gradient
            with :meth:`set_grad`.

        Raises
        ------
        DeferredInitializationError
            Initialization is deferred until the shape is known.
        RuntimeError
            The parameter is not initialized, not on that device, or has no gradient.
        """
        return self._buffers().touch(self._position(device))

    def __array__(self, dtype: DTypeLike | None = None, copy: bool | None = None) -> Array:
        raise TypeError(f"{self._words} is not an array, its data() is one")

    def list_grad(self) -> list[Any]:
        """Return the gradients on all devices; see :meth:`grad`."""
        gradient = self._buffers()
        return [gradient.touch(i) for i in range(len(gradient.buffers))]

    def add_grad(self, grad: object, device: Device | None = None) -> None:
        """Add to the gradient of this step; nothing happens if ``grad_req`` is ``'null'``.

        With ``'write'`` the first gradient after a step replaces the old one and later ones are
        added, so that the gradients of a shared parameter add up. With ``'add'`` gradients add up
        until :meth:`zero_grad`.

        Parameters
        ----------
        grad : array_like or RowSparse
            Gradient of the parameter's shape; it is converted to the parameter's dtype.
            Row-sparse gradients may also be pairs (values, indices) or scipy.sparse arrays.
        device : Device, optional
            Default: the only device, or the current one if there are several.

        Raises
        ------
        RuntimeError
            The parameter is not initialized, or not on that device.
        TypeError, ValueError
            `grad` has another shape, or a dtype of another kind.

        Examples
        --------
        >>> from fastopt.parameter import Parameter
        >>> weight = Parameter("weight", shape=2)
        >>> weight.initialize()
        >>> weight.add_grad([1, 2])
        >>> weight.add_grad([10, 20])
        >>> weight.grad()
        array([11., 22.], dtype=float32)
        """
        if self._grad_req != "null":
            with self._named():
                always = self._grad_req == "add"
                self._buffers().add(self._position(device), grad, always=always)

    def set_grad(self, grad: object, device: Device | None = None) -> None:
        """Replace the gradient; later calls of :meth:`add_grad` add to it.

        Parameters
        ----------
        grad, device
            See :meth:`add_grad`, also for errors.
        """
        if self._grad_req != "null":
            with self._named():
                self._buffers().set(self._position(device), grad)

    def zero_grad(self) -> None:
        """Set the gradient to zero on all devices, if it exists."""
        if self._gradient is not None:
            self._gradient.zero()

    # Rows

    def row_sparse_data(self, row_id: Array) -> RowSparse:
        """Return some rows of a row-sparse parameter on the only or the current device.

        Parameters
        ----------
        row_id : numpy.ndarray of int
            Row indices; each row is returned once, in increasing order.

        Returns
        -------
        RowSparse
            Copy of the rows.

        Raises
        ------
        RuntimeError
            The parameter is not row-sparse, or has no :class:`~fastopt.trainer.Trainer`.
        TypeError, ValueError
            `row_id` is not an array of integers, or an index is out of range.

        Examples
        --------
        >>> import numpy as np
        >>> from fastopt.parameter import Parameter
        >>> from fastopt.trainer import Trainer
        >>> table = Parameter("table", shape=(1000, 2), init="ones", stype="row_sparse")
        >>> table.initialize()
        >>> trainer = Trainer([table])
        >>> table.row_sparse_data(np.array([7, 3, 7]))
        <RowSparse of shape (1000, 2), float32, 2 indexed rows>
        """
        self._require("row_sparse", "row_sparse_data()", "data()")
        return self._rows(self._position(None), row_id)

    def list_row_sparse_data(self, row_id: Array) -> list[RowSparse]:
        """Return some rows on each device.

        Parameters
        ----------
        row_id : numpy.ndarray
            See :meth:`row_sparse_data`, also for errors.
        """
        self._require("row_sparse", "list_row_sparse_data()", "list_data()")
        return [self._rows(i, row_id) for i in range(len(self._arrays()))]

    def _rows(self, position: int, row_id: object) -> RowSparse:
        if not isinstance(row_id, np.ndarray) or row_id.dtype.kind not in "iu":
            raise TypeError(f"{self._words}: row_id must be an array of integers, got {row_id!r}")
        copy = self._arrays()[position]
        rows = np.unique(row_id)
        if rows.size and not 0 <= rows[0] <= rows[-1] < len(copy):
            raise ValueError(
                f"{self._words}: row_id must be from 0 to {len(copy) - 1}, got {row_id}"
            )
        pulled: RowSparse = self._attached()._row_sparse_pull(copy, rows)
        return pulled

    # Trainer

    def _set_trainer(self, trainer: object) -> None:
        """Attach the parameter to a trainer, or detach it with None.

        Raises
        ------
        RuntimeError
            The parameter is row-sparse and attached to another trainer.
        """
        present = self._trainer() if self._trainer else trainer
        if self._stype == "row_sparse" and None not in (present, trainer) and present != trainer:
            raise RuntimeError(
                f"{self._words} is row-sparse and already belongs to another Trainer"
            )
        self._trainer = None if trainer is None else weakref.ref(trainer)

    def __getstate__(self) -> dict[str, Any]:
        """Return all attributes but the trainer; copies are not attached to it.

        Arrays on a device are copied to the host.
        """
        return {**vars(self), "_trainer": None, "_data": host(self._data)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        if self._data is not None and self._devices[0].device_type == "cuda":
            self._data = [owned(copy, self._devices[0]) for copy in self._data]


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
        array = checks.as_array(value)
        self.value = np.array(array, None if is_array else np.float32)
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
