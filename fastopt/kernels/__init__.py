"""Public API for authors of rules: :mod:`~fastopt.kernels.rule` and shared formulas."""
