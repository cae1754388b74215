"""Random stories told to two updaters, with lists and with single calls: the same bits at the end.

Between steps weights are replaced, resized, reshaped and tied, and states come and go.
"""

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from fastopt import RowSparse, optimizer
from fastopt._engine.validate import leaves
from helpers.plans import LAYOUTS, each
from helpers.tensor_lists import as_list, everything, frozen, normal, one_by_one

# Multipliers may come before the first update of their parameter, and shapes are assigned.
pytestmark = pytest.mark.filterwarnings("ignore:lr_mult of .* has", "ignore:Setting the shape")

FORMS = {
    "sgd": {"momentum": 0.9, "multi_precision": True},
    "adam": {"multi_precision": True},
    "nadam": {},
    "lamb": {},
    "lars": {"momentum": 0.9},
    "lbsgd": {"batch_scale": 2, "warmup_epochs": 0},
    "sgld": {"seed": 5},
}
SHAPES = [(), (0,), (6,), (4, 3), (17_000,)]
indices = st.one_of(st.integers(0, 5), st.sampled_from(["a_weight", "b_gamma", "c_bias"]))
seeds = st.integers(0, 9)


class World:
    """An updater, its weights, and memory that some of them lie in."""

    def __init__(self, way, name):
        made = optimizer.create(name, learning_rate=0.05, wd=0.01, **FORMS[name])
        made.idx2name = {0: "conv_weight", 1: "norm_beta"}
        self.way, self.updater = way, optimizer.get_updater(made)
        self.memory = np.ones(40, np.float32)
        self.weights, self.kept = {}, {}

    def add(self, index, seed, shape, dtype, layout):
        weight = normal(seed, shape, dtype)
        self.weights[index] = LAYOUTS[layout](weight) if weight.ndim else weight
        self.drop_state(index)

    def add_view(self, index, start, step):
        self.weights[index] = self.memory[start : start + 6 * step : step]
        self.drop_state(index)

    def tie(self, index, other):
        self.weights[index] = self.weights[other]
        self.drop_state(index)
        # Alone at first: a list makes the new states of all its weights before it updates one.
        self.updater(index, self.gradient(index, 0, "fresh"), self.weights[index])

    def drop_state(self, index):
        for kept in (self.updater.states, self.updater.states_synced, self.kept):
            kept.pop(index, None)
        self.drop_shaped(index)

    def gradient(self, index, seed, kind):
        weight = self.weights[index]
        grad = normal(seed, weight.shape, weight.dtype.name)
        if kind == "same":
            kept = self.kept.get(index)
            if kept is None or (kept.shape, kept.dtype) != (weight.shape, weight.dtype):
                kept = self.kept[index] = grad
            kept[...] = grad
            return kept
        if kind == "single" and weight.dtype == np.float16:
            return grad.astype(np.float32)
        if kind == "strided" and weight.ndim:
            return LAYOUTS["strided"](grad)
        if kind == "rows" and weight.ndim and len(weight):
            rows = np.random.default_rng(seed).integers(0, len(weight), size=4)
            values = normal(seed, (4, *weight.shape[1:]), weight.dtype.name)
            return RowSparse(values, rows, weight.shape)
        if kind == "weight":
            fitting = [
                other
                for other in self.weights.values()
                if (other.shape, other.dtype) == (weight.shape, weight.dtype)
                and not np.shares_memory(other, weight)
            ]
            return (fitting or [grad])[seed % max(len(fitting), 1)]
        return grad

    def step(self, calls):
        grads = [self.gradient(*call) for call in calls]
        order = [index for index, *_ in calls]
        self.way(self.updater, order, grads, [self.weights[index] for index in order])

    def resize(self, index, size):
        weight, states = self.weights[index], self.updater.states
        if weight.ndim == 1 and weight.base is None:
            for owner in self.owners(index):
                if any(array.base is not None for array in leaves(states.get(owner))):
                    states[owner] = each(np.copy, states[owner])  # new states share a block
            for array in self.arrays(index):
                array.resize(size, refcheck=False)
            for owner in self.owners(index):
                self.drop_shaped(owner)

    def reshape(self, index):
        weight = self.weights[index]
        shape = weight.shape[::-1]
        if weight.ndim == 2 and all(array.flags.c_contiguous for array in self.arrays(index)):
            for array in self.arrays(index):
                array.shape = shape
            for owner in self.owners(index):
                self.drop_shaped(owner)

    def owners(self, index):
        weight = self.weights[index]
        return [other for other, tied in self.weights.items() if tied is weight]

    def arrays(self, index):
        states = [self.updater.states.get(owner) for owner in self.owners(index)]
        return [self.weights[index], *(array for state in states for array in leaves(state))]

    def drop_shaped(self, index):
        """Drop what has the shape of a weight and is no state: sum, master given before."""
        hidden = vars(self.updater.optimizer)
        for table in ("cumgrads", "masters_given"):
            hidden.get(table, {}).pop(index, None)

    def bits(self):
        return everything(self.updater, self.weights), frozen(self.memory)


class Lists(RuleBasedStateMachine):
    """Operations on both worlds."""

    @initialize(name=st.sampled_from([*FORMS]))
    def begin(self, name):
        self.name = name
        self.worlds = [World(way, name) for way in (as_list, one_by_one)]
        self.all("add", 0, 0, (4, 3), "float32", "plain")
        self.all("add", 1, 1, (4, 3), "float32", "plain")

    def all(self, operation, *arguments):
        for world in self.worlds:
            getattr(world, operation)(*arguments)

    def known(self, data):
        return data.draw(st.sampled_from(list(self.worlds[0].weights)))

    @rule(
        index=indices,
        seed=seeds,
        shape=st.sampled_from(SHAPES),
        dtype=st.sampled_from(["float32", "float64", "float16"]),
        layout=st.sampled_from(["plain", "plain", "Fortran order", "strided"]),
    )
    def add(self, index, seed, shape, dtype, layout):
        masters = FORMS[self.name].get("multi_precision")
        self.all("add", index, seed, shape, dtype if masters else "float32", layout)

    @rule(index=indices, start=st.integers(0, 20), step=st.sampled_from([1, 2, 3]))
    def add_view(self, index, start, step):
        self.all("add_view", index, start, step)

    @rule(index=indices, data=st.data())
    def tie(self, index, data):
        self.all("tie", index, self.known(data))

    @rule(
        data=st.data(),
        repeat=st.sampled_from([1, 2, 3]),
        kinds=st.lists(
            st.sampled_from(["same", "same", "fresh", "single", "strided", "rows", "weight"]),
            min_size=9,
            max_size=9,
        ),
        twice=st.booleans(),
    )
    def step(self, data, repeat, kinds, twice):
        order = data.draw(st.permutations(list(self.worlds[0].weights)))
        order = order[: data.draw(st.integers(1, len(order)))]
        order += order[:1] * (twice and len(order) > 2)
        for again in range(repeat):
            calls = [(index, 10 * again + k, kinds[k % 9]) for k, index in enumerate(order)]
            self.all("step", calls)

    @rule(data=st.data())
    def replace_weight(self, data):
        index = self.known(data)
        for weights in (world.weights for world in self.worlds):
            weights[index] = weights[index].copy()

    @rule(data=st.data(), size=st.sampled_from([1, 6, 20_000]))
    def resize(self, data, size):
        self.all("resize", self.known(data), size)

    @rule(data=st.data())
    def reshape(self, data):
        self.all("reshape", self.known(data))

    @rule(data=st.data())
    def remove(self, data):
        index = self.known(data)
        if len(self.worlds[0].weights) > 1:
            for world in self.worlds:
                del world.weights[index]

    @rule(data=st.data())
    def replace_state(self, data):
        index = self.known(data)
        for states in (world.updater.states for world in self.worlds):
            if index in states:
                states[index] = each(np.copy, states[index])

    @precondition(lambda self: FORMS[self.name].get("multi_precision"))
    @rule(data=st.data(), seed=seeds)
    def set_master(self, data, seed):
        index = self.known(data)
        for world in self.worlds:
            weight = world.weights[index]
            if weight.dtype == np.float16:
                world.updater.set_master(index, normal(seed, weight.shape, "float32"))

    @invariant()
    def the_bits_are_the_same(self):
        assert self.worlds[0].bits() == self.worlds[1].bits()


TestLists = pytest.mark.slow(Lists.TestCase)
TestLists.settings = settings(max_examples=40, stateful_step_count=25, deadline=None)
