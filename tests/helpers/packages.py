"""Which packages the environment has."""

from importlib import metadata

__all__ = ["installed"]


def installed(package):
    return any(d.metadata["Name"] == package for d in metadata.distributions())
