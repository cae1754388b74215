"""Half precision with rules and NumPy code of one's own, odd shapes, odd numbers, copies."""

import copy
import pickle
import warnings

import numpy as np
import pytest

from fastopt import optimizer
from helpers.cases import exhaustive, kept
from helpers.half_precision import FORMS, flat, master_of, silent

every_form = pytest.mark.parametrize("form", kept(FORMS, "masters", "stochastic"))
pytestmark = silent


class InNumPy(optimizer.Optimizer):
    """Records what it is given."""

    def create_state(self, index, weight):
        return np.zeros_like(weight)

    def update(self, index, weight, grad, state):
        self._update_count(index)
        self.seen = (weight.dtype, grad.dtype, state.dtype)
        state *= 0.9
        state -= self._get_lr(index) * grad
        weight += state


def updater_of(klass=optimizer.Adam, **kwargs):
    return optimizer.get_updater(klass(learning_rate=0.1, **kwargs))


def test_an_update_in_numpy_works_on_the_master(half, rng):
    ours, single = updater_of(InNumPy, multi_precision=True), updater_of(InNumPy)
    weight = rng.normal(size=(4, 3)).astype(half)
    exact = weight.astype(np.float32)
    for _ in range(3):
        gradient = rng.normal(size=(4, 3)).astype(half)
        ours(0, gradient, weight)
        single([0], [gradient.astype(np.float32)], [exact])
    assert ours.optimizer.seen == (np.float32,) * 3
    np.testing.assert_array_equal(ours.states[0][0], exact)
    np.testing.assert_array_equal(weight, exact.astype(half))


def test_an_update_in_numpy_without_masters_gets_half_precision_values(half):
    updater, weight = updater_of(InNumPy), np.ones(3, half)
    updater(0, np.ones(3, half), weight)
    assert updater.optimizer.seen == (half,) * 3
    np.testing.assert_array_equal(weight, half.type(0.9))


def test_an_update_in_numpy_cannot_be_rounded_stochastically(half):
    updater = updater_of(InNumPy, rounding="stochastic")
    with pytest.warns(UserWarning, match="lose small updates"):
        updater(0, np.ones(3, half), np.ones(3, half))


def test_an_update_in_numpy_takes_no_split_master(bfloat16):
    updater = updater_of(InNumPy, multi_precision=True, master="split")
    weight = np.ones(3, bfloat16)
    with pytest.raises(TypeError, match="an update\\(\\) in NumPy needs master='float32'"):
        updater(0, np.ones(3, bfloat16), weight)
    assert updater.states == {}
    assert (weight == 1).all()


@pytest.mark.parametrize("klass", [optimizer.SGD, InNumPy])
def test_what_is_beyond_float16_becomes_infinite_without_a_warning(klass):
    updater = updater_of(klass, multi_precision=True)
    weight = np.array([60000, 1], np.float16)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(2):
            updater(0, np.array([-1e6, 0], np.float32), weight)
    np.testing.assert_array_equal(weight, [np.inf, 1])
    assert np.isfinite(master_of(updater)[0]).all()


@pytest.mark.slow
@every_form
@pytest.mark.parametrize("shape", [(), (0,), (3, 0, 2), (1,), (1, 1, 1)])
def test_odd_shapes_work_in_every_form(form, shape, bfloat16):
    updater, weight = updater_of(**FORMS[form]), np.ones(shape, bfloat16)
    for _ in range(2):
        updater(0, np.ones(shape, bfloat16), weight)
    assert weight.shape == shape
    assert all(array.shape == shape for array in flat(updater.states[0]))
    np.testing.assert_allclose(weight.astype(float), 0.8, rtol=0.01)


@pytest.mark.slow
@every_form
@pytest.mark.parametrize("name", ["sgd", *exhaustive("adam", "groupadagrad")])
def test_nan_and_infinity_go_where_they_go_in_float32(form, name, bfloat16):
    updater, single = (
        optimizer.get_updater(optimizer.create(name, learning_rate=0.1, **kwargs))
        for kwargs in (FORMS[form], {})
    )
    weight = np.array([[1, 1], [np.inf, -np.inf], [1, 1], [np.nan, 1]], bfloat16)
    gradient = np.array([[np.nan, 0], [0, 0], [np.inf, -np.inf], [0, 0]], bfloat16)
    exact = weight.astype(np.float32)
    for _ in range(2):
        updater(0, gradient, weight)
        single(0, gradient.astype(np.float32), exact)
        assert np.isnan(exact).any()
        np.testing.assert_array_equal(weight.astype(np.float32), exact)


def test_a_copied_updater_does_not_write_the_copy_of_the_first(half):
    updater, rounded = updater_of(), np.zeros(3, half)
    updater.set_copy(0, rounded)
    for other in (copy.deepcopy(updater), pickle.loads(pickle.dumps(updater))):
        other(0, np.ones(3, np.float32), np.ones(3, np.float32))
    assert (rounded == 0).all()


@every_form
def test_a_mapped_weight_is_updated_in_place(form, tmp_path, bfloat16):
    weight = np.memmap(tmp_path / "weight", bfloat16, "w+", shape=(6,))
    weight[:] = 1
    updater, other = updater_of(**FORMS[form]), np.ones(6, bfloat16)
    updater(0, np.ones(6, bfloat16), weight)
    updater_of(**FORMS[form])(0, np.ones(6, bfloat16), other)
    np.testing.assert_array_equal(weight, other)
    assert {type(array) for array in flat(updater.states[0])} == {np.ndarray}


@pytest.mark.parametrize("state", [None, np.ones(3, np.float32), (np.ones(3, np.float32),) * 3])
def test_a_state_without_a_master_is_refused(state, half):
    updater, weight = updater_of(multi_precision=True), np.ones(3, half)
    updater(0, np.ones(3, half), weight)
    updater.states[0] = state
    with pytest.raises(ValueError, match="index 0: the state of a weight with a master must be a"):
        updater(0, np.ones(3, half), weight)
    assert updater.optimizer._index_update_count == {0: 1}


@pytest.mark.parametrize(("argument", "value"), [("rounding", "up"), ("master", "float64")])
def test_unknown_forms_are_refused(argument, value):
    with pytest.raises(ValueError, match=f"{argument} must be one of .*, got '{value}'"):
        optimizer.SGD(**{argument: value})
