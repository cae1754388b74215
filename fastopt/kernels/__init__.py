"""Compiled kernels, each derived from a scalar rule; the only place that calls ``njit``."""
