"""The page about CUDA."""

import pytest

from helpers.pages import blocks, printed
from helpers.paths import ROOT

pytestmark = pytest.mark.gpu


def test_code_runs_and_prints_what_it_says(capsys):
    namespace = {"__name__": "__main__"}
    expected = []
    for _, code in blocks(ROOT / "docs" / "cuda.md", "python"):
        exec(code, namespace)
        expected += printed(code)
    assert capsys.readouterr().out.splitlines() == expected
    assert expected
