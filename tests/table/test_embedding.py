"""An EmbeddingTable against a dictionary of rows and a plain Updater, and what it refuses."""

import numpy as np
import pytest

import fastopt
from fastopt import checkpoint, initializer, optimizer
from helpers.cases import kept
from helpers.embedding_machine import FORMS, Tables, check_machine
from helpers.refusals import check_refused


@pytest.mark.parametrize("form", kept(FORMS, "adam", "8 bits", "min_count", "half_life"))
def test_a_table_is_a_dictionary_of_rows_and_an_updater(form):
    check_machine(Tables, form, max_examples=12, stateful_step_count=15, derandomize=True)


def plain(dim=2, **kwargs):
    return fastopt.EmbeddingTable(dim, fastopt.SGD(learning_rate=1.0), **kwargs)


def contents(table):
    """All of a table, as bytes."""
    return checkpoint.dumps(table._described())


class Own(optimizer.Optimizer):
    def update(self, index, weight, grad, state):
        raise AssertionError


ONES = np.ones((2, 2), np.float32)
REFUSED = {
    "plain(0)": "ValueError: table 'embedding': dim must be at least 1, got 0",
    "plain(2.0)": "TypeError: dim must be an integer, got 2.0",
    "plain(dtype='int32')": "TypeError: dtype must be float16, .*, got int32",
    "plain(capacity=0)": "ValueError: capacity must be at least 1, got 0",
    "plain(capacity=2**31)": "ValueError: capacity must be at most 2147483646, got",
    "plain(min_count=0)": "ValueError: min_count must be at least 1, got 0",
    "plain(half_life=0)": "ValueError: half_life must be more than 0, got 0",
    "plain(half_life=np.nan)": "ValueError: half_life must be a finite number",
    "setattr(t, 'half_life', 2.0)": "AttributeError: property 'half_life' .* has no setter",
    "plain(name=3)": "TypeError: name must be a string, got 3",
    "plain(init=3)": "TypeError: init must be the name of an initializer, .* got 3",
    "plain(init=initializer.Normal)": r"TypeError: init .* got .*Normal.*: call it, Normal\(\)",
    "plain(init='xavier')": "TypeError: init must be uniform, .* got Xavier",
    "plain(init=initializer.Orthogonal())": "TypeError: whose values depend on the whole array",
    "plain(init=lambda ids: [1.0]).lookup([1])": r"ValueError: shape \(1, 2\), got \(1,\)",
    "plain(init=lambda ids: [['a', 'b']]).lookup([1])": "TypeError: real numbers",
    "fastopt.EmbeddingTable(2, 'nothing')": "ValueError: Cannot find optimizer 'nothing'",
    "fastopt.EmbeddingTable(2, 'muon')": "TypeError: table 'embedding': .*Muon",
    "fastopt.EmbeddingTable(2, fastopt.SGD)": r"TypeError: call it, SGD\(\)",
    "fastopt.EmbeddingTable(2, fastopt.RMSProp(), name='users')": "ValueError: table 'users': .* "
        r"got RMSProp with lazy_update=False; pass RMSProp\(lazy_update=True",
    "fastopt.EmbeddingTable(2, fastopt.LBSGD(lazy_update=True))":
        "TypeError: LBSGD sums the gradients",
    "fastopt.EmbeddingTable(2, Own(lazy_update=True))":
        "TypeError: by a rule, and Own has an update",
    "t.lookup([1.5])": "TypeError: table 'e': ids must be integers .* got float64",
    "t.lookup([True])": "TypeError: got bool",
    "t.lookup(np.ma.array([1]))": "TypeError: without a mask",
    "t.lookup([2**63, 8])": "Exception: table 'e': ids must",
    "t.lookup(np.array([2**63], np.uint64))":
        "ValueError: ids must fit into the table's int64, got 9223372036854775808",
    "t.lookup([1], create=1)": "TypeError: create must be True or False",
    "t.lookup([8, 9, 8, 10])": "ValueError: ids need 5 rows, and capacity is 4",
    "t.rows([8, 9, 10], create=True)": "ValueError: ids need 5 rows",
    "t.update([1, 8], ONES[:1])": r"ValueError: grads must have shape \(2, 2\)",
    "t.update([1], [[1, 1]])":
        "TypeError: float32 or another real floating dtype, got int64: convert it with astype",
    "t.update([1], np.ones((1, 2), complex))": "TypeError: pass its real part",
    "t.update([1], np.ma.array(ONES[:1]))": "TypeError: without a mask",
    "t.update([8, 9, 10], np.ones((3, 2), np.float32))": "ValueError: need 5 rows",
    "t.evict()": "ValueError: table 'e': evict needs unused_for, count_below or keep",
    "t.evict(unused_for=0)": "ValueError: unused_for must be at least 1, got 0",
    "t.evict(count_below=-1)": "ValueError: count_below must be .* at least 0",
    "t.evict(keep=lambda ids: ids)": "TypeError: must return an array of 2 bools",
    "t.evict(keep=['a'])": "TypeError: keep must be integers",
    "'a' in t": "TypeError: an id must be an integer, got 'a'",
    "t.forward": r"AttributeError: lookup\(ids\) returns the rows",
    "table.lookup(ab, {'a': [1], 'b': [5, 6, 7]})": "ValueError: table 'b': ids need 3",
    "table.lookup(ab, {'a': [1], 'b': [0.5]})": "TypeError: table 'b': ids must be int",
    "table.lookup(ab, {'a': [1], 'c': [5]})": r"ValueError: ids are for tables \['c'\]",
    "table.lookup({**ab, 'c': ab['a']}, {})": "ValueError: one is under two names",
    "table.lookup([*ab.values()], [[1]])": "TypeError: tables must be a mapping",
    "table.lookup({'a': 1}, {})": r"TypeError: tables\['a'\] must be an EmbeddingTable",
    "table.update(ab, {'a': [1, 2], 'b': [5]}, {'a': ONES, 'b': ONES})":
        r"ValueError: table 'b': grads must have shape \(1, 2\)",
    "table.update(ab, {'a': [1, 2], 'b': [5, 6, 7]}, {'a': ONES})":
        r"ValueError: grads must have the names of ids, \['a', 'b'\], got \['a'\]",
}  # fmt: skip


@pytest.mark.parametrize("code", REFUSED)
def test_what_fails_is_explained_and_changes_nothing(code):
    t, ab = plain(name="e", capacity=4), pair(capacity=2)
    t.lookup([1, 2, 3])
    t.evict(keep=[1, 3])
    before = [contents(table) for table in (t, *ab.values())]
    names = {"initializer": initializer, "table": fastopt.table, **locals()}
    check_refused(code, REFUSED[code], globals() | names)
    assert [contents(table) for table in (t, *ab.values())] == before
    assert list(t) == [1, 3]


def test_rows_of_a_call_that_fails_later_are_taken_back():
    """By the function of first values, or by the optimizer."""

    def fails(ids):
        if 13 in ids:
            raise ValueError("no luck")
        return np.ones((len(ids), 2))

    sgd = fastopt.SGD(lr_scheduler=lambda n: 0.1 if n < 2 else float("nan"))
    table = fastopt.EmbeddingTable(2, sgd, init=fails)
    table.update([1, 2], ONES)
    table.evict(keep=[2])
    before = contents(table)
    with pytest.raises(ValueError, match="table 'embedding': no luck"):
        table.lookup([5, 13, 6])
    assert contents(table) == before
    with pytest.raises(ValueError, match="learning rate"):
        table.update([2, 9], ONES)
    assert contents(table) == before
    assert table.lookup([9, 10]).tolist() == [[1, 1], [1, 1]]
    assert table.rows([9, 2, 10]).tolist() == [0, 1, 2]


def test_an_optimizer_whose_state_changes_is_detected():
    table = plain()
    table.lookup([1])
    table.optimizer.momentum = 0.9
    with pytest.raises(ValueError, match="an argument of the optimizer has changed"):
        table.lookup([2])
    assert list(table) == [1]


def test_the_bounds_of_an_eviction():
    table = plain(init="ones")
    for some in ([1, 2], [2, 2], [3]):
        table.lookup(some)
        table.update(some, ONES[: len(some)])
    assert table.evict(unused_for=3, count_below=2).tolist() == []
    assert table.evict(unused_for=2, count_below=1).tolist() == []
    assert table.evict(unused_for=2).tolist() == [1]


# Several tables


def pair(**kwargs):
    adam = fastopt.SGD(learning_rate=0.5, momentum=0.5, lr_scheduler=lambda n: 0.5 / n)
    return {
        name: fastopt.EmbeddingTable(2, adam, init="ones", name=name, **kwargs) for name in "ab"
    }


def test_several_tables_in_one_call_are_one_after_the_other(rng):
    batch = {"b": np.array([[3, 4], [3, 5]]), "a": np.array([7])}
    grads = {name: rng.normal(size=(*ids.shape, 2)).astype("f4") for name, ids in batch.items()}
    at_once, singly = pair(), pair()
    for _ in range(2):
        rows = fastopt.table.lookup(at_once, batch)
        fastopt.table.update(at_once, batch, grads)
        for name in batch:
            np.testing.assert_array_equal(singly[name].lookup(batch[name]), rows[name])
            singly[name].update(batch[name], grads[name])
    for name in batch:
        assert contents(at_once[name]) == contents(singly[name])
