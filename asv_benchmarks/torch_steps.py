"""Steps of optimizers for torch models: fastopt.torch against torch.optim, as a table.

Each optimizer runs in its own process, with one thread and gradients at the same addresses. The
processes take turns. The first number is fastopt's median time of a step, the others are median
ratios to it.
"""

import os
import sys
from functools import partial

from race import Make, Race

from fastopt._console import duration, table
from fastopt.bench.clock import Call

Shapes = list[tuple[int, ...]]

POLICY: Shapes = [(64, 8), (64,), (64, 64), (64,), (4, 64), (4,)]
POLICY += [(64, 8), (64,), (64, 64), (64,), (1, 64), (1,)]
"""Networks of 2 x 64 hidden units for an action and a value."""

DENSE = {
    "12 tensors of a policy network": POLICY,
    "1,000 tensors of 1,000": [(1_000,)] * 1_000,
    "one tensor of 1,000,000": [(1_000, 1_000)],
}
RIVALS = {"fused": {"fused": True}, "foreach": {"foreach": True}}
ROWS, DIM, INDEXED = 100_000, 64, 1_024


def parameters(shapes: Shapes) -> list:
    import torch

    torch.set_num_threads(1)
    found = [torch.nn.Parameter(torch.randn(shape)) for shape in shapes]
    for param in found:
        param.grad = torch.randn(param.shape)
    return found


def dense_step(shapes: Shapes, **options: bool) -> Call:
    """Return a step of Adam; torch's with options, else fastopt's."""
    import torch

    import fastopt.torch

    library = torch.optim if options else fastopt.torch
    return library.Adam(parameters(shapes), lr=1e-3, **options).step


def row_step(ours: bool) -> Call:
    """Return a step of SparseAdam on an embedding table."""
    import torch

    import fastopt.torch

    (weight,) = parameters([(ROWS, DIM)])
    with torch.sparse.check_sparse_tensor_invariants():
        rows = torch.randint(0, ROWS, (1, INDEXED))
        weight.grad = torch.sparse_coo_tensor(rows, torch.randn(INDEXED, DIM), weight.shape)
    library = fastopt.torch if ours else torch.optim
    return library.SparseAdam([weight], lr=1e-3).step


def cases() -> dict[str, dict[str, Make]]:
    found = {
        words: {
            "fastopt.torch": partial(dense_step, shapes),
            **{name: partial(dense_step, shapes, **each) for name, each in RIVALS.items()},
        }
        for words, shapes in DENSE.items()
    }
    words = f"{INDEXED:,} rows of {ROWS:,} x {DIM}"
    found[words] = {
        "fastopt.torch": partial(row_step, True),
        "SparseAdam": partial(row_step, False),
    }
    return found


def main() -> None:
    for variable in ("OMP_NUM_THREADS", "NUMBA_NUM_THREADS"):
        os.environ[variable] = "1"
    names = ["fused", "foreach", "SparseAdam"]
    lines = []
    with Race() as race:
        for words, makes in cases().items():
            times = race.run(makes, words, rounds=15)
            cells = [f"{times[name][1]:.1f}" if name in times else "" for name in names]
            lines.append([words, duration(times["fastopt.torch"][0]), *cells])
    print(table(["step", "fastopt.torch", *names], lines, "--markdown" in sys.argv))


if __name__ == "__main__":
    main()
