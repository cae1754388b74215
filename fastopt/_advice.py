"""Suggestions for misspelled names, and for names of other libraries from ``advice.toml``.

Tests: ``tests/test_advice.py``.
"""

import tomllib
from collections.abc import Iterable, Iterator, Mapping
from difflib import get_close_matches
from functools import cache
from importlib import resources
from typing import Any


@cache
def _tables() -> dict[str, Mapping[str, Any]]:
    return tomllib.loads(resources.files("fastopt").joinpath("advice.toml").read_text("utf-8"))


class Advice(Mapping[str, Any]):
    """A table of ``advice.toml``, which is read when an error needs it.

    Parameters
    ----------
    name : str
        Its name in the file.

    Examples
    --------
    >>> from fastopt._advice import Advice
    >>> Advice("INITIALIZERS")["xavier_normal"]
    'glorot_normal'
    """

    def __init__(self, name: str) -> None:
        self.name = name

    def __getitem__(self, key: str) -> Any:
        return _tables()[self.name][key]

    def __iter__(self) -> Iterator[str]:
        return iter(_tables()[self.name])

    def __len__(self) -> int:
        return len(_tables()[self.name])


STEPS = "an optimizer is called by an updater: Updater(optimizer).step(grads, weights)"
LIBRARIES = (
    "fastopt.scipy_method(optimizer) is for SciPy, "
    "fastopt.adapters.ThincOptimizer(optimizer) for thinc"
)


def closest(name: str, known: Iterable[str], cutoff: float = 0.75) -> str | None:
    """Return the known name most similar to `name`, or None if no name is similar enough.

    Case and underscores are ignored, so that ``beta_1`` matches ``beta1``.

    Parameters
    ----------
    name : str
        The misspelled name.
    known : iterable of str
        Existing names.
    cutoff : float
        Minimum similarity, from 0 to 1.

    Examples
    --------
    >>> from fastopt._advice import closest
    >>> closest("momentun", ["momentum", "wd"]), closest("RMSprop", ["RMSProp"])
    ('momentum', 'RMSProp')
    >>> closest("adma", ["adamax", "adam"])
    'adam'
    >>> closest("amsgrad", ["momentum", "wd"]) is None
    True
    """
    plain = {_plain(candidate): candidate for candidate in sorted(known, reverse=True)}
    typed = _plain(name)
    if typed not in plain:  # prefer swapped letters over a missing one
        for candidate in plain:
            if len(typed) > 2 and sorted(candidate) == sorted(typed):
                return plain[candidate]
    matches = get_close_matches(typed, plain, n=1, cutoff=cutoff)
    return plain[matches[0]] if matches else None


def _plain(name: str) -> str:
    return name.replace("_", "").lower()


def choices(near: str | None, known: Iterable[str]) -> str:
    """Return the end of an error about an unknown name: the most similar name, then all.

    Examples
    --------
    >>> from fastopt._advice import choices
    >>> choices("adam", ["adam", "sgd"]), choices(None, ["adam", "sgd"])
    ("did you mean 'adam'? The names are adam, sgd", 'the names are adam, sgd')
    """
    names = f"names are {', '.join(known)}"
    return f"did you mean {near!r}? The {names}" if near else f"the {names}"


def no_attribute(
    owner: str, name: str, known: Iterable[str], advice: Mapping[str, str]
) -> AttributeError:
    """Return the AttributeError for a missing attribute, with a suggestion.

    Parameters
    ----------
    owner : str
        Description of the owner, such as "module 'fastopt'".
    name : str
        The attribute.
    known : iterable of str
        Existing names, which may be dotted; their last parts are compared with `name`.
    advice : mapping of str to str
        Advice for names of other libraries.
    """
    message = f"{owner} has no attribute {name!r}"
    if name in advice:
        return AttributeError(f"{message}; {advice[name]}")
    last = {path.rpartition(".")[2]: path for path in sorted(known, reverse=True)}
    near = None if name.startswith("_") else closest(name, last)
    return AttributeError(f"{message}; did you mean {last[near]}?" if near else message)
