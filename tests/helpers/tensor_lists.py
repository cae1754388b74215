"""What tests of lists have in common: tensors of many kinds, and all that a call may change."""

from collections.abc import Mapping

import numpy as np

from fastopt._kernels.device_memory import host
from fastopt._kernels.layout import bfloat16
from fastopt.sparse import RowSparse


def dtype_of(name):
    """NumPy's dtype, or that of bfloat16."""
    return bfloat16() if name == "bfloat16" else np.dtype(name)


def normal(seed, shape, dtype):
    """Normal numbers."""
    return np.array(np.random.default_rng(seed).normal(size=shape)).astype(dtype_of(dtype))


def as_list(updater, indices, grads, weights):
    """Update with one call."""
    updater(list(indices), list(grads), list(weights))


def one_by_one(updater, indices, grads, weights):
    """Update with a call for each."""
    for index, grad, weight in zip(indices, grads, weights, strict=True):
        updater(index, grad, weight)


def frozen(value):
    """All bits of a structure of arrays and plain values, to be compared."""
    if isinstance(value, (np.ndarray, np.generic)):
        return value.dtype.name, value.shape, value.tobytes()
    if isinstance(value, RowSparse):
        return frozen((value.values, value.indices, value.shape))
    if isinstance(value, Mapping):
        return {key: frozen(part) for key, part in value.items()}
    if isinstance(value, (tuple, list)):
        return tuple(map(frozen, value))
    if isinstance(value, float):
        return float(value).hex()
    return frozen(vars(value)) if hasattr(value, "base_lr") else value


def everything(updater, weights):
    """All that an update may change."""
    made = updater.optimizer
    kept = made.__getstate__()
    scaler = updater.loss_scaler and updater.loss_scaler.state_dict()
    arrays = host((weights, dict(updater.states)))
    return frozen((arrays, updater.states_synced, kept, scaler))
