"""Scopes, which give parameters of a model their names and defaults, and share them."""

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Literal, Self

from numpy.typing import DTypeLike

from fastopt.arguments import number
from fastopt.initializer.base import Init
from fastopt.parameter import Parameter, ParameterDict

__all__ = ["Scope", "current_scope", "get_parameter", "name_scope"]

Reuse = bool | Literal["auto"]

_CREATING = threading.RLock()
"""Held from the lookup of a name to its creation, as scopes may share a ParameterDict."""


class Scope:
    """A name prefix and defaults for parameters, with the dict that holds the parameters.

    :class:`name_scope` creates scopes, :func:`current_scope` returns the innermost one.

    Attributes
    ----------
    prefix : str
        Prefix of all names, also ``str(scope)``. Empty for the root.
    params : ParameterDict
        The parameters.
    defaults : dict of str to object
        Default arguments of :class:`~fastopt.parameter.Parameter` for new parameters.
    reuse : bool or "auto"
        Default of the argument of :meth:`get_parameter`.
    name : str or None
        Name that the scope was created with.

    Examples
    --------
    >>> from fastopt.parameter import ParameterDict
    >>> from fastopt.scope import Scope, name_scope
    >>> net = name_scope("net", params=ParameterDict())
    >>> isinstance(net, Scope), net.prefix, net.get_parameter("w", 2).name
    (True, 'net', 'net/w')
    """

    name: str | None = None

    def __init__(
        self,
        prefix: str,
        params: ParameterDict,
        counts: dict[str, int],
        defaults: Mapping[str, Any],
        reuse: Reuse,
    ) -> None:
        self.prefix = prefix
        self.params = params
        self._counts = counts
        self.defaults = dict(defaults)
        self.reuse = reuse

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
        part = _path("name", name)
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
        with _CREATING:
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

    @property
    def initializer(self) -> Any:
        """Default `init` of new parameters, or None."""
        return self.defaults.get("init")

    @property
    def regularizer(self) -> float | None:
        """Default `wd_mult` of new parameters, or None."""
        return self.defaults.get("wd_mult")

    @property
    def dtype(self) -> Any:
        """Default `dtype` of new parameters, or None."""
        return self.defaults.get("dtype")

    def get_parameter(
        self,
        name: str | None = None,
        shape: object = None,
        *,
        initializer: Init | None = None,
        regularizer: float | None = None,
        dtype: DTypeLike | None = None,
        trainable: bool | None = None,
        reuse: Reuse | None = None,
        **kw: Any,
    ) -> Parameter:
        """Create the parameter of this name in this scope, or return the existing one.

        Arguments that are not given for a new parameter are taken from the scope. For an existing
        one, the arguments must agree with it; `shape` may complete its shape.

        Parameters
        ----------
        name : str, optional
            Name in this scope. Default: a new one, ``var-0``, ``var-1`` and so on.
        shape : int or tuple of int, optional
            Shape, in which 0, -1 and None are unknown dimensions.
        initializer, regularizer, dtype, trainable
            See :class:`name_scope`.
        reuse : bool or "auto", optional
            False: create the parameter; an error if it exists. True: return it; an error if it
            does not exist. "auto": return or create it. Default: the scope's value, which is
            False for the root.
        **kw
            Other arguments of :class:`~fastopt.parameter.Parameter`.

        Raises
        ------
        TypeError
            An argument has the wrong type, is unknown, or is given under two names.
        ValueError
            The parameter exists although `reuse` is False, or does not exist although it is True;
            the existing one has another shape or attribute; or `reuse` is True without a name.

        Examples
        --------
        >>> from fastopt.parameter import ParameterDict
        >>> from fastopt.scope import get_parameter, name_scope
        >>> with name_scope("fc", params=ParameterDict(), reuse="auto"):
        ...     first = get_parameter("w", shape=(2, 3))
        ...     second = get_parameter("w")
        >>> first.name, second is first
        ('fc/w', True)
        """
        options = _arguments(initializer, regularizer, dtype, trainable)
        if twice := sorted(options.keys() & kw.keys()):
            raise TypeError(f"parameter {name!r} is given {', '.join(twice)} under two names")
        options |= kw if shape is None else {"shape": shape, **kw}
        reuse = self.reuse if reuse is None else _checked(reuse)
        if name is not None:
            return self._obtain(name, options, reuse)
        if reuse is True:
            raise ValueError(f"a parameter of scope {self.prefix!r} needs a name to be reused")
        with self._numbered("var-") as name:
            return self._obtain(name, options, reuse)

    def _obtain(self, name: str, options: Mapping[str, Any], reuse: Reuse) -> Parameter:
        """Return the parameter of this name, or create it with the defaults of the scope."""
        name = self.gen_name(name)
        with _CREATING:
            exists = self._found(name) is not None
            if exists and reuse is False:
                raise ValueError(f"parameter {name!r} exists; reuse=True or 'auto' returns it")
            if not exists and reuse is True:
                raise ValueError(f"parameter {name!r} does not exist; reuse='auto' creates it")
            return self.params.get(name, **(options if exists else {**self.defaults, **options}))


def _arguments(
    initializer: object, regularizer: object, dtype: object, trainable: object
) -> dict[str, Any]:
    """Translate arguments of a scope into arguments of a Parameter."""
    if not isinstance(trainable, bool | None):
        raise TypeError(f"trainable must be True or False, got {trainable!r}")
    if regularizer is not None:
        regularizer = number("regularizer", regularizer, least=0)
    grad_req = {None: None, True: "write", False: "null"}[trainable]
    options = {"init": initializer, "wd_mult": regularizer, "dtype": dtype, "grad_req": grad_req}
    return {key: value for key, value in options.items() if value is not None}


def _checked(reuse: Reuse) -> Reuse:
    """Return `reuse`; ValueError unless it is True, False or "auto"."""
    if reuse is True or reuse is False or reuse == "auto":
        return reuse
    raise ValueError(f"reuse must be True, False or 'auto', got {reuse!r}")


def _path(role: str, name: str) -> str:
    """Return `name` if it is a valid part of a full name."""
    if not isinstance(name, str):
        raise TypeError(f"{role} must be a str, got {name!r}")
    if not all(name.split("/")):
        raise ValueError(f"{role} must not be empty, nor a part of it at a '/', got {name!r}")
    return name


class name_scope(Scope):
    """A scope nested in the current one, for ``with`` statements.

    Inside the block, :func:`get_parameter` prefixes names with ``str(scope)`` and uses the scope's
    defaults. The scope inherits defaults from the scope in which it is created, regardless of
    where it is entered. It can be entered repeatedly, recursively, and in several threads at once.
    New threads start at the root.

    Parameters
    ----------
    name : str, optional
        Appended to the current scope's prefix after a ``/``. Default: no level is added.
    abs_name : str, optional
        The whole prefix, instead of the current scope's prefix and `name`.
    initializer : str, Initializer or callable, optional
        Default `init` of parameters, which fills their arrays.
    regularizer : float, optional
        Default `wd_mult` of parameters, the multiplier of the weight decay, at least 0.
    reuse : bool or "auto", optional
        See :meth:`Scope.get_parameter`.
    dtype : str or dtype, optional
        Default dtype of parameters.
    params : ParameterDict, optional
        Holds the parameters of this scope and of nested ones. Default: the dict of the current
        scope; the root has its own.
    trainable : bool, optional
        Whether parameters have gradients: default `grad_req`, ``"write"`` or ``"null"``.

    Raises
    ------
    TypeError, ValueError
        An argument is invalid.

    Examples
    --------
    >>> from fastopt.parameter import ParameterDict
    >>> from fastopt.scope import get_parameter, name_scope
    >>> with name_scope("net", params=ParameterDict(), regularizer=0.5), name_scope("fc") as fc:
    ...     weight = get_parameter("w", (3, 2))
    ...     bias = get_parameter("b", 2, regularizer=0)
    >>> str(fc), weight.name, weight.wd_mult, bias.wd_mult
    ('net/fc', 'net/fc/w', 0.5, 0.0)
    """

    def __init__(
        self,
        name: str | None = None,
        abs_name: str | None = None,
        initializer: Init | None = None,
        regularizer: float | None = None,
        reuse: Reuse | None = None,
        dtype: DTypeLike | None = None,
        *,
        params: ParameterDict | None = None,
        trainable: bool | None = None,
    ) -> None:
        around = current_scope()
        prefix = around.prefix if name is None else around.gen_name(name)
        if abs_name is not None:
            prefix = _path("abs_name", abs_name)
        if not isinstance(params, ParameterDict | None):
            raise TypeError(f"params must be a ParameterDict, got {type(params).__name__}")
        options = _arguments(initializer, regularizer, dtype, trainable)
        super().__init__(
            prefix,
            around.params if params is None else params,
            around._counts if params is None else {},
            {**around.defaults, **options},
            around.reuse if reuse is None else _checked(reuse),
        )
        self.name = name
        Parameter(prefix, **self.defaults)  # validates the defaults

    def __enter__(self) -> Self:
        _entered.set((*_entered.get(), self))
        return self

    def __exit__(self, *error: object) -> None:
        if current_scope() is not self:
            raise RuntimeError(f"{self!r} cannot be left, the present scope is {current_scope()!r}")
        _entered.set(_entered.get()[:-1])


_root = Scope("", ParameterDict(), {}, {}, reuse=False)
_entered: ContextVar[tuple[Scope, ...]] = ContextVar("fastopt.scope", default=())


def current_scope() -> Scope:
    """Return the innermost scope that the current thread or task has entered, or the root.

    Examples
    --------
    >>> from fastopt.scope import current_scope, name_scope
    >>> with name_scope("net"), name_scope("fc"):
    ...     str(current_scope())
    'net/fc'
    """
    return (_root, *_entered.get())[-1]


def get_parameter(name: str | None = None, shape: object = None, **kw: Any) -> Parameter:
    """Create or return a parameter in the current scope.

    Parameters
    ----------
    name, shape, **kw
        See :meth:`Scope.get_parameter`, also for errors.

    Examples
    --------
    >>> from fastopt.parameter import ParameterDict
    >>> from fastopt.scope import get_parameter, name_scope
    >>> with name_scope("embedding", params=ParameterDict(), trainable=False):
    ...     get_parameter("table", (1000, 16)).grad_req
    'null'
    """
    return current_scope().get_parameter(name, shape, **kw)
