"""fastopt without MPI: nothing of it is needed until it is asked for."""

import pytest

from fastopt import Parameter, Trainer


@pytest.mark.slow
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


def test_a_trainer_says_what_its_comm_can_be():
    with pytest.raises(TypeError, match="comm must be a communicator of mpi4py or a process group"):
        Trainer([Parameter("w", shape=2)], comm=object())


@pytest.mark.slow
def test_demo_names_what_mpi_needs(run_python):
    code = """
import sys
sys.modules["mpi4py"] = None
from fastopt.__main__ import main
print(main(["demo", "--mpi"]))
"""
    done = run_python(code, check=False)
    assert done.stdout == "2\n"
    assert "pip install mpi4py mpich" in done.stderr
