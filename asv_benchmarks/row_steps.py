"""The same lazy row-sparse step in several libraries: 8,192 ids of a table of 1,000,000 x 64."""

from collections.abc import Callable
from itertools import cycle

from benchmarks.common import Call
from benchmarks.tables import HEIGHT, WIDTH, Loop, RowStep, batches, gradient
from steps import LR, THREADS

COLUMNS = {
    f"{kind}, {'cold' if cold else 'cached'}": (kind, cold)
    for cold in (True, False)
    for kind in ("sorted", "permuted", "zipf")
}
"""Arguments of a step by the name of its column."""


def fastopt_step(kind: str, cold: bool) -> Call:
    return RowStep(kind, cold, learning_rate=LR)


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
                is_coalesced=kind == "sorted",  # spares torch the sorting
                check_invariants=False,
            )
            for ids in (batches(kind) if cold else batches(kind, count=1))
        ]
    )

    def step() -> None:
        weight.grad = next(grads)
        optimizer.step()

    step()
    for state in optimizer.state[weight].values():
        if isinstance(state, torch.Tensor):
            state.add_(0)  # every page is there
    return step


PEERS: dict[str, tuple[str, Callable[[str, bool], Call]]] = {
    # row: (library, step)
    "fastopt": ("fastopt", fastopt_step),
    "gather/scatter loop": ("fastopt", Loop),
    "torch, SparseAdam": ("torch", torch_step),
}
