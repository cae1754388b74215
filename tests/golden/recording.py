"""Steps of optimizers of torch and optax, for files of recorded numbers."""

import json
from pathlib import Path

import numpy as np


def steps_of_torch(make, start, gradients, rates=None):
    """The weight after each step; `make` creates the optimizer of a list of parameters."""
    import torch

    weight = torch.nn.Parameter(torch.tensor(start))
    optimizer = make([weight])
    for step, gradient in enumerate(gradients):
        if rates:
            optimizer.param_groups[0]["lr"] = rates[step]
        weight.grad = torch.tensor(gradient)
        optimizer.step()
        yield weight.detach().tolist()


def steps_of_optax(optimizer, start, gradients):
    """The weight after each step."""
    import jax
    import optax

    weight = jax.numpy.asarray(start)
    state = optimizer.init(weight)
    for gradient in gradients:
        step, state = optimizer.update(jax.numpy.asarray(gradient), state, weight)
        weight = optax.apply_updates(weight, step)
        yield np.asarray(weight).tolist()


def by_shape(data, shapes):
    """First weights and gradients of shapes, by their names."""
    return {"x".join(map(str, shape)): [part.tolist() for part in data(shape)] for shape in shapes}


def write(name, content, indent=None):
    Path(__file__).with_name(name).write_text(json.dumps(content, indent=indent) + "\n")
