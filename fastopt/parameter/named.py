"""Dict of parameters by name: creation, lookup, sharing and selection."""

import re
from collections.abc import ItemsView, Iterator, KeysView, Mapping, ValuesView
from typing import Any, Self

import numpy as np

from fastopt.parameter.constant import Constant
from fastopt.parameter.parameter import Parameter

__all__ = ["Named"]


class Named:
    """Base of :class:`~fastopt.parameter.ParameterDict`, which documents the arguments."""

    def __init__(self, prefix: str = "", shared: "Named | None" = None) -> None:
        if not isinstance(prefix, str):
            raise TypeError(f"prefix must be a string, got {prefix!r}")
        if not isinstance(shared, Named | None):
            raise TypeError(f"shared must be a ParameterDict, got {type(shared).__name__}")
        self._prefix, self._shared = prefix, shared
        self._parameters: dict[str, Parameter] = {}

    @property
    def prefix(self) -> str:
        """Prefix of the names passed to :meth:`get`."""
        return self._prefix

    def __getitem__(self, name: str) -> Parameter:
        return self._parameters[name]

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
        found = self._found(full)
        if found is None:
            found = Parameter(full, **kwargs)
        else:
            found._check_and_setattr(**kwargs)
        self._parameters[full] = found
        return found

    def get_constant(self, name: str, value: Any = None) -> Constant:
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
        found = self._found(full)
        if found is None:
            if value is None:
                raise ValueError(f"Constant {full!r} is not there and needs a value")
            found = Constant(value)
            found._name = full
        if not isinstance(found, Constant):
            raise ValueError(f"{found!r} is not a Constant")
        if value is not None and not np.array_equal(found.value, Constant(value).value):
            raise ValueError(f"Constant {full!r} is there with another value")
        self._parameters[full] = found
        return found

    def _full(self, name: str) -> str:
        if not isinstance(name, str):
            raise TypeError(f"name must be a string, got {name!r}")
        return self._prefix + name

    def _found(self, full: str) -> Parameter | None:
        if full not in self and self._shared is not None:
            return self._shared._found(full)
        return self._parameters.get(full)

    def update(self, other: "Named | Mapping[str, Parameter]") -> None:
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
        if not isinstance(other, (Named, Mapping)):
            raise TypeError(f"other must hold Parameters by name, got {type(other).__name__}")
        for name, parameter in other.items():
            if not (isinstance(name, str) and isinstance(parameter, Parameter)):
                raise TypeError(f"other must hold Parameters by name, got {name!r}: {parameter!r}")
            if self._parameters.get(name, parameter) is not parameter:
                raise ValueError(f"there is another Parameter {name!r} already")
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
