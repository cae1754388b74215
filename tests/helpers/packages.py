"""Which packages the environment has."""

from importlib import metadata


def installed(package):
    return any(d.metadata["Name"] == package for d in metadata.distributions())
