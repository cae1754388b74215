"""Compiled kernels, each derived from a scalar rule; the only package that calls ``njit``."""

from fastopt._kernels.threads import choose_layer

choose_layer()
