"""``fastopt warmup``: what it compiles is compiled for every later process."""

import pytest

from fastopt import warmup
from fastopt.__main__ import main

UPDATE = """
import numpy as np
from numba.core import event
from fastopt import optimizer
with event.install_recorder("numba:compile") as recorder:
    for size in (10, 40_000):
        optimizer.get_updater(optimizer.Adam())(0, np.ones(size, "f4"), np.zeros(size, "f4"))
print(len(recorder.buffer))
"""
WARM = """
import sys
from fastopt.__main__ import main
main(["warmup", *sys.argv[1:]])
"""


@pytest.mark.parametrize(
    ("arguments", "least"),
    [
        pytest.param("Adam", 3, marks=pytest.mark.slow("exhaustive"), id="as typed"),
        pytest.param("Adam sgd --rows", 10, marks=pytest.mark.slow("exhaustive"), id="rows"),
    ],
)
def test_after_a_warmup_nothing_is_compiled(arguments, least, run_python, tmp_path):
    cache = {"NUMBA_CACHE_DIR": str(tmp_path)}
    first, again = (run_python(WARM, *arguments.split(), **cache) for _ in range(2))
    made = int(first.split()[0])
    assert made > least
    assert first.strip().endswith(", 0 were in the cache")
    assert again.strip() == f"0 kernels compiled, {made} were in the cache"
    assert run_python(UPDATE, **cache).strip() == "0"


def test_all_optimizers_with_rules_can_be_warmed():
    assert {"adafactor", "adam", "groupadagrad", "lbsgd", "muon", "sgld", "soap"} <= set(
        warmup.names()
    )
    assert "ccsgd" not in warmup.names()


@pytest.mark.parametrize("arguments", [["adm"], ["--dtypes", "float8"]])
def test_what_cannot_be_warmed_is_refused_in_a_line(arguments, capsys):
    assert main(["warmup", *arguments]) == 2
    assert "he names are" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "names"),
    [(["Adam", "sgd", "adam"], ["adam", "sgd"]), ([], None)],
    ids=["named", "all"],
)
@pytest.mark.parametrize("rows", [[], ["--rows"]])
def test_each_optimizer_is_warmed_once(arguments, names, rows, monkeypatch):
    asked = []
    monkeypatch.setattr(warmup, "warm", lambda *task: asked.append(task))
    assert main(["warmup", *arguments, *rows]) == 0
    kinds = [False, True] if rows else [False]
    assert asked == [(n, "float32", kind) for n in names or warmup.names() for kind in kinds]
