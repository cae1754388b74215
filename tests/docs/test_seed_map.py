"""The map of names: what it names exists, with the arguments and the tests that it tells."""

import importlib
import inspect
import re

from helpers.paths import DOCS, TESTS

PAGE = DOCS / "seed-map.md"
SECTIONS = ["precision", "Scopes", "Initializers", "Parameters", "Optimizers", "Not taken over"]


def sections():
    """Rows of the table in each section, without its head, as tuples of cells."""
    found = {}
    for part in PAGE.read_text(encoding="utf-8").split("\n## ")[1:]:
        title, *lines = part.splitlines()
        rows = [line.strip("| ").split(" | ") for line in lines if line.startswith("| ")]
        assert rows[0][0] == "there"
        found[title] = rows[1:]
    return found


ROWS = [row for title, rows in sections().items() for row in rows if title != SECTIONS[-1]]


def resolve(name):
    """The object of a dotted name: in the longest part that is a module."""
    parts = name.split(".")
    for i in range(len(parts), 0, -1):
        try:
            found = importlib.import_module(".".join(parts[:i]))
        except ModuleNotFoundError:
            continue
        for part in parts[i:]:
            found = getattr(found, part)
        return found
    raise ModuleNotFoundError(name)


def accepted(found):
    """Names of the arguments of a function, or of a class and those it hands arguments on to."""
    if not isinstance(found, type):
        return set(inspect.signature(found).parameters)
    bases = found.__mro__[:-1]
    made = [getattr(base, how) for base in bases for how in ("__init__", "__new__")]
    names = {name for how in made if inspect.isfunction(how) for name in accepted(how)}
    return names | {*inspect.signature(found).parameters}


def test_every_section_has_rows():
    found = sections()
    assert len(found) == len(SECTIONS)
    for words, (title, rows) in zip(SECTIONS, found.items(), strict=True):
        assert words in title
        assert len(rows) >= 10
        assert len({row[0] for row in rows}) == len(rows)
    assert {len(row) for row in ROWS} == {3}
    assert {len(row) for row in found[SECTIONS[-1]]} == {2}


def test_names_of_the_library_exist_with_these_arguments():
    for _, here, _ in ROWS:
        ours = re.findall(r"`(fastopt\.[\w.]+)(?:\(([\w, ]*)\))?`", here)
        assert ours, here
        for name, arguments in ours:
            found = resolve(name)
            assert not arguments or set(arguments.split(", ")) <= accepted(found), name


def test_tests_that_are_named_exist():
    for *_, told in ROWS:
        named = re.findall(r"`([\w/]+\.py)::(test_\w+)`", told)
        assert len(named) == told.count("::") >= 1, told
        for file, test in named:
            source = (TESTS / file).read_text(encoding="utf-8")
            assert re.search(rf"^ *def {test}\(", source, re.MULTILINE), f"{file}::{test}"
