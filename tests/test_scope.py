"""Scopes: names, defaults, sharing, and that none of it leaks out of its block."""

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastopt.parameter import ParameterDict
from fastopt.scope import Scope, current_scope, get_parameter, name_scope
from fastopt.trainer import Trainer

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


def test_representation_tells_the_prefix():
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


def test_threads_begin_at_the_root_and_do_not_see_each_other():
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


def test_threads_share_what_they_name_alike_and_nothing_else():
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


# Defaults


def test_parameters_take_the_defaults_of_their_scope():
    with fresh(initializer="ones", regularizer=0.5, dtype="float64", trainable=False):
        weight = get_parameter("w", 2)
        other = get_parameter(
            "b", 2, initializer="zeros", regularizer=2, dtype="float32", trainable=True
        )
    assert (weight.init, weight.wd_mult, weight.dtype, weight.grad_req) == (
        "ones",
        0.5,
        np.float64,
        "null",
    )
    assert (other.init, other.wd_mult, other.dtype, other.grad_req) == (
        "zeros",
        2,
        np.float32,
        "write",
    )


def test_inner_scopes_inherit_and_override_defaults():
    with fresh(regularizer=0.5, dtype="float64", trainable=False, reuse="auto") as net:
        with name_scope("fc", regularizer=0.25, trainable=True) as fc:
            weight = get_parameter("w", 2)
        inherited = get_parameter("w", 2)
    assert (fc.reuse, fc.params) == ("auto", net.params)
    assert (weight.wd_mult, weight.dtype, weight.grad_req) == (0.25, np.float64, "write")
    assert (inherited.wd_mult, inherited.grad_req) == (0.5, "null")


def test_arguments_of_parameters_pass_through_and_win_over_defaults():
    with fresh(regularizer=0.5, trainable=False):
        table = get_parameter("t", (9, 2), lr_mult=3, grad_req="add", stype="row_sparse", wd_mult=1)
    assert (table.lr_mult, table.grad_req, table.stype, table.wd_mult) == (
        3,
        "add",
        "row_sparse",
        1,
    )


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
        made = params.get("net/w", shape=2)
    else:
        made = scope.get_parameter("w", 2, **call)
    if reuse in (None, False):
        with pytest.raises(ValueError, match="'net/w' exists"):
            scope.get_parameter("w", 2, **call)
    else:
        assert scope.get_parameter("w", 2, **call) is made
    assert list(params) == ["net/w"]


def test_a_call_overrides_the_reuse_of_its_scope():
    with fresh(reuse=True):
        made = get_parameter("w", 2, reuse=False)
        assert get_parameter("w") is made


def test_reuse_without_a_name_is_refused():
    with fresh(reuse=True) as net, pytest.raises(ValueError, match="'net' needs a name"):
        get_parameter(shape=2)
    assert len(net.params) == 0


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


# Refusals

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


BAD_PARAMETERS = {
    "name of another type": ({"name": 3}, TypeError, "name must be a str, got 3"),
    "empty name": ({"name": ""}, ValueError, "name must not be empty"),
    "unknown argument": ({"name": "w", "color": 3}, TypeError, "color"),
    "initializer twice": ({"name": "w", "initializer": "ones", "init": "ones"}, TypeError, "init"),
    "decay twice": ({"name": "w", "regularizer": 1, "wd_mult": 1}, TypeError, "wd_mult"),
    "gradient twice": ({"name": "w", "trainable": True, "grad_req": "add"}, TypeError, "grad_req"),
    "unknown reuse": ({"name": "w", "reuse": "yes"}, ValueError, "reuse"),
}


@pytest.mark.parametrize("case", BAD_PARAMETERS.values(), ids=BAD_PARAMETERS.keys())
def test_bad_parameters_name_the_fault_and_are_not_made(case):
    kwargs, error, words = case
    with fresh() as net, pytest.raises(error, match=words):
        get_parameter(**kwargs)
    assert len(net.params) == 0


# Programs


class FullyConnected:
    """Sigmoid of a linear map; layers of the same name share their parameters."""

    def __init__(self, inputs, outputs, name=None):
        scope = current_scope()
        with name_scope(name or scope.unique_name("fc"), reuse="auto" if name else False):
            self.weight = get_parameter("w", (inputs, outputs))
            self.bias = get_parameter("b", outputs, initializer="zeros")

    def forward(self, x):
        self.x, self.y = x, 1 / (1 + np.exp(-x @ self.weight.data() - self.bias.data()))
        return self.y

    def backward(self, grad):
        grad = grad * self.y * (1 - self.y)
        self.weight.add_grad(self.x.T @ grad)
        self.bias.add_grad(grad.sum(axis=0))
        return grad @ self.weight.data().T


class Chain:
    """Layers one after the other."""

    def __init__(self, *layers):
        self.layers = layers

    def forward(self, x):
        for layer in self.layers:
            x = layer.forward(x)
        return x

    def backward(self, grad):
        for layer in reversed(self.layers):
            grad = layer.backward(grad)
        return grad


def two_levels(size, prefix=None):
    """Two layers; networks of the same prefix share their parameters."""
    names = [prefix and f"{prefix}-level{i}" for i in range(2)]
    return Chain(*(FullyConnected(size, size, name) for name in names))


def test_layers_of_one_name_share_weights_and_others_do_not():
    with fresh("net") as net:
        shared = [FullyConnected(3, 3, name="FC") for _ in range(2)]
        own = [FullyConnected(3, 3) for _ in range(2)]
    assert shared[0].weight is shared[1].weight
    assert shared[0].bias is shared[1].bias
    assert own[0].weight is not own[1].weight
    assert list(net.params) == [f"net/{fc}/{p}" for fc in ("FC", "fc0", "fc1") for p in "wb"]


def test_a_layer_used_twice_is_updated_once_with_the_sum_of_its_gradients(rng):
    x, target = rng.normal(size=(2, 4, 3))
    with fresh("net", dtype="float64") as net:
        chain = Chain(FullyConnected(3, 3, name="FC"), FullyConnected(3, 3, name="FC"))
    net.params.initialize("xavier")
    weight = net.params["net/FC/w"].data()

    def loss_with(i, value):
        start, weight[i] = weight[i], value
        loss = ((chain.forward(x) - target) ** 2).sum() / 2
        weight[i] = start
        return loss

    slopes, eps = np.empty((3, 3)), 1e-5
    for i in np.ndindex(3, 3):
        slopes[i] = loss_with(i, weight[i] + eps) - loss_with(i, weight[i] - eps)
    before = weight.copy()
    trainer = Trainer(net.params, "sgd", {"learning_rate": 0.1})
    chain.backward(chain.forward(x) - target)
    trainer.step(batch_size=1)
    np.testing.assert_allclose(before - weight, 0.1 * slopes / (2 * eps), rtol=1e-6)
    assert trainer.optimizer.num_update == 1


def test_three_of_four_networks_share_and_train_as_if_they_were_one(rng):
    inputs, targets = rng.normal(size=(2, 4, 5, 3))
    with fresh("net", dtype="float64") as net:
        towers = [two_levels(3, "fc0") for _ in range(3)] + [two_levels(3)]
    levels = ("fc0-level0", "fc0-level1", "fc0", "fc1")
    assert list(net.params) == [f"net/{level}/{p}" for level in levels for p in "wb"]
    with fresh("alone", dtype="float64") as alone:
        batched, last = two_levels(3, "fc0"), two_levels(3)
    net.params.initialize("xavier")
    for mine, theirs in zip(alone.params.values(), net.params.values(), strict=True):
        mine.initialize("zeros")
        mine.set_data(theirs.data())

    trainers = [Trainer(scope.params, "sgd", {"momentum": 0.9}) for scope in (net, alone)]
    for _ in range(3):
        for tower, x, target in zip(towers, inputs, targets, strict=True):
            tower.backward(tower.forward(x) - target)
        x, target = np.concatenate(inputs[:3]), np.concatenate(targets[:3])
        batched.backward(batched.forward(x) - target)
        last.backward(last.forward(inputs[3]) - targets[3])
        for trainer in trainers:
            trainer.step(batch_size=1)
    for mine, theirs in zip(alone.params.values(), net.params.values(), strict=True):
        np.testing.assert_allclose(mine.data(), theirs.data(), rtol=1e-12)
