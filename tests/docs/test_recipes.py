"""The recipes: loss curves are those of the libraries' own optimizers, and the page quotes them."""

import importlib
import re
import sys

import numpy as np
import pytest

from helpers.cases import exhaustive
from helpers.pages import blocks
from helpers.paths import DOCS
from helpers.processes import run

RECIPES = DOCS / "recipes"
PAGE = RECIPES.with_suffix(".md")
SCRIPTS = {
    "plain_numpy": "sklearn",
    "scikit_learn": "sklearn",
    "hips_autograd": "autograd",
    "thinc_digits": "thinc",
    "mygrad_cancer": "mynn",
    "river_phishing": "river",
    "pennylane_circuit": "pennylane",
    "bpr_factorization": "numpy",
    "word_vectors": "numpy",
    "online_learner": "numpy",
    "torch_views": "torch",
    "jax_gradients": "optax",
}
"""What each script needs besides fastopt."""

FALLS = {"river_phishing": 0.95, "word_vectors": 0.75, "online_learner": 0.8}
"""Share of the first loss that the last one is below, where it is not a half."""


@pytest.fixture
def recipe(monkeypatch):
    """Import a script, if its library is installed."""
    monkeypatch.syspath_prepend(RECIPES)

    def imported(script):
        pytest.importorskip(SCRIPTS[script])
        return importlib.import_module(script)

    return imported


RUNS = [
    *(("plain_numpy", (), 1e-12), ("scikit_learn", ("adam",), 1e-12)),
    *(("hips_autograd", (name,), 1e-12) for name in ("adam", "sgd")),
    *((name, (), 1e-12) for name in ("mygrad_cancer", "river_phishing", "online_learner")),
    *(("pennylane_circuit", (), 1e-10), ("bpr_factorization", (), 1e-5)),
    *((name, (), 1e-3) for name in ("torch_views", "jax_gradients")),
    ("thinc_digits", (), 1e-4),
    *exhaustive(("scikit_learn", ("sgd",), 1e-12), ("scikit_learn", ("sgd", False), 1e-12)),
    *exhaustive(("word_vectors", (), 1e-5)),
]


@pytest.mark.slow
@pytest.mark.parametrize("compared", RUNS)
def test_losses_are_those_of_the_librarys_own_optimizer(recipe, compared):
    script, arguments, rtol = compared
    theirs, ours = recipe(script).curves(*arguments)
    assert len(theirs) >= 10
    assert theirs[-1] < theirs[0] * FALLS.get(script, 0.5)
    np.testing.assert_allclose(ours, theirs, rtol=rtol)


@pytest.mark.parametrize("script", exhaustive(*SCRIPTS))
def test_scripts_print_both_losses_and_both_times(script):
    pytest.importorskip(SCRIPTS[script])
    done = run(sys.executable, "-W", "error", RECIPES / f"{script}.py")
    assert len(done.stdout.splitlines()) >= 10
    assert all("fastopt" in line for line in done.stdout.splitlines())
    times = r"time: .+ \d+ ms, fastopt \d+ ms, \d+\.\d\d times as long"
    assert re.fullmatch(times, done.stdout.splitlines()[-1])


def test_the_page_quotes_the_scripts_and_links_every_one():
    sources = {path.stem: path.read_text(encoding="utf-8") for path in RECIPES.glob("*.py")}
    assert {*sources} == {*SCRIPTS, "both_times"}
    quoted = [code for _, code in blocks(PAGE, "python")]
    assert len(quoted) >= 6
    assert [code for code in quoted if not any(code in each for each in sources.values())] == []
    text = PAGE.read_text(encoding="utf-8")
    assert [name for name in SCRIPTS if f"](recipes/{name}.py)" not in text] == []
