"""Run the checks of a module on all ranks of MPI, from the repository's root.

``PYTHONPATH=.:tests mpiexec -n 2 python tests/distributed/ranks/run_mpi.py ranks_updates``
"""

import sys
import warnings

from mpi4py import MPI

from fastopt.distributed.job import private
from helpers.ranks import checks_of, load
from helpers.untraced import trace_no_compiler

comm = MPI.COMM_WORLD


def main(name, *arguments):
    """Call every function of the module whose name begins with "check_", in order."""
    warnings.simplefilter("error")
    for check, function in checks_of(load(name, comm)).items():
        function(*arguments)
        comm.Barrier()
        if comm.rank == 0:
            print("passed", check, flush=True)


if __name__ == "__main__":
    trace_no_compiler()
    private(comm)  # from here on an error on one rank ends all
    main(*sys.argv[1:])
