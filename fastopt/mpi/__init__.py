"""Sharded updaters and tables over MPI; requires mpi4py and an MPI library."""

try:
    from mpi4py import MPI as MPI
except (ImportError, RuntimeError) as error:  # RuntimeError: mpi4py found no MPI library
    raise ImportError(
        f"fastopt.mpi needs mpi4py and an MPI: pip install mpi4py mpich ({error})"
    ) from error

from fastopt.distributed import ShardedEmbeddingTable as ShardedEmbeddingTable
from fastopt.distributed import ShardedTable as ShardedTable
from fastopt.distributed import ShardedTables as ShardedTables
from fastopt.distributed import ShardedUpdater as ShardedUpdater
from fastopt.distributed import flat_like as flat_like
from fastopt.distributed import latest_checkpoint as latest_checkpoint
from fastopt.distributed import save_checkpoint as save_checkpoint
