"""Lazy row-sparse step in several libraries: 8,192 ids of a table of 1,000,000 x 64."""

import math
from collections.abc import Callable
from functools import partial
from itertools import count, cycle

import numpy as np
from benchmarks.rows import HEIGHT, WIDTH, Loop, RowStep, batches, gradient
from steps import FASTOPT, LR, THREADS, mxnet, mxnet_call

from fastopt import optimizer
from fastopt.bench.clock import Call

CASES = {
    f"lazy Adam, {kind} ids, {'cold' if cold else 'cached'}": (kind, cold)
    for cold in (True, False)
    for kind in ("sorted", "permuted", "zipf")
}
"""Arguments of a step by its label."""


def drawn(kind: str, cold: bool) -> list[np.ndarray]:
    """Return the row indices of the batches."""
    return batches(kind) if cold else batches(kind, count=1)


def fastopt_step(kind: str, cold: bool) -> Call:
    return RowStep(kind, cold, learning_rate=LR)


def numpy_step(kind: str, cold: bool) -> Call:
    opt = optimizer.Adam(**FASTOPT["adam"])
    arrays = [np.zeros((HEIGHT, WIDTH), np.float32) for _ in range(3)]
    for array in arrays:
        array += 0  # touches every page
    values, ids, counts = gradient(), cycle(drawn(kind, cold)), count(1)

    def step() -> None:
        rows, grad = next(ids), values
        if kind != "sorted":
            rows, grad = summed(rows, grad)
        lazy_adam(opt, next(counts), rows, grad, *arrays)

    return step


def summed(ids: np.ndarray, values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the unique row indices in order, and the summed values of each."""
    order = np.argsort(ids, kind="stable")
    rows, starts = np.unique(ids[order], return_index=True)
    return rows, np.add.reduceat(values[order], starts)


def lazy_adam(
    opt: optimizer.Adam,
    t: int,
    rows: np.ndarray,
    grad: np.ndarray,
    weight: np.ndarray,
    mean: np.ndarray,
    var: np.ndarray,
) -> None:
    """Gather the rows, update them and scatter them back."""
    mean[rows] = m = opt.beta1 * mean[rows] + (1 - opt.beta1) * grad
    var[rows] = v = opt.beta2 * var[rows] + (1 - opt.beta2) * grad * grad
    rate = opt.learning_rate * math.sqrt(1 - opt.beta2**t) / (1 - opt.beta1**t)
    weight[rows] -= rate * m / (np.sqrt(v) + opt.epsilon)


def torch_step(kind: str, cold: bool) -> Call:
    import torch

    torch.set_num_threads(THREADS)
    weight = torch.nn.Parameter(torch.randn(HEIGHT, WIDTH))
    optimizer = torch.optim.SparseAdam([weight], lr=LR)
    values = torch.from_numpy(gradient())
    grads = cycle(
        [
            torch.sparse_coo_tensor(
                torch.from_numpy(ids)[None],
                values,
                (HEIGHT, WIDTH),
                is_coalesced=kind == "sorted",  # lets torch skip sorting
                check_invariants=False,
            )
            for ids in drawn(kind, cold)
        ]
    )

    def step() -> None:
        weight.grad = next(grads)
        optimizer.step()

    step()
    for state in optimizer.state[weight].values():
        if isinstance(state, torch.Tensor):
            state.add_(0)  # touches every page
    return step


def mxnet_step(kind: str, cold: bool) -> Call:
    if kind != "sorted":
        raise NotImplementedError("its gradients list each row once and in order")
    mx = mxnet()
    values, shape = mx.nd.array(gradient()), (HEIGHT, WIDTH)
    grads = [
        mx.nd.sparse.row_sparse_array((values, mx.nd.array(ids, dtype="int64")), shape=shape)
        for ids in drawn(kind, cold)
    ]
    weight = mx.nd.random.normal(shape=shape).tostype("row_sparse")
    return mxnet_call("adam", weight, partial(next, cycle(grads)), **FASTOPT["adam"])


PEERS: dict[str, tuple[str, Callable[[str, bool], Call]]] = {
    # column: (library, step)
    "fastopt": ("fastopt", fastopt_step),
    "limit": ("fastopt", Loop),
    "NumPy": ("numpy", numpy_step),
    "torch SparseAdam": ("torch", torch_step),
    "MXNet": ("mxnet", mxnet_step),
}
