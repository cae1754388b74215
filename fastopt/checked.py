"""Objects whose attributes pass the same checks in the constructor, later and from a file."""

from collections.abc import Mapping
from typing import Any, ClassVar

from fastopt.arguments import Descriptions, inherited
from fastopt.naming import Constructor
from fastopt.suggestions import Advised

__all__ = ["Checked"]


class Checked(Advised, metaclass=Constructor):
    """Abstract base of classes that describe their attributes, see :mod:`fastopt.arguments`."""

    arguments: ClassVar[Descriptions] = {}
    """Attributes that are checked wherever they are set; the class adds those of its bases."""

    progress: ClassVar[Descriptions] = {}
    """Attributes that change with every update; they are checked where they are restored."""

    added: ClassVar[Mapping[str, Any]] = {}
    """Values of attributes that older checkpoints lack."""

    _arguments: ClassVar[Descriptions] = {}
    _progress: ClassVar[Descriptions] = {}

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        cls._arguments = inherited(cls, "arguments")
        cls._progress = inherited(cls, "progress")

    def __setattr__(self, name: str, value: Any) -> None:
        described = self._arguments.get(name)
        object.__setattr__(self, name, value if described is None else described(name, value))

    @classmethod
    def described(cls) -> set[str]:
        """Names of the attributes that the class and its bases describe."""
        return {*cls._arguments, *cls._progress}

    @classmethod
    def checked(cls, attributes: Mapping[str, Any]) -> dict[str, Any]:
        """Return attributes of an instance that was saved, once all of them are checked.

        Raises
        ------
        TypeError, ValueError
            One is missing, or is not what the class says.
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
        """Raise ValueError unless the attributes fit together; a subclass may have more to say."""
