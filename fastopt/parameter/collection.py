"""What is done to all parameters of a model: they are initialized, changed, saved and loaded."""

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
"""Numbers whose initialization takes long enough to show progress."""


class ParameterDict(Named):
    """Parameters by their full names, in the order in which they were made.

    Parameters
    ----------
    prefix : str
        Put in front of the names that :meth:`get` is given. Default ``""``.
    shared : ParameterDict, optional
        Where :meth:`get` looks for parameters before it makes them.

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
        """Return the parameters, those under several names once."""
        return list({id(parameter): parameter for parameter in self.values()}.values())

    @contextmanager
    def _all_or_none(self) -> Iterator[list[Parameter]]:
        """Give the parameters their old attributes back if the block fails."""
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
        """Initialize all parameters, with a progress bar if that takes long and tqdm is there.

        Parameters
        ----------
        init : str, Initializer or callable
            For parameters that have none of their own; it also lends its random numbers to
            those that are given by name. Default ``"uniform"``.
        device
            See :meth:`Parameter.initialize`.
        verbose : bool
            Log what is initialized. Default False.
        force_reinit
            See :meth:`Parameter.initialize`.

        Raises
        ------
        TypeError, ValueError
            As :meth:`Parameter.initialize` does; no parameter changes then.
        """
        init = create(init) if isinstance(init, str) else init
        if verbose and isinstance(init, Initializer):
            init.set_verbosity(True)
        with self._all_or_none() as parameters:
            for parameter in _progress(parameters):
                parameter.initialize(None, device, init, force_reinit)

    def zero_grad(self) -> None:
        """Make all gradients zero."""
        for parameter in self._unique():
            parameter.zero_grad()

    def list_device(self) -> list[Device]:
        """Return the devices that some parameter is on.

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
            As :meth:`Parameter.reset_device` takes it, with the same errors.
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
            What it becomes.

        Raises
        ------
        TypeError, ValueError
            Parameters have no such attribute that can be set, or it cannot have that value.

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
        """Write all parameters to a safetensors file, which is replaced whole or not at all.

        Parameters
        ----------
        filename : str or path
            The file.
        strip_prefix : str
            Taken off all names. Default ``""``.

        Raises
        ------
        ValueError
            A name does not begin with `strip_prefix`, or is ``"__metadata__"`` in the file.
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
        """Read parameters from a file; those that are not initialized are initialized by it.

        Parameters
        ----------
        filename : str or path
            From :meth:`save`, or another safetensors file, or a ``.params`` file of MXNet, whose
            row-sparse arrays come dense; the beginnings ``arg:`` and ``aux:`` of names are dropped.
        device : Device or list of Device, optional
            For parameters that are not initialized. Default ``cpu(0)``.
        allow_missing : bool
            Leave parameters that are not in the file as they are. Default False.
        ignore_extra : bool
            Skip arrays that are no parameters of this dict. Default False.
        restore_prefix : str
            Put in front of all names of the file. Default ``""``.
        cast_dtype : bool
            Let the dtypes of file and parameter differ. Default False.
        dtype_source : {'current', 'saved'}
            Which one stays then. Default ``'current'``.

        Raises
        ------
        TypeError, ValueError
            File and parameters do not fit together, or it is not such a file
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
        """Name of each parameter in a file that leaves `prefix` out."""
        for name in self:
            if not name.startswith(prefix):
                raise ValueError(f"Parameter {name!r} does not begin with {prefix!r}")
        return {name: name.removeprefix(prefix) for name in self}


def _may_be_set(parameter: Parameter, name: str) -> bool:
    """Whether `name` is a public attribute, and no method or property that is only read."""
    setter = getattr(getattr(type(parameter), name, None), "fset", None)
    return not name.startswith("_") and (name in vars(parameter) or setter is not None)


def _progress(parameters: Sequence[Parameter]) -> Iterable[Parameter]:
    """Return the parameters, with a progress bar around them where it is worth it."""
    if sum(math.prod(p.shape or (0,)) for p in parameters) < LARGE:
        return parameters
    try:
        from tqdm import tqdm
    except ImportError:
        return parameters
    bar: Iterable[Parameter] = tqdm(parameters, "initialize", unit="parameter", disable=None)
    return bar
