"""Base class of scopes: names, defaults and parameters."""

from collections.abc import Mapping
from typing import Any, Literal

from fastopt.arguments import number
from fastopt.parameter import Parameter, ParameterDict
from fastopt.scope.names import CREATING, Names

__all__ = ["Reuse", "Scope", "arguments", "checked_reuse"]

Reuse = bool | Literal["auto"]


class Scope(Names):
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
        super().__init__(prefix, params, counts)
        self.defaults = dict(defaults)
        self.reuse = reuse

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
        shape: Any = None,
        *,
        initializer: Any = None,
        regularizer: float | None = None,
        dtype: Any = None,
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
        given = arguments(initializer, regularizer, dtype, trainable)
        if twice := sorted(given.keys() & kw.keys()):
            raise TypeError(f"parameter {name!r} is given {', '.join(twice)} under two names")
        given |= kw if shape is None else {"shape": shape, **kw}
        reuse = self.reuse if reuse is None else checked_reuse(reuse)
        if name is not None:
            return self._obtain(name, given, reuse)
        if reuse is True:
            raise ValueError(f"a parameter of scope {self.prefix!r} needs a name to be reused")
        with self._numbered("var-") as name:
            return self._obtain(name, given, reuse)

    def _obtain(self, name: str, given: Mapping[str, Any], reuse: Reuse) -> Parameter:
        """Return the parameter of this name, or create it with the defaults of the scope."""
        name = self.gen_name(name)
        with CREATING:
            exists = self._found(name) is not None
            if exists and reuse is False:
                raise ValueError(f"parameter {name!r} exists; reuse=True or 'auto' returns it")
            if not exists and reuse is True:
                raise ValueError(f"parameter {name!r} does not exist; reuse='auto' creates it")
            return self.params.get(name, **(given if exists else {**self.defaults, **given}))


def arguments(initializer: Any, regularizer: Any, dtype: Any, trainable: Any) -> dict[str, Any]:
    """Translate arguments of a scope into arguments of a Parameter."""
    if not isinstance(trainable, bool | None):
        raise TypeError(f"trainable must be True or False, got {trainable!r}")
    if regularizer is not None:
        regularizer = number("regularizer", regularizer, least=0)
    grad_req = {None: None, True: "write", False: "null"}[trainable]
    given = {"init": initializer, "wd_mult": regularizer, "dtype": dtype, "grad_req": grad_req}
    return {key: value for key, value in given.items() if value is not None}


def checked_reuse(reuse: Reuse) -> Reuse:
    """Return `reuse`; ValueError unless it is True, False or "auto"."""
    if reuse is True or reuse is False or reuse == "auto":
        return reuse
    raise ValueError(f"reuse must be True, False or 'auto', got {reuse!r}")
