"""Parameters of a model by name: creation, lookup, sharing, initialization and files."""

import math
import re
from collections.abc import Callable, ItemsView, Iterator, KeysView, Mapping, Sequence, ValuesView
from contextlib import contextmanager
from functools import partial
from typing import Any, Self

import numpy as np
from numpy.typing import ArrayLike

from fastopt._advice import closest
from fastopt._console import progress
from fastopt.checkpoint.foreign.ndarray import LIST_HEAD, list_from_bytes
from fastopt.checkpoint.format.container import METADATA, layout, read_array, written
from fastopt.checkpoint.format.errors import CheckpointError, read_from
from fastopt.checkpoint.format.files import PathLike, write_atomically
from fastopt.device import Device
from fastopt.initializer import Initializer, create
from fastopt.initializer.base import Init
from fastopt.parameter.checks import Array, ctx_is_device
from fastopt.parameter.parameter import Constant, Parameter

LARGE = 1 << 26
"""Number of elements from which initialization shows a progress bar."""


class ParameterDict:
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

    def __init__(self, prefix: str = "", shared: "ParameterDict | None" = None) -> None:
        if not isinstance(prefix, str):
            raise TypeError(f"prefix must be a string, got {prefix!r}")
        if not isinstance(shared, ParameterDict | None):
            raise TypeError(f"shared must be a ParameterDict, got {type(shared).__name__}")
        self._prefix, self._shared = prefix, shared
        self._parameters: dict[str, Parameter] = {}

    @property
    def prefix(self) -> str:
        """Prefix of the names passed to :meth:`get`."""
        return self._prefix

    def __getitem__(self, name: str) -> Parameter:
        parameter = self._parameters.get(name)
        if parameter is None:
            prefixed = f"{self._prefix}{name}"
            meant = prefixed if prefixed in self._parameters else closest(name, self._parameters)
            advice = f"; did you mean {meant!r}?" if meant else ""
            raise KeyError(f"no parameter {name!r}{advice}")
        return parameter

    def __iter__(self) -> Iterator[str]:
        return iter(self._parameters)

    def __len__(self) -> int:
        return len(self._parameters)

    def __contains__(self, name: object) -> bool:
        return name in self._parameters

    def keys(self) -> KeysView[str]:
        """Return the full names."""
        return self._parameters.keys()

    def values(self) -> ValuesView[Parameter]:
        """Return the parameters."""
        return self._parameters.values()

    def items(self) -> ItemsView[str, Parameter]:
        """Return pairs of full name and parameter."""
        return self._parameters.items()

    def __repr__(self) -> str:
        lines = "".join(f"\n  {parameter!r}" for parameter in self.values())
        return f"{type(self).__name__}({self._prefix!r}):{lines}"

    def get(self, name: str, **kwargs: Any) -> Parameter:
        """Return the parameter of this name; create it if neither this dict nor `shared` has it.

        Parameters
        ----------
        name : str
            Name without the prefix.
        **kwargs
            Arguments of :class:`Parameter`. If the parameter exists, they must agree with it;
            `shape` may complete its shape, and `init` is used if it has no initializer.

        Raises
        ------
        TypeError, ValueError
            An argument is invalid, or does not agree with the existing parameter.
        """
        full = self._full(name)
        parameter = self._found(full)
        if parameter is None:
            parameter = Parameter(full, **kwargs)
        else:
            parameter._check_and_setattr(**kwargs)
        self._parameters[full] = parameter
        return parameter

    def get_constant(self, name: str, value: ArrayLike | None = None) -> Constant:
        """Return the constant of this name; create it if neither this dict nor `shared` has it.

        Parameters
        ----------
        name : str
            Name without the prefix.
        value : array_like, optional
            Its value; an existing constant must have the same value.

        Raises
        ------
        ValueError
            The constant does not exist and `value` is None, the existing one has another value,
            or the existing parameter is not a constant.
        """
        full = self._full(name)
        constant = self._found(full)
        if constant is None:
            if value is None:
                raise ValueError(f"Constant {full!r} does not exist; pass a value to create it")
            constant = Constant(value)
            constant._name = full
        if not isinstance(constant, Constant):
            raise ValueError(f"{constant!r} is not a Constant")
        if value is not None and not np.array_equal(constant.value, Constant(value).value):
            raise ValueError(f"Constant {full!r} exists with another value")
        self._parameters[full] = constant
        return constant

    def _full(self, name: str) -> str:
        if not isinstance(name, str):
            raise TypeError(f"name must be a string, got {name!r}")
        return self._prefix + name

    def _found(self, full: str) -> Parameter | None:
        if full not in self and self._shared is not None:
            return self._shared._found(full)
        return self._parameters.get(full)

    def update(self, other: "ParameterDict | Mapping[str, Parameter]") -> None:
        """Add all parameters of another dict, under the same names.

        Parameters
        ----------
        other : ParameterDict or mapping of str to Parameter
            The parameters.

        Raises
        ------
        TypeError
            `other` is not a mapping of names to parameters.
        ValueError
            A name refers to different parameters in the two dicts.
        """
        if not isinstance(other, (ParameterDict, Mapping)):
            raise TypeError(f"other must hold Parameters by name, got {type(other).__name__}")
        for name, parameter in other.items():
            if not (isinstance(name, str) and isinstance(parameter, Parameter)):
                raise TypeError(f"other must hold Parameters by name, got {name!r}: {parameter!r}")
            if self._parameters.get(name, parameter) is not parameter:
                raise ValueError(f"another Parameter {name!r} exists")
        self._parameters.update(other.items())

    def select(self, pattern: str) -> Self:
        """Return a dict of the parameters whose full name matches a pattern.

        Parameters
        ----------
        pattern : str
            Regular expression, matched at the start of the name.

        Raises
        ------
        ValueError
            `pattern` is not a regular expression.

        Examples
        --------
        >>> from fastopt.parameter import ParameterDict
        >>> params = ParameterDict()
        >>> for name in ("conv_weight", "conv_bias", "fc_weight"):
        ...     parameter = params.get(name)
        >>> list(params.select(".*_weight|fc"))
        ['conv_weight', 'fc_weight']
        """
        try:
            matches = re.compile(pattern).match
        except (re.error, TypeError) as error:
            raise ValueError(f"pattern must be a regular expression, got {pattern!r}") from error
        selected = type(self)(self._prefix, self._shared)
        selected.update({name: p for name, p in self.items() if matches(name)})
        return selected

    # All parameters

    def _unique(self) -> list[Parameter]:
        """Return the parameters without duplicates."""
        return list(dict.fromkeys(self.values()))

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
        init: Init = "uniform",
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
            large = sum(math.prod(p.shape or (0,)) for p in parameters) >= LARGE
            shown = progress(parameters, "parameter", "initialize") if large else parameters
            for parameter in shown:
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

    def setattr(self, name: str, value: object) -> None:
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

    def save(self, filename: PathLike, strip_prefix: str = "") -> None:
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
        arrays = {names[name]: p._mean() for name, p in self.items()}
        if METADATA in arrays:
            raise ValueError(
                f"{METADATA!r} cannot name an array, the format has something else there"
            )
        write_atomically(filename, written(arrays))

    @ctx_is_device
    def load(
        self,
        filename: PathLike,
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
        with _opened(filename) as arrays:
            saved = set(arrays)
            missing = sorted(set(names.values()) - saved)
            extra = sorted(saved - set(names.values()))
            if missing and not allow_missing:
                surplus = f" and has {extra}" if extra else ""
                hint = "allow_missing=True skips what is missing"
                raise ValueError(f"{filename} lacks {missing}{surplus}; {hint}")
            if extra and not ignore_extra:
                raise ValueError(f"{filename} also has {extra}; ignore_extra=True skips them")
            calls = [
                self[name]._loading(arrays[of](), device, cast_dtype, dtype_source)
                for name, of in names.items()
                if of in saved
            ]
        for call in calls:
            call()

    def _names_in_file(self, prefix: str) -> dict[str, str]:
        """Map parameter names to names in a file, which do not have `prefix`."""
        for name in self:
            if not name.startswith(prefix):
                raise ValueError(f"Parameter {name!r} does not start with {prefix!r}")
        return {name: name.removeprefix(prefix) for name in self}


def _may_be_set(parameter: Parameter, name: str) -> bool:
    """Whether `name` is a public attribute, not a method or a read-only property."""
    setter = getattr(getattr(type(parameter), name, None), "fset", None)
    return not name.startswith("_") and (name in vars(parameter) or setter is not None)


@contextmanager
def _opened(path: PathLike) -> Iterator[Mapping[str, Callable[[], Array]]]:
    """Open a file of arrays: functions that read them, by name.

    MXNet files are recognized by their first bytes; the prefixes ``arg:`` and ``aux:`` of their
    names are dropped.

    Raises
    ------
    fastopt.checkpoint.CheckpointError
        The file is in neither format, or damaged.
    OSError
        The file cannot be read.
    """
    with open(path, "rb") as stream, read_from(path):
        is_list = stream.read(len(LIST_HEAD)) == LIST_HEAD
        stream.seek(0)
        if not is_list:
            entries = layout(stream)[1]
            yield {name: partial(read_array, stream, entry) for name, entry in entries.items()}
            return
        arrays = list_from_bytes(stream.read())
        views = {re.sub("^(arg|aux):", "", name): array.view for name, array in arrays.items()}
        if len(views) < len(arrays):
            raise CheckpointError("it has a name twice, with and without 'arg:' or 'aux:'")
        yield views
