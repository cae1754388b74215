"""Constructors that accept aliases and explain argument names of other libraries.

Aliases are resolved before ``__init__`` is called, so that it sees only the canonical names.
"""

import functools
import inspect
from abc import ABCMeta
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, ParamSpec, TypeVar, get_args

from fastopt._suggestions import closest
from fastopt.arguments import brief


class Same:
    """Default value of an alias; its representation is the names that the alias stands for."""

    def __init__(self, names: tuple[str, ...]) -> None:
        self.names = names

    def __repr__(self) -> str:
        joined = ", ".join(self.names)
        return f"({joined})" if len(self.names) > 1 else joined


class Constructor(ABCMeta):
    """Metaclass of classes whose constructors accept aliases of their arguments."""

    aliases: ClassVar[Mapping[str, tuple[str, ...]]] = {}
    """Aliases and the arguments they stand for; an alias of several takes a tuple of values.

    An alias exists if the class has all of the arguments.
    """

    argument_names: ClassVar[Mapping[str, tuple[str, ...]]] = {}
    """Argument names of other libraries, and the names to suggest for them."""

    argument_advice: ClassVar[Mapping[str, str]] = {}
    """Advice for argument names of other libraries that have no counterpart."""

    first_attributes: frozenset[str] = frozenset()
    """Attributes of the first instance when it was constructed; empty before."""

    @property
    def __signature__(cls) -> inspect.Signature:
        """Signature with all arguments, including aliases and those passed by ``**kwargs``."""
        known: inspect.Signature | None = vars(cls).get("_all_arguments")
        if known is None:
            known = inspect.Signature(list(_parameters(cls)))
            type.__setattr__(cls, "_all_arguments", known)
        return known

    if not TYPE_CHECKING:  # checkers read __init__

        def __call__(cls, *args: Any, **kwargs: Any) -> Any:
            """Create an instance, resolving aliases first."""
            _resolve(cls, args, kwargs)
            instance = super().__call__(*args, **kwargs)
            cls.constructed(instance)
            if "first_attributes" not in vars(cls):
                cls.first_attributes = frozenset(getattr(instance, "__dict__", ()))
            return instance

    def constructed(cls, instance: Any) -> None:
        """Called when an instance has been constructed."""

    def add_defaults(cls, kwargs: dict[str, Any], others: Collection[str]) -> None:
        """Add arguments whose defaults depend on others; `others` are given by position."""

    def check_positional(cls, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Raise or warn if positional arguments look like a mistake."""


def _parameters(cls: Any) -> Iterator[inspect.Parameter]:
    """Yield the parameters of the constructor."""
    owner, bases = _definer(cls)
    constructor = vars(owner)["__init__"]
    if getattr(constructor, "takes_declared", False):
        own = list(_declared(cls))
    else:
        _, *own = inspect.signature(constructor).parameters.values()
    found = {each.name: each for each in own if each.kind is not each.VAR_KEYWORD}
    keywords = [each for each in own if each.kind is each.VAR_KEYWORD]
    if keywords:
        for parameter in _passed_on(keywords[0], bases):
            found.setdefault(parameter.name, parameter)
    for alias, names in cls.aliases.items():
        if alias not in found and found.keys() >= {*names}:
            keyword = inspect.Parameter.KEYWORD_ONLY
            found[alias] = inspect.Parameter(alias, keyword, default=Same(names))
    yield from found.values()
    if keywords and not _keys(keywords[0]):
        yield keywords[0]


def _declared(cls: Any) -> Iterator[inspect.Parameter]:
    """Yield the parameters of declared arguments: by position, then by name, its own first."""
    known = {name: each for name, each in cls.declared.items() if each.init and not each.names}
    for name in cls.positional:
        default = known.pop(name).default
        yield inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD, default=default)
    bases = [base.declared for base in cls.__mro__[1:] if getattr(base, "declared", ())]

    def place(name: str) -> int:
        if bases and name in bases[-1]:
            return 2
        return any(base.get(name) is known[name] for base in bases)

    for name in sorted(known, key=place):
        default = known[name].default
        yield inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default)


def _definer(cls: type) -> tuple[type, list[type]]:
    """Return the class that defines ``__init__``, and the classes after it in the MRO."""
    order = cls.__mro__
    place = next(place for place, base in enumerate(order) if "__init__" in vars(base))
    return order[place], list(order[place + 1 :])


def _keys(keywords: inspect.Parameter) -> list[str]:
    """Return the keys of the TypedDict that annotates ``**kwargs``."""
    return [name for part in get_args(keywords.annotation) for name in part.__annotations__]


def _passed_on(keywords: inspect.Parameter, bases: Iterable[type]) -> Iterator[inspect.Parameter]:
    """Yield the parameters behind ``**kwargs``: TypedDict keys, or those of the next class."""
    above: dict[str, inspect.Parameter] = {}
    for base in bases:
        if isinstance(base, Constructor) and ("__init__" in vars(base) or vars(base).get("_own")):
            for name, parameter in base.__signature__.parameters.items():
                above.setdefault(name, parameter)
            if not _keys(keywords):
                break
    names = {*(_keys(keywords) or above)}
    for name, parameter in above.items():
        if name in names and _is_named(parameter) and not isinstance(parameter.default, Same):
            yield parameter.replace(kind=parameter.KEYWORD_ONLY)


def _resolve(cls: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Replace aliases in `kwargs` by the constructor's names; reject unknown and missing names."""
    names, required, is_closed = vars(cls).get("_checked_names") or _check_names(cls)
    if not (args or kwargs or required):
        return
    cls.check_positional(args, kwargs)
    rename(cls, kwargs, names[: len(args)])
    cls.add_defaults(kwargs, names[: len(args)])
    if is_closed and (unknown := kwargs.keys() - names):
        raise unknown_arguments(cls, [name for name in kwargs if name in unknown])
    given = {*kwargs, *names[: len(args)]}
    if missing := [name for name in required if name not in given]:
        raise TypeError(f"{cls.__name__} needs {', '.join(missing)}")


def _check_names(cls: Any) -> tuple[list[str], list[str], bool]:
    """Return the names of all arguments and of the required ones, and whether there are no others.

    No name is required if ``*args`` might be passed on as any argument.
    """
    parameters = cls.__signature__.parameters.values()
    required = [each for each in parameters if each.default is each.empty]
    names = [each.name for each in required] if all(map(_is_named, required)) else []
    is_closed = all(each.kind is not each.VAR_KEYWORD for each in parameters)
    found = [each.name for each in parameters], names, is_closed
    type.__setattr__(cls, "_checked_names", found)
    return found


def _is_named(parameter: inspect.Parameter) -> bool:
    return parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)


def rename(cls: Any, kwargs: dict[str, Any], others: Iterable[str] = ()) -> None:
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
    given = {*kwargs, *others}
    for alias in [name for name in kwargs if name in parameters]:
        same = parameters[alias].default
        if isinstance(same, Same):
            for name in given.intersection(same.names):
                raise TypeError(
                    f"{cls.__name__} takes {alias} or {name}, not both: they are the same argument"
                )
            kwargs |= _values(alias, same.names, kwargs.pop(alias))


def _values(alias: str, names: tuple[str, ...], value: Any) -> dict[str, Any]:
    """Return the values of the arguments that an alias stands for."""
    if len(names) == 1:
        return {names[0]: value}
    if not isinstance(value, (tuple, list)) or len(value) != len(names):
        kind = "pair" if len(names) == 2 else "tuple"
        raise TypeError(f"{alias} must be a {kind} ({', '.join(names)}), got {brief(value)}")
    return dict(zip(names, value, strict=True))


def unknown_arguments(
    cls: Any,
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
        taken = [each.name for each in parameters if each.kind is not each.VAR_KEYWORD]
    unknown = list(unknown)
    advice = {
        name: str(cls.argument_advice[name]) for name in unknown if name in cls.argument_advice
    }
    names = [name for name in unknown if name not in advice]
    meant = [each for name in names if (each := _meant(cls, name, taken))]
    parts = list(dict.fromkeys(advice.values()))
    parts += [f"did you mean {', '.join(meant)}?"] * bool(meant)
    parts += [f"it takes {', '.join(taken)}"] * (len(meant) < len(names))
    caller = caller or cls.__name__
    return TypeError(f"{caller} does not take {', '.join(unknown)}; {'; '.join(parts)}")


def _meant(cls: Any, name: str, taken: Sequence[str]) -> str | None:
    """Return the argument to suggest for an unknown name, or None."""
    meant = [each for each in cls.argument_names.get(name, ()) if each in taken]
    return meant[0] if meant else closest(name, taken)


def check_new(owner: Any, name: str) -> None:
    """Raise AttributeError if an attribute to be set is new and looks like a misspelled one.

    Classes outside of the package may have any attributes.

    Parameters
    ----------
    owner : object
        Instance of a class with the metaclass :class:`Constructor`.
    name : str
        The attribute.
    """
    kind = type(owner)
    first = vars(kind).get("first_attributes")
    if not first or name in first or kind.__module__.partition(".")[0] != "fastopt":
        return
    if name.startswith("_") or hasattr(kind, name):
        return
    names = {*kind.__signature__.parameters, *first, *kind.argument_names}
    names |= {each for each in dir(kind) if isinstance(getattr(kind, each), property)}
    meant = _meant(kind, name, [each for each in names if not each.startswith("_")])
    advice = f"did you mean {meant}?" if meant else kind.argument_advice.get(name)
    if meant == name:
        advice = f"{name} is an argument of {kind.__name__}(...) alone"
    if advice:
        message = f"{kind.__name__!r} object has no attribute {name!r} to set"
        raise AttributeError(f"{message}; {advice}")


class Spelled(metaclass=Constructor):
    """Base of classes that refuse to set attributes with misspelled names."""

    def __setattr__(self, name: str, value: Any) -> None:
        if name not in vars(self):
            check_new(self, name)
        super().__setattr__(name, value)


Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


def constructs(
    cls: Any,
) -> Callable[[Callable[Arguments, Result]], Callable[Arguments, Result]]:
    """Decorate a function with the arguments of a class to report unknown ones like the class."""

    def decorate(function: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
        @functools.wraps(function)
        def checked(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
            if unknown := [name for name in kwargs if name not in cls.__signature__.parameters]:
                raise unknown_arguments(cls, unknown, function.__name__)
            return function(*args, **kwargs)

        return checked

    return decorate
