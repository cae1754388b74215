"""Checks of ranks that are about to do different things: one error on all, and nothing changes."""

import os
import tempfile
from pathlib import Path

import numpy as np
from ranks_common import LAST, comm, told

from fastopt import Parameter, RowSparse, Trainer, optimizer
from fastopt.amp import LossScaler
from fastopt.distributed import ShardedTable, ShardedUpdater
from fastopt.lr_scheduler import LRScheduler, MultiFactorScheduler
from helpers.tensor_lists import everything

ONES = np.ones(8, np.float32)


def refused(made, weight, *words):
    """Check that a call raises on all ranks and changes nothing."""
    before = everything(made.shard, [weight])
    with told(*words):
        made(0, ONES, weight)
    assert everything(made.shard, [weight]) == before


class Table(LRScheduler):
    """A schedule of the user."""

    def __init__(self, rate):
        super().__init__(base_lr=1.0)
        self.table = [rate]

    def __call__(self, number):
        return self.table[0]


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


RATE = 0.5 if LAST else 0.25
STEPS = [1, 2] if LAST else [100, 200]
DIFFERENT = [
    (lambda: sgd(MultiFactorScheduler(STEPS, base_lr=1.0)), "lr_scheduler", "step: [1, 2]"),
    (lambda: sgd(Table(RATE)), "lr_scheduler", "[0.5]"),
    # Only what kernels read tells these apart.
    (lambda: sgd(lambda n: RATE), "for lr of index 0", "0.5"),
    (lambda: sgd(lr=np.float32(RATE)), "for lr", "0.5"),
    (lambda: Plain(lr_scheduler=lambda n: RATE), "learning rate of index 0", "0.5"),
    *(
        (lambda pair=pair: sgd(layers=pair[LAST]), "for layers")
        for pair in (
            *(([3], [1, 2]), ({"a": (1, 3)}, {"a": (1, 2)}), ({2}, {1})),
            *((np.arange(3.0), np.arange(3.0) + 1), (np.ones((0, 2)), np.ones((1, 2)))),
            (np.array(["a", 0], object), np.array(["a", 1], object)),
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


def with_option(**option):
    return ShardedUpdater(optimizer.SGD(), comm, **here(option, {}))


VALUES = np.arange(8, dtype=np.float32).reshape(4, 2)
ROWS = np.random.default_rng(0).normal(size=(16, 64)).astype(np.float32)
CALLS = [
    (lambda: with_option(wire="float16"), "for wire", "float16"),
    (lambda: with_option(overlap=True), "for overlap", "True"),
    (lambda: with_option(bucket_bytes=4096), "for bucket_bytes", "4096"),
    (lambda: with_option(check_every=7), "for check_every", "7"),
    (lambda: with_option(hierarchical=False), "for hierarchical", "False"),
    (lambda: step(with_option(clip_global_norm=1.0), ONES.copy()), "for clip_global_norm"),
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


def new(made=None):
    return ShardedUpdater(made or sgd(), comm)


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
    grad = np.ones(8, np.float16)
    for later in (False, True):
        for other in (2.0, None):
            made = ShardedUpdater(optimizer.SGD(multi_precision=True), comm)
            weight = np.ones(8, np.float16)
            if later:
                made(0, grad, weight)
            if not LAST or other:
                made.set_master(0, np.full(8, other if LAST else 1.0, np.float32))
            before = weight.tobytes()
            for _ in range(2):
                with told("checksum of the master of index 0"):
                    made(0, grad, weight)
            with told("checksum of the master of index 0"):
                made.save("nowhere")
            assert weight.tobytes() == before
            made.set_master(0, np.ones(8, np.float32))
            made(0, grad, weight)


def check_multipliers_of_parameters_and_rates_of_tables():
    parameter = Parameter("w", shape=(8,), init="zeros")
    parameter.initialize()
    trainer = Trainer([parameter], "sgd", {"learning_rate": 1.0}, comm=comm)
    table = ShardedTable((8, 1), sgd(lambda n: RATE), comm)
    parameter.lr_mult = here(0.5, 1.0)
    parameter.add_grad(ONES)
    with told("for lr of index 0 (w)", "0.5"):
        trainer.step(1)
    with told("for lr of index 0", "0.5"):
        table.push(RowSparse(np.ones((1, 1), np.float32), np.array([3]), (8, 1)))
    assert not parameter.data().any()
    assert not table.weight.any()


def check_weights_that_differ_after_a_load():
    with tempfile.TemporaryDirectory() as folder:
        path = Path(comm.bcast(folder), "state")
        made, weight = ShardedUpdater(optimizer.SGD(momentum=0.5), comm), np.ones(8, np.float32)
        made(0, ONES, weight)
        made.save(path)
        other = ShardedUpdater(optimizer.SGD(momentum=0.5), comm, check_every=0)
        other.load(path)
        refused(other, np.full(8, 100.0 * LAST, np.float32), "checksum of values 0 to 8 of index 0")
        other(0, ONES, weight)
        comm.Barrier()


def check_weights_that_change_between_steps():
    """In the next step where all weights or few change; else in `check_every` steps."""
    for size, changed in ((8, 3), (101, 100), (9999, 0), (30_000, slice(None))):
        made, weight = ShardedUpdater(optimizer.SGD(), comm), np.ones(size, np.float32)
        grad = np.ones(size, np.float32)
        for _ in range(3):
            made(0, grad, weight)
        weight[changed] += LAST
        with told("checksum of values"):
            made(0, grad, weight)
    for place in range(0, 50_000, 9_000):
        made = ShardedUpdater(optimizer.SGD(), comm, check_every=4)
        weight = np.ones(50_000, np.float32)
        grad = weight.copy()
        made(0, grad, weight)

        def four_steps(made=made, weight=weight, place=place, grad=grad):
            for _ in range(4):
                weight[place] = 3.0 if LAST else 1.0  # written again after each step
                made(0, grad, weight)

        with told("checksum of values"):
            four_steps()


def check_indices_of_weights_that_are_saved_or_loaded():
    """Nothing is written, and nothing changes."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(comm.bcast(folder), "state")
        made, weights = ShardedUpdater(optimizer.SGD(momentum=0.5), comm), [ONES.copy(), 2 * ONES]
        made([0, 1], [ONES, ONES], weights)
        made.save(path, dict(enumerate(weights)))
        before = path.read_bytes()
        for chosen in (None, {0: weights[0]}, {}):
            with told("for weights", "has 0, 1"):
                made.save(path, dict(enumerate(weights)) if LAST else chosen)
            comm.Barrier()
            assert path.read_bytes() == before
            state = everything(made.shard, weights)
            with told("for weights", "has 0, 1"):
                made.load(path, weights=dict(enumerate(weights)) if LAST else chosen)
            assert everything(made.shard, weights) == state
        with np.testing.assert_raises_regex((TypeError, RuntimeError), f"rank {comm.size - 1}: "):
            made.load(path, weights={2.5: weights[0]} if LAST else {0: weights[0]})
        loaded = [0 * ONES, 0 * ONES]
        made.load(path, weights=dict([*enumerate(loaded)][:: -1 if LAST else 1]))
        assert [a.tobytes() for a in loaded] == [a.tobytes() for a in weights]
        comm.Barrier()


def check_updaters_that_are_called_in_another_order():
    first, second = (ShardedUpdater(optimizer.SGD(learning_rate=1.0), comm) for _ in range(2))
    one, two = np.zeros(8, np.float32), np.zeros(8, np.float32)
    for made, weight in ((first, one), (second, two)):
        made(0, ONES, weight)
    before = everything(first.shard, [one]), everything(second.shard, [two])
    made, weight = (second, two) if LAST else (first, one)
    with told("for call", f"call 2 of updater {made._number} (update)"):
        made(0, ONES, weight)
    assert (everything(first.shard, [one]), everything(second.shard, [two])) == before


def check_a_path_that_is_another_directory_on_each_rank():
    """Nothing is left of the new checkpoint, and the old one is whole."""
    with tempfile.TemporaryDirectory() as folder:
        common = comm.bcast(folder)
        mine = Path(common, f"rank{comm.rank}")
        mine.mkdir()
        path = Path(common, "state")
        made, weight = ShardedUpdater(optimizer.Adam(), comm), np.ones(8, np.float32)
        made(0, ONES, weight)
        made.save(path)
        before = sorted(p.name for p in Path(common).iterdir())
        comm.Barrier()
        here = Path.cwd()
        os.chdir(mine if LAST else common)
        try:
            with np.testing.assert_raises_regex(OSError, f"the shards of rank {comm.size - 1} in"):
                made.save("state")
        finally:
            os.chdir(here)
        comm.Barrier()
        assert sorted(p.name for p in Path(common).iterdir()) == before
        assert [*mine.iterdir()] == []
        ShardedUpdater(optimizer.Adam(), comm).load(path)
        comm.Barrier()


def check_a_function_that_fails_on_one_rank_before_the_launch():
    """All ranks raise its error, whatever came before, and can go on."""

    def rate(number):
        if LAST and number == 2:
            raise LookupError("no rate")
        return 1.0

    for options in ({}, {"clip_global_norm": 1e9}, {"loss_scaler": LossScaler(1.0)}):
        made = ShardedUpdater(optimizer.SGD(lr_scheduler=rate), comm, **options)
        weight = np.zeros(8, np.float32)
        made(0, ONES, weight)
        before = everything(made.shard, [weight])
        with np.testing.assert_raises_regex(RuntimeError, f"rank {comm.size - 1}: no rate"):
            made(0, ONES, weight)
        assert everything(made.shard, [weight]) == before


def check_a_schedule_is_called_once_in_a_step():
    asked = []
    made = ShardedUpdater(optimizer.SGD(lr_scheduler=lambda n: asked.append(n) or 1.0), comm)
    weight = np.zeros(8, np.float32)
    for _ in range(3):
        made(0, ONES, weight)
        comm.Barrier()
    assert asked[-2:] == [2, 3]
