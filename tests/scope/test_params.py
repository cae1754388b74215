"""Parameters of scopes: their defaults, and whether they are made or found."""

import operator

import numpy as np
import pytest

from fastopt.parameter import ParameterDict
from fastopt.scope import get_parameter, name_scope


def fresh(name="net", **kwargs):
    return name_scope(name, params=ParameterDict(), **kwargs)


# Defaults


def test_parameters_take_the_defaults_of_their_scope():
    with fresh(initializer="ones", regularizer=0.5, dtype="float64", trainable=False):
        weight = get_parameter("w", 2)
        other = get_parameter(
            "b", 2, initializer="zeros", regularizer=2, dtype="float32", trainable=True
        )
    of = operator.attrgetter("init", "wd_mult", "dtype", "grad_req")
    assert of(weight) == ("ones", 0.5, np.float64, "null")
    assert of(other) == ("zeros", 2, np.float32, "write")


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
    of = operator.attrgetter("lr_mult", "grad_req", "stype", "wd_mult")
    assert of(table) == (3, "add", "row_sparse", 1)


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
