"""Scopes: names, and that nothing leaks out of a block."""

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastopt.parameter import ParameterDict
from fastopt.scope import Scope, current_scope, get_parameter, name_scope
from helpers.written_headers import threads_start_anew

WORDS = st.text("abc", min_size=1, max_size=3)


def fresh(name="net", **kwargs):
    return name_scope(name, params=ParameterDict(), **kwargs)


# Names


@given(st.lists(WORDS, max_size=5), WORDS)
def test_a_name_is_the_path_of_the_scopes_around_it(path, name):
    def inside(rest):
        if not rest:
            return current_scope().gen_name(name), str(current_scope())
        with name_scope(rest[0]):
            return inside(rest[1:])

    assert inside(path) == ("/".join([*path, name]), "/".join(path))


def test_the_root_is_the_scope_outside_of_all_blocks():
    root = current_scope()
    assert (str(root), root.gen_name("w")) == ("", "w")
    assert isinstance(root, Scope)
    with name_scope("net") as net:
        assert net.params is root.params
    assert current_scope() is root


def test_an_absolute_name_replaces_the_prefix():
    with fresh("net"), name_scope("fc", abs_name="tower/head") as head:
        assert str(head) == "tower/head"
        assert get_parameter("w", 2).name == "tower/head/w"
        with name_scope("deep") as deep:
            assert str(deep) == "tower/head/deep"


def test_a_scope_without_a_name_adds_no_level():
    with fresh("net"), name_scope(None, regularizer=0.5) as same:
        assert str(same) == "net"
        assert get_parameter("w", 2).wd_mult == 0.5


def test_names_follow_where_a_scope_is_made_not_where_it_is_entered():
    with fresh("net"):
        fc = name_scope("fc")
    with fresh("other"), fc:
        assert get_parameter("w", 2).name == "net/fc/w"


def test_representation_shows_the_prefix():
    assert repr(name_scope("net")) == "<name_scope 'net'>"


@given(st.lists(st.sampled_from(["fc", "conv", "fc1"]), max_size=12))
def test_unique_names_are_unique_in_a_scope_and_counted_by_prefix(prefixes):
    net = fresh()
    names = [net.unique_name(prefix) for prefix in prefixes]
    assert len(set(names)) == len(names)
    for prefix, name in zip(prefixes, names, strict=True):
        assert name.startswith(prefix)
    if set(prefixes) <= {"fc", "conv"}:
        for prefix in set(prefixes):
            mine = [name for name in names if name.startswith(prefix)]
            assert mine == [f"{prefix}{i}" for i in range(len(mine))]


def test_scopes_of_one_name_and_dict_count_together_and_others_apart():
    params = ParameterDict()
    with name_scope("net", params=params):
        names = [name_scope("a").unique_name("fc"), name_scope("a").unique_name("fc")]
        assert names == ["fc0", "fc1"]
        assert name_scope("b").unique_name("fc") == "fc0"
    assert fresh("net").unique_name("fc") == "fc0"


def test_unique_names_leave_out_parameters_and_scopes_that_are_there():
    params = ParameterDict("my_")
    for name in ("net/fc0/w", "net/fc2", "net/fc10/w"):
        params.get(name)
    net = name_scope("net", params=params)
    assert [net.unique_name("fc") for _ in range(3)] == ["fc1", "fc3", "fc4"]


def test_parameters_without_a_name_get_a_new_one():
    with fresh("net"), name_scope("fc"):
        names = [get_parameter(shape=2).name for _ in range(3)]
    assert names == ["net/fc/var-0", "net/fc/var-1", "net/fc/var-2"]


def test_a_failing_call_uses_up_no_name():
    with fresh("net") as net:
        with pytest.raises(TypeError, match="shape"):
            get_parameter(shape="two")
        assert (get_parameter(shape=2).name, len(net.params)) == ("net/var-0", 1)


# Entering and leaving


@given(st.lists(st.booleans(), max_size=20))
def test_scopes_are_entered_again_and_again_also_within_themselves(choices):
    net, fc = fresh("net"), fresh("fc")
    entered = []
    for enter in choices:
        if enter:
            entered.append((net, fc)[len(entered) % 3 == 0].__enter__())
        elif entered:
            entered.pop().__exit__(None, None, None)
        assert current_scope() is entered[-1] if entered else str(current_scope()) == ""
    while entered:
        entered.pop().__exit__(None, None, None)
    assert str(current_scope()) == ""


def test_errors_leave_the_scope():
    before = current_scope()
    with pytest.raises(KeyError), fresh("net"), name_scope("fc"):
        raise KeyError
    assert current_scope() is before


def test_scopes_are_left_in_order():
    net, fc = fresh("net"), fresh("fc")
    with net, fc:
        with pytest.raises(RuntimeError, match=r"<name_scope 'net'>.*<name_scope 'fc'>"):
            net.__exit__(None, None, None)
        assert current_scope() is fc
    with pytest.raises(RuntimeError, match="'net'"):
        net.__exit__(None, None, None)


@threads_start_anew
def test_threads_start_at_the_root_and_do_not_see_each_other():
    net, meet = fresh("net"), threading.Barrier(4, timeout=10)

    def work(i):
        before = str(current_scope())
        with net, name_scope(f"thread{i}"):
            meet.wait()
            name = get_parameter("w", 2).name
            meet.wait()
        return before, name, str(current_scope())

    with ThreadPoolExecutor(4) as pool, net:
        results = list(pool.map(work, range(4)))
    assert results == [("", f"net/thread{i}/w", "") for i in range(4)]


def test_threads_share_parameters_of_the_same_name_and_nothing_else():
    params, meet = ParameterDict(), threading.Barrier(8, timeout=10)

    def work(_):
        meet.wait()
        with name_scope("net", params=params, reuse="auto"):
            shared = [get_parameter(f"w{i}", (i + 1, 0)) for i in range(20)]
            return shared, [get_parameter(shape=1) for _ in range(20)]

    with ThreadPoolExecutor(8) as pool:
        results = list(pool.map(work, range(8)))
    assert all(shared == results[0][0] for shared, _ in results)
    own = [parameter.name for _, unnamed in results for parameter in unnamed]
    assert len(set(own)) == 8 * 20
    assert len(params) == 20 + 8 * 20


def test_tasks_do_not_see_each_other():
    async def work(net, name):
        with name_scope(name):
            await asyncio.sleep(0)
            return get_parameter("w", 2).name

    async def both():
        with fresh("net") as net:
            return await asyncio.gather(work(net, "a"), work(net, "b"))

    assert asyncio.run(both()) == ["net/a/w", "net/b/w"]


# Refusals


def test_arguments_have_the_order_of_the_proposal():
    params = ParameterDict()
    scope = name_scope("a", "x/y", "ones", 0.5, "auto", "float64", params=params)
    values = scope.name, scope.initializer, scope.regularizer, scope.reuse, scope.dtype
    assert values == ("a", "ones", 0.5, "auto", "float64")
    assert (str(scope), scope.params) == ("x/y", params)
    with pytest.raises(TypeError, match="positional"):
        name_scope("a", None, None, None, None, None, params)


def test_a_scope_may_have_no_name():
    with fresh("net"), name_scope(initializer="ones") as scope:
        assert get_parameter("w", 2).init == "ones"
    assert (str(scope), scope.name) == ("net", None)


def test_attributes_are_the_defaults_that_apply():
    with fresh("net", initializer="zeros", dtype="float16"):
        inner = name_scope("fc", regularizer=2)
    assert (inner.initializer, inner.regularizer, inner.dtype) == ("zeros", 2.0, "float16")
    root = current_scope()
    assert (root.name, root.initializer, root.regularizer, root.dtype) == (None,) * 4


BAD_SCOPES = {
    "name of another type": ((3,), {}, TypeError, "name must be a str, got 3"),
    "empty name": (("",), {}, ValueError, "name must not be empty"),
    "empty part of a name": (("a//b",), {}, ValueError, "a//b"),
    "slash at the end": (("a/",), {}, ValueError, "a/"),
    "absolute name of another type": (("a", 3), {}, TypeError, "abs_name must be a str, got 3"),
    "params of another type": (("a",), {"params": {}}, TypeError, "ParameterDict, got dict"),
    "regularizer of another type": (("a",), {"regularizer": "l2"}, TypeError, "regularizer.*'l2'"),
    "negative regularizer": (("a",), {"regularizer": -1}, ValueError, "regularizer.*-1"),
    "unknown dtype": (("a",), {"dtype": "floot"}, TypeError, "dtype.*floot"),
    "initializer of another type": (("a",), {"initializer": 3}, TypeError, "init.*3"),
    "trainable of another type": (("a",), {"trainable": 1}, TypeError, "trainable.*1"),
    "unknown reuse": (("a",), {"reuse": "maybe"}, ValueError, "reuse.*'auto', got 'maybe'"),
    "number as reuse": (("a",), {"reuse": 1}, ValueError, "reuse.*got 1"),
}


@pytest.mark.parametrize("case", BAD_SCOPES.values(), ids=BAD_SCOPES.keys())
def test_bad_scopes_name_the_fault(case):
    args, kwargs, error, words = case
    with pytest.raises(error, match=words):
        name_scope(*args, **kwargs)
