"""Attacks: damaged checkpoints and steps after them, run in a process of their own.

As a program it takes the first seed, the number of cases, and "all" to attack every optimizer. It
prints a line after each case, so that its parent, :func:`attack`, knows which one killed it.
"""

import copy
import io
import json
import os
import signal
import sys
import warnings
import zlib
from collections import Counter
from contextlib import suppress

import numpy as np

from fastopt import Updater, lr_scheduler
from fastopt._engine.validate import leaves
from fastopt.checkpoint import CheckpointError, dumps, from_torch_state_dict, to_torch_state_dict
from fastopt.checkpoint.format.tree import read
from fastopt.checkpoint.restore.describe import describe
from fastopt.checkpoint.restore.restore import restore
from helpers import processes
from helpers.cases import SUMS
from helpers.mxnet_pickles import dense, pickled, row_sparse
from helpers.paths import TESTS
from helpers.settings import TABLE
from helpers.tensor_lists import dtype_of, frozen
from helpers.trees import parts

SENTINEL = 3e4
"""What surrounds the arrays of a call; no number of an update comes near it."""
MARGIN = 300
"""Elements on either side."""
SECONDS = 120
"""Time for one case, which may compile."""
MEMORY = 3 * 2**30
"""Bytes that a child may map beyond those at its start."""

FEW = "sgd-momentum=0.9", "adam", SUMS, "deferred decay"
"""Settings of the short attack."""
EVERY = [name for name, each in TABLE.items() if each.is_elementwise and not each.settings()]


class Guarded:
    """An array in the middle of a block of sentinels."""

    def __init__(self, values):
        filler = SENTINEL if values.itemsize > 1 else 1
        self.block = np.full(2 * MARGIN + values.size, filler, values.dtype)
        inner = self.block[MARGIN : MARGIN + values.size]
        self.array = inner.reshape(values.shape, order="F" if values.flags.fnc else "C")
        self.array[...] = values
        self.edges = self._edges()

    def _edges(self):
        return self.block[:MARGIN].tobytes() + self.block[-MARGIN:].tobytes()

    def intact(self):
        """Whether nothing around the array has changed."""
        return self._edges() == self.edges


def state_of(updater):
    """Bits of all that an updater keeps."""
    made = updater.optimizer
    return frozen((type(made).__name__, made.__getstate__(), updater.states))


def check(call, updater, blocks):
    """What is wrong with a call that must be done or refused, if anything."""
    before = state_of(updater), [frozen(block.array) for block in blocks]
    try:
        call()
    except (TypeError, ValueError):
        same = (state_of(updater), [frozen(block.array) for block in blocks]) == before
        return None if same else "a refused call changed something"
    except Exception as error:
        return f"a call raised {error!r}"
    return None if all(block.intact() for block in blocks) else "a call wrote outside an array"


SHAPE = (5, 3)


class Run:
    """An updater of one setting, and steps for it."""

    def __init__(self, name, seed):
        setting, self.rng = TABLE[name], np.random.default_rng(seed)
        made, self.dtype = setting.make(), dtype_of(setting.dtype)
        self.sparse = setting.rows or self.rng.random() < 0.3
        if self.rng.random() < 0.3:
            made.lr_scheduler = lr_scheduler.FactorScheduler(2, 0.5, base_lr=0.01)
        if self.rng.random() < 0.3:
            made.idx2name = {0: "a_weight", 1: "b_bias"}
        self.updater = Updater(made)
        self.weights = {index: np.ones(SHAPE, self.dtype) for index in (0, "a")}
        self.guards = []

    def guard(self):
        """Put guards around all arrays that the updater keeps."""
        made = vars(self.updater.optimizer)
        self.updater.states = self.guarded(self.updater.states)
        for name in {"row_decay", "cumgrads", "masters_given"} & made.keys():
            made[name] = self.guarded(made[name])

    def guarded(self, value):
        if isinstance(value, np.ndarray) and value.dtype.isnative:
            self.guards.append(Guarded(value))
            return self.guards[-1].array
        if isinstance(value, dict):
            return {key: self.guarded(part) for key, part in value.items()}
        return type(value)(map(self.guarded, value)) if isinstance(value, (tuple, list)) else value

    def steps(self, count):
        """Take steps; return what was found to be wrong."""
        for index in [*self.weights] * count:
            block = Guarded(self.weights[index])
            grad = self.rng.uniform(-1, 1, SHAPE).astype(self.dtype)
            if self.sparse:
                rows = np.flatnonzero(self.rng.random(len(grad)) < 0.5)
                grad = grad[rows], rows
            call = lambda: self.updater(index, grad, block.array)  # noqa: B023, E731
            if wrong := check(call, self.updater, [block, *self.guards]):
                return wrong
            for each in vars(self.updater.optimizer).get("cumgrads", {}).values():
                if (
                    each["num_cums"] > 1
                    and (abs(leaves(each["cum_grad"])[0]) > SENTINEL / 10).any()
                ):
                    return "a sum has numbers from elsewhere"
        return None


ODD = (
    *(None, True, False, 0, 1, -1, 2, 2**31, 2**62, 2**63, 2**64, -(2**63), 10**30, 0.5, 1.5),
    *(-0.0, 1e-320, 1e308, float("nan"), float("inf"), -float("inf"), "", "x", "\ud800", "1"),
    *((), [], {}, (0,), [1], {0: 1}, {"a": None}),
)
DTYPES = "f8", "f4", "f2", "i8", "i4", "i1", "u2", "?", "c8"
SHAPES = [(), (0,), (1,), (4,), (7,), (4, 5), (5, 4), (12, 5), (2, 5), (20,), (4, 1), (0, 5)]
OF_ARRAYS = (
    lambda array: array[:-1],
    lambda array: np.concatenate([array, array]),
    *(lambda array, dtype=dtype: array.astype(dtype) for dtype in ("f8", "f4", "i8", "i1")),
    lambda array: array.astype(array.dtype.newbyteorder()),
    lambda array: array.T,
    *(lambda array, value=value: np.full_like(array, value) for value in range(3)),
    lambda array: np.broadcast_to(array[..., :1], array.shape),
)
"""What may become of an array."""


def pick(rng, choices):
    return choices[rng.integers(len(choices))]


def odd(rng):
    """A value that does not belong where it will be."""
    if rng.random() < 0.6:
        return copy.deepcopy(pick(rng, ODD))
    return np.ones(pick(rng, [*SHAPES, SHAPE, SHAPE[::-1], (500, 3)]), pick(rng, DTYPES))


def changed(tree, path, change):
    """A copy in which `change` was applied to the container of the last key."""
    key, *rest = path
    made = copy.copy(tree) if isinstance(tree, (dict, list)) else list(tree)
    if rest:
        made[key] = changed(tree[key], rest, change)
    else:
        change(made, key)
    return tuple(made) if isinstance(tree, tuple) else made


def mutated(rng, tree):
    """A nested value with a few random changes."""

    def change(container, key):
        kind, value = rng.integers(8), container[key]
        if kind == 0:
            del container[key]
        elif kind == 1 and isinstance(container, dict):
            container[odd(rng) if rng.random() < 0.2 else "extra"] = value
        elif kind < 5 and isinstance(value, np.ndarray):
            container[key] = pick(rng, OF_ARRAYS)(value)
        elif kind < 5 and type(value) in (int, float):
            factor, more = rng.choice([0, 1, 2, 0.5, -1, 100]), rng.choice([0, 1])
            container[key] = type(value)(value * factor + more)
        else:
            container[key] = odd(rng)

    for _ in range(rng.integers(1, 3)):
        every = dict(parts(tree))
        if not every.pop(()):
            return odd(rng)
        arrays = [path for path, part in every.items() if isinstance(part, np.ndarray)]
        chosen = arrays if arrays and rng.random() < 0.3 else [*every]
        with suppress(TypeError, IndexError, ValueError, OverflowError):  # it cannot be so odd
            tree = changed(tree, pick(rng, chosen), change)
    return tree


def flipped(rng, data):
    """Bytes with some bits, or their length, changed."""
    data = bytearray(data)
    for _ in range(rng.choice([1, 2, 8])):
        data[rng.integers(len(data))] ^= 1 << rng.integers(8)
    start, count = rng.integers(len(data)), rng.integers(1, 20)
    changes = [(None, b""), (start, rng.bytes(count)), (start + count, b""), *[(start, b"")] * 3]
    end, new = pick(rng, changes)
    data[start:end] = new
    return bytes(data)


def rewritten(rng, data):
    """A file whose JSON was changed, with the right checksums."""
    end = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:end])
    document = json.loads(header["__metadata__"]["fastopt"])
    if rng.random() < 0.8:
        document = mutated(rng, document)
    else:
        header = mutated(rng, header)
    text = json.dumps(document, default=str)
    if isinstance(header, dict) and isinstance(header.get("__metadata__"), dict):
        header["__metadata__"] |= {"fastopt": text, "crc32": str(zlib.crc32(text.encode()))}
    head = json.dumps(header, default=str).encode()
    return len(head).to_bytes(8, "little") + head + data[end:]


def of_mxnet(run):
    """Damaged file of MXNet with the states of a run."""
    rng, made, states = run.rng, run.updater.optimizer, {}
    for index, state in run.updater.states.items():
        exact = [array.astype(np.float32) for array in leaves(state)]
        blobs = tuple(row_sparse(a.shape, range(len(a)), a) if a.ndim else dense(a) for a in exact)
        blobs = blobs if rng.random() < 0.3 else tuple(map(dense, exact))
        states[index] = blobs[0] if len(blobs) == 1 else blobs or None
    simple = (bool, int, float, str, type(None))
    kept = {name: value for name, value in vars(made).items() if isinstance(value, simple)}
    kept |= {"_index_update_count": dict(made._index_update_count)}
    attributes = {"class": type(made).__name__} | mutated(rng, kept)
    data = pickled(states, attributes if rng.integers(2) else None)
    return flipped(rng, data) if rng.random() < 0.7 else data


def attacks(run):
    """By kind: a function that makes something damaged, and one of an updater that loads it."""
    rng, old = run.rng, run.updater
    saved, states = dumps(describe(old)), old.get_states(dump_optimizer=bool(rng.integers(2)))
    indices, strict = [*run.weights], bool(rng.integers(2))

    def load(updater, data):
        restore(updater, read(io.BytesIO(data), updater.optimizer), strict=strict)

    return {
        "bits": (lambda: flipped(rng, saved), load),
        "json": (lambda: rewritten(rng, saved), load),
        "semantic": (lambda: dumps(mutated(rng, old.states_dict())), load),
        "dict": (lambda: mutated(rng, old.states_dict()), Updater.load_states_dict),
        "states, bits": (lambda: flipped(rng, states), Updater.set_states),
        "states, json": (lambda: rewritten(rng, states), Updater.set_states),
        "mxnet": (lambda: of_mxnet(run), Updater.load_mxnet),
        "torch": (
            lambda: mutated(rng, to_torch_state_dict(old, indices)),
            lambda updater, data: from_torch_state_dict(updater, data, indices),
        ),
    }


def attacked(seed, setting):
    """Load something damaged and go on; return the outcome and a finding, if any."""
    run, target = Run(setting, seed), Run(setting, seed + 1)
    run.steps(run.rng.integers(1, 4))
    kinds = attacks(run)
    kind = pick(run.rng, [*kinds])
    make, load = kinds[kind]
    try:
        data = make()
    except Exception:
        return f"{kind}: cannot be written", None
    target.sparse = run.sparse
    target.steps(run.rng.integers(2))
    before = state_of(target.updater)
    try:
        load(target.updater, data)
    except CheckpointError:
        same = state_of(target.updater) == before
        return f"{kind}: refused", None if same else "a refused load changed something"
    except Exception as error:
        return f"{kind}: raised", f"a load raised {error!r}"
    target.guard()
    wrong = target.steps(3)
    try:
        dumps(describe(target.updater))
    except Exception as error:
        wrong = wrong or f"a save raised {error!r}"
    return f"{kind}: loaded", wrong


def main(first, count, every):
    """Run cases and print what they come to."""
    import resource

    warnings.simplefilter("ignore")
    np.seterr(all="ignore")
    with open("/proc/self/statm") as file:
        mapped = int(file.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (mapped + MEMORY, mapped + MEMORY))
    known = EVERY if every else FEW
    for seed in range(first, first + count):
        setting = known[seed % len(known)]
        signal.alarm(SECONDS)
        result = attacked(seed, setting)
        signal.alarm(0)
        print(json.dumps([setting, *result]), flush=True)


def attack(first, count, every=False):
    """Run cases in child processes; return outcomes, and findings as (seed, setting, what)."""
    outcomes, findings, seed, end = Counter(), [], first, first + count
    paths = os.pathsep.join(filter(None, [str(TESTS), os.environ.get("PYTHONPATH")]))
    environment = {"MALLOC_PERTURB_": "165", "PYTHONPATH": paths}
    while seed < end:
        command = sys.executable, "-m", "helpers.fuzzing", seed, end - seed, *["all"] * every
        done = processes.run(*command, status=None, timeout=None, **environment)
        for setting, outcome, wrong in map(json.loads, done.stdout.splitlines()):
            outcomes[outcome] += 1
            findings += [(seed, setting, wrong)] if wrong else []
            seed += 1
        if done.returncode:
            words = done.stderr.strip().splitlines()[-1:]
            outcomes["signals"] += done.returncode < 0
            findings.append((seed, f"the process ended with {done.returncode}: {words}"))
            seed += 1
    return outcomes, findings


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3:] == ["all"])
