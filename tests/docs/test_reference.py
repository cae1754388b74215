"""The API reference lists every public name, and each of them has a docstring."""

import importlib
import inspect
import re
from pathlib import Path
from types import ModuleType

import pytest

import fastopt
from helpers.paths import DOCS

PAGES = DOCS / "api"
MODULES = sorted(page.stem for page in PAGES.glob("fastopt*.rst"))
INTERNAL = {"arguments", "bench", "demo", "info", "kernels", "warmup"}
"""What the command line and the public modules are made of."""

modules = pytest.mark.parametrize("module", MODULES)


def imported(module):
    """The module; skips the test if a library is missing that it needs."""
    if module == "fastopt.mpi":
        pytest.importorskip("mpi4py.MPI", exc_type=(ImportError, RuntimeError))
    if module == "fastopt.torch":
        pytest.importorskip("torch")
    if module == "fastopt.adapters":
        for library in ("pennylane", "river", "sklearn", "thinc"):
            pytest.importorskip(library)
    return importlib.import_module(module)


def public(module):
    """Names that a module says are public, or, in a package, those that it exports."""
    found = imported(module)
    if hasattr(found, "__all__"):
        return set(found.__all__)
    return {
        name
        for name, value in ((name, getattr(found, name)) for name in dir(found))
        if not (name.startswith("_") or isinstance(value, ModuleType))
        and not (isinstance(value, type) and not hasattr(inspect.getmodule(value), name))
        and not str(getattr(value, "__module__", "fastopt")).startswith("typing")
    }


def listed(module):
    """Names that the page of a module lists, or describes by itself."""
    text = (PAGES / f"{module}.rst").read_text(encoding="utf-8")
    tables = re.findall(r"^\.\. autosummary::\n(?:   :.*\n)+\n((?:   \S+\n)+)", text, re.MULTILINE)
    tables += re.findall(r"^\.\. class:: ((?:\w+\n +)*\w+)$", text, re.MULTILINE)
    names = [line.strip() for table in tables for line in table.splitlines()]
    names += re.findall(r"^\.\. (?:data|function):: (\w+)(?:\(.*\))?$", text, re.MULTILINE)
    return [name.rpartition(".")[2] for name in names]


def test_every_module_that_is_not_internal_has_a_page():
    folder = Path(fastopt.__file__).parent
    found = {path.stem for path in folder.glob("[!_]*.py")}
    found |= {path.parent.name for path in folder.glob("[!_]*/__init__.py")}
    assert {f"fastopt.{name}" for name in found - INTERNAL} <= set(MODULES)


@modules
def test_every_public_name_is_listed_once(module):
    assert sorted(listed(module)) == sorted(public(module))


@modules
def test_every_listed_name_has_a_docstring(module):
    for name in listed(module):
        found = getattr(imported(module), name)
        if isinstance(found, (dict, tuple)):
            continue  # described on the page
        summary = (found.__doc__ or "").strip().partition("\n")[0]
        assert summary.endswith("."), name
        assert not summary.startswith(f"{name}("), "a signature, not a docstring"
        assert inspect.getmodule(found).__name__.startswith("fastopt"), name
