"""Started by ``mpiexec -n 4 python by_mpi.py PATH STEPS``, or by ``srun``."""

import sys

from mpi4py import MPI
from train import train

comm = MPI.COMM_WORLD
train(comm, comm.rank, comm.size, sys.argv[1], int(sys.argv[2]))
