"""Checks of checkpoints of ranks; the last two of a folder that jobs of other sizes share."""

import errno
import shutil
from pathlib import Path

import numpy as np
import pytest
from ranks_common import LAST, Normalized, comm, copied, exact, raised, summed

from fastopt import EmbeddingTable, RowSparse, lr_scheduler, optimizer
from fastopt.amp import LossScaler
from fastopt.checkpoint import CheckpointError
from fastopt.checkpoint.format import files
from fastopt.distributed import (
    ShardedEmbeddingTable,
    ShardedTable,
    ShardedUpdater,
    latest_checkpoint,
    save_checkpoint,
)
from fastopt.distributed.threads import ThreadRank
from helpers.cases import CASES, FIRST, Case
from helpers.tensor_lists import everything, frozen, normal

SHAPES = {
    "fc_weight": (40, 7),
    "fc_bias": (7,),
    "empty": (0, 3),
    "out_weight": (30, 10),
    "wide_weight": (9, 200),
}
NAMES = dict(enumerate(SHAPES))
optimizer.register(Normalized)
RANKS = 4
"""Shares that a batch has, whatever the number of ranks."""


def grads_of(step, sizes=SHAPES):
    """Gradients of this rank, of a step whose sums do not depend on the number of ranks."""
    mine = range(comm.rank, RANKS, comm.size)
    return [
        summed([exact(100 * step + 10 * part + k, shape, np.float32) for part in mine])
        for k, shape in enumerate(sizes.values())
    ]


def started(case, **options):
    """Updater and weights."""
    made = case.make(param_idx2name=NAMES, wd=case.wd)
    weights = [normal(k, shape, "float32") for k, shape in enumerate(SHAPES.values())]
    return ShardedUpdater(made, comm, bucket_bytes=512, **options), weights


def cases_of_all_kinds():
    """A form of each kind of state: none, one, two, rows, sums of gradients, numbers.

    On threads, as by default, those that are cut in a particular way; under MPI also the others.
    """
    chosen = (
        "lbsgd-momentum=0.9-batch_scale=2-warmup_epochs=0",
        "nadam",
        "groupadagrad",
        "prodigy",
    )
    if not isinstance(comm, ThreadRank):
        chosen += "nag", "dcasgd-momentum=0.9", "lamb", "novograd"
    in_8_bits = Case("adam", {"state_dtype": "int8", "state_min_size": 7})
    return [*(case for case in CASES if str(case) in chosen), in_8_bits, Case("normalized", wd=0.0)]


def kinds_for(case):
    """Parameters that the optimizer takes: rules of rows need two dimensions."""
    if case.name != "groupadagrad":
        return list(range(len(SHAPES)))
    return [k for k, shape in enumerate(SHAPES.values()) if len(shape) == 2]


def step(updater, weights, case, number):
    """Do one step."""
    chosen = kinds_for(case)
    grads = grads_of(number)
    updater(chosen, [grads[k] for k in chosen], [weights[k] for k in chosen])


def check_a_run_goes_on_where_it_was(folder):
    path = Path(folder, f"goes_on_{comm.size}")
    for case in cases_of_all_kinds():
        updater, weights = started(case, loss_scaler=LossScaler(init_scale=2.0))
        for number in range(3):
            step(updater, weights, case, number)
        updater.save(path)
        other, saved = started(case, loss_scaler=LossScaler(init_scale=8.0))[0], copied(weights[0])
        others = [saved, *map(copied, weights[1:])]
        step(other, list(map(copied, weights)), case, 9)  # it knows the parameters already
        other.optimizer.lr = 7.0
        assert other.load(path) == ([], [])
        assert other.loss_scaler.scale == 2
        for number in range(3, 6):
            step(updater, weights, case, number)
            step(other, others, case, number)
        assert everything(other.shard, others) == everything(updater.shard, weights), case
    comm.Barrier()
    if comm.rank == 0:
        assert len(list(Path(folder).glob(f"goes_on_{comm.size}.*"))) == comm.size


def check_files_of_jobs_of_every_size_are_taken_up(folder):
    """The first job writes and goes on alone; others, of other sizes, take its files up."""
    for number, case in enumerate(cases_of_all_kinds()):
        updater, weights = started(case)
        path, final = Path(folder, f"any_{number}"), Path(folder, f"final_{number}.npz")
        known = final.exists()
        comm.Barrier()
        if not known:
            for k in range(3):
                step(updater, weights, case, k)
            updater.save(path, {k: weights[k] for k in kinds_for(case)})
            middle = list(map(copied, weights))
        else:
            with np.load(final) as arrays:
                middle = [arrays[f"middle_{k}"] for k in range(len(SHAPES))]
                expected = [arrays[f"end_{k}"] for k in range(len(SHAPES))]
            for k in kinds_for(case):
                weights[k][...] = np.nan
            updater.load(path, weights={k: weights[k] for k in kinds_for(case)})
            assert frozen(weights) == frozen(middle), case
        for k in range(3, 6):
            step(updater, weights, case, k)
        comm.Barrier()
        if known:
            for ours, theirs in zip(weights, expected, strict=True):
                np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-6, err_msg=str(case))
        elif comm.rank == 0:
            arrays = {f"middle_{k}": w for k, w in enumerate(middle)}
            np.savez(final, **arrays, **{f"end_{k}": w for k, w in enumerate(weights)})


def check_tables_of_jobs_of_every_size_are_taken_up(folder):
    for owners in ("block", "hash"):
        for name, arguments in (("adam", {}), ("adamw", {"sparse_decay": "catch_up", "wd": 0.1})):
            made = optimizer.create(name, **arguments)
            table = ShardedTable((37, 2), made, comm, owners=owners, index="words")
            path = Path(folder, f"table_{owners}_{name}")
            final = path.with_suffix(".npy")
            rng = np.random.default_rng(0)
            lists = [(normal(k, (8, 2), "float32"), rng.integers(0, 37, 8)) for k in range(8)]
            known = final.exists()
            comm.Barrier()
            if known:
                table.load(path)
            for k, (values, rows) in enumerate(lists):
                if known and k < 4:
                    continue
                if k == 4 and not known:
                    table.save(path)
                mine = slice(comm.rank * 8 // comm.size, (comm.rank + 1) * 8 // comm.size)
                table.push(RowSparse(values[mine], rows[mine], (37, 2)))
            whole = table.pull(range(37))
            if known:
                assert whole.tobytes() == np.load(final).tobytes()
            elif comm.rank == 0:
                np.save(final, whole)
            other = "hash" if owners == "block" else "block"
            wrong = ShardedTable((37, 2), optimizer.create(name), comm, owners=other, index="words")
            with raised(CheckpointError, f"it was saved from ShardedTable by {owners}"):
                wrong.load(path)
            comm.Barrier()


def check_damage_is_told_on_every_rank(folder):
    path = Path(folder, f"damage_{comm.size}")
    case = FIRST["adam"]
    updater, weights = started(case)
    step(updater, weights, case, 0)
    updater.save(path)
    other, _ = started(case)
    (run,) = {shard.name.split(".")[-2] for shard in path.parent.glob(f"{path.name}.*-of-*")}
    victim = Path(f"{path}.{run}.{comm.size - 1}-of-{comm.size}")

    def damaged(change, *words):
        comm.Barrier()
        kept = victim.read_bytes()
        comm.Barrier()
        before = everything(other.shard, [])
        if comm.rank == 0:
            change()
        comm.Barrier()
        with raised(CheckpointError, *words):
            other.load(path)
        assert everything(other.shard, []) == before
        comm.Barrier()
        if comm.rank == 0:
            victim.write_bytes(kept)
        comm.Barrier()

    def flip():
        data = bytearray(victim.read_bytes())
        data[-1] ^= 1
        victim.write_bytes(data)

    def exchange():
        """Put the same shard of another run there."""
        shutil.copy(strange, victim)

    updater.save(f"{path}_other")
    (strange,) = path.parent.glob(f"{path.name}_other.*.{comm.size - 1}-of-{comm.size}")
    damaged(victim.unlink, f"shard {comm.size - 1} of {comm.size} is missing")
    damaged(flip, "is damaged: its CRC32 differs")
    damaged(exchange, "is shard", "of run")
    damaged(lambda: victim.write_bytes(b"short"), "header")
    with raised(OSError, "No such file"):
        other.load(path.with_name("nothing"))
    alone = optimizer.get_updater(optimizer.Adam())
    with raised(CheckpointError, "not the checkpoint of an updater"):
        other.load(victim)
    with raised(CheckpointError, "it was saved by ranks"):
        alone.load_states_dict({"ranks": 2})
    sgd = ShardedUpdater(optimizer.SGD(param_idx2name=NAMES), comm)
    with raised(CheckpointError, "saved with Adam, the updater has SGD"):
        sgd.load(path)
    assert other.load(path) == ([], [])
    assert frozen(other.states) == frozen(updater.states)


def check_parameters_that_differ(folder):
    path, case = Path(folder, f"differ_{comm.size}"), FIRST["adam"]
    updater, weights = started(case)
    step(updater, weights, case, 0)
    updater.save(path)
    names = {5: "fc_weight", 6: "other_weight"}
    other = ShardedUpdater(optimizer.Adam(param_idx2name=names), comm)
    ours = [copied(weights[0]), np.ones(33, np.float32)]
    other([5, 6], [np.ones_like(w) for w in ours], ours)
    before = everything(other.shard, ours)
    with raised(CheckpointError, "the checkpoint lacks ['other_weight']"):
        other.load(path)
    assert everything(other.shard, ours) == before
    skipped = other.load(path, strict=False)
    assert skipped == (["other_weight"], ["fc_bias", "empty", "out_weight", "wide_weight"])
    ours[0][...] = weights[0]
    grads = grads_of(1)
    updater(0, grads[0], weights[0])
    other([5, 6], [grads[0], ours[1].copy()], ours)
    assert ours[0].tobytes() == weights[0].tobytes()
    assert other.optimizer._index_update_count[6] == 1
    wrong = ShardedUpdater(optimizer.Adam(), comm)
    wrong(0, np.ones(3), np.ones(3))
    with raised(CheckpointError, "was saved with shape (40, 7) and float32, it has (3,)"):
        wrong.load(path, strict=False)


def check_a_write_that_fails_leaves_the_old_checkpoint(folder):
    path = Path(folder, f"old_{comm.size}")
    case = FIRST["adam"]
    updater, weights = started(case)
    step(updater, weights, case, 0)
    updater.save(path)
    before = path.read_bytes()
    missing = Path(folder, "no", "such", "folder")
    with raised(OSError, "No such file"):
        updater.save(missing)
    step(updater, weights, case, 1)
    bad = comm.rank == comm.size - 1
    if bad:
        updater.states[1] = (object(), None)
    with raised(TypeError, "state of index 1 (fc_bias) must be None, a number"):
        updater.save(path)
    comm.Barrier()
    assert path.read_bytes() == before
    assert len(list(path.parent.glob(f"{path.name}*"))) == 1 + comm.size  # nothing of the new one
    made = Path(f"{path}_first")
    with raised(TypeError, "state of index 1 (fc_bias) must be None, a number"):
        updater.save(made)
    comm.Barrier()
    assert not list(path.parent.glob(f"{made.name}*"))
    other, _ = started(case)
    other.load(path)
    assert other.optimizer.num_update == 1
    assert len(set(comm.allgather(other.optimizer.num_update))) == 1


def check_an_error_after_the_index_was_replaced_leaves_the_new_checkpoint(folder):
    """The directory of the index cannot be synced."""
    path = Path(folder, f"unsynced_{comm.size}")
    case = FIRST["adam"]
    updater, weights = started(case)
    step(updater, weights, case, 0)
    updater.save(path, dict(enumerate(weights)))
    step(updater, weights, case, 1)
    real, calls = files.sync_directory, []

    def fail(directory):
        calls.append(directory)
        if comm.rank == 0 and len(calls) == 2:  # the first is that of the shard
            raise OSError(errno.EIO, "Input/output error")
        real(directory)

    files.sync_directory = fail
    try:
        with raised(OSError, "Input/output error"):
            updater.save(path, dict(enumerate(weights)))
    finally:
        files.sync_directory = real
    found = [np.zeros_like(w) for w in weights]
    other, _ = started(case)
    other.load(path, weights=dict(enumerate(found)))
    assert frozen(found) == frozen([np.ascontiguousarray(w) for w in weights])
    assert frozen(other.states) == frozen(updater.states)
    updater.save(path)
    comm.Barrier()
    assert len(list(path.parent.glob(f"{path.name}*"))) == 1 + comm.size


def check_groups_with_optimizers_of_matrices_are_refused(folder):
    path, groups = Path(folder, f"matrices_{comm.size}"), {"w": {"optimizer": "muon"}}
    if comm.rank == 0:
        optimizer.Updater(optimizer.Adam(), groups=groups).save(path)
    comm.Barrier()
    sharded = ShardedUpdater(optimizer.Adam(), comm)
    with raised(CheckpointError, "groups: Muon overrides update(), and groups on ranks need"):
        sharded.load(path)
    assert sharded.groups is None


def check_an_updater_without_ranks_goes_on_from_ranks_and_back(folder):
    """The bits of one updater that never stopped, on any number of ranks."""
    for case in cases_of_all_kinds():
        if case.name in ("lamb", "lbsgd", "novograd", "prodigy"):
            continue  # norms of whole tensors have other last bits on several ranks
        make = lambda case=case: case.make(param_idx2name=NAMES, wd=case.wd)  # noqa: E731
        path, back = (Path(folder, f"{n}_{case.name}_{comm.size}") for n in ("to", "back"))
        ours, theirs = (
            [normal(k, s, "float32") for k, s in enumerate(SHAPES.values())] for _ in "ab"
        )
        sharded, alone = ShardedUpdater(make(), comm), optimizer.Updater(make())
        kinds = kinds_for(case)

        def both(number, sharded, alone, ours=ours, theirs=theirs, kinds=kinds):
            step_all(number, sharded, ours, kinds, grads_of)
            step_all(number, alone, theirs, kinds, total_of)

        both(0, sharded, alone)
        both(1, sharded, alone)
        sharded.save(path)
        plain = optimizer.Updater(make())
        plain.load(path)
        step_all(2, plain, [w.copy() for w in ours], kinds, total_of)
        step_all(2, alone, theirs, kinds, total_of)
        assert everything(plain, []) == everything(alone, []), case
        if comm.rank == 0:
            plain.save(back)
        comm.Barrier()
        for known in (False, True):
            again, copies = ShardedUpdater(make(), comm), [w.copy() for w in theirs]
            if known:
                step_all(7, again, [w.copy() for w in copies], kinds, grads_of)
            assert again.load(back) == ([], [])
            if not known:
                again.save(f"{back}_before")  # before any update
                again = ShardedUpdater(make(), comm)
                again.load(f"{back}_before")
            follower, expected = optimizer.Updater(make()), [w.copy() for w in theirs]
            follower.load(back)
            for number in (3, 4):
                step_all(number, again, copies, kinds, grads_of)
                step_all(number, follower, expected, kinds, total_of)
            assert frozen(copies) == frozen(expected), case
            assert not again.uncut


def step_all(number, updater, weights, kinds, slopes):
    """Do one step with the gradients that a function gives."""
    grads = slopes(number)
    updater(kinds, [grads[k] for k in kinds], [weights[k] for k in kinds])


def total_of(number):
    """Gradients of all ranks together."""
    return [
        summed([exact(100 * number + 10 * part + k, shape, np.float32) for part in range(RANKS)])
        for k, shape in enumerate(SHAPES.values())
    ]


def check_updaters_and_tables_are_one_checkpoint(folder):
    """A job of another size loads it too; a part that fails leaves all of the old one."""
    folder = Path(folder, "together")
    for found in filter(None, [latest_checkpoint(folder)]):
        go_on(*loaded(found))
    updater, weight, table = parts_of(1)
    save = lambda path: updater.save(path, {"w": weight})  # noqa: E731
    comm.Barrier()
    save_checkpoint(folder, {"model": save, "words": table.save}, comm)
    found = latest_checkpoint(folder)
    updater("w", np.ones(9), weight)
    for bad in (failing, table.table.dim):
        with pytest.raises((OSError, TypeError), match=r"disk of rank|parts must be functions"):
            save_checkpoint(folder, {"model": save, "words": bad}, comm)
        assert latest_checkpoint(folder) == found
        go_on(*loaded(found))
    comm.Barrier()
    assert sorted(path.name for path in folder.iterdir()) == sorted(
        ["latest.json", found["model"].parent.name]
    )
    if comm.size > 1:
        with raised(ValueError, "ranks disagree: for parts"):
            save_checkpoint(folder, {"model" if LAST else "other": save}, comm)


def parts_of(steps):
    """An updater with its weight, and a table, after some steps."""
    updater, weight = ShardedUpdater(optimizer.Adam(), comm), np.zeros(9)
    table = ShardedEmbeddingTable(EmbeddingTable(4, "adam", init="zeros"), comm)
    for _ in range(steps):
        updater("w", np.full(9, 1 / comm.size), weight)
        table.update(np.arange(5), np.full((5, 4), 1 / comm.size, np.float32))
    return updater, weight, table


def loaded(found):
    """The parts of a checkpoint."""
    updater, weight, _ = parts_of(0)
    updater.load(found["model"], weights={"w": weight})
    return updater, weight, ShardedEmbeddingTable.load(found["words"], comm)


def go_on(updater, weight, table):
    """The parts are those of one step, and go on."""
    expected = parts_of(2)
    updater("w", np.full(9, 1 / comm.size), weight)
    table.update(np.arange(5), np.full((5, 4), 1 / comm.size, np.float32))
    np.testing.assert_allclose(weight, expected[1], rtol=1e-6)
    rows = [each.lookup(np.arange(5)) for each in (table, expected[2])]
    np.testing.assert_allclose(*rows, rtol=1e-6)


def failing(path):
    """Save a part; one rank cannot."""
    if LAST:
        raise OSError(errno.ENOSPC, f"disk of rank {comm.rank} is full")
    Path(path).touch()


def check_masters_go_along(folder):
    """Half-precision weights, with a master that waits for its first update."""

    def make():
        return optimizer.SGD(momentum=0.5, learning_rate=1e-3, multi_precision=True)

    path = Path(folder, f"masters_{comm.size}")
    weight, waiting = np.ones((5, 3), np.float16), normal(3, (7,), "float32")
    updater, grad = ShardedUpdater(make(), comm), np.full((5, 3), 1 / comm.size, np.float16)
    updater.set_master(1, waiting)
    updater(0, grad, weight)
    updater.save(path)
    alone = optimizer.Updater(make())
    alone.load(path)
    copies = [weight.copy(), waiting.astype(np.float16)]
    alone([0, 1], [np.ones((5, 3), np.float16), np.ones(7, np.float16)], copies)
    ours = [weight.copy(), waiting.astype(np.float16)]
    updater([0, 1], [grad, np.full(7, 1 / comm.size, np.float16)], ours)
    if comm.size in (1, 2, 4):  # where thirds do not round
        assert frozen(ours) == frozen(copies)
    comm.Barrier()
    if comm.rank == 0:
        optimizer.Updater(make()).save(f"{path}_empty")
        fresh = optimizer.Updater(make())
        fresh.set_master(1, waiting)
        fresh.save(f"{path}_plain")
    comm.Barrier()
    last = ShardedUpdater(make(), comm)
    last.load(f"{path}_plain")
    target = waiting.astype(np.float16)
    last(1, np.zeros(7, np.float16), target)
    first, end = last.placements[1].part(comm.rank)
    np.testing.assert_array_equal(last.states[1][1], waiting[first:end])


def check_rows_are_pruned_by_one_process(folder):
    """The way that the error of ``resize`` names."""
    path, shape = Path(folder, f"pruned_{comm.size}"), (6, 3)
    updater, alone = ShardedUpdater(optimizer.Adam(), comm), optimizer.Updater(optimizer.Adam())
    weights = [exact(1, shape, np.float32) for _ in range(2)]
    updater(0, exact(2, shape, np.float32) / comm.size, weights[0])
    alone(0, exact(2, shape, np.float32), weights[1])
    with raised(AttributeError, "save() on all ranks", "resize()"):
        updater.resize(0, weights[0], range(6))
    kept = [4, 0, -1]
    pruned = [np.vstack([each[kept[:2]], np.zeros((1, 3), np.float32)]) for each in weights]
    alone.resize(0, pruned[1], kept)
    updater.save(path)
    if comm.rank == 0:
        whole = optimizer.Updater(optimizer.Adam())
        whole.load(path)
        whole.resize(0, pruned[0], kept)
        whole.save(f"{path}_whole")
    comm.Barrier()
    updater = ShardedUpdater(optimizer.Adam(), comm)
    updater.load(f"{path}_whole")
    updater(0, np.full((3, 3), 1 / comm.size, np.float32), pruned[0])
    alone(0, np.ones((3, 3), np.float32), pruned[1])
    np.testing.assert_allclose(pruned[0], pruned[1], rtol=1e-6)


def check_weights_are_saved_with_their_states(folder):
    path = Path(folder, f"weights_{comm.size}")
    case = FIRST["adam"]
    updater, weights = started(case)
    step(updater, weights, case, 0)
    updater.save(path, dict(enumerate(weights)))
    other = started(case)[0]
    found = [np.zeros_like(w) for w in weights]
    found[0] = np.asfortranarray(found[0])
    assert other.load(path, weights=dict(enumerate(found))) == ([], [])
    assert frozen([np.ascontiguousarray(w) for w in found]) == frozen(weights)
    updater.save(path)
    before = everything(other.shard, found)
    with raised(CheckpointError, "it has no weight of index 0 (fc_weight)"):
        other.load(path, weights=dict(enumerate(found)))
    assert everything(other.shard, found) == before
    with raised(ValueError, "index 9: its weight was not updated yet"):
        updater.save(path, {9: weights[0]})
    with raised(ValueError, "weight must have shape"):
        updater.save(path, {0: weights[1]})


def check_the_schedule_that_the_user_steps_is_restored_in_place(folder):
    """And is unchanged after a load that is refused when states are restored already."""
    path, grad = Path(folder, f"plateau_{comm.size}"), np.ones(3, np.float32)

    def made():
        own, group = (lr_scheduler.PlateauScheduler(0.5, patience=1, base_lr=1.0) for _ in "ab")
        sgd = optimizer.SGD(lr=None, lr_scheduler=own)
        groups = {"^b": {"learning_rate": group}}
        updater = ShardedUpdater(sgd, comm, groups=groups)
        updater(["a", "b"], [grad, grad], [grad.copy(), grad.copy()])
        return updater, own, group

    updater, *saved = made()
    for schedule in saved:
        schedule.step(1.0)
    updater.save(path)
    other, *held = made()
    with raised(CheckpointError, "it has no weight of index"):
        other.load(path, weights={"a": grad.copy(), "b": grad.copy()})
    assert [each.shared["best"] for each in held] == [None, None]
    other.load(path)
    assert [each.shared["best"] for each in held] == [1.0, 1.0]
    held[0].step(2.0)
    assert other.optimizer.learning_rate == 0.5


def check_what_does_not_fit_a_weight_is_refused_at_its_first_update(folder):
    path, weight = Path(folder, f"unfit_{comm.size}"), np.ones((4, 3), np.float32)
    if comm.rank == 0:
        alone = optimizer.Updater(optimizer.Adam())
        alone(0, weight.copy(), weight.copy())
        alone.save(path)
    comm.Barrier()
    updater = ShardedUpdater(optimizer.Adam(), comm)
    updater.load(path)
    with raised(CheckpointError, "an array of shape (4, 3) for a weight of shape (5,)"):
        updater(0, np.ones(5, np.float32), np.ones(5, np.float32))
    updater(0, weight.copy(), weight)
