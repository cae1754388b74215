"""What authors of optimizers write rules with: :mod:`~fastopt.kernels.rule` and formulas."""
