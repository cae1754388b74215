"""Steps of optimizers of torch and optax, for files of recorded numbers."""

import json
from importlib.metadata import version
from pathlib import Path

import numpy as np


def steps_of_torch(make, start, gradients, rates=None, see=None):
    """The weight after each step, or what `see` returns of optimizer, weight and step.

    `make` creates the optimizer of a list of parameters.
    """
    import torch

    weight = torch.nn.Parameter(torch.tensor(start))
    optimizer = make([weight])
    for step, gradient in enumerate(gradients):
        if rates:
            optimizer.param_groups[0]["lr"] = rates[step]
        weight.grad = torch.tensor(gradient)
        optimizer.step()
        yield see(optimizer, weight, step) if see else weight.detach().tolist()


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


def drawn(shape, steps, last=1.0):
    """First weights, and gradients whose sizes go from 1 to the last."""
    rng = np.random.default_rng(sum(shape))
    sizes = np.geomspace(1, last, steps).reshape(-1, *[1] * len(shape))
    return rng.normal(size=shape), rng.normal(size=(steps, *shape)) * sizes


def alike(shape, steps, last):
    """First weights, and gradients of sizes from 100 to the last, with singular values alike."""
    rng = np.random.default_rng(sum(shape) * 10 + len(shape))
    gradients = rng.normal(size=(steps, *shape))
    if len(shape) == 2:
        left, values, right = np.linalg.svd(gradients, full_matrices=False)
        gradients = left * np.linspace(2, 1, values.shape[-1]) @ right
    sizes = np.geomspace(1e2, last, steps).reshape(-1, *[1] * len(shape))
    return rng.normal(size=shape), gradients * sizes


def by_shape(data, shapes):
    """First weights and gradients of shapes, by their names."""
    return {"x".join(map(str, shape)): [part.tolist() for part in data(shape)] for shape in shapes}


def case(shape, arguments, steps, **more):
    """A recorded case: our arguments, and weights after each step."""
    return {**more, "shape": shape, "arguments": arguments, "weights": [*steps]}


def write(name, packages, content, indent=None):
    """Write the content with the versions of packages that it was made with."""
    content = {"packages": {package: version(package) for package in packages}, **content}
    Path(__file__).with_name(name).write_text(json.dumps(content, indent=indent) + "\n")
