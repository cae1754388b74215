"""Steps of Adam with compressed state, compared with float32, on streams of hard gradients.

Prints the tables of ``docs/8-bit-state.md``: relative errors, largest and mean steps. With
bitsandbytes and torch installed, its CPU ``Adam8bit`` is compared too.
"""

import sys
from collections.abc import Iterator
from typing import Any

import numpy as np

import fastopt

STREAMS: dict[str, dict[str, Any]] = {
    "sigma 0.5": {},
    "sigma 2": {"spread": 2.0},
    "sigma 4": {"spread": 4.0},
    "sigma 2, in 1 of 20 steps": {"spread": 2.0, "density": 0.05},
    "sigma 2, in 1 of 100 steps": {"spread": 2.0, "density": 0.01},
    "spikes of 3 rows by 1e4": {"kind": "spikes"},
    "sign flips every step": {"kind": "flips"},
    "1e6 falling to 1e-8": {"kind": "falling"},
    "bursts of 1e6 times every 50 steps": {"kind": "bursts"},
}
"""Arguments of :func:`gradients`."""

SHARES = tuple(10.0**-k for k in range(1, 9))

BLOCK = 128


def gradients(
    seed: int, steps: int, size: int, spread: float = 0.5, density: float = 1.0, kind: str = ""
) -> Iterator[np.ndarray]:
    """Yield gradients whose elements have lognormal scales, with a drift of 0.3 deviations."""
    rng = np.random.default_rng(seed)
    scales, drift = 1e-3 * np.exp(rng.normal(0, spread, size)), rng.normal(0, 0.3, size)
    for step in range(steps):
        gradient = scales * (drift + rng.normal(0, 1, size)) * (rng.random(size) < density)
        if kind == "spikes":
            gradient.reshape(-1, 256)[rng.integers(0, size // 256, 3)] *= 1e4
        elif kind == "flips":
            gradient = np.abs(gradient) * (-1) ** step
        elif kind == "falling":
            gradient *= 10 ** (9 - 14 * step / steps)
        elif kind == "bursts" and step % 50 == 49:
            gradient *= 1e6
        yield gradient.astype(np.float32)


def shared(seed: int, steps: int, size: int, share: float) -> Iterator[np.ndarray]:
    """Yield gradients in which all elements but the first of a block are smaller by `share`."""
    rng = np.random.default_rng(seed)
    scales = np.full(size, 1e-3 * share)
    scales[::BLOCK] = 1e-3
    for _ in range(steps):
        yield (scales * rng.normal(size=size)).astype(np.float32)


class Ours:
    """Steps of an optimizer in units of its learning rate."""

    def __init__(self, state_dtype: Any, size: int, name: str = "adam", **kwargs: Any) -> None:
        made = fastopt.optimizer.create(
            name, learning_rate=1.0, state_dtype=state_dtype, state_min_size=1, **kwargs
        )
        self.updater, self.weight = fastopt.Updater(made), np.zeros((size // BLOCK, BLOCK), "f4")

    def step(self, gradient: np.ndarray) -> np.ndarray:
        self.weight[...] = 0
        self.updater(0, gradient.reshape(self.weight.shape), self.weight)
        return self.weight.ravel().astype(float)


class Bitsandbytes:
    """Steps of ``bitsandbytes.optim.Adam8bit`` on the CPU."""

    def __init__(self, size: int) -> None:
        import bitsandbytes
        import torch

        self.torch, self.weight = torch, torch.nn.Parameter(torch.zeros(size))
        self.adam = bitsandbytes.optim.Adam8bit([self.weight], lr=1.0, min_8bit_size=1)

    def step(self, gradient: np.ndarray) -> np.ndarray:
        self.weight.data.zero_()
        self.weight.grad = self.torch.tensor(gradient)
        self.adam.step()
        return self.weight.detach().numpy().astype(float)


class Compared:
    """Relative error, largest and mean step of an optimizer beside an exact one."""

    def __init__(self, small: bool = False) -> None:
        self.small = small
        self.squares, self.largest, self.total = np.zeros(2), np.zeros(2), np.zeros(2)

    def add(self, step: np.ndarray, exact: np.ndarray, early: bool) -> None:
        if self.small:
            step, exact = (x.reshape(-1, BLOCK)[:, 1:] for x in (step, exact))
        self.squares += np.square(step - exact).sum(), np.square(exact).sum()
        self.largest = np.maximum(self.largest, (np.abs(step).max(), np.abs(exact).max()))
        self.total += 0 if early else (np.abs(step).sum(), np.abs(exact).sum())

    @property
    def error(self) -> float:
        return float((self.squares[0] / self.squares[1]) ** 0.5)

    @property
    def mean(self) -> float:
        return float(self.total[0] / self.total[1])


def compared(
    made: dict[str, Any], exact: Any, stream: Iterator[np.ndarray], small: bool = False
) -> dict[str, Compared]:
    """Step all of `made` with the same gradients."""
    found = {name: Compared(small) for name in made}
    for number, gradient in enumerate(stream):
        reference = exact.step(gradient)
        for name, optimizer in made.items():
            found[name].add(optimizer.step(gradient), reference, number < 50)
    return found


def main(seeds: int = 16, steps: int = 200, size: int = 65_536) -> None:
    made: dict[str, Any] = {"int8": lambda n: Ours("int8", n, formula="torch")}
    try:
        Bitsandbytes(BLOCK)
        made["bitsandbytes"] = Bitsandbytes
    except ImportError:
        print("bitsandbytes is not installed", file=sys.stderr)
    for stream, arguments in STREAMS.items():
        cells: dict[str, list[Compared]] = {name: [] for name in made}
        for seed in range(seeds):
            each = {name: create(size) for name, create in made.items()}
            exact = Ours(None, size, formula="torch")
            grads = gradients(seed, steps, size, **arguments)
            for name, one in compared(each, exact, grads).items():
                cells[name].append(one)
        print(f"| {stream} |", *(row(each) for each in cells.values()), flush=True)
    for share in SHARES:
        ratios, largest = [], 0.0
        for seed in range(seeds):
            ours = {"int8": Ours("int8", 8192, formula="torch", epsilon=1e-30)}
            exact = Ours(None, 8192, formula="torch", epsilon=1e-30)
            one = compared(ours, exact, shared(seed, 2 * steps, 8192, share), small=True)["int8"]
            ratios.append(one.mean)
            largest = max(largest, one.largest[0])
        print(
            f"| {share:.0e} | {min(ratios):.2f} to {max(ratios):.2f} | {largest:.2f} |", flush=True
        )


def row(found: list[Compared]) -> str:
    """Return the largest error, largest step and that of float32 over seeds, and mean steps."""
    error, means = max(one.error for one in found), [one.mean for one in found]
    steps, exact = (max(one.largest[k] for one in found) for k in range(2))
    return f"{error:.3f}; {steps:.2f} of {exact:.2f}; {min(means):.2f} to {max(means):.2f} |"


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
