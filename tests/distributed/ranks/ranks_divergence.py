"""Checks of ranks that are about to do different things: one error on all, and nothing changes."""

import os
import tempfile
from functools import partial
from pathlib import Path

import numpy as np
from ranks_common import LAST, comm, told

import fastopt
from fastopt import optimizer
from fastopt.amp import LossScaler
from fastopt.distributed import ShardedTable, ShardedUpdater
from fastopt.lr_scheduler import MultiFactorScheduler
from helpers.tensor_lists import everything, frozen

ONES = np.ones(8, np.float32)


def refused(made, weight, *words):
    """Check that a call raises on all ranks and changes nothing."""
    before = everything(made.shard, [weight])
    with told(*words):
        made(0, ONES, weight)
    assert everything(made.shard, [weight]) == before


class Plain(optimizer.Optimizer):
    """An update() in Python."""

    def update(self, index, weight, grad, state):
        self._update_count(index)
        weight -= self._get_lr(index) * grad


def sgd(schedule=None, **attributes):
    made = optimizer.SGD(learning_rate=1.0 if schedule is None else schedule)
    for name, value in attributes.items():
        setattr(made, name, value)
    return made


def ruled(factor):
    @fastopt.rule(hyper=("lr",))
    def step(weight, grad, state, h):
        return weight - factor * h.lr * grad, ()

    return {"rule": step, "hyper": lambda self, t, lr, wd: {"lr": lr}}


def slower(self, index, weight, grad, state):
    self._update_count(index)
    weight -= 0.5 * self._get_lr(index) * grad


def mine(body, base=optimizer.Optimizer):
    return type("Mine", (base,), body)(lr=0.1)


RATE = 0.5 if LAST else 0.25
STEPS = [1, 2] if LAST else [100, 200]
DIFFERENT = [
    (lambda: sgd(MultiFactorScheduler(STEPS, base_lr=1.0)), "lr_scheduler", "step: [1, 2]"),
    # Only what kernels read tells these apart.
    (lambda: sgd(lambda n: RATE), "for lr of index 0", "0.5"),
    (lambda: sgd(lr=np.float32(RATE)), "for lr", "0.5"),
    (lambda: Plain(lr_scheduler=lambda n: RATE), "learning rate of index 0", "0.5"),
    (lambda: mine({"update": slower if LAST else Plain.update}), "code of Mine.update"),
    (lambda: mine({"more": slower} if LAST else {}, Plain), "code of Mine.more"),
    (lambda: mine(ruled(2.0 if LAST else 1.0)), "code of Mine.rule"),
    *(
        (lambda pair=pair: sgd(layers=pair[LAST]), "for layers")
        for pair in (
            *(([3], [1, 2]), ({"a": (1, 3)}, {"a": (1, 2)}), ({2}, {1})),
            *((np.zeros(3), np.ones(3)), (np.array(["a", 0], object), np.array(["a", 1], object))),
        )
    ),
]
"""Optimizers that differ on the last rank, and words of the error."""


def check_optimizers_that_differ():
    """Whether or not sums of norms come before the launch."""
    for make, *words in DIFFERENT:
        for options in ({}, {"clip_global_norm": 1.0}, {"loss_scaler": LossScaler(8.0)}):
            refused(ShardedUpdater(make(), comm, **options), np.zeros(8, np.float32), *words)


class Own(LossScaler):
    """With attributes of the user, of which objects have an address."""

    def __init__(self):
        super().__init__(8.0)
        self.owner, self.history = object(), [1]


def check_what_differs_later():
    """It is read again when it may have changed; addresses of objects are not compared."""
    rates = []
    for change, *words in (
        (lambda own, scaler: own.layers.append(2), "for layers", "[1, 2]"),
        (lambda own, scaler: own.lr_mult.update(p3=0.5), "for lr_mult"),
        (lambda own, scaler: setattr(own, "wd", 0.5), "for wd"),
        (lambda own, scaler: setattr(own, "more", 1), "for more"),
        (lambda own, scaler: own._index_update_count.update({0: 5}), "update_count", "has 5"),
        (lambda own, scaler: own.idx2name.update({0: "w"}), "of index 0"),
        (lambda own, scaler: rates.append(0.5), "for lr of index 0", "0.5"),
        (lambda own, scaler: scaler.history.append(2), "loss scaler's history", "[1, 2]"),
        (lambda own, scaler: setattr(scaler, "growth_interval", 1), "growth_interval"),
    ):
        rates[:] = [0.25]
        made = ShardedUpdater(sgd(lambda n: rates[-1], layers=[1]), comm, Own())
        weight = np.zeros(8, np.float32)
        made(0, ONES, weight)
        if LAST:
            change(made.optimizer, made.loss_scaler)
        refused(made, weight, *words)


def step(updater, weight, index=0):
    updater(index, np.ones_like(weight), weight)


def here(last, others):
    """What only the last rank has, and what the others have."""
    return last if LAST else others


VALUES = np.arange(8, dtype=np.float32).reshape(4, 2)
ROWS = np.random.default_rng(0).normal(size=(16, 64)).astype(np.float32)
CALLS = [
    *((lambda name=name, value=value: new(**here({name: value}, {})), f"for {name}", str(value))
      for name, value in (("wire", "float16"), ("overlap", True), ("bucket_bytes", 4096),
                          ("check_every", 7), ("hierarchical", False))),
    (lambda: step(new(**here({"clip_global_norm": 1.0}, {})), ONES.copy()), "clip_global_norm"),
    (lambda: step(new(accumulate=here(3, 2)), ONES.copy()), "for accumulate"),
    *((lambda group=group: step(new(groups={"0": group}), ONES.copy()), "groups", word)
      for group, word in (({"momentum": here(0.5, 0.25)}, "0.5"), ({"frozen": LAST}, "frozen"),
                          ({"optimizer": sgd(momentum=here(0.5, 0.25))}, "momentum"))),
    (lambda: here(ShardedTable, lambda _, *more: ShardedUpdater(*more))((4, 1), sgd(), comm),
     "for call", "(ShardedTable)", "(ShardedUpdater)"),
    (lambda: ShardedTable((here(4, 5), 1), sgd(), comm), "for shape"),
    (lambda: step(new(), np.ones(here((2, 3), (3, 2)), "f")),
     "index 0 of shape (3, 2) and float32", "index 0 of shape (2, 3)"),
    (lambda: step(new(), np.ones(3, here("f8", "f4"))), "float64"),
    (lambda: step(new(), ONES.copy(), here(1, 0)), "index 1"),
    (lambda: new()(*(each[: here(2, 1)] for each in ([0, 1], [ONES] * 2, [*np.ones((2, 8), "f")]))),
     "for tensors", "has 2"),
    (lambda: step(new(here(optimizer.NAG(), sgd())), ONES.copy()), "for optimizer", "NAG"),
    (lambda: step(new(), here(ROWS, ROWS[[0, *range(15, 0, -1)]]).copy()), "checksum of values"),
    (lambda: step(new(), np.ones(8) - 2 * (np.arange(8) > here(7, 5))), "checksum of values"),
    *((lambda other=other: ShardedTable((4, 2), sgd(), comm, values=here(other, VALUES)),
       "for values of index 0") for other in (VALUES[::-1], None, lambda rows: VALUES[rows])),
]  # fmt: skip
"""Calls that differ on the last rank, and words of the error."""


def new(made=None, **options):
    return ShardedUpdater(made or sgd(), comm, **options)


def check_calls_that_differ():
    """They fail on all ranks, and the next one works."""
    for call, *words in CALLS:
        with told(*words):
            call()
    made, weight = new(), np.zeros(8, np.float32)
    with told("for call", "creation of updater", "(update)"):
        here(lambda: step(made, weight), new)()
    with told("for call", "update", "save"):
        here(lambda: made.save("nowhere"), lambda: step(made, weight))()
    made = ShardedTable((4, 2), sgd(), comm, values=VALUES.astype(here("f8", "f4")))
    assert (made.pull(range(4)) == VALUES).all()


def check_masters():
    """Whether one rank sets none or another one, before the first update or later."""
    for steps in (0, 1):
        for other in (2.0, None):
            made = ShardedUpdater(optimizer.SGD(multi_precision=True), comm)
            weight = np.ones(8, np.float16)
            for _ in range(steps):
                step(made, weight)
            if not LAST or other:
                made.set_master(0, np.full(8, other if LAST else 1.0, np.float32))
            before = weight.tobytes()
            for call in (partial(step, made, weight), partial(made.save, "nowhere")):
                with told("checksum of the master of index 0"):
                    call()
            assert weight.tobytes() == before
            made.set_master(0, np.ones(8, np.float32))
            step(made, weight)


def check_weights_that_change_between_steps():
    """In the next step where all weights or few change; else in `check_every` steps."""
    cases = (8, 3, 1), (101, 100, 1), (30_000, slice(None), 1)
    for size, changed, calls in (*cases, *((50_000, at, 4) for at in range(0, 50_000, 9_000))):
        made, weight = ShardedUpdater(optimizer.SGD(), comm, check_every=4), np.ones(size, "f")
        for _ in range(3):
            step(made, weight)
        with told("checksum of values"):
            for _ in range(calls):
                weight[changed] = 3.0 if LAST else 1.0  # written again after each step
                step(made, weight)


def check_indices_of_weights_that_are_saved_or_loaded():
    """Nothing is written, and nothing changes."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(comm.bcast(folder), "state")
        made, weights = ShardedUpdater(optimizer.SGD(momentum=0.5), comm), [ONES.copy(), 2 * ONES]
        made([0, 1], [ONES, ONES], weights)
        whole = dict(enumerate(weights))
        made.save(path, whole)
        before = path.read_bytes(), everything(made.shard, weights)
        for chosen in (None, {0: weights[0]}, {}):
            with told("for weights", "has 0, 1"):
                made.save(path, whole if LAST else chosen)
            with told("for weights", "has 0, 1"):
                made.load(path, weights=whole if LAST else chosen)
            comm.Barrier()
            assert (path.read_bytes(), everything(made.shard, weights)) == before
        with np.testing.assert_raises_regex((TypeError, RuntimeError), f"rank {comm.size - 1}: "):
            made.load(path, weights={2.5: weights[0]} if LAST else {0: weights[0]})
        loaded = [0 * ONES, 0 * ONES]
        made.load(path, weights=dict([*enumerate(loaded)][:: -1 if LAST else 1]))
        assert frozen(loaded) == frozen(weights)
        other = ShardedUpdater(optimizer.SGD(momentum=0.5), comm, check_every=0)
        other.load(path)  # after which all weights are compared
        refused(other, np.full(8, 100.0 * LAST, np.float32), "checksum of values 0 to 8 of index 0")
        comm.Barrier()


def check_updaters_that_are_called_in_another_order():
    pairs = [(new(), np.zeros(8, np.float32)) for _ in "ab"]
    for made, weight in pairs:
        step(made, weight)
    before = [everything(made.shard, [weight]) for made, weight in pairs]
    with told("for call", f"call 2 of updater {pairs[LAST][0]._number} (update)"):
        step(*pairs[LAST])
    assert [everything(made.shard, [weight]) for made, weight in pairs] == before


def check_a_path_that_is_another_directory_on_each_rank():
    """Nothing is left of the new checkpoint, and the old one is whole."""
    with tempfile.TemporaryDirectory() as folder:
        common = Path(comm.bcast(folder))
        mine, path, home = common / f"rank{comm.rank}", common / "state", Path.cwd()
        mine.mkdir()
        made = ShardedUpdater(optimizer.Adam(), comm)
        step(made, ONES.copy())
        made.save(path)
        before = {*common.iterdir()}
        comm.Barrier()
        os.chdir(mine if LAST else common)
        try:
            with np.testing.assert_raises_regex(OSError, f"the shards of rank {comm.size - 1} in"):
                made.save("state")
        finally:
            os.chdir(home)
        comm.Barrier()
        assert ({*common.iterdir()}, {*mine.iterdir()}) == (before, set())
        ShardedUpdater(optimizer.Adam(), comm).load(path)
        comm.Barrier()
