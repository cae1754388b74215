"""Growing embedding tables for arbitrary 64-bit ids."""

from fastopt.table.embedding import EmbeddingTable as EmbeddingTable
from fastopt.table.several import lookup as lookup
from fastopt.table.several import update as update
