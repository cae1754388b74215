"""fastopt.adapters imports a library when one of its names is used."""

import subprocess
import sys

import pytest

import fastopt.adapters

LIBRARIES = ("thinc", "sklearn", "river", "pennylane", "torch", "jax")


def test_importing_the_package_imports_no_library():
    code = f"import fastopt.adapters, sys; print([m for m in {LIBRARIES} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


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
    with pytest.raises(AttributeError, match="ThincOptimizer is also for spaCy"):
        fastopt.adapters.SpacyOptimizer  # noqa: B018
    with pytest.raises(AttributeError, match=r"ThincOptimizer\('adam'\), .* have fastopt.Adam"):
        fastopt.adapters.Adam  # noqa: B018
