"""fastopt without MPI: nothing of it is needed until it is asked for."""

import sys

import pytest

from fastopt import Parameter, Trainer


def test_mpi_is_not_imported_with_the_package(run_python):
    code = "import fastopt, sys; print([m for m in sys.modules if 'mpi' in m.split('.')[0]])"
    assert run_python(code) == "[]\n"


def test_an_error_says_how_to_install_a_missing_mpi4py(run_python):
    code = """
import sys
sys.modules["mpi4py"] = None
try:
    import fastopt.mpi
except ImportError as error:
    print(error)
"""
    told = run_python(code)
    assert told.startswith("fastopt.mpi needs mpi4py and an MPI: pip install mpi4py mpich")


def test_a_trainer_tells_what_its_comm_needs(monkeypatch):
    monkeypatch.setitem(sys.modules, "fastopt.mpi", None)
    with pytest.raises(ValueError, match=r"comm needs fastopt\.mpi"):
        Trainer([Parameter("w", shape=2)], comm=object())


def test_demo_tells_what_mpi_needs(run_python):
    code = """
import sys
sys.modules["mpi4py"] = None
from fastopt.__main__ import main
print(main(["demo", "--mpi"]))
"""
    done = run_python(code, check=False)
    assert done.stdout == "2\n"
    assert "pip install mpi4py mpich" in done.stderr
