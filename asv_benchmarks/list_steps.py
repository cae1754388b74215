"""The same step of Adam on many float32 weights in several libraries."""

from collections.abc import Callable
from functools import partial
from itertools import cycle

from benchmarks.common import Call, Step
from benchmarks.lists import SMALL, ListStep, Shapes, elements, resnet50
from steps import LR, THREADS

COLUMNS = {
    "1,000 x 1,000": (SMALL, False),
    "1,000 x 1,000, fresh gradients": (SMALL, True),
    "ResNet-50": (resnet50(), False),
}
"""Arguments of a step by the name of its column."""


def fastopt_step(shapes: Shapes, fresh: bool) -> Call:
    return ListStep(shapes, fresh, learning_rate=LR)


def flat_step(shapes: Shapes, fresh: bool) -> Call:
    return Step("adam", elements(shapes), learning_rate=LR)


def torch_step(shapes: Shapes, fresh: bool, **options: bool) -> Call:
    import torch

    torch.set_num_threads(THREADS)
    weights = [torch.nn.Parameter(torch.randn(shape)) for shape in shapes]
    gradients = cycle([[torch.randn(shape) for shape in shapes] for _ in range(3 if fresh else 1)])
    update = torch.optim.Adam(weights, lr=LR, **options).step

    def renew():
        for weight, grad in zip(weights, next(gradients), strict=True):
            weight.grad = grad

    def step():
        renew()
        update()

    step()
    return step if fresh else update


PEERS: dict[str, tuple[str, Callable[[Shapes, bool], Call]]] = {
    # row: (library, step)
    "fastopt": ("fastopt", fastopt_step),
    "fastopt, one flat weight": ("fastopt", flat_step),
    "torch, fused": ("torch", partial(torch_step, fused=True)),
    "torch, foreach": ("torch", partial(torch_step, foreach=True)),
}
