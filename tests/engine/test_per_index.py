"""Mappings that kernels reach into, and mappings that say when they change."""

import copy
from contextlib import suppress
from pickle import dumps, loads

import numpy as np
import pytest

from fastopt._engine.per_index import Counts, PerIndex
from fastopt._engine.tracked import Tracked, weakly


class Watch:
    """Counts changes."""

    seen = 0

    def _changed(self, *keys):
        self.seen += 1


@pytest.mark.parametrize("kind", [PerIndex, Counts])
def test_positions_hold_what_the_mapping_says(kind):
    numbers, rng, expected = kind(), np.random.default_rng(0), {}
    for step in range(300):
        index = int(rng.integers(40))
        if index in expected and step % 3:
            del numbers[index], expected[index]
        else:
            numbers[index] = expected[index] = step
        assert numbers == expected
        slots = numbers.slots(list(expected), 0)
        assert numbers.array[slots].tolist() == list(expected.values())
        assert len(set(slots.tolist())) == len(expected)
        assert (slots >= kind.first).all()
    assert numbers.array.size < 100  # what is deleted leaves no room behind


def test_a_position_that_belongs_to_another_index_is_in_another_array():
    numbers, watch = Counts({index: index for index in range(5)}), Watch()
    numbers.add_owner(watch)
    numbers.add_owner(watch)  # is told once
    before, slots = numbers.array, numbers.slots(range(5), 0)
    numbers[4] = 9
    assert numbers.array is before
    assert watch.seen == 0
    del numbers[1]
    assert numbers.array is not before
    assert before[slots].tolist() == [0, 1, 2, 3, 9]
    assert watch.seen == 1
    numbers.clear()
    assert watch.seen == 2


def test_an_exception_while_owners_are_told_leaves_no_record_at_an_old_position():
    class Raises(Watch):
        def _changed(self):
            super()._changed()
            raise KeyboardInterrupt

    numbers, first, last = Counts({index: index for index in range(5)}), Watch(), Raises()
    numbers.add_owner(first)
    numbers.add_owner(last)
    before = numbers.array
    with pytest.raises(KeyboardInterrupt):
        numbers.slots(range(100), 0)
    assert (first.seen, last.seen) == (1, 1)
    assert numbers.array is before  # owners find numbers where those who were not told know them
    assert numbers == {index: index for index in range(5)}


def fail_half_way(table):
    with suppress(TypeError):
        table.update([("b", 3), None])


CHANGES = {
    "fail half way": fail_half_way,
    "set": lambda table: table.__setitem__("b", 2),
    "delete": lambda table: table.__delitem__("a"),
    "update": lambda table: table.update(b=3),
    "setdefault": lambda table: table.setdefault("b", 3),
    "pop": lambda table: table.pop("a"),
    "popitem": lambda table: table.popitem(),
    "clear": lambda table: table.clear(),
    "union": lambda table: table.__ior__({"b": 3}),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_every_change_is_detected(change):
    watch, plain = Watch(), {"a": 1}
    table = Tracked(plain, weakly(watch._changed))
    change(table)
    change(plain)
    assert table == plain
    assert watch.seen == 1


def test_copies_are_independent_and_nothing_is_kept_alive():
    watch = Watch()
    table, counts = Tracked({"a": [1]}, weakly(watch._changed)), Counts({0: 1})
    for copied in (lambda x: x.copy(), copy.copy, copy.deepcopy, lambda x: loads(dumps(x))):
        other, plain = copied(counts), copied(table)
        other[0] = 2
        assert (type(other), counts) == (Counts, {0: 1})
        assert (type(plain), plain) == (dict, {"a": [1]})
    assert type(table | {}) is dict
    del watch
    table["b"] = 2
