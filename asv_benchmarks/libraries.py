"""Steps of one workload in several libraries."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from itertools import cycle
from typing import Any

import numba
import numpy as np
from benchmarks import forms, half
from benchmarks.rows import HEIGHT, LISTED, WIDTH, Loop, RowStep, batches, gradient
from benchmarks.small import loop_step, numpy_step
from benchmarks.tables import ARGUMENTS, LR, Shapes, drawn, elements, list_step

from fastopt import optimizer
from fastopt.bench.clock import Call
from fastopt.bench.steps import PLAIN, Step, Update

THREADS = numba.config.NUMBA_NUM_THREADS
MASTERS, STATE = "masters", "state"


@dataclass(frozen=True)
class Workload:
    """Weights and gradients of a step, and the optimizer."""

    shapes: Shapes | None = None
    rule: str = "adam"
    fresh: bool = False
    """Whether each step has other gradient arrays."""
    rows: str = ""
    """For row-sparse gradients, the order of the row indices: one of ``benchmarks.rows.KINDS``."""
    cold: bool = False
    """Whether the rows of a step are not in the caches."""
    height: int = HEIGHT
    listed: int = LISTED
    half: str = ""
    """MASTERS: float16 weights with float32 masters; STATE: bfloat16 state."""

    @property
    def is_large(self) -> bool:
        return not self.rows and elements(self.shapes) > 1_000_000

    def drawn(self) -> tuple[list, Callable[[], list]]:
        """Return float32 weights, and a function that returns the gradients of a step."""
        return drawn(self.shapes, self.fresh)

    def refuse(self, *parts: str) -> None:
        """Raise if the workload has parts, such as rows, that a library lacks."""
        if self.rows in parts or self.half in parts or (self.rows and "rows" in parts):
            raise NotImplementedError


def fastopt_step(work: Workload) -> Call:
    if work.rows:
        return RowStep(work.rows, work.cold, work.height, work.listed, learning_rate=LR)
    if work.half:
        size = elements(work.shapes)
        if work.half == STATE:
            return half.adam(size, learning_rate=LR, state_dtype="bfloat16")
        return half.adam(size, "float16", learning_rate=LR, **half.MASTERS)
    return list_step(work.shapes, work.fresh, work.rule)


def limit_step(work: Workload) -> Call:
    """Return a loop that moves the same memory; for many weights that of one flat weight."""
    work.refuse(MASTERS, STATE)
    if work.rows:
        return Loop(work.rows, work.cold, work.height, work.listed)
    shape = work.shapes[0] if len(work.shapes) == 1 else elements(work.shapes)
    return Step(work.rule, shape, **ARGUMENTS.get(work.rule, {})).limit


def plain_step(work: Workload) -> Call:
    """Return a step as it is usually written in NumPy."""
    work.refuse(STATE)
    if work.rows:
        return numpy_rows(work)
    weights, gradients = work.drawn()
    update = PLAIN[work.rule](optimizer.create(work.rule, **ARGUMENTS[work.rule]))
    if work.half:
        sets = weights, gradients()
        weights, grads = ([a.astype(np.float16) for a in arrays] for arrays in sets)
        update, gradients = with_masters(update), lambda: grads

    def step() -> None:
        for index, (grad, weight) in enumerate(zip(gradients(), weights, strict=True)):
            update(index, grad, weight)

    return step


def with_masters(update: Update) -> Update:
    """Apply an update to float32 masters of half-precision weights, with casts around it."""
    masters: dict[int, np.ndarray] = {}

    def cast(index: int, grad: np.ndarray, weight: np.ndarray) -> None:
        if index not in masters:
            masters[index] = weight.astype(np.float32)
        update(index, grad.astype(np.float32), masters[index])
        weight[...] = masters[index]

    return cast


def numpy_rows(work: Workload) -> Call:
    """Return a step that sums repeated rows, gathers, updates and scatters."""
    update, weight = forms.Adam().rows, np.zeros((work.height, WIDTH), np.float32)
    values, turns = gradient(work.listed), cycle(indices(work))

    def step() -> None:
        rows = next(turns)
        update(0, (values, rows) if work.rows == "sorted" else summed(rows, values), weight)

    return step


def indices(work: Workload) -> list[np.ndarray]:
    counts = {} if work.cold else {"count": 1}
    return batches(work.rows, work.height, listed=work.listed, **counts)


def summed(ids: np.ndarray, values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the summed values of each row, and the unique row indices in order."""
    order = np.argsort(ids, kind="stable")
    rows, starts = np.unique(ids[order], return_index=True)
    return np.add.reduceat(values[order], starts), rows


def small_step(make: Callable[[str, Shapes, bool], Call], work: Workload) -> Call:
    return make(work.rule, work.shapes, work.fresh)


def torch_step(make: Callable[[list, str], Any], work: Workload) -> Call:
    """Return a step of `make(parameters, rule)`; masters have casts before and after it."""
    import torch

    work.refuse("rows", STATE)
    torch.set_num_threads(THREADS)
    arrays, gradients = work.drawn()
    weights = [torch.nn.Parameter(torch.from_numpy(array)) for array in arrays]
    sets = cycle([[torch.from_numpy(grad) for grad in gradients()] for _ in range(3)])
    for weight, grad in zip(weights, next(sets), strict=True):
        weight.grad = grad
    update = make(weights, work.rule).step
    narrow = [(weight.detach().half(), weight.grad.half()) for weight in weights if work.half]

    def step() -> None:
        for weight, grad in zip(weights, next(sets), strict=True):
            weight.grad = grad
        update()

    @torch.no_grad()
    def casting() -> None:
        for master, (_, grad) in zip(weights, narrow, strict=True):
            master.grad.copy_(grad)
        update()
        for master, (weight, _) in zip(weights, narrow, strict=True):
            weight.copy_(master)

    return casting if work.half else step if work.fresh else update


def torch_rule(weights: list, rule: str, **options: bool) -> Any:
    import torch

    name = {"adam": "Adam", "sgd": "SGD"}[rule]
    return getattr(torch.optim, name)(weights, **in_torch(rule), **options)


AS_OURS = {"start_preconditioning_step": 1, "preconditioning_compute_steps": 10}
MATRICES: dict[str, dict[str, tuple[str, dict[str, Any]]]] = {
    "torch.optim": {"adafactor": ("Adafactor", {}), "muon": ("Muon", {})},
    "pytorch_optimizer": {
        "sm3": ("SM3", {"momentum": 0.9}),
        "soap": ("SOAP", {}),
        "shampoo": ("ScalableShampoo", AS_OURS),
    },
}
"""Optimizers for matrices by module and rule, with arguments that are fastopt's defaults."""


def matrix_rule(module: str, weights: list, rule: str) -> Any:
    if rule not in MATRICES[module]:
        raise NotImplementedError(f"{module} has no {rule} that is compared")
    name, options = MATRICES[module][rule]
    return getattr(import_module(module), name)(weights, lr=LR, **options)


def in_torch(rule: str) -> dict[str, float]:
    arguments = dict(ARGUMENTS[rule])
    return {"lr": arguments.pop("learning_rate"), **arguments}


def ours_in_torch(work: Workload) -> Call:
    import fastopt.torch

    if work.rows:
        return torch_rows(work, fastopt.torch)
    return torch_step(lambda weights, _: fastopt.torch.Adam(weights, lr=LR), work)


def deepspeed_rule(weights: list, rule: str) -> Any:
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    if rule != "adam":
        raise NotImplementedError("its CPUAdam is for Adam")
    return DeepSpeedCPUAdam(weights, lr=LR, adamw_mode=False)


def torch_rows(work: Workload, library: Any = None) -> Call:
    import torch

    if not work.rows:
        raise NotImplementedError
    torch.set_num_threads(THREADS)
    weight = torch.nn.Parameter(torch.randn(work.height, WIDTH))
    optimizer = (library or torch.optim).SparseAdam([weight], lr=LR)
    values = torch.from_numpy(gradient(work.listed))

    def grad(ids: np.ndarray) -> torch.Tensor:
        ordered = work.rows == "sorted"  # lets torch skip sorting
        options = {"is_coalesced": ordered, "check_invariants": False}
        return torch.sparse_coo_tensor(torch.from_numpy(ids)[None], values, weight.shape, **options)

    grads = cycle([grad(ids) for ids in indices(work)])

    def step() -> None:
        weight.grad = next(grads)
        optimizer.step()

    step()
    for state in optimizer.state[weight].values():
        if isinstance(state, torch.Tensor):
            state.add_(0)  # touches every page
    return step


def optax_step(work: Workload) -> Call:
    """Return a jitted step with donated weights and state; optax can compress only the mean."""
    import jax
    import jax.numpy as jnp
    import optax

    work.refuse("rows")
    weights, gradients = work.drawn()
    dtype = jnp.float16 if work.half == MASTERS else jnp.float32
    weights = [jnp.asarray(weight, dtype) for weight in weights]
    sets = cycle([[jnp.asarray(grad, dtype) for grad in gradients()] for _ in range(3)])
    compressed = {"mu_dtype": jnp.bfloat16} if work.half == STATE else {}
    arguments = in_torch(work.rule)
    rule = getattr(optax, work.rule)(arguments.pop("lr"), **arguments, **compressed)
    masters = [weight.astype(jnp.float32) for weight in weights] if work.half == MASTERS else None
    state = rule.init(masters or weights)

    @partial(jax.jit, donate_argnums=(0, 1, 2))
    def update(weights, masters, state, grads):
        target = masters or weights
        grads = [grad.astype(each.dtype) for grad, each in zip(grads, target, strict=True)]
        updates, state = rule.update(grads, state, target)
        target = optax.apply_updates(target, updates)
        return [each.astype(dtype) for each in target], masters and target, state

    def step() -> None:
        nonlocal weights, masters, state
        weights, masters, state = jax.block_until_ready(update(weights, masters, state, next(sets)))

    return step


LIBRARIES: dict[str, tuple[str, Callable[[Workload], Call]]] = {
    # column: (library, step)
    "fastopt": ("fastopt", fastopt_step),
    "fastopt.torch": ("torch", ours_in_torch),
    "limit": ("fastopt", limit_step),
    "NumPy": ("numpy", plain_step),
    "NumPy in place": ("numpy", partial(small_step, numpy_step)),
    "written loop": ("numba", partial(small_step, loop_step)),
    "torch fused": ("torch", partial(torch_step, partial(torch_rule, fused=True))),
    "torch foreach": ("torch", partial(torch_step, partial(torch_rule, foreach=True))),
    "optax": ("optax", optax_step),
    "DeepSpeed": ("deepspeed", partial(torch_step, deepspeed_rule)),
    "torch SparseAdam": ("torch", torch_rows),
}
for name in MATRICES:
    LIBRARIES[name] = name.partition(".")[0], partial(torch_step, partial(matrix_rule, name))
LAYERS = "1 thread", "TBB", "OpenMP", "spinning", "passive"
LIBRARIES |= dict.fromkeys(LAYERS, LIBRARIES["fastopt"])
"""Library and step by column of a table."""
