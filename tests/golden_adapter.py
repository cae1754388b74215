"""Optimizers, schedules and initializers by MXNet's names, for a replay of its numbers."""

import warnings

from fastopt import initializer, lr_scheduler, optimizer
from fastopt.sparse import RowSparse


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


make_row_sparse = RowSparse
"""Gradient that lists rows."""


def make_lr_scheduler(name, kwargs):
    """Schedule of the MXNet class `name`."""
    return getattr(lr_scheduler, name)(**kwargs)


def get_state(updater, index):
    """State of one index in MXNet's nesting."""
    return updater.states[index]


def make_initializer(name, kwargs):
    """Initializer of the MXNet class `name`, with numbers that are the same in every run."""
    return initializer.create(name, rng=0, **kwargs)


make_init_desc = initializer.InitDesc
"""Description of the parameter of a name."""
make_load = initializer.Load
"""Initializer that copies arrays."""
make_mixed = initializer.Mixed
"""Initializer that goes by patterns of names."""
