"""What tests/golden/check_golden.py needs to replay MXNet's numbers against fastopt."""

from fastopt import optimizer

SUPPORTS_LIST_CALLS = True


def make_updater(name, kwargs, param_idx2name):
    """Updater for the MXNet optimizer `name`."""
    return optimizer.get_updater(
        optimizer.create(name, param_idx2name=param_idx2name, **kwargs)
    )


def get_state(updater, index):
    """State of one index in MXNet's nesting."""
    return updater.states[index]
