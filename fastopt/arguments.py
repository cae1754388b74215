"""Arguments of classes: declared once, with errors that state name, expected and actual value.

    class Adam(Optimizer):
        beta1: float = arg(default=0.9, check=Real(least=0, below=1))

is an argument of the constructor and an attribute, checked whenever it is set. Type checkers
read the same line (PEP 681).

The description of an argument is a function of (name, value) that returns the value to store or
raises TypeError or ValueError. The same description validates the constructor argument, later
assignments to the attribute and values restored from a checkpoint.
"""

import math
import numbers
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Generic, Literal, TypeGuard, TypeVar

import numpy as np

Read = TypeVar("Read", covariant=True)
Given = TypeVar("Given", contravariant=True)

Description = Callable[[str, Any], Any]
Descriptions = Mapping[str, Description]

LARGEST_COUNT = 2**62
"""Counts are stored in 64 bits; the limit leaves room to increment them."""

LENGTH = 100
"""Maximum number of characters of a value that an error message quotes."""


@dataclass(frozen=True, eq=False)
class Argument:
    """A declared attribute of a class; see :func:`arg`, :func:`kept` and :func:`alias`."""

    default: Any
    check: Description | None
    kw_only: bool = False
    init: bool = True
    """Whether it is an argument of the constructor; otherwise the default is stored."""
    torch: Any = ...
    stored: str | None = None
    last: bool = False
    new: bool = False
    factory: Callable[[], Any] | None = None
    names: tuple[str, ...] = ()

    def over(self, base: "Argument | None") -> "Argument":
        """Return this declaration, which has the check of that of a base class if it has none."""
        if base is None or self.check is not None:
            return self
        return replace(
            base,
            default=self.default,
            kw_only=self.kw_only,
            init=self.init,
            torch=base.torch if self.torch is ... else self.torch,
            last=self.last or base.last,
        )

    @property
    def positional(self) -> bool:
        """Whether it may be given by position."""
        return self.init and not (self.kw_only or self.names)


class Stored(Generic[Read, Given]):
    """Type of an attribute, for checkers, that is read as one type and given as another."""

    if TYPE_CHECKING:

        def __get__(self, instance: object, owner: Any) -> Read: ...

        def __set__(self, instance: object, value: Given) -> None: ...


def arg(
    *,
    default: Any,
    check: Description | None = None,
    kw_only: bool = False,
    init: bool = True,
    torch: Any = ...,
    stored: str | None = None,
    last: bool = False,
    new: bool = False,
) -> Any:
    """Declare an argument of a class, which is also an attribute of its instances.

    Parameters
    ----------
    default : object
        Its default. A subclass that declares an argument again, without `check`, has another
        default alone.
    check : callable, optional
        Function ``(name, value)`` that returns the value to store, or raises TypeError or
        ValueError; see the classes of this module. Default: any value is stored.
    kw_only : bool
        Whether it is given by name alone. Default False.
    init : bool
        False for an attribute that is no argument of this class, unlike of its base.
    torch : object, optional
        Its default with ``formula="torch"``.
    stored : str, optional
        Name of the attribute. Default: that of the argument.
    last : bool
        Whether its position is after the arguments of subclasses.
    new : bool
        Whether checkpoints of earlier versions lack it, which restores the default.
    """
    return Argument(default, check, kw_only, init, torch, stored, last, new)


def kept(
    *,
    factory: Callable[[], Any],
    check: Description,
    new: bool = False,
    init: Literal[False] = False,
) -> Any:
    """Declare an attribute that changes with every update, and is checked in checkpoints alone.

    Parameters
    ----------
    factory : callable
        Function without arguments that returns the value of a new instance.
    check, new
        See :func:`arg`.
    init : False
        It is no argument, which type checkers read here.
    """
    return Argument(..., check, init=init, new=new, factory=factory)


def alias(*names: str, default: Any, kw_only: bool = True, init: bool = True) -> Any:
    """Declare another name of an argument, or of several, whose values are then a tuple.

    Parameters
    ----------
    *names : str
        The arguments.
    default : object
        Their default, for type checkers; it has no effect.
    kw_only : bool
        Whether it is given by name alone, as always.
    init : bool
        False where the class lacks the argument, unlike its base.
    """
    return Argument(default, None, kw_only, init, names=names)


def brief(value: Any) -> str:
    """Return the representation of a value for messages: one line, truncated if it is long."""
    text = " ".join(repr(value).split())
    return text if len(text) <= LENGTH else f"{text[:LENGTH]}..."


def without_address(text: str, value: Any) -> str:
    """Return `text`, or the name of the function or class if they contain a memory address."""
    if " at 0x" not in text:
        return text
    return f"<{getattr(value, '__name__', type(value).__name__).strip('<>')}>"


def is_masked(value: object) -> bool:
    """Whether `value` is a masked array; there is none before something has imported numpy.ma."""
    masked = getattr(sys.modules.get("numpy.ma"), "MaskedArray", ())
    return isinstance(value, masked)


def is_array(value: object) -> TypeGuard[np.ndarray[Any, Any]]:
    """Whether `value` is an array of NumPy without a mask."""
    return isinstance(value, np.ndarray) and not is_masked(value)


def number(
    name: str,
    value: Any,
    *,
    least: float = -math.inf,
    most: float = math.inf,
    below: float = math.inf,
    infinite: bool = False,
    nan: bool = False,
) -> float:
    """Return `value` as a float if it is in [`least`, `most`] and less than `below`.

    Raises
    ------
    TypeError
        `value` is not a real number.
    ValueError
        `value` is out of range, or NaN or infinite without `nan` or `infinite`.
    """
    if not isinstance(value, numbers.Real) or isinstance(value, bool):
        raise TypeError(f"{name} must be a number, got {brief(value)}")
    try:
        exact = float(value)
    except OverflowError:  # from an int or a Fraction
        raise ValueError(f"{name} must be in the range of float64, got {brief(value)}") from None
    if (math.isinf(exact) and infinite) or (math.isnan(exact) and nan):
        return exact
    if math.isfinite(exact) and least <= exact <= most and exact < below:
        return exact
    limits = [f"at least {least}"] * (least > -math.inf)
    limits += [f"at most {most}"] * (most < math.inf) + [f"below {below}"] * (below < math.inf)
    kind = "a number" if infinite else "a finite number"
    raise ValueError(f"{name} must be {', '.join([kind, *limits])}, got {value}")


def count(name: str, value: Any, *, least: int = 1, most: int | None = None) -> int:
    """Return `value` as an int if it is an integer in [`least`, `most`].

    Raises
    ------
    TypeError
        `value` is not an integer.
    ValueError
        `value` is out of range.
    """
    if not isinstance(value, numbers.Integral) or isinstance(value, bool):
        raise TypeError(f"{name} must be an integer, got {brief(value)}")
    exact = int(value)
    if exact < least:
        raise ValueError(f"{name} must be at least {least}, got {brief(value)}")
    if most is not None and exact > most:
        raise ValueError(f"{name} must be at most {most}, got {brief(value)}")
    return exact


def choice(name: str, value: str, *choices: str) -> str:
    """Return `value` if it is one of `choices`, else raise ValueError."""
    if not isinstance(value, str) or value not in choices:
        raise ValueError(f"{name} must be one of {choices}, got {brief(value)}")
    return value


def flag(name: str, value: Any) -> bool:
    """Return `value` as a bool if it is True or False, else raise TypeError."""
    if not isinstance(value, (bool, np.bool_)):
        raise TypeError(f"{name} must be True or False, got {brief(value)}")
    return bool(value)


@dataclass(eq=False, repr=False, match_args=False)
class Real:
    """A real number, stored as a float; see :func:`number`."""

    least: float = -math.inf
    most: float = math.inf
    below: float = math.inf
    infinite: bool = False
    nan: bool = False

    def __call__(self, name: str, value: Any) -> float:
        """Return the checked value."""
        if type(value) is float and self.least <= value <= self.most and value < self.below:
            return value  # fast path: floats in range are assigned at every step
        return number(name, value, **vars(self))


@dataclass(eq=False, repr=False, match_args=False)
class Integer:
    """An integer, stored as an int; see :func:`count`."""

    least: int = 1
    most: int | None = LARGEST_COUNT

    def __call__(self, name: str, value: Any) -> int:
        """Return the checked value."""
        return count(name, value, **vars(self))


class Flag:
    """True or False."""

    def __call__(self, name: str, value: Any) -> bool:
        """Return the checked value."""
        return value if type(value) is bool else flag(name, value)


FLAG = Flag()


class Choice:
    """One of several strings."""

    def __init__(self, *choices: str) -> None:
        self.choices = choices

    def __call__(self, name: str, value: Any) -> str:
        """Return the checked value."""
        if type(value) is str and value in self.choices:
            return value
        return choice(name, value, *self.choices)


@dataclass(eq=False, repr=False, match_args=False)
class Instance:
    """An instance of a class; `kind` is its name in error messages."""

    of: type
    kind: str

    def __call__(self, name: str, value: Any) -> Any:
        """Return the checked value."""
        if not isinstance(value, self.of):
            raise TypeError(f"{name} must be {self.kind}, got {brief(value)}")
        return value


@dataclass(eq=False, repr=False, match_args=False)
class OrNone:
    """None, or a value that another description accepts."""

    of: Description

    def __call__(self, name: str, value: Any) -> Any:
        """Return the checked value."""
        return None if value is None else self.of(name, value)


@dataclass(eq=False, repr=False, match_args=False)
class Renamed:
    """A value that another description accepts; errors use the name of the argument."""

    argument: str
    of: Description

    def __call__(self, name: str, value: Any) -> Any:
        """Return the checked value."""
        return self.of(self.argument, value)


@dataclass(eq=False, repr=False, match_args=False)
class ListOf:
    """A list of values that another description accepts."""

    of: Description

    def __call__(self, name: str, value: Any) -> list[Any]:
        """Return the checked value."""
        if not isinstance(value, list):
            raise TypeError(f"{name} must be a list, got {brief(value)}")
        return [self.of(f"{name}[{i}]", part) for i, part in enumerate(value)]


@dataclass(eq=False, repr=False, match_args=False)
class TableOf:
    """A mapping from indices or names to values that another description accepts."""

    of: Description

    def __call__(self, name: str, value: Any) -> dict[Any, Any]:
        """Return the checked value."""
        if not isinstance(value, Mapping):
            raise TypeError(f"{name} must be a table, got {brief(value)}")
        for key in value:
            if not isinstance(key, (numbers.Integral, str)):
                raise TypeError(f"{name} must have indices or names as keys, got {brief(key)}")
        return {key: self.of(f"{name}[{key!r}]", part) for key, part in value.items()}


@dataclass(eq=False, repr=False, match_args=False)
class PairOf:
    """A tuple of two values, each accepted by its own description."""

    first: Description
    second: Description

    def __call__(self, name: str, value: Any) -> tuple[Any, Any]:
        """Return the checked value."""
        if not isinstance(value, tuple) or len(value) != 2:
            raise TypeError(f"{name} must be a pair, got {brief(value)}")
        return self.first(f"{name}[0]", value[0]), self.second(f"{name}[1]", value[1])


@dataclass(eq=False, repr=False, match_args=False)
class ArrayOf:
    """An array of one of the given dtypes, in native byte order."""

    dtypes: tuple[str, ...]
    vector: bool = False
    """Whether it must be one-dimensional and finite; it is then returned contiguous."""

    def __call__(self, name: str, value: Any) -> np.ndarray[Any, Any]:
        """Return the checked value."""
        if not is_array(value):
            raise TypeError(f"{name} must be an array, got {brief(value)}")
        if value.dtype.name not in self.dtypes or not value.dtype.isnative:
            raise TypeError(f"{name} must have dtype {' or '.join(self.dtypes)}, got {value.dtype}")
        if not self.vector:
            return value
        if value.ndim != 1:
            raise ValueError(f"{name} must have one dimension, got shape {value.shape}")
        if not np.isfinite(value).all():
            raise ValueError(f"{name} must be finite")
        return np.require(value, None, ["C", "A", "W", "E"])


def described_in(cls: type, attribute: str) -> Mapping[str, Description]:
    """Return the descriptions in an attribute of a class, without those of its bases.

    Raises
    ------
    TypeError
        The attribute does not map names to descriptions.
    """
    own: Any = vars(cls).get(attribute, {})
    if not isinstance(own, Mapping) or not all(map(callable, own.values())):
        raise TypeError(f"{cls.__name__}.{attribute} must map names to descriptions")
    return own


def as_float(name: str, value: Any) -> float:
    """Convert a validated attribute to float; faster than validating it again."""
    try:
        return float(value)
    except (TypeError, ValueError):
        raise TypeError(f"{name} must be a number, got {brief(value)}") from None
    except OverflowError:
        raise ValueError(f"{name} must be a finite number, got {brief(value)}") from None
