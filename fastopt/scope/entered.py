"""Scopes entered with ``with`` statements."""

from contextvars import ContextVar
from typing import Any, Self

from numpy.typing import DTypeLike

from fastopt.initializer.registry import Init
from fastopt.parameter import Parameter, ParameterDict
from fastopt.scope.base import Reuse, Scope, arguments, checked_reuse, path


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
