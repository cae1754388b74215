"""fastopt.adapters imports a library when one of its names is used."""

import doctest
import importlib
import sys

import numpy as np
import pytest

import fastopt.adapters
from helpers.refusals import check_refused

LIBRARIES = {name: name for name in ("pennylane", "river", "thinc")} | {"scikit_learn": "sklearn"}


@pytest.mark.parametrize("name", sorted(fastopt.adapters._MODULES))
def test_a_missing_library_is_named(name, monkeypatch):
    module = fastopt.adapters._MODULES[name]
    monkeypatch.delitem(vars(fastopt.adapters), name, raising=False)
    monkeypatch.delitem(sys.modules, f"fastopt.adapters.{module}", raising=False)
    monkeypatch.setitem(sys.modules, LIBRARIES[module], None)
    with pytest.raises(ImportError, match=f"pip install {module.replace('_', '-')}"):
        getattr(fastopt.adapters, name)


def test_names_are_listed_and_suggested():
    assert set(fastopt.adapters._MODULES) <= set(dir(fastopt.adapters))
    with pytest.raises(AttributeError, match="did you mean MLPClassifier"):
        fastopt.adapters.MLPClasifier  # noqa: B018


WRONG = {
    "ThincOptimizer(beta_1=0.8)": "TypeError: did you mean beta1",
    "ThincOptimizer('adamm')": "ValueError: Cannot find optimizer",
    "MLPClassifier(optimizer='adamm').fit([[0]], [0])": "ValueError: Cannot find optimizer 'adamm'",
    "MLPClassifier(optimizer=3).fit([[0]], [0])": "TypeError: must be an Optimizer or its name",
    "RiverOptimizer().averaged({})": "ValueError: Adam has no averages: predict with the weights",
    "RiverOptimizer('muon')": "ValueError: single features, and Muon updates whole arrays",
    "RiverOptimizer().step(ones, ones)": "TypeError: by the names of their features",
    "RiverOptimizer().step({'a': ones}, {'a': ones})":
        "TypeError: latent factors need an optimizer of river",
}  # fmt: skip


@pytest.mark.parametrize("code", WRONG)
def test_misuse_is_explained(code):
    name = code.partition("(")[0]
    pytest.importorskip(LIBRARIES[fastopt.adapters._MODULES[name]])
    check_refused(code, WRONG[code], {name: getattr(fastopt.adapters, name), "ones": np.ones(2)})


@pytest.mark.parametrize("module", LIBRARIES)
def test_the_examples_run(module):
    pytest.importorskip(LIBRARIES[module])
    examples = importlib.import_module(f"fastopt.adapters.{module}")
    assert doctest.testmod(examples).failed == 0
