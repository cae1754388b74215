"""Demos: small models in plain NumPy whose optimizer steps are timed."""
