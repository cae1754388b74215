"""Digests of a user's code, which ranks compare: half of a weight must not follow another formula.

The code of fastopt itself is compared by its version.

Tests: ``tests/distributed/test_versions.py``.
"""

import hashlib
import inspect
import platform
import sysconfig
from collections.abc import Iterator
from functools import cached_property, partial
from types import FunctionType
from typing import Any

from fastopt.kernels.rule import Rule, code_of, frozen_text
from fastopt.optimizer.optimizer import Optimizer

INSTALLED = tuple(sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib"))
"""Folders of packages, whose functions are not compared."""


def codes(optimizer: Optimizer) -> dict[str, str]:
    """Return digests of what a class outside of fastopt defines, and of its rule, by name.

    A digest is that of the bytecode, with the functions that it calls. It depends on no file, since
    classes may be sent to ranks on other machines, but on the version of Python.
    """
    found: dict[str, Any] = {}
    for kind in type(optimizer).__mro__:
        if not _is_ours(kind):
            found |= {f"{kind.__name__}.{name}": value for name, value in vars(kind).items()}
    rule = optimizer.rule
    if rule is not None and not _is_ours(rule.fn):
        found[f"rule {rule.name}"] = rule
    return {f"code of {name}": text for name, each in found.items() if (text := _digest(each))}


def _is_ours(value: Any) -> bool:
    """Whether a class or function is one of fastopt, or the base of all classes."""
    module = value.__module__ or ""
    return value is object or module.partition(".")[0] == "fastopt"


def _functions(value: Any) -> Iterator[FunctionType]:
    """Yield the functions of an attribute of a class, or of a global variable."""
    if isinstance(value, Rule):
        parts: Any = value.functions
    elif isinstance(value, property):
        parts = value.fget, value.fset
    else:
        value = value.func if isinstance(value, (cached_property, partial)) else value
        value = inspect.unwrap(value) if callable(value) else value
        parts = (getattr(value, "py_func", getattr(value, "__func__", value)),)
    for part in parts:
        if isinstance(part, FunctionType):
            yield part


def _digest(value: Any) -> str:
    """Return the digest of an attribute; empty if it is no function."""
    seen, is_rule = set[FunctionType](), isinstance(value, Rule)
    text = [part for each in _functions(value) for part in _codes(each, seen, is_rule)]
    if not text:
        return ""
    digest = hashlib.blake2b("\0".join(text).encode(errors="replace"), digest_size=6).hexdigest()
    return f"{digest} (Python {'.'.join(platform.python_version_tuple()[:2])})"


def _codes(fn: FunctionType, seen: set[FunctionType], is_rule: bool) -> Iterator[str]:
    """Yield the code of a function, and of those that it refers to.

    Only a rule has the numbers that it refers to compiled in: others may be a rank's own.
    """
    if fn in seen:
        return
    seen.add(fn)
    yield repr(code_of(fn.__code__)) + "".join(map(frozen_text, fn.__defaults__ or ()))
    try:
        names = inspect.getclosurevars(fn)
    except ValueError:  # a variable has no value yet
        return
    for name, value in sorted({**names.globals, **names.nonlocals}.items()):
        if is_rule:
            yield f"{name}={frozen_text(value)}"
        for each in _functions(value):
            package = (each.__module__ or "").partition(".")[0]
            same = package == (fn.__module__ or "").partition(".")[0]
            if same or not (_is_ours(each) or each.__code__.co_filename.startswith(INSTALLED)):
                yield from _codes(each, seen, is_rule)
