"""Embedding tables that grow: rows by any 64-bit id."""

from fastopt.table.embedding import EmbeddingTable as EmbeddingTable
from fastopt.table.several import lookup as lookup
from fastopt.table.several import update as update
