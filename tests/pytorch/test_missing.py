"""Without torch, fastopt works, and fastopt.torch says what it needs."""

import sys

import pytest


def test_torch_is_imported_by_fastopt_torch_alone(run_python):
    code = "import sys, fastopt; fastopt.Adam; print('torch' in sys.modules)"
    assert run_python(code).strip() == "False"


def test_without_torch_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    monkeypatch.delitem(sys.modules, "fastopt.torch", raising=False)
    with pytest.raises(ImportError, match=r"fastopt.torch needs torch: pip install torch"):
        import fastopt.torch  # noqa: F401


def test_torch_is_installed():
    """The other modules of this folder are not collected without it."""
    pytest.importorskip("torch", reason="tests of fastopt.torch need torch: pip install torch")
