"""Scopes that are entered by ``with`` statements."""

from contextvars import ContextVar
from typing import Any, Self

from fastopt.parameter import Parameter, ParameterDict
from fastopt.scope.base import Reuse, Scope, arguments, checked_reuse
from fastopt.scope.names import path

__all__ = ["current_scope", "get_parameter", "name_scope"]


class name_scope(Scope):
    """A scope below the present one, for ``with`` statements.

    In the block :func:`get_parameter` puts names under ``str(scope)``, and takes what it is not
    given from the scope. The scope takes what it is not given from the scope in which it is made;
    where it is entered does not matter. It can be entered again and again, also while it is
    entered, and in several threads at once. New threads begin at the root.

    Parameters
    ----------
    name : str, optional
        Comes after the present scope's prefix and ``/``. Default: no level is added.
    abs_name : str, optional
        The whole prefix, in place of the present scope's and `name`.
    initializer : str, Initializer or callable, optional
        Fills the parameters: their `init`.
    regularizer : float, optional
        Multiplier of the weight decay, at least 0: their `wd_mult`.
    reuse : bool or "auto", optional
        As in :meth:`Scope.get_parameter`.
    dtype : str or dtype, optional
        Type of their elements.
    params : ParameterDict, optional
        Holds the parameters of this scope and those below. Default: the present scope's; the
        root has one of its own.
    trainable : bool, optional
        Whether they have gradients: their `grad_req`, ``"write"`` or ``"null"``.

    Raises
    ------
    TypeError, ValueError
        An argument is none of these.

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
        initializer: Any = None,
        regularizer: float | None = None,
        reuse: Reuse | None = None,
        dtype: Any = None,
        *,
        params: ParameterDict | None = None,
        trainable: bool | None = None,
    ) -> None:
        around = current_scope()
        prefix = around.prefix if name is None else around.gen_name(name)
        if abs_name is not None:
            prefix = path("abs_name", abs_name)
        if not isinstance(params, ParameterDict | None):
            raise TypeError(f"params must be a ParameterDict, got {type(params).__name__}")
        given = arguments(initializer, regularizer, dtype, trainable)
        super().__init__(
            prefix,
            around.params if params is None else params,
            around._counts if params is None else {},
            {**around.defaults, **given},
            around.reuse if reuse is None else checked_reuse(reuse),
        )
        self.name = name
        Parameter(prefix, **self.defaults)  # raises what it would raise for each parameter

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
    """Return the innermost scope that the present thread or task has entered, or the root.

    Examples
    --------
    >>> from fastopt.scope import current_scope, name_scope
    >>> with name_scope("net"), name_scope("fc"):
    ...     str(current_scope())
    'net/fc'
    """
    return (_root, *_entered.get())[-1]


def get_parameter(name: str | None = None, shape: Any = None, **kw: Any) -> Parameter:
    """Create or return a parameter in the present scope.

    Parameters
    ----------
    name, shape, **kw
        As :meth:`Scope.get_parameter` takes them, with the same errors.

    Examples
    --------
    >>> from fastopt.parameter import ParameterDict
    >>> from fastopt.scope import get_parameter, name_scope
    >>> with name_scope("embedding", params=ParameterDict(), trainable=False):
    ...     get_parameter("table", (1000, 16)).grad_req
    'null'
    """
    return current_scope().get_parameter(name, shape, **kw)
