"""Checkpoints of optimizers and updaters."""

from fastopt.checkpoint.errors import CheckpointError as CheckpointError
from fastopt.checkpoint.files import write_atomically as write_atomically
from fastopt.checkpoint.mxnet import MXNetStates as MXNetStates
from fastopt.checkpoint.mxnet import load_mxnet_states as load_mxnet_states
from fastopt.checkpoint.parameters import Skipped as Skipped
from fastopt.checkpoint.torch_export import to_torch_state_dict as to_torch_state_dict
from fastopt.checkpoint.torch_import import from_torch_state_dict as from_torch_state_dict
from fastopt.checkpoint.tree import dumps as dumps
from fastopt.checkpoint.tree import loads as loads
