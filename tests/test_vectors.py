"""fastopt.flat: one vector and its views."""

from collections import namedtuple
from dataclasses import dataclass

import numpy as np
import pytest

from fastopt import flat

Pair = namedtuple("Pair", "x y")


@dataclass(frozen=True)
class Layer:
    weight: np.ndarray
    activation: str = "relu"


def test_the_vector_and_the_views_share_memory():
    params = {"a": np.arange(6.0).reshape(2, 3), "b": [Layer(np.ones(2)), Pair(1, 2.5)], "c": ()}
    vector, views = flat(params)
    assert vector.tolist() == [0, 1, 2, 3, 4, 5, 1, 1, 1, 2.5]
    assert views["a"].shape == (2, 3)
    assert views["b"][0].activation == "relu"
    assert isinstance(views["b"][1], Pair)
    leaves = [views["a"], views["b"][0].weight, views["b"][1].x, views["b"][1].y]
    assert all(np.shares_memory(vector, leaf) for leaf in leaves)
    vector[:] = 7
    assert [leaf.tolist() for leaf in leaves] == [[[7] * 3] * 2, [7, 7], 7, 7]
    views["a"][1, 2] = 8
    assert vector[5] == 8
    assert params["a"][1, 2] == 5


@pytest.mark.parametrize(("params", "dtype"), [
    ([np.ones(2, np.float32), np.ones(1, np.float32)], "float32"),
    ([np.ones(2, np.float32), 1.0], "float64"), ([1, 2], "float64"), ({}, "float64"),
    (np.ones((2, 2), np.float16), "float16"),
])  # fmt: skip
def test_the_dtype_is_that_of_a_concatenation(params, dtype):
    vector, _ = flat(params)
    assert vector.dtype.name == dtype


@pytest.mark.parametrize("wrong", [1j, np.ones(2, complex), np.array(["a"]), np.array([None])])
def test_what_is_not_real_is_refused(wrong):
    with pytest.raises(TypeError, match="params at 'a' must be an array of real numbers"):
        flat({"a": wrong})


def test_an_array_that_occurs_twice_stays_one():
    tied, zero = np.ones(2), 0.5
    params = {"embed": tied, "bias": [zero, zero, np.ones(2)], "head": {"weight": tied}}
    vector, views = flat(params)
    assert vector.tolist() == [1, 1, 0.5, 0.5, 1, 1]
    assert views["embed"] is views["head"]["weight"]
    vector[:3] = 7
    assert views["head"]["weight"].tolist() == [7, 7]
    assert [each.tolist() for each in views["bias"]] == [7, 0.5, [1, 1]]
