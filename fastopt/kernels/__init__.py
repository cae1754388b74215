"""Compiled kernels, each derived from a scalar rule; the only place that calls ``njit``."""

from fastopt.kernels.threads import choose_layer

choose_layer()
