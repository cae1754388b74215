"""Checks of sharded updates by each rule, on any number of ranks."""

from ranks_common import Pair, comm, slope

from fastopt._engine.validate import leaves
from helpers.cases import CHOICES, FIRST
from helpers.tensor_lists import frozen, tensors_of

NORMS = ("lars", "lamb", "lans", "lbsgd", "stablespam")


def dense_of(case):
    """Tensors with dense gradients."""
    chosen = tensors_of(case).items()
    return {index: t for index, t in chosen if t.gradient not in ("rows", "pair")}


def check_rules(choice="every kind"):
    """One rank: the bits of the plain updater; several: those too, but for sums of norms."""
    for case in [*CHOICES[choice], FIRST["stablespam"]]:
        if case.recorded and case.name != "stablespam":  # which has maxima
            continue
        tensors = dense_of(case)
        kinds = [*tensors.values()]

        def make(case=case):
            return case.make(wd=case.wd, rounding="stochastic")

        pair = Pair(make, [t.make(1) for t in kinds], bucket_bytes=20_000)
        for step in range(3):
            pair.step([*tensors], lambda k, r, s=step, t=kinds: slope(t[k], 100 * s + 10 * r + k))
        if comm.size == 1:
            theirs = {i: [a.ravel() for a in leaves(s)] for i, s in pair.alone.states.items()}
            ours = {i: [a.ravel() for a in leaves(s)] for i, s in pair.sharded.states.items()}
            assert frozen(ours) == frozen(theirs), case
        if comm.size == 1 or case.name not in NORMS:
            assert pair.same(), case
        else:
            pair.close(rtol=2e-3, atol=1e-5)
        ours, theirs = pair.sharded.optimizer, pair.alone.optimizer
        assert dict(ours._index_update_count) == dict(theirs._index_update_count)
        assert ours.num_update == theirs.num_update
