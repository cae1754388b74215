"""Sharded updaters and tables over MPI; requires mpi4py and an MPI library."""

try:
    from mpi4py import MPI as MPI
except (ImportError, RuntimeError) as error:  # RuntimeError: mpi4py found no MPI library
    raise ImportError(
        f"fastopt.mpi needs mpi4py and an MPI: pip install mpi4py mpich ({error})"
    ) from error

from fastopt.mpi.embedding import ShardedEmbeddingTable as ShardedEmbeddingTable
from fastopt.mpi.memory import flat_like as flat_like
from fastopt.mpi.table import ShardedTable as ShardedTable
from fastopt.mpi.tables import ShardedTables as ShardedTables
from fastopt.mpi.updater import ShardedUpdater as ShardedUpdater
