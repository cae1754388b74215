"""What the checks that run on several ranks share."""

import contextlib

import numpy as np
import pytest

from fastopt import optimizer
from fastopt._engine.validate import leaves
from fastopt._kernels.layout import real_of
from fastopt.distributed import ShardedUpdater
from helpers.ranks import Loading
from helpers.tensor_lists import dtype_of, frozen, normal

comm = Loading.comm
LAST = comm.rank == comm.size - 1


def exact(seed, shape, dtype):
    """Gradient whose sums over ranks are exact, whatever their order."""
    return (np.round(normal(seed, shape, "float64") * 64) / 64).astype(dtype)


def slope(tensor, seed):
    """Gradient of a tensor whose sum over ranks is exact."""
    dtype = "float32" if tensor.gradient == "single" else tensor.dtype
    return exact(seed, tensor.shape, dtype_of(dtype))


class Normalized(optimizer.Optimizer):
    """Written in NumPy: each tensor is whole, on one rank."""

    def create_state(self, index, weight):
        return np.zeros_like(weight)

    def update(self, index, weight, grad, state):
        self._update_count(index)
        state += grad
        weight -= self._get_lr(index) * state / (1 + np.linalg.norm(state))


class Pair:
    """A sharded updater, and one updater that is given the sum of all ranks' gradients.

    The arguments `scaler` and `groups` are functions, so that each updater has its own.
    """

    def __init__(self, make, weights, scaler=None, groups=None, **options):
        def own():
            return {"loss_scaler": scaler and scaler(), "groups": groups and groups()}

        self.sharded = ShardedUpdater(make(), comm, **own(), **options)
        options.pop("bucket_bytes", None)
        self.alone = optimizer.Updater(make(), **own(), **options)
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

    def close(self, **tolerance):
        """Raise unless the weights are about equal."""
        for ours, theirs in zip(self.ours, self.theirs, strict=True):
            np.testing.assert_allclose(
                ours.astype(np.float64), theirs.astype(np.float64), **tolerance
            )


SHAPES = [(40, 7), (1,), (0, 3), (), (33,), (3, 5)]
INDICES = [*range(len(SHAPES))]


def slopes(step, dtype):
    """Gradients of a step by tensor and rank."""
    return lambda k, rank: exact(90 * step + 9 * k + rank, SHAPES[k], dtype)


def started(make, dtype, steps=0, **options):
    """A pair with weights of all shapes, after some steps."""
    weights = [np.asarray(normal(k, s, "float64"), dtype) for k, s in enumerate(SHAPES)]
    pair = Pair(make, weights, options.pop("loss_scaler", None), **options)
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
    total = grads[0].astype(real_of(grads[0].dtype))
    for grad in grads[1:]:
        total = total + grad.astype(total.dtype)
    return np.asarray(total)


def state_bytes(states):
    """Bytes of all arrays of the states."""
    return sum(leaf.nbytes for state in states.values() for leaf in leaves(state))


@contextlib.contextmanager
def raised(kind, *words):
    """Check that an error of this kind is raised here, with these words in its message."""
    with pytest.raises(kind) as caught:
        yield
    for word in words:
        assert word in str(caught.value)


def told(*words):
    """Check for the error of all ranks that the last one differs, with these words."""
    others = "rank 0 has" if comm.size == 2 else f"ranks 0-{comm.size - 2} have"
    return raised(ValueError, "ranks disagree", others, f"rank {comm.size - 1} has", *words)
