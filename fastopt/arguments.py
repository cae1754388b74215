"""Arguments of classes: declared once, with errors that state name, expected and actual value.

    class Adam(Optimizer):
        beta1: float = arg(default=0.9, check=Real(least=0, below=1))

is an argument of the constructor and an attribute, checked whenever it is set. Type checkers
read the same line (PEP 681).

The description of an argument is a function of (name, value) that returns the value to store or
raises TypeError or ValueError. The same description validates the constructor argument, later
assignments to the attribute and values restored from a checkpoint.
"""

import functools
import inspect
import math
import numbers
import re
import sys
from abc import ABCMeta
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import (
    TYPE_CHECKING,
    Any,
    ClassVar,
    Generic,
    Literal,
    ParamSpec,
    Self,
    TypeGuard,
    TypeVar,
    dataclass_transform,
)

import numpy as np

from fastopt._advice import closest, no_attribute

Read = TypeVar("Read", covariant=True)
Given = TypeVar("Given", contravariant=True)

Description = Callable[[str, Any], Any]
Descriptions = Mapping[str, Description]

LARGEST_COUNT = 2**62
"""Counts are stored in 64 bits; the limit leaves room to increment them."""

LENGTH = 100
"""Maximum number of characters of a value that an error message quotes."""


def brief(value: object) -> str:
    """Return the representation of a value for messages: one line, truncated if it is long."""
    text = " ".join(repr(value).split())
    if len(text) <= LENGTH:
        return text
    start = text[:LENGTH]
    return f"{start.rpartition(' ')[0] or start} ..."


def without_address(text: str, value: object) -> str:
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


def array_inside(value: object) -> str:
    """Return how to get the NumPy array of a Series, DataArray or Tensor `x`; empty for others."""
    if is_array(value):  # whose `data` is a buffer, which bfloat16 has none of
        return ""
    if callable(getattr(value, "to_numpy", None)):
        return "x.to_numpy()"
    return "x.data" if isinstance(getattr(value, "data", None), np.ndarray) else ""


def number(
    name: str,
    value: object,
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
    if (math.isinf(exact) and infinite and exact >= least) or (math.isnan(exact) and nan):
        return exact
    if math.isfinite(exact) and least <= exact <= most and exact < below:
        return exact
    limits = [f"at least {least}"] * (least > -math.inf)
    limits += [f"at most {most}"] * (most < math.inf) + [f"below {below}"] * (below < math.inf)
    kind = "a number" if infinite else "a finite number"
    raise ValueError(f"{name} must be {', '.join([kind, *limits])}, got {value}")


def count(name: str, value: object, *, least: int = 1, most: int | None = None) -> int:
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


def choice(name: str, value: object, *choices: str) -> str:
    """Return `value` if it is one of `choices`, else raise ValueError."""
    if not isinstance(value, str) or value not in choices:
        raise ValueError(f"{name} must be one of {choices}, got {brief(value)}")
    return value


def regex(name: str, value: object) -> str:
    """Return `value` if it is a regular expression, else raise."""
    if not isinstance(value, str):
        raise TypeError(f"{name} must be a regular expression, got {brief(value)}")
    try:
        re.compile(value)
    except re.error as error:
        raise ValueError(f"{name} is not a regular expression: {error}") from None
    return value


def flag(name: str, value: object) -> bool:
    """Return `value` as a bool if it is True or False, else raise TypeError."""
    if type(value) is bool:
        return value
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

    def __call__(self, name: str, value: object) -> float:
        """Return the checked value."""
        if type(value) is float and self.least <= value <= self.most and value < self.below:
            return value  # fast path: floats in range are assigned at every step
        return number(name, value, **vars(self))


@dataclass(eq=False, repr=False, match_args=False)
class Integer:
    """An integer, stored as an int; see :func:`count`."""

    least: int = 1
    most: int | None = LARGEST_COUNT

    def __call__(self, name: str, value: object) -> int:
        """Return the checked value."""
        if type(value) is int and self.most is not None and self.least <= value <= self.most:
            return value  # fast path: a checkpoint has a count for each parameter
        return count(name, value, **vars(self))


FLAG = flag


class Choice:
    """One of several strings."""

    def __init__(self, *choices: str) -> None:
        self.choices = choices

    def __call__(self, name: str, value: object) -> str:
        """Return the checked value."""
        return choice(name, value, *self.choices)


@dataclass(eq=False, repr=False, match_args=False)
class Instance:
    """An instance of a class; `kind` is its name in error messages."""

    of: type
    kind: str

    def __call__(self, name: str, value: object) -> Any:
        """Return the checked value."""
        if not isinstance(value, self.of):
            raise TypeError(f"{name} must be {self.kind}, got {brief(value)}")
        return value


@dataclass(eq=False, repr=False, match_args=False)
class OrNone:
    """None, or a value that another description accepts."""

    of: Description

    def __call__(self, name: str, value: object) -> Any:
        """Return the checked value."""
        return None if value is None else self.of(name, value)


@dataclass(eq=False, repr=False, match_args=False)
class ListOf:
    """A list of values that another description accepts."""

    of: Description

    def __call__(self, name: str, value: object) -> list[Any]:
        """Return the checked value."""
        if not isinstance(value, list):
            raise TypeError(f"{name} must be a list, got {brief(value)}")
        return [self.of(f"{name}[{i}]", part) for i, part in enumerate(value)]


@dataclass(eq=False, repr=False, match_args=False)
class TableOf:
    """A mapping from indices or names to values that another description accepts."""

    of: Description

    def __call__(self, name: str, value: object) -> dict[Any, Any]:
        """Return the checked value."""
        if not isinstance(value, Mapping):
            raise TypeError(f"{name} must be a table, got {brief(value)}")
        for key in value:
            if not isinstance(key, (int, str, numbers.Integral)):
                raise TypeError(f"{name} must have indices or names as keys, got {brief(key)}")
        return {key: self.of(f"{name}[{key!r}]", part) for key, part in value.items()}


@dataclass(eq=False, repr=False, match_args=False)
class PairOf:
    """A tuple of two values, each accepted by its own description."""

    first: Description
    second: Description

    def __call__(self, name: str, value: object) -> tuple[Any, Any]:
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

    def __call__(self, name: str, value: object) -> np.ndarray[Any, Any]:
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


def as_float(name: str, value: float) -> float:
    """Convert a validated attribute to float; faster than validating it again."""
    try:
        return float(value)
    except (TypeError, ValueError):
        raise TypeError(f"{name} must be a number, got {brief(value)}") from None
    except OverflowError:
        raise ValueError(f"{name} must be a finite number, got {brief(value)}") from None


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
    local: bool = False

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

        def __get__(self, instance: object, owner: type) -> Read: ...

        def __set__(self, instance: object, value: Given) -> None: ...


def arg(
    *,
    default: object,
    check: Description | None = None,
    kw_only: bool = False,
    init: bool = True,
    torch: object = ...,
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


def local(default: object = ..., *, init: Literal[False] = False) -> Any:
    """Declare an attribute of the present process, which is neither saved nor copied.

    Parameters
    ----------
    default : object
        Its first value; by default it has none.
    init : False
        See :func:`kept`.
    """
    return Argument(default, None, init=init, local=True)


def alias(*names: str, default: object, kw_only: bool = True, init: bool = True) -> Any:
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


class Same:
    """Default value of an alias; its representation is the names that the alias stands for."""

    def __init__(self, names: tuple[str, ...]) -> None:
        self.names = names

    def __repr__(self) -> str:
        joined = ", ".join(self.names)
        return f"({joined})" if len(self.names) > 1 else joined


class Constructor(ABCMeta):
    """Metaclass of :class:`Checked`: ``__init__`` is called with the canonical names alone."""

    @property
    def __signature__(cls) -> inspect.Signature:
        """Signature with all arguments, including aliases and those passed by ``**kwargs``."""
        if "_signature" not in vars(cls):
            parameters = list(_parameters(cls))
            required = [
                parameter for parameter in parameters if parameter.default is parameter.empty
            ]
            # no name is required if *args might be passed on as any argument
            cls._required = (
                [parameter.name for parameter in required] if all(map(_named, required)) else []
            )
            cls._signature = inspect.Signature(parameters)
        signature: inspect.Signature = vars(cls)["_signature"]
        return signature

    if not TYPE_CHECKING:  # checkers read __init__

        def __call__(cls, *args: object, **kwargs: object) -> Any:
            """Create an instance, resolving aliases first."""
            parameters = cls.__signature__.parameters
            if args or kwargs or cls._required:
                cls._check_positional(args, kwargs)
                positions = [*islice(parameters, len(args))]
                rename(cls, kwargs, positions)
                cls._add_defaults(kwargs, positions)
                unknown = [name for name in kwargs if name not in parameters]
                if unknown and not any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
                    raise unknown_arguments(cls, unknown)
                passed = {*kwargs, *positions}
                if missing := [name for name in cls._required if name not in passed]:
                    raise TypeError(f"{cls.__name__} needs {', '.join(missing)}")
            made = super().__call__(*args, **kwargs)
            cls._constructed(made)
            if "_first" not in vars(cls):
                cls._first = frozenset(vars(made))
            return made


@dataclass_transform(eq_default=False, field_specifiers=(arg, kept, local, alias))
class Declaring(Constructor):
    """Metaclass of classes whose declarations make the constructor, which type checkers know."""


def _named(parameter: inspect.Parameter) -> bool:
    return parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)


def _parameters(cls: Any) -> Iterator[inspect.Parameter]:
    """Yield the parameters of the constructor."""
    order = [base for base in cls.__mro__ if "__init__" in vars(base) or vars(base).get("_own")]
    owner = next(base for base in cls.__mro__ if "__init__" in vars(base))
    constructor = vars(owner)["__init__"]
    if getattr(constructor, "takes_declared", False):
        declared = [*_declared(cls)]
    else:
        _, *declared = inspect.signature(constructor).parameters.values()
    by_name = {
        parameter.name: parameter
        for parameter in declared
        if parameter.kind is not parameter.VAR_KEYWORD
    }
    rest = [parameter for parameter in declared if parameter.kind is parameter.VAR_KEYWORD]
    if rest and isinstance(
        above := order[order.index(owner) + 1], Constructor
    ):  # it passes them on
        for parameter in above.__signature__.parameters.values():
            if _named(parameter) and not isinstance(parameter.default, Same):
                by_name.setdefault(parameter.name, parameter.replace(kind=parameter.KEYWORD_ONLY))
    for alias, names in cls.aliases.items():
        if alias not in by_name and by_name.keys() >= {*names}:
            by_name[alias] = _keyword(alias, Same(names))
    yield from by_name.values()
    yield from rest


def _keyword(name: str, default: object) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default)


def _declared(cls: "type[Checked]") -> Iterator[inspect.Parameter]:
    """Yield the parameters of declared arguments: by position, then by name, its own first."""
    known = {name: arg for name, arg in cls.declared.items() if arg.init and not arg.names}
    for name in cls.positional:
        default = known.pop(name).default
        yield inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD, default=default)
    bases = [declared for base in cls.__mro__[1:] if (declared := getattr(base, "declared", ()))]
    common = bases[-1] if bases else {}
    for name in sorted(known, key=lambda name: name in common):
        yield _keyword(name, known[name].default)


def rename(cls: "type[Checked]", kwargs: dict[str, Any], others: Iterable[str] = ()) -> None:
    """Replace aliases in `kwargs` by the argument names of the constructor of `cls`.

    Parameters
    ----------
    cls : type
        The class.
    kwargs : dict of str to object
        Arguments by name; changed in place.
    others : iterable of str
        Names of further arguments that are passed by position.

    Raises
    ------
    TypeError
        An argument is given under two names, or the value of an alias of several arguments is not
        a tuple of that length.
    """
    parameters = cls.__signature__.parameters
    passed = {*kwargs, *others}
    for alias in [name for name in kwargs if name in parameters]:
        same = parameters[alias].default
        if isinstance(same, Same):
            for name in passed.intersection(same.names):
                raise TypeError(
                    f"{cls.__name__} takes {alias} or {name}, not both: they are the same argument"
                )
            kwargs |= _values(alias, same.names, kwargs.pop(alias))


def _values(alias: str, names: tuple[str, ...], value: object) -> dict[str, Any]:
    """Return the values of the arguments that an alias stands for."""
    if len(names) == 1:
        return {names[0]: value}
    if not isinstance(value, (tuple, list)) or len(value) != len(names):
        kind = "pair" if len(names) == 2 else "tuple"
        raise TypeError(f"{alias} must be a {kind} ({', '.join(names)}), got {brief(value)}")
    return dict(zip(names, value, strict=True))


def unknown_arguments(
    cls: "type[Checked]",
    unknown: Iterable[str],
    caller: str | None = None,
    taken: Sequence[str] | None = None,
) -> TypeError:
    """Return the error for arguments that a class does not take, with suggestions.

    Parameters
    ----------
    cls : type
        The class.
    unknown : iterable of str
        Names of the arguments.
    caller : str, optional
        Name of the called function. Default: the name of the class.
    taken : sequence of str, optional
        Accepted names. Default: all arguments of the class.
    """
    if taken is None:
        parameters = cls.__signature__.parameters.values()
        taken = [
            parameter.name
            for parameter in parameters
            if parameter.kind is not parameter.VAR_KEYWORD
        ]
    unknown = list(unknown)
    advice = {
        name: str(cls.argument_advice[name]) for name in unknown if name in cls.argument_advice
    }
    names = [name for name in unknown if name not in advice]
    meant = [parameter for name in names if (parameter := _meant(cls, name, taken))]
    parts = list(dict.fromkeys(advice.values()))
    parts += [f"did you mean {', '.join(meant)}?"] * bool(meant)
    parts += [f"it takes {', '.join(taken)}"] * (len(meant) < len(names))
    caller = caller or cls.__name__
    return TypeError(f"{caller} does not take {', '.join(unknown)}; {'; '.join(parts)}")


def _meant(cls: "type[Checked]", name: str, taken: Sequence[str]) -> str | None:
    """Return the argument to suggest for an unknown name, or None."""
    meant = [argument for argument in cls.argument_names.get(name, ()) if argument in taken]
    return meant[0] if meant else closest(name, taken)


def check_new(owner: "Checked", name: str) -> None:
    """Raise AttributeError if an attribute to be set is new and looks like a misspelled one.

    Classes outside of the package may have any attributes.
    """
    kind = type(owner)
    first = vars(kind).get("_first")
    if not first or name in first or kind.__module__.partition(".")[0] != "fastopt":
        return
    if name.startswith("_") or hasattr(kind, name):
        return
    names = {*kind.__signature__.parameters, *first, *kind.argument_names}
    names |= {attr for attr in dir(kind) if isinstance(getattr(kind, attr), property)}
    meant = _meant(kind, name, [other for other in names if not other.startswith("_")])
    advice = f"did you mean {meant}?" if meant else kind.argument_advice.get(name)
    if meant == name:
        advice = f"{name} is an argument of {kind.__name__}(...) alone"
    if advice:
        message = f"{kind.__name__!r} object has no attribute {name!r} to set"
        raise AttributeError(f"{message}; {advice}")


class Checked(metaclass=Constructor):
    """Abstract base of classes that check their attributes, and explain misspelled names."""

    aliases: ClassVar[Mapping[str, tuple[str, ...]]] = {}
    """Aliases and the arguments they stand for; an alias of several takes a tuple of values.

    An alias exists if the class has all of the arguments.
    """

    argument_names: ClassVar[Mapping[str, tuple[str, ...]]] = {}
    """Argument names of other libraries, and the names to suggest for them."""

    argument_advice: ClassVar[Mapping[str, str]] = {}
    """Advice for argument names of other libraries that have no counterpart."""

    attribute_advice: ClassVar[Mapping[str, str]] = {}
    """Advice for methods and attributes of other libraries."""

    unlisted: ClassVar[frozenset[str]] = frozenset(
        {"aliases", "argument_advice", "argument_names", "attribute_advice", "unlisted"}
        | {"declared", "defaults", "independent", "positional", "torch_defaults", "transient"}
    )
    """Names for the package alone, which completion leaves out."""

    arguments: ClassVar[Descriptions] = {}
    """Attributes that are validated on every assignment; merged with the bases' arguments."""

    independent: ClassVar[frozenset[str]] = frozenset()
    """Attributes that contradict no other, whose assignment is not checked with them."""

    progress: ClassVar[Descriptions] = {}
    """Attributes that change with every update; validated only when they are restored."""

    declared: ClassVar[Mapping[str, Argument]] = {}
    """Declared arguments and attributes of the class and its bases."""

    positional: ClassVar[tuple[str, ...]] = ()
    """Arguments that may be given by position, in order.

    Where a class declares some, they follow those of its base, unless it gives another order.
    """

    torch_defaults: ClassVar[Mapping[str, Any]] = {}
    """Default values with ``formula="torch"`` that differ."""

    defaults: ClassVar[Mapping[str, Any]] = {}
    """Default values of declared arguments."""

    transient: ClassVar[frozenset[str]] = frozenset()
    """Attributes of the present process."""

    _local: ClassVar[Mapping[str, Any]] = {}
    _factories: ClassVar[Mapping[str, Any]] = {}
    _own: ClassVar[Mapping[str, Argument]] = {}
    _arguments: ClassVar[Descriptions] = {}
    _progress: ClassVar[Descriptions] = {}

    def __init_subclass__(cls, **kwargs: object) -> None:
        super().__init_subclass__(**kwargs)
        defined = {name: value for name, value in vars(cls).items() if isinstance(value, Argument)}
        for name, argument in cls.declared.items():  # a plain value is another default
            value = vars(cls).get(name, argument)
            if not isinstance(value, Argument) and not hasattr(type(value), "__get__"):
                defined[name] = replace(argument, default=value, check=None)
        for name in defined:
            type.__delattr__(cls, name)
        declared: dict[str, Argument] = {}
        checks: dict[str, dict[str, Description]] = {"arguments": {}, "progress": {}}
        cls._own = defined
        for base in reversed(cls.__mro__):
            for kind, known in checks.items():
                described: Any = vars(base).get(kind, {})
                if not isinstance(described, Mapping) or not all(map(callable, described.values())):
                    raise TypeError(f"{base.__name__}.{kind} must map names to descriptions")
                known.update(described)
            for name, layer in vars(base).get("_own", {}).items():
                argument = declared[name] = layer.over(declared.get(name))
                if argument.check is not None:
                    kind = "progress" if argument.factory else "arguments"
                    checks[kind][argument.stored or name] = argument.check
        cls.declared, cls._arguments, cls._progress = declared, *checks.values()
        kept = {name: arg for name, arg in declared.items() if not (arg.names or arg.local)}
        cls.transient = frozenset(name for name, arg in declared.items() if arg.local)
        first = {name: declared[name].default for name in cls.transient}
        cls._local = {name: value for name, value in first.items() if value is not ...}
        cls.defaults = {name: arg.default for name, arg in kept.items() if not arg.factory}
        cls._factories = {name: arg.factory for name, arg in kept.items() if arg.factory}
        cls.torch_defaults = {n: arg.torch for n, arg in kept.items() if arg.torch is not ...}
        others = {name: arg.names for name, arg in defined.items() if arg.names}
        cls.aliases = {**cls.aliases, **others}
        if "positional" not in vars(cls) and any(arg.positional for arg in defined.values()):
            order = [name for name, arg in declared.items() if arg.positional]
            cls.positional = tuple(sorted(order, key=lambda name: declared[name].last))

    @classmethod
    def _has_argument(cls, name: str) -> bool:
        """Whether the constructor has a declared argument, not counting aliases."""
        return name in cls.defaults and cls.declared[name].init

    @classmethod
    def _add_defaults(cls, kwargs: dict[str, Any], others: Collection[str]) -> None:
        """Add arguments whose defaults depend on others; `others` are given by position."""

    @classmethod
    def _check_positional(cls, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Raise or warn if positional arguments look like a mistake."""

    @classmethod
    def _constructed(cls, instance: Self) -> None:
        """Called when an instance has been constructed."""

    @classmethod
    def _described_attributes(cls) -> set[str]:
        """Return the names of the attributes that the class and its bases describe."""
        return {*cls._arguments, *cls._progress}

    @classmethod
    def _checked_attributes(cls, attributes: Mapping[str, Any]) -> dict[str, Any]:
        """Validate the attributes of a saved instance and return them.

        Raises
        ------
        TypeError, ValueError
            An attribute is missing or does not match its description.
        """
        for name, argument in cls.declared.items():
            if argument.new:
                value = argument.default if argument.factory is None else argument.factory()
                attributes = {argument.stored or name: value, **attributes}
        if missing := sorted(cls._described_attributes() - attributes.keys()):
            raise ValueError(f"the saved {cls.__name__} lacks {', '.join(missing)}")
        described = {**cls._arguments, **cls._progress}
        checked = {name: check(name, attributes[name]) for name, check in described.items()}
        return {**attributes, **checked}

    def check_together(self) -> None:
        """Raise ValueError unless the attributes are consistent; subclasses may extend this."""

    def __setattr__(self, name: str, value: object) -> None:
        described, fields = self._arguments.get(name), vars(self)
        if described is None and name not in fields:
            check_new(self, name)
        is_new, before = name not in fields, fields.get(name)
        super().__setattr__(name, value if described is None else described(name, value))
        if is_new or described is None or name in self.independent:
            return
        try:
            self.check_together()
        except BaseException:
            fields[name] = before
            raise

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__()} - self.unlisted - self.transient)

    if not TYPE_CHECKING:  # type checkers would accept any attribute

        def __getattr__(self, name: str) -> Any:
            kind = type(self)
            if not name.startswith("__") and hasattr(kind, name):
                return object.__getattribute__(self, name)  # raises the property's own error
            known = {*dir(kind), *vars(self)} - kind.unlisted - kind.transient
            known = {other for other in known if not other.startswith("_")}
            raise no_attribute(f"{kind.__name__!r} object", name, known, kind.attribute_advice)


Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


def constructs(
    cls: Callable[Arguments, Result],
) -> Callable[[Callable[[], None]], Callable[Arguments, Result]]:
    """Decorate the name and docstring of a function that constructs a class, with its errors."""

    def decorate(function: Callable[[], None]) -> Callable[Arguments, Result]:
        kind: Any = cls

        @functools.wraps(function)
        def construct(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
            if unknown := [name for name in kwargs if name not in kind.__signature__.parameters]:
                raise unknown_arguments(kind, unknown, function.__name__)
            return cls(*args, **kwargs)

        signature = kind.__signature__.replace(return_annotation=kind)
        vars(construct)["__signature__"] = signature
        return construct

    return decorate


if TYPE_CHECKING:
    constructor = classmethod
else:

    class constructor(classmethod):
        """Class method that returns a new object; it raises TypeError on an instance."""

        def __get__(self, instance: object, owner: type | None = None) -> Callable[..., Any]:
            method = super().__get__(instance, owner)

            @functools.wraps(method)
            def refuse(*args: object, **kwargs: object) -> None:
                call = f"{type(instance).__name__}.{method.__name__}"
                raise TypeError(f"{call}(...) returns a new object: call it on the class")

            return method if instance is None else refuse
