"""fastopt.adapters imports a library when one of its names is used."""

import doctest
import importlib
import sys

import pytest

import fastopt.adapters


@pytest.mark.parametrize("name", sorted(fastopt.adapters._MODULES))
def test_a_missing_library_is_named(name, monkeypatch):
    module = fastopt.adapters._MODULES[name]
    library = {"scikit_learn": "sklearn"}.get(module, module)
    monkeypatch.delitem(vars(fastopt.adapters), name, raising=False)
    monkeypatch.delitem(sys.modules, f"fastopt.adapters.{module}", raising=False)
    monkeypatch.setitem(sys.modules, library, None)
    with pytest.raises(ImportError, match=f"pip install {module.replace('_', '-')}"):
        getattr(fastopt.adapters, name)


def test_names_are_listed_and_suggested():
    assert set(fastopt.adapters._MODULES) <= set(dir(fastopt.adapters))
    with pytest.raises(AttributeError, match="did you mean MLPClassifier"):
        fastopt.adapters.MLPClasifier  # noqa: B018


@pytest.mark.parametrize("module", ["pennylane", "river", "scikit_learn", "thinc"])
def test_the_examples_run(module):
    pytest.importorskip({"scikit_learn": "sklearn"}.get(module, module))
    examples = importlib.import_module(f"fastopt.adapters.{module}")
    assert doctest.testmod(examples).failed == 0
