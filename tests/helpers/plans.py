"""Plans of calls, which two updaters are given: in their forms, and one plain call at a time."""

import copy
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import strategies as st

from fastopt import RowSparse, lr_scheduler
from fastopt._kernels.device_memory import host
from helpers.cases import OF_STEPS
from helpers.resuming import WAYS, resumed
from helpers.tensor_lists import dtype_of, everything, frozen, one_by_one
from helpers.written_headers import read_in_python


class Labelled(np.ndarray):
    """An array of a class of its own."""


def unaligned(array):
    """The same numbers at an odd address."""
    memory = np.zeros(array.nbytes + 1, np.uint8)[1:].view(array.dtype).reshape(array.shape)
    memory[...] = array
    return memory


def in_fields(array):
    """The same numbers as a field of records of 6 or 9 bytes, so that strides are odd."""
    records = np.zeros(array.shape, [("x", array.dtype), ("y", "u1")])
    records["x"] = array
    return records["x"]


def read_only(array):
    array = array.copy()
    array.flags.writeable = False
    return array


LAYOUTS = {
    "plain": np.array,
    "Fortran order": np.asfortranarray,
    "strided": lambda array: np.repeat(array, 2, axis=-1)[..., ::2],
    "reversed": lambda array: np.array(array[..., ::-1], order="C")[..., ::-1],
    "padded": lambda array: np.pad(array, [*[(0, 0)] * (array.ndim - 1), (2, 1)])[..., 2:-1],
    "moved axes": lambda array: np.moveaxis(np.array(np.moveaxis(array, 0, -1), order="C"), -1, 0),
    "of a subclass": lambda array: array.copy().view(Labelled),
    "unaligned": unaligned,
    "in fields": in_fields,
}
IN_PYTHON = ("unaligned", "in fields")
"""Layouts that compiled code does not read."""
DENSE = {
    **{name: LAYOUTS[name] for name in LAYOUTS if name not in IN_PYTHON},
    "read-only": read_only,
    "float32": lambda array: array.astype(np.float32),
    "float64": lambda array: array.astype(np.float64),
    "float64, strided": lambda array: LAYOUTS["strided"](array.astype(np.float64)),
    "longdouble": lambda array: array.astype(np.longdouble),
    "big-endian": lambda array: array.astype(">f4"),
    "float16": lambda array: array.astype(np.float16),
    "bfloat16": lambda array: array.astype(dtype_of("bfloat16")),
}
"""Forms of a dense gradient whose numbers every dtype has."""


def by_batch(values, rows, shape):
    """Two sequences of rows."""
    half = len(rows) // 2
    return values.reshape(2, half, *shape[1:]), rows.reshape(2, half)


def backwards(array):
    return np.array(array[::-1], order="C")[::-1]


ROWS = {
    "rows": RowSparse,
    "pair": lambda values, rows, shape: (values, rows),
    "list of ints": lambda values, rows, shape: [values, rows.tolist()],
    "list of integers of NumPy": lambda values, rows, shape: (values, list(rows)),
    "batch": by_batch,
    "batch in Fortran order": lambda *of: tuple(map(np.asfortranarray, by_batch(*of))),
    "rows, strided": lambda values, rows, shape: (LAYOUTS["strided"](values), rows.repeat(2)[::2]),
    "rows, backwards": lambda values, rows, shape: RowSparse(
        backwards(values), backwards(rows), shape
    ),
    "rows in float64": lambda values, rows, shape: (values.astype(np.float64), rows),
    **{
        f"rows of {dtype}": lambda values, rows, shape, dtype=dtype: (values, rows.astype(dtype))
        for dtype in ("i1", "u1", "i2", "u2", "i4", "u4", "u8")
    },
}
"""Forms of a row-sparse gradient."""


def each(form, state):
    """A state whose arrays have another form."""
    if isinstance(state, (tuple, list)):
        return type(state)(each(form, part) for part in state)
    return form(state) if isinstance(state, np.ndarray) and state.ndim else state


def restate(form):
    """A change of the states of an updater to arrays of another form."""

    def change(world):
        for index, state in [*world.updater.states.items()]:
            world.updater.states[index] = form(state)

    return change


def replace(world):
    world.weights = {name: weight.copy() for name, weight in world.weights.items()}


def resume(way, world):
    if way == "get_states" and world.updater.loss_scaler is not None:
        return  # MXNet's bytes have no place for it
    with tempfile.TemporaryDirectory() as folder:
        world.updater = resumed(way, world.updater, world.setting.fresh(), Path(folder))
    leave_copies(world)


def copied(world):
    world.updater, world.weights = copy.deepcopy((world.updater, world.weights))
    leave_copies(world)


def averaged(world):
    names = [*world.updater.averages]
    if names:
        with world.updater.averaged(weights={name: world.weights[name] for name in names}):
            pass


def give_copies(world):
    """Strided copies in half precision, which every update writes too."""
    take_copies(world)
    for name, weight in world.weights.items():
        if weight.dtype == np.float32 and weight.ndim:
            world.copies[name] = LAYOUTS["strided"](weight.astype(np.float16))
            world.updater.set_copy(name, world.copies[name])


def take_copies(world):
    for name in world.copies:
        world.updater.set_copy(name, None)
    leave_copies(world)


def leave_copies(world):
    """No update writes them any more."""
    world.taken += world.copies.values()
    for rounded in world.taken:
        rounded[...] = 7
    world.copies = {}


ASIDE = {
    "nothing": lambda world: None,
    "copies of the weights": replace,
    "views of the weights": lambda world: world.weights.update(
        {name: weight[...] for name, weight in world.weights.items()}
    ),
    "the same states": restate(lambda state: state),
    "copies of the states": restate(partial(each, np.copy)),
    "states as lists": restate(lambda state: [*state] if isinstance(state, tuple) else state),
    "strided states": restate(partial(each, LAYOUTS["strided"])),
    "unaligned states": restate(partial(each, unaligned)),
    "a copy of the updater": copied,
    "averages, and back": averaged,
    "copies in half precision": give_copies,
    "no copies": take_copies,
    "arrays read in Python": lambda world: read_in_python(world.updater),
    **{f"resumed by {way}": partial(resume, way) for way in WAYS},
}
"""What may happen between two calls of one updater, and changes no number."""
LIGHTLY = ("nothing", "views of the weights", "the same states")
"""What of it needs no Python in the next call."""
AS_THEY_LIE = [name for name in ASIDE if not name.startswith(("strided", "unaligned"))]
"""What of it leaves arrays in C order."""


def assign(**attributes):
    def change(world):
        made = world.updater.optimizer
        fits = {"lazy_update": made.sparse_decay == "touched", "wd": made.wd > 0}
        for name, value in attributes.items():
            if hasattr(made, name) and fits.get(name, True):
                setattr(made, name, value)

    return change


def multiply(world):
    made, name = world.updater.optimizer, next(iter(world.weights))
    case = world.setting.case
    joint = case is not None and case.name in OF_STEPS  # whose multipliers are 0 or 1
    made.lr_mult[name] = 0.0 if joint else 3 * made.lr_mult.get(name, 0.5)
    made.wd_mult[name] = np.float32(0.7)


def flush(world):
    if world.updater.optimizer.sparse_decay == "catch_up":
        for name in world.updater.states:
            world.updater.flush(name, world.weights[name])


CHANGES = {
    "nothing": lambda world: None,
    "a decay": assign(wd=0.3),
    "a schedule": assign(lr_scheduler=lr_scheduler.PolyScheduler(9, base_lr=0.1)),
    "another beta": assign(beta1=0.5),
    "rates of NumPy": assign(wd=np.float32(0.3), rescale_grad=np.float32(0.5)),
    "lazy rows": assign(lazy_update=True),
    "all rows": assign(lazy_update=False),
    "flushed rows": flush,
    "another scale": assign(rescale_grad=0.75),
    "a bound": assign(clip_gradient=1.5),
    "multipliers": multiply,
    "no states": lambda world: world.updater.states.pop(next(iter(world.weights)), None),
}
"""What a user may change between two calls."""


def nested(by_name):
    """A structure whose paths are the names."""
    tree = {}
    for name, value in by_name.items():
        *outer, last = name.split(".")
        place = tree
        for key in outer:
            place = place.setdefault(key, {})
        place[last] = value
    return tree


class Forms(NamedTuple):
    """What arrays and calls of a plan are drawn from, by name."""

    layouts: dict
    dense: dict
    rows: dict
    asides: dict
    lightly: tuple
    ways: tuple
    put: Callable = np.asarray
    """Puts an array where the others are."""


WAYS_TO_CALL = "list", "tuple", "dict", "nested"
ON_HOST = Forms(LAYOUTS, DENSE, ROWS, ASIDE, LIGHTLY, (*WAYS_TO_CALL, "updated"))


@dataclass(frozen=True)
class Call:
    """A call of a plan: its way, forms of gradients by name, and what happens after it."""

    way: str
    forms: tuple
    aside: str = "nothing"
    change: str = "nothing"
    fault: str | None = None


class World:
    """An updater and its weights, which calls of one plan are given, plain or in their forms."""

    def __init__(self, setting, layouts=(), forms=ON_HOST):
        self.setting, self.updater, self.weights = setting, setting.updater(), setting.weights()
        self.forms, self.copies, self.taken = forms, {}, []
        for (name, weight), layout in zip(self.weights.items(), layouts, strict=False):
            self.weights[name] = forms.layouts[layout](weight) if weight.ndim else weight

    def is_plain(self, name):
        """Whether the weight is NumPy's among others that are not."""
        return self.forms is not ON_HOST and isinstance(self.weights[name], np.ndarray)

    def beside(self, name, array):
        """An array where the weight is."""
        return array if self.is_plain(name) else self.forms.put(array)

    def gradient(self, name, form, seed, is_infinite=False):
        """A gradient of eighths, whose sums are exact, in some form; and in the plain one.

        One that lists rows may list none.
        """
        weight, rng = self.weights[name], np.random.default_rng(seed)
        dense, listed = self.forms.dense, self.forms.rows
        if self.is_plain(name):
            dense, listed = dict.fromkeys(dense, np.array), dict.fromkeys(listed, RowSparse)
        if form in listed:
            count = 2 * rng.integers(4)  # which two batches share
            rows = rng.integers(0, weight.shape[0], count)
            shape = count, *weight.shape[1:]
            values = (rng.integers(-32, 33, shape) / 8).astype(weight.dtype)
            return listed[form](values, rows, weight.shape), RowSparse(values, rows, weight.shape)
        plain = np.asarray(rng.integers(-32, 33, weight.shape) / 8).astype(weight.dtype)
        plain = np.full_like(plain, np.inf) if is_infinite else plain
        return (dense[form](plain) if plain.ndim else plain), plain

    def call(self, way, names, grads):
        weights, given = [self.weights[n] for n in names], dict(zip(names, grads, strict=True))
        if way == "single":
            one_by_one(self.updater, names, grads, weights)
        elif way in ("list", "tuple"):
            kind = {"list": list, "tuple": tuple}[way]
            self.updater(kind(names), kind(grads), kind(weights))
        elif way == "dict":
            self.updater.step(given, self.weights, missing="skip")
        elif way == "nested":
            self.updater.step(nested(dict.fromkeys(self.weights) | given), nested(self.weights))
        else:
            take_copies(self)
            new = self.updater.updated(given, self.weights, missing="skip")
            self.weights = {name: np.asarray(array) for name, array in new.items()}

    def bits(self):
        """All that a call may change, with what `info` says of the last one."""
        averages = host(dict(self.updater.averages))
        kept = frozen((averages, self.copies, self.updater.info[:4]))
        return everything(self.updater, self.weights), kept

    def numbers(self):
        """Weights, states and averages, on the host."""
        return host((self.weights, *map(dict, (self.updater.states, self.updater.averages))))

    def results(self):
        """What another updater has too that was given the same numbers."""
        updater, scaler = self.updater, self.updater.loss_scaler
        counts = updater.optimizer.num_update, dict(updater.optimizer._index_update_count)
        return frozen(self.numbers()), counts, scaler and scaler.state_dict()

    def fail(self, call, names, grads):
        """Make a call of which the last parameter has a fault: nothing changes."""
        if call.fault in OF_RATES and not self.setting.takes_rates(names[-1]):
            return
        made, weights, grads = self.updater.optimizer, self.weights, [*grads]
        way = {"single": "list", "updated": "dict"}.get(call.way, call.way)
        multipliers, schedule = made.lr_mult.copy(), made.lr_scheduler
        self.weights = dict(weights)
        grads[-1] = FAULTS[call.fault](self, names[-1], grads[-1])
        before = self.bits()
        for _ in range(2):
            with pytest.raises((TypeError, ValueError, ZeroDivisionError, KeyboardInterrupt)):
                self.call(way, names, grads)
            assert self.bits() == before
        self.weights = weights
        made.lr_mult.clear()
        made.lr_mult.update(multipliers)
        made.lr_scheduler = schedule


def lock(world, name, grad):
    world.weights[name] = world.weights[name].view()
    world.weights[name].flags.writeable = False
    return grad


def spoil_rate(world, name, grad):
    world.updater.optimizer.lr_mult[name] = float("nan")
    return grad


def scheduled(rate):
    def schedule(update):
        if isinstance(rate, BaseException):
            raise rate
        return rate

    def spoil(world, name, grad):
        world.updater.optimizer.lr_scheduler = schedule
        return grad

    return spoil


def listing(row, count=2):
    def spoil(world, name, grad):
        rows = [row, 0] if row > 2**64 else world.beside(name, np.array([row, 0]))
        values = np.ones((count, *world.weights[name].shape[1:]), np.float32)
        return world.beside(name, values), rows

    return spoil


OF_RATES = {
    "a rate that is NaN": spoil_rate,
    "a schedule that raises": scheduled(ZeroDivisionError()),
    **{f"a rate of {rate} from a schedule": scheduled(rate) for rate in (-0.1, np.nan, np.inf)},
    "Ctrl-C in a schedule": scheduled(KeyboardInterrupt()),
}
FAULTS = {
    "another shape": lambda world, name, grad: world.beside(name, np.ones((9, 9), np.float32)),
    "integers": lambda world, name, grad: world.beside(
        name, np.ones(world.weights[name].shape, "i4")
    ),
    "a string": lambda world, name, grad: "1",
    "the weight": lambda world, name, grad: world.weights[name],
    "a read-only weight": lock,
    "a row that is too large": listing(99),
    "a negative row": listing(-1),
    "a row that no integer of NumPy holds": listing(2**70),
    "a row between two": listing(0.5),
    "fewer values than rows": listing(1, count=1),
    **OF_RATES,
}
"""Gradients, weights and rates that are refused."""


def outside(array):
    """Bytes around the elements of an array, in the memory that it lies in."""
    if not isinstance(getattr(array, "base", None), np.ndarray) or not array.flags.writeable:
        return b""
    kept = array.copy()
    array[...] = 0
    found = array.base.tobytes()
    array[...] = kept
    return found


def follow(setting, plan, *, plain=False, fails=False, forms=ON_HOST, times=1, kind=World):
    """The world after the calls of a plan, each made a number of times."""
    layouts, calls = plan
    world = kind(setting, () if plain else layouts, forms)
    for step, call in enumerate(calls):
        names = [name for name, _ in call.forms]
        infinite = "loss_scaler" in setting.settings() and step == 1
        made = [
            world.gradient(*form, [step, k], infinite and not k)
            for k, form in enumerate(call.forms)
        ]
        grads = [pair[plain] for pair in made]
        if fails and call.fault:
            world.fail(call, names, grads)
        way = ("list" if setting.is_whole else "single") if plain else call.way
        for _ in range(times):
            weights = [*world.weights.values()]
            edges = [*map(outside, weights)]
            world.call(way, names, grads)
            assert [*map(outside, weights)] == edges
            for name, rounded in world.copies.items():
                assert frozen(rounded) == frozen(world.weights[name].astype(np.float16))
            assert all((rounded == 7).all() for rounded in world.taken)
        CHANGES[call.change](world)
        if not plain:
            forms.asides[call.aside](world)
    return world


@st.composite
def plans(draw, setting, faults=(), of=ON_HOST):
    """Layouts of the weights, and calls that update some of them in some form."""
    names, count = list(setting.weights()), draw(st.integers(2, 5))
    if setting.is_elementwise:
        layouts = [draw(st.sampled_from([*of.layouts])) for _ in names]
        forms = st.sampled_from([*of.dense])
        asides = draw(st.sampled_from([of.lightly, [*of.asides]]))
    else:  # products of matrices depend on the layouts of arrays
        layouts, forms, asides = (), st.sampled_from(["plain", "read-only", "float64"]), AS_THEY_LIE
    with_rows = st.sampled_from([*of.rows]) | forms if setting.rows else forms
    calls = []
    for _ in range(count):
        way = draw(st.sampled_from(of.ways if setting.is_whole else ["single", *of.ways]))
        chosen = draw(st.permutations(names))[: draw(st.integers(1, len(names)))]
        if way in ("dict", "nested", "updated"):
            chosen = [name for name in names if name in chosen]
        elif not setting.takes_once() and draw(st.booleans()):
            chosen = [*chosen, chosen[0]]
        call = Call(
            way,
            tuple(
                (name, draw(with_rows if setting.rows and setting.shapes[name] else forms))
                for name in chosen
            ),
            draw(st.sampled_from(asides)),
            draw(st.sampled_from([*CHANGES])),
            draw(st.sampled_from(faults)) if faults else None,
        )
        calls.append(call)
    return tuple(layouts), tuple(calls)


def is_compiled(setting, plan):
    """Whether compiled code is known to read all arrays of a plan, without Python."""
    layouts, calls = plan
    forms = [form for call in calls for _, form in call.forms]
    in_c_order = setting.make().state_dtype is not None  # where positions matter
    lists = {frozenset(name for name, _ in call.forms) for call in calls}
    if setting.updater().accumulate > 1 and len(lists) > 1:  # windows of a list may differ
        return False
    return (
        setting.case is None
        and not (in_c_order and "Fortran order" in layouts)
        and setting.dtype == "float32"
        and not {*layouts, *forms} & {*IN_PYTHON, *ROWS, "longdouble", "big-endian"}
        and {call.aside for call in calls} <= {*LIGHTLY}
        and not {call.change for call in calls} & {"no states", "lazy rows", "all rows"}
        and all(call.way != "updated" for call in calls)
    )
