"""Gradients that list rows, drawn for properties, and what tests do with them."""

from dataclasses import dataclass

import numpy as np
from hypothesis import strategies as st

from fastopt._engine.validate import leaves
from fastopt.sparse import RowSparse
from helpers.tensor_lists import frozen

WIDTHS = [1, 2, 3, 7, 8, 31, 64, 1023, 1100]
ARGUMENTS = {"rescale_grad": 0.75, "clip_gradient": 2.5}


@dataclass
class Problem:
    """A weight and the gradients of some steps, whose sums are exact in any order."""

    weight: np.ndarray
    grads: list

    def run(self, updater, grads=None):
        """Weight and state after the steps, with these gradients instead where given."""
        weight = self.weight.copy()
        for grad in self.grads if grads is None else grads:
            updater(0, grad, weight)
        return weight, *leaves(updater.states[0])


@st.composite
def problems(draw, case=None, steps=2, dtypes=(np.float32, np.float64)):
    """Problem that the form of an optimizer can take; rows may be repeated, missing or none."""
    height = draw(st.integers(0, 12))
    if case is not None and case.make().rule.row is not None:
        shape = (height, draw(st.sampled_from([0, *WIDTHS])))
    else:
        shape = (height, *draw(st.sampled_from([(), (0,), (2, 3), *((n,) for n in WIDTHS)])))
    dtype = draw(st.sampled_from(dtypes))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    grads = [listing(rng, shape, dtype, draw(st.integers(0, 20))) for _ in range(steps)]
    return Problem(rng.standard_normal(shape).astype(dtype), grads)


def listing(rng, shape, dtype, count):
    """Gradient that lists `count` rows at random; its values are multiples of 1/8."""
    rows = rng.integers(0, shape[0], count) if shape[0] else np.empty(0, np.int64)
    rows = rows.astype(rng.choice([np.int32, np.int64]))
    values = rng.integers(-32, 33, (len(rows), *shape[1:])) / 8
    return RowSparse(values.astype(dtype), rows, shape)


def all_rows(grad):
    """Gradient that lists every row of a dense one, in order."""
    return RowSparse(grad, np.arange(len(grad)), grad.shape)


def same_bits(actual, expected):
    """Assert that arrays, or sequences of arrays, are equal bit for bit."""
    assert frozen(actual) == frozen(expected)
