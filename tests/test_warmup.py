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


@pytest.mark.slow("exhaustive")
@pytest.mark.parametrize(("arguments", "least"), [("Adam", 3), ("Adam sgd --rows", 10)])
def test_after_a_warmup_nothing_is_compiled(arguments, least, run_python, tmp_path):
    cache = {"NUMBA_CACHE_DIR": str(tmp_path)}
    first, again = (run_python(WARM, *arguments.split(), **cache) for _ in range(2))
    made = int(first.split()[0])
    assert made > least
    assert first.strip().endswith(", 0 were in the cache")
    assert again.strip() == f"0 kernels compiled, {made} were in the cache"
    assert run_python(UPDATE, **cache).strip() == "0"


def test_all_optimizers_with_rules_can_be_warmed():
    assert {"adafactor", "groupadagrad", "lbsgd", "muon", "sgld", "soap"} <= {*warmup.names()}
    assert "ccsgd" not in warmup.names()


@pytest.mark.parametrize("arguments", [["adm"], ["--dtypes", "float8"]])
def test_what_cannot_be_warmed_is_refused_in_a_line(arguments, capsys):
    assert main(["warmup", *arguments]) == 2
    assert "he names are" in capsys.readouterr().err


@pytest.mark.parametrize("names", [["Adam", "sgd", "adam"], []], ids=["named", "all"])
@pytest.mark.parametrize("rows", [[], ["--rows"]])
def test_each_optimizer_is_warmed_once(names, rows, monkeypatch):
    asked = []
    monkeypatch.setattr(warmup, "warm", lambda *task: asked.append(task))
    assert main(["warmup", *names, *rows]) == 0
    kinds = [False, True] if rows else [False]
    once = ["adam", "sgd"] if names else warmup.names()
    assert asked == [(name, "float32", kind) for name in once for kind in kinds]
