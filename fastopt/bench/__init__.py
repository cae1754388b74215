"""Measurements: a clock, the limit of an update, plain NumPy code, and ``fastopt bench``."""
