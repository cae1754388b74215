"""The page about CUDA, and its benchmark."""

import runpy
import sys

import pytest
from numba.core import config

from helpers.pages import blocks, printed
from helpers.paths import ROOT

pytestmark = pytest.mark.cuda


def test_code_runs_and_prints_what_it_says(capsys):
    namespace = {"__name__": "__main__"}
    expected = []
    for _, code in blocks(ROOT / "docs" / "cuda.md", "python"):
        exec(code, namespace)
        expected += printed(code)
    assert capsys.readouterr().out.splitlines() == expected
    assert expected


@pytest.mark.skipif(not config.ENABLE_CUDASIM, reason="has other sizes on a GPU")
def test_the_benchmark_prints_a_row_for_every_update(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["gpu.py", "--quick"])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(ROOT / "asv_benchmarks" / "gpu.py"), run_name="__main__")
    assert ended.value.code == 0
    out, err = capsys.readouterr()
    assert "torch is left out" in err
    rows = [line for line in out.splitlines() if line.startswith("| ")]
    assert [row.split(",")[0] for row in rows[1:]] == ["| Adam"] * 5 + ["| lazy Adam"]
