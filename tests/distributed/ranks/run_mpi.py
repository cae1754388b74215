"""Run the checks of a module on all ranks of MPI, from the repository's root.

``PYTHONPATH=.:tests mpiexec -n 2 python tests/distributed/ranks/run_mpi.py ranks_updates``
"""

import sys
import warnings

from mpi4py import MPI

from fastopt.distributed.job import private
from helpers.ranks import call_checks
from helpers.untraced import trace_no_compiler

if __name__ == "__main__":
    trace_no_compiler()
    private(MPI.COMM_WORLD)  # from here on an error on one rank ends all
    warnings.simplefilter("error")
    call_checks(MPI.COMM_WORLD, *sys.argv[1:])
