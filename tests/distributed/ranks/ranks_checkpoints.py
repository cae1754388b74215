"""Checks of checkpoints of ranks, in a folder that jobs of other sizes share."""

import errno
import itertools
import shutil
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from ranks_common import (
    LAST,
    all_refused,
    comm,
    compare,
    compare_weights,
    copied,
    exact,
    gradients,
    raised,
    rounds,
)

from fastopt import EmbeddingTable, lr_scheduler, optimizer
from fastopt.checkpoint import CheckpointError, dumps
from fastopt.checkpoint.format import files
from fastopt.distributed import (
    ShardedEmbeddingTable,
    ShardedTable,
    ShardedUpdater,
    latest_checkpoint,
    save_checkpoint,
)
from helpers.settings import TABLE
from helpers.tensor_lists import everything, frozen, normal

RANKS = 4
"""Shares that a batch has, whatever the number of ranks."""
CHOSEN = (
    *("EMA in groups", "all with SWA", "loss_scaler", "masters", "8-bit state", "deferred decay"),
    *("sums of gradients", "state of rows and of elements", "Lookahead of rows", "split masters"),
    *("muon", "nadam", "prodigy", "lamb", "novograd", "dcasgd-momentum=0.9"),
)
"""Settings of each kind of state."""


def on_ranks(setting, made=None):
    """An updater with the settings, of the optimizer or of one that a checkpoint replaces."""
    groups = {"groups": {"^x": {"wd": 3.0}}} if made and "groups" in setting.settings() else {}
    options = setting.settings() | groups
    return ShardedUpdater(made or setting.make(), comm, bucket_bytes=1024, **options)


def one_step(setting, updater, weights, number):
    """A step of an updater of ranks, or of one process, with the sums of their gradients."""
    grads = [
        gradients(setting, name, weight.shape, weight.dtype, [number, k], RANKS)
        for k, (name, weight) in enumerate(weights.items())
    ]
    is_sharded = isinstance(updater, ShardedUpdater)
    parts = [own if is_sharded else total for own, total in grads]
    updater([*weights], parts, [*weights.values()])


def check_every_setting_goes_on_anywhere(folder):
    """From files of the first job, of one process, and from states, on ranks and in one process."""
    for number, setting in enumerate(map(TABLE.get, CHOSEN)):
        shapes = {**setting.shapes, "empty": (0, 4), "wide": (9, 200)}
        goes_on(replace(setting, shapes=shapes), Path(folder, f"ranks_{number}"))


def goes_on(setting, path):
    sharded, alone = on_ranks(setting), setting.updater()
    ours, theirs, single = setting.weights(), setting.weights(), f"{path}_alone"
    for step in range(6):
        one_step(setting, sharded, ours, step)
        one_step(setting, alone, theirs, step)
    compare(setting, sharded, alone, ours, theirs)
    known = path.exists()
    in_one = comm.size == 1 and not known
    comm.Barrier()
    if not known:
        sharded.save(path, ours)
        if comm.rank == 0:
            alone.save(single)
        comm.Barrier()
    whole, given = sharded.state_dict(), sharded.get_states(dump_optimizer=True)
    if not rounds(setting):
        states = alone.state_dict()["states"]
        expected = {index: states[index] for index in whole["states"]}
        assert dumps(whole["states"]) == dumps(expected)
    ways = [
        lambda new, weights: new.load(path, weights=weights),
        lambda new, weights: new.load_state_dict(whole),
    ]
    if sharded.loss_scaler is None:
        ways.append(lambda new, weights: new.set_states(given))  # MXNet's bytes have no place
    if 6 % sharded.accumulate == 0:
        ways.append(lambda new, weights: new.load(single))  # ranks keep no open windows
    runs = [(sharded, ours)]
    for load, steps in itertools.product(ways, (0, 2 * sharded.accumulate)):
        new = on_ranks(setting, None if steps else setting.fresh().optimizer)
        weights = setting.weights()
        for _ in range(steps):
            one_step(setting, new, weights, 9)
        load(new, weights)
        if load is ways[0]:
            compare_weights(setting, weights, ours, in_one)
        runs.append((new, {name: copied(weight) for name, weight in ours.items()}))
    plain = setting.fresh()
    plain.load(path)
    runs.append((plain, {name: copied(weight) for name, weight in theirs.items()}))
    for step in range(6, 9):
        one_step(setting, alone, theirs, step)
        for updater, weights in runs:
            one_step(setting, updater, weights, step)
            compare(setting, updater, alone, weights, theirs, in_one)
    for updater, weights in runs if alone.average is not None else ():
        with updater.averaged(), alone.averaged():
            compare(setting, updater, alone, weights, theirs, in_one)


def check_tables_of_jobs_of_every_size_are_taken_up(folder):
    rng = np.random.default_rng(0)
    lists = [(normal(k, (8, 2), "float32"), rng.integers(0, 37, 8)) for k in range(8)]
    mine = slice(comm.rank * 8 // comm.size, (comm.rank + 1) * 8 // comm.size)
    forms = ("adam", {}), ("adamw", {"sparse_decay": "catch_up", "wd": 0.1})
    for owners, (name, arguments) in itertools.product(("block", "hash"), forms):
        path, other = Path(folder, f"{owners}_{name}"), {"block": "hash", "hash": "block"}[owners]
        table, whole, wrong = (
            ShardedTable((37, 2), optimizer.create(name, **arguments), comm, owners=by)
            for by in (owners, owners, other)
        )
        known = path.exists()
        comm.Barrier()
        for k, (values, rows) in enumerate(lists):
            if k == 4:
                table.load(path) if known else table.save(path)
            for each in (table, whole) if k >= 4 or not known else (whole,):
                each.push((values[mine], rows[mine]))
        assert frozen(table.pull(range(37))) == frozen(whole.pull(range(37)))
        with raised(CheckpointError, f"it was saved from ShardedTable by {owners}"):
            wrong.load(path)
        comm.Barrier()


def check_updaters_and_tables_are_one_checkpoint(folder):
    """A job of another size loads it too; a part that fails leaves all of the old one."""
    folder = Path(folder, "together")
    for found in filter(None, [latest_checkpoint(folder)]):
        compare_loaded(found)
    updater, weight, table = parts_of(1)
    model = lambda path: updater.save(path, {"w": weight})  # noqa: E731
    comm.Barrier()
    save_checkpoint(folder, {"model": model, "words": table.save}, comm)
    found = latest_checkpoint(folder)
    for shard in found["model"].parent.glob("model.*-of-*"):
        with pytest.raises(CheckpointError, match="it is a shard of model: load that"):
            optimizer.get_updater(optimizer.SGD()).load(shard)
    updater("w", np.ones(9), weight)
    words = r"disk of rank|parts must be functions|of a path, such as words.save"
    for bad in (failing, table.table.dim, updater):
        with pytest.raises((OSError, TypeError), match=words):
            save_checkpoint(folder, {"model": model, "words": bad}, comm)
        assert latest_checkpoint(folder) == found
        compare_loaded(found)
    comm.Barrier()
    names = {path.name for path in folder.iterdir()}
    assert names == {"latest.json", found["model"].parent.name}
    if comm.size > 1:
        with raised(ValueError, "ranks disagree: for parts"):
            save_checkpoint(folder, {"model" if LAST else "other": model}, comm)


def parts_of(steps):
    """An updater with its weight, and a table, after some steps."""
    updater, weight = ShardedUpdater(optimizer.Adam(), comm), np.zeros(9)
    table = ShardedEmbeddingTable(EmbeddingTable(4, "adam", init="zeros"), comm)
    for _ in range(steps):
        updater("w", np.full(9, 1 / comm.size), weight)
        table.update(np.arange(5), np.full((5, 4), 1 / comm.size, np.float32))
    return updater, weight, table


def compare_loaded(found):
    """The parts of a checkpoint are those of one step."""
    (updater, weight, _), (_, expected, other) = parts_of(0), parts_of(1)
    updater.load(found["model"], weights={"w": weight})
    table = ShardedEmbeddingTable.load(found["words"], comm)
    for pair in ((weight, expected), [each.lookup(np.arange(5)) for each in (table, other)]):
        np.testing.assert_allclose(*pair, rtol=1e-6)


def failing(path):
    """Save a part; one rank cannot."""
    if LAST:
        raise OSError(errno.ENOSPC, f"disk of rank {comm.rank} is full")
    Path(path).touch()


SHAPES = {"fc": (40, 7), "bias": (7,), "empty": (0, 3), "wide": (9, 200)}


def adam_step(updater, weights):
    updater([*weights], [w / comm.size for w in weights.values()], [*weights.values()])


def trained(folder, name):
    """An updater after a step, its weights, and a path where it and they are saved."""
    adam = optimizer.Adam(param_idx2name=dict(enumerate(SHAPES)))
    updater, path = ShardedUpdater(adam, comm), Path(folder, f"{name}_{comm.size}")
    weights = {k: exact(1, shape, np.float32) for k, shape in enumerate(SHAPES.values())}
    adam_step(updater, weights)
    updater.save(path, weights)
    return updater, weights, path


UNFIT = {
    "updater.load(f'{path}_bare', weights=weights)":
        r"CheckpointError: it has no weight of index 0 \(fc\)",
    "updater.save(path, {9: weights[0]})": "ValueError: index 9: its weight was not updated yet",
    "updater.save(path, {0: weights[1]})": "ValueError: weight must have shape",
    "updater.save(Path(folder, 'no', 'such'))": "OSError: No such file",
    "bad.save(path)": "TypeError: state of index 0 must be None, a number",
    "updater.load(path.with_name('nothing'))": "OSError: No such file",
    "updater.load(shard)": "CheckpointError: not the checkpoint of an updater",
    "alone.load_states_dict({'ranks': 2})": "CheckpointError: it was saved by ranks",
    "fresh.load(f'{path}_matrices')":
        r"CheckpointError: groups: Muon overrides update\(\), and groups on ranks need",
    "sgd.load(path)": "CheckpointError: saved with Adam, the updater has SGD",
    "other.load(path)": r"CheckpointError: the checkpoint lacks \['other'\]",
    "wrong.load(path, strict=False)":
        r"CheckpointError: was saved with shape \(40, 7\) and float32, it has \(3,\)",
}  # fmt: skip


def check_what_cannot_be_saved_or_loaded_changes_nothing(folder):
    updater, weights, path = trained(folder, "refused")
    updater.save(f"{path}_bare")
    updater.save(f"{path}_other")
    shard, strange = (
        next(path.parent.glob(f"{name}.*.{comm.size - 1}-of-{comm.size}"))
        for name in (path.name, f"{path.name}_other")
    )
    matrices = {"w": {"optimizer": "muon"}}
    alone, own = optimizer.Updater(optimizer.Adam(), groups=matrices), shard.read_bytes()
    if comm.rank == 0:
        alone.save(f"{path}_matrices")
        single = optimizer.Updater(optimizer.Adam())
        single(1, *(np.ones(7, np.float32) for _ in "gw"))
        single.save(f"{path}_one")
    comm.Barrier()
    other = ShardedUpdater(optimizer.Adam(param_idx2name={5: "fc", 6: "other"}), comm)
    given = {5: np.ones((40, 7), np.float32), 6: np.ones(33, np.float32)}
    adam_step(other, given)
    sgd = ShardedUpdater(optimizer.SGD(), comm)
    fresh, wrong, bad, unfit = (ShardedUpdater(optimizer.Adam(), comm) for _ in range(4))
    wrong(0, np.ones(3), np.ones(3))
    bad(0, *(np.ones(9, np.float32) for _ in "gw"))
    if LAST:
        bad.states[0] = (object(), None)
    updater.optimizer.lr = other.optimizer.lr = 0.5  # which a load replaces

    def held():
        comm.Barrier()
        found = everything(updater.shard, [weights]), everything(other.shard, [given])
        files = contents(folder)
        comm.Barrier()
        return *found, files

    all_refused(UNFIT, held, globals() | locals())
    before = everything(other.shard, [given])
    for damage, *words in (
        (shard.unlink, f"shard {comm.size - 1} of {comm.size} is missing"),
        (lambda: shard.write_bytes(own[:-1] + bytes([own[-1] ^ 1])), "damaged: its CRC32 differs"),
        (lambda: shutil.copy(strange, shard), "is shard", "of run"),
        (lambda: shard.write_bytes(b"short"), "header"),
    ):
        if comm.rank == 0:
            damage()
        comm.Barrier()
        with raised(CheckpointError, *words):
            other.load(path)
        assert everything(other.shard, [given]) == before
        comm.Barrier()
        if comm.rank == 0:
            shard.write_bytes(own)
        comm.Barrier()
    assert other.load(path, strict=False) == (["other"], ["bias", "empty", "wide"])
    unfit.load(f"{path}_one")
    with raised(CheckpointError, "an array of shape (7,) for a weight of shape (5,)"):
        unfit(1, np.ones(5, np.float32), np.ones(5, np.float32))
    unfit(1, np.ones(7, np.float32), np.ones(7, np.float32))


def contents(folder):
    """Names and bytes of all files."""
    return {path.name: path.read_bytes() for path in Path(folder).glob("*") if path.is_file()}


def check_an_error_after_the_index_was_replaced_leaves_the_new_checkpoint(folder):
    """The directory of the index cannot be synced."""
    updater, weights, path = trained(folder, "unsynced")
    adam_step(updater, weights)
    real, calls = files.sync_directory, []

    def fail(directory):
        calls.append(directory)
        if comm.rank == 0 and len(calls) == 2:  # the first is that of the shard
            raise OSError(errno.EIO, "Input/output error")
        real(directory)

    with pytest.MonkeyPatch.context() as patched, raised(OSError, "Input/output error"):
        patched.setattr(files, "sync_directory", fail)
        updater.save(path, weights)
    found = {name: np.zeros_like(weight) for name, weight in weights.items()}
    other = ShardedUpdater(optimizer.Adam(), comm)
    other.load(path, weights=found)
    assert frozen((found, other.states)) == frozen((weights, updater.states))
    updater.save(path)
    comm.Barrier()
    assert len(list(path.parent.glob(f"{path.name}*"))) == 1 + comm.size


def check_a_schedule_that_the_user_steps_and_masters_that_wait_go_along(folder):
    """The schedule in place, unchanged by a load that fails; to ranks and to one process."""
    path, waiting = Path(folder, f"waiting_{comm.size}"), normal(3, (7,), "float32")
    plateau = lr_scheduler.PlateauScheduler(0.5, patience=1, base_lr=1.0)
    make = partial(optimizer.SGD, multi_precision=True)
    saved, loaded = ShardedUpdater(make(lr_scheduler=plateau), comm), ShardedUpdater(make(), comm)
    saved.set_master("w", waiting)
    saved("v", np.ones(3), np.ones(3))
    plateau.step(1.0)
    saved.save(path)
    plateau.step(0.5)
    with raised(CheckpointError, "it has no weight of index 'v'"):
        saved.load(path, weights={"v": np.ones(3)})
    assert plateau.shared["best"] == 0.5
    saved.load(path)
    assert plateau.shared["best"] == 1.0
    alone = optimizer.Updater(make())
    for updater in (loaded, alone):
        updater.load(path)
        updater("w", np.zeros(7, np.float16), waiting.astype(np.float16))
    assert frozen(alone.states["w"][1]) == frozen(waiting)
    mine = slice(*loaded.placements["w"].part(comm.rank))
    assert frozen(loaded.states["w"][1]) == frozen(waiting[mine])
