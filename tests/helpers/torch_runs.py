"""Runs of torch's optimizers beside those of fastopt.torch."""

import io

import torch

import fastopt.torch


def check_like_torch(run, **tolerance):
    """A run with a library's classes has the same result with torch's and with ours."""
    torch.testing.assert_close(*map(run, (fastopt.torch, torch.optim)), **tolerance)


def saved(opt):
    """A state dict after a journey through a file."""
    file = io.BytesIO()
    torch.save(opt.state_dict(), file)
    file.seek(0)
    return torch.load(file, weights_only=True)
