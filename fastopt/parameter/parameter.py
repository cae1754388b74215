"""A model parameter: its data and gradient, on one or several devices."""

import threading
import weakref
from typing import Any

import numpy as np

from fastopt._kernels.device_memory import host, owned
from fastopt._kernels.devices import is_cuda
from fastopt.device import Device
from fastopt.parameter.checks import Array
from fastopt.parameter.deprecated import ctx_is_device
from fastopt.parameter.gradient import Gradient
from fastopt.parameter.on_device import DeviceGradient
from fastopt.parameter.written import Written
from fastopt.sparse import RowSparse

__all__ = ["Parameter"]

MAKING = threading.Lock()
"""Held while a gradient is created, as each device may have its own thread."""


class Parameter(Written):
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

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Array:
        raise TypeError(f"{self._words} is not an array, its data() is one")

    def list_grad(self) -> list[Any]:
        """Return the gradients on all devices; see :meth:`grad`."""
        gradient = self._buffers()
        return [gradient.touch(i) for i in range(len(gradient.buffers))]

    def add_grad(self, grad: Any, device: Device | None = None) -> None:
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

    def set_grad(self, grad: Any, device: Device | None = None) -> None:
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
        <RowSparse of shape (1000, 2), float32, 2 rows listed>
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

    def _rows(self, position: int, row_id: Any) -> RowSparse:
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

    def _set_trainer(self, trainer: Any) -> None:
        """Attach the parameter to a trainer, or detach it with None.

        Raises
        ------
        RuntimeError
            The parameter is row-sparse and attached to another trainer.
        """
        present = self._trainer() if self._trainer else trainer
        if self._stype == "row_sparse" and None not in (present, trainer) and present != trainer:
            raise RuntimeError(
                f"{self._words} is row-sparse and belongs to another Trainer, the one it can have"
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
