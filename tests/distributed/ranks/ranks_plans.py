"""Checks that ranks update like one process that is given the sums of their gradients."""

import numpy as np
from ranks_common import comm, copied, summed

from fastopt import RowSparse
from fastopt.distributed import ShardedUpdater
from helpers.cases import CHOICES, FIRST, OF_STEPS
from helpers.plans import LAYOUTS, nested
from helpers.settings import TABLE
from helpers.tensor_lists import frozen

OF_NORMS = ("lars", "lamb", "lans", "lbsgd", "novograd", "stablespam", *OF_STEPS)
"""Optimizers whose sums over tensors have another order on several ranks."""
ORDERS = ["plain", "Fortran order", "strided"]


def gradients(setting, name, shape, dtype, seed):
    """Gradients of all ranks, whose sums are exact, and their sum."""
    rng = np.random.default_rng(seed)
    if setting.rows and name == "embed.weight":
        parts = []
        for rank in range(comm.size):
            rows = rng.integers(0, shape[0], 0 if rank == 1 else 3)
            parts.append(((rng.integers(-32, 33, (len(rows), *shape[1:])) / 8).astype(dtype), rows))
        values, rows = map(np.concatenate, zip(*parts, strict=True))
        return parts, RowSparse(values, rows, shape)
    parts = [(rng.integers(-32, 33, shape) / 8).astype(dtype) for _ in range(comm.size)]
    return parts, summed(parts)


def run(setting, seed):
    rng, options = np.random.default_rng(seed), setting.settings
    sharded = ShardedUpdater(setting.make(), comm, bucket_bytes=256, **options())
    alone, ours, theirs = setting.updater(), setting.weights(), setting.weights()
    if setting.is_elementwise:
        ours = {name: LAYOUTS[rng.choice(ORDERS)](weight) for name, weight in ours.items()}
    for step in range(5):
        names = rng.permutation([*ours]).tolist()
        names = names if setting.takes_once() or not step else names[: rng.integers(1, 4)]
        way = rng.choice(["list", "tuple", "nested"])
        names = [name for name in ours if name in names] if way == "nested" else names
        every = [
            gradients(setting, n, ours[n].shape, ours[n].dtype, [seed, step, k])
            for k, n in enumerate(names)
        ]
        own, sums = [parts[comm.rank] for parts, _ in every], [total for _, total in every]
        form = LAYOUTS[rng.choice(ORDERS) if setting.is_elementwise else "plain"]
        own = [form(grad) if isinstance(grad, np.ndarray) else grad for grad in own]
        if step == 3:  # other arrays come under the same indices
            ours |= {name: copied(ours[name]) for name in names}
        weights = [ours[name] for name in names]
        if way == "nested":
            absent = dict.fromkeys(ours)
            sharded.step(nested(absent | dict(zip(names, own, strict=True))), nested(ours))
        else:
            kind = {"list": list, "tuple": tuple}[way]
            sharded(kind(names), kind(own), kind(weights))
        alone(names, sums, [theirs[name] for name in names])
        check(setting, sharded, alone, ours, theirs)
    if setting.rows and sharded.optimizer.sparse_decay == "catch_up":
        sharded.flush("embed.weight")
        alone.flush("embed.weight", theirs["embed.weight"])
        check(setting, sharded, alone, ours, theirs)
    if sharded.average is not None:
        with sharded.averaged(), alone.averaged():
            check(setting, sharded, alone, ours, theirs)
        check(setting, sharded, alone, ours, theirs)


def check(setting, sharded, alone, ours, theirs):
    rounds = setting.settings().get("accumulate") == 3  # each rank sends a third of its sum
    rounds |= setting.is_whole or (setting.case is not None and setting.case.name in OF_NORMS)
    if comm.size > 1 and rounds:
        for name, weight in ours.items():
            np.testing.assert_allclose(weight, theirs[name], rtol=2e-3, atol=1e-5)
    else:
        assert frozen(ours) == frozen(theirs), setting
    one, other = sharded.optimizer, alone.optimizer
    assert dict(one._index_update_count) == dict(other._index_update_count)
    assert one.num_update == other.num_update


def check_settings(choice=None):
    """All settings, or with a choice all optimizers of it; ranks refuse matrices in groups."""
    cases = [None] if choice is None else [*CHOICES[choice], FIRST["stablespam"]]
    for name, setting in TABLE.items():
        if setting.case in cases and name != "matrices in groups":
            run(setting, seed=comm.size)
