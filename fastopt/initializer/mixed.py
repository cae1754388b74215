"""Initializers selected by name patterns."""

import re
from collections.abc import Sequence
from typing import Any

from fastopt.initializer.arrays import Array
from fastopt.initializer.base import filler


class Mixed:
    """Fill each array with the initializer of the first pattern that matches its name.

    A pattern must match from the first character on: ``"bias"`` does not match ``fc_bias``,
    ``".*bias"`` does. The selected initializer still applies its rules for name endings, so a
    bias becomes 0 with any initializer.

    Parameters
    ----------
    patterns : sequence of str
        Regular expressions.
    initializers : sequence of Initializer
        One for each pattern: initializers, their texts or names, or functions of (name, array).

    Raises
    ------
    TypeError, ValueError
        An argument is invalid, the numbers of patterns and initializers differ, or the name of a
        call matches no pattern.

    Examples
    --------
    >>> import numpy as np
    >>> from fastopt import initializer
    >>> init = initializer.Mixed(["embed", ".*"], [initializer.Constant(3), "ones"])
    >>> embed, weight = np.empty(2), np.empty(2)
    >>> init(initializer.InitDesc("embed_weight"), embed)
    >>> init(initializer.InitDesc("fc_weight"), weight)
    >>> embed, weight
    (array([3., 3.]), array([1., 1.]))
    """

    def __init__(self, patterns: Sequence[str], initializers: Sequence[Any]) -> None:
        for name, values in {"patterns": patterns, "initializers": initializers}.items():
            if not isinstance(values, Sequence) or isinstance(values, str):
                raise TypeError(f"{name} must be a list, got {values!r}")
        if len(patterns) != len(initializers):
            raise ValueError(
                "there must be one initializer for each pattern, "
                f"got {len(patterns)} patterns and {len(initializers)} initializers"
            )
        self.map = [
            (_compiled(f"patterns[{i}]", pattern), filler(f"initializers[{i}]", initializer))
            for i, (pattern, initializer) in enumerate(zip(patterns, initializers, strict=True))
        ]

    def __call__(self, name: str, arr: Array) -> None:
        """Fill `arr` in place; `name` is an :class:`InitDesc`."""
        for pattern, initializer in self.map:
            if pattern.match(name):
                initializer(name, arr)
                return
        tried = ", ".join(repr(pattern.pattern) for pattern, _ in self.map)
        raise ValueError(
            f"{name} does not match, from its first character on, any of the patterns {tried}; "
            "a last pattern '.*' matches all names"
        )


def _compiled(name: str, pattern: str) -> re.Pattern[str]:
    try:
        return re.compile(pattern)
    except (re.error, TypeError) as error:
        raise ValueError(f"{name} must be a regular expression, got {pattern!r}: {error}") from None
