"""Checkpoints of optimizers and updaters."""

from typing import Any

from fastopt._advice import Advice as _Advice
from fastopt._advice import no_attribute as _no_attribute
from fastopt.checkpoint.foreign.mxnet import MXNetStates as MXNetStates
from fastopt.checkpoint.foreign.mxnet import load_mxnet_states as load_mxnet_states
from fastopt.checkpoint.foreign.torch import from_torch_state_dict as from_torch_state_dict
from fastopt.checkpoint.foreign.torch import to_torch_state_dict as to_torch_state_dict
from fastopt.checkpoint.format.errors import CheckpointError as CheckpointError
from fastopt.checkpoint.format.files import write_atomically as write_atomically
from fastopt.checkpoint.format.tree import dumps as dumps
from fastopt.checkpoint.format.tree import loads as loads
from fastopt.checkpoint.restore.parameters import Skipped as Skipped


def __getattr__(name: str) -> Any:
    raise _no_attribute(f"module {__name__!r}", name, globals(), _Advice("CHECKPOINT"))
