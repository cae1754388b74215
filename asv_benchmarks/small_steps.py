"""Steps on few float32 weights in several libraries."""

from collections.abc import Callable
from itertools import cycle

from benchmarks.small import drawn, fastopt_step, loop_step, numpy_step
from benchmarks.tables import Shapes
from steps import torch_parameters, torch_rule

from fastopt.bench.clock import Call


def torch_step(algorithm: str, shapes: Shapes, fresh: bool) -> Call:
    import torch

    weights = torch_parameters(shapes)
    update = torch_rule(algorithm, weights, fused=True).step
    if not fresh:
        return update
    _, arrays = drawn(shapes, fresh)
    sets = cycle([[torch.from_numpy(grad) for grad in arrays()] for _ in range(3)])

    def step() -> None:
        for weight, grad in zip(weights, next(sets), strict=True):
            weight.grad = grad
        update()

    return step


PEERS: dict[str, tuple[str, Callable[[str, Shapes, bool], Call]]] = {
    "fastopt": ("fastopt", fastopt_step),
    "NumPy in place": ("numpy", numpy_step),
    "torch fused": ("torch", torch_step),
    "written loop": ("numba", loop_step),
}
