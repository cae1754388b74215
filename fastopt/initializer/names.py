"""Names that initializers are called with, and the hooks that their endings select."""

from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import Any

from fastopt.arguments import brief


class InitDesc(str):
    """Name of a parameter with attributes that control its initialization.

    Parameters
    ----------
    name : str
    attrs : mapping of str to object, optional
        ``attrs["__init__"]`` is the parameter's own initializer, which takes precedence over its
        name: an :class:`Initializer`, its text or registered name, or another function of (name,
        array).
    global_init : Initializer, optional
        Fallback for the parts of a composite initializer. Default: the initializer that is called.

    Raises
    ------
    TypeError
        `name` is not a string, or `attrs` is not a mapping.

    Examples
    --------
    >>> import numpy as np
    >>> from fastopt import initializer
    >>> weight = np.empty(3)
    >>> initializer.Zero()(initializer.InitDesc("scale", {"__init__": "ones"}), weight)
    >>> weight
    array([1., 1., 1.])
    """

    attrs: dict[str, Any]
    global_init: Any

    def __new__(
        cls, name: str, attrs: Mapping[str, Any] | None = None, global_init: object = None
    ) -> "InitDesc":
        """Create the name with a copy of `attrs`."""
        if not isinstance(name, str):
            raise TypeError(f"name must be a string, got {brief(name)}")
        if not isinstance(attrs, Mapping | None):
            raise TypeError(f"attrs must be a mapping, got {attrs!r}")
        desc = super().__new__(cls, name)
        desc.attrs = dict(attrs or {})
        desc.global_init = global_init
        return desc


_COMMON = {
    "*weight": "_init_weight",
    "*bias": "_init_bias",
    "*gamma": "_init_gamma",
    "*beta": "_init_beta",
    "*min": "_init_zero",
    "*max": "_init_one",
}

DESCRIBED = {
    **_COMMON,
    "*weight_quantize": "_init_quantized_weight",
    "*bias_quantize": "_init_quantized_bias",
}
"""Name patterns and the hooks they select; the first match wins."""

PLAIN = {
    "upsampling*": "_init_bilinear",
    "stn_loc*weight": "_init_zero",
    "stn_loc*bias": "_init_loc_bias",
    **_COMMON,
    "*moving_mean": "_init_zero",
    "*moving_var": "_init_one",
    "*moving_inv_var": "_init_zero",
    "*moving_avg": "_init_zero",
}
"""Patterns for names that are plain strings."""


def hook_of(name: str, patterns: Mapping[str, str]) -> tuple[str, str]:
    """Return the first pattern that matches `name` and its hook, by default ``_init_default``."""
    for pattern, hook in patterns.items():
        if fnmatchcase(name, pattern):
            return pattern.strip("*"), hook
    return "default", "_init_default"
