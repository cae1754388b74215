"""Attacks: damaged checkpoints and odd sequences of calls, run in a process of their own.

As a program it takes the kind of the attack, the first seed, the number of cases, and "all" to
attack every optimizer. It prints the seed before each case and what it found after it, so that the
parent knows which case killed it. :func:`attack` is that parent.
"""

import copy
import io
import json
import os
import signal
import subprocess
import sys
import traceback
import zlib
from collections import Counter
from contextlib import suppress

import numpy as np

from helpers.paths import TESTS
from helpers.tensor_lists import frozen

SENTINEL = 3e4
"""What surrounds the arrays of a call; no number of an update comes near it."""
MARGIN = 300
"""Elements on either side."""
SECONDS = 120
"""Time for one case, which may compile."""
MEMORY = 3 * 2**30
"""Bytes that a child may map beyond those at its start."""
REFUSED = (TypeError, ValueError)

FEW = [
    ("sgd", {"momentum": 0.9}),
    ("adam", {}),
    ("lbsgd", {"momentum": 0.9, "batch_scale": 3}),
    ("adamw", {"sparse_decay": "catch_up", "wd": 0.1}),
]
"""Optimizers of the short attack."""

MORE = [
    ("lbsgd", {"batch_scale": 4, "warmup_epochs": 0}),
    ("nadam", {}),
    ("adamw", {"sparse_decay": "dense", "wd": 0.1}),
    ("adagrad", {"sparse_decay": "catch_up", "wd": 0.1}),
    ("lion", {"sparse_decay": "catch_up", "wd": 0.1}),
    ("sgd", {"momentum": 0.9, "multi_precision": True}),
    ("adam", {"multi_precision": True}),
    ("adam", {"multi_precision": True, "master": "split"}),
    ("sgd", {"rounding": "stochastic"}),
    ("adam", {"state_dtype": "bfloat16"}),
    ("sgd", {"clip_gradient": 0.5, "wd": 0.1}),
]


def configurations(every):
    """Names and arguments of the optimizers that are attacked."""
    if not every:
        return FEW
    from helpers.cases import CASES

    return [*FEW, *MORE, *((case.name, case.kwargs) for case in CASES if case.name != "ccsgd")]


# Arrays with guards


class Guarded:
    """An array in the middle of a block of sentinels, in one of many layouts."""

    def __init__(self, rng, values, layout):
        values = np.asarray(values)
        shape = values.shape
        filler = SENTINEL if values.dtype.itemsize > 1 else 1
        self.block = np.full(2 * MARGIN + 2 * values.size + 8, filler, values.dtype)
        inner = self.block[MARGIN : MARGIN + values.size]
        if layout == "strided":
            self.array = self.block[MARGIN : MARGIN + 2 * values.size : 2].reshape(shape)
        elif layout == "negative":
            self.array = inner[::-1].reshape(shape)
        elif layout == "F":
            self.array = inner.reshape(shape[::-1]).T
        elif layout == "unaligned":
            raw = self.block.view(np.uint8)
            start = MARGIN * values.itemsize + 1
            self.array = raw[start : start + values.nbytes].view(values.dtype).reshape(shape)
        else:
            self.array = inner.reshape(shape)
        self.array[...] = values
        if layout == "readonly":
            self.array.flags.writeable = False
        self.mask = np.ones(self.block.nbytes, bool)
        writeable, self.array.flags.writeable = self.array.flags.writeable, True
        for byte in (b"\0", b"\xff"):  # what stays under both is outside
            self.array[...] = np.frombuffer(byte * values.itemsize, values.dtype)[0]
            self.mask &= self.block.view(np.uint8) == np.full_like(self.block, filler).view(
                np.uint8
            )
        self.array[...] = values
        self.array.flags.writeable = writeable
        self.outside = self.block.view(np.uint8)[self.mask]

    def intact(self):
        """Whether nothing around the array has changed."""
        return np.array_equal(self.block.view(np.uint8)[self.mask], self.outside)


def state_of(updater):
    """Bits of all that an updater keeps."""
    made = updater.optimizer
    return frozen((type(made).__name__, made.__getstate__(), updater.states))


def foreign(value):
    """Whether a number near the sentinel has come into nested arrays."""
    if isinstance(value, np.ndarray):
        if value.dtype.kind not in "fV" or not value.size:
            return False
        with np.errstate(all="ignore"):
            exact = np.abs(value.astype(np.float64))
        return bool((exact > SENTINEL / 10).any())
    if isinstance(value, dict):
        return any(map(foreign, value.values()))
    return isinstance(value, (tuple, list)) and any(map(foreign, value))


# Attacks on checkpoints

SHAPE = (5, 3)


def rows(rng, shape, dtype):
    """Row-sparse gradient as a pair."""
    height = shape[0]
    listed = np.sort(rng.choice(height, rng.integers(0, height + 1), replace=False))
    return rng.uniform(-1, 1, (len(listed), *shape[1:])).astype(dtype), listed


class Run:
    """An updater of one configuration, and steps for it."""

    def __init__(self, configuration, seed):
        from fastopt import optimizer

        name, kwargs = configuration
        self.name, self.kwargs = name, {"learning_rate": 0.01, **kwargs}
        self.rng = np.random.default_rng(seed)
        self.dtype = np.float16 if kwargs.get("multi_precision") else np.float32
        if kwargs.get("master") == "split":
            import ml_dtypes

            self.dtype = ml_dtypes.bfloat16
        self.sparse = "sparse_decay" in kwargs or self.rng.random() < 0.3
        self.updater = optimizer.get_updater(self.make())
        self.weights = {index: np.ones(SHAPE, self.dtype) for index in (0, "a")}
        self.guards = []

    def make(self):
        from fastopt import lr_scheduler, optimizer

        kwargs = dict(self.kwargs)
        if self.rng.random() < 0.3:
            kwargs["lr_scheduler"] = lr_scheduler.FactorScheduler(2, 0.5, base_lr=0.01)
        if self.rng.random() < 0.3:
            kwargs["param_idx2name"] = {0: "a_weight", 1: "b_bias"}
        return optimizer.create(self.name, **kwargs)

    def guard(self):
        """Put guards around all arrays that the updater keeps."""
        made = vars(self.updater.optimizer)
        self.updater.states = self.guarded(self.updater.states)
        for name in {"row_decay", "cumgrads", "masters_given"} & made.keys():
            made[name] = self.guarded(made[name])

    def guarded(self, value):
        if isinstance(value, np.ndarray) and value.dtype.isnative:
            self.guards.append(Guarded(self.rng, value, "F" if value.flags.fnc else "C"))
            return self.guards[-1].array
        if isinstance(value, dict):
            return {key: self.guarded(part) for key, part in value.items()}
        if isinstance(value, (tuple, list)):
            return type(value)(map(self.guarded, value))
        return value

    def steps(self, count, guarded=False):
        """Take steps; return what was found to be wrong."""
        for _ in range(count):
            for index, weight in self.weights.items():
                grad = self.rng.uniform(-1, 1, SHAPE).astype(self.dtype)
                if self.sparse:
                    grad = rows(self.rng, SHAPE, self.dtype)
                if not guarded:
                    self.updater(index, grad, weight)
                    continue
                told = self.guarded_step(index, grad, weight)
                if told:
                    return told
        return None

    def guarded_step(self, index, grad, weight):
        block = Guarded(self.rng, weight, "C")
        blocks = [block]
        if not isinstance(grad, tuple):
            blocks.append(Guarded(self.rng, grad, "C"))
            grad = blocks[1].array
        before = state_of(self.updater), frozen(block.array)
        try:
            self.updater(index, grad, block.array)
        except REFUSED:
            if (state_of(self.updater), frozen(block.array)) != before:
                return "a refused step changed something"
        except Exception as error:
            return f"a step raised {error!r}"
        if not all(each.intact() for each in [*blocks, *self.guards]):
            return "a step wrote outside an array"
        sums = vars(self.updater.optimizer).get("cumgrads", {})
        if foreign({k: v["cum_grad"] for k, v in sums.items() if v["num_cums"] > 1}):
            return "a sum has numbers from elsewhere"
        return None


ODD = (
    *(None, True, False, 0, 1, -1, 2, 2**31, 2**62, 2**63, 2**64, -(2**63), 10**30, 0.5, 1.5),
    *(-0.0, 1e-320, 1e308, float("nan"), float("inf"), -float("inf"), "", "x", "\ud800", "1"),
    *((), [], {}, (0,), [1], {0: 1}, {"a": None}),
)


def odd(rng):
    """A value that does not belong where it will be."""
    if rng.random() < 0.6:
        return copy.deepcopy(ODD[rng.integers(len(ODD))])
    dtype = str(rng.choice(["f8", "f4", "f2", "i8", "i4", "i1", "u2", "?", "c8"]))
    shapes = [(), (0,), (1,), (5,), (6,), (4,), (5, 0), (0, 3), (5, 3), (3, 5), (5, 1), (500, 3)]
    made = np.ones(shapes[rng.integers(len(shapes))], dtype)
    return made[..., ::2] if made.ndim and rng.random() < 0.1 else made


def nodes(tree, path=()):
    """Paths of all parts of a nested value."""
    yield path
    items = tree.items() if isinstance(tree, dict) else ()
    if isinstance(tree, (list, tuple)):
        items = enumerate(tree)
    for key, part in items:
        yield from nodes(part, (*path, key))


def part(tree, path):
    """What is at a path."""
    for key in path:
        tree = tree[key]
    return tree


def changed(tree, path, change):
    """A copy in which `change` was applied to the container at `path`, with the last key."""
    if len(path) == 1:
        made = copy.copy(tree) if isinstance(tree, (dict, list)) else list(tree)
        change(made, path[0])
    else:
        made = copy.copy(tree) if isinstance(tree, (dict, list)) else list(tree)
        made[path[0]] = changed(tree[path[0]], path[1:], change)
    return tuple(made) if isinstance(tree, tuple) else made


def mutated(rng, tree, values=odd):
    """A nested value with a few random changes."""
    for _ in range(rng.integers(1, 3)):
        paths = [path for path in nodes(tree) if path]
        if rng.random() < 0.3:  # what kernels read and write
            paths = [path for path in paths if isinstance(part(tree, path), np.ndarray)] or paths
        if not paths:
            return values(rng)
        path = paths[rng.integers(len(paths))]
        kind = rng.integers(8)

        def change(container, key, kind=kind):
            if kind == 0:
                del container[key]
            elif kind == 1 and isinstance(container, dict):
                container[values(rng) if rng.random() < 0.2 else "extra"] = container[key]
            elif kind == 2 and isinstance(container[key], np.ndarray):
                array = container[key]
                container[key] = [
                    lambda: array[:-1],
                    lambda: np.concatenate([array, array]),
                    lambda: array.astype(rng.choice(["f8", "f4", "i8", "i1"])),
                    lambda: array.astype(array.dtype.newbyteorder()),
                    lambda: array.T,
                    lambda: np.full_like(array, rng.choice([0, 1, 2])),
                    lambda: np.broadcast_to(array[..., :1], array.shape),
                ][rng.integers(7)]()
            elif kind > 3 and type(container[key]) in (int, float):
                container[key] = type(container[key])(
                    container[key] * rng.choice([0, 1, 2, 0.5, -1, 100]) + rng.choice([0, 1])
                )
            elif kind > 5 and isinstance(container[key], (dict, list, tuple)):
                pass
            else:
                container[key] = values(rng)

        with suppress(TypeError, IndexError, ValueError, OverflowError):  # it cannot be so odd
            tree = changed(tree, path, change)
    return tree


def flipped(rng, data):
    """Bytes with some bits, or their length, changed."""
    data = bytearray(data)
    for _ in range(rng.choice([1, 2, 8])):
        data[rng.integers(len(data))] ^= 1 << rng.integers(8)
    kind = rng.integers(6)
    if kind == 0:
        del data[rng.integers(len(data)) :]
    elif kind == 1:
        place = rng.integers(len(data))
        data[place:place] = bytes(rng.integers(0, 256, rng.integers(1, 20), np.uint8))
    elif kind == 2:
        place = rng.integers(len(data))
        del data[place : place + rng.integers(1, 20)]
    return bytes(data)


def plain(rng):
    """An odd value for JSON."""
    value = odd(rng)
    return str(value.dtype) if isinstance(value, np.ndarray) else value


def rewritten(rng, data):
    """A file whose JSON was changed, with the right checksums."""
    end = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:end])
    document = json.loads(header["__metadata__"]["fastopt"])
    if rng.random() < 0.8:
        document = mutated(rng, document, plain)
    else:
        header = mutated(rng, header, plain)
    try:
        text = json.dumps(document)
        if isinstance(header.get("__metadata__"), dict):
            header["__metadata__"] |= {"fastopt": text, "crc32": str(zlib.crc32(text.encode()))}
        head = json.dumps(header).encode()
    except (TypeError, ValueError, AttributeError, RecursionError):
        return flipped(rng, data)
    return len(head).to_bytes(8, "little") + head + data[end:]


def attacks(run):
    """Functions of an updater that load something damaged, by kind."""
    from fastopt.checkpoint import dumps, from_torch_state_dict, to_torch_state_dict
    from fastopt.checkpoint.format.tree import read
    from fastopt.checkpoint.restore.describe import describe

    rng, old = run.rng, run.updater
    saved = dumps(describe(old))
    states = old.get_states(dump_optimizer=bool(rng.integers(2)))

    def load(updater, data):
        from fastopt.checkpoint.restore.restore import restore

        restore(updater, read(io.BytesIO(data), updater.optimizer), strict=bool(rng.integers(2)))

    made = {
        "bits": lambda updater: load(updater, flipped(rng, saved)),
        "json": lambda updater: load(updater, rewritten(rng, saved)),
        "semantic": lambda updater: load(updater, dumps(mutated(rng, old.states_dict()))),
        "dict": lambda updater: updater.load_states_dict(mutated(rng, old.states_dict())),
        "states, bits": lambda updater: updater.set_states(flipped(rng, states)),
        "states, json": lambda updater: updater.set_states(rewritten(rng, states)),
        "mxnet": lambda updater: updater.load_mxnet(of_mxnet(run)),
    }
    with suppress(ValueError):
        torch = to_torch_state_dict(old, list(run.weights))
        made["torch"] = lambda updater: from_torch_state_dict(
            updater, mutated(rng, torch), list(run.weights)
        )
    return made


def of_mxnet(run):
    """Damaged file of MXNet with the states of a run."""
    from fastopt._engine.validate import leaves
    from helpers.mxnet_pickles import dense, pickled, row_sparse

    rng = run.rng

    def blob(array):
        if array.dtype.name not in ("float32", "float64", "float16"):
            array = array.astype(np.float32)
        if rng.random() < 0.3 and array.ndim:
            return row_sparse(array.shape, range(len(array)), array)
        return dense(array)

    states = {}
    for index, state in run.updater.states.items():
        blobs = tuple(map(blob, leaves(state)))
        states[index] = blobs[0] if len(blobs) == 1 else blobs or None
    attributes = run.updater.optimizer.__getstate__()
    simple = (bool, int, float, str, type(None))
    kept = {k: v for k, v in attributes.items() if isinstance(v, simple)}
    kept |= {"_index_update_count": dict(attributes["_index_update_count"])}
    klass = {"class": type(run.updater.optimizer).__name__}
    try:
        data = pickled(states, klass | mutated(rng, kept, plain) if rng.integers(2) else None)
    except Exception:  # it cannot be pickled so
        data = pickled(states)
    return flipped(rng, data) if rng.random() < 0.7 else data


def checkpoint_case(seed, configuration):
    """Load something damaged and go on; return the outcome and a finding, if any."""
    from fastopt.checkpoint import CheckpointError, dumps
    from fastopt.checkpoint.restore.describe import describe

    run = Run(configuration, seed)
    run.steps(run.rng.integers(1, 4))
    kinds = attacks(run)
    kind = sorted(kinds)[run.rng.integers(len(kinds))]
    target = Run(configuration, seed + 1)
    target.sparse = run.sparse
    if run.rng.integers(2):
        target.steps(1)
    before = state_of(target.updater)
    try:
        kinds[kind](target.updater)
    except CheckpointError:
        told = None if state_of(target.updater) == before else "a refused load changed something"
        return f"{kind}: refused", told
    except TypeError as error:
        if traceback.extract_tb(error.__traceback__)[-1].name in ("_pack", "_key", "_dtype"):
            return f"{kind}: cannot be written", None
        return f"{kind}: raised", f"a load raised {error!r}"
    except RecursionError:
        return f"{kind}: cannot be written", None
    except Exception as error:
        return f"{kind}: raised", f"a load raised {error!r}"
    target.guard()
    told = target.steps(3, guarded=True)
    try:
        dumps(describe(target.updater))
    except Exception as error:
        told = told or f"a save raised {error!r}"
    return f"{kind}: loaded", told


# Attacks by sequences of calls

SHAPES = [(), (0,), (1,), (4,), (7,), (4, 5), (5, 4), (12, 5), (2, 5), (20,), (4, 1), (0, 5)]
LAYOUTS = ["C", "C", "C", "F", "strided", "negative", "unaligned", "readonly"]


def dtypes(every):
    """Types of weights."""
    if not every:
        return [np.float32, np.float32, np.float32, np.float64, np.int32]
    made = [np.float32, np.float32, np.float32, np.float64, np.float16, np.int32, ">f4"]
    with suppress(ImportError):
        import ml_dtypes

        made.append(ml_dtypes.bfloat16)
    return made


class Calls:
    """Random public calls under few indices, with arrays that have guards."""

    def __init__(self, seed, configuration, every):
        from fastopt import optimizer

        name, kwargs = configuration
        self.rng = np.random.default_rng(seed)
        self.updater = optimizer.get_updater(optimizer.create(name, learning_rate=0.01, **kwargs))
        self.every = every
        self.weights = {}

    def pick(self, choices):
        return choices[self.rng.integers(len(choices))]

    def layout(self):
        return self.pick(LAYOUTS) if self.every else self.pick(["C", "C", "C", "F", "strided"])

    def array(self, shape, dtype, low=-1.0):
        values = self.rng.uniform(low, 1, shape)
        return Guarded(self.rng, np.asarray(values).astype(dtype), self.layout())

    def weight(self, index):
        """The last weight of an index, or another one."""
        if index not in self.weights or self.rng.random() < 0.4:
            self.weights[index] = self.array(self.pick(SHAPES), self.pick(dtypes(self.every)), 0.5)
        return self.weights[index]

    def grad(self, weight):
        """Gradient as an array or in a row-sparse form, and its blocks."""
        from fastopt import RowSparse

        rng, shape, dtype = self.rng, weight.shape, weight.dtype
        if rng.random() < 0.1:
            shape = self.pick(SHAPES)
        if rng.random() < 0.1:
            dtype = self.pick(dtypes(self.every))
        if not shape or rng.random() < 0.6:
            block = self.array(shape, dtype)
            return block.array, [block]
        height = max(shape[0], 1)
        listed = rng.integers(0, height, rng.integers(0, height + 2))
        if rng.random() < 0.7:
            listed = np.unique(listed)
        if rng.random() < 0.1:
            listed = listed + rng.integers(-2, 3)
        block = self.array((len(listed), *shape[1:]), dtype)
        if rng.random() < 0.5:
            return (block.array, listed), [block]
        return RowSparse(block.array, listed, shape), [block]

    def call(self):
        """One random call; return its blocks and the call."""
        rng, updater = self.rng, self.updater
        kind = rng.random()
        index = self.pick([0, 1, "a"])
        if kind < 0.04 and index in self.weights:
            weight = self.weights[index]
            return [weight], lambda: updater.flush(index, weight.array)
        if kind < 0.07:
            block = self.array(self.pick(SHAPES), np.float32)
            return [block], lambda: updater.set_master(index, block.array)
        if kind < 0.09:
            saved = updater.states_dict()
            return [], lambda: updater.load_states_dict(saved)
        if kind < 0.11:
            made = updater.optimizer
            name = self.pick(["momentum", "batch_scale", "lazy_update", "rescale_grad", "wd"])
            value = self.pick([0, 1, 2, True, False, 0.5])
            if name in vars(made):
                return [], lambda: setattr(made, name, value)
        if kind < 0.6:
            weight = self.weight(index)
            grad, blocks = self.grad(weight.array)
            return [weight, *blocks], lambda: updater(index, grad, weight.array)
        indices = [self.pick([0, 1, "a"]) for _ in range(rng.integers(1, 4))]
        weights = [self.weight(each) for each in indices]
        grads, blocks = [], list(weights)
        for weight in weights:
            grad, more = self.grad(weight.array)
            grads.append(grad)
            blocks += more
        arrays = [weight.array for weight in weights]
        return blocks, lambda: updater(indices, grads, arrays)

    def hidden(self):
        made = vars(self.updater.optimizer)
        sums = [each["cum_grad"] for each in made.get("cumgrads", {}).values()]
        return [self.updater.states, sums, *(pair[0] for pair in made["row_decay"].values())]


def calls_case(seed, configuration, every):
    """A sequence of calls; return the outcome and a finding, if any."""
    calls = Calls(seed, configuration, every)
    taken = refused = 0
    for _ in range(calls.rng.integers(4, 10)):
        try:
            blocks, call = calls.call()
        except REFUSED:  # a RowSparse that cannot be
            continue
        known = [*calls.weights.values(), *blocks]
        before = state_of(calls.updater), [frozen(block.array) for block in known]
        try:
            call()
            taken += 1
        except REFUSED:
            refused += 1
            if (state_of(calls.updater), [frozen(block.array) for block in known]) != before:
                return "calls", "a refused call changed something"
        except Exception as error:
            return "calls", f"a call raised {error!r}"
        if not all(block.intact() for block in known):
            return "calls", "a call wrote outside an array"
        arrays = [block.array for block in calls.weights.values()]
        if foreign([*calls.hidden(), *arrays]):
            return "calls", "numbers from outside an array came in"
    return "calls", None


# The child and its parent


def main(kind, first, count, every):
    """Run cases and print what they come to, one line before and one after each."""
    import resource
    import warnings

    warnings.simplefilter("ignore")
    np.seterr(all="ignore")
    import fastopt  # noqa: F401

    with open("/proc/self/statm") as file:
        mapped = int(file.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (mapped + MEMORY, mapped + MEMORY))
    known = configurations(every)
    for seed in range(first, first + count):
        configuration = known[seed % len(known)]
        print(json.dumps([seed, str(configuration)]), flush=True)
        signal.alarm(SECONDS)
        if kind == "checkpoints":
            outcome, told = checkpoint_case(seed, configuration)
        else:
            outcome, told = calls_case(seed, configuration, every)
        signal.alarm(0)
        print(json.dumps([outcome, told]), flush=True)


def attack(kind, first, count, every=False):
    """Run cases in child processes; return outcomes, and findings as (seed, case, what)."""
    outcomes, findings = Counter(), []
    seed, end = first, first + count
    paths = filter(None, [str(TESTS), os.environ.get("PYTHONPATH")])
    environment = {**os.environ, "MALLOC_PERTURB_": "165", "PYTHONPATH": os.pathsep.join(paths)}
    command = [sys.executable, "-m", "helpers.fuzzing", kind]
    while seed < end:
        done = subprocess.run(
            [*command, str(seed), str(end - seed), *["all"] * every],
            capture_output=True,
            text=True,
            env=environment,
            check=False,
        )
        lines = [json.loads(line) for line in done.stdout.splitlines()]
        case = [seed, "start"]
        for case, result in zip(lines[::2], lines[1::2], strict=False):
            outcomes[result[0]] += 1
            if result[1]:
                findings.append((*case, result[1]))
        if not done.returncode:
            break
        case = lines[-1] if len(lines) % 2 else case
        words = done.stderr.strip().splitlines()[-1:] or [""]
        name = words[0]
        if done.returncode < 0:
            name = f"signal {signal.Signals(-done.returncode).name}: {name}"
            outcomes["signals"] += 1
        findings.append((*case, f"the process ended: {name}"))
        seed = case[0] + 1
    return outcomes, findings


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4:] == ["all"])
