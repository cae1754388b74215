"""Objects that validate their attributes on construction, on assignment and on restoring."""

from collections.abc import Mapping
from typing import Any, ClassVar

from fastopt._naming import Constructor, check_new
from fastopt._suggestions import Advised
from fastopt.arguments import Descriptions, inherited

__all__ = ["Checked"]


class Checked(Advised, metaclass=Constructor):
    """Abstract base of classes with described attributes, see :mod:`fastopt.arguments`."""

    arguments: ClassVar[Descriptions] = {}
    """Attributes that are validated on every assignment; merged with the bases' arguments."""

    progress: ClassVar[Descriptions] = {}
    """Attributes that change with every update; validated only when they are restored."""

    added: ClassVar[Mapping[str, Any]] = {}
    """Default values of attributes that older checkpoints lack."""

    _arguments: ClassVar[Descriptions] = {}
    _progress: ClassVar[Descriptions] = {}

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        cls._arguments = inherited(cls, "arguments")
        cls._progress = inherited(cls, "progress")

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
        missing = sorted(described.keys() - attributes.keys())
        if missing:
            raise ValueError(f"{cls.__name__} has no attribute {', '.join(missing)}")
        found = {name: check(name, attributes[name]) for name, check in described.items()}
        return {**attributes, **found}

    def check_together(self) -> None:
        """Raise ValueError unless the attributes are consistent; subclasses may extend this."""
