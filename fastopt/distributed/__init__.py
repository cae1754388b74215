"""Sharded updaters and tables for ranks that MPI, torch.distributed or threads connect."""

from fastopt.distributed.checkpoint import latest_checkpoint as latest_checkpoint
from fastopt.distributed.checkpoint import save_checkpoint as save_checkpoint
from fastopt.distributed.communicator import Communicator as Communicator
from fastopt.distributed.embedding import ShardedEmbeddingTable as ShardedEmbeddingTable
from fastopt.distributed.plan import flat_like as flat_like
from fastopt.distributed.tables import ShardedTable as ShardedTable
from fastopt.distributed.tables import ShardedTables as ShardedTables
from fastopt.distributed.threads import run_threads as run_threads
from fastopt.distributed.updater import ShardedUpdater as ShardedUpdater
