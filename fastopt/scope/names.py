"""Names in a scope: full names and unique names."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from fastopt.parameter import Parameter, ParameterDict

__all__ = ["CREATING", "Names", "path"]

CREATING = threading.RLock()
"""Held from the lookup of a name to its creation, as scopes may share a ParameterDict."""


class Names:
    """Base of :class:`~fastopt.scope.Scope`: names with a prefix."""

    def __init__(self, prefix: str, params: ParameterDict, counts: dict[str, int]) -> None:
        self.prefix = prefix
        self.params = params
        self._counts = counts

    def __str__(self) -> str:
        return self.prefix

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.prefix!r}>"

    def gen_name(self, name: str) -> str:
        """Return the full name of `name` in this scope, ``prefix/name``.

        Parameters
        ----------
        name : str
            One level or several, with slashes between them.

        Raises
        ------
        TypeError
            `name` is not a str.
        ValueError
            `name` is empty, or a part of it between slashes is.

        Examples
        --------
        >>> from fastopt.scope import name_scope
        >>> name_scope("net").gen_name("w")
        'net/w'
        """
        part = path("name", name)
        return f"{self.prefix}/{part}" if self.prefix else part

    def unique_name(self, prefix: str) -> str:
        """Return `prefix` followed by a number, a name that is unused in this scope.

        The result does not include the scope's own prefix, which :class:`name_scope` and
        :meth:`get_parameter` add. Each scope counts each prefix from 0, and skips names of
        parameters and of scopes with parameters.

        Parameters
        ----------
        prefix : str
            Start of the name.

        Raises
        ------
        TypeError, ValueError
            Same errors as :meth:`gen_name`.

        Examples
        --------
        >>> from fastopt.scope import name_scope
        >>> net = name_scope("net")
        >>> net.unique_name("fc"), net.unique_name("fc"), net.unique_name("conv")
        ('fc0', 'fc1', 'conv0')
        """
        with self._numbered(prefix) as name:
            return name

    @contextmanager
    def _numbered(self, prefix: str) -> Iterator[str]:
        """Yield the next name with a prefix; it counts as used unless the block fails."""
        stem = self.gen_name(prefix)
        with CREATING:
            count = self._counts.get(stem, 0)
            while self._taken(f"{stem}{count}"):
                count += 1
            yield f"{prefix}{count}"
            self._counts[stem] = count + 1

    def _taken(self, full: str) -> bool:
        """Whether a parameter or a scope with parameters has this full name."""
        below = f"{self.params.prefix}{full}/"
        return self._found(full) is not None or any(p.startswith(below) for p in self.params)

    def _found(self, full: str) -> Parameter | None:
        return self.params._found(self.params.prefix + full)


def path(role: str, name: str) -> str:
    """Return `name` if it is a valid part of a full name."""
    if not isinstance(name, str):
        raise TypeError(f"{role} must be a str, got {name!r}")
    if not all(name.split("/")):
        raise ValueError(f"{role} must not be empty, nor a part of it at a '/', got {name!r}")
    return name
