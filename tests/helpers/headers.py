"""Assignment of shape, strides and dtype of arrays, which NumPy deprecates and programs do."""

import warnings


def reheader(array, **attributes):
    """Assign `shape`, `strides` or `dtype` of an array in place."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        for name, value in attributes.items():
            setattr(array, name, value)
