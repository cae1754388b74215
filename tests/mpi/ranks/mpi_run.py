"""Run the checks of a module on all ranks, from the repository's root.

``PYTHONPATH=.:tests mpiexec -n 2 python tests/mpi/ranks/mpi_run.py mpi_updates``
"""

import importlib
import sys
import warnings

from mpi4py import MPI

comm = MPI.COMM_WORLD


def main(name, *arguments):
    """Call every function of the module whose name begins with "check_", in order."""
    warnings.simplefilter("error")
    module = importlib.import_module(name)
    for check, function in vars(module).items():
        if check.startswith("check_"):
            function(*arguments)
            comm.Barrier()
            if comm.rank == 0:
                print("passed", check, flush=True)


if __name__ == "__main__":
    import fastopt.mpi.job as job

    job.private(comm)  # from here on an error on one rank ends all
    main(*sys.argv[1:])
