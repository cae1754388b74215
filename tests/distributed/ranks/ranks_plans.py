"""Checks that ranks update like one process that is given the sums of their gradients."""

import numpy as np
from ranks_common import LAST, comm, compare, copied, gradients

from fastopt.distributed import ShardedUpdater
from helpers.cases import CHOICES, FIRST
from helpers.plans import DENSE, LAYOUTS, nested
from helpers.settings import TABLE

ORDERS = ["plain", "Fortran order", "strided"]


def run(setting, seed):
    rng, options = np.random.default_rng(seed), setting.settings
    overlap = "accumulate" not in options()
    sharded = ShardedUpdater(setting.make(), comm, bucket_bytes=256, overlap=overlap, **options())
    alone, ours, theirs = setting.updater(), setting.weights(), setting.weights()
    if setting.is_elementwise:
        ours = {name: LAYOUTS[rng.choice(ORDERS)](weight) for name, weight in ours.items()}
    names, again = [], False
    for step in range(8):
        again = overlap and not again and step > 1  # a call of the parameters of the last one
        if not again:
            names = rng.permutation([*ours]).tolist()
            names = names if setting.takes_once() or not step else names[: rng.integers(1, 4)]
            way = rng.choice(["list", "tuple", "nested"])
            names = [name for name in ours if name in names] if way == "nested" else names
        every = [
            gradients(setting, n, ours[n].shape, ours[n].dtype, [seed, step, k])
            for k, n in enumerate(names)
        ]
        own, sums = map(list, zip(*every, strict=True))
        if step == 4 and "loss_scaler" in options() and not setting.rows:
            sums[-1] = sums[-1] * np.inf
            own[-1] = own[-1] * (np.inf if LAST else 1)
        form = DENSE[rng.choice([*DENSE]) if setting.is_elementwise else "plain"]
        own = [form(grad) if isinstance(grad, np.ndarray) else grad for grad in own]
        if step == 3:  # other arrays come under the same indices
            ours |= {name: copied(ours[name]) for name in names}
        weights = [ours[name] for name in names]
        early = np.random.default_rng([seed, step, comm.rank]).permutation(len(names))
        for k in early[: step - 2] if again else ():  # some or all, in another order on each rank
            sharded.begin(names[k], own[k])
        if way == "nested":
            absent = dict.fromkeys(ours)
            sharded.step(nested(absent | dict(zip(names, own, strict=True))), nested(ours))
        else:
            kind = {"list": list, "tuple": tuple}[way]
            sharded(kind(names), kind(own), kind(weights))
        alone(names, sums, [theirs[name] for name in names])
        compare(setting, sharded, alone, ours, theirs)
        ours_of, theirs_of = sharded.info, alone.info
        assert (ours_of.skipped, ours_of.non_finite) == (theirs_of.skipped, theirs_of.non_finite)
        np.testing.assert_allclose(ours_of.global_norm or 0, theirs_of.global_norm or 0, rtol=1e-6)
    if setting.rows and sharded.optimizer.sparse_decay == "catch_up":
        sharded.flush()
        alone.flush("embed.weight", theirs["embed.weight"])
        compare(setting, sharded, alone, ours, theirs)
    if sharded.average is not None:
        with sharded.averaged(), alone.averaged():
            compare(setting, sharded, alone, ours, theirs)
        compare(setting, sharded, alone, ours, theirs)


def check_settings(choice=None):
    """All settings, or with a choice all optimizers of it; ranks refuse matrices in groups."""
    cases = [None] if choice is None else [*CHOICES[choice], FIRST["stablespam"]]
    for name, setting in TABLE.items():
        if setting.case in cases and name != "matrices in groups":
            run(setting, seed=comm.size)
