"""Checkpoints of optimizers and updaters."""

from fastopt.checkpoint.foreign.mxnet import MXNetStates as MXNetStates
from fastopt.checkpoint.foreign.mxnet import load_mxnet_states as load_mxnet_states
from fastopt.checkpoint.foreign.torch import from_torch_state_dict as from_torch_state_dict
from fastopt.checkpoint.foreign.torch import to_torch_state_dict as to_torch_state_dict
from fastopt.checkpoint.format.errors import CheckpointError as CheckpointError
from fastopt.checkpoint.format.files import write_atomically as write_atomically
from fastopt.checkpoint.format.tree import dumps as dumps
from fastopt.checkpoint.format.tree import loads as loads
from fastopt.checkpoint.restore.parameters import Skipped as Skipped
