"""What tests/golden/check_golden.py needs to replay MXNet's numbers against fastopt."""

import warnings

from fastopt import lr_scheduler, optimizer
from fastopt.sparse import RowSparse

SUPPORTS_LIST_CALLS = True


def make_updater(name, kwargs, param_idx2name):
    """Updater for the MXNet optimizer `name`."""
    kwargs = dict(kwargs)
    if kwargs.pop("op_mode", False) and "special" in kwargs:
        kwargs["rescale_grad"] = float(kwargs.pop("special"))
    warnings.filterwarnings("ignore", "float16 weights without masters")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "ccSGD is deprecated")
        made = optimizer.create(name, param_idx2name=param_idx2name, **kwargs)
    return optimizer.get_updater(made)


def make_row_sparse(values, indices, shape):
    """Gradient that lists rows."""
    return RowSparse(values, indices, shape)


def make_lr_scheduler(name, kwargs):
    """Schedule of the MXNet class `name`."""
    return getattr(lr_scheduler, name)(**kwargs)


def get_state(updater, index):
    """State of one index in MXNet's nesting."""
    return updater.states[index]
