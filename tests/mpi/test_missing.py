"""fastopt without MPI: nothing of it is needed until it is asked for."""

import pytest


@pytest.mark.slow
def test_an_error_and_the_demo_say_how_to_install_a_missing_mpi4py(run_python):
    code = """
import sys
sys.modules["mpi4py"] = None
from fastopt.__main__ import main
print(main(["demo", "--mpi"]))
import fastopt.mpi
"""
    done = run_python(code, check=False)
    assert done.stdout == "2\n"
    demo, *_, error = done.stderr.splitlines()
    assert "pip install mpi4py mpich" in demo
    assert "fastopt.mpi needs mpi4py and an MPI: pip install mpi4py mpich" in error
