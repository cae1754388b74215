"""The error of everything that reads saved states."""

__all__ = ["CheckpointError"]


class CheckpointError(ValueError):
    """A checkpoint cannot be read or does not fit; the message says what is wrong and where."""
