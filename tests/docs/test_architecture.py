"""docs/architecture.md: the layers of its table are those of the imports, and its files exist."""

import ast
import importlib
import re
import sys
from functools import cache
from graphlib import TopologicalSorter

import pytest

from helpers.paths import ROOT, TESTS

PACKAGE = ROOT / "fastopt"
PAGE = (ROOT / "docs" / "architecture.md").read_text("utf-8")
sys.path.append(str(ROOT / "docs"))
LAYERS = importlib.import_module("pictures").layers(PAGE)
HEIGHTS = {f"fastopt.{name}": -row for row, names in enumerate(LAYERS.values()) for name in names}
FILES = sorted(PACKAGE.rglob("*.py"))
INTERNAL = ("_engine", "_kernels", "kernels")


def name_of(path):
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


@cache
def parsed(path):
    return ast.parse(path.read_text("utf-8"))


def part_of(module):
    """What the table lists of a module: itself or a package that it is in."""
    while module and module not in HEIGHTS:
        module = module.rpartition(".")[0]
    return module


@cache
def imports(tree, typed=False):
    """Modules of the package that a file imports, those for type checkers only if `typed`."""
    found = []
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING" and not typed:
            found += imports(ast.Module(node.orelse, []))
        elif isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            found += [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            found += imports(node, typed)
    return [name for name in found if name.partition(".")[0] == "fastopt"]


def test_every_module_is_in_a_layer():
    assert len(LAYERS) == 9
    modules = {name_of(path) for path in FILES} - {"fastopt"}
    assert [module for module in modules if not part_of(module)] == []
    for name in HEIGHTS:
        path = ROOT / name.replace(".", "/")
        assert path.is_dir() or path.with_suffix(".py").is_file()


def test_a_module_imports_from_its_layer_and_those_below():
    for path in (path for path in FILES if path.name != "__init__.py"):
        height = HEIGHTS[part_of(name_of(path))]
        used = {part for name in imports(parsed(path)) if (part := part_of(name))}
        assert sorted(part for part in used if HEIGHTS[part] > height) == [], path


def links(name):
    """What each file imports, for type checkers too; `name` maps a module to the unit compared."""
    own = {name_of(path): path for path in FILES if path.name != "__init__.py"}
    found = {name(module): set() for module in own}
    for module, path in own.items():
        for used in imports(parsed(path), typed=True):
            parts = [used, used.rpartition(".")[0]]
            found[name(module)] |= {name(each) for each in parts if each in own}
    return {unit: used - {unit} for unit, used in found.items()}


def folder_of(module):
    return module.split(".")[1]


@pytest.mark.parametrize("name", [str, folder_of])
def test_imports_have_no_circles(name):
    TopologicalSorter(links(name)).prepare()


def code(path):
    """Number of lines with code, without docstrings and comments."""
    tree = parsed(path)
    told = {
        line
        for node in ast.walk(tree)
        if isinstance(node, (ast.Module, ast.FunctionDef, ast.ClassDef)) and ast.get_docstring(node)
        for line in range(node.body[0].lineno, node.body[0].end_lineno + 1)
    }
    lines = enumerate(map(str.strip, path.read_text("utf-8").splitlines()), 1)
    return sum(number not in told and line[:1] not in ("", "#") for number, line in lines)


AROUND = 977
"""Lines of the commands, which are around the package: this number may fall, and never rises."""


def test_what_is_around_the_package_stays_small():
    around = {f"fastopt.{name}" for name in (*LAYERS["commands"], "_console")}
    assert sum(code(path) for path in FILES if part_of(name_of(path)) in around) <= AROUND


def test_tests_that_stand_in_for_coverage_exist():
    named = re.findall(r"``(test_\w+)``", (PACKAGE / "_kernels" / "front.py").read_text("utf-8"))
    tests = "".join(path.read_text("utf-8") for path in TESTS.rglob("test_*.py"))
    assert named
    assert [name for name in named if f"def {name}(" not in tests] == []


SURFACE = {"parameter", "precision", "scope", "trainer"}
"""What MXNet has around its optimizers."""


def test_the_rest_does_not_need_the_surface_of_mxnet():
    used = {user: needed & SURFACE for user, needed in links(folder_of).items()}
    assert {user for user in used.keys() - SURFACE if used[user]} == {"demo"}


OF_ARRAYS = {"adafactor", "lbsgd", "muon", "prodigy", "rowsteps", "shampoo"}
"""Optimizers that compute with rows, matrices or sums, which an author's rule does not have."""


def test_an_optimizer_is_written_with_the_modules_of_authors():
    for path in (PACKAGE / "optimizer").glob("*.py"):
        if path.stem not in OF_ARRAYS and "\n@register\n" in path.read_text("utf-8"):
            used = imports(parsed(path), typed=True)
            assert [name for name in used if "._" in name] == [], path


def test_the_page_is_short_and_the_files_that_it_names_exist():
    named = re.findall(r"`([\w/.]+/(?:\w+\.py)?)`", PAGE)
    assert len(named) > 20
    for name in named:
        assert (PACKAGE / name).exists() or (ROOT / name).exists(), name
    assert len(PAGE.splitlines()) <= 120


def test_an_internal_module_has_tests_of_its_name_or_says_where_they_are():
    for path in FILES:
        if path.parent.name in INTERNAL and path.name != "__init__.py":
            folder = path.parent.name.removeprefix("_")
            told = re.findall(r"``(tests/[\w/]+\.py)``", ast.get_docstring(parsed(path)))
            assert told or (TESTS / folder / f"test_{path.name}").is_file(), path
            assert all((ROOT / each).is_file() for each in told), path
