"""Operations on all parameters of a model: initialize, modify, save and load."""

import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from fastopt.device import Device
from fastopt.initializer import Initializer, create
from fastopt.parameter import files
from fastopt.parameter.deprecated import ctx_is_device
from fastopt.parameter.named import Named
from fastopt.parameter.parameter import Parameter

__all__ = ["ParameterDict"]

LARGE = 1 << 26
"""Number of elements from which initialization shows a progress bar."""


class ParameterDict(Named):
    """Ordered dict of parameters by full name, in order of creation.

    Parameters
    ----------
    prefix : str
        Prepended to the names passed to :meth:`get`. Default ``""``.
    shared : ParameterDict, optional
        Dict that :meth:`get` searches before it creates a parameter.

    Raises
    ------
    TypeError
        An argument has the wrong type.

    Examples
    --------
    >>> from fastopt.parameter import ParameterDict
    >>> params = ParameterDict("fc_")
    >>> weight = params.get("weight", shape=(2, 0))
    >>> params.get("weight", shape=(0, 3)) is weight
    True
    >>> params["fc_weight"]
    Parameter(name='fc_weight', shape=(2, 3), dtype=float32)
    """

    def _unique(self) -> list[Parameter]:
        """Return the parameters without duplicates."""
        return list({id(parameter): parameter for parameter in self.values()}.values())

    @contextmanager
    def _all_or_none(self) -> Iterator[list[Parameter]]:
        """Restore the attributes of all parameters if the block fails."""
        parameters = self._unique()
        before = [dict(vars(parameter)) for parameter in parameters]
        try:
            yield parameters
        except BaseException:
            for parameter, attributes in zip(parameters, before, strict=True):
                vars(parameter).clear()
                vars(parameter).update(attributes)
            raise

    @ctx_is_device
    def initialize(
        self,
        init: Any = "uniform",
        device: Device | Sequence[Device] | None = None,
        verbose: bool = False,
        force_reinit: bool = False,
    ) -> None:
        """Initialize all parameters, with a progress bar for large models if tqdm is installed.

        Parameters
        ----------
        init : str, Initializer or callable
            Used for parameters without their own initializer. Initializers given by name draw
            from its random generator. Default ``"uniform"``.
        device
            See :meth:`Parameter.initialize`.
        verbose : bool
            Log each initialized array. Default False.
        force_reinit
            See :meth:`Parameter.initialize`.

        Raises
        ------
        TypeError, ValueError
            Same errors as :meth:`Parameter.initialize`; no parameter changes in that case.
        """
        init = create(init) if isinstance(init, str) else init
        if verbose and isinstance(init, Initializer):
            init.set_verbosity(True)
        with self._all_or_none() as parameters:
            for parameter in _progress(parameters):
                parameter.initialize(None, device, init, force_reinit)

    def zero_grad(self) -> None:
        """Set all gradients to zero."""
        for parameter in self._unique():
            parameter.zero_grad()

    def list_device(self) -> list[Device]:
        """Return all devices that hold at least one parameter.

        Raises
        ------
        RuntimeError
            A parameter is not initialized.
        """
        return list({device: None for p in self.values() for device in p.list_device()})

    @ctx_is_device
    def reset_device(self, device: Device | Sequence[Device] | None = None) -> None:
        """Move all parameters to other devices.

        Parameters
        ----------
        device : Device or sequence of Device, optional
            See :meth:`Parameter.reset_device`, also for errors.
        """
        with self._all_or_none() as parameters:
            for parameter in parameters:
                parameter.reset_device(device)

    def setattr(self, name: str, value: Any) -> None:
        """Set an attribute of all parameters, such as ``grad_req`` or ``lr_mult``.

        Parameters
        ----------
        name : str
            The attribute.
        value : object
            New value.

        Raises
        ------
        TypeError, ValueError
            Parameters have no settable attribute of that name, or the value is invalid.

        Examples
        --------
        >>> from fastopt.parameter import ParameterDict
        >>> params = ParameterDict()
        >>> bias = params.get("fc_bias")
        >>> params.select(".*_bias").setattr("wd_mult", 0)
        >>> bias.wd_mult
        0
        """
        with self._all_or_none() as parameters:
            for parameter in parameters:
                if not (isinstance(name, str) and _may_be_set(parameter, name)):
                    raise ValueError(f"{parameter!r} has no attribute {name!r} that can be set")
                setattr(parameter, name, value)

    def save(self, filename: files.PathLike, strip_prefix: str = "") -> None:
        """Write all parameters to a safetensors file, atomically.

        Parameters
        ----------
        filename : str or path
            The file.
        strip_prefix : str
            Prefix to remove from all names. Default ``""``.

        Raises
        ------
        ValueError
            A name does not start with `strip_prefix`, or is ``"__metadata__"`` in the file.
        RuntimeError
            A parameter is not initialized.
        OSError
            The file cannot be written.
        """
        names = self._names_in_file(strip_prefix)
        files.save(filename, {names[name]: p._mean() for name, p in self.items()})

    @ctx_is_device
    def load(
        self,
        filename: files.PathLike,
        device: Device | Sequence[Device] | None = None,
        allow_missing: bool = False,
        ignore_extra: bool = False,
        restore_prefix: str = "",
        cast_dtype: bool = False,
        dtype_source: str = "current",
    ) -> None:
        """Load parameters from a file; uninitialized parameters are initialized from it.

        Parameters
        ----------
        filename : str or path
            File written by :meth:`save`, another safetensors file, or a ``.params`` file of
            MXNet, whose row-sparse arrays are loaded as dense ones and whose name prefixes
            ``arg:`` and ``aux:`` are dropped.
        device : Device or list of Device, optional
            Device of parameters that are not initialized yet. Default ``cpu(0)``.
        allow_missing : bool
            Leave parameters that are not in the file unchanged. Default False.
        ignore_extra : bool
            Skip arrays in the file that are not parameters of this dict. Default False.
        restore_prefix : str
            Prepended to all names in the file. Default ``""``.
        cast_dtype : bool
            Allow the dtypes of file and parameter to differ. Default False.
        dtype_source : {'current', 'saved'}
            Which of two different dtypes to keep. Default ``'current'``.

        Raises
        ------
        TypeError, ValueError
            File and parameters do not match, or the file format is not supported
            (:class:`~fastopt.checkpoint.CheckpointError`). No parameter changes.
        OSError
            The file cannot be read.
        """
        names = self._names_in_file(restore_prefix)
        with files.opened(filename) as file:
            saved = set(file.keys())
            missing = sorted(set(names.values()) - saved)
            extra = sorted(saved - set(names.values()))
            if missing and not allow_missing:
                raise ValueError(f"{filename} lacks {missing}; allow_missing=True leaves them out")
            if extra and not ignore_extra:
                raise ValueError(f"{filename} also has {extra}; ignore_extra=True skips them")
            calls = [
                self[name]._loading(file.get_tensor(of), device, cast_dtype, dtype_source)
                for name, of in names.items()
                if of in saved
            ]
        for call in calls:
            call()

    def _names_in_file(self, prefix: str) -> dict[str, str]:
        """Map parameter names to names in a file, which do not have `prefix`."""
        for name in self:
            if not name.startswith(prefix):
                raise ValueError(f"Parameter {name!r} does not begin with {prefix!r}")
        return {name: name.removeprefix(prefix) for name in self}


def _may_be_set(parameter: Parameter, name: str) -> bool:
    """Whether `name` is a public attribute, not a method or a read-only property."""
    setter = getattr(getattr(type(parameter), name, None), "fset", None)
    return not name.startswith("_") and (name in vars(parameter) or setter is not None)


def _progress(parameters: Sequence[Parameter]) -> Iterable[Parameter]:
    """Return the parameters, wrapped in a progress bar if there are many elements."""
    if sum(math.prod(p.shape or (0,)) for p in parameters) < LARGE:
        return parameters
    try:
        from tqdm import tqdm
    except ImportError:
        return parameters
    bar: Iterable[Parameter] = tqdm(parameters, "initialize", unit="parameter", disable=None)
    return bar
