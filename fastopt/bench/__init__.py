"""Benchmarks: a clock, the bandwidth limit of an update, NumPy code, and ``fastopt bench``."""
