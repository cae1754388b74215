"""Attributes of parameters: which may be assigned, and how they are compared."""

from collections.abc import Callable
from typing import Any

from fastopt.arguments import choice
from fastopt.initializer import Initializer, create
from fastopt.parameter.checks import as_dtype

ASSIGNED = {
    "data": "call set_data(values)",
    "grad": "call set_grad(values), or add_grad(values) for one of several uses",
    "requires_grad": "set grad_req, to 'null' for a parameter that is not trained",
}
"""Advice for assignments that work in other libraries but would have no effect here."""


def storage_type(role: str, stype: str) -> str:
    """Return a storage type; ValueError unless it is "default" or "row_sparse"."""
    if stype == "csr":
        raise ValueError(f"{role} cannot be 'csr', only rows can be sparse: 'row_sparse'")
    return choice(role, stype, "default", "row_sparse")


def _itself(value: object) -> Any:
    return value


def _text(init: object) -> Any:
    """Return a comparable form of an initializer; a function is equal only to itself."""
    return create(init).dumps() if isinstance(init, (str, Initializer)) else init


COMPARED: dict[str, Callable[[Any], Any]] = {
    "grad_req": _itself,
    "dtype": as_dtype,
    "lr_mult": _itself,
    "wd_mult": _itself,
    "init": _text,
    "allow_deferred_init": _itself,
    "differentiable": _itself,
    "stype": _itself,
    "grad_stype": _itself,
}
"""Attributes that must agree when a parameter is requested again, with comparison keys."""
