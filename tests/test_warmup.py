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
from fastopt.__main__ import main
main(["warmup", "--optimizers", "Adam", "sgd", "--rows"])
"""


def test_after_a_warmup_nothing_is_compiled(run_python, tmp_path):
    cache = {"NUMBA_CACHE_DIR": str(tmp_path)}
    first, again = run_python(WARM, **cache), run_python(WARM, **cache)
    made = int(first.split()[0])
    assert made > 10
    assert first.strip().endswith(", 0 were in the cache")
    assert again.strip() == f"0 kernels compiled, {made} were in the cache"
    assert run_python(UPDATE, **cache).strip() == "0"


def test_all_optimizers_with_rules_can_be_warmed():
    assert {"adam", "groupadagrad", "lbsgd", "sgld"} <= set(warmup.names())
    assert "ccsgd" not in warmup.names()


@pytest.mark.parametrize("arguments", [["--optimizers", "adm"], ["--dtypes", "float8"]])
def test_what_cannot_be_warmed_is_refused_in_a_line(arguments, capsys):
    assert main(["warmup", *arguments]) == 2
    assert "there are" in capsys.readouterr().err
