"""What the checks that run on several ranks share."""

import contextlib
import functools

import numpy as np
import pytest

from fastopt import RowSparse, optimizer
from fastopt._engine.validate import leaves
from fastopt._kernels.layout import real_of
from fastopt.checkpoint import CheckpointError
from fastopt.distributed import ShardedUpdater
from helpers.cases import OF_STEPS
from helpers.ranks import Loading
from helpers.refusals import check_refused
from helpers.tensor_lists import frozen, normal

comm = Loading.comm
LAST = comm.rank == comm.size - 1
of_last = f"rank {comm.size - 1}: " if comm.size > 1 else ""
"""Where an error is one of the last rank."""


def exact(seed, shape, dtype):
    """Gradient whose sums over ranks are exact, whatever their order."""
    return (np.round(normal(seed, shape, "float64") * 64) / 64).astype(dtype)


def gradients(setting, name, shape, dtype, seed, shares=comm.size):
    """Gradient of this rank, and that of all, of shares that ranks have whatever their number.

    Their sums are exact.
    """
    rng, mine = np.random.default_rng(seed), range(comm.rank, shares, comm.size)
    if setting.rows and name == "embed.weight":
        parts = []
        for share in range(shares):
            rows = rng.integers(0, shape[0], 0 if share == 1 else 3)
            parts.append(((rng.integers(-32, 33, (len(rows), *shape[1:])) / 8).astype(dtype), rows))
        own, total = (
            tuple(map(np.concatenate, zip(*some, strict=True)))
            for some in ([parts[share] for share in mine], parts)
        )
        return own, RowSparse(*total, shape)
    parts = [np.asarray(rng.integers(-32, 33, shape) / 8).astype(dtype) for _ in range(shares)]
    return summed([parts[share] for share in mine]).astype(dtype), summed(parts)


OF_NORMS = ("lars", "lamb", "lans", "lbsgd", "novograd", "stablespam", *OF_STEPS)
"""Optimizers whose sums over tensors have another order on several ranks."""


def compare(setting, sharded, alone, ours, theirs, in_one=comm.size == 1):
    """Weights and counts are those of one process."""
    compare_weights(setting, ours, theirs, in_one)
    one, other = sharded.optimizer, alone.optimizer
    assert dict(one._index_update_count) == dict(other._index_update_count)
    assert one.num_update == other.num_update


def rounds(setting):
    """Whether sums of several ranks have another order or scale than those of one process."""
    of_thirds = setting.settings().get("accumulate") == 3  # of which each rank sends its own
    return of_thirds or setting.is_whole or (setting.case and setting.case.name in OF_NORMS)


def compare_weights(setting, ours, theirs, in_one=comm.size == 1):
    """Weights have the same bits, or are close if sums have another order."""
    if rounds(setting) and not in_one:
        for name, weight in ours.items():
            np.testing.assert_allclose(weight, theirs[name], rtol=2e-3, atol=1e-5)
    else:
        assert frozen(ours) == frozen(theirs), setting


class Pair:
    """A sharded updater, and one updater that is given the sum of all ranks' gradients.

    The argument `loss_scaler` is a function, so that each updater has its own.
    """

    def __init__(self, make, weights, loss_scaler=None, **options):
        plain = {name: options[name] for name in {*options} - {"bucket_bytes", "overlap"}}
        scalers = [loss_scaler and loss_scaler() for _ in range(2)]
        self.sharded = ShardedUpdater(make(), comm, scalers[0], **options)
        self.alone = optimizer.Updater(make(), loss_scaler=scalers[1], **plain)
        self.ours, self.theirs = ([copied(w) for w in weights] for _ in range(2))

    def step(self, indices, slopes):
        """Update with ``slopes(k, rank)``, gradient number `k` of a rank."""
        grads = [slopes(k, comm.rank) for k in range(len(indices))]
        self.sharded(indices, grads, self.ours)
        every = [[slopes(k, rank) for rank in range(comm.size)] for k in range(len(indices))]
        self.alone(indices, [summed(each) for each in every], self.theirs)

    def same(self):
        """Whether all bits of the weights are equal."""
        return frozen(self.ours) == frozen(self.theirs)


SHAPES = [(40, 7), (1,), (0, 3), (), (33,), (3, 5)]
INDICES = [*range(len(SHAPES))]


def slopes(step, dtype):
    """Gradients of a step by tensor and rank."""
    return lambda k, rank: exact(90 * step + 9 * k + rank, SHAPES[k], dtype)


def started(make, dtype, steps=0, **options):
    """A pair with weights of all shapes, after some steps."""
    weights = [np.asarray(normal(k, s, "float64"), dtype) for k, s in enumerate(SHAPES)]
    pair = Pair(make, weights, **options)
    for step in range(steps):
        pair.step(INDICES, slopes(step, dtype))
    return pair


def copied(array):
    """Copy with the same layout."""
    if array.flags.c_contiguous or array.flags.f_contiguous:
        return array.copy(order="K")
    spread = np.zeros((*array.shape[:-1], 2 * array.shape[-1]), array.dtype)[..., ::2]
    spread[...] = array
    return spread


def summed(grads):
    """Sum in the precision of the arithmetic."""
    return np.asarray(functools.reduce(np.add, [g.astype(real_of(g.dtype)) for g in grads]))


def state_bytes(states):
    """Bytes of all arrays of the states."""
    return sum(leaf.nbytes for state in states.values() for leaf in leaves(state))


@contextlib.contextmanager
def raised(kind, *words):
    """Check that an error of this kind is raised here, with these words in its message."""
    with pytest.raises(kind) as caught:
        yield
    for word in words:
        assert word in str(caught.value), (word, str(caught.value))


def all_refused(errors, held, names):
    """Each call raises its error on all ranks, and changes nothing of what is held."""
    before, names = held(), names | {"LAST": LAST, "CheckpointError": CheckpointError}
    for code, error in errors.items():
        check_refused(code, error, names)
        assert held() == before, code


def told(*words):
    """Check for the error of all ranks that the last one differs, with these words."""
    others = "rank 0 has" if comm.size == 2 else f"ranks 0-{comm.size - 2} have"
    return raised(ValueError, "ranks disagree", others, f"rank {comm.size - 1} has", *words)
