"""State that outlives the process."""

from fastopt.checkpoint.errors import CheckpointError as CheckpointError
from fastopt.checkpoint.files import write_atomically as write_atomically
from fastopt.checkpoint.tree import dumps as dumps
from fastopt.checkpoint.tree import loads as loads
