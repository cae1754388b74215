"""Warnings that point to the line of the user's code."""

import os
import sys
import warnings
from pathlib import Path

PACKAGE = f"{Path(__file__).parent}{os.sep}"


def warn_user(message: str) -> None:
    """Issue a UserWarning at the innermost caller outside this package."""
    level, frame = 1, sys._getframe()
    while frame.f_back is not None and frame.f_code.co_filename.startswith(PACKAGE):
        level, frame = level + 1, frame.f_back
    warnings.warn(message, stacklevel=level)
