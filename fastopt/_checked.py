"""Objects that validate their attributes on construction, on assignment and on restoring."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

from fastopt._naming import Constructor, check_new
from fastopt._suggestions import Advised
from fastopt.arguments import Argument, Description, Descriptions, described_in


class Checked(Advised, metaclass=Constructor):
    """Abstract base of classes with described attributes, see :mod:`fastopt.arguments`."""

    arguments: ClassVar[Descriptions] = {}
    """Attributes that are validated on every assignment; merged with the bases' arguments."""

    progress: ClassVar[Descriptions] = {}
    """Attributes that change with every update; validated only when they are restored."""

    added: ClassVar[Mapping[str, Any]] = {}
    """Default values of attributes that older checkpoints lack."""

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

    _factories: ClassVar[Mapping[str, Any]] = {}
    _own: ClassVar[Mapping[str, Argument]] = {}
    _arguments: ClassVar[Descriptions] = {}
    _progress: ClassVar[Descriptions] = {}

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        own = {name: value for name, value in vars(cls).items() if isinstance(value, Argument)}
        for name, argument in cls.declared.items():  # a plain value is another default
            value = vars(cls).get(name, argument)
            if not isinstance(value, Argument) and not hasattr(type(value), "__get__"):
                own[name] = replace(argument, default=value, check=None)
        for name in own:
            type.__delattr__(cls, name)
        cls._own = own
        cls._declare()
        if names := {name: each.names for name, each in own.items() if each.names}:
            type.__setattr__(cls, "aliases", {**cls.aliases, **names})
        if torch := {n: each.torch for n, each in cls.declared.items() if each.torch is not ...}:
            cls.torch_defaults = torch
        if "positional" not in vars(cls) and any(each.positional for each in own.values()):
            order = [name for name, each in cls.declared.items() if each.positional]
            cls.positional = tuple(sorted(order, key=lambda name: cls.declared[name].last))

    @classmethod
    def takes(cls, name: str) -> bool:
        """Whether the constructor has a declared argument, not counting aliases."""
        return name in cls.defaults and cls.declared[name].init

    @classmethod
    def _declare(cls) -> None:
        """Collect the declarations of the class and its bases."""
        declared: dict[str, Argument] = {}
        checks: dict[str, Description] = {}
        progress: dict[str, Description] = {}
        for base in reversed(cls.__mro__):
            checks |= described_in(base, "arguments")
            progress |= described_in(base, "progress")
            for name, own in vars(base).get("_own", {}).items():
                argument = declared[name] = own.over(declared.get(name))
                if argument.check is not None:
                    into = progress if argument.factory else checks
                    into[argument.stored or name] = argument.check
        kept = {name: each for name, each in declared.items() if not each.names}
        cls.declared, cls._arguments, cls._progress = declared, checks, progress
        cls.defaults = {name: each.default for name, each in kept.items() if not each.factory}
        cls._factories = {name: each.factory for name, each in kept.items() if each.factory}

    def __setattr__(self, name: str, value: Any) -> None:
        described = self._arguments.get(name)
        if described is None and name not in vars(self):
            check_new(self, name)
        object.__setattr__(self, name, value if described is None else described(name, value))

    @classmethod
    def described(cls) -> set[str]:
        """Return the names of the attributes that the class and its bases describe."""
        return {*cls._arguments, *cls._progress}

    @classmethod
    def checked(cls, attributes: Mapping[str, Any]) -> dict[str, Any]:
        """Validate the attributes of a saved instance and return them.

        Raises
        ------
        TypeError, ValueError
            An attribute is missing or does not match its description.
        """
        described = {**cls._arguments, **cls._progress}
        for base in cls.__mro__:
            attributes = {**vars(base).get("added", {}), **attributes}
        for name, each in cls.declared.items():
            if each.new:
                value = each.default if each.factory is None else each.factory()
                attributes = {each.stored or name: value, **attributes}
        missing = sorted(described.keys() - attributes.keys())
        if missing:
            raise ValueError(f"{cls.__name__} has no attribute {', '.join(missing)}")
        found = {name: check(name, attributes[name]) for name, check in described.items()}
        return {**attributes, **found}

    def check_together(self) -> None:
        """Raise ValueError unless the attributes are consistent; subclasses may extend this."""
