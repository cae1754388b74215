"""Updates with gradients that nobody keeps, in a process that overwrites freed memory."""

from itertools import product

import numpy as np

import fastopt
from helpers.cases import CHOICES
from helpers.plans import LAYOUTS

STEPS = 4
SETTINGS = {
    "plain": {},
    "accumulate": {"accumulate": 2},
    "clip_global_norm": {"clip_global_norm": 0.5},
    "clip_adaptive": {"clip_adaptive": 0.1},
    "average": {"average": fastopt.EMA(decay=0.5)},
    "groups": {"groups": {"^[03]$": {"wd_mult": 0.5, "lr": 0.02}}},
    "int8": {},
}


def rows(grad, indices=np.int32):
    """The same numbers as a row-sparse gradient, the last row first."""
    return grad[::-1], np.arange(len(grad), dtype=indices)[::-1]


def plain_rows(grad):
    """The same row-sparse gradient, in arrays that need no conversion."""
    return tuple(map(np.ascontiguousarray, rows(grad, np.int64)))


spaced, moved = LAYOUTS["strided"], LAYOUTS["unaligned"]
FORMS = {
    "scalar": ((), np.sum, np.asarray),
    "spaced": ((3, 2), spaced, np.asarray),
    "by columns": ((3, 2), np.asfortranarray, np.asarray),
    "unaligned": ((3, 2), moved, np.asarray),
    "rows": ((3, 2), rows, plain_rows),
}
"""Shape of the weights; a form of gradients that an update converts, and one that it does not."""


def churn():
    """Fill NumPy's cache of small blocks, so that what the update frees is freed at once."""
    for size in range(1, 257):
        blocks = [np.full(size, 0xA5, np.uint8) for _ in range(8)]
        del blocks


def outcome(case, count, setting, shape, form, spread):
    """All bits after some steps; `form` makes the gradients of each."""
    special = {"state_dtype": "int8", "state_min_size": 1} if setting == "int8" else {}
    made = case.make(wd=case.wd, **special)
    updater = fastopt.Updater(made, **SETTINGS[setting])
    weights = [spread(np.full(shape, 1 + k, np.float32)) for k in range(count)]
    indices = list(map(str, range(count)))
    for step in range(STEPS):
        rng = np.random.default_rng(step)
        grads = [form(rng.normal(size=shape).astype(np.float32)) for _ in range(count)]
        churn()
        updater(indices, grads, weights)
    states = [updater.states.get(index) for index in indices]
    return repr((weights, states, updater.averages, made._index_update_count))


def ends(choice):
    """All bits after some steps of each case."""
    with np.printoptions(floatmode="unique", threshold=10**6):
        return {
            str(case): outcome(case, 2, "plain", (3, 2), np.asarray, np.asarray)
            for case in CHOICES[choice]
        }


def faults(choice):
    """Combinations whose result depends on who keeps the gradients; and how many there are."""
    found, total = [], 0
    counts = (1, 2, 5) if choice == "every case" else (1, 2)
    for case, setting, name, count in product(CHOICES[choice], SETTINGS, FORMS, counts):
        shape, form, plain = FORMS[name]
        for spread in (np.asarray, spaced if shape else moved):
            kept = []

            def keep(grad, plain=plain, kept=kept):
                kept.append(plain(grad))
                return kept[-1]

            try:
                expected = outcome(case, count, setting, shape, keep, spread)
            except (TypeError, ValueError):  # a combination that is refused
                continue
            total += 1
            if outcome(case, count, setting, shape, form, spread) != expected:
                found.append((str(case), setting, name, count, spread is spaced))
    return found, total


def main(choice):
    """Print the combinations with another result, and whether there were any."""
    with np.printoptions(floatmode="unique", threshold=10**6):
        found, total = faults(choice)
    print(*found, total, sep="\n")
