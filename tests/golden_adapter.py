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


def make_row_sparse(values, indices, shape):
    """Gradient that lists rows."""
    return RowSparse(values, indices, shape)


def make_lr_scheduler(name, kwargs):
    """Schedule of the MXNet class `name`."""
    return getattr(lr_scheduler, name)(**kwargs)


def get_state(updater, index):
    """State of one index in MXNet's nesting."""
    return updater.states[index]


def make_initializer(name, kwargs):
    """Initializer of the MXNet class `name`, with numbers that are the same in every run."""
    return initializer.create(name, rng=0, **kwargs)


def make_init_desc(name, attrs, global_init):
    """Description of the parameter `name`."""
    return initializer.InitDesc(name, attrs, global_init)


def make_load(params, default_init):
    """Initializer that copies the arrays `params`."""
    return initializer.Load(params, default_init)


def make_mixed(patterns, initializers):
    """Initializer that goes by patterns of names."""
    return initializer.Mixed(patterns, initializers)
