"""The demos: small models in plain NumPy, the optimizers of which are timed."""
