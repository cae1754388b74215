"""Scopes: names, defaults and reuse of parameters, and that nothing leaks out of a block."""

import asyncio
import operator
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastopt.parameter import ParameterDict
from fastopt.scope import Scope, current_scope, get_parameter, name_scope
from helpers.refusals import check_refused, each
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
    for args in ((None,), ()):
        with fresh("net"), name_scope(*args, regularizer=0.5) as same:
            assert get_parameter("w", 2).wd_mult == 0.5
        assert (str(same), same.name) == ("net", None)


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
    with fresh("net"):
        names = [name_scope(scope).unique_name("fc") for scope in "aab"]
    assert [*names, fresh("net").unique_name("fc")] == ["fc0", "fc1", "fc0", "fc0"]


def test_unique_names_leave_out_parameters_and_scopes_that_are_there():
    net = name_scope("net", params=ParameterDict("my_"))
    for name in ("net/fc0/w", "net/fc2", "net/fc10/w"):
        net.params.get(name)
    assert [net.unique_name("fc") for _ in range(3)] == ["fc1", "fc3", "fc4"]


def test_parameters_without_a_name_get_a_new_one_which_a_failing_call_does_not_use_up():
    with fresh("net") as net, name_scope("fc"):
        names = [get_parameter(shape=2).name]
        with pytest.raises(TypeError, match="shape"):
            get_parameter(shape="two")
        names += [get_parameter(shape=2).name for _ in range(2)]
    assert names == list(net.params) == ["net/fc/var-0", "net/fc/var-1", "net/fc/var-2"]


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


def test_scopes_are_left_in_order_also_by_errors():
    net, fc, before = fresh("net"), fresh("fc"), current_scope()
    with pytest.raises(KeyError), net, fc:
        raise KeyError
    assert current_scope() is before
    with net, fc, pytest.raises(RuntimeError, match=r"<name_scope 'net'>.*<name_scope 'fc'>"):
        net.__exit__(None, None, None)
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


def test_attributes_are_the_defaults_that_apply():
    with fresh("net", initializer="zeros", dtype="float16"):
        inner = name_scope("fc", regularizer=2)
    assert (inner.initializer, inner.regularizer, inner.dtype) == ("zeros", 2.0, "float16")
    root = current_scope()
    assert (root.name, root.initializer, root.regularizer, root.dtype) == (None,) * 4


# Defaults


def test_parameters_take_the_defaults_of_their_scope_and_arguments_win():
    """Inner scopes inherit and override defaults."""
    of = operator.attrgetter("init", "wd_mult", "dtype", "grad_req", "lr_mult", "stype")
    defaults = {"initializer": "ones", "regularizer": 0.5, "dtype": "float64", "trainable": False}
    with fresh(**defaults, reuse="auto") as net:
        with name_scope("fc", regularizer=0.25, trainable=True) as fc:
            inner = get_parameter("w", 2)
        weight = get_parameter("w", 2)
        given = {"initializer": "zeros", "regularizer": 2, "dtype": "float32", "trainable": True}
        other = get_parameter("b", 2, **given)
        table = get_parameter("t", (9, 2), lr_mult=3, grad_req="add", stype="row_sparse", wd_mult=1)
    assert (fc.reuse, fc.params) == ("auto", net.params)
    assert of(inner) == ("ones", 0.25, np.float64, "write", 1, "default")
    assert of(weight) == ("ones", 0.5, np.float64, "null", 1, "default")
    assert of(other) == ("zeros", 2, np.float32, "write", 1, "default")
    assert of(table) == ("ones", 1, np.float64, "add", 3, "row_sparse")


# Reuse


@pytest.mark.parametrize("where", ["scope", "call"])
@pytest.mark.parametrize("reuse", [None, False, True, "auto"])
def test_reuse_says_whether_a_parameter_is_made_or_found(reuse, where):
    params = ParameterDict()
    scope = name_scope("net", params=params, reuse=reuse if where == "scope" else None)
    call = {"reuse": reuse} if where == "call" else {}

    if reuse is True:
        with pytest.raises(ValueError, match="'net/w' does not exist"):
            scope.get_parameter("w", 2, **call)
        assert len(params) == 0
    made = params.get("net/w", shape=2) if reuse else scope.get_parameter("w", 2, **call)
    if reuse:
        assert scope.get_parameter("w", 2, **call) is made
    else:
        with pytest.raises(ValueError, match="'net/w' exists"):
            scope.get_parameter("w", 2, **call)
    assert list(params) == ["net/w"]


def test_a_call_overrides_the_reuse_of_its_scope_which_needs_a_name():
    with fresh(reuse=True) as net:
        with pytest.raises(ValueError, match="'net' needs a name"):
            get_parameter(shape=2)
        assert len(net.params) == 0
        made = get_parameter("w", 2, reuse=False)
        assert get_parameter("w") is made


def test_reuse_completes_shapes_and_refuses_others():
    with fresh(reuse="auto"):
        weight = get_parameter("w", (2, 0))
        assert get_parameter("w", (0, 3)).shape == (2, 3)
        for shape in [(2, 4), (2,), (2, 3, 1)]:
            with pytest.raises(ValueError, match=r"'net/w'.*\(2, 3\)"):
                get_parameter("w", shape)
    assert weight.shape == (2, 3)


def test_reuse_refuses_other_attributes_but_not_other_defaults():
    with fresh(reuse="auto") as net:
        weight = get_parameter("w", 2, dtype="float64", regularizer=0.5)
        for other in ({"dtype": "float32"}, {"regularizer": 1}, {"trainable": False}):
            with pytest.raises(ValueError, match="'net/w'"):
                get_parameter("w", 2, **other)
    with name_scope("net", params=net.params, dtype="float32", trainable=False, reuse=True):
        assert get_parameter("w", 2) is weight
    assert (weight.dtype, weight.grad_req) == (np.float64, "write")


def test_a_dict_that_shares_counts_as_having_the_parameter():
    source = ParameterDict()
    weight = source.get("net/w", shape=2)
    net = name_scope("net", params=ParameterDict(shared=source))
    with pytest.raises(ValueError, match="exists"):
        net.get_parameter("w", 2)
    assert net.get_parameter("w", reuse=True) is weight


REFUSED = {
    **each("{}", "TypeError: name must be a str, got 3", "name_scope(3)", "get_parameter(3)"),
    **each("{}", "ValueError: name must not be empty", "name_scope('')", "get_parameter('')"),
    "name_scope('a//b')": "ValueError: a//b",
    "name_scope('a/')": "ValueError: a/",
    "name_scope('a', 3)": "TypeError: abs_name must be a str, got 3",
    "name_scope('a', params={})": "TypeError: ParameterDict, got dict",
    "name_scope('a', regularizer='l2')": "TypeError: regularizer.*'l2'",
    "name_scope('a', regularizer=-1)": "ValueError: regularizer.*-1",
    "name_scope('a', dtype='floot')": "TypeError: dtype.*floot",
    "name_scope('a', initializer=3)": "TypeError: init.*3",
    "name_scope('a', trainable=1)": "TypeError: trainable.*1",
    "name_scope('a', reuse='maybe')": "ValueError: reuse.*'auto', got 'maybe'",
    "name_scope('a', reuse=1)": "ValueError: reuse.*got 1",
    "get_parameter('w', color=3)": "TypeError: color",
    "get_parameter('w', initializer='ones', init='ones')": "TypeError: init",
    "get_parameter('w', regularizer=1, wd_mult=1)": "TypeError: wd_mult",
    "get_parameter('w', trainable=True, grad_req='add')": "TypeError: grad_req",
    "get_parameter('w', reuse='yes')": "ValueError: reuse",
}


@pytest.mark.parametrize("code", REFUSED)
def test_bad_arguments_name_the_fault_and_make_nothing(code):
    with fresh() as net:
        check_refused(code, REFUSED[code], globals())
    assert len(net.params) == 0
